//! A folder whose tokenizer has any bytes.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| {
    yunta_fuzz::read_everything(yunta_fuzz::folder_with("tokenizer.json", data).path());
});

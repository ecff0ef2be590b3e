//! A folder whose weights have any bytes.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| {
    yunta_fuzz::read_everything(yunta_fuzz::folder_with("model.safetensors", data).path());
});

//! A folder whose chat template has any bytes.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| {
    yunta_fuzz::read_everything(yunta_fuzz::folder_with("chat_template.jinja", data).path());
});

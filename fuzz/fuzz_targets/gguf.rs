//! A GGUF file of any bytes.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| {
    let folder = tempfile::tempdir().expect("a folder for temporary files");
    let path = folder.path().join("model.gguf");
    std::fs::write(&path, data).expect("space for temporary files");
    yunta_fuzz::read_everything(&path);
});

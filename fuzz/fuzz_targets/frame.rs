//! The header of a frame between ranks, of any bytes: what is read is what would be written.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| {
    if let Some(header) = data.first_chunk() {
        yunta_comm::fuzz_header(header);
    }
});

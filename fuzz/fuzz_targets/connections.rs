#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| transfer_engine_fuzz::connections::run(data));

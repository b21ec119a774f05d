//! What the fuzz targets do with one input. `tests/fuzz_corpus.rs` includes this file and runs the same functions over the committed
//! corpus on the stable toolchain.
//!
//! Every function takes any bytes, panics if the library breaks a promise, and leaves nothing behind that the next input could notice.
//! Engines and listeners are made once per process and are on loopback.

pub mod addresses;
pub mod configuration;
pub mod connections;
pub mod data_replies;
pub mod data_requests;
pub mod descriptors;
pub mod entry_points;
pub mod handshake_replies;
pub mod handshake_requests;
pub mod topologies;

mod arena;
mod input;
mod loopback;

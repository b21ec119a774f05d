//! The C boundary: the only `extern "C"` functions of the library.
//!
//! | module | what is in it |
//! |---|---|
//! | [`te`] | our interface, `include/te.h` |
//! | [`mooncake`] | upstream's interface, `include/transfer_engine_c.h` |
//! | `guard` | what every function does: panics, codes, the text of the last error |
//! | `handle` | the tables of what C has handles of |
//! | `alias` | addresses of the program that stand for handles |
//! | `growth` | structs that may be smaller or larger than we know them |
//! | `memory`, `text`, `messages` | what C passes: ranges and arrays, strings, lists of notifications |
//! | `shutdown` | `enableGracefulShutdown` |
//!
//! Every function runs through `guard::call` or `guard::call_engine`. Pointers of C are read and written here
//! and nowhere else; below, memory of the host program is a [`MemoryRange`](crate::sys::MemoryRange). Both
//! headers are generated from [`te`] and [`mooncake`], texts included, so these speak to readers of C;
//! `tests/headers.rs` keeps them equal.
#![allow(unsafe_code)]
// What a caller in C must keep to is said in the words of the headers, not under a heading of rustdoc.
#![allow(clippy::missing_safety_doc)]

pub mod mooncake;
pub mod te;

mod alias;
mod growth;
mod guard;
mod handle;
mod memory;
mod messages;
mod shutdown;
mod text;

//! The few system-call wrappers of the library and its memory copies.
//!
//! Everything here is safe to call: what a wrapper needs to be promised is carried by a type, such as [`MemoryRange`].
//! This is one of the few rooms that may hold `unsafe`.
#![allow(unsafe_code)]

pub mod arena;
pub mod background;
pub mod clock;
pub mod device_memory;
pub mod epoll;
pub mod event;
pub mod fork;
pub mod interfaces;
pub mod limits;
pub mod memory;
pub mod pages;
pub mod peer;
pub mod pinning;
pub mod policy;
pub mod process;
pub mod signals;
pub mod socket;
pub mod streaming;
pub mod thread;

pub use memory::MemoryRange;

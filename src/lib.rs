//! Mooncake's Transfer Engine, in Rust: registers memory and moves it between the processes of a cluster.
//!
//! Engines written in C and C++ use it through `te.h` and `transfer_engine_c.h`; Rust programs use [`engine::Engine`].
//!
//! The rooms, each of which may call any room below it and none above:
//!
//! | room | what is in it |
//! |---|---|
//! | [`capi`] | the only `extern "C"` functions |
//! | [`engine`] | composition root: life cycle, transports, segments |
//! | [`pool`] | staging buffers: memory that is registered once and lent out |
//! | [`registration`] | registering and unregistering with every transport |
//! | [`transfer`] | batches and tasks: completion, deadlines, cancel |
//! | [`transport`] | how bytes move: [`transport::tcp`], [`transport::local`], `transport::rdma` (feature `rdma`) |
//! | [`handshake`] | the small request channel between engines: descriptors, notify, probe |
//! | [`metadata`] | segment descriptors and their JSON; metadata servers |
//! | [`topology`] | which NICs serve which memory |
//! | [`registry`] | registered memory regions: the index, region states, in-flight guards |
//! | [`telemetry`] | counters and the log |
//! | [`config`] | one table of every environment variable |
//! | [`error`] | the error type |
//! | [`sys`] | system calls and the memory copy |

pub mod capi;
pub mod config;
pub mod engine;
pub mod error;
pub mod handshake;
pub mod metadata;
pub mod pool;
pub mod registration;
pub mod registry;
pub mod sys;
pub mod telemetry;
pub mod topology;
pub mod transfer;
pub mod transport;

pub use error::{Code, Error, Result};

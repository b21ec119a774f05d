//! Transfer engine: registers memory of this process and moves it to and from the memory of other processes.
//!
//! An engine has a name, under which peers open it as a *segment*. A process registers the memory that peers
//! may read and write, opens the segments of its peers, and asks for transfers between its own memory and
//! ranges of theirs: many at once in a batch, synchronously or with a status to poll or wait for. A transfer
//! is over only when the engine will not touch its memory again.
//!
//! A program that writes a buffer into a peer's memory, without the checks of the returned values:
//!
//! ```c
//! te_engine *engine;
//! te_segment peer;
//! te_memory_region target = {.struct_size = sizeof target};
//! size_t count;
//!
//! te_engine_create(NULL, &engine);
//! te_register_local_memory(engine, buffer, length, NULL);
//! te_open_segment(engine, "10.0.0.7:15002", &peer);
//! te_list_segment_memory(engine, peer, &target, sizeof target, 1, &count);
//!
//! te_transfer_request request = {
//!     .opcode = TE_WRITE, .local = buffer, .segment = peer, .remote_addr = target.addr, .length = length};
//! if (te_batch_transfer(engine, &request, sizeof request, 1, NULL, NULL, 0) != 0)
//!     fprintf(stderr, "%s\n", te_last_error());
//!
//! te_engine_destroy(engine);
//! ```
//!
//! Conventions
//!
//! Results. Functions return a te_status: 0, or one of the negative TE_ERR_ numbers. After a failure
//! te_last_error() gives its text. Outputs are the last parameters and are written only on success, unless
//! the function says otherwise.
//!
//! Texts. Strings are NUL-terminated UTF-8, are read during the call only, and may not be NULL unless that is
//! said to mean something. Locations and the texts of notifications may be any bytes; what is not UTF-8 in
//! them is replaced by U+FFFD.
//!
//! Structs that grow. Later versions add fields at the end of structs, never elsewhere, so a program and a
//! library of different versions work together. Structs that are passed alone begin with `struct_size`: set
//! it to sizeof the struct, and the rest to zero before setting fields. Functions that take arrays of structs
//! take the size of one element as well. The library reads fields that the caller's struct does not have as
//! their defaults. It refuses a struct that is larger than it knows with TE_ERR_INVALID_ARGUMENT if one of
//! the unknown bytes of an input is not zero; unknown bytes of an output are set to zero. Sizes below that of
//! the first version or above 4096 are refused. Fields named `reserved` must be zero. A NULL pointer to an
//! options struct stands for all defaults.
//!
//! Handles. Engines, pools, topologies and stores are keys, not addresses; segments, batches and leases are
//! numbers. One that was destroyed, freed or never made gives TE_ERR_INVALID_HANDLE, and a number is not used
//! again for something else. The handle of an engine serves the functions of transfer_engine_c.h as well, and
//! the other way round.
//!
//! Threads. Any thread may call any function at any time, also on the same engine, batch or segment, unless a
//! function says otherwise. te_engine_destroy wakes up the threads that wait in other calls on the engine.
//!
//! Memory. The memory of a transfer must stay valid until the transfer is over, registered memory until it is
//! unregistered. Memory of the caller may be freed once te_unregister_local_memory has returned 0.
//!
//! Processes. A child made by fork() cannot use its parent's engines, pools, topologies and stores: calls give
//! TE_ERR_FORKED. It may create its own.
//!
//! Signals. The library installs no signal handler (but see enableGracefulShutdown), never ends the process,
//! and never writes to standard output.

// The text above, and the module text of every section, are the prose of include/te.h, which tests/headers.rs puts together.

// Types and constants carry their names of C.
#![allow(non_camel_case_types)]

use crate::capi::guard;
use crate::engine::Engine;
use crate::error::Result;

pub mod batch;
pub mod configuration;
pub mod engine;
pub mod memory;
pub mod notification;
pub mod pool;
pub mod segment;
pub mod statistics;
pub mod status;
pub mod store;
pub mod topology;
pub mod transfer;

use engine::te_engine;
use status::{TE_OK, te_status};

/// Runs a function of this interface that needs no engine.
fn call(body: impl FnOnce() -> Result<()>) -> te_status {
    guard::call(guard::negative, || body().map(|()| TE_OK))
}

/// Runs a function of this interface on an engine.
fn with(engine: *mut te_engine, body: impl FnOnce(&Engine) -> Result<()>) -> te_status {
    guard::call_engine(engine.cast(), guard::negative, |engine| body(engine).map(|()| TE_OK))
}

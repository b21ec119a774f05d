//! Two engines in one process, a WRITE over TCP between them, and a check of the bytes.

// Memory is given to the engine by its address, and somebody must vouch for it.
#![allow(unsafe_code)]

use std::error::Error;

use transfer_engine::config::Config;
use transfer_engine::engine::{Engine, EngineOptions, MemoryOptions};
use transfer_engine::sys::MemoryRange;
use transfer_engine::transfer::{Hints, Request, State, SubmitOptions};
use transfer_engine::transport::Opcode;

fn main() -> Result<(), Box<dyn Error>> {
    let mut source = vec![7u8; 1 << 20];
    let mut target = vec![0u8; 1 << 20];
    // SAFETY: both vectors outlive the engines, and nobody else touches them while the transfer runs.
    let [local, remote] = unsafe { [range_of(&mut source)?, range_of(&mut target)?] };

    let options = EngineOptions { metadata: "P2PHANDSHAKE".into(), server_name: "127.0.0.1".into(), ..EngineOptions::default() };
    let initiator = Engine::create(&options, Config::from_environment())?;
    let server = Engine::create(&options, Config::from_environment())?;
    initiator.install_transport("tcp", None)?;
    server.install_transport("tcp", None)?;

    let memory = MemoryOptions { location: "*".into(), remote_accessible: true, counted: false, parallelism: None, publish: true };
    server.register(remote, &memory)?;
    let segment = initiator.open_segment(&server.name())?;
    let request = Request { opcode: Opcode::Write, local, segment, remote_address: remote.address(), hints: Hints::default() };
    for status in initiator.transfer(&[request], SubmitOptions::default())? {
        if let Some(error) = status.error {
            return Err(error.into());
        }
        assert_eq!(status.state, State::Completed);
    }
    server.unregister(remote.address())?;

    assert_eq!(source, target);
    println!("moved {} bytes to {}", target.len(), server.name());
    Ok(())
}

/// The memory of a vector, put into the engine's hands.
///
/// # Safety
/// The vector must stay where it is, and be left alone, for as long as the engine uses the range.
unsafe fn range_of(memory: &mut Vec<u8>) -> Result<MemoryRange, String> {
    // SAFETY: as for this function.
    unsafe { MemoryRange::new(memory.as_mut_ptr() as u64, memory.len() as u64) }.ok_or_else(|| "the range wraps".into())
}

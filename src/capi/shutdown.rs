//! `enableGracefulShutdown`: engines that are shut down when the process ends.

use crate::capi::{guard, handle};
use crate::error::{Code, Error, Result};
use crate::sys::signals;

/// Has the engine shut down at `exit()`, SIGTERM and SIGINT.
pub fn enable(engine: u64) -> Result<()> {
    handle::mark(engine)?;
    signals::run_at_end(shut_down_marked)
        .map_err(|error| Error::new(Code::Limit, format!("cannot watch for the end of the process: {error}")))
}

/// Shuts down all engines for which that was asked. Does not wait for calls on them, since the process ends.
fn shut_down_marked() {
    for engine in handle::take_marked() {
        guard::call(
            |_| (),
            || {
                engine.shutdown();
                Ok(())
            },
        );
    }
}

//! Starts the threads of the library: all of them, here.
//!
//! None of them takes a signal. A handler of the host program would otherwise run on whatever thread the kernel picks, with the little
//! stack and the locks that it has, and a thread that the program expects to be interrupted would sleep on.
//!
//! A thread inherits the mask of the one that starts it, so the caller's mask is filled before and put back after: there is no moment
//! at which the new thread could take one. What comes for the caller meanwhile is delivered when its mask is back. The signals that a
//! thread raises by its own fault stay open, so that a fault ends the process as the program has arranged; a thread that had them
//! blocked would be killed without a word.
//!
//! Cost: two system calls beside those of starting.

use std::io;
use std::thread::JoinHandle;

/// What an instruction raises on the thread that runs it, and never on another one.
const FAULTS: [i32; 6] = [libc::SIGSEGV, libc::SIGBUS, libc::SIGFPE, libc::SIGILL, libc::SIGTRAP, libc::SIGSYS];

/// Starts a thread that takes no signals. `name` is shown by `top -H`; 15 bytes of it.
///
/// # Errors
/// What the system said: there is no room for another thread.
pub fn spawn(name: impl Into<String>, body: impl FnOnce() + Send + 'static) -> io::Result<JoinHandle<()>> {
    // SAFETY: the sets are initialised before they are used, and the mask of this thread is put back.
    unsafe {
        let mut blocked: libc::sigset_t = std::mem::zeroed();
        let mut before: libc::sigset_t = std::mem::zeroed();
        libc::sigfillset(&mut blocked);
        for fault in FAULTS {
            libc::sigdelset(&mut blocked, fault);
        }
        libc::pthread_sigmask(libc::SIG_SETMASK, &blocked, &mut before);
        let spawned = std::thread::Builder::new().name(name.into()).spawn(body);
        libc::pthread_sigmask(libc::SIG_SETMASK, &before, std::ptr::null_mut());
        spawned
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;

    use super::*;

    fn blocked() -> Vec<i32> {
        // SAFETY: the set is initialised by the call.
        unsafe {
            let mut mask: libc::sigset_t = std::mem::zeroed();
            libc::pthread_sigmask(libc::SIG_BLOCK, std::ptr::null(), &mut mask);
            (1..=libc::SIGRTMAX()).filter(|signal| libc::sigismember(&mask, *signal) == 1).collect()
        }
    }

    #[test]
    fn threads_block_what_can_be_blocked_but_faults_and_the_caller_keeps_its_mask() {
        let (tell, told) = mpsc::channel();
        let before = blocked();
        let thread = spawn("te-test", move || tell.send((std::thread::current().name().map(str::to_owned), blocked())).unwrap());
        assert_eq!(blocked(), before);
        let (name, theirs) = told.recv().unwrap();
        thread.unwrap().join().unwrap();
        assert_eq!(name.as_deref(), Some("te-test"));
        for signal in 1..=libc::SIGRTMAX() {
            // Two cannot be blocked, and the C library keeps those before SIGRTMIN to itself.
            let never = [libc::SIGKILL, libc::SIGSTOP].contains(&signal) || (32..libc::SIGRTMIN()).contains(&signal);
            assert_eq!(theirs.contains(&signal), !never && !FAULTS.contains(&signal), "signal {signal}");
        }
    }

    #[test]
    fn a_thread_whose_caller_blocks_faults_has_them_open() {
        // SAFETY: the set is initialised before it is used, and is the mask of a thread that ends.
        let theirs = std::thread::spawn(|| unsafe {
            let mut all: libc::sigset_t = std::mem::zeroed();
            libc::sigfillset(&mut all);
            libc::pthread_sigmask(libc::SIG_SETMASK, &all, std::ptr::null_mut());
            let (tell, told) = mpsc::channel();
            spawn("te-test", move || tell.send(blocked()).unwrap()).unwrap().join().unwrap();
            assert!(blocked().contains(&libc::SIGSEGV), "the caller's mask is put back");
            told.recv().unwrap()
        });
        let theirs = theirs.join().unwrap();
        assert!(FAULTS.iter().all(|fault| !theirs.contains(fault)), "{theirs:?}");
    }
}

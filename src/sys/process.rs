//! What the log needs of the running thread and process.

/// The kernel's number of the calling thread, as `ps -L` and debuggers show it. One system call, right also after a fork.
pub fn thread_id() -> i32 {
    // SAFETY: takes nothing and cannot fail.
    unsafe { libc::gettid() }
}

/// Writes to standard error in one call and ignores that it cannot be written, for example because it is closed.
///
/// Takes no lock, as the standard library's does, so that a forked child never waits for a thread that it does not have.
pub fn write_standard_error(text: &[u8]) {
    // SAFETY: the kernel only reads the bytes of the slice.
    let _ = unsafe { libc::write(libc::STDERR_FILENO, text.as_ptr().cast(), text.len()) };
}

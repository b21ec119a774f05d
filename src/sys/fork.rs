//! Tells whether this process was forked from the one that made something.
//!
//! A page is marked `MADV_WIPEONFORK`, so that it reads as zero in a child of `fork()`. It holds the
//! generation of its process; whoever finds a zero draws the next number. No lock is taken, so a child cannot
//! hang on one that a thread of its parent held, and everything but the first call is safe in a signal
//! handler. Cost: two loads. Where the kernel cannot wipe pages (before Linux 4.14), the word holds the
//! process id beside the generation, at the cost of a `getpid` for each look.

use std::sync::atomic::{AtomicPtr, AtomicU32, AtomicU64, Ordering};

/// The page's only word. Null until the first look; [`UNWIPED`] if there is no such page.
static PAGE: AtomicPtr<AtomicU64> = AtomicPtr::new(std::ptr::null_mut());
/// What is used instead of the page: process id in the upper half, generation in the lower.
static UNWIPED: AtomicU64 = AtomicU64::new(0);
/// The last generation that was drawn, here or in an ancestor.
static DRAWN: AtomicU32 = AtomicU32::new(0);

/// The generation of this process: never 0, and always more than that of its parent, if the parent ever
/// asked.
pub fn generation() -> u32 {
    let page = PAGE.load(Ordering::Acquire);
    let page = if page.is_null() { make_page() } else { page };
    if std::ptr::eq(page, &UNWIPED) {
        return unwiped_generation(std::process::id());
    }
    // SAFETY: the page is never unmapped.
    let word = unsafe { &*page };
    match word.load(Ordering::Acquire) as u32 {
        0 => draw(word, 0, 0),
        generation => generation,
    }
}

/// Whether this process was forked from the one that was told `generation`, or from a child of it.
pub fn in_child_of(generation: u32) -> bool {
    generation < self::generation()
}

/// Puts the next generation into `word`, which held `seen`, unless another thread was faster; `mark` goes
/// into the upper half.
fn draw(word: &AtomicU64, seen: u64, mark: u32) -> u32 {
    let next = DRAWN.fetch_add(1, Ordering::Relaxed) + 1;
    match word.compare_exchange(seen, (u64::from(mark) << 32) | u64::from(next), Ordering::AcqRel, Ordering::Acquire) {
        Ok(_) => next,
        Err(other) => other as u32,
    }
}

fn unwiped_generation(process: u32) -> u32 {
    let seen = UNWIPED.load(Ordering::Acquire);
    if (seen >> 32) as u32 == process { seen as u32 } else { draw(&UNWIPED, seen, process) }
}

/// Maps the page, or decides to go without one.
fn make_page() -> *mut AtomicU64 {
    const SIZE: usize = size_of::<AtomicU64>();
    // SAFETY: a new anonymous mapping touches nothing; it is unmapped again only where no other thread has seen it.
    unsafe {
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
        let page = libc::mmap(std::ptr::null_mut(), SIZE, libc::PROT_READ | libc::PROT_WRITE, flags, -1, 0);
        let wiped = page != libc::MAP_FAILED && libc::madvise(page, SIZE, libc::MADV_WIPEONFORK) == 0;
        let made = if wiped { page.cast() } else { (&raw const UNWIPED).cast_mut() };
        let before = PAGE.compare_exchange(std::ptr::null_mut(), made, Ordering::AcqRel, Ordering::Acquire);
        if page != libc::MAP_FAILED && (!wiped || before.is_err()) {
            libc::munmap(page, SIZE);
        }
        before.err().unwrap_or(made)
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use std::panic::{AssertUnwindSafe, catch_unwind};

    use super::*;

    /// The exit code of a child that runs `body`, which may take no lock that another thread can hold. A child that hangs is ended.
    pub fn fork_and_run(body: impl FnOnce() -> i32) -> i32 {
        // SAFETY: the child does what `body` does and ends without running anything of its parent.
        unsafe {
            match libc::fork() {
                0 => {
                    libc::alarm(20);
                    libc::_exit(catch_unwind(AssertUnwindSafe(body)).unwrap_or(101))
                }
                child => {
                    assert!(child > 0, "fork failed");
                    let mut status = 0;
                    assert_eq!(libc::waitpid(child, &mut status, 0), child);
                    assert!(libc::WIFEXITED(status), "the child ended by a signal");
                    libc::WEXITSTATUS(status)
                }
            }
        }
    }

    #[test]
    fn a_generation_stays_within_a_process() {
        let first = generation();
        assert_ne!(first, 0);
        let others: Vec<_> = (0..4).map(|_| std::thread::spawn(generation)).collect();
        for other in others {
            assert_eq!(other.join().unwrap(), first);
        }
        assert!(!in_child_of(first));
    }

    #[test]
    fn children_and_their_children_have_generations_of_their_own() {
        let parent = generation();
        let code = fork_and_run(|| {
            let child = generation();
            if !in_child_of(parent) || child <= parent || generation() != child {
                return 1;
            }
            fork_and_run(|| if in_child_of(child) && in_child_of(parent) && generation() > child { 42 } else { 2 })
        });
        assert_eq!(code, 42);
        assert_eq!(generation(), parent);
    }

    #[test]
    fn process_ids_tell_generations_where_pages_are_not_wiped() {
        let here = unwiped_generation(100);
        assert_eq!(unwiped_generation(100), here);
        let child = unwiped_generation(101);
        assert!(child > here);
        assert_eq!(unwiped_generation(101), child);
    }
}

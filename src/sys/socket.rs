//! Moving bytes between sockets and memory: scatter and gather over buffers of ours and ranges of the host program.
//!
//! Every call here is one non-blocking system call that raises no signal: a lost peer is an error, a bad page is `EFAULT`.

use std::io;
use std::marker::PhantomData;
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, AsRawFd};

use super::memory::MemoryRange;

/// Most pieces that one call moves.
pub const MAX_PIECES: usize = 64;

/// More than any call moves (`MAX_RW_COUNT`).
const MOST: u64 = 1 << 31;

/// Pieces to be sent, in order.
pub struct Gather<'a> {
    pieces: [MaybeUninit<libc::iovec>; MAX_PIECES],
    count: usize,
    length: u64,
    borrowed: PhantomData<&'a [u8]>,
}

impl<'a> Default for Gather<'a> {
    fn default() -> Self {
        Gather { pieces: [const { MaybeUninit::uninit() }; MAX_PIECES], count: 0, length: 0, borrowed: PhantomData }
    }
}

impl<'a> Gather<'a> {
    /// Whether no further piece fits.
    pub fn is_full(&self) -> bool {
        self.count == MAX_PIECES
    }

    /// Bytes of all pieces.
    pub fn length(&self) -> u64 {
        self.length
    }

    /// Adds bytes of ours. Nothing is added when it is full.
    pub fn push_bytes(&mut self, bytes: &'a [u8]) {
        self.push(bytes.as_ptr() as u64, bytes.len() as u64);
    }

    /// Adds a range of the host program.
    pub fn push_memory(&mut self, range: MemoryRange) {
        self.push(range.address(), range.length());
    }

    fn push(&mut self, address: u64, length: u64) {
        // No call moves more than MOST bytes, so what is cut off here is never reached, and sums cannot overflow.
        let length = length.min(MOST);
        if length > 0 && !self.is_full() {
            self.pieces[self.count].write(libc::iovec { iov_base: address as *mut libc::c_void, iov_len: length as usize });
            self.count += 1;
            self.length += length;
        }
    }

    fn pieces(&self) -> &[libc::iovec] {
        // SAFETY: `push` has written the first `count`.
        unsafe { std::slice::from_raw_parts(self.pieces.as_ptr().cast(), self.count) }
    }

    /// Sends as much as fits into the socket's buffer. `WouldBlock` when nothing does.
    pub fn send(&self, socket: &impl AsFd) -> io::Result<u64> {
        #[cfg(test)]
        SENDS.set(SENDS.get() + 1);
        let (socket, flags) = (socket.as_fd().as_raw_fd(), libc::MSG_NOSIGNAL | libc::MSG_DONTWAIT);
        // One piece is a plain call: the kernel has no message header and no vector to copy and check, a tenth of the call.
        if let [piece] = self.pieces() {
            // SAFETY: the piece is borrowed for 'a or promised by MemoryRange; the kernel only reads it and checks every page.
            return retry(|| unsafe { libc::send(socket, piece.iov_base, piece.iov_len, flags) });
        }
        // SAFETY: all-zero is a valid msghdr.
        let mut message: libc::msghdr = unsafe { std::mem::zeroed() };
        message.msg_iov = self.pieces().as_ptr().cast_mut();
        message.msg_iovlen = self.count as _;
        // SAFETY: as above, for all pieces.
        retry(|| unsafe { libc::sendmsg(socket, &raw const message, flags) })
    }
}

/// Places to receive into, in order.
pub struct Scatter<'a> {
    gather: Gather<'a>,
    exclusive: PhantomData<&'a mut [u8]>,
}

impl<'a> Default for Scatter<'a> {
    fn default() -> Self {
        Scatter { gather: Gather::default(), exclusive: PhantomData }
    }
}

impl<'a> Scatter<'a> {
    /// Whether no further piece fits.
    pub fn is_full(&self) -> bool {
        self.gather.is_full()
    }

    /// Bytes of all pieces.
    pub fn length(&self) -> u64 {
        self.gather.length
    }

    /// Number of pieces.
    pub fn pieces(&self) -> usize {
        self.gather.count
    }

    /// Adds a buffer of ours.
    pub fn push_buffer(&mut self, buffer: &'a mut [u8]) {
        self.gather.push(buffer.as_mut_ptr() as u64, buffer.len() as u64);
    }

    /// Adds a range of the host program.
    pub fn push_memory(&mut self, range: MemoryRange) {
        self.gather.push_memory(range);
    }

    /// Receives what is there, at most what fits. 0: the peer has closed its side. `WouldBlock`: nothing is there yet.
    pub fn receive(&mut self, socket: &impl AsFd) -> io::Result<u64> {
        let (socket, flags) = (socket.as_fd().as_raw_fd(), libc::MSG_DONTWAIT);
        if let [piece] = self.gather.pieces() {
            // SAFETY: the piece is exclusively borrowed for 'a or promised by MemoryRange; the kernel checks every page.
            return retry(|| unsafe { libc::recv(socket, piece.iov_base, piece.iov_len, flags) });
        }
        // SAFETY: all-zero is a valid msghdr.
        let mut message: libc::msghdr = unsafe { std::mem::zeroed() };
        message.msg_iov = self.gather.pieces().as_ptr().cast_mut();
        message.msg_iovlen = self.gather.count as _;
        // SAFETY: as above, for all pieces.
        retry(|| unsafe { libc::recvmsg(socket, &raw mut message, flags) })
    }
}

/// Looks at received bytes without taking them. 0: the peer has closed its side.
pub fn peek(socket: &impl AsFd, buffer: &mut [u8]) -> io::Result<usize> {
    receive(socket, buffer.as_mut_ptr().cast(), buffer.len(), libc::MSG_PEEK)
}

/// Throws away up to `length` received bytes, and up to 16 KiB at once (TCP only: no byte is copied). 0: the peer has closed its side.
pub fn discard(socket: &impl AsFd, length: usize) -> io::Result<usize> {
    // The kernel would take a null pointer, too; tools that watch system calls would not.
    let mut unused = MaybeUninit::<[u8; 16 << 10]>::uninit();
    receive(socket, unused.as_mut_ptr().cast(), length.min(size_of_val(&unused)), libc::MSG_TRUNC)
}

/// Bytes sent that the other side's kernel has not acknowledged; the end of the stream counts as one. TCP only.
pub fn unacknowledged(socket: &impl AsFd) -> io::Result<u64> {
    let mut bytes: libc::c_int = 0;
    // SAFETY: TIOCOUTQ writes one int to where the pointer points.
    match unsafe { libc::ioctl(socket.as_fd().as_raw_fd(), libc::TIOCOUTQ, &raw mut bytes) } {
        0 => Ok(bytes as u64),
        _ => Err(io::Error::last_os_error()),
    }
}

fn receive(socket: &impl AsFd, buffer: *mut libc::c_void, length: usize, flags: libc::c_int) -> io::Result<usize> {
    // SAFETY: `buffer` has room for `length` bytes.
    retry(|| unsafe { libc::recv(socket.as_fd().as_raw_fd(), buffer, length, flags | libc::MSG_DONTWAIT) })
        .map(|bytes| bytes as usize)
}

#[cfg(test)]
thread_local! {
    static SENDS: std::cell::Cell<u64> = const { std::cell::Cell::new(0) };
}

/// How often this thread has called [`Gather::send`].
#[cfg(test)]
pub fn sends_of_this_thread() -> u64 {
    SENDS.get()
}

/// The outcome of a call, made again as long as a signal interrupts it.
fn retry(mut call: impl FnMut() -> isize) -> io::Result<u64> {
    loop {
        match u64::try_from(call()).map_err(|_| io::Error::last_os_error()) {
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            other => return other,
        }
    }
}

#[cfg(test)]
mod tests {
    use std::net::{TcpListener, TcpStream};

    use super::*;

    fn pair() -> (TcpStream, TcpStream) {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let near = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        (near, listener.accept().unwrap().0)
    }

    fn receive_all(socket: &TcpStream, buffer: &mut [u8]) {
        let mut done = 0;
        while done < buffer.len() {
            let mut scatter = Scatter::default();
            scatter.push_buffer(&mut buffer[done..]);
            match scatter.receive(socket) {
                Ok(0) => panic!("closed"),
                Ok(received) => done += received as usize,
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => std::thread::yield_now(),
                Err(error) => panic!("{error}"),
            }
        }
    }

    #[test]
    fn pieces_arrive_in_order() {
        let (near, far) = pair();
        let mut gather = Gather::default();
        for piece in [&b"one"[..], b"", b"two"] {
            gather.push_bytes(piece);
        }
        assert_eq!((gather.length(), gather.send(&near).unwrap()), (6, 6));
        let mut received = [0; 6];
        receive_all(&far, &mut received);
        assert_eq!(&received, b"onetwo");
    }

    #[test]
    fn peeked_bytes_stay_and_discarded_ones_go() {
        let (near, far) = pair();
        let mut gather = Gather::default();
        gather.push_bytes(b"abcdef");
        gather.send(&near).unwrap();
        let mut looked = [0; 4];
        while peek(&far, &mut looked).is_err() {
            std::thread::yield_now();
        }
        assert_eq!(&looked, b"abcd");
        assert_eq!(discard(&far, 3).unwrap(), 3);
        let mut rest = [0; 3];
        receive_all(&far, &mut rest);
        assert_eq!(&rest, b"def");
        drop(near);
        let mut none = [0; 1];
        while peek(&far, &mut none).is_err() {
            std::thread::yield_now();
        }
        assert_eq!(peek(&far, &mut none).unwrap(), 0);
    }

    #[test]
    fn bytes_are_unacknowledged_while_nobody_takes_them() {
        let (near, far) = pair();
        near.set_nonblocking(true).unwrap();
        let piece = vec![0; 1 << 20];
        let mut gather = Gather::default();
        gather.push_bytes(&piece);
        while gather.send(&near).is_ok() {}
        assert!(unacknowledged(&near).unwrap() > 0);
        let mut buffer = vec![0; 1 << 20];
        while unacknowledged(&near).unwrap() > 0 {
            let mut scatter = Scatter::default();
            scatter.push_buffer(&mut buffer);
            let _ = scatter.receive(&far);
        }
    }

    #[test]
    fn pieces_longer_than_any_call_are_cut() {
        let mut gather = Gather::default();
        for _ in 0..MAX_PIECES {
            // SAFETY: nothing is sent.
            gather.push_memory(unsafe { MemoryRange::new(1, u64::MAX) }.unwrap());
        }
        assert_eq!(gather.length(), MOST * MAX_PIECES as u64);
    }

    #[test]
    fn bad_pages_are_an_error_and_no_signal() {
        let (near, far) = pair();
        // SAFETY: page 0 is nobody's; the test asks the kernel to refuse it.
        let nowhere = unsafe { MemoryRange::new(16, 4096) }.unwrap();
        let mut gather = Gather::default();
        gather.push_memory(nowhere);
        assert_eq!(gather.send(&near).unwrap_err().raw_os_error(), Some(libc::EFAULT));
        let mut gather = Gather::default();
        gather.push_bytes(b"x");
        gather.send(&near).unwrap();
        loop {
            let mut scatter = Scatter::default();
            scatter.push_memory(nowhere);
            match scatter.receive(&far) {
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => std::thread::yield_now(),
                other => break assert_eq!(other.unwrap_err().raw_os_error(), Some(libc::EFAULT)),
            }
        }
    }

    #[test]
    fn a_lost_peer_raises_no_signal() {
        let (near, far) = pair();
        drop(far);
        let mut gather = Gather::default();
        gather.push_bytes(b"x");
        while gather.send(&near).is_ok() {
            std::thread::yield_now();
        }
    }
}

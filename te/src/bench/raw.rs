//! Plain sockets over the loopback address: what the machine itself can do, as the limit beside the engine's figures.
//!
//! A client says in a header of three 64-bit numbers how long its messages are, how many come, and whether each is acknowledged by
//! one byte, or only the last. Buffers are as large as the messages, as with the engine, so that caches do not flatter the sockets.

use std::io::{self, Read, Write};
use std::net::{Ipv4Addr, TcpListener, TcpStream};
use std::time::{Duration, Instant};

/// Serves any number of connections on threads of their own, until the process ends. Returns the port. Longer messages than
/// `longest` are refused.
pub fn serve(longest: usize) -> io::Result<u16> {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0))?;
    let port = listener.local_addr()?.port();
    std::thread::Builder::new().name("raw-accept".to_string()).spawn(move || {
        for stream in listener.incoming().flatten() {
            std::thread::spawn(move || {
                // The client notices and reports what goes wrong.
                let _ = serve_one(stream, longest);
            });
        }
    })?;
    Ok(port)
}

fn serve_one(mut stream: TcpStream, longest: usize) -> io::Result<()> {
    stream.set_nodelay(true)?;
    let mut header = [0; 24];
    while stream.read_exact(&mut header).is_ok() {
        let number = |index: usize| u64::from_le_bytes(header[index * 8..][..8].try_into().expect("eight bytes"));
        let (size, count, each) = (number(0) as usize, number(1), number(2) != 0);
        if size > longest {
            return Err(io::Error::from(io::ErrorKind::InvalidData));
        }
        let mut buffer = vec![0; size];
        for left in (0..count).rev() {
            stream.read_exact(&mut buffer)?;
            if each || left == 0 {
                stream.write_all(&[1])?;
            }
        }
    }
    Ok(())
}

/// How a client waits for the answer.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Waiting {
    /// Asks again and again.
    Polling,
    /// Sleeps until the kernel wakes it.
    Parked,
}

/// Microseconds of each of `count` round trips: a message of `size` bytes there, one byte back.
pub fn round_trips(port: u16, size: usize, count: u64, waiting: Waiting) -> io::Result<Vec<f64>> {
    let mut stream = connect(port, size, count, true)?;
    stream.set_nonblocking(waiting == Waiting::Polling)?;
    let message = vec![0; size];
    let mut times = Vec::with_capacity(count as usize);
    for _ in 0..count {
        let start = Instant::now();
        let mut sent = 0;
        while sent < size {
            sent += retry(|| stream.write(&message[sent..]))?;
        }
        if retry(|| stream.read(&mut [0]))? == 0 {
            return Err(io::Error::from(io::ErrorKind::UnexpectedEof));
        }
        times.push(start.elapsed().as_secs_f64() * 1e6);
    }
    Ok(times)
}

fn retry(mut call: impl FnMut() -> io::Result<usize>) -> io::Result<usize> {
    loop {
        match call() {
            Err(error) if matches!(error.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted) => std::hint::spin_loop(),
            result => return result,
        }
    }
}

/// MB/s (10^6) of `streams` connections that send messages of `size` bytes side by side, about `total` bytes in all.
pub fn throughput(port: u16, size: usize, total: usize, streams: usize) -> io::Result<f64> {
    let count = (total / streams / size).max(1) as u64;
    let connections: Vec<TcpStream> = (0..streams).map(|_| connect(port, size, count, false)).collect::<io::Result<_>>()?;
    let message = vec![0; size];
    let start = Instant::now();
    std::thread::scope(|scope| {
        let senders: Vec<_> = connections
            .into_iter()
            .map(|mut stream| {
                let message = &message;
                scope.spawn(move || {
                    (0..count).try_for_each(|_| stream.write_all(message))?;
                    stream.read_exact(&mut [0])
                })
            })
            .collect();
        senders.into_iter().try_for_each(|sender| sender.join().map_err(|_| io::Error::other("a sender panicked"))?)
    })?;
    Ok((size as u64 * count * streams as u64) as f64 / start.elapsed().as_secs_f64() / 1e6)
}

fn connect(port: u16, size: usize, count: u64, each: bool) -> io::Result<TcpStream> {
    let mut stream = TcpStream::connect((Ipv4Addr::LOCALHOST, port))?;
    stream.set_nodelay(true)?;
    stream.set_read_timeout(Some(Duration::from_secs(30)))?;
    let header: Vec<u8> = [size as u64, count, u64::from(each)].into_iter().flat_map(u64::to_le_bytes).collect();
    stream.write_all(&header)?;
    Ok(stream)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn round_trips_end_both_ways_of_waiting() {
        let port = serve(1 << 20).unwrap();
        for waiting in [Waiting::Polling, Waiting::Parked] {
            for size in [1, 4096, 1 << 20] {
                let times = round_trips(port, size, 3, waiting).unwrap();
                assert!(times.len() == 3 && times.iter().all(|time| *time > 0.0));
            }
        }
    }

    #[test]
    fn streams_send_what_they_are_told() {
        let port = serve(1 << 20).unwrap();
        assert!(throughput(port, 65536, 1 << 20, 2).unwrap() > 0.0);
        assert!(throughput(port, 1 << 20, 1, 1).unwrap() > 0.0);
    }

    #[test]
    fn messages_that_are_too_long_are_refused() {
        let port = serve(10).unwrap();
        assert!(round_trips(port, 11, 1, Waiting::Parked).is_err());
    }
}

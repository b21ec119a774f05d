//! Plain sockets over the loopback address: what the machine itself can do, as the limit beside the engine's figures.
//!
//! A client says in a header of four 64-bit numbers how long its messages are, how many come, into how many buffers they go in turn,
//! and which [`Exchange`] it wants. The server answers by one byte when its buffers are there. Both
//! sides use as many buffers of the same size as the engine in the same place, so that caches do not flatter the sockets.

use std::fmt;
use std::io::{self, Read, Write};
use std::net::{Ipv4Addr, TcpListener, TcpStream};
use std::time::{Duration, Instant};

use serde::Serialize;
use transfer_engine::sys::epoll::{Epoll, Events, Interest};
use transfer_engine::sys::socket::{Gather, Scatter};

/// Serves any number of connections on threads of their own, until the process ends. Returns the port. More than `longest` bytes of
/// buffers are refused.
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
    let mut header = [0; 32];
    while stream.read_exact(&mut header).is_ok() {
        let number = |index: usize| u64::from_le_bytes(header[index * 8..][..8].try_into().expect("eight bytes"));
        let (size, count, buffers, exchange) = (number(0) as usize, number(1), number(2) as usize, number(3));
        let fits = size.checked_mul(buffers).is_some_and(|bytes| bytes > 0 && bytes <= longest);
        if !fits {
            return Err(io::Error::from(io::ErrorKind::InvalidData));
        }
        // Not zeros: their pages would be made while they are received into.
        let mut memory = vec![1; size * buffers];
        stream.write_all(&[1])?;
        if exchange == Exchange::LikeTheEngine as u64 {
            return serve_like_the_engine(&stream, &mut memory[..size]);
        }
        let mut places = (0..buffers).cycle();
        for left in (0..count).rev() {
            let place = places.next().unwrap_or_default() * size;
            stream.read_exact(&mut memory[place..place + size])?;
            if exchange == Exchange::EachAnswered as u64 || left == 0 {
                stream.write_all(&[1])?;
            }
        }
    }
    Ok(())
}

/// What a client does with its messages.
#[derive(Clone, Copy)]
enum Exchange {
    /// One after the other, the last of which is answered by a byte.
    LastAnswered,
    /// Each is answered by a byte.
    EachAnswered,
    /// Each has a header of its own and is answered by a status, and both sides make the system calls that the engine makes.
    LikeTheEngine,
}

/// Bytes of the engine's header and status.
const HEADER: usize = 24;
const STATUS: usize = 8;

/// Waits for many sockets though there is one, and receives a header, then a body into its place, until the client closes.
fn serve_like_the_engine(stream: &TcpStream, body: &mut [u8]) -> io::Result<()> {
    let epoll = Epoll::new()?;
    epoll.add(stream, Interest::READ, 0)?;
    let mut events = Events::with_capacity(64);
    let mut header = [0; HEADER];
    loop {
        let _ = epoll.wait(&mut events, None)?;
        let mut scatter = Scatter::default();
        scatter.push_buffer(&mut header);
        if scatter.receive(stream)? == 0 {
            return Ok(());
        }
        let mut done = 0;
        while done < body.len() {
            let mut scatter = Scatter::default();
            scatter.push_buffer(&mut body[done..]);
            scatter.push_buffer(&mut header);
            done += retry(|| scatter.receive(stream).map(|received| received as usize))?;
        }
        let mut gather = Gather::default();
        gather.push_bytes(&[1; STATUS]);
        gather.send(stream)?;
    }
}

/// Microseconds of each of `count` round trips by the engine's system calls: header and message there, a status back, the client polling.
pub fn round_trips_like_the_engine(port: u16, size: usize, count: u64) -> io::Result<Vec<f64>> {
    let stream = connect(port, size, count, 1, Exchange::LikeTheEngine)?;
    stream.set_nonblocking(true)?;
    let (header, message) = ([0; HEADER], vec![0; size]);
    let mut times = Vec::with_capacity(count as usize);
    for _ in 0..count {
        let start = Instant::now();
        let mut sent = 0;
        while sent < HEADER + size {
            let mut gather = Gather::default();
            gather.push_bytes(header.get(sent..).unwrap_or_default());
            gather.push_bytes(&message[sent.saturating_sub(HEADER)..]);
            sent += retry(|| gather.send(&stream).map(|sent| sent as usize))?;
        }
        let mut status = [0; STATUS];
        let mut received = 0;
        while received < STATUS {
            std::thread::yield_now();
            let mut scatter = Scatter::default();
            scatter.push_buffer(&mut status[received..]);
            match retry(|| scatter.receive(&stream).map(|received| received as usize))? {
                0 => return Err(io::Error::from(io::ErrorKind::UnexpectedEof)),
                part => received += part,
            }
        }
        times.push(start.elapsed().as_secs_f64() * 1e6);
    }
    Ok(times)
}

/// How whoever submits waits for the end.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Waiting {
    /// Asks again and again.
    Polling,
    /// Sleeps until it is woken.
    Parked,
}

impl fmt::Display for Waiting {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Waiting::Polling => "polling",
            Waiting::Parked => "parked",
        })
    }
}

/// Microseconds of each of `count` round trips: a message of `size` bytes there, one byte back.
pub fn round_trips(port: u16, size: usize, count: u64, waiting: Waiting) -> io::Result<Vec<f64>> {
    let mut stream = connect(port, size, count, 1, Exchange::EachAnswered)?;
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

/// MB/s (10^6) of `streams` connections that send messages side by side, about `total` bytes in all: those in `memory`, of `size`
/// bytes each, of which every stream takes its share and sends it again and again.
pub fn throughput(port: u16, memory: &[u8], size: usize, total: usize, streams: usize) -> io::Result<f64> {
    let messages: Vec<&[u8]> = memory.chunks_exact(size).collect();
    let shares: Vec<&[&[u8]]> = messages.chunks(messages.len().div_ceil(streams)).cycle().take(streams).collect();
    let count = (total / streams / size).max(1) as u64;
    let connect = |share: &&[&[u8]]| connect(port, size, count, share.len(), Exchange::LastAnswered);
    let connections: Vec<TcpStream> = shares.iter().map(connect).collect::<io::Result<_>>()?;
    let start = Instant::now();
    std::thread::scope(|scope| {
        let senders: Vec<_> = connections
            .into_iter()
            .zip(&shares)
            .map(|(mut stream, share)| {
                scope.spawn(move || {
                    let mut messages = share.iter().cycle().take(count as usize);
                    messages.try_for_each(|message| stream.write_all(message))?;
                    stream.read_exact(&mut [0])
                })
            })
            .collect();
        senders.into_iter().try_for_each(|sender| sender.join().map_err(|_| io::Error::other("a sender panicked"))?)
    })?;
    Ok((size as u64 * count * streams as u64) as f64 / start.elapsed().as_secs_f64() / 1e6)
}

fn connect(port: u16, size: usize, count: u64, buffers: usize, exchange: Exchange) -> io::Result<TcpStream> {
    let mut stream = TcpStream::connect((Ipv4Addr::LOCALHOST, port))?;
    stream.set_nodelay(true)?;
    stream.set_read_timeout(Some(Duration::from_secs(30)))?;
    let header: Vec<u8> = [size as u64, count, buffers as u64, exchange as u64].into_iter().flat_map(u64::to_le_bytes).collect();
    stream.write_all(&header)?;
    stream.read_exact(&mut [0])?;
    Ok(stream)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn round_trips_end_in_every_way() {
        let port = serve(1 << 20).unwrap();
        for waiting in [Waiting::Polling, Waiting::Parked] {
            for size in [1, 4096, 1 << 20] {
                let times = round_trips(port, size, 3, waiting).unwrap();
                assert!(times.len() == 3 && times.iter().all(|time| *time > 0.0));
            }
        }
        for size in [1, 4096, 1 << 20] {
            assert_eq!(round_trips_like_the_engine(port, size, 3).unwrap().len(), 3);
        }
    }

    #[test]
    fn streams_send_what_they_are_told() {
        let port = serve(1 << 20).unwrap();
        let memory = vec![0; 1 << 20];
        for (bytes, size, total, streams) in [(1 << 20, 65536, 4 << 20, 2), (65536, 65536, 1 << 20, 2), (1 << 20, 1 << 20, 1, 1)] {
            assert!(throughput(port, &memory[..bytes], size, total, streams).unwrap() > 0.0);
        }
    }

    #[test]
    fn messages_that_are_too_long_are_refused() {
        let port = serve(10).unwrap();
        assert!(round_trips(port, 11, 1, Waiting::Parked).is_err());
    }
}

//! The frame of requests and replies.
//!
//! | bytes | content |
//! |---|---|
//! | 8 | length of what follows, little-endian |
//! | 1 | type: 0 connection, 1 metadata, 2 notify, 3 probe; missing in the old protocol, which has connections only |
//! | rest | JSON text |
//!
//! Memory for a frame grows as its bytes arrive and is never taken because a length announces it.

use std::io::{self, Read};

/// What a frame is about.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    Connection,
    Metadata,
    Notify,
    Probe,
    /// A connection request or reply of the old protocol, which has no type byte.
    Untyped,
}

impl Kind {
    fn byte(self) -> Option<u8> {
        match self {
            Kind::Connection => Some(0),
            Kind::Metadata => Some(1),
            Kind::Notify => Some(2),
            Kind::Probe => Some(3),
            Kind::Untyped => None,
        }
    }

    /// The kind of a payload, and its JSON. `None`: the first byte is neither a known type nor the beginning of a JSON text.
    pub(super) fn split(payload: &[u8]) -> Option<(Kind, &[u8])> {
        let (first, rest) = payload.split_first()?;
        match first {
            0 => Some((Kind::Connection, rest)),
            1 => Some((Kind::Metadata, rest)),
            2 => Some((Kind::Notify, rest)),
            3 => Some((Kind::Probe, rest)),
            4..0x80 => Some((Kind::Untyped, payload)),
            0x80.. => None,
        }
    }
}

/// What precedes `length` bytes of JSON.
pub(super) fn header(kind: Kind, length: usize) -> Vec<u8> {
    let kind = kind.byte();
    let mut header = (length as u64 + u64::from(kind.is_some())).to_le_bytes().to_vec();
    header.extend(kind);
    header
}

/// Why a frame cannot be read.
#[derive(Debug)]
pub(super) enum Fault {
    /// Reading failed; with `WouldBlock`, only for now.
    Io(io::Error),
    /// The peer closed after so many bytes.
    Closed { received: usize },
    /// The frame is announced to be empty.
    Empty,
    /// The frame is announced to be longer than the limit.
    TooLong { length: u64 },
}

impl From<io::Error> for Fault {
    fn from(error: io::Error) -> Fault {
        Fault::Io(error)
    }
}

const LENGTH_BYTES: usize = 8;
/// How much is read before the caller may look after others.
const ROUND: usize = 256 << 10;

/// Reads one frame, in as many steps as its bytes need to arrive.
pub(super) struct Reader {
    limit: u64,
    received: Vec<u8>,
}

impl Reader {
    /// A frame may have up to `limit` bytes after its length.
    pub(super) fn new(limit: usize) -> Reader {
        Reader { limit: limit as u64, received: Vec::new() }
    }

    /// Reads what there is, up to 256 KiB. True when the frame is complete; nothing beyond it is read.
    pub(super) fn advance(&mut self, source: &mut impl Read) -> Result<bool, Fault> {
        let mut round = ROUND;
        loop {
            let wanted = self.missing()?.min(round);
            if wanted == 0 {
                return Ok(self.missing()? == 0);
            }
            let read = source.by_ref().take(wanted as u64).read_to_end(&mut self.received)?;
            if read < wanted {
                return Err(Fault::Closed { received: self.received.len() });
            }
            round -= read;
        }
    }

    /// Bytes that are known to be missing: of the length first, then of what it announces.
    fn missing(&self) -> Result<usize, Fault> {
        let Some(length) = self.received.first_chunk::<LENGTH_BYTES>() else { return Ok(LENGTH_BYTES - self.received.len()) };
        match u64::from_le_bytes(*length) {
            0 => Err(Fault::Empty),
            length if length > self.limit => Err(Fault::TooLong { length }),
            length => Ok(LENGTH_BYTES + length as usize - self.received.len()),
        }
    }

    /// Memory in use.
    pub(super) fn held(&self) -> usize {
        self.received.capacity()
    }

    /// What follows the length in a complete frame.
    pub(super) fn payload(&self) -> &[u8] {
        &self.received[LENGTH_BYTES..]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Gives one byte at a time, and `WouldBlock` between them.
    struct Drip<'a> {
        bytes: &'a [u8],
        blocks: bool,
    }

    impl Read for Drip<'_> {
        fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
            self.blocks = !self.blocks;
            if self.blocks {
                return Err(io::ErrorKind::WouldBlock.into());
            }
            self.bytes.read(&mut buffer[..1])
        }
    }

    fn frame(kind: Kind, body: &[u8]) -> Vec<u8> {
        [&header(kind, body.len()), body].concat()
    }

    #[test]
    fn headers_are_those_of_the_wire() {
        assert_eq!(frame(Kind::Probe, b"{}"), [3, 0, 0, 0, 0, 0, 0, 0, 3, b'{', b'}']);
        assert_eq!(frame(Kind::Untyped, b"{}"), [2, 0, 0, 0, 0, 0, 0, 0, b'{', b'}']);
        assert_eq!(header(Kind::Metadata, 0x01_02_03), [4, 2, 1, 0, 0, 0, 0, 0, 1]);
    }

    #[test]
    fn frames_round_trip_however_they_arrive() {
        for kind in [Kind::Connection, Kind::Metadata, Kind::Notify, Kind::Probe, Kind::Untyped] {
            let mut bytes = frame(kind, b"{\"a\":1}");
            bytes.extend(b"more");
            let mut whole = Reader::new(100);
            let mut rest = &bytes[..];
            assert!(whole.advance(&mut rest).unwrap());
            assert_eq!(Kind::split(whole.payload()), Some((kind, &b"{\"a\":1}"[..])));
            assert_eq!(rest, b"more");

            let mut dripped = Reader::new(100);
            let mut drip = Drip { bytes: &bytes, blocks: false };
            let complete = loop {
                match dripped.advance(&mut drip) {
                    Err(Fault::Io(error)) if error.kind() == io::ErrorKind::WouldBlock => {}
                    other => break other.unwrap(),
                }
            };
            assert!(complete);
            assert_eq!(dripped.payload(), whole.payload());
        }
    }

    #[test]
    fn large_frames_take_several_rounds() {
        let body = vec![b'x'; 3 * ROUND];
        let bytes = frame(Kind::Notify, &body);
        let mut reader = Reader::new(body.len() + 1);
        let mut source = &bytes[..];
        let rounds = (1..).find(|_| reader.advance(&mut source).unwrap()).unwrap();
        assert_eq!(rounds, 4);
        assert_eq!(reader.payload(), &bytes[8..]);
        assert!(reader.advance(&mut source).unwrap());
    }

    #[test]
    fn memory_follows_the_bytes_and_not_the_announcement() {
        let mut reader = Reader::new(usize::MAX);
        let mut bytes = (1u64 << 40).to_le_bytes().to_vec();
        bytes.extend([0; 1000]);
        assert!(matches!(reader.advance(&mut &bytes[..]), Err(Fault::Closed { received: 1008 })));
        assert!(reader.held() < 8192, "{}", reader.held());
    }

    #[test]
    fn lengths_are_checked() {
        let read = |bytes: &[u8], limit| Reader::new(limit).advance(&mut &bytes[..]);
        assert!(matches!(read(&[0; 20], 10), Err(Fault::Empty)));
        assert!(matches!(read(&[0xff; 20], 10), Err(Fault::TooLong { length: u64::MAX })));
        assert!(matches!(read(&frame(Kind::Notify, &[0; 10]), 10), Err(Fault::TooLong { length: 11 })));
        assert!(read(&frame(Kind::Notify, &[0; 9]), 10).unwrap());
        assert!(matches!(read(&[1, 0, 0], 10), Err(Fault::Closed { received: 3 })));
        assert!(matches!(read(&[], 10), Err(Fault::Closed { received: 0 })));
    }

    #[test]
    fn unknown_types_have_no_kind() {
        for first in 0..=255u8 {
            let kind = Kind::split(&[first, b'x']).map(|(kind, _)| kind);
            assert_eq!(kind.is_none(), first >= 0x80);
            assert_eq!(kind == Some(Kind::Untyped), (4..0x80).contains(&first));
        }
        assert_eq!(Kind::split(&[]), None);
    }
}

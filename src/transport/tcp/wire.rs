//! What crosses a data connection: request headers and status frames.
//!
//! A connection carries requests one after the other. Version 1 answers a read with the bare bytes and a write not at all; version 2
//! puts a status frame before the bytes of a read and after those of a write. The version is a bit of each request.

use crate::transport::Opcode;

/// Bytes of a request header.
pub const HEADER_LENGTH: usize = 24;

/// Bytes of a status frame.
pub const STATUS_LENGTH: usize = 8;

/// The request was carried out, or (for a read) its bytes follow.
pub const STATUS_OK: u32 = 0;

/// No live registration covers the range; the server closes the connection after this.
pub const STATUS_REJECTED: u32 = 1;

const STATUS_MAGIC: u32 = 0x4D43_5456;
const ACKNOWLEDGED: u8 = 0x80;
const WRITE: u8 = 1;

/// The protocol version of one request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Version {
    /// Without status frames.
    V1,
    /// With status frames.
    V2,
}

/// A request header.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Header {
    /// Bytes that follow (write) or are asked for (read).
    pub length: u64,
    /// Where, in the receiver's address space.
    pub address: u64,
    /// Which way.
    pub opcode: Opcode,
    /// Whether status frames are expected.
    pub version: Version,
}

impl Header {
    /// As sent: length and address little-endian, opcode, seven zeros.
    pub fn encode(&self) -> [u8; HEADER_LENGTH] {
        let mut bytes = [0; HEADER_LENGTH];
        bytes[..8].copy_from_slice(&self.length.to_le_bytes());
        bytes[8..16].copy_from_slice(&self.address.to_le_bytes());
        bytes[16] = match self.opcode {
            Opcode::Read => 0,
            Opcode::Write => WRITE,
        } | match self.version {
            Version::V1 => 0,
            Version::V2 => ACKNOWLEDGED,
        };
        bytes
    }

    /// As received. The padding is ignored; every opcode but 1 is a read, as upstream has it.
    pub fn decode(bytes: &[u8; HEADER_LENGTH]) -> Header {
        let number = |at: usize| u64::from_le_bytes(std::array::from_fn(|i| bytes[at + i]));
        Header {
            length: number(0),
            address: number(8),
            opcode: if bytes[16] & !ACKNOWLEDGED == WRITE { Opcode::Write } else { Opcode::Read },
            version: if bytes[16] & ACKNOWLEDGED != 0 { Version::V2 } else { Version::V1 },
        }
    }
}

/// A status frame as sent.
pub fn encode_status(code: u32) -> [u8; STATUS_LENGTH] {
    (u64::from(STATUS_MAGIC) << 32 | u64::from(code)).to_le_bytes()
}

/// The code of a status frame; `None` if it is none.
pub fn decode_status(bytes: &[u8; STATUS_LENGTH]) -> Option<u32> {
    let number = u64::from_le_bytes(*bytes);
    (number >> 32 == u64::from(STATUS_MAGIC)).then_some(number as u32)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn headers_have_upstreams_bytes() {
        let header = Header { length: 0x0102, address: 0x1122_3344_5566_7788, opcode: Opcode::Write, version: Version::V2 };
        let expected = [2, 1, 0, 0, 0, 0, 0, 0, 0x88, 0x77, 0x66, 0x55, 0x44, 0x33, 0x22, 0x11, 0x81, 0, 0, 0, 0, 0, 0, 0];
        assert_eq!(header.encode(), expected);
        assert_eq!(Header { opcode: Opcode::Read, version: Version::V1, ..header }.encode()[16], 0);
        assert_eq!(Header { version: Version::V1, ..header }.encode()[16], 1);
        assert_eq!(Header { opcode: Opcode::Read, ..header }.encode()[16], 0x80);
    }

    #[test]
    fn decoding_undoes_encoding_and_ignores_padding() {
        for opcode in [Opcode::Read, Opcode::Write] {
            for version in [Version::V1, Version::V2] {
                let header = Header { length: u64::MAX, address: 1, opcode, version };
                let mut bytes = header.encode();
                bytes[17..].fill(0xee);
                assert_eq!(Header::decode(&bytes), header);
            }
        }
    }

    #[test]
    fn every_opcode_but_one_reads() {
        for code in 0..=255u8 {
            let mut bytes = [0; HEADER_LENGTH];
            bytes[16] = code;
            let header = Header::decode(&bytes);
            assert_eq!(header.opcode == Opcode::Write, code & 0x7f == 1);
            assert_eq!(header.version == Version::V2, code >= 0x80);
        }
    }

    #[test]
    fn status_frames_have_upstreams_bytes() {
        assert_eq!(encode_status(STATUS_REJECTED), [1, 0, 0, 0, 0x56, 0x54, 0x43, 0x4d]);
        assert_eq!(decode_status(&encode_status(7)), Some(7));
        assert_eq!(decode_status(&[0; STATUS_LENGTH]), None);
    }
}

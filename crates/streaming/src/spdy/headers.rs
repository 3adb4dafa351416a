//! Header blocks: names and values, compressed with one zlib stream per direction and the protocol's preset dictionary.
//!
//! Received blocks may use any compression. Sent blocks are stored (uncompressed) deflate blocks of the same zlib stream: our
//! replies carry no headers that are worth compressing, and a deflate state would cost 256 KiB per connection.

use bytes::{BufMut, BytesMut};
use flate2::{Decompress, FlushDecompress, Status};

use super::dictionary::{DICTIONARY, DICTIONARY_ID};

/// The longest accepted header block after decompression. Kubernetes sends a few dozen bytes.
pub const BLOCK_MAX: usize = 16 * 1024;

/// The zlib header for deflate with a 32 KiB window and a preset dictionary.
const ZLIB_WITH_DICTIONARY: [u8; 2] = [0x78, 0x20];

/// The longest stored block that deflate allows.
const STORED_MAX: usize = 0xffff;

#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error("the header block is not a zlib stream")]
    Inflate(#[source] flate2::DecompressError),
    #[error("the header block requires an unknown dictionary {0:#x}")]
    Dictionary(u32),
    #[error("the peer ended the zlib stream of the headers")]
    Ended,
    #[error("the header block is longer than {BLOCK_MAX} bytes")]
    TooLong,
    #[error("the header block is truncated")]
    Truncated,
    #[error("the header block has trailing bytes")]
    Trailing,
    #[error("a header is not UTF-8")]
    NotText(#[source] std::str::Utf8Error),
    #[error("a header name is empty or not lower case")]
    Name,
    #[error("header {0:?} is duplicated")]
    Duplicate(String),
}

/// The headers of a stream, by lower-case name.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Headers(Vec<(String, String)>);

impl Headers {
    /// The first value of a header. The case of `name` does not matter.
    pub fn get(&self, name: &str) -> Option<&str> {
        let (_, value) = self
            .0
            .iter()
            .find(|(known, _)| known.eq_ignore_ascii_case(name))?;
        // Several values of one header are separated by NUL.
        value.split('\0').next()
    }

    /// Sets a header. Replaces its value if the name is present already.
    #[must_use]
    pub fn with(mut self, name: &str, value: &str) -> Self {
        let name = name.to_ascii_lowercase();
        self.0.retain(|(known, _)| *known != name);
        self.0.push((name, value.to_owned()));
        self
    }

    fn parse(block: &[u8]) -> Result<Self, Error> {
        let mut rest = block;
        let count = take_length(&mut rest)?;
        let mut headers: Vec<(String, String)> = Vec::new();
        for _ in 0..count {
            let name = take_text(&mut rest)?;
            let value = take_text(&mut rest)?;
            if name.is_empty() || name.bytes().any(|byte| byte.is_ascii_uppercase()) {
                return Err(Error::Name);
            }
            if headers.iter().any(|(known, _)| known == name) {
                return Err(Error::Duplicate(name.to_owned()));
            }
            headers.push((name.to_owned(), value.to_owned()));
        }
        if rest.is_empty() {
            Ok(Self(headers))
        } else {
            Err(Error::Trailing)
        }
    }

    fn write(&self) -> Vec<u8> {
        let mut block = Vec::new();
        put_length(&mut block, self.0.len());
        for (name, value) in &self.0 {
            for text in [name, value] {
                put_length(&mut block, text.len());
                block.extend_from_slice(text.as_bytes());
            }
        }
        block
    }
}

fn put_length(block: &mut Vec<u8>, length: usize) {
    let length = u32::try_from(length).expect("our headers are shorter than 4 GiB");
    block.extend_from_slice(&length.to_be_bytes());
}

fn take_length(rest: &mut &[u8]) -> Result<usize, Error> {
    let (length, behind) = rest.split_first_chunk::<4>().ok_or(Error::Truncated)?;
    *rest = behind;
    usize::try_from(u32::from_be_bytes(*length)).map_err(|_| Error::TooLong)
}

fn take_text<'a>(rest: &mut &'a [u8]) -> Result<&'a str, Error> {
    let length = take_length(rest)?;
    let (text, behind) = rest.split_at_checked(length).ok_or(Error::Truncated)?;
    *rest = behind;
    std::str::from_utf8(text).map_err(Error::NotText)
}

/// Decompresses the received header blocks of a connection.
#[derive(Debug)]
pub struct Inflater {
    zlib: Decompress,
}

impl Default for Inflater {
    fn default() -> Self {
        Self {
            zlib: Decompress::new(true),
        }
    }
}

impl Inflater {
    pub fn read(&mut self, compressed: &[u8]) -> Result<Headers, Error> {
        let block = self.inflate(compressed)?;
        Headers::parse(&block)
    }

    fn inflate(&mut self, compressed: &[u8]) -> Result<Vec<u8>, Error> {
        let mut block = vec![0; BLOCK_MAX + 1];
        let (first_in, first_out) = (self.zlib.total_in(), self.zlib.total_out());
        loop {
            let consumed = progress(first_in, self.zlib.total_in());
            let produced = progress(first_out, self.zlib.total_out());
            let (input, output) = (&compressed[consumed..], &mut block[produced..]);
            match self.zlib.decompress(input, output, FlushDecompress::Sync) {
                Ok(Status::StreamEnd) => return Err(Error::Ended),
                Ok(Status::Ok | Status::BufError) => {}
                Err(error) => {
                    let wanted = error.needs_dictionary().ok_or(Error::Inflate(error))?;
                    if wanted != DICTIONARY_ID {
                        return Err(Error::Dictionary(wanted));
                    }
                    self.zlib
                        .set_dictionary(&DICTIONARY)
                        .map_err(Error::Inflate)?;
                    continue;
                }
            }
            let now_consumed = progress(first_in, self.zlib.total_in());
            let now_produced = progress(first_out, self.zlib.total_out());
            if now_produced > BLOCK_MAX {
                return Err(Error::TooLong);
            }
            if now_consumed == compressed.len() {
                block.truncate(now_produced);
                return Ok(block);
            }
            if (now_consumed, now_produced) == (consumed, produced) {
                return Err(Error::Truncated);
            }
        }
    }
}

/// The distance that a zlib counter has advanced. It fits, because both buffers are small.
fn progress(first: u64, now: u64) -> usize {
    usize::try_from(now - first).expect("a header block is small")
}

/// Writes the header blocks of a connection as stored blocks of one zlib stream.
#[derive(Debug, Default)]
pub struct Storer {
    started: bool,
}

impl Storer {
    pub fn write(&mut self, headers: &Headers, out: &mut BytesMut) {
        if !self.started {
            self.started = true;
            out.extend_from_slice(&ZLIB_WITH_DICTIONARY);
            out.put_u32(DICTIONARY_ID);
        }
        let block = headers.write();
        // An empty stored block ends each header block, as a flush (Z_SYNC_FLUSH) does: Go's inflater returns no data before it.
        for piece in block.chunks(STORED_MAX).chain([&[][..]]) {
            let length = u16::try_from(piece.len()).expect("a chunk is at most 0xffff bytes");
            out.put_u8(0);
            out.put_u16_le(length);
            out.put_u16_le(!length);
            out.extend_from_slice(piece);
        }
    }
}

#[cfg(test)]
mod tests {
    use flate2::{Compress, Compression, FlushCompress};

    use super::*;

    fn deflate(compressor: &mut Compress, headers: &Headers) -> Vec<u8> {
        let mut out = Vec::with_capacity(64 * 1024);
        compressor
            .compress_vec(&headers.write(), &mut out, FlushCompress::Sync)
            .unwrap();
        out
    }

    #[test]
    fn blocks_compressed_with_the_dictionary_are_read_one_after_the_other() {
        let mut compressor = Compress::new(Compression::best(), true);
        compressor.set_dictionary(&DICTIONARY).unwrap();
        let mut inflater = Inflater::default();
        for kind in ["error", "stdin", "stdout"] {
            let headers = Headers::default()
                .with("streamType", kind)
                .with("port", "80");
            let block = deflate(&mut compressor, &headers);
            let read = inflater.read(&block).unwrap();
            assert_eq!(read.get("StreamType"), Some(kind));
            assert_eq!(read, headers);
        }
    }

    #[test]
    fn stored_blocks_are_a_zlib_stream_too() {
        let (mut storer, mut inflater) = (Storer::default(), Inflater::default());
        for headers in [
            Headers::default(),
            Headers::default().with("status", "200"),
            Headers::default(),
        ] {
            let mut block = BytesMut::new();
            storer.write(&headers, &mut block);
            assert_eq!(inflater.read(&block).unwrap(), headers);
        }
    }

    #[test]
    fn a_decompression_bomb_is_refused() {
        let mut compressor = Compress::new(Compression::best(), true);
        compressor.set_dictionary(&DICTIONARY).unwrap();
        let bomb = Headers::default().with("a", &"b".repeat(BLOCK_MAX * 4));
        let block = deflate(&mut compressor, &bomb);
        assert!(block.len() < 1_000);
        assert!(matches!(
            Inflater::default().read(&block),
            Err(Error::TooLong)
        ));
    }

    #[test]
    fn a_header_count_beyond_the_block_is_refused() {
        assert!(matches!(
            Headers::parse(&u32::MAX.to_be_bytes()),
            Err(Error::Truncated)
        ));
    }

    #[test]
    fn another_dictionary_is_refused() {
        let mut compressor = Compress::new(Compression::best(), true);
        compressor.set_dictionary(b"something else").unwrap();
        let block = deflate(&mut compressor, &Headers::default());
        assert!(matches!(
            Inflater::default().read(&block),
            Err(Error::Dictionary(_))
        ));
    }
}

//! Decompresses layers. The magic number at the start tells gzip, zstd and uncompressed layers apart.

use std::io::{self, BufRead, BufReader, Read};

const GZIP: [u8; 2] = [0x1f, 0x8b];
const ZSTD: [u8; 4] = [0x28, 0xb5, 0x2f, 0xfd];
/// The magic number of a skippable frame, with which some zstd encoders start.
const ZSTD_SKIPPABLE: [u8; 3] = [0x2a, 0x4d, 0x18];
/// Limits the memory of the decoder to 128 MiB. The default modes of the encoder need less.
const ZSTD_WINDOW_LOG_MAX: u32 = 27;

/// The uncompressed content of `reader`.
pub fn decompress<'a>(reader: impl Read + Send + 'a) -> io::Result<Box<dyn Read + Send + 'a>> {
    let mut reader = BufReader::with_capacity(128 << 10, reader);
    let start = reader.fill_buf()?;
    if start.starts_with(&GZIP) {
        return Ok(Box::new(flate2::bufread::MultiGzDecoder::new(reader)));
    }
    let skippable = start.len() >= 4 && start[0] & 0xf0 == 0x50 && start[1..4] == ZSTD_SKIPPABLE;
    if start.starts_with(&ZSTD) || skippable {
        let mut decoder = zstd::stream::read::Decoder::with_buffer(reader)?;
        decoder.window_log_max(ZSTD_WINDOW_LOG_MAX)?;
        return Ok(Box::new(decoder));
    }
    Ok(Box::new(reader))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Write;

    #[test]
    fn every_compression_gives_the_same_bytes() {
        let plain = b"some bytes of a layer".repeat(100);
        let mut gzip = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::fast());
        gzip.write_all(&plain).unwrap();
        let mut twice = gzip.finish().unwrap();
        let zstd = zstd::stream::encode_all(plain.as_slice(), 1).unwrap();
        for compressed in [plain.clone(), twice.clone(), zstd] {
            let mut out = Vec::new();
            decompress(compressed.as_slice())
                .unwrap()
                .read_to_end(&mut out)
                .unwrap();
            assert_eq!(out, plain);
        }
        // A gzip file may consist of several members.
        twice.extend(twice.clone());
        let mut out = Vec::new();
        decompress(twice.as_slice())
            .unwrap()
            .read_to_end(&mut out)
            .unwrap();
        assert_eq!(out.len(), 2 * plain.len());
    }
}

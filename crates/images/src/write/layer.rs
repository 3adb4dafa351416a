//! A compressed layer: a tree as a gzipped tar, with the digests of both forms.

use std::fs::File;
use std::io::{self, BufWriter, Write};
use std::path::Path;

use flate2::write::GzEncoder;
use flate2::{Compression, GzBuilder};
use sha2::{Digest as _, Sha256};
use tempfile::NamedTempFile;

use super::WriteError;
use super::tree::{Naming, Tree};
use crate::digest::Digest;

/// The operating system in a gzip header: unknown, so that the header does not depend on the build machine.
const GZIP_UNKNOWN_SYSTEM: u8 = 255;

/// A layer in a temporary file.
#[derive(Debug)]
pub struct Layer {
    pub(super) file: NamedTempFile,
    /// Of the compressed bytes, by which registries know the layer.
    pub(super) digest: Digest,
    /// Of the tar archive, by which configurations know it.
    pub(super) diff_id: Digest,
    pub(super) size: u64,
}

impl Layer {
    /// Writes the tree as a layer into a temporary file in `directory`.
    pub fn write(tree: &Tree, directory: &Path) -> Result<Self, WriteError> {
        let shown = directory.display().to_string();
        let file = NamedTempFile::new_in(directory).map_err(WriteError::write(shown.as_str()))?;
        let writable = file.reopen().map_err(WriteError::write(shown.as_str()))?;
        let compressed = Hashing::new(BufWriter::new(writable));
        let plain = Hashing::new(gzip(compressed));
        let plain = tree.write(plain, Naming::Plain)?;
        let (diff_id, encoder) = plain.finish();
        let compressed = encoder
            .finish()
            .map_err(WriteError::write(shown.as_str()))?;
        let size = compressed.count;
        let (digest, mut out) = compressed.finish();
        out.flush().map_err(WriteError::write(shown))?;
        Ok(Self {
            file,
            digest,
            diff_id,
            size,
        })
    }

    /// The digest of the uncompressed layer.
    pub fn diff_id(&self) -> &Digest {
        &self.diff_id
    }

    /// The compressed bytes.
    pub fn open(&self) -> Result<File, WriteError> {
        let shown = self.file.path().display().to_string();
        self.file.reopen().map_err(WriteError::read(shown))
    }
}

/// A gzip stream without a time, a file name or an operating system in its header.
pub fn gzip<W: Write>(out: W) -> GzEncoder<W> {
    GzBuilder::new()
        .mtime(0)
        .operating_system(GZIP_UNKNOWN_SYSTEM)
        .write(out, Compression::best())
}

/// Hashes and counts what is written through it.
#[derive(Debug)]
struct Hashing<W> {
    inner: W,
    hash: Sha256,
    count: u64,
}

impl<W> Hashing<W> {
    fn new(inner: W) -> Self {
        Self {
            inner,
            hash: Sha256::new(),
            count: 0,
        }
    }

    fn finish(self) -> (Digest, W) {
        (Digest::from_hash(self.hash), self.inner)
    }
}

impl<W: Write> Write for Hashing<W> {
    fn write(&mut self, buffer: &[u8]) -> io::Result<usize> {
        let count = self.inner.write(buffer)?;
        self.hash.update(&buffer[..count]);
        self.count = self.count.saturating_add(count as u64);
        Ok(count)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.inner.flush()
    }
}

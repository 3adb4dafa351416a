//! Turns a layer blob into an extracted layer in the store: decompresses it, verifies its digest and enforces the limits.

use std::fs;
use std::io::{self, Read};

use crate::compression::decompress;
use crate::digest::{Digest, HashingReader};
use crate::extract::{self, Budget, ExtractError, Extracted, Ownership};
use crate::manifest::Configuration;
use crate::store::{SharedLock, Store, StoreError};

#[derive(Debug, thiserror::Error)]
pub enum UnpackError {
    #[error(transparent)]
    Extract(#[from] ExtractError),
    #[error(transparent)]
    Store(#[from] StoreError),
    #[error("reading a layer")]
    Read(#[source] io::Error),
    #[error("layer {expected} is corrupted: its content is {actual}")]
    Corrupted { expected: Digest, actual: Digest },
}

/// The maximum padding after the last entry. More padding would only keep the reader busy (a denial of service).
const TRAILER_BYTES_MAX: u64 = 64 << 20;

/// Extracts the layer `diff` from its blob, unless the store already contains it. Blocks.
pub(crate) fn unpack(
    store: &Store,
    lock: &SharedLock,
    blob: impl Read + Send,
    diff: &Digest,
    budget: Budget,
) -> Result<Extracted, UnpackError> {
    if let Some(size) = store.layer(diff) {
        return Ok(size);
    }
    let work = store.work_directory()?;
    let root = work.path().join("root");
    fs::create_dir(&root).map_err(UnpackError::Read)?;
    let plain = HashingReader::new(decompress(blob).map_err(UnpackError::Read)?);
    let (size, mut rest) = extract::extract(plain, &root, budget, Ownership::possible())?;
    let trailer = io::copy(&mut (&mut rest).take(TRAILER_BYTES_MAX), &mut io::sink())
        .map_err(UnpackError::Read)?;
    if trailer == TRAILER_BYTES_MAX {
        return Err(ExtractError::TooLarge(budget.bytes).into());
    }
    let actual = rest.digest();
    if actual != *diff {
        return Err(UnpackError::Corrupted {
            expected: diff.clone(),
            actual,
        });
    }
    store.commit_layer(lock, work, diff, size)?;
    Ok(size)
}

/// Checks that all layers together are within the limits of an image. Each single layer was checked during extraction.
pub(crate) fn check_image_size(
    store: &Store,
    configuration: &Configuration,
    budget: Budget,
) -> Result<(), ExtractError> {
    let sizes = configuration
        .rootfs
        .diff_ids
        .iter()
        .filter_map(|diff| store.layer(diff));
    let (bytes, entries) = sizes.fold((0_u64, 0_u64), |(bytes, entries), size| {
        (bytes.saturating_add(size.bytes), entries + size.entries)
    });
    if bytes > budget.bytes {
        return Err(ExtractError::TooLarge(budget.bytes));
    }
    if entries > budget.entries {
        return Err(ExtractError::TooMany(budget.entries));
    }
    Ok(())
}

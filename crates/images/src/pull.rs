//! Pulls an image from a registry into the store.
//!
//! Every blob is hashed while it is written, and every layer again while it is extracted, so neither the registry nor the disk is
//! trusted. An interrupted download is resumed where it stopped, even by another process or a later pull.

use std::fs::File;
use std::io::{Read, Seek, SeekFrom, Write};
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use futures::FutureExt;
use futures::future::BoxFuture;
use futures::stream::{StreamExt, TryStreamExt};
use http_body_util::BodyExt;
use jiff::Timestamp;
use sha2::{Digest as _, Sha256};

use crate::credentials::Credential;
use crate::digest::Digest;
use crate::extract::Budget;
use crate::manifest::{self, Configuration, Descriptor, Document, Manifest, ManifestError};
use crate::reference::Reference;
use crate::registry::{Registries, RegistryError, Session};
use crate::store::{Image, ImageRecord, SharedLock, Store, StoreError};
use crate::unpack::{UnpackError, check_image_size, unpack};

/// How many layers are downloaded concurrently.
const PARALLEL_LAYERS: usize = 3;
/// A download fails after this many consecutive attempts that transferred no data.
const ATTEMPTS: u32 = 4;
const INITIAL_BACKOFF: Duration = Duration::from_millis(200);
/// A transfer without data for this long counts as broken.
const STALL_TIMEOUT: Duration = Duration::from_secs(30);
/// The nesting depth of indexes; some builders put an index into an index.
const INDEX_DEPTH_MAX: usize = 2;

#[derive(Debug, thiserror::Error)]
pub enum PullError {
    #[error(transparent)]
    Registry(#[from] RegistryError),
    #[error(transparent)]
    Manifest(#[from] ManifestError),
    #[error(transparent)]
    Store(#[from] StoreError),
    #[error(transparent)]
    Unpack(#[from] UnpackError),
    #[error("{what} is corrupted: expected {expected}, got {actual}")]
    Corrupted {
        what: &'static str,
        expected: Digest,
        actual: Digest,
    },
    #[error("layer {digest} is {size} bytes, more than the limit of {limit} bytes per image")]
    TooLarge {
        digest: Digest,
        size: u64,
        limit: u64,
    },
    #[error("layer {0} is larger than the manifest states")]
    Overlong(Digest),
    #[error("writing {what} to disk")]
    Io {
        what: String,
        #[source]
        source: std::io::Error,
    },
    #[error("the pull was interrupted")]
    Interrupted,
}

/// The store, the registries and the limits of a pull.
#[derive(Debug)]
pub(crate) struct Puller {
    pub store: Store,
    pub registries: Registries,
    pub budget: Budget,
}

impl Puller {
    /// Tries each credential until the registry accepts one. Without credentials, pulls anonymously.
    pub async fn pull(
        self: Arc<Self>,
        reference: Reference,
        credentials: Vec<Credential>,
    ) -> Result<Image, PullError> {
        let mut attempts: Vec<Option<&Credential>> = credentials.iter().map(Some).collect();
        if attempts.is_empty() {
            attempts.push(None);
        }
        let mut refused = None;
        for credential in attempts {
            match self.pull_as(&reference, credential).await {
                Err(PullError::Registry(error)) if error.is_denied() => refused = Some(error),
                other => return other,
            }
        }
        Err(refused.map_or(PullError::Interrupted, PullError::Registry))
    }

    async fn pull_as(
        &self,
        reference: &Reference,
        credential: Option<&Credential>,
    ) -> Result<Image, PullError> {
        let session = self.registries.session(reference, credential);
        let (manifest, manifest_digest) = resolve(&session, reference).await?;
        let config_bytes = retry_transient(|| session.small_blob(&manifest.config.digest)).await?;
        let id = Digest::of(&config_bytes);
        if id != manifest.config.digest {
            return Err(PullError::Corrupted {
                what: "the image's configuration",
                expected: manifest.config.digest,
                actual: id,
            });
        }
        let configuration = Configuration::parse(&config_bytes, manifest.layers.len())?;
        let total: u64 = manifest.layers.iter().map(|layer| layer.size).sum();
        if let Some(layer) = manifest.layers.iter().find(|_| total > self.budget.bytes) {
            return Err(PullError::TooLarge {
                digest: layer.digest.clone(),
                size: total,
                limit: self.budget.bytes,
            });
        }
        let store = self.store.clone();
        let lock = blocking(move || Ok::<_, PullError>(Arc::new(store.shared()?))).await?;
        let layers = manifest.layers.iter().zip(&configuration.rootfs.diff_ids);
        let downloads: Vec<BoxFuture<'_, Result<(), PullError>>> = layers
            .map(|(layer, diff)| self.layer(&session, &lock, layer, diff).boxed())
            .collect();
        futures::stream::iter(downloads)
            .buffer_unordered(PARALLEL_LAYERS)
            .try_collect::<()>()
            .await?;
        let record = ImageRecord {
            id,
            manifest: Some(manifest_digest),
            configuration,
            added_at: Timestamp::now(),
        };
        let (store, name, budget) = (self.store.clone(), reference.clone(), self.budget);
        blocking(move || {
            check_image_size(&store, &record.configuration, budget).map_err(UnpackError::from)?;
            Ok(store.commit_image(&lock, &record, &[name])?)
        })
        .await
    }

    async fn layer(
        &self,
        session: &Session<'_>,
        lock: &Arc<SharedLock>,
        layer: &Descriptor,
        diff: &Digest,
    ) -> Result<(), PullError> {
        if self.store.layer(diff).is_some() {
            return Ok(());
        }
        let path = self.store.partial_path(&layer.digest);
        let file = open_locked(&path).await?;
        let blob = download(session, layer, file).await;
        // A corrupted blob cannot be resumed.
        if matches!(
            blob,
            Err(PullError::Corrupted { .. } | PullError::Overlong(_))
        ) {
            let _ = std::fs::remove_file(&path);
        }
        let blob = blob?;
        let (store, lock, diff, budget) =
            (self.store.clone(), lock.clone(), diff.clone(), self.budget);
        blocking(move || {
            let unpacked = unpack(&store, &lock, &blob, &diff, budget);
            // The blob is no longer needed: its content is now extracted or was refused.
            let _ = std::fs::remove_file(&path);
            unpacked?;
            Ok(())
        })
        .await
    }
}

/// Finds and verifies the manifest for this machine's platform. Also returns the digest of the manifest or index that the
/// reference names.
async fn resolve(
    session: &Session<'_>,
    reference: &Reference,
) -> Result<(Manifest, Digest), PullError> {
    let mut name = reference.manifest_name();
    let mut expected = reference.digest().cloned();
    let mut first = None;
    for _ in 0..=INDEX_DEPTH_MAX {
        let (bytes, media_type) = retry_transient(|| session.manifest(&name)).await?;
        let actual = Digest::of(&bytes);
        if let Some(expected) = expected.filter(|expected| *expected != actual) {
            return Err(PullError::Corrupted {
                what: "the manifest",
                expected,
                actual,
            });
        }
        let first = first.get_or_insert_with(|| actual.clone());
        match manifest::parse(&bytes, &media_type)? {
            Document::Image(manifest) => return Ok((manifest, first.clone())),
            Document::Index(index) => {
                let chosen = manifest::choose(&index, manifest::architecture())?;
                name = chosen.digest.to_string();
                expected = Some(chosen.digest.clone());
            }
        }
    }
    Err(ManifestError::Kind("an index of indexes".to_owned()).into())
}

/// Retries a request on transient errors.
async fn retry_transient<T, F>(mut request: impl FnMut() -> F) -> Result<T, RegistryError>
where
    F: Future<Output = Result<T, RegistryError>>,
{
    let mut backoff = INITIAL_BACKOFF;
    for _ in 1..ATTEMPTS {
        match request().await {
            Err(error) if error.is_transient() => {
                tokio::time::sleep(backoff).await;
                backoff = backoff.saturating_mul(2);
            }
            other => return other,
        }
    }
    request().await
}

/// Opens a partial download and locks it; waits if another process holds the lock.
async fn open_locked(path: &Path) -> Result<File, PullError> {
    let path = path.to_owned();
    blocking(move || {
        let failed = |source| PullError::Io {
            what: path.display().to_string(),
            source,
        };
        loop {
            let file = File::options()
                .create(true)
                .truncate(false)
                .read(true)
                .write(true)
                .open(&path)
                .map_err(failed)?;
            file.lock().map_err(failed)?;
            // The previous holder of the lock may have completed the download and removed the file.
            let same = |other: std::fs::Metadata| {
                use std::os::unix::fs::MetadataExt;
                file.metadata().is_ok_and(|own| own.ino() == other.ino())
            };
            if std::fs::metadata(&path).is_ok_and(same) {
                return Ok(file);
            }
        }
    })
    .await
}

/// Completes a download and verifies it. Data that the file already contains is hashed and not downloaded again.
async fn download(
    session: &Session<'_>,
    layer: &Descriptor,
    file: File,
) -> Result<File, PullError> {
    let failed = |source| PullError::Io {
        what: format!("blob {}", layer.digest),
        source,
    };
    let mut transfer = blocking({
        let size = layer.size;
        let digest = layer.digest.clone();
        move || Transfer::resume(file, size, digest)
    })
    .await?;
    let mut idle = 0;
    let mut backoff = INITIAL_BACKOFF;
    while transfer.written < layer.size {
        let before = transfer.written;
        match transfer.continue_with(session).await {
            Ok(()) => {}
            Err(PullError::Registry(error)) if error.is_transient() => {
                idle = if transfer.written > before {
                    0
                } else {
                    idle + 1
                };
                if idle >= ATTEMPTS {
                    return Err(error.into());
                }
                tracing::debug!(blob = %layer.digest, at = transfer.written, %error, "resuming an interrupted download");
                tokio::time::sleep(backoff).await;
                backoff = if idle == 0 {
                    INITIAL_BACKOFF
                } else {
                    backoff.saturating_mul(2)
                };
            }
            Err(error) => return Err(error),
        }
    }
    let actual = Digest::from_hash(transfer.hash);
    if actual != layer.digest {
        return Err(PullError::Corrupted {
            what: "a layer",
            expected: layer.digest.clone(),
            actual,
        });
    }
    let mut file = transfer.file;
    file.seek(SeekFrom::Start(0)).map_err(failed)?;
    Ok(file)
}

struct Transfer {
    file: File,
    hash: Sha256,
    written: u64,
    size: u64,
    digest: Digest,
}

impl Transfer {
    fn resume(mut file: File, size: u64, digest: Digest) -> Result<Self, PullError> {
        let failed = |source| PullError::Io {
            what: format!("blob {digest}"),
            source,
        };
        let mut hash = Sha256::new();
        let mut written = 0;
        if file.metadata().map_err(failed)?.len() > size {
            file.set_len(0).map_err(failed)?;
        }
        let mut buffer = vec![0; 128 << 10];
        loop {
            let count = file.read(&mut buffer).map_err(failed)?;
            if count == 0 {
                break;
            }
            hash.update(&buffer[..count]);
            written += count as u64;
        }
        Ok(Self {
            file,
            hash,
            written,
            size,
            digest,
        })
    }

    async fn continue_with(&mut self, session: &Session<'_>) -> Result<(), PullError> {
        let mut blob = session.blob(&self.digest, self.written).await?;
        if blob.offset != self.written {
            self.restart()?;
        }
        loop {
            let frame = match tokio::time::timeout(STALL_TIMEOUT, blob.body.frame()).await {
                Err(_) => return Err(RegistryError::Timeout(blob.url).into()),
                Ok(None) => break,
                Ok(Some(frame)) => frame.map_err(|source| RegistryError::Body {
                    url: blob.url.clone(),
                    source: source.into(),
                })?,
            };
            if let Ok(data) = frame.into_data() {
                self.take(&data)?;
            }
        }
        if self.written < self.size {
            return Err(RegistryError::Body {
                url: blob.url,
                source: "the body ended too early".into(),
            }
            .into());
        }
        Ok(())
    }

    /// Writes data on the current thread: small writes to a file that is not synced are quicker than a thread switch.
    fn take(&mut self, data: &[u8]) -> Result<(), PullError> {
        if self.written + data.len() as u64 > self.size {
            return Err(PullError::Overlong(self.digest.clone()));
        }
        self.file.write_all(data).map_err(|source| PullError::Io {
            what: format!("blob {}", self.digest),
            source,
        })?;
        self.hash.update(data);
        self.written += data.len() as u64;
        Ok(())
    }

    fn restart(&mut self) -> Result<(), PullError> {
        self.file
            .set_len(0)
            .and_then(|()| self.file.seek(SeekFrom::Start(0)))
            .map_err(|source| PullError::Io {
                what: format!("blob {}", self.digest),
                source,
            })?;
        (self.hash, self.written) = (Sha256::new(), 0);
        Ok(())
    }
}

pub(crate) async fn blocking<T, E>(
    work: impl FnOnce() -> Result<T, E> + Send + 'static,
) -> Result<T, E>
where
    T: Send + 'static,
    E: From<Interrupted> + Send + 'static,
{
    tokio::task::spawn_blocking(work)
        .await
        .unwrap_or_else(|_| Err(Interrupted.into()))
}

/// A blocking task ended before its work was done.
#[derive(Debug)]
pub(crate) struct Interrupted;

impl From<Interrupted> for PullError {
    fn from(_: Interrupted) -> Self {
        Self::Interrupted
    }
}

//! The OCI image store of this machine: pulls images from registries or loads them from files, verifies them, extracts each layer
//! once, and garbage-collects unused images.
//!
//! It does not know pods or containers. A container runtime asks for an image by name, registers as its user, and gets the layer
//! directories for an overlay mount and the image configuration.

#![cfg_attr(not(test), warn(clippy::arithmetic_side_effects))]

mod collect;
mod compression;
mod credentials;
mod digest;
pub mod extract;
mod load;
mod manifest;
mod pull;
mod reference;
mod registry;
mod store;
mod tar_stream;
mod unpack;
mod users;
pub mod write;

use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use futures::FutureExt;
use futures::future::{BoxFuture, Shared};
use jiff::{SignedDuration, Timestamp};
use tokio::task::AbortHandle;

pub use credentials::{Credential, CredentialError, Keyring};
pub use digest::{Digest, InvalidDigest};
pub use load::LoadError;
pub use manifest::{Configuration, ContainerConfig, ManifestError};
pub use pull::PullError;
pub use reference::{InvalidReference, Reference};
pub use registry::{Destinations, RegistryError};
pub use store::{Image, Removed, StoreError, Summary};
pub use unpack::UnpackError;
pub use users::{Accounts, User, UserError};

use extract::Budget;
use pull::{Puller, blocking};
use store::Store;

/// Interrupted downloads that are not resumed within this time are removed.
const PARTIAL_DOWNLOAD_MAX_AGE: Duration = Duration::from_secs(24 * 60 * 60);

/// The location and the limits of the image store.
#[derive(Debug, Clone)]
pub struct Settings {
    pub directory: PathBuf,
    /// Registries other than loopback that may be reached over plain HTTP, as `host` or `host:port`.
    pub plain_registries: Vec<String>,
    /// Which registries may be reached.
    pub destinations: Destinations,
    /// The maximum unpacked size of an image.
    pub image_bytes_max: u64,
    /// The maximum number of files in an image.
    pub image_entries_max: u64,
}

impl Settings {
    pub fn new(directory: impl Into<PathBuf>) -> Self {
        Self {
            directory: directory.into(),
            plain_registries: Vec::new(),
            destinations: Destinations::Any,
            image_bytes_max: 32 << 30,
            image_entries_max: 2_000_000,
        }
    }
}

type PullOutcome = Shared<BoxFuture<'static, Result<Image, Arc<PullError>>>>;

/// A running pull.
#[derive(Debug)]
struct Pull {
    task: AbortHandle,
    outcome: PullOutcome,
}

/// The disk usage at which garbage collection starts and stops, in percent of the file system that holds the store.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DiskUse {
    pub high_percent: u8,
    pub low_percent: u8,
    pub minimum_age: SignedDuration,
}

/// The images of this machine.
#[derive(Debug)]
pub struct Images {
    puller: Arc<Puller>,
    /// Running pulls. The next call removes those that have ended, whether or not a caller waited for them.
    pulls: Mutex<HashMap<(Reference, Vec<Credential>), Pull>>,
}

impl Images {
    pub fn open(settings: Settings) -> Result<Self, OpenError> {
        let puller = Puller {
            store: Store::open(&settings.directory)?,
            registries: registry::Registries::new(
                settings.plain_registries,
                settings.destinations,
            )?,
            budget: Budget {
                bytes: settings.image_bytes_max,
                entries: settings.image_entries_max,
            },
        };
        Ok(Self {
            puller: Arc::new(puller),
            pulls: Mutex::default(),
        })
    }

    /// Refuses pulls from pod addresses, unless the operator allows the registry. Only the first call has an effect.
    pub fn keep_from(&self, is_pods: impl Fn(std::net::IpAddr) -> bool + Send + Sync + 'static) {
        self.puller.registries.keep_from(Box::new(is_pods));
    }

    /// The stored image with this name.
    pub fn find(&self, name: &Reference) -> Option<Image> {
        self.puller.store.find(name)
    }

    /// Pulls an image. Concurrent calls for the same image and credentials share one pull. It continues if the callers stop
    /// waiting.
    pub async fn pull(
        &self,
        name: &Reference,
        credentials: Vec<Credential>,
    ) -> Result<Image, Arc<PullError>> {
        let key = (name.clone(), credentials.clone());
        let outcome = {
            let mut pulls = self.pulls.lock().unwrap_or_else(PoisonError::into_inner);
            pulls.retain(|_, pull| !pull.task.is_finished());
            let pull = pulls.entry(key).or_insert_with(|| {
                let pulling = tokio::spawn(self.puller.clone().pull(name.clone(), credentials));
                let task = pulling.abort_handle();
                let outcome = async move {
                    let ended = pulling.await.unwrap_or(Err(PullError::Interrupted));
                    ended.map_err(Arc::new)
                };
                let outcome = outcome.boxed().shared();
                Pull { task, outcome }
            });
            pull.outcome.clone()
        };
        outcome.await
    }

    /// Loads the images of an OCI layout or a `docker save` archive. `name` is allowed if there is only one image, and replaces
    /// its name.
    pub async fn load(
        &self,
        path: &Path,
        name: Option<Reference>,
    ) -> Result<Vec<(Vec<Reference>, Image)>, LoadError> {
        let (store, budget, path) = (
            self.puller.store.clone(),
            self.puller.budget,
            path.to_owned(),
        );
        blocking(move || load::load(&store, &path, name.as_ref(), budget)).await
    }

    /// All stored images.
    pub fn list(&self) -> Result<Vec<Summary>, StoreError> {
        self.puller.store.list()
    }

    /// Removes an image by name or ID, unless it is in use. Blocks.
    pub fn remove(&self, name: &str) -> Result<Removed, StoreError> {
        self.puller.store.remove(name)
    }

    /// Records that `user` needs the image until it is released. Blocks.
    pub fn hold(&self, user: &str, image: &Image) -> Result<(), StoreError> {
        self.puller.store.hold(user, &image.id)
    }

    pub fn release(&self, user: &str) {
        self.puller.store.release(user);
    }

    /// Releases the images of all users for which `is_alive` is false.
    pub fn release_unless(&self, is_alive: impl Fn(&str) -> bool) {
        self.puller.store.release_unless(is_alive);
    }

    /// Removes unused images while the file system is fuller than allowed. Blocks. Fails with [`StoreError::Busy`] during a pull.
    pub fn collect(&self, limits: DiskUse) -> Result<Removed, StoreError> {
        let (used, total) = self.puller.store.file_system()?;
        let share = |percent: u8| total / 100 * u64::from(percent);
        let thresholds = collect::Thresholds {
            high_bytes: share(limits.high_percent),
            low_bytes: share(limits.low_percent),
            minimum_age: limits.minimum_age,
        };
        self.collect_above(used, thresholds)
    }

    /// Removes unused images while the store is larger than allowed. Blocks.
    pub fn collect_by_store_size(
        &self,
        high_bytes: u64,
        low_bytes: u64,
        minimum_age: SignedDuration,
    ) -> Result<Removed, StoreError> {
        let thresholds = collect::Thresholds {
            high_bytes,
            low_bytes,
            minimum_age,
        };
        self.collect_above(self.puller.store.total_bytes()?, thresholds)
    }

    fn collect_above(
        &self,
        used: u64,
        thresholds: collect::Thresholds,
    ) -> Result<Removed, StoreError> {
        let store = &self.puller.store;
        let lock = store.try_exclusive()?;
        store.remove_old_downloads(&lock, PARTIAL_DOWNLOAD_MAX_AGE);
        let chosen = collect::choose(&store.list()?, used, thresholds, Timestamp::now());
        store.remove_images(&lock, &chosen)
    }
}

#[derive(Debug, thiserror::Error)]
pub enum OpenError {
    #[error(transparent)]
    Store(#[from] StoreError),
    #[error(transparent)]
    Registry(#[from] RegistryError),
}

/// The examples of README.md.
#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct ReadmeExamples;

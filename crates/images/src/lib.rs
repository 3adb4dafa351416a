//! OCI images on this machine: pulled from registries or loaded from files, verified, unpacked once per layer, kept until
//! nobody needs them.
//!
//! It knows nothing of pods or containers. Whoever runs containers asks for an image by name, says who uses it, and gets
//! directories to stack and the image's configuration.

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

/// Broken downloads that nobody came back for are dropped after this.
const DOWNLOAD_AGE: Duration = Duration::from_secs(24 * 60 * 60);

/// Where images are kept and what they may take up.
#[derive(Debug, Clone)]
pub struct Settings {
    pub directory: PathBuf,
    /// Registries beyond loopback that may be reached without encryption, as `host` or `host:port`.
    pub plain_registries: Vec<String>,
    /// Which registries may be reached at all.
    pub destinations: Destinations,
    /// The unpacked size of one image.
    pub image_bytes_max: u64,
    /// The files of one image.
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

type Ending = Shared<BoxFuture<'static, Result<Image, Arc<PullError>>>>;

/// A pull under way.
#[derive(Debug)]
struct Pull {
    task: AbortHandle,
    ending: Ending,
}

/// How full the disk may get before images go, in percent of the file system they are on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DiskUse {
    pub high_percent: u8,
    pub low_percent: u8,
    pub minimum_age: SignedDuration,
}

/// This machine's images.
#[derive(Debug)]
pub struct Images {
    puller: Arc<Puller>,
    /// Pulls under way. Those that have ended are forgotten, whether somebody waited for them to the end or not.
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

    /// Keeps every pull from pods' addresses, unless the operator allows the registry. The first word counts.
    pub fn keep_from(&self, is_pods: impl Fn(std::net::IpAddr) -> bool + Send + Sync + 'static) {
        self.puller.registries.keep_from(Box::new(is_pods));
    }

    /// The image that is here under this name.
    pub fn find(&self, name: &Reference) -> Option<Image> {
        self.puller.store.find(name)
    }

    /// Pulls an image. Whoever asks for the same one meanwhile gets the same pull; it goes on when they stop waiting.
    pub async fn pull(
        &self,
        name: &Reference,
        credentials: Vec<Credential>,
    ) -> Result<Image, Arc<PullError>> {
        let key = (name.clone(), credentials.clone());
        let ending = {
            let mut pulls = self.pulls.lock().unwrap_or_else(PoisonError::into_inner);
            pulls.retain(|_, pull| !pull.task.is_finished());
            let pull = pulls.entry(key).or_insert_with(|| {
                let pulling = tokio::spawn(self.puller.clone().pull(name.clone(), credentials));
                let task = pulling.abort_handle();
                let ending = async move {
                    let ended = pulling.await.unwrap_or(Err(PullError::Interrupted));
                    ended.map_err(Arc::new)
                };
                let ending = ending.boxed().shared();
                Pull { task, ending }
            });
            pull.ending.clone()
        };
        ending.await
    }

    /// Loads the images of an OCI layout or an archive of `docker save`; `name` names the only one.
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

    /// All images that are here.
    pub fn list(&self) -> Result<Vec<Summary>, StoreError> {
        self.puller.store.list()
    }

    /// Removes an image by name or identity, unless it is in use. Blocks.
    pub fn remove(&self, name: &str) -> Result<Removed, StoreError> {
        self.puller.store.remove(name)
    }

    /// Notes that `user` needs the image until it is released. Blocks.
    pub fn hold(&self, user: &str, image: &Image) -> Result<(), StoreError> {
        self.puller.store.hold(user, &image.id)
    }

    pub fn release(&self, user: &str) {
        self.puller.store.release(user);
    }

    /// Forgets the users of which `is_alive` knows nothing.
    pub fn release_unless(&self, is_alive: impl Fn(&str) -> bool) {
        self.puller.store.release_unless(is_alive);
    }

    /// Removes images nobody uses while the file system is fuller than allowed. Blocks. Fails with
    /// [`StoreError::Busy`] during a pull.
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

    /// Removes images nobody uses while all of them together take more than allowed. Blocks.
    pub fn collect_own(
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
        store.remove_old_downloads(&lock, DOWNLOAD_AGE);
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

//! The image store on disk, shared by all processes that open the same directory.
//!
//! ```text
//! lock                     shared lock for adding and using, exclusive lock for removing
//! downloads/<hex>.partial  incomplete downloads, which can be resumed
//! work/                    temporary directories; stale if no process holds the lock
//! layers/<diff id>/root    an extracted layer, shared by all images that contain it; layer.json holds its size
//! images/<image id>.json   an image: its configuration and its layers
//! names/<hash>.json        the image that a name refers to
//! uses/<hash>.json         the user of an image
//! ```
//!
//! Every file is written to disk and then renamed into place, in the order layers, image, name. A crash leaves at most
//! unreferenced files, which the next garbage collection removes.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::{self, File, TryLockError};
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant, SystemTime};

use jiff::Timestamp;
use saturating_time::SaturatingTime;
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use crate::digest::Digest;
use crate::extract::{self, Extracted};
use crate::manifest::Configuration;
use crate::reference::Reference;

/// The minimum number of digits in an abbreviated image ID.
const ABBREVIATED_ID_MIN: usize = 8;

/// How long a removal waits for running pulls.
const EXCLUSIVE_LOCK_TIMEOUT: Duration = Duration::from_secs(10);

#[derive(Debug, thiserror::Error)]
pub enum StoreError {
    #[error("image store: {what}")]
    Io {
        what: String,
        #[source]
        source: io::Error,
    },
    #[error("images are being pulled or loaded; try again later")]
    Busy,
    #[error("image {0:?} not found")]
    Unknown(String),
    #[error("image {image} is used by {user}; delete what uses it first")]
    InUse { image: String, user: String },
    #[error("image {0} was removed in the meantime")]
    Gone(Digest),
}

fn io_error(what: impl Into<String>) -> impl FnOnce(io::Error) -> StoreError {
    let what = what.into();
    move |source| StoreError::Io { what, source }
}

/// The stored record of an image.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct ImageRecord {
    pub id: Digest,
    pub manifest: Option<Digest>,
    pub configuration: Configuration,
    pub added_at: Timestamp,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
struct NameRecord {
    name: String,
    image: Digest,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
struct UseRecord {
    user: String,
    image: Digest,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
struct LayerRecord {
    bytes: u64,
    entries: u64,
}

/// A complete image that can be the root of a container.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Image {
    pub id: Digest,
    /// The digest of the manifest, if the image was pulled or loaded with one.
    pub manifest: Option<Digest>,
    pub configuration: Configuration,
    /// The directories of the extracted layers, uppermost first.
    pub layers: Vec<PathBuf>,
}

/// An image in the list of all images.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Summary {
    pub id: Digest,
    pub names: Vec<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub manifest: Option<Digest>,
    /// The size of all layers. The sizes of images that share layers do not add up.
    pub bytes: u64,
    pub added_at: Timestamp,
    pub last_used: Timestamp,
    pub used_by: Vec<String>,
    #[serde(skip)]
    pub(crate) layers: Vec<(Digest, u64)>,
}

/// The result of a removal.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Removed {
    /// The names of the removed images, or the IDs of those without a name.
    pub images: Vec<String>,
    pub bytes: u64,
}

/// A lock for adding and using images; several may be held at once.
#[derive(Debug)]
pub(crate) struct SharedLock(#[expect(dead_code, reason = "held, not read")] File);
/// A lock for removing images; it excludes all other locks.
#[derive(Debug)]
pub(crate) struct ExclusiveLock(#[expect(dead_code, reason = "held, not read")] File);

#[derive(Debug, Clone)]
pub(crate) struct Store {
    root: PathBuf,
}

impl Store {
    pub fn open(root: &Path) -> Result<Self, StoreError> {
        for name in ["downloads", "work", "layers", "images", "names", "uses"] {
            fs::create_dir_all(root.join(name)).map_err(io_error(format!("making {name}")))?;
        }
        let store = Self {
            root: root.to_owned(),
        };
        drop(store.lock_file()?);
        if let Ok(lock) = store.try_exclusive() {
            store.remove_work(&lock)?;
        }
        Ok(store)
    }

    fn lock_file(&self) -> Result<File, StoreError> {
        File::options()
            .create(true)
            .truncate(false)
            .write(true)
            .open(self.root.join("lock"))
            .map_err(io_error("opening the lock"))
    }

    /// Takes the shared lock. Blocks during a removal.
    pub fn shared(&self) -> Result<SharedLock, StoreError> {
        let file = self.lock_file()?;
        file.lock_shared().map_err(io_error("locking"))?;
        Ok(SharedLock(file))
    }

    pub fn try_exclusive(&self) -> Result<ExclusiveLock, StoreError> {
        let file = self.lock_file()?;
        match file.try_lock() {
            Ok(()) => Ok(ExclusiveLock(file)),
            Err(TryLockError::WouldBlock) => Err(StoreError::Busy),
            Err(TryLockError::Error(error)) => Err(io_error("locking")(error)),
        }
    }

    /// Takes the exclusive lock. Blocks until running pulls have ended, up to a timeout.
    pub fn exclusive(&self) -> Result<ExclusiveLock, StoreError> {
        let deadline = Instant::now().later_by(EXCLUSIVE_LOCK_TIMEOUT);
        loop {
            match self.try_exclusive() {
                Err(StoreError::Busy) if Instant::now() < deadline => {
                    std::thread::sleep(Duration::from_millis(50));
                }
                other => return other,
            }
        }
    }

    fn remove_work(&self, _: &ExclusiveLock) -> Result<(), StoreError> {
        let work = self.root.join("work");
        for name in entries(&work).map_err(io_error("finding unfinished work"))? {
            remove_directory(&work, &name).map_err(io_error("removing unfinished work"))?;
        }
        Ok(())
    }

    pub fn partial_path(&self, digest: &Digest) -> PathBuf {
        self.root
            .join("downloads")
            .join(format!("{}.partial", digest.hex()))
    }

    /// A temporary directory for extraction, removed unless it is committed.
    pub fn work_directory(&self) -> Result<tempfile::TempDir, StoreError> {
        tempfile::Builder::new()
            .prefix("unpack-")
            .tempdir_in(self.root.join("work"))
            .map_err(io_error("making a directory to unpack in"))
    }

    fn layer_path(&self, diff: &Digest) -> PathBuf {
        self.root.join("layers").join(diff.hex())
    }

    pub fn layer(&self, diff: &Digest) -> Option<Extracted> {
        let path = self.layer_path(diff).join("layer.json");
        let record: LayerRecord = read(&path).ok().flatten()?;
        Some(Extracted {
            bytes: record.bytes,
            entries: record.entries,
        })
    }

    /// Moves an extracted layer, the directory `root` in `work`, into the store.
    pub fn commit_layer(
        &self,
        _: &SharedLock,
        work: tempfile::TempDir,
        diff: &Digest,
        size: Extracted,
    ) -> Result<(), StoreError> {
        let record = LayerRecord {
            bytes: size.bytes,
            entries: size.entries,
        };
        let text =
            serde_json::to_vec(&record).map_err(|e| io_error("a layer's record")(e.into()))?;
        fs::write(work.path().join("layer.json"), text).map_err(io_error("a layer's record"))?;
        let directory = extract::open_directory(work.path()).map_err(io_error("a layer"))?;
        rustix::fs::syncfs(&directory)
            .map_err(|e| io_error("writing a layer to disk")(e.into()))?;
        match fs::rename(work.path(), self.layer_path(diff)) {
            Ok(()) => {
                let _ = work.keep();
                self.sync("layers")
            }
            // Another process has committed the same layer first.
            Err(error)
                if matches!(
                    error.kind(),
                    io::ErrorKind::DirectoryNotEmpty | io::ErrorKind::AlreadyExists
                ) =>
            {
                Ok(())
            }
            Err(error) => Err(io_error("committing a layer")(error)),
        }
    }

    fn sync(&self, directory: &str) -> Result<(), StoreError> {
        File::open(self.root.join(directory))
            .and_then(|directory| directory.sync_all())
            .map_err(io_error(format!("writing {directory} to disk")))
    }

    fn write<T: Serialize>(
        &self,
        directory: &str,
        name: &str,
        record: &T,
    ) -> Result<(), StoreError> {
        let failed = || io_error(format!("writing {directory}/{name}"));
        let text = serde_json::to_vec(record).map_err(|error| failed()(error.into()))?;
        let directory_path = self.root.join(directory);
        let mut file = tempfile::NamedTempFile::new_in(self.root.join("work")).map_err(failed())?;
        file.write_all(&text).map_err(failed())?;
        file.as_file().sync_all().map_err(failed())?;
        file.persist(directory_path.join(name))
            .map_err(|error| failed()(error.error))?;
        self.sync(directory)
    }

    /// Stores an image whose layers are all in the store, under the given names.
    pub fn commit_image(
        &self,
        _: &SharedLock,
        record: &ImageRecord,
        names: &[Reference],
    ) -> Result<Image, StoreError> {
        self.write("images", &record_name(&record.id), record)?;
        let image = &record.id;
        for name in names {
            let text = name.to_string();
            let file = name_file(&text);
            let record = NameRecord {
                name: text,
                image: image.clone(),
            };
            self.write("names", &file, &record)?;
        }
        Ok(self.image_of(record.clone()))
    }

    fn image_of(&self, record: ImageRecord) -> Image {
        Image {
            layers: record
                .configuration
                .rootfs
                .diff_ids
                .iter()
                .rev()
                .map(|diff| self.layer_path(diff).join("root"))
                .collect(),
            id: record.id,
            manifest: record.manifest,
            configuration: record.configuration,
        }
    }

    fn record(&self, id: &Digest) -> Option<ImageRecord> {
        let path = self.root.join("images").join(record_name(id));
        read(&path).ok().flatten()
    }

    /// The image with this name.
    pub fn find(&self, name: &Reference) -> Option<Image> {
        let path = self.root.join("names").join(name_file(&name.to_string()));
        let named: NameRecord = read(&path).ok().flatten()?;
        let record = self.record(&named.image)?;
        let whole = record
            .configuration
            .rootfs
            .diff_ids
            .iter()
            .all(|diff| self.layer_path(diff).join("layer.json").exists());
        whole.then(|| self.image_of(record))
    }

    /// Records that `user` needs the image from now until it is released.
    pub fn hold(&self, user: &str, id: &Digest) -> Result<(), StoreError> {
        let _lock = self.shared()?;
        let record = self.root.join("images").join(record_name(id));
        let file = File::options().write(true).open(&record);
        let file = match file {
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                return Err(StoreError::Gone(id.clone()));
            }
            other => other.map_err(io_error("opening an image's record"))?,
        };
        let held = UseRecord {
            user: user.to_owned(),
            image: id.clone(),
        };
        let text = serde_json::to_vec(&held).map_err(|e| io_error("a use")(e.into()))?;
        // No fsync: containers do not survive a reboot, so this record need not either.
        let path = self.root.join("uses").join(name_file(user));
        let temporary = path.with_extension(format!("{}", std::process::id()));
        fs::write(&temporary, text)
            .and_then(|()| fs::rename(&temporary, &path))
            .map_err(io_error("noting a use"))?;
        // The modification time of the image's record is the time of its last use.
        file.set_modified(SystemTime::now())
            .map_err(io_error("noting a use"))
    }

    pub fn release(&self, user: &str) {
        let _ = fs::remove_file(self.root.join("uses").join(name_file(user)));
    }

    /// Releases the images of users that no longer exist.
    pub fn release_unless(&self, is_alive: impl Fn(&str) -> bool) {
        let uses = self.root.join("uses");
        for name in entries(&uses).unwrap_or_default() {
            let path = uses.join(name);
            let held = read::<UseRecord>(&path);
            if held.is_ok_and(|held| held.is_none_or(|held| !is_alive(&held.user))) {
                let _ = fs::remove_file(path);
            }
        }
    }

    /// All images. Fails if one of the records cannot be read.
    pub fn list(&self) -> Result<Vec<Summary>, StoreError> {
        let names = self.records::<NameRecord>("names")?;
        let uses = self.records::<UseRecord>("uses")?;
        let mut summaries: Vec<Summary> = self
            .records::<ImageRecord>("images")?
            .into_iter()
            .map(|record| {
                let layers: Vec<(Digest, u64)> = record
                    .configuration
                    .rootfs
                    .diff_ids
                    .iter()
                    .map(|diff| (diff.clone(), self.layer(diff).map_or(0, |size| size.bytes)))
                    .collect();
                let path = self.root.join("images").join(record_name(&record.id));
                let modified = fs::metadata(path).and_then(|found| found.modified());
                let last_used = modified
                    .ok()
                    .and_then(|time| Timestamp::try_from(time).ok())
                    .unwrap_or(record.added_at);
                let sorted = |mut texts: Vec<String>| {
                    texts.sort();
                    texts
                };
                Summary {
                    names: sorted(
                        names
                            .iter()
                            .filter(|named| named.image == record.id)
                            .map(|named| named.name.clone())
                            .collect(),
                    ),
                    used_by: sorted(
                        uses.iter()
                            .filter(|held| held.image == record.id)
                            .map(|held| held.user.clone())
                            .collect(),
                    ),
                    bytes: layers.iter().map(|(_, bytes)| bytes).sum(),
                    manifest: record.manifest,
                    added_at: record.added_at,
                    id: record.id,
                    last_used,
                    layers,
                }
            })
            .collect();
        summaries.sort_by(|a, b| (&a.names, &a.id).cmp(&(&b.names, &b.id)));
        Ok(summaries)
    }

    fn records<T: DeserializeOwned>(&self, directory: &str) -> Result<Vec<T>, StoreError> {
        let directory = self.root.join(directory);
        let failed = io_error("listing the images");
        let found = entries(&directory).and_then(|names| {
            let records = names.iter().map(|name| read(&directory.join(name)));
            records.collect::<io::Result<Vec<Option<T>>>>()
        });
        Ok(found.map_err(failed)?.into_iter().flatten().collect())
    }

    /// Removes a name, and the image if that was its last name. An image ID is accepted too.
    pub fn remove(&self, name: &str) -> Result<Removed, StoreError> {
        let lock = self.exclusive()?;
        let images = self.list()?;
        let full = Reference::parse(name).ok().map(|name| name.to_string());
        let by_name = full.and_then(|full| {
            let found = images.iter().find(|image| image.names.contains(&full))?;
            Some((found, Some(full)))
        });
        let by_id = || {
            let hex = name.strip_prefix("sha256:").unwrap_or(name);
            let mut found = images
                .iter()
                .filter(|image| hex.len() >= ABBREVIATED_ID_MIN && image.id.hex().starts_with(hex));
            match (found.next(), found.next()) {
                (Some(image), None) => Some((image, None)),
                _ => None,
            }
        };
        let (image, named) = by_name
            .or_else(by_id)
            .ok_or_else(|| StoreError::Unknown(name.to_owned()))?;
        if let Some(named) = named.filter(|_| image.names.len() > 1) {
            let path = self.root.join("names").join(name_file(&named));
            fs::remove_file(path).map_err(io_error("removing a name"))?;
            return Ok(Removed {
                images: vec![named],
                bytes: 0,
            });
        }
        if let Some(user) = image.used_by.first() {
            return Err(StoreError::InUse {
                image: name.to_owned(),
                user: user.clone(),
            });
        }
        self.remove_images(&lock, &BTreeSet::from([image.id.clone()]))
    }

    /// Removes images, the layers that no other image contains, and other unreferenced files.
    pub fn remove_images(
        &self,
        lock: &ExclusiveLock,
        ids: &BTreeSet<Digest>,
    ) -> Result<Removed, StoreError> {
        let mut removed = Removed::default();
        let mut kept_layers = BTreeSet::new();
        for image in self.list()? {
            if !ids.contains(&image.id) {
                kept_layers.extend(
                    image
                        .layers
                        .into_iter()
                        .map(|(diff, _)| diff.hex().to_owned()),
                );
                continue;
            }
            for name in &image.names {
                let _ = fs::remove_file(self.root.join("names").join(name_file(name)));
            }
            let path = self.root.join("images").join(record_name(&image.id));
            fs::remove_file(path).map_err(io_error("removing an image's record"))?;
            if image.names.is_empty() {
                removed.images.push(image.id.to_string());
            }
            removed.images.extend(image.names);
        }
        let layers = self.root.join("layers");
        for name in entries(&layers).map_err(io_error("listing the layers"))? {
            if !kept_layers.contains(&name) {
                let record = read::<LayerRecord>(&layers.join(&name).join("layer.json"));
                removed.bytes += record.ok().flatten().map_or(0, |record| record.bytes);
                // Move the layer away first, so that a half-removed layer is never taken for a complete one.
                let aside = self.root.join("work").join(&name);
                fs::rename(layers.join(&name), &aside).map_err(io_error("removing a layer"))?;
            }
        }
        self.remove_work(lock)?;
        Ok(removed)
    }

    /// Removes incomplete downloads that have not changed for the given time.
    pub fn remove_old_downloads(&self, _: &ExclusiveLock, age: Duration) {
        let downloads = self.root.join("downloads");
        for name in entries(&downloads).unwrap_or_default() {
            let path = downloads.join(name);
            let old = fs::metadata(&path)
                .and_then(|found| found.modified())
                .is_ok_and(|time| time.elapsed().is_ok_and(|passed| passed > age));
            if old {
                let _ = fs::remove_file(path);
            }
        }
    }

    /// The size of all layers, each counted once.
    pub fn total_bytes(&self) -> Result<u64, StoreError> {
        let layers: BTreeMap<Digest, u64> = self
            .list()?
            .into_iter()
            .flat_map(|image| image.layers)
            .collect();
        Ok(layers.values().sum())
    }

    /// The used and the total bytes of the file system.
    pub fn file_system(&self) -> Result<(u64, u64), StoreError> {
        let found = rustix::fs::statvfs(&self.root)
            .map_err(|error| io_error("measuring the file system")(error.into()))?;
        let total = found.f_blocks * found.f_frsize;
        Ok((total - found.f_bavail * found.f_frsize, total))
    }
}

fn record_name(id: &Digest) -> String {
    format!("{}.json", id.hex())
}

/// Image names contain slashes and user names may contain anything, so the file name is a hash.
fn name_file(text: &str) -> String {
    format!("{}.json", Digest::of(text).hex())
}

/// Reads a record. Returns `None` if the file does not exist or is malformed. Other errors are returned, because a caller that
/// took an unreadable record for absent might remove what it refers to.
fn read<T: DeserializeOwned>(path: &Path) -> io::Result<Option<T>> {
    match fs::read(path) {
        Ok(text) => Ok(serde_json::from_slice(&text).ok()),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(error) => Err(error),
    }
}

fn entries(path: &Path) -> io::Result<Vec<String>> {
    let mut names = Vec::new();
    for entry in fs::read_dir(path)? {
        names.extend(entry?.file_name().into_string().ok());
    }
    Ok(names)
}

fn remove_directory(parent: &Path, name: &str) -> io::Result<()> {
    let path = parent.join(name);
    if fs::symlink_metadata(&path)?.is_dir() {
        fs::remove_dir_all(&path)
    } else {
        fs::remove_file(&path)
    }
}

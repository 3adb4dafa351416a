//! Loads images from files into the store: OCI layouts (a directory or an archive of one) and `docker save` archives.
//!
//! An archive is extracted by the same hardened code as a layer, and its files are opened only inside the extracted directory.

use std::fs::File;
use std::io::Read;
use std::os::fd::OwnedFd;
use std::path::Path;

use jiff::Timestamp;
use rustix::fs::{Mode, OFlags, ResolveFlags};
use serde::Deserialize;
use serde::de::DeserializeOwned;

use crate::compression::decompress;
use crate::digest::Digest;
use crate::extract::{self, Budget, ExtractError, Ownership};
use crate::manifest::{self, Configuration, Descriptor, Document, LAYERS_MAX, ManifestError};
use crate::reference::{InvalidReference, Reference};
use crate::store::{Image, ImageRecord, SharedLock, Store, StoreError};
use crate::unpack::{UnpackError, check_image_size, unpack};

const DOCUMENT_BYTES_MAX: u64 = 4 << 20;
const NAME_ANNOTATIONS: [&str; 2] = [
    "io.containerd.image.name",
    "org.opencontainers.image.ref.name",
];

#[derive(Debug, thiserror::Error)]
pub enum LoadError {
    #[error("opening {path}")]
    Open {
        path: String,
        #[source]
        source: std::io::Error,
    },
    #[error("{path} is malformed")]
    Document {
        path: String,
        #[source]
        source: serde_json::Error,
    },
    #[error("{0} is neither an OCI layout nor a `docker save` archive")]
    Unknown(String),
    #[error("{path} is corrupted: expected {expected}, got {actual}")]
    Corrupted {
        path: String,
        expected: Digest,
        actual: Digest,
    },
    #[error("the image has no name; specify one")]
    Nameless,
    #[error("the file holds {0} images, so a single name cannot be assigned")]
    OneNameForMany(usize),
    #[error(transparent)]
    Name(#[from] InvalidReference),
    #[error(transparent)]
    Manifest(#[from] ManifestError),
    #[error("unpacking the archive")]
    Archive(#[source] ExtractError),
    #[error(transparent)]
    Store(#[from] StoreError),
    #[error(transparent)]
    Unpack(#[from] UnpackError),
    #[error("loading was interrupted")]
    Interrupted,
}

impl From<crate::pull::Interrupted> for LoadError {
    fn from(_: crate::pull::Interrupted) -> Self {
        Self::Interrupted
    }
}

/// An image that was found in the files and is not loaded yet.
struct Found {
    names: Vec<Reference>,
    manifest: Option<Digest>,
    configuration: Vec<u8>,
    /// The paths of the layers, lowest first, and their expected digests where known.
    layers: Vec<(String, Option<Digest>)>,
}

/// Loads all images in `path`. If there is exactly one, `name` replaces the names from the files. Blocks.
pub(crate) fn load(
    store: &Store,
    path: &Path,
    name: Option<&Reference>,
    budget: Budget,
) -> Result<Vec<(Vec<Reference>, Image)>, LoadError> {
    let lock = store.shared()?;
    let unpacked;
    let directory = if path.is_dir() {
        path
    } else {
        unpacked = unpack_archive(store, path, budget)?;
        unpacked.path()
    };
    let files = Files::open(directory, path)?;
    let mut found = if files.exists("manifest.json") {
        docker_archive(&files)?
    } else if files.exists("index.json") {
        layout(&files)?
    } else {
        return Err(LoadError::Unknown(path.display().to_string()));
    };
    if let Some(name) = name {
        match found.as_mut_slice() {
            [only] => only.names = vec![name.clone()],
            several => return Err(LoadError::OneNameForMany(several.len())),
        }
    }
    found
        .into_iter()
        .map(|image| load_one(store, &lock, &files, image, budget))
        .collect()
}

fn unpack_archive(
    store: &Store,
    path: &Path,
    budget: Budget,
) -> Result<tempfile::TempDir, LoadError> {
    let failed = |source| LoadError::Open {
        path: path.display().to_string(),
        source,
    };
    let file = File::open(path).map_err(failed)?;
    let work = store.work_directory()?;
    let plain = decompress(file).map_err(failed)?;
    extract::extract(plain, work.path(), budget, Ownership::CurrentUser)
        .map_err(LoadError::Archive)?;
    Ok(work)
}

fn load_one(
    store: &Store,
    lock: &SharedLock,
    files: &Files,
    found: Found,
    budget: Budget,
) -> Result<(Vec<Reference>, Image), LoadError> {
    if found.names.is_empty() {
        return Err(LoadError::Nameless);
    }
    let configuration = Configuration::parse(&found.configuration, found.layers.len())?;
    for ((path, expected), diff) in found.layers.iter().zip(&configuration.rootfs.diff_ids) {
        if store.layer(diff).is_some() {
            continue;
        }
        if let Some(expected) = expected {
            files.verify(path, expected)?;
        }
        unpack(store, lock, files.file(path)?, diff, budget)?;
    }
    check_image_size(store, &configuration, budget).map_err(UnpackError::from)?;
    let record = ImageRecord {
        id: Digest::of(&found.configuration),
        manifest: found.manifest,
        configuration,
        added_at: Timestamp::now(),
    };
    let image = store.commit_image(lock, &record, &found.names)?;
    Ok((found.names, image))
}

/// Reads `manifest.json` of a `docker save` archive.
fn docker_archive(files: &Files) -> Result<Vec<Found>, LoadError> {
    #[derive(Deserialize)]
    #[serde(rename_all = "PascalCase")]
    struct Entry {
        config: String,
        #[serde(default)]
        repo_tags: Option<Vec<String>>,
        layers: Vec<String>,
    }
    let entries: Vec<Entry> = files.document("manifest.json")?;
    entries
        .into_iter()
        .map(|entry| {
            if entry.layers.len() > LAYERS_MAX {
                return Err(ManifestError::TooManyLayers(entry.layers.len()).into());
            }
            let names = entry.repo_tags.unwrap_or_default();
            Ok(Found {
                names: names
                    .iter()
                    .map(|name| Reference::parse(name))
                    .collect::<Result<_, _>>()?,
                manifest: None,
                configuration: files.small(&entry.config)?,
                layers: entry.layers.into_iter().map(|path| (path, None)).collect(),
            })
        })
        .collect()
}

/// Reads `index.json` of an OCI layout. Each entry is an image or a multi-platform index.
fn layout(files: &Files) -> Result<Vec<Found>, LoadError> {
    #[derive(Deserialize)]
    struct Index {
        manifests: Vec<Descriptor>,
    }
    let index: Index = files.document("index.json")?;
    // Entries that differ only in their platform belong to the same image.
    let entries = if index.manifests.iter().any(|entry| entry.platform.is_some())
        && index
            .manifests
            .iter()
            .all(|entry| names_of(entry).is_ok_and(|names| names.is_empty()))
    {
        vec![manifest::choose(&index.manifests, manifest::architecture())?.clone()]
    } else {
        index.manifests
    };
    entries
        .iter()
        .map(|entry| {
            let names = names_of(entry)?;
            let mut current = entry.clone();
            loop {
                let bytes = files.blob(&current.digest)?;
                match manifest::parse(&bytes, &current.media_type)? {
                    Document::Index(inner) => {
                        current = manifest::choose(&inner, manifest::architecture())?.clone();
                    }
                    Document::Image(image) => {
                        return Ok(Found {
                            names,
                            manifest: Some(entry.digest.clone()),
                            configuration: files.blob(&image.config.digest)?,
                            layers: image
                                .layers
                                .into_iter()
                                .map(|layer| (blob_path(&layer.digest), Some(layer.digest)))
                                .collect(),
                        });
                    }
                }
            }
        })
        .collect()
}

/// The name of an entry in a layout. A bare tag is not accepted as a name.
fn names_of(entry: &Descriptor) -> Result<Vec<Reference>, LoadError> {
    let name = NAME_ANNOTATIONS
        .iter()
        .find_map(|key| entry.annotations.get(*key))
        .filter(|name| name.contains(['/', ':']));
    Ok(name
        .map(|name| Reference::parse(name))
        .transpose()?
        .into_iter()
        .collect())
}

fn blob_path(digest: &Digest) -> String {
    format!("blobs/sha256/{}", digest.hex())
}

/// Opens files below one directory and nothing outside it.
struct Files {
    root: OwnedFd,
    shown: String,
}

impl Files {
    fn open(directory: &Path, shown: &Path) -> Result<Self, LoadError> {
        let shown = shown.display().to_string();
        let root = extract::open_directory(directory).map_err(|source| LoadError::Open {
            path: shown.clone(),
            source,
        })?;
        Ok(Self { root, shown })
    }

    fn exists(&self, path: &str) -> bool {
        self.file(path).is_ok()
    }

    fn file(&self, path: &str) -> Result<File, LoadError> {
        rustix::fs::openat2(
            &self.root,
            path,
            OFlags::RDONLY | OFlags::CLOEXEC | OFlags::NONBLOCK,
            Mode::empty(),
            ResolveFlags::BENEATH | ResolveFlags::NO_MAGICLINKS,
        )
        .map(File::from)
        .map_err(|source| LoadError::Open {
            path: format!("{path} in {}", self.shown),
            source: source.into(),
        })
    }

    fn small(&self, path: &str) -> Result<Vec<u8>, LoadError> {
        let mut bytes = Vec::new();
        self.file(path)?
            .take(DOCUMENT_BYTES_MAX)
            .read_to_end(&mut bytes)
            .map_err(|source| LoadError::Open {
                path: format!("{path} in {}", self.shown),
                source,
            })?;
        Ok(bytes)
    }

    fn document<T: DeserializeOwned>(&self, path: &str) -> Result<T, LoadError> {
        serde_json::from_slice(&self.small(path)?).map_err(|source| LoadError::Document {
            path: format!("{path} in {}", self.shown),
            source,
        })
    }

    fn blob(&self, digest: &Digest) -> Result<Vec<u8>, LoadError> {
        let path = blob_path(digest);
        let bytes = self.small(&path)?;
        self.compare(&path, digest, Digest::of(&bytes))?;
        Ok(bytes)
    }

    fn verify(&self, path: &str, expected: &Digest) -> Result<(), LoadError> {
        let mut reader = crate::digest::HashingReader::new(self.file(path)?);
        std::io::copy(&mut reader, &mut std::io::sink()).map_err(|source| LoadError::Open {
            path: path.to_owned(),
            source,
        })?;
        self.compare(path, expected, reader.digest())
    }

    fn compare(&self, path: &str, expected: &Digest, actual: Digest) -> Result<(), LoadError> {
        if actual == *expected {
            return Ok(());
        }
        Err(LoadError::Corrupted {
            path: format!("{path} in {}", self.shown),
            expected: expected.clone(),
            actual,
        })
    }
}

//! An OCI layout as a tar archive, which `ctr images import`, `kind load image-archive`, `skopeo` and our own store read.

use std::collections::BTreeMap;
use std::io::Write;

use jiff::Timestamp;
use serde::Serialize;

use super::WriteError;
use super::layer::Layer;
use super::tree::{Content, Naming, Tree};
use crate::digest::Digest;
use crate::manifest::{Descriptor, OCI_INDEX, OCI_MANIFEST, Platform};
use crate::reference::Reference;

const OCI_CONFIG: &str = "application/vnd.oci.image.config.v1+json";
const OCI_LAYER: &str = "application/vnd.oci.image.layer.v1.tar+gzip";
/// The full name, by which containerd imports.
const CONTAINERD_NAME: &str = "io.containerd.image.name";
/// The tag alone, by which other tools select an image of a layout.
const OCI_REFERENCE: &str = "org.opencontainers.image.ref.name";

/// The default process of the image's containers.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize)]
#[serde(rename_all = "PascalCase")]
pub struct Process {
    #[serde(skip_serializing_if = "Option::is_none")]
    pub user: Option<String>,
    /// As `8080/tcp`.
    #[serde(
        skip_serializing_if = "Vec::is_empty",
        serialize_with = "as_empty_objects"
    )]
    pub exposed_ports: Vec<String>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub env: Vec<String>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub entrypoint: Vec<String>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub cmd: Vec<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub working_dir: Option<String>,
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    pub labels: BTreeMap<String, String>,
}

/// Go's maps without values are objects with empty objects in JSON.
fn as_empty_objects<S: serde::Serializer>(
    names: &[String],
    serializer: S,
) -> Result<S::Ok, S::Error> {
    let empty = || serde_json::Value::Object(serde_json::Map::new());
    let sorted: BTreeMap<&String, _> = names.iter().map(|name| (name, empty())).collect();
    sorted.serialize(serializer)
}

/// An image for one platform.
#[derive(Debug)]
pub struct Image<'a> {
    /// In OCI notation: `amd64`, `arm64`.
    pub architecture: String,
    pub process: Process,
    /// Lowest first.
    pub layers: Vec<&'a Layer>,
    /// What made the layers, for the history that tools show. One line for each layer.
    pub history: Vec<String>,
}

/// An image under one name, for one or several platforms.
#[derive(Debug)]
pub struct Archive<'a> {
    pub name: &'a Reference,
    pub images: Vec<Image<'a>>,
    /// The time of the image and of every entry, in seconds since the epoch.
    pub created: u64,
}

#[derive(Serialize)]
struct Configuration<'a> {
    created: &'a str,
    architecture: &'a str,
    os: &'static str,
    config: &'a Process,
    rootfs: RootFs<'a>,
    history: Vec<HistoryEntry<'a>>,
}

#[derive(Serialize)]
struct RootFs<'a> {
    r#type: &'static str,
    diff_ids: Vec<&'a Digest>,
}

#[derive(Serialize)]
struct HistoryEntry<'a> {
    created: &'a str,
    created_by: &'a str,
}

#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct ImageManifest<'a> {
    schema_version: u8,
    media_type: &'static str,
    config: &'a Descriptor,
    layers: Vec<Descriptor>,
}

#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct Index<'a> {
    schema_version: u8,
    media_type: &'static str,
    manifests: &'a [Descriptor],
}

#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct LayoutVersion {
    image_layout_version: &'static str,
}

impl Archive<'_> {
    /// Writes the archive, and returns the digest by which a registry would know the image.
    pub fn write(&self, out: impl Write) -> Result<Digest, WriteError> {
        let mut files = Tree::new(self.created);
        let layout = serde_json::to_vec(&LayoutVersion {
            image_layout_version: "1.0.0",
        })?;
        files.file("oci-layout", 0o644, Content::Bytes(layout))?;
        let manifests: Vec<Descriptor> = self
            .images
            .iter()
            .map(|image| self.image(image, &mut files))
            .collect::<Result<_, _>>()?;
        // The index of one platform is left out: older importers read no nested index.
        let mut top = match manifests.as_slice() {
            [] => return Err(WriteError::NoImage),
            [only] => only.clone(),
            several => document(
                &mut files,
                OCI_INDEX,
                &Index {
                    schema_version: 2,
                    media_type: OCI_INDEX,
                    manifests: several,
                },
            )?,
        };
        top.annotations
            .insert(CONTAINERD_NAME.to_owned(), self.name.to_string());
        if let Some(tag) = self.name.tag() {
            top.annotations
                .insert(OCI_REFERENCE.to_owned(), tag.to_owned());
        }
        let digest = top.digest.clone();
        let index = serde_json::to_vec(&Index {
            schema_version: 2,
            media_type: OCI_INDEX,
            manifests: &[top],
        })?;
        files.file("index.json", 0o644, Content::Bytes(index))?;
        files.write(out, Naming::Plain)?;
        Ok(digest)
    }

    /// Adds the blobs of one platform's image, and describes its manifest.
    fn image(&self, image: &Image<'_>, files: &mut Tree) -> Result<Descriptor, WriteError> {
        let invalid = || WriteError::Time(self.created);
        let seconds = i64::try_from(self.created).map_err(|_| invalid())?;
        let created = Timestamp::from_second(seconds)
            .map_err(|_| invalid())?
            .to_string();
        let configuration = Configuration {
            created: &created,
            architecture: &image.architecture,
            os: "linux",
            config: &image.process,
            rootfs: RootFs {
                r#type: "layers",
                diff_ids: image.layers.iter().map(|layer| &layer.diff_id).collect(),
            },
            history: image
                .history
                .iter()
                .map(|created_by| HistoryEntry {
                    created: &created,
                    created_by,
                })
                .collect(),
        };
        let config = document(files, OCI_CONFIG, &configuration)?;
        let mut layers = Vec::new();
        for layer in &image.layers {
            let content = Content::Path(layer.file.path().to_owned());
            files.file(&blob_path(&layer.digest), 0o644, content)?;
            layers.push(Descriptor {
                media_type: OCI_LAYER.to_owned(),
                digest: layer.digest.clone(),
                size: layer.size,
                platform: None,
                annotations: BTreeMap::new(),
            });
        }
        let manifest = ImageManifest {
            schema_version: 2,
            media_type: OCI_MANIFEST,
            config: &config,
            layers,
        };
        let mut described = document(files, OCI_MANIFEST, &manifest)?;
        described.platform = Some(Platform {
            architecture: image.architecture.clone(),
            os: "linux".to_owned(),
            variant: None,
        });
        Ok(described)
    }
}

/// Adds a JSON document as a blob, and describes it.
fn document(
    files: &mut Tree,
    media_type: &str,
    content: &impl Serialize,
) -> Result<Descriptor, WriteError> {
    let bytes = serde_json::to_vec(content)?;
    let descriptor = Descriptor {
        media_type: media_type.to_owned(),
        digest: Digest::of(&bytes),
        size: bytes.len() as u64,
        platform: None,
        annotations: BTreeMap::new(),
    };
    files.file(&blob_path(&descriptor.digest), 0o644, Content::Bytes(bytes))?;
    Ok(descriptor)
}

fn blob_path(digest: &Digest) -> String {
    format!("blobs/sha256/{}", digest.hex())
}

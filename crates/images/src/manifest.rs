//! Parses OCI and Docker manifests, indexes and configurations. Pure.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use crate::digest::Digest;

pub const OCI_INDEX: &str = "application/vnd.oci.image.index.v1+json";
pub const OCI_MANIFEST: &str = "application/vnd.oci.image.manifest.v1+json";
pub const DOCKER_LIST: &str = "application/vnd.docker.distribution.manifest.list.v2+json";
pub const DOCKER_MANIFEST: &str = "application/vnd.docker.distribution.manifest.v2+json";

#[derive(Debug, thiserror::Error)]
pub enum ManifestError {
    #[error("the manifest is malformed")]
    Malformed(#[source] serde_json::Error),
    #[error("the manifest is neither an image nor a list of images (media type {0:?})")]
    Kind(String),
    #[error("no image for linux/{architecture} among {offered}")]
    Platform {
        architecture: String,
        offered: String,
    },
    #[error("the configuration lists {diffs} layers but the manifest lists {layers}")]
    LayerCount { diffs: usize, layers: usize },
    #[error("the image has {0} layers, more than {LAYERS_MAX}")]
    TooManyLayers(usize),
}

/// More layers than any builder creates, and as many as an overlay mount can stack.
pub const LAYERS_MAX: usize = 127;

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Descriptor {
    #[serde(default)]
    pub media_type: String,
    pub digest: Digest,
    pub size: u64,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub platform: Option<Platform>,
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub annotations: BTreeMap<String, String>,
}

#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Platform {
    #[serde(default)]
    pub architecture: String,
    #[serde(default)]
    pub os: String,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub variant: Option<String>,
}

/// The manifest of an image for one platform.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Manifest {
    pub config: Descriptor,
    #[serde(default)]
    pub layers: Vec<Descriptor>,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Document {
    Image(Manifest),
    Index(Vec<Descriptor>),
}

/// Parses a manifest. Its content decides whether it is an image or an index; the media type of the response is only a hint.
pub fn parse(bytes: &[u8], media_type: &str) -> Result<Document, ManifestError> {
    #[derive(Deserialize)]
    #[serde(rename_all = "camelCase")]
    struct Any {
        media_type: Option<String>,
        manifests: Option<Vec<Descriptor>>,
        config: Option<Descriptor>,
        layers: Option<Vec<Descriptor>>,
    }
    let any: Any = serde_json::from_slice(bytes).map_err(ManifestError::Malformed)?;
    match (any.manifests, any.config) {
        // A document that is both an image and an index could be read differently by other tools.
        (Some(manifests), None) => Ok(Document::Index(manifests)),
        (None, Some(config)) => {
            let layers = any.layers.unwrap_or_default();
            if layers.len() > LAYERS_MAX {
                return Err(ManifestError::TooManyLayers(layers.len()));
            }
            Ok(Document::Image(Manifest { config, layers }))
        }
        _ => Err(ManifestError::Kind(
            any.media_type.unwrap_or_else(|| media_type.to_owned()),
        )),
    }
}

/// The architecture of this machine in OCI notation.
pub fn architecture() -> &'static str {
    match std::env::consts::ARCH {
        "x86_64" => "amd64",
        "aarch64" => "arm64",
        "x86" => "386",
        "powerpc64" => "ppc64le",
        other => other,
    }
}

/// The entry of an index that matches this machine's platform.
pub fn choose<'a>(
    index: &'a [Descriptor],
    architecture: &str,
) -> Result<&'a Descriptor, ManifestError> {
    let fits = |entry: &&Descriptor| match &entry.platform {
        Some(platform) => platform.os == "linux" && platform.architecture == architecture,
        None => false,
    };
    // Layouts name their only image by an index with one entry without a platform.
    let only = || match index {
        [entry] if entry.platform.is_none() => Some(entry),
        _ => None,
    };
    index.iter().find(fits).or_else(only).ok_or_else(|| {
        let offered = index
            .iter()
            .filter_map(|entry| entry.platform.as_ref())
            .filter(|platform| platform.os != "unknown")
            .map(|platform| format!("{}/{}", platform.os, platform.architecture))
            .collect::<Vec<_>>()
            .join(", ");
        ManifestError::Platform {
            architecture: architecture.to_owned(),
            offered: if offered.is_empty() {
                "nothing".to_owned()
            } else {
                offered
            },
        }
    })
}

/// The default process settings of the image's containers.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "PascalCase")]
pub struct ContainerConfig {
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub user: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub env: Option<Vec<String>>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub entrypoint: Option<Vec<String>>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cmd: Option<Vec<String>>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub working_dir: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub stop_signal: Option<String>,
}

#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct RootFs {
    #[serde(default)]
    pub diff_ids: Vec<Digest>,
}

/// An image configuration. Its digest is the image ID.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Configuration {
    #[serde(default)]
    pub architecture: String,
    #[serde(default)]
    pub os: String,
    #[serde(default)]
    pub config: Option<ContainerConfig>,
    #[serde(default)]
    pub rootfs: RootFs,
}

impl Configuration {
    pub fn parse(bytes: &[u8], layers: usize) -> Result<Self, ManifestError> {
        let configuration: Self =
            serde_json::from_slice(bytes).map_err(ManifestError::Malformed)?;
        let diffs = configuration.rootfs.diff_ids.len();
        if diffs != layers {
            return Err(ManifestError::LayerCount { diffs, layers });
        }
        if diffs > LAYERS_MAX {
            return Err(ManifestError::TooManyLayers(diffs));
        }
        let stated = &configuration.architecture;
        if !stated.is_empty() && stated != architecture() {
            return Err(ManifestError::Platform {
                architecture: architecture().to_owned(),
                offered: format!("{}/{stated}", configuration.os),
            });
        }
        Ok(configuration)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn entry(os: &str, architecture: &str) -> serde_json::Value {
        json!({"mediaType": OCI_MANIFEST, "digest": Digest::of(architecture).to_string(), "size": 2,
            "platform": {"os": os, "architecture": architecture}})
    }

    #[test]
    fn the_image_for_this_platform_is_chosen_and_attestations_are_not() {
        let index = json!({"manifests": [entry("unknown", "unknown"), entry("linux", "arm64"), entry("linux", "amd64")]});
        let Document::Index(index) = parse(index.to_string().as_bytes(), OCI_INDEX).unwrap() else {
            panic!("an index was parsed as an image");
        };
        assert_eq!(choose(&index, "amd64").unwrap().digest, Digest::of("amd64"));
        let refused = choose(&index, "riscv64").unwrap_err().to_string();
        assert_eq!(
            refused,
            "no image for linux/riscv64 among linux/arm64, linux/amd64"
        );
    }

    #[test]
    fn a_document_that_is_both_image_and_index_is_refused() {
        let config = json!({"digest": Digest::of("c").to_string(), "size": 1});
        let both = json!({"manifests": [], "config": config, "layers": []});
        assert!(parse(both.to_string().as_bytes(), OCI_MANIFEST).is_err());
        assert!(parse(b"{\"schemaVersion\": 1, \"fsLayers\": []}", "v1").is_err());
    }

    #[test]
    fn a_configuration_must_name_every_layer() {
        let text = json!({"architecture": architecture(), "os": "linux",
            "rootfs": {"type": "layers", "diff_ids": [Digest::of("a").to_string()]}})
        .to_string();
        assert!(Configuration::parse(text.as_bytes(), 1).is_ok());
        assert!(Configuration::parse(text.as_bytes(), 2).is_err());
    }
}

//! Volumes: creates their content on the node, and mounts them into containers.
//!
//! ```text
//! pods/<uid>/volumes/<name>     emptyDir, configMap, downwardAPI, projected
//! memory/<uid>/<name>           secrets and emptyDirs in memory, each a tmpfs of its own
//! volumes/<volume>              claims; they outlive the pod
//! ```
//!
//! Files of a pod belong to its UID range on the host. Claims have container UIDs on disk and are mounted ID-mapped, because the next
//! pod that uses them has another UID range.

pub mod claims;
mod content;
mod host_path;
mod memory;
mod refresh;

use std::fs;
use std::io;
use std::os::unix::fs::{PermissionsExt, chown};
use std::path::{Component, Path, PathBuf};

use k8s_openapi::api::authentication::v1::{TokenRequest, TokenRequestSpec};
use k8s_openapi::api::core::v1::{
    Container, EmptyDirVolumeSource, Pod, ServiceAccount, Volume, VolumeMount,
};
use kube::api::PostParams;
use kube::{Api, Client};
use rustix::mount::UnmountFlags;
use shim_protocol::{BindSource, Mount, MountKind};

use self::content::{File, Medium};
pub use self::refresh::Tokens;
use crate::api_objects::Objects;
use crate::environment::{self, Surroundings};
use crate::pod_uid::PodUid;
use crate::{pod_resources, quantity};
use api::volumes::{claim_directory, claim_name};

#[derive(Debug, thiserror::Error)]
pub enum VolumeError {
    #[error("volume {volume:?}: {source}")]
    Content {
        volume: String,
        #[source]
        source: content::ContentError,
    },
    #[error("volume {volume:?}: preparing its directory")]
    Io {
        volume: String,
        #[source]
        source: io::Error,
    },
    #[error("volume {volume:?}")]
    Claim {
        volume: String,
        #[source]
        source: claims::ClaimError,
    },
    #[error("volume {0:?}: hostPath is not allowed on this node (--allow-host-path)")]
    HostPathNotAllowed(String),
    #[error("volume {volume:?}")]
    HostPath {
        volume: String,
        #[source]
        source: host_path::HostPathError,
    },
    #[error("volume {0:?}: its type is not supported on this node")]
    Unsupported(String),
    #[error("volumeMount names volume {0:?}, which the pod does not have")]
    NoSuchVolume(String),
    #[error("{field} {path:?} must stay inside its volume")]
    Escapes { field: &'static str, path: String },
    #[error("a token for service account {account:?}")]
    Token {
        account: String,
        #[source]
        source: Box<kube::Error>,
    },
}

/// What must change before volumes that could not be created can be.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Remedy {
    /// The claim is being bound, which is not a failure.
    Binding,
    /// An object that the pod refers to must be created or changed.
    Objects,
    /// The pod's service account must be created.
    ServiceAccount,
    /// Something outside of the API.
    Unknown,
}

impl VolumeError {
    pub fn remedy(&self) -> Remedy {
        match self {
            Self::Claim {
                source: claims::ClaimError::NotBound(_),
                ..
            } => Remedy::Binding,
            Self::Claim { .. } | Self::Content { .. } => Remedy::Objects,
            Self::Token { source, .. } if matches!(&**source, kube::Error::Api(status) if status.code == 404) => {
                Remedy::ServiceAccount
            }
            _ => Remedy::Unknown,
        }
    }
}

/// The node's volumes.
#[derive(Clone)]
pub struct Volumes {
    data_dir: PathBuf,
    allow_host_path: bool,
    client: Client,
}

impl std::fmt::Debug for Volumes {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter
            .debug_struct("Volumes")
            .field("data_dir", &self.data_dir)
            .finish_non_exhaustive()
    }
}

/// The source of a volume's mounts.
struct Source {
    path: PathBuf,
    id_mapped: bool,
    read_only: bool,
}

impl Volumes {
    pub fn open(data_dir: &Path, allow_host_path: bool, client: Client) -> io::Result<Self> {
        crate::runtime::slots::make_private_mount(&data_dir.join("memory"))?;
        fs::create_dir_all(data_dir.join("volumes"))?;
        Ok(Self {
            data_dir: data_dir.to_owned(),
            allow_host_path,
            client,
        })
    }

    fn on_disk(&self, uid: &PodUid, volume: &str) -> PathBuf {
        self.data_dir
            .join("pods")
            .join(uid.as_str())
            .join("volumes")
            .join(volume)
    }

    fn in_memory(&self, uid: &PodUid, volume: &str) -> PathBuf {
        self.data_dir.join("memory").join(uid.as_str()).join(volume)
    }

    /// Creates all volumes of a pod. Idempotent.
    pub async fn prepare(
        &self,
        uid: &PodUid,
        pod: &Pod,
        objects: &Objects,
        surroundings: &Surroundings,
        uid_base: u32,
    ) -> Result<(), VolumeError> {
        let group = group_of(pod);
        for volume in volumes_of(pod) {
            let failed = |source| VolumeError::Io {
                volume: volume.name.clone(),
                source,
            };
            if let Some(empty) = &volume.empty_dir {
                let path = if empty.medium.as_deref() == Some("Memory") {
                    let path = self.in_memory(uid, &volume.name);
                    memory::mount(&path, memory_limit(pod, empty)).map_err(failed)?;
                    path
                } else {
                    let path = self.on_disk(uid, &volume.name);
                    fs::create_dir_all(&path).map_err(failed)?;
                    path
                };
                give(&path, uid_base, group, 0o777).map_err(failed)?;
            } else if let Some(claim) = claim_name(pod, volume) {
                let path = self.claim_path(volume, &claim, objects)?;
                fs::create_dir_all(&path).map_err(failed)?;
                if let Some(group) = group {
                    // On a blocking thread: a claim may have any number of files, which other pods may be changing.
                    let shared = tokio::task::spawn_blocking(move || {
                        directory_tree::share_with_group(&path, group)
                    });
                    shared
                        .await
                        .unwrap_or_else(|error| Err(io::Error::other(error)))
                        .map_err(failed)?;
                }
            } else if let Some(source) = &volume.host_path {
                if !self.allow_host_path {
                    return Err(VolumeError::HostPathNotAllowed(volume.name.clone()));
                }
                host_path::check(source).map_err(|source| VolumeError::HostPath {
                    volume: volume.name.clone(),
                    source,
                })?;
            } else {
                let tokens = self.tokens(pod, volume).await?;
                let content = content::files(pod, volume, objects, surroundings, &tokens)
                    .map_err(|source| VolumeError::Content {
                        volume: volume.name.clone(),
                        source,
                    })?
                    .ok_or_else(|| VolumeError::Unsupported(volume.name.clone()))?;
                let path = match content.medium {
                    Medium::Disk => self.on_disk(uid, &volume.name),
                    Medium::Memory => {
                        let path = self.in_memory(uid, &volume.name);
                        memory::mount(&path, Some(content.room_bytes())).map_err(failed)?;
                        path
                    }
                };
                write_files(&path, &content.files, uid_base, group).map_err(failed)?;
            }
        }
        Ok(())
    }

    fn claim_path(
        &self,
        volume: &Volume,
        claim: &str,
        objects: &Objects,
    ) -> Result<PathBuf, VolumeError> {
        let name = claims::volume_of(claim, objects).map_err(|source| VolumeError::Claim {
            volume: volume.name.clone(),
            source,
        })?;
        Ok(claim_directory(&self.data_dir, name))
    }

    async fn tokens(&self, pod: &Pod, volume: &Volume) -> Result<Vec<String>, VolumeError> {
        let mut tokens = Vec::new();
        let sources = volume
            .projected
            .iter()
            .flat_map(|projected| projected.sources.iter().flatten());
        for source in sources.filter_map(|source| source.service_account_token.as_ref()) {
            let account = service_account(pod).to_owned();
            let request = TokenRequest {
                spec: TokenRequestSpec {
                    audiences: source.audience.clone().into_iter().collect(),
                    expiration_seconds: source.expiration_seconds,
                    bound_object_ref: Some(
                        k8s_openapi::api::authentication::v1::BoundObjectReference {
                            api_version: Some("v1".to_owned()),
                            kind: Some("Pod".to_owned()),
                            name: pod.metadata.name.clone(),
                            uid: pod.metadata.uid.clone(),
                        },
                    ),
                },
                ..TokenRequest::default()
            };
            let namespace = pod.metadata.namespace.as_deref().unwrap_or_default();
            let api = Api::<ServiceAccount>::namespaced(self.client.clone(), namespace);
            let answer = api
                .create_token_request(&account, &PostParams::default(), &request)
                .await
                .map_err(|source| VolumeError::Token {
                    account: account.clone(),
                    source: Box::new(source),
                })?;
            tokens.push(answer.status.map(|status| status.token).unwrap_or_default());
        }
        Ok(tokens)
    }

    /// The mounts of a container, from prepared volumes.
    pub fn mounts(
        &self,
        uid: &PodUid,
        pod: &Pod,
        container: &Container,
        objects: &Objects,
        variables: &[(String, String)],
    ) -> Result<Vec<Mount>, VolumeError> {
        let known = variables.iter().cloned().collect();
        container
            .volume_mounts
            .iter()
            .flatten()
            .map(|wanted| {
                let source = self.source(uid, pod, wanted, objects)?;
                let sub_path = match (&wanted.sub_path_expr, &wanted.sub_path) {
                    (Some(expression), _) => Some(environment::expand(expression, &known)),
                    (None, path) => path.clone(),
                };
                let sub_path = sub_path
                    .filter(|path| !path.is_empty())
                    .map(|path| inside("subPath", path))
                    .transpose()?;
                Ok(Mount {
                    target: PathBuf::from(&wanted.mount_path),
                    kind: MountKind::Bind(BindSource {
                        path: source.path,
                        sub_path,
                        create_sub_path: !source.read_only,
                        id_mapped: source.id_mapped,
                        recursive: false,
                    }),
                    read_only: source.read_only || wanted.read_only == Some(true),
                    no_exec: false,
                })
            })
            .collect()
    }

    fn source(
        &self,
        uid: &PodUid,
        pod: &Pod,
        wanted: &VolumeMount,
        objects: &Objects,
    ) -> Result<Source, VolumeError> {
        let volume = volumes_of(pod)
            .iter()
            .find(|volume| volume.name == wanted.name)
            .ok_or_else(|| VolumeError::NoSuchVolume(wanted.name.clone()))?;
        if let Some(claim) = claim_name(pod, volume) {
            let read_only = volume
                .persistent_volume_claim
                .as_ref()
                .is_some_and(|claim| claim.read_only == Some(true));
            return Ok(Source {
                path: self.claim_path(volume, &claim, objects)?,
                id_mapped: true,
                read_only,
            });
        }
        if let Some(host) = &volume.host_path {
            return Ok(Source {
                path: PathBuf::from(&host.path),
                id_mapped: false,
                read_only: false,
            });
        }
        let memory = self.in_memory(uid, &volume.name);
        let path = if memory.exists() {
            memory
        } else {
            self.on_disk(uid, &volume.name)
        };
        Ok(Source {
            path,
            id_mapped: false,
            read_only: volume.empty_dir.is_none(),
        })
    }

    /// Whether the pod's claims must be looked up again to mount them.
    pub fn needs_claims(pod: &Pod) -> bool {
        volumes_of(pod)
            .iter()
            .any(|volume| claim_name(pod, volume).is_some())
    }

    /// Removes a pod's volumes from memory and disk, except claims.
    pub async fn release(&self, uid: &PodUid) -> Result<(), VolumeError> {
        let directory = self.data_dir.join("memory").join(uid.as_str());
        let on_disk = self.data_dir.join("pods").join(uid.as_str());
        let (on_disk, uid) = (on_disk.join("volumes"), uid.to_string());
        tokio::task::spawn_blocking(move || {
            for entry in fs::read_dir(&directory).into_iter().flatten().flatten() {
                let _ = rustix::mount::unmount(entry.path(), UnmountFlags::DETACH);
            }
            directory_tree::remove(&directory)
                .and_then(|()| directory_tree::remove(&on_disk))
                .map_err(|source| VolumeError::Io {
                    volume: uid,
                    source,
                })
        })
        .await
        .unwrap_or(Ok(()))
    }

    /// The pods that have volumes in memory.
    pub fn pods_in_memory(&self) -> Vec<PodUid> {
        let entries = fs::read_dir(self.data_dir.join("memory"))
            .into_iter()
            .flatten()
            .flatten();
        entries
            .filter_map(|entry| PodUid::parse(entry.file_name().to_str()?))
            .collect()
    }

    /// Unmounts the directory of volumes in memory. All pods must be gone.
    pub fn dismantle(&self) {
        let _ = rustix::mount::unmount(self.data_dir.join("memory"), UnmountFlags::DETACH);
    }
}

/// The service account of a pod.
pub fn service_account(pod: &Pod) -> &str {
    let spec = pod.spec.as_ref();
    spec.and_then(|spec| spec.service_account_name.as_deref())
        .filter(|name| !name.is_empty())
        .unwrap_or("default")
}

fn volumes_of(pod: &Pod) -> &[Volume] {
    let volumes = pod.spec.as_ref().and_then(|spec| spec.volumes.as_deref());
    volumes.unwrap_or_default()
}

/// The group of a pod's volumes (`fsGroup`).
fn group_of(pod: &Pod) -> Option<u32> {
    let security = pod.spec.as_ref()?.security_context.as_ref()?;
    u32::try_from(security.fs_group?).ok()
}

/// The size limit of an emptyDir in memory: its `sizeLimit`, and at most the memory limit of the pod's containers.
fn memory_limit(pod: &Pod, empty: &EmptyDirVolumeSource) -> Option<u64> {
    let own = empty.size_limit.as_ref();
    let own = own.and_then(|limit| quantity::units(&limit.0));
    let of_pod = pod.spec.as_ref();
    let of_pod = of_pod.and_then(|spec| pod_resources::total_limit(spec, "memory"));
    own.into_iter().chain(of_pod).min()
}

fn inside(field: &'static str, path: String) -> Result<PathBuf, VolumeError> {
    let clean = Path::new(&path)
        .components()
        .all(|part| matches!(part, Component::Normal(_) | Component::CurDir));
    if clean {
        Ok(PathBuf::from(path))
    } else {
        Err(VolumeError::Escapes { field, path })
    }
}

/// Sets the owner of a directory to the container's root, with the pod's group if it has one.
fn give(path: &Path, base: u32, group: Option<u32>, mode: u32) -> io::Result<()> {
    chown(path, Some(base), Some(base + group.unwrap_or(0)))?;
    // Set-group-ID: new files in it belong to the group.
    let mode = if group.is_some() { mode | 0o2000 } else { mode };
    fs::set_permissions(path, fs::Permissions::from_mode(mode))
}

fn write_files(root: &Path, files: &[File], base: u32, group: Option<u32>) -> io::Result<()> {
    fs::create_dir_all(root)?;
    give(root, base, group, 0o755)?;
    for file in files {
        let path = root.join(&file.path);
        let mut parent = root.to_owned();
        for part in file.path.parent().into_iter().flat_map(Path::components) {
            parent.push(part);
            fs::create_dir_all(&parent)?;
            give(&parent, base, group, 0o755)?;
        }
        if fs::read(&path).is_ok_and(|found| found == file.content) {
            continue;
        }
        // Atomic: a reader sees the complete old or new file.
        let name = file.path.file_name().unwrap_or_default().to_string_lossy();
        let new = path.with_file_name(format!("..new-{name}"));
        fs::write(&new, &file.content)?;
        // `fsGroup` must be able to read the files.
        let mode = if group.is_some() {
            file.mode | 0o040
        } else {
            file.mode
        };
        chown(&new, Some(base), Some(base + group.unwrap_or(0)))?;
        fs::set_permissions(&new, fs::Permissions::from_mode(mode))?;
        fs::rename(&new, &path)?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn memory_is_bounded_by_the_volume_and_by_the_pod() {
        let cases = [
            (json!({}), json!({"memory": "64Mi"}), Some(64 << 20)),
            (
                json!({"sizeLimit": "1Mi"}),
                json!({"memory": "64Mi"}),
                Some(1 << 20),
            ),
            (
                json!({"sizeLimit": "1Gi"}),
                json!({"memory": "64Mi"}),
                Some(64 << 20),
            ),
            (json!({"sizeLimit": "1Gi"}), json!({}), Some(1 << 30)),
            (json!({}), json!({}), None),
        ];
        for (empty, limits, expected) in cases {
            let pod =
                json!({"spec": {"containers": [{"name": "c", "resources": {"limits": limits}}]}});
            let pod = serde_json::from_value(pod).unwrap();
            let source = serde_json::from_value(empty.clone()).unwrap();
            assert_eq!(memory_limit(&pod, &source), expected, "{empty} {limits}");
        }
    }
}

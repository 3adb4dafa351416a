//! Refreshes volumes from config maps, secrets, tokens and the pod's own fields while the pod runs.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::time::Duration;

use k8s_openapi::api::core::v1::{Pod, Volume};

use super::content::{self, File, Medium};
use super::{VolumeError, Volumes, group_of, memory, volumes_of, write_files};
use crate::api_objects::Objects;
use crate::environment::Surroundings;
use crate::pod_uid::PodUid;

/// Whether to renew the tokens in volumes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Tokens {
    Renew,
    Keep,
}

fn is_content(volume: &Volume) -> bool {
    volume.config_map.is_some()
        || volume.secret.is_some()
        || volume.projected.is_some()
        || volume.downward_api.is_some()
}

/// The age at which a token is renewed, as in a kubelet: 80 % of its lifetime, and at most a day.
fn is_old(age: Duration, lifetime: Duration) -> bool {
    const LONGEST: Duration = Duration::from_secs(24 * 60 * 60);
    let four_fifths = Duration::from_secs(lifetime.as_secs() / 5 * 4);
    age >= four_fifths.min(LONGEST)
}

fn has_token(volume: &Volume) -> bool {
    let projected = volume.projected.iter();
    let mut sources = projected.flat_map(|projected| projected.sources.iter().flatten());
    sources.any(|source| source.service_account_token.is_some())
}

impl Volumes {
    /// Whether the pod's volumes contain data of API objects.
    pub fn follows_objects(pod: &Pod) -> bool {
        volumes_of(pod).iter().any(is_content)
    }

    /// Whether a token in the pod's volumes is due for renewal. Its age is that of its file, also after a restart of the node.
    pub fn has_old_token(&self, uid: &PodUid, pod: &Pod) -> bool {
        const DEFAULT_SECONDS: i64 = 3600;
        let volumes = pod
            .spec
            .iter()
            .flat_map(|spec| spec.volumes.iter().flatten());
        let tokens = volumes.flat_map(|volume| {
            let projected = volume.projected.iter();
            let sources = projected.flat_map(|projected| projected.sources.iter().flatten());
            let tokens = sources.filter_map(|source| source.service_account_token.as_ref());
            tokens.map(|token| (self.in_memory(uid, &volume.name).join(&token.path), token))
        });
        tokens.into_iter().any(|(path, token)| {
            let seconds = token.expiration_seconds.unwrap_or(DEFAULT_SECONDS);
            let written = fs::metadata(&path).and_then(|metadata| metadata.modified());
            let age = written.map(|written| written.elapsed().unwrap_or_default());
            age.is_ok_and(|age| is_old(age, Duration::from_secs(seconds.unsigned_abs())))
        })
    }

    /// Writes the changes of the objects behind a pod's volumes. Each file is replaced atomically, but the files of a volume one after
    /// the other. Volumes with tokens are not changed unless the tokens are renewed.
    pub async fn refresh(
        &self,
        uid: &PodUid,
        pod: &Pod,
        objects: &Objects,
        surroundings: &Surroundings,
        uid_base: u32,
        tokens: Tokens,
    ) -> Result<(), VolumeError> {
        let group = group_of(pod);
        for volume in volumes_of(pod).iter().filter(|one| is_content(one)) {
            if tokens == Tokens::Keep && has_token(volume) {
                continue;
            }
            let fresh = self.tokens(pod, volume).await?;
            let content = content::files(pod, volume, objects, surroundings, &fresh);
            let content = content.map_err(|source| VolumeError::Content {
                volume: volume.name.clone(),
                source,
            })?;
            let Some(content) = content else { continue };
            let (path, room) = match content.medium {
                Medium::Disk => (self.on_disk(uid, &volume.name), Ok(())),
                Medium::Memory => {
                    let path = self.in_memory(uid, &volume.name);
                    let room = memory::grow(&path, content.room_bytes());
                    (path, room)
                }
            };
            let written = room
                .and_then(|()| write_files(&path, &content.files, uid_base, group))
                .and_then(|()| remove_others(&path, &content.files));
            written.map_err(|source| VolumeError::Io {
                volume: volume.name.clone(),
                source,
            })?;
        }
        Ok(())
    }
}

/// Removes the files of a volume that its objects do not have any more.
fn remove_others(root: &Path, files: &[File]) -> io::Result<()> {
    let mut directories = vec![PathBuf::new()];
    while let Some(directory) = directories.pop() {
        for entry in fs::read_dir(root.join(&directory))? {
            let entry = entry?;
            let path = directory.join(entry.file_name());
            if files.iter().any(|file| file.path == path) {
                continue;
            }
            if files.iter().any(|file| file.path.starts_with(&path)) {
                directories.push(path);
            } else {
                directory_tree::remove(&root.join(path))?;
            }
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_token_is_old_well_before_its_end() {
        let hours = |hours: u64| Duration::from_secs(hours * 3600);
        assert!(!is_old(Duration::from_secs(479), Duration::from_secs(600)));
        assert!(is_old(Duration::from_secs(480), Duration::from_secs(600)));
        assert!(!is_old(hours(23), hours(24 * 365)));
        assert!(is_old(hours(24), hours(24 * 365)));
    }
}

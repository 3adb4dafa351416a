//! The files of configMap, secret, downwardAPI and projected volumes. Pure.

use std::collections::BTreeMap;
use std::path::{Component, Path, PathBuf};

use k8s_openapi::api::core::v1::{
    ConfigMap, DownwardAPIVolumeFile, KeyToPath, Pod, Secret, Volume,
};

use crate::api_objects::Objects;
use crate::environment::{self, EnvironmentError, Surroundings};

#[derive(Debug, thiserror::Error, PartialEq, Eq)]
pub enum ContentError {
    #[error("configmap \"{0}\" not found")]
    NoConfigMap(String),
    #[error("secret \"{0}\" not found")]
    NoSecret(String),
    #[error("references non-existent {kind} key: {key}")]
    NoKey { kind: &'static str, key: String },
    #[error("path {0:?} must stay inside the volume")]
    Escapes(String),
    #[error(transparent)]
    Field(#[from] EnvironmentError),
    #[error("no container {0:?}")]
    NoContainer(String),
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct File {
    pub path: PathBuf,
    pub content: Vec<u8>,
    pub mode: u32,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Medium {
    Disk,
    Memory,
}

#[derive(Debug, PartialEq, Eq)]
pub struct Content {
    pub medium: Medium,
    pub files: Vec<File>,
}

impl Content {
    /// The size of a tmpfs for the files: room for two copies of each while it is replaced, and for growth, because an object has at
    /// most 1 MiB.
    pub fn room_bytes(&self) -> u64 {
        const GROWTH: u64 = 2 << 20;
        const PAGE: u64 = 4096;
        let pages: u64 = self
            .files
            .iter()
            .map(|file| (file.content.len() as u64).div_ceil(PAGE) + 2)
            .sum();
        2 * pages * PAGE + GROWTH
    }
}

const DEFAULT_MODE: i32 = 0o644;

/// The files of a volume, or `None` if its type is not one that has files.
pub fn files(
    pod: &Pod,
    volume: &Volume,
    objects: &Objects,
    surroundings: &Surroundings,
    tokens: &[String],
) -> Result<Option<Content>, ContentError> {
    if let Some(source) = &volume.config_map {
        let mode = source.default_mode.unwrap_or(DEFAULT_MODE);
        let files = match objects.config_maps.get(&source.name) {
            Some(found) => keyed(
                "config",
                &config_map_data(found),
                source.items.as_deref(),
                mode,
                source.optional,
            )?,
            None if source.optional == Some(true) => Vec::new(),
            None => return Err(ContentError::NoConfigMap(source.name.clone())),
        };
        return Ok(Some(Content {
            medium: Medium::Disk,
            files,
        }));
    }
    if let Some(source) = &volume.secret {
        let mode = source.default_mode.unwrap_or(DEFAULT_MODE);
        let name = source.secret_name.clone().unwrap_or_default();
        let files = match objects.secrets.get(&name) {
            Some(found) => keyed(
                "secret",
                &secret_data(found),
                source.items.as_deref(),
                mode,
                source.optional,
            )?,
            None if source.optional == Some(true) => Vec::new(),
            None => return Err(ContentError::NoSecret(name)),
        };
        return Ok(Some(Content {
            medium: Medium::Memory,
            files,
        }));
    }
    if let Some(source) = &volume.downward_api {
        let mode = source.default_mode.unwrap_or(DEFAULT_MODE);
        let files = downward(
            pod,
            source.items.as_deref().unwrap_or_default(),
            mode,
            surroundings,
        )?;
        return Ok(Some(Content {
            medium: Medium::Disk,
            files,
        }));
    }
    if volume.projected.is_some() {
        return Ok(Some(Content {
            medium: Medium::Memory,
            files: projected(pod, volume, objects, surroundings, tokens)?,
        }));
    }
    Ok(None)
}

fn projected(
    pod: &Pod,
    volume: &Volume,
    objects: &Objects,
    surroundings: &Surroundings,
    tokens: &[String],
) -> Result<Vec<File>, ContentError> {
    let mut tokens = tokens.iter();
    let mut files = Vec::new();
    let Some(projected) = &volume.projected else {
        return Ok(files);
    };
    let mode = projected.default_mode.unwrap_or(DEFAULT_MODE);
    for source in projected.sources.iter().flatten() {
        if let Some(source) = &source.config_map {
            match objects.config_maps.get(&source.name) {
                Some(found) => files.extend(keyed(
                    "config",
                    &config_map_data(found),
                    source.items.as_deref(),
                    mode,
                    source.optional,
                )?),
                None if source.optional == Some(true) => {}
                None => return Err(ContentError::NoConfigMap(source.name.clone())),
            }
        }
        if let Some(source) = &source.secret {
            match objects.secrets.get(&source.name) {
                Some(found) => files.extend(keyed(
                    "secret",
                    &secret_data(found),
                    source.items.as_deref(),
                    mode,
                    source.optional,
                )?),
                None if source.optional == Some(true) => {}
                None => return Err(ContentError::NoSecret(source.name.clone())),
            }
        }
        if let Some(source) = &source.downward_api {
            files.extend(downward(
                pod,
                source.items.as_deref().unwrap_or_default(),
                mode,
                surroundings,
            )?);
        }
        if let Some(source) = &source.service_account_token {
            let token = tokens.next().cloned().unwrap_or_default();
            files.push(File {
                path: inside(&source.path)?,
                content: token.into_bytes(),
                mode: 0o600,
            });
        }
    }
    Ok(files)
}

fn config_map_data(found: &ConfigMap) -> BTreeMap<String, Vec<u8>> {
    let text = found
        .data
        .iter()
        .flatten()
        .map(|(key, value)| (key.clone(), value.clone().into_bytes()));
    let binary = found
        .binary_data
        .iter()
        .flatten()
        .map(|(key, value)| (key.clone(), value.0.clone()));
    text.chain(binary).collect()
}

fn secret_data(found: &Secret) -> BTreeMap<String, Vec<u8>> {
    found
        .data
        .iter()
        .flatten()
        .map(|(key, value)| (key.clone(), value.0.clone()))
        .collect()
}

fn inside(path: &str) -> Result<PathBuf, ContentError> {
    let clean = !path.is_empty()
        && Path::new(path)
            .components()
            .all(|part| matches!(part, Component::Normal(_)));
    if clean {
        Ok(PathBuf::from(path))
    } else {
        Err(ContentError::Escapes(path.to_owned()))
    }
}

fn mode_of(mode: i32) -> u32 {
    mode.unsigned_abs() & 0o777
}

fn keyed(
    kind: &'static str,
    data: &BTreeMap<String, Vec<u8>>,
    items: Option<&[KeyToPath]>,
    default_mode: i32,
    optional: Option<bool>,
) -> Result<Vec<File>, ContentError> {
    let Some(items) = items.filter(|items| !items.is_empty()) else {
        return data
            .iter()
            .map(|(key, content)| {
                Ok(File {
                    path: inside(key)?,
                    content: content.clone(),
                    mode: mode_of(default_mode),
                })
            })
            .collect();
    };
    let mut files = Vec::new();
    for item in items {
        match data.get(&item.key) {
            Some(content) => files.push(File {
                path: inside(&item.path)?,
                content: content.clone(),
                mode: mode_of(item.mode.unwrap_or(default_mode)),
            }),
            None if optional == Some(true) => {}
            None => {
                return Err(ContentError::NoKey {
                    kind,
                    key: item.key.clone(),
                });
            }
        }
    }
    Ok(files)
}

fn downward(
    pod: &Pod,
    items: &[DownwardAPIVolumeFile],
    default_mode: i32,
    surroundings: &Surroundings,
) -> Result<Vec<File>, ContentError> {
    items
        .iter()
        .map(|item| {
            let content = if let Some(field) = &item.field_ref {
                environment::field_value(pod, &field.field_path, surroundings)?
            } else if let Some(resource) = &item.resource_field_ref {
                let name = resource.container_name.clone().unwrap_or_default();
                let containers = pod
                    .spec
                    .as_ref()
                    .map(|spec| spec.containers.as_slice())
                    .unwrap_or_default();
                let container = containers.iter().find(|container| container.name == name);
                let container = container.ok_or(ContentError::NoContainer(name))?;
                environment::resource_value(pod, container, resource, surroundings)?
            } else {
                String::new()
            };
            let mode = mode_of(item.mode.unwrap_or(default_mode));
            Ok(File {
                path: inside(&item.path)?,
                content: content.into_bytes(),
                mode,
            })
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn content(volume: serde_json::Value) -> Result<Option<Content>, ContentError> {
        let pod: Pod =
            serde_json::from_value(json!({"metadata": {"name": "p", "labels": {"a": "b"}}}))
                .unwrap();
        let volume: Volume = serde_json::from_value(volume).unwrap();
        let mut objects = Objects::default();
        objects.config_maps.insert(
            "m".into(),
            serde_json::from_value(json!({"data": {"k": "v"}, "binaryData": {"b": "AAE="}}))
                .unwrap(),
        );
        objects.secrets.insert(
            "s".into(),
            serde_json::from_value(json!({"data": {"t": "aGk="}})).unwrap(),
        );
        files(
            &pod,
            &volume,
            &objects,
            &Surroundings::default(),
            &["token".to_owned()],
        )
    }

    fn names(volume: serde_json::Value) -> Vec<(String, Vec<u8>, u32)> {
        let files = content(volume).unwrap().unwrap().files;
        files
            .into_iter()
            .map(|file| (file.path.display().to_string(), file.content, file.mode))
            .collect()
    }

    #[test]
    fn every_kind_of_source_becomes_files() {
        assert_eq!(
            names(json!({"name": "v", "configMap": {"name": "m"}})),
            [
                ("b".into(), vec![0, 1], 0o644),
                ("k".into(), b"v".to_vec(), 0o644)
            ]
        );
        assert_eq!(
            names(
                json!({"name": "v", "secret": {"secretName": "s", "items": [{"key": "t", "path": "x/y", "mode": 256}]}})
            ),
            [("x/y".into(), b"hi".to_vec(), 0o400)]
        );
        let projected = json!({"name": "v", "projected": {"sources": [
            {"configMap": {"name": "m", "items": [{"key": "k", "path": "k"}]}},
            {"downwardAPI": {"items": [{"path": "labels", "fieldRef": {"fieldPath": "metadata.labels"}}]}},
            {"serviceAccountToken": {"path": "token"}}]}});
        assert_eq!(
            names(projected),
            [
                ("k".into(), b"v".to_vec(), 0o644),
                ("labels".into(), b"a=\"b\"".to_vec(), 0o644),
                ("token".into(), b"token".to_vec(), 0o600)
            ]
        );
    }

    #[test]
    fn what_is_missing_or_escapes_is_named() {
        let cases = [
            (
                json!({"name": "v", "configMap": {"name": "zz"}}),
                "configmap \"zz\" not found",
            ),
            (
                json!({"name": "v", "secret": {"secretName": "zz"}}),
                "secret \"zz\" not found",
            ),
            (
                json!({"name": "v", "configMap": {"name": "m", "items": [{"key": "q", "path": "q"}]}}),
                "references non-existent config key: q",
            ),
            (
                json!({"name": "v", "configMap": {"name": "m", "items": [{"key": "k", "path": "../k"}]}}),
                "path \"../k\" must stay inside the volume",
            ),
        ];
        for (volume, message) in cases {
            assert_eq!(content(volume).unwrap_err().to_string(), message);
        }
        let optional = json!({"name": "v", "configMap": {"name": "zz", "optional": true}});
        assert_eq!(content(optional).unwrap().unwrap().files, []);
    }

    #[test]
    fn there_is_room_for_every_file_twice_and_for_growth() {
        let of = |sizes: &[usize]| Content {
            medium: Medium::Memory,
            files: sizes
                .iter()
                .map(|size| File {
                    path: PathBuf::from("f"),
                    content: vec![0; *size],
                    mode: 0,
                })
                .collect(),
        };
        for sizes in [&[][..], &[1], &[1 << 20], &[1 << 20, 1 << 20, 1]] {
            let held: usize = sizes.iter().sum();
            assert!(of(sizes).room_bytes() >= 2 * held as u64 + (2 << 20));
        }
    }
}

//! Measures the disk usage of pods.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use k8s_openapi::api::core::v1::Pod;
use kube::Client;

use super::decision::{PodUsage, disk_volumes};
use crate::api_objects::{self, References};
use crate::quantity;
use crate::volumes::claims;
use api::volumes::claim_directory;
use directory_tree::Usage;

/// A claim of a pod, and its directory.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Claim {
    pub name: String,
    pub directory: PathBuf,
    /// In bytes, and as written in the claim.
    pub capacity: Option<(u64, String)>,
}

/// The claims of a pod, once all of them are bound to volumes of this node.
pub async fn find_claims(client: &Client, pod: &Pod, data_dir: &Path) -> Option<Vec<Claim>> {
    let references = References {
        claims: api_objects::references(pod).claims,
        ..References::default()
    };
    let namespace = pod.metadata.namespace.as_deref().unwrap_or_default();
    let objects = api_objects::fetch(client, namespace, &references)
        .await
        .ok()?;
    let find = |name: &String| {
        let volume = claims::volume_of(name, &objects).ok()?;
        let spec = objects.volumes.get(volume)?.spec.as_ref()?;
        let capacity = spec.capacity.as_ref();
        let capacity = capacity.and_then(|capacity| capacity.get("storage"));
        Some(Claim {
            name: name.clone(),
            directory: claim_directory(data_dir, volume),
            capacity: capacity.and_then(|text| Some((quantity::units(&text.0)?, text.0.clone()))),
        })
    };
    references.claims.iter().map(find).collect()
}

/// The usage of a pod below its directory. Unreadable files count as empty.
pub fn measure(pod: &Pod, directory: &Path) -> PodUsage {
    let mut usage = PodUsage::default();
    let containers = std::fs::read_dir(directory.join("containers"));
    for container in containers.into_iter().flatten().flatten() {
        // The whole directory: the writable layer, the logs and the termination message.
        let held = directory_tree::measure(&container.path(), u64::MAX).unwrap_or_default();
        let name = container.file_name().to_string_lossy().into_owned();
        usage.containers.insert(name, held);
    }
    for (name, limit) in disk_volumes(pod) {
        let enough = limit.map_or(u64::MAX, |(limit, _)| limit);
        let path = directory.join("volumes").join(name);
        let held = directory_tree::measure(&path, enough).unwrap_or_default();
        usage.volumes.insert(name.to_owned(), held);
    }
    usage
}

/// The sizes of claims, by their names.
pub fn measure_claims(claims: &[&Claim]) -> BTreeMap<String, Usage> {
    let measured = claims.iter().map(|claim| {
        let held = directory_tree::measure(&claim.directory, u64::MAX).unwrap_or_default();
        (claim.name.clone(), held)
    });
    measured.collect()
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn whatever_a_container_of_any_kind_writes_is_counted() {
        let directory = tempfile::tempdir().unwrap();
        let write = |path: &str| {
            let path = directory.path().join(path);
            std::fs::create_dir_all(path.parent().unwrap()).unwrap();
            std::fs::write(path, vec![1; 100_000]).unwrap();
        };
        for path in [
            "containers/c/0/upper/file",
            "containers/c/0/termination-log",
            "containers/c/0.log",
            "containers/init/0/upper/file",
            "containers/debug/0/upper/file",
            "volumes/v/file",
            "volumes/not-empty/file",
        ] {
            write(path);
        }
        let spec = json!({"containers": [{"name": "c"}], "volumes": [{"name": "v", "emptyDir": {}},
            {"name": "not-empty", "configMap": {"name": "m"}}]});
        let pod = serde_json::from_value(json!({"spec": spec})).unwrap();
        let usage = measure(&pod, directory.path());
        let files = |held: &Usage| held.bytes / 100_000;
        let counted: Vec<_> = usage
            .containers
            .iter()
            .chain(&usage.volumes)
            .map(|(name, held)| (name.as_str(), files(held)))
            .collect();
        assert_eq!(counted, [("c", 3), ("debug", 1), ("init", 1), ("v", 1)]);
    }
}

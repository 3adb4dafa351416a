//! Persistent volumes of this system: which claim a volume belongs to, and where the node stores it. Pure.
//!
//! A claim names its volume and a volume names its claim. Any client that may create claims can write the first reference, so only the
//! second one counts, and it names the claim by its UID.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

use k8s_openapi::api::core::v1::{
    ObjectReference, PersistentVolume, PersistentVolumeClaim, Pod, Volume,
};
use kube::ResourceExt;

/// The provisioner of volumes that are directories of the node.
pub const PROVISIONER: &str = "agents.x-k8s.io/directory";
/// Annotation of a volume: its provisioner. An administrator writes it on a volume that the node shall store.
pub const PROVISIONED_BY: &str = "pv.kubernetes.io/provisioned-by";

/// Whether the control plane has confirmed the claim's volume.
pub fn is_bound(claim: &PersistentVolumeClaim) -> bool {
    let status = claim.status.as_ref();
    status.and_then(|status| status.phase.as_deref()) == Some("Bound")
}

/// The volume that a claim names.
pub fn named_volume(claim: &PersistentVolumeClaim) -> Option<&str> {
    let name = claim.spec.as_ref()?.volume_name.as_deref()?;
    Some(name).filter(|name| !name.is_empty())
}

/// The owner of a volume, as seen from one claim.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Holder {
    ThisClaim,
    /// No claim yet. The volume may be reserved for this claim by name, by an author of volumes.
    NoClaim,
    AnotherClaim,
}

pub fn holder(claim: &PersistentVolumeClaim, volume: &PersistentVolume) -> Holder {
    let reference = volume
        .spec
        .as_ref()
        .and_then(|spec| spec.claim_ref.as_ref());
    let Some(reference) = reference else {
        return Holder::NoClaim;
    };
    if reference.namespace != claim.namespace() || reference.name != claim.metadata.name {
        return Holder::AnotherClaim;
    }
    match uid_of(reference) {
        None => Holder::NoClaim,
        Some(uid) if Some(uid) == claim.metadata.uid.as_deref() => Holder::ThisClaim,
        Some(_) => Holder::AnotherClaim,
    }
}

/// The UID of the claim that a volume is bound to. A reservation by name has none.
pub fn uid_of(reference: &ObjectReference) -> Option<&str> {
    reference.uid.as_deref().filter(|uid| !uid.is_empty())
}

/// Whether the node stores a volume.
pub fn is_ours(volume: &PersistentVolume) -> bool {
    let made_by = volume.annotations().get(PROVISIONED_BY);
    made_by.is_some_and(|made_by| made_by == PROVISIONER)
}

/// The directory of a volume below the node's data directory.
pub fn claim_directory(data_dir: &Path, volume_name: &str) -> PathBuf {
    data_dir.join("volumes").join(volume_name)
}

/// The claim of a pod's volume: the one it names, or the one of an ephemeral volume.
pub fn claim_name(pod: &Pod, volume: &Volume) -> Option<String> {
    if let Some(claim) = &volume.persistent_volume_claim {
        return Some(claim.claim_name.clone());
    }
    volume.ephemeral.as_ref()?;
    Some(format!(
        "{}-{}",
        pod.metadata.name.as_deref().unwrap_or_default(),
        volume.name
    ))
}

/// The claims that a pod uses.
pub fn claims_of(pod: &Pod) -> BTreeSet<String> {
    let volumes = pod
        .spec
        .iter()
        .flat_map(|spec| spec.volumes.iter().flatten());
    volumes
        .filter_map(|volume| claim_name(pod, volume))
        .collect()
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn a_volume_belongs_to_the_claim_that_it_names_by_uid() {
        let claim: PersistentVolumeClaim = serde_json::from_value(
            json!({"metadata": {"name": "a", "namespace": "n", "uid": "u"},
            "spec": {"volumeName": "v"}}),
        )
        .unwrap();
        let cases = [
            (json!({}), Holder::NoClaim),
            (
                json!({"claimRef": {"namespace": "n", "name": "a"}}),
                Holder::NoClaim,
            ),
            (
                json!({"claimRef": {"namespace": "n", "name": "a", "uid": ""}}),
                Holder::NoClaim,
            ),
            (
                json!({"claimRef": {"namespace": "n", "name": "a", "uid": "u"}}),
                Holder::ThisClaim,
            ),
            // An earlier claim of the same name, whose data was retained.
            (
                json!({"claimRef": {"namespace": "n", "name": "a", "uid": "earlier"}}),
                Holder::AnotherClaim,
            ),
            (
                json!({"claimRef": {"namespace": "other", "name": "a"}}),
                Holder::AnotherClaim,
            ),
            (
                json!({"claimRef": {"namespace": "other", "name": "a", "uid": "u"}}),
                Holder::AnotherClaim,
            ),
            (
                json!({"claimRef": {"namespace": "n", "name": "b", "uid": "w"}}),
                Holder::AnotherClaim,
            ),
        ];
        for (spec, expected) in cases {
            let volume = json!({"metadata": {"name": "v"}, "spec": spec});
            let volume = serde_json::from_value(volume).unwrap();
            assert_eq!(holder(&claim, &volume), expected, "{spec}");
        }
    }

    #[test]
    fn the_claims_of_a_pod_are_those_it_names_and_those_of_its_ephemeral_volumes() {
        let pod: Pod = serde_json::from_value(
            json!({"metadata": {"name": "p"}, "spec": {"containers": [], "volumes": [
                {"name": "a", "persistentVolumeClaim": {"claimName": "named"}},
                {"name": "b", "ephemeral": {}},
                {"name": "c", "emptyDir": {}},
            ]}}),
        )
        .unwrap();
        assert_eq!(
            claims_of(&pod),
            BTreeSet::from(["named".to_owned(), "p-b".to_owned()])
        );
    }
}

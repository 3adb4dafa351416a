//! Decides which claim may have which volume. Pure.
//!
//! [`api::volumes`] decides which claim a volume belongs to.

use std::collections::BTreeMap;
use std::path::Path;

use api::volumes::{PROVISIONED_BY, PROVISIONER, is_bound, named_volume};
use apimachinery::quantity::Quantity;
use k8s_openapi::api::core::v1::{
    HostPathVolumeSource, ObjectReference, PersistentVolume, PersistentVolumeClaim,
    PersistentVolumeSpec,
};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use kube::Resource;

use super::CAPACITY_ENFORCED;

/// What a claim needs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Need {
    Nothing,
    Provision,
    /// It names a volume and is not bound yet.
    Bind,
}

pub fn need(claim: &PersistentVolumeClaim) -> Need {
    let spec = claim.spec.as_ref();
    // An empty class requests a statically provisioned volume.
    let wants_none = spec.and_then(|spec| spec.storage_class_name.as_deref()) == Some("");
    match named_volume(claim) {
        _ if claim.metadata.deletion_timestamp.is_some() => Need::Nothing,
        Some(_) if is_bound(claim) => Need::Nothing,
        Some(_) => Need::Bind,
        None if wants_none => Need::Nothing,
        None => Need::Provision,
    }
}

/// The name of the volume of a claim with this UID: the one that it names, or the one that is provisioned for it.
pub fn volume_of(claim: &PersistentVolumeClaim, uid: &str) -> String {
    named_volume(claim).map_or_else(|| format!("pvc-{uid}"), str::to_owned)
}

/// The reason why an unbound volume does not satisfy a claim that names it. `None` if it does.
pub fn mismatch(claim: &PersistentVolumeClaim, volume: &PersistentVolume) -> Option<&'static str> {
    let (Some(wanted), Some(offered)) = (&claim.spec, &volume.spec) else {
        return None;
    };
    let bytes = |table: Option<&BTreeMap<String, _>>| {
        let quantity: Option<&k8s_openapi::apimachinery::pkg::api::resource::Quantity> =
            table.and_then(|table| table.get("storage"));
        quantity
            .and_then(|quantity| quantity.0.parse::<Quantity>().ok())
            .and_then(|quantity| u64::try_from(quantity.value()).ok())
    };
    let requests = wanted.resources.as_ref();
    let requests = requests.and_then(|resources| resources.requests.as_ref());
    if bytes(requests) > bytes(offered.capacity.as_ref()) {
        return Some("requested PV is too small");
    }
    let class = |name: &Option<String>| name.clone().unwrap_or_default();
    if class(&wanted.storage_class_name) != class(&offered.storage_class_name) {
        return Some("storageClassName does not match");
    }
    let offers = |mode: &String| offered.access_modes.iter().flatten().any(|one| one == mode);
    if !wanted.access_modes.iter().flatten().all(offers) {
        return Some("incompatible accessMode");
    }
    let block = |mode: &Option<String>| mode.as_deref() == Some("Block");
    (block(&wanted.volume_mode) != block(&offered.volume_mode)).then_some("incompatible volumeMode")
}

/// The reference from a volume to its claim.
pub fn reference(claim: &PersistentVolumeClaim) -> ObjectReference {
    let mut reference: ObjectReference = claim.object_ref(&());
    reference.resource_version = None;
    reference
}

/// The volume that is provisioned for a claim.
pub fn volume(
    claim: &PersistentVolumeClaim,
    name: &str,
    path: &Path,
    reclaim_policy: String,
) -> PersistentVolume {
    let spec = claim.spec.clone().unwrap_or_default();
    PersistentVolume {
        metadata: ObjectMeta {
            name: Some(name.to_owned()),
            annotations: Some(BTreeMap::from([
                (PROVISIONED_BY.to_owned(), PROVISIONER.to_owned()),
                (CAPACITY_ENFORCED.to_owned(), "false".to_owned()),
            ])),
            ..ObjectMeta::default()
        },
        spec: Some(PersistentVolumeSpec {
            access_modes: spec.access_modes,
            capacity: spec.resources.and_then(|resources| resources.requests),
            claim_ref: Some(reference(claim)),
            host_path: Some(HostPathVolumeSource {
                path: path.display().to_string(),
                type_: Some("DirectoryOrCreate".to_owned()),
            }),
            persistent_volume_reclaim_policy: Some(reclaim_policy),
            storage_class_name: spec.storage_class_name,
            volume_mode: Some("Filesystem".to_owned()),
            ..PersistentVolumeSpec::default()
        }),
        status: None,
    }
}

#[cfg(test)]
mod tests {
    use api::volumes::{Holder, holder, is_ours};
    use kube::ResourceExt;
    use serde_json::{Value, json};

    use super::*;

    fn claim(value: Value) -> PersistentVolumeClaim {
        serde_json::from_value(value).unwrap()
    }

    fn offered(spec: &Value) -> PersistentVolume {
        serde_json::from_value(json!({"metadata": {"name": "v"}, "spec": spec})).unwrap()
    }

    #[test]
    fn only_claims_that_want_a_volume_get_one() {
        let cases = [
            (
                json!({"metadata": {"name": "a"}, "spec": {}}),
                Need::Provision,
            ),
            (
                json!({"metadata": {"name": "a"}, "spec": {"storageClassName": ""}}),
                Need::Nothing,
            ),
            (
                json!({"metadata": {"name": "a"}, "spec": {"volumeName": "v"}}),
                Need::Bind,
            ),
            (
                json!({"metadata": {"name": "a"}, "spec": {"volumeName": "v"}, "status": {"phase": "Bound"}}),
                Need::Nothing,
            ),
            (
                json!({"metadata": {"name": "a", "deletionTimestamp": "2026-01-01T00:00:00Z"}, "spec": {}}),
                Need::Nothing,
            ),
        ];
        for (value, expected) in cases {
            assert_eq!(need(&claim(value.clone())), expected, "{value}");
        }
    }

    #[test]
    fn an_unbound_volume_must_satisfy_the_claim() {
        let wanted = claim(
            json!({"metadata": {"name": "a"}, "spec": {"storageClassName": "c",
            "accessModes": ["ReadWriteOnce"], "resources": {"requests": {"storage": "1Gi"}}}}),
        );
        let cases = [
            (json!({}), None),
            (json!({"capacity": {"storage": "2Gi"}}), None),
            (
                json!({"capacity": {"storage": "1Mi"}}),
                Some("requested PV is too small"),
            ),
            (
                json!({"storageClassName": "d"}),
                Some("storageClassName does not match"),
            ),
            (
                json!({"accessModes": ["ReadOnlyMany"]}),
                Some("incompatible accessMode"),
            ),
            (
                json!({"volumeMode": "Block"}),
                Some("incompatible volumeMode"),
            ),
        ];
        for (change, expected) in cases {
            let mut spec = json!({"capacity": {"storage": "1Gi"}, "storageClassName": "c", "accessModes": ["ReadWriteOnce"]});
            for (key, value) in change.as_object().unwrap() {
                spec[key] = value.clone();
            }
            assert_eq!(mismatch(&wanted, &offered(&spec)), expected, "{change}");
        }
    }

    #[test]
    fn a_volume_references_its_claim_and_reports_what_is_not_enforced() {
        let claim = claim(
            json!({"metadata": {"name": "a", "namespace": "n", "uid": "u"},
            "spec": {"accessModes": ["ReadWriteOnce"], "resources": {"requests": {"storage": "1Gi"}}}}),
        );
        let made = volume(
            &claim,
            &volume_of(&claim, "u"),
            Path::new("/data/volumes/pvc-u"),
            "Delete".to_owned(),
        );
        assert_eq!(made.name_any(), "pvc-u");
        assert_eq!(holder(&claim, &made), Holder::ThisClaim);
        assert!(is_ours(&made));
        let spec = made.spec.as_ref().unwrap();
        assert_eq!(spec.capacity.as_ref().unwrap()["storage"].0, "1Gi");
        assert_eq!(made.annotations()[CAPACITY_ENFORCED], "false");
    }
}

//! The directory of a claim's data, and whether this node may mount it. Pure.

use std::path::{Component, Path};

use api::volumes::{Holder, PROVISIONER, holder, is_bound, is_ours, named_volume};
use k8s_openapi::api::core::v1::{PersistentVolume, PersistentVolumeClaim, PersistentVolumeSpec};

use crate::api_objects::Objects;

#[derive(Debug, thiserror::Error, PartialEq, Eq)]
pub enum ClaimError {
    #[error("persistentvolumeclaim \"{0}\" not found")]
    Missing(String),
    #[error("persistentvolumeclaim \"{0}\" is not bound")]
    NotBound(String),
    #[error("persistentvolume \"{volume}\" of persistentvolumeclaim \"{claim}\" not found")]
    NoVolume { claim: String, volume: String },
    #[error("persistentvolume \"{volume}\" does not belong to persistentvolumeclaim \"{claim}\"")]
    NotItsOwn { claim: String, volume: String },
    #[error(
        "persistentvolumeclaim \"{claim}\" is bound to persistentvolume \"{volume}\", whose {source_kind} this node cannot mount: it has only volumes with the annotation pv.kubernetes.io/provisioned-by: {PROVISIONER}"
    )]
    NotOurs {
        claim: String,
        volume: String,
        source_kind: &'static str,
    },
}

/// The persistent volume that holds a claim's data, if it is the claim's and this node's.
pub fn volume_of<'a>(claim: &str, objects: &'a Objects) -> Result<&'a str, ClaimError> {
    let found = objects.claims.get(claim);
    let found = found.ok_or_else(|| ClaimError::Missing(claim.to_owned()))?;
    let name = named_volume(found)
        .filter(|name| is_bound(found) && is_plain(name))
        .ok_or_else(|| ClaimError::NotBound(claim.to_owned()))?;
    let named = || (claim.to_owned(), name.to_owned());
    let volume = objects.volumes.get(name).ok_or_else(|| {
        let (claim, volume) = named();
        ClaimError::NoVolume { claim, volume }
    })?;
    check(found, volume).map_err(|problem| {
        let (claim, volume) = named();
        match problem {
            Problem::NotItsOwn => ClaimError::NotItsOwn { claim, volume },
            Problem::NotOurs(source_kind) => ClaimError::NotOurs {
                claim,
                volume,
                source_kind,
            },
        }
    })?;
    Ok(name)
}

enum Problem {
    NotItsOwn,
    NotOurs(&'static str),
}

fn check(claim: &PersistentVolumeClaim, volume: &PersistentVolume) -> Result<(), Problem> {
    if holder(claim, volume) != Holder::ThisClaim {
        return Err(Problem::NotItsOwn);
    }
    if is_ours(volume) {
        return Ok(());
    }
    Err(Problem::NotOurs(
        volume.spec.as_ref().map_or("source", kind_of_source),
    ))
}

fn kind_of_source(spec: &PersistentVolumeSpec) -> &'static str {
    let sources = [
        (spec.csi.is_some(), "CSI source"),
        (spec.nfs.is_some(), "NFS source"),
        (spec.host_path.is_some(), "hostPath source"),
        (spec.local.is_some(), "local source"),
    ];
    let mut found = sources.into_iter().filter(|(is_it, _)| *is_it);
    found.next().map_or("source", |(_, kind)| kind)
}

fn is_plain(name: &str) -> bool {
    let mut parts = Path::new(name).components();
    matches!(parts.next(), Some(Component::Normal(_)))
        && parts.next().is_none()
        && !name.contains('/')
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    fn objects(phase: &str, name: &str, volume: Option<Value>) -> Objects {
        let mut objects = Objects::default();
        let claim = json!({"metadata": {"name": "c", "namespace": "n", "uid": "u"},
            "spec": {"volumeName": name}, "status": {"phase": phase}});
        objects
            .claims
            .insert("c".to_owned(), serde_json::from_value(claim).unwrap());
        let volume = volume.map(|volume| serde_json::from_value(volume).unwrap());
        objects
            .volumes
            .extend(volume.map(|volume| (name.to_owned(), volume)));
        objects
    }

    fn volume(provisioner: &str, uid: &str, source: &str) -> Value {
        json!({"metadata": {"name": "v", "annotations": {"pv.kubernetes.io/provisioned-by": provisioner}},
            "spec": {"claimRef": {"namespace": "n", "name": "c", "uid": uid}, source: {"path": "/p", "driver": "d",
                "volumeHandle": "h", "server": "s"}}})
    }

    #[test]
    fn only_the_data_of_a_claims_own_volume_is_shown() {
        let ours = || Some(volume(PROVISIONER, "u", "hostPath"));
        let cases = [
            (objects("Bound", "v", ours()), Ok("v")),
            (
                objects("Bound", "v", Some(volume(PROVISIONER, "u", "local"))),
                Ok("v"),
            ),
            (
                objects("Pending", "v", ours()),
                Err("persistentvolumeclaim \"c\" is not bound"),
            ),
            (
                objects("Bound", "../v", ours()),
                Err("persistentvolumeclaim \"c\" is not bound"),
            ),
            (
                objects("Bound", "v", None),
                Err("persistentvolume \"v\" of persistentvolumeclaim \"c\" not found"),
            ),
            (
                objects("Bound", "v", Some(volume(PROVISIONER, "w", "hostPath"))),
                Err("persistentvolume \"v\" does not belong to persistentvolumeclaim \"c\""),
            ),
            (
                objects("Bound", "v", Some(volume("ebs.csi.aws.com", "u", "csi"))),
                Err("whose CSI source this node cannot mount"),
            ),
            (
                objects("Bound", "v", Some(volume("", "u", "nfs"))),
                Err("whose NFS source this node cannot mount"),
            ),
            (
                objects("Bound", "v", Some(volume("", "u", "hostPath"))),
                Err("whose hostPath source this node cannot mount"),
            ),
            (
                Objects::default(),
                Err("persistentvolumeclaim \"c\" not found"),
            ),
        ];
        for (objects, expected) in cases {
            match (volume_of("c", &objects), expected) {
                (Ok(found), Ok(expected)) => assert_eq!(found, expected),
                (Err(error), Err(expected)) => {
                    assert!(error.to_string().contains(expected), "{error}");
                }
                (found, expected) => panic!("{found:?} in place of {expected:?}"),
            }
        }
    }
}

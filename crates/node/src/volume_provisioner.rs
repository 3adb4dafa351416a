//! Provisions and binds claims: each gets a directory on this node, as a bound persistent volume.
//!
//! The capacity asked for is recorded and not enforced; the volume says so in an annotation.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::time::Duration;

use futures::StreamExt;
use k8s_openapi::api::core::v1::{
    HostPathVolumeSource, ObjectReference, PersistentVolume, PersistentVolumeClaim,
    PersistentVolumeSpec, Pod,
};
use k8s_openapi::api::storage::v1::StorageClass;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use kube::api::{DeleteParams, ListParams, Patch, PatchParams, PostParams};
use kube::runtime::events::{EventType, Recorder, Reporter};
use kube::runtime::watcher::{self, Event};
use kube::{Api, Client, Resource, ResourceExt};
use serde_json::json;
use tokio_util::sync::CancellationToken;

use crate::errors::chain;
use crate::volumes::claim_directory;

/// Written on volumes that were made here.
pub const PROVISIONER: &str = "agents.x-k8s.io/directory";
const PROVISIONED_BY: &str = "pv.kubernetes.io/provisioned-by";
const CAPACITY_ENFORCED: &str = "agents.x-k8s.io/capacity-enforced";
const RETRY: Duration = Duration::from_secs(1);

#[derive(Debug, thiserror::Error)]
pub enum ProvisionError {
    #[error("{operation}")]
    Api {
        operation: &'static str,
        #[source]
        source: Box<kube::Error>,
    },
    #[error("the volume's directory {path}")]
    Directory {
        path: String,
        #[source]
        source: std::io::Error,
    },
    #[error("a pod still uses the claim")]
    InUse,
}

fn failed(operation: &'static str) -> impl FnOnce(kube::Error) -> ProvisionError {
    move |source| ProvisionError::Api {
        operation,
        source: Box::new(source),
    }
}

/// What a claim needs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Need {
    Nothing,
    Provision,
    /// It has a volume and is not yet said to be bound.
    Bind,
}

fn need(claim: &PersistentVolumeClaim) -> Need {
    let spec = claim.spec.as_ref();
    let bound = claim
        .status
        .as_ref()
        .and_then(|status| status.phase.as_deref())
        == Some("Bound");
    let volume = spec
        .and_then(|spec| spec.volume_name.as_deref())
        .filter(|name| !name.is_empty());
    // An empty class asks for a volume that somebody made by hand.
    let wants_none = spec.and_then(|spec| spec.storage_class_name.as_deref()) == Some("");
    match (volume, bound) {
        _ if claim.metadata.deletion_timestamp.is_some() => Need::Nothing,
        (Some(_), true) => Need::Nothing,
        (Some(_), false) => Need::Bind,
        (None, _) if wants_none => Need::Nothing,
        (None, _) => Need::Provision,
    }
}

fn volume_name(claim: &PersistentVolumeClaim) -> String {
    format!("pvc-{}", claim.uid().unwrap_or_default())
}

/// The volume for a claim. Pure.
fn volume(claim: &PersistentVolumeClaim, path: &Path, reclaim_policy: String) -> PersistentVolume {
    let spec = claim.spec.clone().unwrap_or_default();
    let mut reference: ObjectReference = claim.object_ref(&());
    reference.resource_version = None;
    PersistentVolume {
        metadata: ObjectMeta {
            name: Some(volume_name(claim)),
            annotations: Some(BTreeMap::from([
                (PROVISIONED_BY.to_owned(), PROVISIONER.to_owned()),
                (CAPACITY_ENFORCED.to_owned(), "false".to_owned()),
            ])),
            ..ObjectMeta::default()
        },
        spec: Some(PersistentVolumeSpec {
            access_modes: spec.access_modes,
            capacity: spec.resources.and_then(|resources| resources.requests),
            claim_ref: Some(reference),
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

#[derive(Clone)]
struct Provisioner {
    client: Client,
    data_dir: PathBuf,
    recorder: Recorder,
}

/// Provisions claims below `data_dir` until told to stop.
pub async fn run(client: Client, data_dir: PathBuf, shutdown: CancellationToken) {
    let reporter = Reporter {
        controller: PROVISIONER.to_owned(),
        instance: None,
    };
    let provisioner = Provisioner {
        recorder: Recorder::new(client.clone(), reporter),
        client: client.clone(),
        data_dir,
    };
    let mut events = std::pin::pin!(watcher::watcher(
        Api::<PersistentVolumeClaim>::all(client),
        watcher::Config::default()
    ));
    loop {
        let event = tokio::select! {
            () = shutdown.cancelled() => return,
            event = events.next() => event,
        };
        match event {
            None => return,
            Some(Ok(Event::Apply(claim) | Event::InitApply(claim)))
                if need(&claim) != Need::Nothing =>
            {
                tokio::spawn(
                    provisioner
                        .clone()
                        .provision_until_done(claim, shutdown.clone()),
                );
            }
            Some(Ok(Event::Delete(claim))) => {
                tokio::spawn(
                    provisioner
                        .clone()
                        .reclaim_until_done(volume_of(&claim), shutdown.clone()),
                );
            }
            Some(Ok(Event::InitDone)) => provisioner.reclaim_orphans(&shutdown).await,
            Some(Ok(_)) => {}
            Some(Err(error)) => {
                tracing::warn!(error = %chain(&error), "the watch of volume claims failed and is retried");
                tokio::time::sleep(RETRY).await;
            }
        }
    }
}

fn volume_of(claim: &PersistentVolumeClaim) -> String {
    let named = claim
        .spec
        .as_ref()
        .and_then(|spec| spec.volume_name.clone());
    named
        .filter(|name| !name.is_empty())
        .unwrap_or_else(|| volume_name(claim))
}

impl Provisioner {
    async fn provision_until_done(self, claim: PersistentVolumeClaim, shutdown: CancellationToken) {
        while let Err(error) = self.provision(&claim).await {
            if matches!(&error, ProvisionError::Api { source, .. } if is_gone(source)) {
                return;
            }
            tracing::warn!(claim = claim.name_any(), error = %chain(&error), "cannot provision a volume yet");
            if shutdown
                .run_until_cancelled(tokio::time::sleep(RETRY))
                .await
                .is_none()
            {
                return;
            }
        }
    }

    async fn provision(&self, claim: &PersistentVolumeClaim) -> Result<(), ProvisionError> {
        let name = volume_of(claim);
        let volumes = Api::<PersistentVolume>::all(self.client.clone());
        if need(claim) == Need::Provision {
            let path = claim_directory(&self.data_dir, &name);
            std::fs::create_dir_all(&path).map_err(|source| ProvisionError::Directory {
                path: path.display().to_string(),
                source,
            })?;
            let object = volume(claim, &path, self.reclaim_policy(claim).await);
            match volumes.create(&PostParams::default(), &object).await {
                Err(kube::Error::Api(status)) if status.code == 409 => {}
                other => drop(other.map_err(failed("creating the volume"))?),
            }
            self.tell_provisioned(claim, &name).await;
        }
        let claims = Api::<PersistentVolumeClaim>::namespaced(
            self.client.clone(),
            &claim.namespace().unwrap_or_default(),
        );
        let parameters = PatchParams::default();
        let bind = json!({"metadata": {"uid": claim.uid(), "annotations": {"pv.kubernetes.io/bind-completed": "yes",
            "pv.kubernetes.io/bound-by-controller": "yes"}}, "spec": {"volumeName": name}});
        claims
            .patch(&claim.name_any(), &parameters, &Patch::Merge(bind))
            .await
            .map_err(failed("binding the claim"))?;
        let bound = json!({"status": {"phase": "Bound"}});
        volumes
            .patch_status(&name, &parameters, &Patch::Merge(bound))
            .await
            .map_err(failed("marking the volume bound"))?;
        let spec = claim.spec.clone().unwrap_or_default();
        let capacity = spec.resources.and_then(|resources| resources.requests);
        let status = json!({"metadata": {"uid": claim.uid()},
            "status": {"phase": "Bound", "accessModes": spec.access_modes, "capacity": capacity}});
        claims
            .patch_status(&claim.name_any(), &parameters, &Patch::Merge(status))
            .await
            .map_err(failed("marking the claim bound"))?;
        Ok(())
    }

    /// Tells the claim's user of its volume, and that its size is a promise of nobody's.
    async fn tell_provisioned(&self, claim: &PersistentVolumeClaim, volume: &str) {
        let note = format!(
            "Successfully provisioned volume {volume}: a directory of this node, whose capacity is recorded and not enforced"
        );
        let event = kube::runtime::events::Event {
            type_: EventType::Normal,
            reason: "ProvisioningSucceeded".to_owned(),
            note: Some(note),
            action: "Provisioning".to_owned(),
            secondary: None,
        };
        let told = self.recorder.publish(&event, &claim.object_ref(&())).await;
        if let Err(error) = told {
            tracing::debug!(%error, "an event was not recorded");
        }
    }

    /// The class decides what becomes of the data when the claim goes; without one it goes too.
    async fn reclaim_policy(&self, claim: &PersistentVolumeClaim) -> String {
        let class = claim
            .spec
            .as_ref()
            .and_then(|spec| spec.storage_class_name.clone());
        let found = match class {
            Some(name) => Api::<StorageClass>::all(self.client.clone())
                .get_opt(&name)
                .await
                .ok()
                .flatten(),
            None => None,
        };
        found
            .and_then(|class| class.reclaim_policy)
            .unwrap_or_else(|| "Delete".to_owned())
    }

    async fn reclaim_until_done(self, name: String, shutdown: CancellationToken) {
        while let Err(error) = self.reclaim(&name).await {
            if !matches!(error, ProvisionError::InUse) {
                tracing::warn!(volume = name, error = %chain(&error), "cannot reclaim a volume yet");
            }
            if shutdown
                .run_until_cancelled(tokio::time::sleep(RETRY))
                .await
                .is_none()
            {
                return;
            }
        }
    }

    /// Deletes a volume whose claim is gone, or releases it if its data is to be kept.
    async fn reclaim(&self, name: &str) -> Result<(), ProvisionError> {
        let volumes = Api::<PersistentVolume>::all(self.client.clone());
        let Some(volume) = volumes
            .get_opt(name)
            .await
            .map_err(failed("reading the volume"))?
        else {
            return Ok(());
        };
        if !is_ours(&volume) {
            return Ok(());
        }
        let claim = volume
            .spec
            .as_ref()
            .and_then(|spec| spec.claim_ref.clone())
            .unwrap_or_default();
        if self.is_in_use(&claim).await? {
            return Err(ProvisionError::InUse);
        }
        let policy = volume
            .spec
            .as_ref()
            .and_then(|spec| spec.persistent_volume_reclaim_policy.as_deref());
        if policy == Some("Retain") {
            let released = json!({"status": {"phase": "Released"}});
            let patched = volumes
                .patch_status(name, &PatchParams::default(), &Patch::Merge(released))
                .await;
            return patched.map(drop).map_err(failed("releasing the volume"));
        }
        let path = claim_directory(&self.data_dir, name);
        match crate::trees::remove(&path) {
            Err(source) if source.kind() != std::io::ErrorKind::NotFound => {
                return Err(ProvisionError::Directory {
                    path: path.display().to_string(),
                    source,
                });
            }
            _ => {}
        }
        match volumes.delete(name, &DeleteParams::default()).await {
            Err(error) if !is_gone(&error) => Err(failed("deleting the volume")(error)),
            _ => Ok(()),
        }
    }

    async fn is_in_use(&self, claim: &ObjectReference) -> Result<bool, ProvisionError> {
        let pods = Api::<Pod>::namespaced(
            self.client.clone(),
            claim.namespace.as_deref().unwrap_or_default(),
        );
        let pods = pods
            .list(&ListParams::default())
            .await
            .map_err(failed("listing pods"))?;
        let name = claim.name.clone().unwrap_or_default();
        Ok(pods
            .iter()
            .any(|pod| crate::api_objects::references(pod).claims.contains(&name)))
    }

    /// Volumes whose claim went while nobody watched.
    async fn reclaim_orphans(&self, shutdown: &CancellationToken) {
        let Ok(volumes) = Api::<PersistentVolume>::all(self.client.clone())
            .list(&ListParams::default())
            .await
        else {
            return;
        };
        for volume in volumes.iter().filter(|volume| is_ours(volume)) {
            let Some(claim) = volume.spec.as_ref().and_then(|spec| spec.claim_ref.clone()) else {
                continue;
            };
            let claims = Api::<PersistentVolumeClaim>::namespaced(
                self.client.clone(),
                claim.namespace.as_deref().unwrap_or_default(),
            );
            let found = claims
                .get_opt(claim.name.as_deref().unwrap_or_default())
                .await;
            if found.is_ok_and(|found| found.is_none_or(|found| found.uid() != claim.uid)) {
                tokio::spawn(
                    self.clone()
                        .reclaim_until_done(volume.name_any(), shutdown.clone()),
                );
            }
        }
    }
}

fn is_ours(volume: &PersistentVolume) -> bool {
    volume
        .annotations()
        .get(PROVISIONED_BY)
        .is_some_and(|provisioner| provisioner == PROVISIONER)
}

fn is_gone(error: &kube::Error) -> bool {
    matches!(error, kube::Error::Api(status) if status.code == 404)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn claim(value: serde_json::Value) -> PersistentVolumeClaim {
        serde_json::from_value(value).unwrap()
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
    fn a_volume_names_its_claim_and_says_what_is_not_enforced() {
        let claim = claim(
            json!({"metadata": {"name": "a", "namespace": "n", "uid": "u"},
            "spec": {"accessModes": ["ReadWriteOnce"], "resources": {"requests": {"storage": "1Gi"}}}}),
        );
        let made = volume(
            &claim,
            Path::new("/data/volumes/pvc-u"),
            "Delete".to_owned(),
        );
        assert_eq!(made.name_any(), "pvc-u");
        let spec = made.spec.as_ref().unwrap();
        assert_eq!(spec.claim_ref.as_ref().unwrap().uid.as_deref(), Some("u"));
        assert_eq!(spec.capacity.as_ref().unwrap()["storage"].0, "1Gi");
        assert_eq!(made.annotations()[CAPACITY_ENFORCED], "false");
    }
}

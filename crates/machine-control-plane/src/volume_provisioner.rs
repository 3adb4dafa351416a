//! Provisions and binds claims: each gets a directory on this node, as a bound persistent volume.
//!
//! [`binding`] decides which claim may have which volume. The requested capacity is recorded but not enforced; an annotation of the
//! volume says so.

mod binding;

use std::collections::HashMap;
use std::path::PathBuf;
use std::time::Duration;

use api::decoding::Decoded;
use api::errors::chain;
use api::volumes::{Holder, PROVISIONER, claim_directory, holder, is_ours, uid_of};
use futures::StreamExt;
use k8s_openapi::api::core::v1::{ObjectReference, PersistentVolume, PersistentVolumeClaim, Pod};
use k8s_openapi::api::storage::v1::StorageClass;
use kube::api::{DeleteParams, ListParams, Patch, PatchParams, PostParams, Preconditions};
use kube::runtime::events::{EventType, Recorder, Reporter};
use kube::runtime::watcher::{self, Event};
use kube::{Api, Client, Resource, ResourceExt};
use serde_json::json;
use tokio::task::JoinHandle;
use tokio_util::sync::CancellationToken;

use self::binding::Need;
use crate::object_uid::object_uid;

const CAPACITY_ENFORCED: &str = "agents.x-k8s.io/capacity-enforced";
const RETRY: Duration = Duration::from_secs(1);
/// The interval at which a claim retries a volume that it cannot have.
const LOOK_AGAIN: Duration = Duration::from_secs(15);

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

/// The outcome of an attempt to bind a claim.
#[derive(Debug, PartialEq, Eq)]
enum Outcome {
    Done,
    /// The claim cannot have the volume that it names, for this reason.
    Refused {
        reason: &'static str,
        note: String,
    },
}

#[derive(Clone)]
struct Provisioner {
    client: Client,
    data_dir: PathBuf,
    recorder: Recorder,
}

/// Provisions claims below `data_dir` until `shutdown`.
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
    let claims = Api::all(client);
    let mut events =
        object_watch::watch_readable::<PersistentVolumeClaim>(claims, watcher::Config::default());
    let mut at_work: HashMap<String, JoinHandle<()>> = HashMap::new();
    loop {
        let event = tokio::select! {
            () = shutdown.cancelled() => return,
            Some(event) = events.next() => event,
        };
        match event {
            Ok(Event::Apply(claim) | Event::InitApply(claim))
                if binding::need(&claim) != Need::Nothing =>
            {
                at_work.retain(|_, task| !task.is_finished());
                // A task that is already running reads the claim again before every attempt.
                if let Some(uid) = object_uid(&claim) {
                    at_work.entry(uid).or_insert_with(|| {
                        let task = provisioner.clone();
                        tokio::spawn(task.provision_until_done(claim, shutdown.clone()))
                    });
                }
            }
            Ok(Event::Delete(claim)) => {
                if let Some(uid) = object_uid(&claim) {
                    let (volume, task) = (binding::volume_of(&claim, &uid), provisioner.clone());
                    tokio::spawn(task.reclaim_until_done(volume, uid, shutdown.clone()));
                }
            }
            Ok(Event::InitDone) => provisioner.reclaim_orphans(&shutdown).await,
            // What fails is logged and tried again by the watch.
            Ok(_) | Err(_) => {}
        }
    }
}

impl Provisioner {
    fn volumes(&self) -> Api<PersistentVolume> {
        Api::all(self.client.clone())
    }

    fn claims(&self, namespace: Option<&str>) -> Api<PersistentVolumeClaim> {
        Api::namespaced(self.client.clone(), namespace.unwrap_or_default())
    }

    async fn provision_until_done(
        self,
        mut claim: PersistentVolumeClaim,
        shutdown: CancellationToken,
    ) {
        let Some(uid) = object_uid(&claim) else {
            return;
        };
        let mut reported: Option<Outcome> = None;
        loop {
            let pause = match self.provision(&claim, &uid).await {
                Ok(Outcome::Done) => return,
                Ok(refused) => {
                    if reported.as_ref() != Some(&refused) {
                        self.report(&claim, &refused).await;
                    }
                    reported = Some(refused);
                    LOOK_AGAIN
                }
                Err(error) => {
                    tracing::warn!(claim = claim.name_any(), error = %chain(&error), "cannot provision a volume yet");
                    RETRY
                }
            };
            let paused = shutdown.run_until_cancelled(tokio::time::sleep(pause));
            if paused.await.is_none() {
                return;
            }
            let claims = self.claims(claim.namespace().as_deref());
            match claims.get_opt(&claim.name_any()).await {
                Ok(Some(found)) if found.uid().as_deref() == Some(&uid) => {
                    if binding::need(&found) == Need::Nothing {
                        return;
                    }
                    claim = found;
                }
                // The claim was deleted while its volume was created: the volume would be left over.
                Ok(_) => {
                    let volume = binding::volume_of(&claim, &uid);
                    return self.reclaim_until_done(volume, uid, shutdown).await;
                }
                // The claim is read again after the next attempt.
                Err(_) => {}
            }
        }
    }

    async fn provision(
        &self,
        claim: &PersistentVolumeClaim,
        uid: &str,
    ) -> Result<Outcome, ProvisionError> {
        let name = binding::volume_of(claim, uid);
        let chosen_here = binding::need(claim) == Need::Provision;
        let made = if chosen_here {
            self.make_volume(claim, &name).await?
        } else {
            None
        };
        let is_new = made.is_some();
        let found = if is_new {
            made
        } else {
            let found = self.volumes().get_opt(&name).await;
            found.map_err(failed("reading the volume"))?
        };
        let Some(volume) = found else {
            return Ok(Outcome::Refused {
                reason: "FailedBinding",
                note: format!("volume \"{name}\" not found"),
            });
        };
        match holder(claim, &volume) {
            Holder::ThisClaim => {}
            Holder::AnotherClaim => {
                return Ok(Outcome::Refused {
                    reason: "FailedBinding",
                    note: format!("volume \"{name}\" already bound to a different claim."),
                });
            }
            Holder::NoClaim => {
                if let Some(why) = binding::mismatch(claim, &volume) {
                    return Ok(Outcome::Refused {
                        reason: "VolumeMismatch",
                        note: format!("Cannot bind to requested volume \"{name}\": {why}"),
                    });
                }
                self.give(&volume, claim).await?;
            }
        }
        self.bind(claim, &volume, chosen_here).await?;
        // In the background: a pod may be waiting for the claim, but nothing waits for the event.
        if is_new {
            // Warns the user that the capacity of the claim is not enforced.
            let note = format!(
                "Successfully provisioned volume {name}: a directory of this node, whose capacity is recorded and not enforced"
            );
            self.publish(claim, EventType::Normal, "ProvisioningSucceeded", note)
                .await;
        }
        Ok(Outcome::Done)
    }

    /// Creates the volume of a claim. `None` if it exists already.
    async fn make_volume(
        &self,
        claim: &PersistentVolumeClaim,
        name: &str,
    ) -> Result<Option<PersistentVolume>, ProvisionError> {
        let path = claim_directory(&self.data_dir, name);
        std::fs::create_dir_all(&path).map_err(|source| ProvisionError::Directory {
            path: path.display().to_string(),
            source,
        })?;
        let object = binding::volume(claim, name, &path, self.reclaim_policy(claim).await);
        let created = self.volumes().create(&PostParams::default(), &object).await;
        match created {
            Err(kube::Error::Api(status)) if status.code == 409 => Ok(None),
            other => other.map(Some).map_err(failed("creating the volume")),
        }
    }

    /// Writes the reference to the claim into a volume, unless the volume has changed since it was read.
    async fn give(
        &self,
        volume: &PersistentVolume,
        claim: &PersistentVolumeClaim,
    ) -> Result<(), ProvisionError> {
        let given = json!({"metadata": {"uid": volume.uid(), "resourceVersion": volume.resource_version()},
            "spec": {"claimRef": binding::reference(claim)}});
        self.volumes()
            .patch(
                &volume.name_any(),
                &PatchParams::default(),
                &Patch::Merge(given),
            )
            .await
            .map(drop)
            .map_err(failed("giving the volume to the claim"))
    }

    /// Writes the phase `Bound` to the claim and to the volume.
    async fn bind(
        &self,
        claim: &PersistentVolumeClaim,
        volume: &PersistentVolume,
        chosen_here: bool,
    ) -> Result<(), ProvisionError> {
        let (name, parameters) = (volume.name_any(), PatchParams::default());
        let claims = self.claims(claim.namespace().as_deref());
        let mut annotations = json!({"pv.kubernetes.io/bind-completed": "yes"});
        if chosen_here {
            annotations["pv.kubernetes.io/bound-by-controller"] = json!("yes");
        }
        let bind = json!({"metadata": {"uid": claim.uid(), "annotations": annotations},
            "spec": {"volumeName": name}});
        claims
            .patch(&claim.name_any(), &parameters, &Patch::Merge(bind))
            .await
            .map_err(failed("binding the claim"))?;
        let bound = json!({"status": {"phase": "Bound"}});
        self.volumes()
            .patch_status(&name, &parameters, &Patch::Merge(bound))
            .await
            .map_err(failed("marking the volume bound"))?;
        let spec = volume.spec.clone().unwrap_or_default();
        let status = json!({"metadata": {"uid": claim.uid()},
            "status": {"phase": "Bound", "accessModes": spec.access_modes, "capacity": spec.capacity}});
        claims
            .patch_status(&claim.name_any(), &parameters, &Patch::Merge(status))
            .await
            .map(drop)
            .map_err(failed("marking the claim bound"))
    }

    async fn report(&self, claim: &PersistentVolumeClaim, outcome: &Outcome) {
        if let Outcome::Refused { reason, note } = outcome {
            self.publish(claim, EventType::Warning, reason, note.clone())
                .await;
        }
    }

    async fn publish(
        &self,
        claim: &PersistentVolumeClaim,
        type_: EventType,
        reason: &str,
        note: String,
    ) {
        let event = kube::runtime::events::Event {
            type_,
            reason: reason.to_owned(),
            note: Some(note),
            action: "Provisioning".to_owned(),
            secondary: None,
        };
        let published = self.recorder.publish(&event, &claim.object_ref(&())).await;
        if let Err(error) = published {
            tracing::debug!(%error, "an event was not recorded");
        }
    }

    /// The reclaim policy of the storage class; `Delete` without a class.
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

    async fn reclaim_until_done(self, name: String, claim: String, shutdown: CancellationToken) {
        while let Err(error) = self.reclaim(&name, &claim).await {
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

    /// Deletes the volume of a deleted claim, or releases it if its policy is `Retain`. A volume that did not belong to the claim is
    /// not changed, even if the claim named it (confused deputy).
    async fn reclaim(&self, name: &str, claim: &str) -> Result<(), ProvisionError> {
        let volumes = self.volumes();
        let found = volumes.get_opt(name).await;
        let Some(volume) = found.map_err(failed("reading the volume"))? else {
            return Ok(());
        };
        let spec = volume.spec.clone().unwrap_or_default();
        let Some(reference) = spec.claim_ref else {
            return Ok(());
        };
        if !is_ours(&volume) || uid_of(&reference) != Some(claim) {
            return Ok(());
        }
        if self.is_in_use(&reference).await? {
            return Err(ProvisionError::InUse);
        }
        if spec.persistent_volume_reclaim_policy.as_deref() == Some("Retain") {
            let released = json!({"status": {"phase": "Released"}});
            let patched = volumes
                .patch_status(name, &PatchParams::default(), &Patch::Merge(released))
                .await;
            return patched.map(drop).map_err(failed("releasing the volume"));
        }
        let path = claim_directory(&self.data_dir, name);
        match directory_tree::remove(&path) {
            Err(source) if source.kind() != std::io::ErrorKind::NotFound => {
                return Err(ProvisionError::Directory {
                    path: path.display().to_string(),
                    source,
                });
            }
            _ => {}
        }
        let only_this = DeleteParams {
            preconditions: Some(Preconditions {
                uid: volume.uid(),
                resource_version: None,
            }),
            ..DeleteParams::default()
        };
        match volumes.delete(name, &only_this).await {
            Err(error) if !is_gone(&error) => Err(failed("deleting the volume")(error)),
            _ => Ok(()),
        }
    }

    async fn is_in_use(&self, claim: &ObjectReference) -> Result<bool, ProvisionError> {
        let pods = Api::<Decoded<Pod>>::namespaced(
            self.client.clone(),
            claim.namespace.as_deref().unwrap_or_default(),
        );
        let pods = pods
            .list(&ListParams::default())
            .await
            .map_err(failed("listing pods"))?;
        let name = claim.name.clone().unwrap_or_default();
        // A pod that cannot be decoded may use it.
        Ok(pods.iter().any(|pod| match pod {
            Decoded::Readable(pod) => api::volumes::claims_of(pod).contains(&name),
            Decoded::Unreadable(_) => true,
        }))
    }

    /// The volumes whose claim was deleted while the provisioner was not running.
    async fn reclaim_orphans(&self, shutdown: &CancellationToken) {
        let volumes = Api::<Decoded<PersistentVolume>>::all(self.client.clone());
        let Ok(volumes) = volumes.list(&ListParams::default()).await else {
            return;
        };
        let volumes = volumes.iter().filter_map(Decoded::readable);
        for volume in volumes.filter(|volume| is_ours(volume)) {
            let spec = volume.spec.as_ref();
            let Some(reference) = spec.and_then(|spec| spec.claim_ref.as_ref()) else {
                continue;
            };
            let Some(uid) = uid_of(reference) else {
                continue;
            };
            let claims = self.claims(reference.namespace.as_deref());
            let found = claims
                .get_opt(reference.name.as_deref().unwrap_or_default())
                .await;
            let is_this =
                |found: &PersistentVolumeClaim| found.metadata.uid.as_deref() == Some(uid);
            if found.is_ok_and(|found| !found.as_ref().is_some_and(is_this)) {
                let (task, name) = (self.clone(), volume.name_any());
                tokio::spawn(task.reclaim_until_done(name, uid.to_owned(), shutdown.clone()));
            }
        }
    }
}

fn is_gone(error: &kube::Error) -> bool {
    matches!(error, kube::Error::Api(status) if status.code == 404)
}

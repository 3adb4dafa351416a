//! Every request of the SDK to the Kubernetes API about claims and sandboxes. Independent of connections to sandboxes.

use std::future::Future;
use std::time::Duration;

use api::decoding::Decoded;
use api::sandbox::{SuspensionStrategy, SuspensionType};
use api::{Sandbox, SandboxClaim};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Condition;
use kube::api::{DeleteParams, ListParams, Patch, PatchParams, PostParams, Preconditions};
use kube::{Api, Client, ResourceExt};
use serde_json::json;
use tokio::sync::watch;

use crate::error::{ErrorKind, Key};
use crate::follow::{Ended, Missing, Start, follow, unreadable};
use crate::readiness::{self, Bound, Verdict};
use crate::waiting::{self, Waiting};

#[derive(Clone)]
pub(crate) struct Cluster {
    client: Client,
}

/// Whether a sandbox should run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Mode {
    Running,
    /// Suspended, with this strategy; without one, with the strategy that the sandbox has.
    Suspended(Option<SuspensionType>),
}

impl std::fmt::Debug for Cluster {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter.write_str("Cluster")
    }
}

impl Cluster {
    pub(crate) fn new(client: Client) -> Self {
        Self { client }
    }

    pub(crate) fn client(&self) -> &Client {
        &self.client
    }

    fn claims(&self, namespace: &str) -> Api<Decoded<SandboxClaim>> {
        Api::namespaced(self.client.clone(), namespace)
    }

    fn sandboxes(&self, namespace: &str) -> Api<Decoded<Sandbox>> {
        Api::namespaced(self.client.clone(), namespace)
    }

    pub(crate) async fn create_claim(
        &self,
        claim: &SandboxClaim,
    ) -> Result<SandboxClaim, kube::Error> {
        let namespace = claim.namespace().unwrap_or_default();
        Api::namespaced(self.client.clone(), &namespace)
            .create(&PostParams::default(), claim)
            .await
    }

    pub(crate) async fn claim(&self, key: &Key) -> Result<SandboxClaim, ErrorKind> {
        let found = self.claims(&key.namespace).get_opt(&key.claim).await;
        found
            .map_err(|cause| kubernetes("read the claim", cause))?
            .ok_or(ErrorKind::ClaimNotFound)
            .and_then(readable)
    }

    pub(crate) async fn claim_names(
        &self,
        namespace: &str,
        label_selector: Option<&str>,
    ) -> Result<Vec<String>, ErrorKind> {
        let parameters = ListParams {
            label_selector: label_selector.map(str::to_owned),
            ..ListParams::default()
        };
        let list = self.claims(namespace).list(&parameters).await;
        let list = list.map_err(|cause| kubernetes("list the claims", cause))?;
        Ok(list.iter().map(ResourceExt::name_any).collect())
    }

    pub(crate) async fn sandbox(
        &self,
        namespace: &str,
        name: &str,
    ) -> Result<Option<Sandbox>, ErrorKind> {
        let found = self.sandboxes(namespace).get_opt(name).await;
        found
            .map_err(|cause| kubernetes("read the sandbox", cause))?
            .map(readable)
            .transpose()
    }

    /// Deletes a claim, and through its owner references the sandbox. Deleting a claim that does not exist succeeds.
    pub(crate) async fn delete_claim(
        &self,
        key: &Key,
        uid: Option<String>,
    ) -> Result<(), kube::Error> {
        let params = DeleteParams {
            preconditions: uid.map(|uid| Preconditions {
                uid: Some(uid),
                resource_version: None,
            }),
            ..DeleteParams::background()
        };
        match self
            .claims(&key.namespace)
            .delete(&key.claim, &params)
            .await
        {
            Ok(_) => Ok(()),
            Err(kube::Error::Api(status)) if status.code == 404 => Ok(()),
            Err(error) => Err(error),
        }
    }

    /// Waits until a claim is ready, and publishes in `progress` what it waits for. `seen` is the resource version of the claim that
    /// was seen last and was not ready.
    pub(crate) async fn wait_ready(
        &self,
        key: &Key,
        seen: Option<String>,
        limit: Duration,
        progress: &Progress,
    ) -> Result<Bound, ErrorKind> {
        let api = self.claims(&key.namespace);
        let start = seen.map_or(Start::Current, Start::After);
        let judge = |claim: &SandboxClaim| {
            let verdict = readiness::of_claim(claim);
            if verdict == Verdict::Wait {
                publish(progress, readiness::conditions_of_claim(claim));
            }
            verdict
        };
        let following = follow(&api, &key.claim, start, Missing::Gone, judge);
        let what = "waiting for the sandbox to become ready";
        within(what, limit, progress, following).await
    }

    /// Sets whether a sandbox should run, in both fields of its spec, and waits until it does or does not.
    pub(crate) async fn set_mode(
        &self,
        namespace: &str,
        name: &str,
        mode: Mode,
        limit: Duration,
    ) -> Result<Bound, ErrorKind> {
        let api = self.sandboxes(namespace);
        let spec = match mode {
            Mode::Running => json!({"replicas": 1, "operatingMode": "Running"}),
            Mode::Suspended(None) => json!({"replicas": 0, "operatingMode": "Suspended"}),
            Mode::Suspended(Some(strategy)) => json!({
                "replicas": 0,
                "operatingMode": "Suspended",
                "suspensionStrategy": SuspensionStrategy { kind: strategy },
            }),
        };
        let patch = Patch::Merge(json!({ "spec": spec }));
        let patched = match api.patch(name, &PatchParams::default(), &patch).await {
            Ok(patched) => readable(patched)?,
            Err(kube::Error::Api(status)) if status.code == 404 => {
                return Err(ErrorKind::SandboxDeleted);
            }
            Err(cause) => return Err(kubernetes("change the sandbox", cause)),
        };
        let (what, judge): (_, fn(&Sandbox) -> Verdict<Bound>) =
            match mode {
                Mode::Running => ("waiting for the sandbox to resume", readiness::of_resumed),
                Mode::Suspended(_) => ("waiting for the sandbox to be suspended", |sandbox| {
                    match readiness::of_suspended(sandbox) {
                        Verdict::Done(()) => Verdict::Done(Bound::default()),
                        Verdict::Wait => Verdict::Wait,
                        Verdict::Refused { reason, message } => {
                            Verdict::Refused { reason, message }
                        }
                    }
                }),
            };
        match judge(&patched) {
            Verdict::Done(bound) => return Ok(bound),
            Verdict::Refused { reason, message } => {
                return Err(ErrorKind::Refused { reason, message });
            }
            Verdict::Wait => {}
        }
        let start = patched
            .resource_version()
            .map_or(Start::Current, Start::After);
        let progress = Progress::new(None);
        let judge = |sandbox: &Sandbox| {
            let verdict = judge(sandbox);
            if verdict == Verdict::Wait {
                publish(&progress, readiness::conditions_of(sandbox));
            }
            verdict
        };
        let following = follow(&api, name, start, Missing::Gone, judge);
        within(what, limit, &progress, following).await
    }
}

/// Publishes what a sandbox waits for.
pub(crate) type Progress = watch::Sender<Option<Waiting>>;

/// Publishes what an object that is not ready waits for, if that has changed.
fn publish(progress: &Progress, conditions: &[Condition]) {
    let now = waiting::of(conditions);
    progress.send_if_modified(|before| {
        let is_changed = *before != now;
        if is_changed {
            *before = now;
        }
        is_changed
    });
}

async fn within<T>(
    what: &'static str,
    limit: Duration,
    progress: &Progress,
    following: impl Future<Output = Result<T, Ended>>,
) -> Result<T, ErrorKind> {
    let ended = match tokio::time::timeout(limit, following).await {
        Err(_) => {
            let last = progress.borrow().clone();
            let state = last.map(|waiting| waiting.state);
            return Err(ErrorKind::ReadyTimeout { what, limit, state });
        }
        Ok(Ok(value)) => return Ok(value),
        Ok(Err(ended)) => ended,
    };
    Err(error_of(ended))
}

fn error_of(ended: Ended) -> ErrorKind {
    match ended {
        Ended::Deleted => ErrorKind::SandboxDeleted,
        Ended::Refused { reason, message } => ErrorKind::Refused { reason, message },
        Ended::Failed(cause) => kubernetes("watch the claim", cause),
    }
}

fn readable<K>(object: Decoded<K>) -> Result<K, ErrorKind> {
    object
        .into_result()
        .map_err(|left| error_of(unreadable(&left)))
}

pub(crate) fn kubernetes(operation: &'static str, cause: kube::Error) -> ErrorKind {
    ErrorKind::Kubernetes { operation, cause }
}

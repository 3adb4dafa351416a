//! Prepares what a pod and its containers need before they start, and refreshes volumes while they run.

use k8s_openapi::api::core::v1::Pod;
use tokio::sync::watch;

use super::Shared;
use crate::awaited_objects::Awaited;
use crate::container_spec::{self, Parts};
use crate::pod_images::ImageRefusal;
use crate::pod_lifecycle::{EventReason, WaitingReason, container_of};
use crate::pod_machine::{NotPrepared, StartFailure};
use crate::pod_uid::PodUid;
use crate::runtime::{ContainerSpec, PodSandbox, Runtime, StartError};
use crate::runtime_class::{self, HandlerError};
use crate::volumes::{Remedy, Tokens, VolumeError, Volumes, service_account};
use crate::{api_objects, environment, pod_sandbox_spec};
use api::errors::chain;

impl NotPrepared {
    fn new(event: EventReason, reason: WaitingReason, message: String) -> Self {
        Self {
            event: Some(event),
            reason,
            message,
            awaits: None,
        }
    }

    fn awaiting(self, awaited: Awaited) -> Self {
        Self {
            awaits: Some(awaited),
            ..self
        }
    }

    /// A volume cannot be mounted. The pod's status says that its containers are being created, as a kubelet's does.
    fn mount(message: String) -> Self {
        Self::new(
            EventReason::FailedMount,
            WaitingReason::ContainerCreating,
            message,
        )
    }

    fn volume(error: &VolumeError, pod: &Pod, looked_at: Awaited) -> Self {
        let failed = Self::mount(chain(error));
        match error.remedy() {
            Remedy::Binding => Self {
                event: None,
                ..failed.awaiting(looked_at)
            },
            Remedy::Objects => failed.awaiting(looked_at),
            Remedy::ServiceAccount => {
                let mut awaited = looked_at;
                awaited.service_account(service_account(pod), None);
                failed.awaiting(awaited)
            }
            Remedy::Unknown => failed,
        }
    }

    fn runtime_class(error: &HandlerError) -> Self {
        let failed = Self::new(
            EventReason::RuntimeClassUnavailable,
            WaitingReason::RuntimeClassUnavailable,
            chain(error),
        );
        match error {
            HandlerError::NoClass(class) => failed.awaiting(Awaited::missing_runtime_class(class)),
            _ => failed,
        }
    }
}

/// Prepares everything that a pod needs before its first container.
pub(super) async fn prepare<R: Runtime>(
    shared: &Shared<R>,
    uid: &PodUid,
    pod: &Pod,
) -> Result<PodSandbox, NotPrepared> {
    if let Some(message) = shared.enforcer.refusal(pod) {
        return Err(NotPrepared::new(
            EventReason::NetworkPolicyNotEnforced,
            WaitingReason::NetworkPolicyNotEnforced,
            message,
        ));
    }
    let class = pod
        .spec
        .as_ref()
        .and_then(|spec| spec.runtime_class_name.as_deref());
    let mut spec = pod_sandbox_spec::sandbox_spec(uid, pod, &shared.config);
    // A pod never runs with less isolation than its class requests, so an unavailable class stops it here.
    spec.driver = runtime_class::resolve(&shared.handlers, &shared.client, class)
        .await
        .map_err(|error| NotPrepared::runtime_class(&error))?;
    let sandbox = shared
        .runtime
        .create_sandbox(&spec)
        .await
        .map_err(|error| {
            NotPrepared::new(
                EventReason::FailedCreatePodSandBox,
                WaitingReason::FailedCreatePodSandBox,
                chain(&error),
            )
        })?;
    shared
        .enforcer
        .attach(uid.as_str(), pod, sandbox.addresses());
    let mut surroundings = shared.surroundings.clone();
    surroundings.pod_addresses = addresses_of(&sandbox);
    if pod.spec.as_ref().is_some_and(|spec| {
        spec.volumes
            .as_ref()
            .is_some_and(|volumes| !volumes.is_empty())
    }) {
        let namespace = pod.metadata.namespace.as_deref().unwrap_or_default();
        let references = api_objects::references(pod);
        let objects = api_objects::fetch(&shared.client, namespace, &references)
            .await
            .map_err(|error| NotPrepared::mount(chain(&error)))?;
        shared
            .volumes
            .prepare(uid, pod, &objects, &surroundings, sandbox.uid_base)
            .await
            .map_err(|error| {
                let looked_at = Awaited::in_namespace(namespace).references(&references, &objects);
                NotPrepared::volume(&error, pod, looked_at)
            })?;
    }
    Ok(sandbox)
}

/// Refreshes a pod's volumes from the API at an interval. An object that cannot be fetched leaves its volume unchanged.
pub(super) async fn refresh_volumes<R: Runtime>(
    shared: &Shared<R>,
    uid: &PodUid,
    current: &watch::Receiver<Pod>,
    sandbox: &PodSandbox,
) {
    let mut surroundings = shared.surroundings.clone();
    surroundings.pod_addresses = addresses_of(sandbox);
    loop {
        tokio::time::sleep(shared.config.volume_refresh).await;
        let pod = &current.borrow().clone();
        let namespace = pod.metadata.namespace.as_deref().unwrap_or_default();
        let references = api_objects::references(pod);
        let tokens = if shared.volumes.has_old_token(uid, pod) {
            Tokens::Renew
        } else {
            Tokens::Keep
        };
        let refreshed = async {
            let objects = api_objects::fetch(&shared.client, namespace, &references)
                .await
                .map_err(|error| chain(&error))?;
            let base = sandbox.uid_base;
            let refreshing =
                shared
                    .volumes
                    .refresh(uid, pod, &objects, &surroundings, base, tokens);
            refreshing.await.map_err(|error| chain(&error))
        };
        if let Err(error) = refreshed.await {
            tracing::warn!(
                pod = pod.metadata.name,
                error,
                "cannot refresh a pod's volumes"
            );
        }
    }
}

fn addresses_of(sandbox: &PodSandbox) -> Vec<String> {
    let addresses = sandbox.addresses().into_iter();
    addresses.map(|address| address.to_string()).collect()
}

/// Why a container was not started, and which objects could change that.
#[derive(Debug)]
pub(super) struct NotRequested {
    pub failure: StartFailure,
    /// The objects whose change triggers the next attempt.
    pub awaits: Option<Awaited>,
}

impl From<StartError> for NotRequested {
    fn from(error: StartError) -> Self {
        Self {
            failure: StartFailure::Start(error),
            awaits: None,
        }
    }
}

impl From<ImageRefusal> for NotRequested {
    fn from(refusal: ImageRefusal) -> Self {
        Self {
            failure: StartFailure::Image {
                reason: refusal.reason,
                message: refusal.message,
            },
            awaits: refusal.awaits,
        }
    }
}

pub(super) async fn container_request<R: Runtime>(
    shared: &Shared<R>,
    uid: &PodUid,
    pod: &Pod,
    name: &str,
    run: u32,
    crashes: u32,
    sandbox: &PodSandbox,
) -> Result<ContainerSpec, NotRequested> {
    let configuration = |message: String| NotRequested::from(StartError::Configuration(message));
    let container =
        &container_of(pod, name).ok_or_else(|| configuration(format!("no container {name:?}")))?;
    let namespace = pod.metadata.namespace.as_deref().unwrap_or_default();
    let refers = container.env_from.is_some()
        || container
            .env
            .iter()
            .flatten()
            .any(|env| env.value_from.is_some());
    let references = if refers || Volumes::needs_claims(pod) {
        api_objects::references(pod)
    } else {
        api_objects::References::default()
    };
    let objects = api_objects::fetch(&shared.client, namespace, &references)
        .await
        .map_err(|error| configuration(chain(&error)))?;
    let wanting = |message: String| NotRequested {
        awaits: Some(Awaited::in_namespace(namespace).references(&references, &objects)),
        ..configuration(message)
    };
    let mut surroundings = shared.surroundings.clone();
    surroundings.pod_addresses = addresses_of(sandbox);
    let environment = environment::resolve(pod, container, &objects, &surroundings)
        .map_err(|error| wanting(error.to_string()))?;
    let mounts = shared
        .volumes
        .mounts(uid, pod, container, &objects, &environment)
        .map_err(|error| wanting(chain(&error)))?;
    let image = shared.images.ensure(pod, container, &shared.config).await?;
    container_spec::build(
        pod,
        container,
        Parts {
            id: uid.container(name, run),
            image,
            crashes,
            environment,
            mounts,
        },
        &shared.config,
    )
    .map_err(|error| configuration(error.to_string()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::volumes::claims::ClaimError;

    fn not_prepared(source: ClaimError) -> NotPrepared {
        let error = VolumeError::Claim {
            volume: "data".to_owned(),
            source,
        };
        NotPrepared::volume(&error, &Pod::default(), Awaited::in_namespace("default"))
    }

    #[test]
    fn a_claim_that_is_still_unbound_is_awaited_and_not_warned_of() {
        let unbound = not_prepared(ClaimError::NotBound("c".to_owned()));
        assert_eq!(
            (unbound.event, unbound.reason),
            (None, WaitingReason::ContainerCreating)
        );
        assert!(unbound.awaits.is_some(), "no timer runs");
        let missing = not_prepared(ClaimError::Missing("c".to_owned()));
        assert_eq!(missing.event, Some(EventReason::FailedMount));
        assert_eq!(missing.reason, WaitingReason::ContainerCreating);
        assert!(missing.awaits.is_some());
    }

    #[test]
    fn what_the_api_would_not_tell_is_tried_again_after_a_while() {
        let error = VolumeError::HostPathNotAllowed("data".to_owned());
        let refused =
            NotPrepared::volume(&error, &Pod::default(), Awaited::in_namespace("default"));
        assert_eq!(
            (refused.event, refused.awaits),
            (Some(EventReason::FailedMount), None)
        );
    }
}

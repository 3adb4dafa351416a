//! What a pod and its containers need before they can start, and what of it follows the API while they run.

use k8s_openapi::api::core::v1::{Container, Pod};
use tokio::sync::watch;

use super::Shared;
use crate::container_spec::{self, Parts};
use crate::errors::chain;
use crate::pod_lifecycle::ephemeral_containers;
use crate::runtime::{ContainerSpec, PodSandbox, Runtime, StartError};
use crate::volumes::{Tokens, Volumes};
use crate::{api_objects, environment, pod_network};

pub(super) fn container_of(pod: &Pod, name: &str) -> Option<Container> {
    let spec = pod.spec.as_ref()?;
    let ephemeral = || {
        let mut ephemeral = ephemeral_containers(spec).into_iter();
        ephemeral.find(|container| container.name == name)
    };
    spec.containers
        .iter()
        .chain(spec.init_containers.iter().flatten())
        .find(|container| container.name == name)
        .cloned()
        .or_else(ephemeral)
}

/// Everything a pod needs before its first container. A failure comes with the reason to show.
pub(super) async fn prepare<R: Runtime>(
    shared: &Shared<R>,
    pod: &Pod,
) -> Result<PodSandbox, (&'static str, String)> {
    if let Some(message) = shared.enforcer.refusal(pod) {
        return Err(("NetworkPolicyNotEnforced", message));
    }
    let class = pod
        .spec
        .as_ref()
        .and_then(|spec| spec.runtime_class_name.as_deref());
    let mut spec = pod_network::sandbox_spec(pod, &shared.config);
    // To run it with less isolation than was asked for would be a lie, so a class that cannot be had stops it here.
    spec.driver = shared
        .handlers
        .resolve(&shared.client, class)
        .await
        .map_err(|error| ("RuntimeClassUnavailable", chain(&error)))?;
    let sandbox = shared
        .runtime
        .create_sandbox(&spec)
        .await
        .map_err(|error| ("FailedCreatePodSandBox", chain(&error)))?;
    shared.enforcer.attach(pod, sandbox.addresses());
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
            .map_err(|error| ("FailedMount", chain(&error)))?;
        shared
            .volumes
            .prepare(pod, &objects, &surroundings, sandbox.identity_base)
            .await
            .map_err(|error| ("FailedMount", chain(&error)))?;
    }
    Ok(sandbox)
}

/// Compares a pod's volumes with the API now and then. What cannot be had leaves the volume as it is.
pub(super) async fn refresh_volumes<R: Runtime>(
    shared: &Shared<R>,
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
        let tokens = if shared.volumes.has_old_token(pod) {
            Tokens::Renew
        } else {
            Tokens::Keep
        };
        let refreshed = async {
            let objects = api_objects::fetch(&shared.client, namespace, &references)
                .await
                .map_err(|error| chain(&error))?;
            let base = sandbox.identity_base;
            let refreshing = shared
                .volumes
                .refresh(pod, &objects, &surroundings, base, tokens);
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

pub(super) async fn container_request<R: Runtime>(
    shared: &Shared<R>,
    pod: &Pod,
    name: &str,
    run: u32,
    crashes: u32,
    sandbox: &PodSandbox,
) -> Result<ContainerSpec, StartError> {
    let configuration = |message: String| StartError::Configuration(message);
    let container =
        &container_of(pod, name).ok_or_else(|| configuration(format!("no container {name:?}")))?;
    let namespace = pod.metadata.namespace.as_deref().unwrap_or_default();
    let refers = container.env_from.is_some()
        || container
            .env
            .iter()
            .flatten()
            .any(|env| env.value_from.is_some());
    let objects = if refers || Volumes::needs_claims(pod) {
        let references = api_objects::references(pod);
        api_objects::fetch(&shared.client, namespace, &references)
            .await
            .map_err(|error| configuration(chain(&error)))?
    } else {
        api_objects::Objects::default()
    };
    let mut surroundings = shared.surroundings.clone();
    surroundings.pod_addresses = addresses_of(sandbox);
    let environment = environment::resolve(pod, container, &objects, &surroundings)
        .map_err(|error| configuration(error.to_string()))?;
    let mounts = shared
        .volumes
        .mounts(pod, container, &objects, &environment)
        .map_err(|error| configuration(chain(&error)))?;
    let image = shared.images.ensure(pod, container, &shared.config).await?;
    container_spec::build(
        pod,
        container,
        Parts {
            image,
            run,
            crashes,
            environment,
            mounts,
        },
        &shared.config,
    )
    .map_err(|error| configuration(error.to_string()))
}

//! The config maps, secrets and claims that a pod refers to, and the volumes of those claims: their names (pure), and fetching them.

use std::collections::{BTreeMap, BTreeSet};

use api::volumes::{claims_of, named_volume};
use k8s_openapi::api::core::v1::{
    ConfigMap, PersistentVolume, PersistentVolumeClaim, Pod, PodSpec, Secret,
};
use kube::{Api, Client};

use crate::pod_lifecycle::ephemeral_containers;

#[derive(Debug, thiserror::Error)]
pub enum FetchError {
    #[error("reading {kind} {namespace}/{name}")]
    Read {
        kind: &'static str,
        namespace: String,
        name: String,
        #[source]
        source: Box<kube::Error>,
    },
}

/// The names of the objects that a pod refers to, including missing ones.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct References {
    pub config_maps: BTreeSet<String>,
    pub secrets: BTreeSet<String>,
    pub claims: BTreeSet<String>,
}

/// The existing objects that a pod refers to.
#[derive(Debug, Clone, Default)]
pub struct Objects {
    pub config_maps: BTreeMap<String, ConfigMap>,
    pub secrets: BTreeMap<String, Secret>,
    pub claims: BTreeMap<String, PersistentVolumeClaim>,
    /// The volumes that the claims name.
    pub volumes: BTreeMap<String, PersistentVolume>,
}

/// All objects that the pod's environment and volumes refer to.
pub fn references(pod: &Pod) -> References {
    let Some(spec) = &pod.spec else {
        return References::default();
    };
    let mut found = References {
        claims: claims_of(pod),
        ..References::default()
    };
    environment_references(spec, &mut found);
    for volume in spec.volumes.iter().flatten() {
        found
            .config_maps
            .extend(volume.config_map.iter().map(|source| source.name.clone()));
        found.secrets.extend(
            volume
                .secret
                .iter()
                .filter_map(|source| source.secret_name.clone()),
        );
        for source in volume
            .projected
            .iter()
            .flat_map(|projected| projected.sources.iter().flatten())
        {
            found
                .config_maps
                .extend(source.config_map.iter().map(|source| source.name.clone()));
            found
                .secrets
                .extend(source.secret.iter().map(|source| source.name.clone()));
        }
    }
    found
}

fn environment_references(spec: &PodSpec, found: &mut References) {
    for container in spec
        .init_containers
        .iter()
        .flatten()
        .chain(&spec.containers)
        .chain(&ephemeral_containers(spec))
    {
        for source in container
            .env
            .iter()
            .flatten()
            .filter_map(|variable| variable.value_from.as_ref())
        {
            found
                .config_maps
                .extend(source.config_map_key_ref.iter().map(|key| key.name.clone()));
            found
                .secrets
                .extend(source.secret_key_ref.iter().map(|key| key.name.clone()));
        }
        for source in container.env_from.iter().flatten() {
            found.config_maps.extend(
                source
                    .config_map_ref
                    .iter()
                    .map(|source| source.name.clone()),
            );
            found
                .secrets
                .extend(source.secret_ref.iter().map(|source| source.name.clone()));
        }
    }
}

/// Fetches the existing objects of `references`.
pub async fn fetch(
    client: &Client,
    namespace: &str,
    references: &References,
) -> Result<Objects, FetchError> {
    let failed = |kind, name: &str| {
        let (namespace, name) = (namespace.to_owned(), name.to_owned());
        move |source| FetchError::Read {
            kind,
            namespace,
            name,
            source: Box::new(source),
        }
    };
    let mut objects = Objects::default();
    for name in &references.config_maps {
        let found = Api::<ConfigMap>::namespaced(client.clone(), namespace)
            .get_opt(name)
            .await;
        objects.config_maps.extend(
            found
                .map_err(failed("config map", name))?
                .map(|found| (name.clone(), found)),
        );
    }
    for name in &references.secrets {
        let found = Api::<Secret>::namespaced(client.clone(), namespace)
            .get_opt(name)
            .await;
        objects.secrets.extend(
            found
                .map_err(failed("secret", name))?
                .map(|found| (name.clone(), found)),
        );
    }
    for name in &references.claims {
        let found = Api::<PersistentVolumeClaim>::namespaced(client.clone(), namespace)
            .get_opt(name)
            .await;
        objects.claims.extend(
            found
                .map_err(failed("claim", name))?
                .map(|found| (name.clone(), found)),
        );
    }
    for name in objects.claims.values().filter_map(named_volume) {
        let found = Api::<PersistentVolume>::all(client.clone())
            .get_opt(name)
            .await;
        objects.volumes.extend(
            found
                .map_err(failed("persistent volume", name))?
                .map(|found| (name.to_owned(), found)),
        );
    }
    Ok(objects)
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn what_a_container_refers_to_that_was_added_later_is_fetched_too() {
        let by = |name: &str| {
            json!({"name": name, "envFrom": [{"configMapRef": {"name": format!("of-{name}")}}],
            "env": [{"name": "E", "valueFrom": {"secretKeyRef": {"name": format!("of-{name}"), "key": "k"}}}]})
        };
        let pod: Pod = serde_json::from_value(json!({"spec": {
            "initContainers": [by("init")], "containers": [by("main")], "ephemeralContainers": [by("later")]}}))
        .unwrap();
        let expected = BTreeSet::from(["of-init", "of-main", "of-later"].map(str::to_owned));
        let found = references(&pod);
        assert_eq!((&found.config_maps, &found.secrets), (&expected, &expected));
    }
}

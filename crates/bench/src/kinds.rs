//! Installs the custom resource definitions on an API server that a measurement uses.

use anyhow::Context;
use k8s_openapi::apiextensions_apiserver::pkg::apis::apiextensions::v1::CustomResourceDefinition;
use kube::api::PostParams;
use kube::runtime::wait::{await_condition, conditions};
use kube::{Api, Client, ResourceExt};
use serde::Deserialize;

const DEFINITIONS: [&str; 5] = [
    include_str!("../../../deploy/crds/agents.x-k8s.io_sandboxes.yaml"),
    include_str!("../../../deploy/crds/extensions.agents.x-k8s.io_sandboxclaims.yaml"),
    include_str!("../../../deploy/crds/extensions.agents.x-k8s.io_sandboxtemplates.yaml"),
    include_str!("../../../deploy/crds/extensions.agents.x-k8s.io_sandboxwarmpools.yaml"),
    include_str!("../../../deploy/kruise/crds.yaml"),
];

/// Creates the definitions of every dialect, or replaces those that differ, and waits until they are served.
pub async fn install(client: &Client) -> anyhow::Result<()> {
    for documents in DEFINITIONS {
        for definition in parse(documents)? {
            let name = definition.name_any();
            let installed = install_definition(client, definition).await;
            installed.with_context(|| format!("cannot install {name}"))?;
        }
    }
    Ok(())
}

fn parse(documents: &str) -> anyhow::Result<Vec<CustomResourceDefinition>> {
    serde_yaml_ng::Deserializer::from_str(documents)
        .map(|document| {
            CustomResourceDefinition::deserialize(document)
                .context("a custom resource definition cannot be read")
        })
        .collect()
}

async fn install_definition(
    client: &Client,
    mut definition: CustomResourceDefinition,
) -> anyhow::Result<()> {
    let definitions = Api::<CustomResourceDefinition>::all(client.clone());
    let name = definition.name_any();
    let params = PostParams::default();
    match definitions.get_opt(&name).await? {
        None => drop(definitions.create(&params, &definition).await?),
        Some(existing) if existing.spec != definition.spec => {
            definition.metadata.resource_version = existing.metadata.resource_version;
            definitions.replace(&name, &params, &definition).await?;
        }
        Some(_) => {}
    }
    await_condition(definitions, &name, conditions::is_crd_established()).await?;
    Ok(())
}

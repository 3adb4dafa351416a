//! The objects that must exist before the parts start: the kinds, the system's namespace, and the classes of runtimes and storage.

use anyhow::Context;
use k8s_openapi::api::core::v1::Namespace;
use k8s_openapi::api::node::v1::RuntimeClass;
use k8s_openapi::api::storage::v1::StorageClass;
use k8s_openapi::apiextensions_apiserver::pkg::apis::apiextensions::v1::CustomResourceDefinition;
use kube::api::PostParams;
use kube::runtime::wait::{await_condition, conditions};
use kube::{Api, Client, ResourceExt};
use serde::Deserialize;

use crate::assets;

/// Installs the kinds of every dialect and the system's namespace, or brings them up to date.
pub async fn install(client: &Client) -> anyhow::Result<()> {
    create_namespace(client, api::SYSTEM_NAMESPACE).await?;
    // One after the other: read all at once, the kinds would take more memory than all that comes after.
    for documents in assets::CRDS.into_iter().chain([assets::KRUISE_CRDS]) {
        for crd in parse(documents)? {
            install_kind(client, crd).await?;
        }
    }
    for (name, handler) in RUNTIME_CLASSES {
        create_runtime_class(client, name, handler).await?;
    }
    create_storage_class(client).await
}

/// The default storage class, under its usual name on single-node clusters.
const STORAGE_CLASS: &str = "standard";

/// Creates the default storage class unless it exists, so that changes by a user stay.
async fn create_storage_class(client: &Client) -> anyhow::Result<()> {
    let classes: Api<StorageClass> = Api::all(client.clone());
    if classes.get_opt(STORAGE_CLASS).await?.is_some() {
        return Ok(());
    }
    let class = serde_json::from_value(serde_json::json!({
        "metadata": {
            "name": STORAGE_CLASS,
            "annotations": {"storageclass.kubernetes.io/is-default-class": "true"},
        },
        "provisioner": api::volumes::PROVISIONER,
        "reclaimPolicy": "Delete",
        "volumeBindingMode": "Immediate",
    }))?;
    classes.create(&PostParams::default(), &class).await?;
    Ok(())
}

/// The predefined runtime classes, with their handlers.
const RUNTIME_CLASSES: [(&str, &str); 2] = [("runc", "runc"), ("gvisor", "runsc")];

async fn create_runtime_class(client: &Client, name: &str, handler: &str) -> anyhow::Result<()> {
    let classes: Api<RuntimeClass> = Api::all(client.clone());
    if classes.get_opt(name).await?.is_some() {
        return Ok(());
    }
    let mut class = RuntimeClass {
        handler: handler.to_owned(),
        ..RuntimeClass::default()
    };
    class.metadata.name = Some(name.to_owned());
    classes.create(&PostParams::default(), &class).await?;
    Ok(())
}

fn parse(documents: &str) -> anyhow::Result<Vec<CustomResourceDefinition>> {
    serde_yaml_ng::Deserializer::from_str(documents)
        .map(|document| {
            CustomResourceDefinition::deserialize(document)
                .context("an embedded CRD cannot be read")
        })
        .collect()
}

async fn install_kind(client: &Client, mut crd: CustomResourceDefinition) -> anyhow::Result<()> {
    let definitions: Api<CustomResourceDefinition> = Api::all(client.clone());
    let name = crd.name_any();
    match definitions.get_opt(&name).await? {
        None => {
            definitions.create(&PostParams::default(), &crd).await?;
        }
        Some(existing) if existing.spec != crd.spec => {
            crd.metadata.resource_version = existing.metadata.resource_version;
            definitions
                .replace(&name, &PostParams::default(), &crd)
                .await?;
        }
        Some(_) => {}
    }
    await_condition(definitions, &name, conditions::is_crd_established())
        .await
        .with_context(|| format!("{name} was not established"))?;
    Ok(())
}

async fn create_namespace(client: &Client, name: &str) -> anyhow::Result<()> {
    let namespaces: Api<Namespace> = Api::all(client.clone());
    if namespaces.get_opt(name).await?.is_some() {
        return Ok(());
    }
    let mut namespace = Namespace::default();
    namespace.metadata.name = Some(name.to_owned());
    namespaces
        .create(&PostParams::default(), &namespace)
        .await?;
    Ok(())
}

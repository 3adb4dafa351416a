//! How a set keeps its size and revision.

use std::collections::BTreeSet;

use api::conditions::{self, ConditionType};
use api::kruise::SandboxSet;
use api::{Sandbox, SandboxTemplate};
use kube::ResourceExt;
use kube::api::{Patch, PatchParams};
use serde_json::{Value, json};
use testkit::eventually;

use crate::fixture::{Scene, set};

fn image_of(sandbox: &Sandbox) -> &str {
    let containers = &sandbox.spec.pod_template.spec.containers;
    containers[0].image.as_deref().unwrap_or_default()
}

fn new_image(field: &str, image: &str) -> Value {
    json!({ "spec": { field: { "spec": { "containers": [{ "name": "main", "image": image }] } } } })
}

async fn all_of_image(scene: &Scene, set: &str, count: usize, image: &str) {
    eventually(&format!("{set} to be all {image}"), async || {
        let members = scene.members(set).await;
        let is_rolled = members.len() == count && members.iter().all(|it| image_of(it) == image);
        is_rolled.then_some(())
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_set_follows_its_scale_subresource() {
    let scene = Scene::start().await;
    scene.full_set("python", 3).await;
    let sets = scene.cluster.api::<SandboxSet>();
    for size in [6, 0] {
        let patch = json!({ "spec": { "replicas": size } });
        sets.patch_scale("python", &PatchParams::default(), &Patch::Merge(patch))
            .await
            .unwrap();
        scene.set_available("python", size).await;
        let scale = sets.get_scale("python").await.unwrap();
        let status = scale.status.unwrap();
        assert_eq!(status.replicas, size);
        let selected = scene.sandboxes(&status.selector.unwrap()).await;
        assert_eq!(i32::try_from(selected.len()).unwrap(), size);
    }
    scene.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_new_revision_rolls_out_and_is_reported() {
    let scene = Scene::start().await;
    let before = scene.full_set("python", 5).await.status.unwrap();
    scene
        .try_patch::<SandboxSet>("python", new_image("template", "v2"))
        .await
        .unwrap();
    all_of_image(&scene, "python", 5, "v2").await;
    let rolled = scene
        .cluster
        .until::<SandboxSet>("python", "to be rolled out", |set| {
            let status = set.status.as_ref().unwrap();
            status.updated_available_replicas == 5
                && status.current_revision == status.update_revision
        })
        .await;
    let status = rolled.status.unwrap();
    assert_ne!(status.current_revision, before.current_revision);
    assert!(conditions::is_true(
        &status.conditions,
        ConditionType::Updated
    ));
    assert!(conditions::is_true(
        &status.conditions,
        ConditionType::Ready
    ));
    scene.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_set_follows_the_template_it_refers_to() {
    let scene = Scene::start().await;
    let mut manifest = set("by-reference", 2);
    manifest["spec"] = json!({ "replicas": 2, "templateRef": { "name": "py" } });
    scene.create::<SandboxSet>(manifest).await;
    let blocked = scene
        .cluster
        .until::<SandboxSet>("by-reference", "to say what is missing", |set| {
            set.status.is_some()
        })
        .await;
    let status = blocked.status.unwrap();
    let ready = conditions::find(&status.conditions, ConditionType::Ready).unwrap();
    assert_eq!(ready.reason, "TemplateNotFound");
    scene
        .create::<SandboxTemplate>(json!({
            "apiVersion": "extensions.agents.x-k8s.io/v1beta1",
            "kind": "SandboxTemplate",
            "metadata": { "name": "py" },
            "spec": { "podTemplate": { "spec": { "containers": [{ "name": "main", "image": "v1" }] } } },
        }))
        .await;
    scene.set_available("by-reference", 2).await;
    scene
        .try_patch::<SandboxTemplate>("py", new_image("podTemplate", "v2"))
        .await
        .unwrap();
    all_of_image(&scene, "by-reference", 2, "v2").await;
    scene.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_lost_member_is_replaced_and_a_deleted_set_takes_its_members_along() {
    let scene = Scene::start().await;
    scene.full_set("python", 3).await;
    let before = scene.members("python").await;
    scene.delete::<Sandbox>(&before[0].name_any()).await;
    let gone = before[0].uid();
    eventually("the lost one to be replaced", async || {
        let members = scene.members("python").await;
        let uids: BTreeSet<_> = members.iter().map(ResourceExt::uid).collect();
        (uids.len() == 3 && !uids.contains(&gone)).then_some(())
    })
    .await;
    scene.delete::<SandboxSet>("python").await;
    eventually("the members to be gone", async || {
        scene.sandboxes("").await.is_empty().then_some(())
    })
    .await;
    scene.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_set_needs_exactly_one_description_of_its_sandboxes() {
    let scene = Scene::start().await;
    for (spec, reported) in [
        (
            json!({ "replicas": 1 }),
            "exactly one of template and templateRef",
        ),
        (
            json!({ "replicas": 1, "templateRef": { "name": "py" }, "updateStrategy": { "maxUnavailable": "some" } }),
            "maxUnavailable",
        ),
    ] {
        let mut manifest = set("bad", 1);
        manifest["spec"] = spec;
        let refused = scene.try_create::<SandboxSet>(manifest).await.unwrap_err();
        assert!(refused.to_string().contains(reported), "{refused}");
    }
    scene.stop().await;
}

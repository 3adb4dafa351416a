use api::{Sandbox, SandboxSpec};
use controllers::Config;
use k8s_openapi::api::core::v1::{Pod, Service};
use kube::api::{Patch, PatchParams, PostParams};
use planner::owner::controller_of;
use serde_json::json;
use testkit::cluster::{object, pod};
use testkit::node::Behaviour;

use crate::fixture::Fixture;

#[tokio::test(flavor = "multi_thread")]
async fn unowned_objects_of_the_name_are_adopted() {
    let fixture = Fixture::start().await;
    let pods = fixture.cluster.api::<Pod>();
    let services = fixture.cluster.api::<Service>();
    let params = PostParams::default();
    let existing = pods.create(&params, &pod("taken")).await.unwrap();
    let service: Service = object(json!({
        "metadata": {"name": "taken"},
        "spec": {"clusterIP": "None", "selector": {"app": "old"}},
    }));
    services.create(&params, &service).await.unwrap();
    let spec = SandboxSpec {
        service: Some(true),
        ..SandboxSpec::default()
    };
    fixture.cluster.create_sandbox("taken", spec).await;
    let sandbox = fixture.until_ready("taken").await;
    let adopted = pods.get("taken").await.unwrap();
    assert_eq!(adopted.metadata.uid, existing.metadata.uid);
    let uid = sandbox.metadata.uid.unwrap();
    assert_eq!(controller_of(&adopted.metadata).unwrap().uid, uid);
    let service = services.get("taken").await.unwrap();
    assert_eq!(controller_of(&service.metadata).unwrap().uid, uid);
    let selector = service.spec.unwrap().selector.unwrap();
    assert_eq!(selector.len(), 1, "{selector:?}");
    fixture.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_pod_of_another_controller_is_refused_until_it_is_gone() {
    let fixture = Fixture::start().await;
    fixture
        .cluster
        .create_sandbox("owner", SandboxSpec::default())
        .await;
    let owner = fixture.until_ready("owner").await;
    let mut foreign = pod("contested");
    foreign.metadata.owner_references = Some(vec![object(json!({
        "apiVersion": "agents.x-k8s.io/v1beta1",
        "kind": "Sandbox",
        "name": "owner",
        "uid": owner.metadata.uid,
        "controller": true,
    }))]);
    let pods = fixture.cluster.api::<Pod>();
    pods.create(&PostParams::default(), &foreign).await.unwrap();
    fixture
        .cluster
        .create_sandbox("contested", SandboxSpec::default())
        .await;
    let message =
        "Error seen: refusing to use pod \"contested\": it is controlled by Sandbox \"owner\"";
    fixture
        .until_reported("contested", "ReconcilerError", message)
        .await;
    pods.delete("contested", &kube::api::DeleteParams::default())
        .await
        .unwrap();
    fixture.until_ready("contested").await;
    fixture.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn the_pod_that_the_annotation_names_is_used_and_forgotten_when_it_is_gone() {
    let fixture = Fixture::start().await;
    let pods = fixture.cluster.api::<Pod>();
    pods.create(&PostParams::default(), &pod("warm-1"))
        .await
        .unwrap();
    let mut sandbox = testkit::cluster::sandbox("claimed", SandboxSpec::default());
    let annotation = ("agents.x-k8s.io/pod-name".to_owned(), "warm-1".to_owned());
    sandbox.metadata.annotations = Some([annotation].into());
    fixture
        .cluster
        .api::<Sandbox>()
        .create(&PostParams::default(), &sandbox)
        .await
        .unwrap();
    let sandbox = fixture.until_ready("claimed").await;
    let adopted = pods.get("warm-1").await.unwrap();
    assert_eq!(
        Some(&controller_of(&adopted.metadata).unwrap().uid),
        sandbox.metadata.uid.as_ref()
    );
    assert!(pods.get_opt("claimed").await.unwrap().is_none());

    pods.delete("warm-1", &kube::api::DeleteParams::default())
        .await
        .unwrap();
    fixture
        .cluster
        .until("claimed", "a pod of the sandbox's own name", |_: &Pod| true)
        .await;
    fixture
        .cluster
        .until("claimed", "to forget the pod", |sandbox: &Sandbox| {
            let annotations = sandbox.metadata.annotations.as_ref();
            annotations.is_none_or(|it| !it.contains_key("agents.x-k8s.io/pod-name"))
        })
        .await;
    fixture.until_ready("claimed").await;
    fixture.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn adoption_can_be_made_to_need_a_label() {
    let config = Config {
        require_adoptable_label: true,
        ..Config::default()
    };
    let fixture = Fixture::start_with(Behaviour::Ready, config).await;
    let pods = fixture.cluster.api::<Pod>();
    pods.create(&PostParams::default(), &pod("shy"))
        .await
        .unwrap();
    fixture
        .cluster
        .create_sandbox("shy", SandboxSpec::default())
        .await;
    let message = "Error seen: refusing to adopt pod \"shy\": it lacks the label agents.x-k8s.io/adoptable: \"true\"";
    fixture
        .until_reported("shy", "ReconcilerError", message)
        .await;
    let label =
        Patch::Merge(json!({"metadata": {"labels": {"agents.x-k8s.io/adoptable": "true"}}}));
    pods.patch("shy", &PatchParams::default(), &label)
        .await
        .unwrap();
    fixture.until_ready("shy").await;
    fixture.stop().await;
}

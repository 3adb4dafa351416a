use api::conditions::ConditionType;
use api::sandbox::OperatingMode;
use api::{Sandbox, SandboxSpec};
use k8s_openapi::api::core::v1::{Pod, Service};
use k8s_openapi::api::events::v1::Event;
use kube::api::{DeleteParams, ListParams, Patch, PatchParams};
use planner::owner::controller_of;
use serde_json::json;
use testkit::eventually;
use testkit::node::{NODE_NAME, end_pod};

use crate::fixture::{Fixture, condition, status};

const HASH: &str = "agents.x-k8s.io/sandbox-name-hash";

#[tokio::test(flavor = "multi_thread")]
async fn a_sandbox_gets_a_pod_and_a_service_and_tells_how_to_reach_them() {
    let fixture = Fixture::start().await;
    let spec = SandboxSpec {
        service: Some(true),
        ..SandboxSpec::default()
    };
    fixture.cluster.create_sandbox("hello", spec).await;
    let message = "Pod is Ready; Service Exists";
    let sandbox = fixture
        .until_reported("hello", "DependenciesReady", message)
        .await;
    let status = status(&sandbox);
    assert_eq!(status.service.as_deref(), Some("hello"));
    let fqdn = "hello.default.svc.cluster.local";
    assert_eq!(status.service_fqdn.as_deref(), Some(fqdn));
    assert_eq!(status.replicas, 1);
    assert_eq!(status.node_name.as_deref(), Some(NODE_NAME));
    assert_eq!(status.pod_ips.len(), 1);
    let hash = api::names::name_hash("hello");
    assert_eq!(status.selector, Some(format!("{HASH}={hash}")));

    let pod = fixture.cluster.api::<Pod>().get("hello").await.unwrap();
    assert_eq!(pod.metadata.labels.as_ref().unwrap()[HASH], hash);
    let uid = sandbox.metadata.uid.clone().unwrap();
    assert_eq!(controller_of(&pod.metadata).unwrap().uid, uid);
    let service = fixture.cluster.api::<Service>().get("hello").await.unwrap();
    assert_eq!(controller_of(&service.metadata).unwrap().uid, uid);
    let spec = service.spec.unwrap();
    assert_eq!(spec.cluster_ip.as_deref(), Some("None"));
    assert_eq!(spec.selector.unwrap()[HASH], hash);

    fixture
        .patch_sandbox("hello", json!({"spec": {"service": false}}))
        .await;
    fixture
        .until_reported("hello", "DependenciesReady", "Pod is Ready")
        .await;
    fixture.cluster.until_gone::<Service>("hello").await;
    fixture.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn scaling_to_zero_and_back_replaces_the_pod() {
    let fixture = Fixture::start().await;
    fixture
        .cluster
        .create_sandbox("nap", SandboxSpec::default())
        .await;
    fixture.until_ready("nap").await;
    let first = fixture.cluster.api::<Pod>().get("nap").await.unwrap();

    let scale = Patch::Merge(json!({"spec": {"replicas": 0}}));
    let sandboxes = fixture.cluster.api::<Sandbox>();
    sandboxes
        .patch_scale("nap", &PatchParams::default(), &scale)
        .await
        .unwrap();
    let suspended = fixture
        .until_reported("nap", "SandboxSuspended", "Sandbox is suspended")
        .await;
    assert_eq!(
        condition(&suspended, ConditionType::Suspended)
            .unwrap()
            .reason,
        "PodTerminated"
    );
    assert_eq!(status(&suspended).replicas, 0);
    assert!(status(&suspended).pod_ips.is_empty());
    assert!(status(&suspended).selector.is_some());
    fixture.cluster.until_gone::<Pod>("nap").await;

    let scale = Patch::Merge(json!({"spec": {"replicas": 1}}));
    sandboxes
        .patch_scale("nap", &PatchParams::default(), &scale)
        .await
        .unwrap();
    let resumed = fixture.until_ready("nap").await;
    assert_eq!(condition(&resumed, ConditionType::Suspended), None);
    let second = fixture.cluster.api::<Pod>().get("nap").await.unwrap();
    assert_ne!(first.metadata.uid, second.metadata.uid);
    fixture.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn the_operating_mode_suspends_as_well() {
    let fixture = Fixture::start().await;
    let spec = SandboxSpec {
        operating_mode: Some(OperatingMode::Suspended),
        ..SandboxSpec::default()
    };
    fixture.cluster.create_sandbox("modal", spec).await;
    let suspended = fixture
        .until_reported("modal", "SandboxSuspended", "Sandbox is suspended")
        .await;
    let reported = condition(&suspended, ConditionType::Suspended).unwrap();
    assert_eq!(
        (reported.status.as_str(), reported.reason.as_str()),
        ("True", "PodTerminated")
    );
    assert!(
        fixture
            .cluster
            .api::<Pod>()
            .get_opt("modal")
            .await
            .unwrap()
            .is_none()
    );
    fixture
        .patch_sandbox("modal", json!({"spec": {"operatingMode": "Running"}}))
        .await;
    let running = fixture.until_ready("modal").await;
    let reported = condition(&running, ConditionType::Suspended).unwrap();
    assert_eq!(
        (reported.status.as_str(), reported.reason.as_str()),
        ("False", "NotSuspended")
    );
    let scheduled = condition(&running, ConditionType::PodScheduled).unwrap();
    assert_eq!(scheduled.status, "True");
    fixture.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn an_event_names_the_field_that_suspends_where_two_disagree() {
    let fixture = Fixture::start().await;
    let spec = SandboxSpec {
        operating_mode: Some(OperatingMode::Running),
        ..SandboxSpec::default()
    };
    fixture.cluster.create_sandbox("torn", spec).await;
    fixture.until_ready("torn").await;
    let notes = async || -> Vec<String> {
        let events = fixture.cluster.api::<Event>();
        let events = events.list(&ListParams::default()).await.unwrap();
        let disagreements = events
            .into_iter()
            .filter(|event| event.reason.as_deref() == Some("SuspensionFieldsDisagree"));
        disagreements.filter_map(|event| event.note).collect()
    };
    assert_eq!(notes().await, [""; 0], "nothing disagrees");
    fixture
        .patch_sandbox("torn", json!({"spec": {"replicas": 0}}))
        .await;
    fixture
        .until_reported("torn", "SandboxSuspended", "Sandbox is suspended")
        .await;
    let reported = eventually("the event", async || notes().await.pop()).await;
    assert!(
        reported.starts_with("Suspended because spec.replicas is 0"),
        "{reported}"
    );

    // A suspension by the mode alone causes no event until the user also sets `replicas`.
    fixture
        .patch_sandbox(
            "torn",
            json!({"spec": {"replicas": 0, "operatingMode": "Suspended"}}),
        )
        .await;
    let generation = |sandbox: &Sandbox| sandbox.metadata.generation;
    let resumed = fixture
        .patch_sandbox("torn", json!({"spec": {"replicas": 1}}))
        .await;
    fixture
        .cluster
        .until("torn", "to see the spec", |sandbox: &Sandbox| {
            condition(sandbox, ConditionType::Ready)
                .unwrap()
                .observed_generation
                == generation(&resumed)
        })
        .await;
    let reported = eventually("the second event", async || {
        let mut notes = notes().await;
        notes.retain(|note| note.starts_with("Still suspended"));
        notes.pop()
    })
    .await;
    assert!(
        reported.contains("set spec.operatingMode to Running"),
        "{reported}"
    );
    fixture.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn metadata_of_the_template_reaches_the_pod_and_leaves_it() {
    let fixture = Fixture::start().await;
    let mut spec = SandboxSpec::default();
    let labels = [("app", "demo"), ("tier", "web")];
    spec.pod_template.metadata.labels = Some(
        labels
            .map(|(key, value)| (key.to_owned(), value.to_owned()))
            .into(),
    );
    fixture.cluster.create_sandbox("labelled", spec).await;
    fixture.until_ready("labelled").await;
    let pod = fixture.cluster.api::<Pod>().get("labelled").await.unwrap();
    let annotations = pod.metadata.annotations.unwrap();
    assert_eq!(annotations["agents.x-k8s.io/propagated-labels"], "app,tier");

    let patch =
        json!({"spec": {"podTemplate": {"metadata": {"labels": {"tier": null, "app": "next"}}}}});
    fixture.patch_sandbox("labelled", patch).await;
    fixture
        .cluster
        .until("labelled", "labels to follow", |pod: &Pod| {
            let labels = pod.metadata.labels.as_ref();
            labels.is_some_and(|labels| labels["app"] == "next" && !labels.contains_key("tier"))
        })
        .await;
    fixture.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_pod_deleted_behind_the_controllers_back_comes_again() {
    let fixture = Fixture::start().await;
    fixture
        .cluster
        .create_sandbox("again", SandboxSpec::default())
        .await;
    fixture.until_ready("again").await;
    let pods = fixture.cluster.api::<Pod>();
    let first = pods.get("again").await.unwrap().metadata.uid;
    pods.delete("again", &DeleteParams::default())
        .await
        .unwrap();
    fixture
        .cluster
        .until("again", "another pod", |pod: &Pod| {
            pod.metadata.uid != first
        })
        .await;
    fixture.until_ready("again").await;
    fixture.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn an_evicted_pod_is_replaced_and_a_failed_one_is_not() {
    let fixture = Fixture::start().await;
    let pods = fixture.cluster.api::<Pod>();
    for name in ["evicted", "failed"] {
        fixture
            .cluster
            .create_sandbox(name, SandboxSpec::default())
            .await;
        fixture.until_ready(name).await;
    }
    let first = pods.get("evicted").await.unwrap().metadata.uid;
    end_pod(&pods, "evicted", "Failed", Some("Evicted")).await;
    end_pod(&pods, "failed", "Failed", Some("Error")).await;
    fixture
        .cluster
        .until("evicted", "another pod", |pod: &Pod| {
            pod.metadata.uid != first
        })
        .await;
    fixture.until_ready("evicted").await;
    let failed = fixture
        .until_reported("failed", "PodFailed", "Pod failed")
        .await;
    let finished = condition(&failed, ConditionType::Finished).unwrap();
    assert_eq!(
        (finished.status.as_str(), finished.reason.as_str()),
        ("True", "PodFailed")
    );
    fixture.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn events_report_creation_suspension_and_resumption() {
    let fixture = Fixture::start().await;
    fixture
        .cluster
        .create_sandbox("reported", SandboxSpec::default())
        .await;
    fixture.until_ready("reported").await;
    fixture
        .patch_sandbox("reported", json!({"spec": {"replicas": 0}}))
        .await;
    fixture
        .until_reported("reported", "SandboxSuspended", "Sandbox is suspended")
        .await;
    fixture
        .patch_sandbox("reported", json!({"spec": {"replicas": 1}}))
        .await;
    fixture.until_ready("reported").await;
    let events = fixture.cluster.api::<Event>();
    let wanted = ["PodCreated", "Suspended", "Resumed"];
    eventually(
        "events for creation, suspension and resumption",
        async || {
            let events = events.list(&ListParams::default()).await.unwrap().items;
            let about: Vec<String> = events
                .into_iter()
                .filter(|event| {
                    let regarding = event.regarding.as_ref();
                    regarding.is_some_and(|it| it.name.as_deref() == Some("reported"))
                })
                .filter_map(|event| event.reason)
                .collect();
            wanted
                .iter()
                .all(|reason| about.iter().any(|reported| reported == reason))
                .then_some(())
        },
    )
    .await;
    fixture.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_sandbox_on_a_kubelet_is_not_frozen_and_its_pod_runs_on() {
    let fixture = Fixture::start().await;
    fixture
        .cluster
        .create_sandbox("warm", SandboxSpec::default())
        .await;
    fixture.until_ready("warm").await;
    let before = fixture.cluster.api::<Pod>().get("warm").await.unwrap();
    let freeze = json!({"spec": {"replicas": 0, "suspensionStrategy": {"type": "Freeze"}}});
    fixture.patch_sandbox("warm", freeze).await;
    let told = fixture
        .until_reported("warm", "SandboxSuspended", "Sandbox is suspending")
        .await;
    let suspended = condition(&told, ConditionType::Suspended).unwrap();
    assert_eq!(
        (suspended.status.as_str(), suspended.reason.as_str()),
        ("False", "FreezeNotSupported")
    );
    let pod = fixture.cluster.api::<Pod>().get("warm").await.unwrap();
    assert_eq!(pod.metadata.uid, before.metadata.uid);
    assert!(!api::freezing::is_asked_for(
        pod.metadata.annotations.as_ref()
    ));

    let resume = json!({"spec": {"replicas": 1}});
    fixture.patch_sandbox("warm", resume).await;
    fixture.until_ready("warm").await;
    fixture.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_node_that_can_freeze_pods_is_asked_to_and_the_sandbox_follows_its_answers() {
    let fixture = Fixture::start().await;
    fixture
        .cluster
        .create_sandbox("ice", SandboxSpec::default())
        .await;
    fixture.until_ready("ice").await;
    let pods = fixture.cluster.api::<Pod>();
    let report = async |frozen: &str, ready: &str| {
        let conditions = json!({"status": {"conditions": [
            {"type": "Frozen", "status": frozen, "reason": if frozen == "True" { "Frozen" } else { "Running" }},
            {"type": "Ready", "status": ready},
        ]}});
        let patch = Patch::Strategic(conditions);
        let parameters = PatchParams::default();
        pods.patch_status("ice", &parameters, &patch).await.unwrap();
    };
    report("False", "True").await;
    let freeze = json!({"spec": {"replicas": 0, "suspensionStrategy": {"type": "Freeze"}}});
    fixture.patch_sandbox("ice", freeze).await;
    let asked = async |wanted: bool| {
        eventually("the annotation to follow the spec", || async {
            let pod = pods.get("ice").await.unwrap();
            let asked = api::freezing::is_asked_for(pod.metadata.annotations.as_ref());
            (asked == wanted).then_some(())
        })
        .await;
    };
    asked(true).await;
    report("True", "False").await;
    let frozen = fixture
        .until_reported("ice", "SandboxSuspended", "Sandbox is suspended")
        .await;
    assert_eq!(
        condition(&frozen, ConditionType::Suspended).unwrap().reason,
        "Frozen"
    );
    assert_eq!(status(&frozen).replicas, 1);
    assert!(status(&frozen).pod_ips.is_empty());

    fixture
        .patch_sandbox("ice", json!({"spec": {"replicas": 1}}))
        .await;
    asked(false).await;
    report("False", "True").await;
    let resumed = fixture.until_ready("ice").await;
    assert_eq!(status(&resumed).pod_ips.len(), 1);
    fixture.stop().await;
}

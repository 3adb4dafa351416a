//! Upkeep: renewal of tokens, warnings about unsupported fields, and removing what a stopped node has left on the machine.

#![expect(
    clippy::unwrap_used,
    reason = "a test that cannot go on says so by panicking"
)]

mod support;

use std::time::{Duration, SystemTime};

use container_runtime::reclaim::reclaim;
use k8s_openapi::api::core::v1::Event;
use kube::api::ListParams;
use kube::{Api, ResourceExt};
use serde_json::json;
use support::Machine;
use testkit::eventually;

#[tokio::test(flavor = "multi_thread")]
async fn a_token_is_renewed_before_it_ends_also_after_a_restart_of_the_node() {
    let mut machine =
        Machine::start_with(|config| config.volume_refresh = Duration::from_millis(50)).await;
    let spec = json!({"containers": [{"name": "c", "image": "host", "command": ["sleep", "1000"],
            "volumeMounts": [{"name": "t", "mountPath": "/token"}]}],
        "volumes": [{"name": "t", "projected": {"sources": [{"serviceAccountToken": {"path": "token", "expirationSeconds": 600}}]}}]});
    machine.create("p", spec).await;
    let pod = machine.ready("p").await;
    let data_dir = machine.config.data_dir.canonicalize().unwrap();
    let file = data_dir
        .join("memory")
        .join(pod.uid().unwrap())
        .join("t/token");
    let shown = async |machine: &Machine| machine.exec(&pod, &["cat", "/token/token"]).await.1;
    let mut before = shown(&machine).await;
    assert_eq!(before.split('.').count(), 3, "a signed token: {before}");
    for restart in [false, true] {
        if restart {
            machine.stop_node().await;
        }
        // Nine of its ten minutes have passed.
        let times =
            std::fs::FileTimes::new().set_modified(SystemTime::now() - Duration::from_secs(540));
        std::fs::File::open(&file)
            .unwrap()
            .set_times(times)
            .unwrap();
        if restart {
            machine.start_node().await;
            machine.ready("p").await;
        }
        let fresh = eventually("another token", || async {
            let now = shown(&machine).await;
            (now != before && !now.is_empty()).then_some(now)
        })
        .await;
        assert_eq!(fresh.split('.').count(), 3, "a signed token: {fresh}");
        before = fresh;
    }
    machine.finish().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn unsupported_fields_of_a_pod_are_reported_as_an_event() {
    let machine = Machine::start().await;
    let container = json!({"name": "c", "image": "host", "command": ["sh", "-c", "echo one; echo the last; exit 1"],
        "terminationMessagePolicy": "FallbackToLogsOnError", "ports": [{"containerPort": 1, "hostPort": 1}]});
    let spec = json!({"restartPolicy": "Never", "hostUsers": true, "nodeSelector": {"disk": "ssd"}, "containers": [container]});
    machine.create("p", spec).await;
    let pod = machine.phase("p", "Failed").await;
    let status = support::container(&pod).unwrap();
    let ended = status.state.as_ref().unwrap().terminated.as_ref().unwrap();
    assert_eq!(ended.message.as_deref(), Some("one\nthe last"));
    let events = Api::<Event>::namespaced(machine.client.clone(), "t");
    for wanted in ["hostUsers", "hostPort", "nodeSelector"] {
        eventually(wanted, || async {
            let events = events.list(&ListParams::default()).await.unwrap();
            let mut events = events.items.into_iter();
            events.find(|event| {
                let note = event.message.as_deref().unwrap_or_default();
                event.reason.as_deref() == Some("Unsupported")
                    && event.type_.as_deref() == Some("Warning")
                    && note.contains(wanted)
            })
        })
        .await;
    }
    machine.finish().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn reclaiming_a_stopped_node_removes_everything_and_its_pods_start_over() {
    let mut machine = Machine::start().await;
    let spec = json!({"terminationGracePeriodSeconds": 1, "shareProcessNamespace": true, "containers": [
            {"name": "c", "image": "host", "command": ["sh", "-c", "sleep 1000 & sleep 1000"], "volumeMounts": [{"name": "m", "mountPath": "/m"}]},
            {"name": "second", "image": "host", "command": ["sleep", "1000"]}],
        "volumes": [{"name": "m", "emptyDir": {"medium": "Memory"}}]});
    machine.create("p", spec).await;
    machine.ready("p").await;
    let data_dir = machine.config.data_dir.canonicalize().unwrap();
    let refused = reclaim(&data_dir).await.unwrap_err();
    assert!(refused.to_string().contains("is running"), "{refused}");

    machine.stop_node().await;
    let left = support::of_machine(&data_dir);
    assert!(!left.is_empty(), "pods survive their node");
    // Retried: a child that another test is just starting holds a copy of the node's lock until its exec.
    let reclaimed = eventually("the node to be taken for gone", || async {
        reclaim(&data_dir).await.ok()
    })
    .await;
    assert!(
        reclaimed.ranges && reclaimed.groups > 0 && reclaimed.links > 0 && reclaimed.mounts > 0
    );
    assert_eq!(support::of_machine(&data_dir), Vec::<String>::new());
    assert!(reclaim(&data_dir).await.unwrap().is_nothing());

    machine.start_node().await;
    let again = |pod: &k8s_openapi::api::core::v1::Pod| {
        let statuses = pod.status.as_ref().unwrap().container_statuses.as_ref();
        let ran_again = statuses.is_some_and(|all| all.iter().all(|one| one.restart_count == 1));
        support::is_ready(pod) && ran_again
    };
    machine.pod_with("p", "running again", again).await;
    machine.delete("p").await;
    machine.finish().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn leftovers_of_a_node_without_a_data_directory_are_removed_by_the_next_node() {
    let mut gone = Machine::start().await;
    gone.create(
        "p",
        json!({"containers": [{"name": "c", "image": "host", "command": ["sleep", "1000"]}]}),
    )
    .await;
    gone.ready("p").await;
    let data_dir = gone.config.data_dir.canonicalize().unwrap();
    gone.stop_node().await;
    assert!(!support::of_machine(&data_dir).is_empty());
    gone.remove_directory();
    // The next node removes the leftovers before it claims ranges. If it belongs to another test, it may still be doing so.
    let next = Machine::start().await;
    eventually("what the node left to be gone", || async {
        support::of_machine(&data_dir).is_empty().then_some(())
    })
    .await;
    next.finish().await;
}

//! No process outlives its pod, whatever values the pod has and whatever fails in the node.

#![expect(
    clippy::unwrap_used,
    reason = "a test that cannot go on says so by panicking"
)]

mod support;

use std::path::{Path, PathBuf};
use std::time::Duration;

use k8s_openapi::api::core::v1::Pod;
use kube::ResourceExt;
use kube::api::{DeleteParams, Patch, PatchParams};
use serde_json::{Value, json};
use support::{Machine, container as container_of, is_ready};
use testkit::eventually;

/// A container that ignores the request to end.
fn stubborn() -> Value {
    json!({"name": "c", "image": "host", "command": ["sh", "-c", "trap '' TERM; while :; do sleep 1000; done"]})
}

/// The first process of a pod's container.
fn first_process(machine: &Machine, pod: &Pod) -> PathBuf {
    let run = directory(machine, pod).join("containers/c/0/state.json");
    let record: Value = serde_json::from_slice(&std::fs::read(run).unwrap()).unwrap();
    Path::new("/proc").join(record["pid"].to_string())
}

fn directory(machine: &Machine, pod: &Pod) -> PathBuf {
    machine
        .config
        .data_dir
        .join("pods")
        .join(pod.uid().unwrap())
}

/// Waits until a pod has no processes and no files.
async fn is_no_more(machine: &Machine, pod: &Pod, process: &Path) {
    let directory = directory(machine, pod);
    eventually("the pod's processes and files to go", || async {
        (!process.exists() && !directory.exists()).then_some(())
    })
    .await;
}

async fn delete(machine: &Machine, name: &str, grace: Option<u32>) {
    let parameters = DeleteParams {
        grace_period_seconds: grace,
        ..DeleteParams::default()
    };
    machine.pods().delete(name, &parameters).await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_huge_grace_period_leaves_no_process_after_a_forced_deletion() {
    let machine = Machine::start().await;
    let spec = json!({"terminationGracePeriodSeconds": i64::MAX, "containers": [stubborn()]});
    machine.create("ghost", spec).await;
    let pod = machine.ready("ghost").await;
    let process = first_process(&machine, &pod);
    assert!(process.exists());
    delete(&machine, "ghost", None).await;
    delete(&machine, "ghost", Some(0)).await;
    machine.gone("ghost").await;
    is_no_more(&machine, &pod, &process).await;
    machine.finish().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_worker_that_panics_is_started_again_and_finds_its_containers() {
    let machine = Machine::start().await;
    machine
        .create(
            "p",
            json!({"terminationGracePeriodSeconds": 1, "containers": [stubborn()]}),
        )
        .await;
    let pod = machine.ready("p").await;
    let process = first_process(&machine, &pod);
    machine.config.faults.panic_in_workers(1);
    // Any change wakes the worker.
    label(&machine, "p", "one").await;
    machine.has_event("p", "PodWorkerPanicked", "goes on").await;
    assert!(process.exists(), "nothing of it was ended");
    // The next worker runs commands in it, follows the pod, and ends it.
    let (code, out, _) = machine.exec(&pod, &["echo", "alive"]).await;
    assert_eq!((code, out.as_str()), (0, "alive\n"));
    machine.delete("p").await;
    is_no_more(&machine, &pod, &process).await;
    machine.finish().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_worker_that_panics_during_a_forced_deletion_leaves_no_process() {
    let machine = Machine::start().await;
    machine
        .create("p", json!({"containers": [stubborn()]}))
        .await;
    let pod = machine.ready("p").await;
    let process = first_process(&machine, &pod);
    machine.config.faults.panic_in_workers(1);
    delete(&machine, "p", Some(0)).await;
    machine.gone("p").await;
    is_no_more(&machine, &pod, &process).await;
    assert_eq!(machine.config.faults.panics_left(), 0);
    machine.finish().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_sweep_ends_processes_and_removes_files_of_no_pod() {
    let mut machine = Machine::start_with(|config| {
        config.stray_check = Duration::from_millis(200);
    })
    .await;
    machine
        .create("p", json!({"containers": [stubborn()]}))
        .await;
    let pod = machine.ready("p").await;
    // An orphan: a directory, and a cgroup with a process, of a pod that the API does not have.
    let uid = "9a0c9f3e-0000-4000-8000-00000000dead";
    let stray = machine.config.data_dir.join("pods").join(uid);
    std::fs::create_dir_all(stray.join("volumes/v")).unwrap();
    let limits = container_runtime::cgroups::Limits::default();
    let groups = machine.runtime().cgroups().clone();
    let joined = groups.create(uid, "c.0", &limits).unwrap();
    let child = std::process::Command::new("sleep")
        .arg("1000")
        .spawn()
        .unwrap();
    for group in &joined {
        std::fs::write(group.join("cgroup.procs"), child.id().to_string()).unwrap();
    }
    let child = std::sync::Mutex::new(child);
    eventually("the stray to be ended", || async {
        child.lock().unwrap().try_wait().unwrap()
    })
    .await;
    eventually("the stray to be removed", || async {
        (!stray.exists() && joined.iter().all(|group| !group.exists())).then_some(())
    })
    .await;
    assert!(
        first_process(&machine, &pod).exists(),
        "the pod was left alone"
    );
    machine.stop_node().await;
    machine.start_node().await;
    machine.ready("p").await;
    machine.finish().await;
}

async fn label(machine: &Machine, name: &str, value: &str) {
    let patch = json!({"metadata": {"labels": {"changed": value}}});
    let pods = machine.pods();
    pods.patch(name, &PatchParams::default(), &Patch::Merge(patch))
        .await
        .unwrap();
}

/// Simulates a crash of the machine, which may leave a recently written file empty.
fn empty(path: &Path) {
    std::fs::write(path, "").unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn an_empty_record_after_a_crash_loses_no_files_of_the_pod() {
    let mut machine = Machine::start().await;
    let mut container = stubborn();
    container["volumeMounts"] = json!([{"name": "disk", "mountPath": "/disk"}]);
    let spec = json!({"terminationGracePeriodSeconds": 1, "containers": [container],
        "volumes": [{"name": "disk", "emptyDir": {}}]});
    machine.create("sandbox", spec.clone()).await;
    machine.create("container", spec).await;
    let mut records = Vec::new();
    for (name, record) in [
        ("sandbox", "sandbox.json"),
        ("container", "containers/c/0/state.json"),
    ] {
        let pod = machine.ready(name).await;
        let script = "umask 077; mkdir /disk/own && echo kept > /disk/own/file";
        assert_eq!(machine.exec(&pod, &["sh", "-c", script]).await.0, 0);
        records.push(directory(&machine, &pod).join(record));
    }
    machine.stop_node().await;
    for record in &records {
        empty(record);
    }
    machine.start_node().await;
    for (name, record) in ["sandbox", "container"].iter().zip(&records) {
        let pod = machine
            .pod_with(name, "running again", |pod| {
                is_ready(pod) && container_of(pod).is_some_and(|status| status.restart_count == 1)
            })
            .await;
        let script = "cat /disk/own/file && echo more >> /disk/own/file";
        let (code, out, err) = machine.exec(&pod, &["sh", "-c", script]).await;
        assert_eq!((code, out.as_str()), (0, "kept\n"), "{name}: {err}");
        let mut aside = record.clone().into_os_string();
        aside.push(".unreadable");
        assert!(Path::new(&aside).exists(), "{name}");
    }
    machine.finish().await;
}

//! Shared PID namespaces: containers of a pod with `shareProcessNamespace`, and ephemeral containers with a target.

#![expect(
    clippy::unwrap_used,
    reason = "a test that cannot go on says so by panicking"
)]

mod support;

use k8s_openapi::api::core::v1::{ContainerStatus, Pod};
use kube::ResourceExt;
use kube::api::{Patch, PatchParams};
use serde_json::{Value, json};
use support::Machine;
use testkit::eventually;

fn shell(name: &str, script: &str) -> Value {
    json!({"name": name, "image": "host", "command": ["sh", "-c", script]})
}

/// Every process that a container sees, as `<pid> <command line>`.
const LIST: &str = "for p in /proc/[0-9]*; do echo ${p#/proc/} $(tr '\\0' ' ' < $p/cmdline); done";

async fn run(machine: &Machine, pod: &Pod, container: &str, script: &str) -> String {
    let (code, out, err) = machine.exec_in(pod, container, &["sh", "-c", script]).await;
    assert_eq!(code, 0, "{script}: {err}");
    out
}

async fn add(machine: &Machine, pod: &str, container: Value) -> Pod {
    let patch = json!({"spec": {"ephemeralContainers": [container]}});
    machine
        .pods()
        .patch_ephemeral_containers(pod, &PatchParams::default(), &Patch::Strategic(patch))
        .await
        .unwrap()
}

fn ephemeral(pod: &Pod, name: &str) -> Option<ContainerStatus> {
    let statuses = pod.status.as_ref()?.ephemeral_container_statuses.as_ref()?;
    statuses.iter().find(|status| status.name == name).cloned()
}

#[tokio::test(flavor = "multi_thread")]
async fn containers_with_a_shared_pid_namespace_see_each_other_and_end_separately() {
    let mut machine = Machine::start().await;
    let second = "sleep 987654 & if [ -e /tmp/again ]; then sleep 1000; fi; wait";
    machine
        .create(
            "p",
            json!({"shareProcessNamespace": true, "terminationGracePeriodSeconds": 1,
                "containers": [shell("c", "exec sleep 123456"), shell("second", second)]}),
        )
        .await;
    let pod = machine.ready("p").await;
    let seen = run(&machine, &pod, "c", LIST).await;
    assert!(seen.contains("sleep 123456"), "{seen}");
    assert!(seen.contains("sleep 987654"), "{seen}");
    assert!(
        seen.lines().any(|line| line.starts_with("1 sandbox-init")),
        "PID 1 belongs to no container: {seen}"
    );
    let of_second = run(&machine, &pod, "second", "readlink /proc/self/ns/pid").await;
    assert_eq!(
        run(&machine, &pod, "c", "readlink /proc/self/ns/pid").await,
        of_second
    );
    // PID 1 has neither files nor privileges that a container could use.
    for forbidden in ["ls /proc/1/root/", "kill -9 1 && test ! -e /proc/1"] {
        let (code, ..) = machine.exec_in(&pod, "c", &["sh", "-c", forbidden]).await;
        assert_ne!(code, 0, "{forbidden}");
    }

    // A container that ends takes its own processes with it, and no others.
    let kill = "kill -9 $(grep -al '^sh.-c.sleep 987654' /proc/[0-9]*/cmdline | cut -d/ -f3)";
    run(&machine, &pod, "c", kill).await;
    let restarted = |pod: &Pod| {
        let statuses = pod.status.as_ref().unwrap().container_statuses.clone();
        let count = |name: &str| {
            let mut all = statuses.iter().flatten();
            all.find(|status| status.name == name)
                .map(|status| (status.restart_count, status.ready))
        };
        (count("c"), count("second")) == (Some((0, true)), Some((1, true)))
    };
    let pod = machine
        .pod_with("p", "with the second container started again", restarted)
        .await;
    // The shell and what it starts.
    let seen = eventually("the second container to have begun", || async {
        let seen = run(&machine, &pod, "c", LIST).await;
        (seen.matches("sleep 987654").count() >= 2).then_some(seen)
    })
    .await;
    assert_eq!(
        seen.matches("sleep 987654").count(),
        2,
        "what the first run had started is gone: {seen}"
    );

    machine.stop_node().await;
    machine.start_node().await;
    let pod = machine.ready("p").await;
    assert!(
        restarted(&pod),
        "a restart of the node does not restart containers"
    );
    machine.delete("p").await;
    machine.finish().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn an_ephemeral_container_joins_a_running_pod_and_looks_into_its_target() {
    let machine = Machine::start().await;
    machine
        .create(
            "p",
            json!({"containers": [shell("c", "exec sleep 123456")]}),
        )
        .await;
    machine.ready("p").await;
    let mut debug = shell("debug", "sleep 1000 & echo looking; wait");
    debug["targetContainerName"] = json!("c");
    add(&machine, "p", debug).await;
    let pod = machine
        .pod_with("p", "with a running ephemeral container", |pod| {
            ephemeral(pod, "debug")
                .is_some_and(|status| status.state.is_some_and(|state| state.running.is_some()))
        })
        .await;
    let status = ephemeral(&pod, "debug").unwrap();
    assert!(!status.ready && status.restart_count == 0);
    let seen = run(&machine, &pod, "debug", LIST).await;
    assert!(seen.contains("sleep 123456"), "{seen}");
    let address = "hostname -i 2>/dev/null || cat /etc/hosts";
    assert_eq!(
        run(&machine, &pod, "debug", address).await,
        run(&machine, &pod, "c", address).await,
        "both have the pod's network and names"
    );
    // Without a target it has its own PID namespace.
    add(&machine, "p", shell("alone", "exit 3")).await;
    let ended = |pod: &Pod| {
        let state = ephemeral(pod, "alone")?.state?.terminated?;
        Some((state.exit_code, state.reason?))
    };
    let pod = machine
        .pod_with("p", "with an ended ephemeral container", |pod| {
            ended(pod).is_some()
        })
        .await;
    assert_eq!(ended(&pod), Some((3, "Error".to_owned())));
    assert_eq!(
        pod.status.as_ref().unwrap().phase.as_deref(),
        Some("Running")
    );
    assert!(support::is_ready(&pod), "the pod's own state is its own");
    machine.delete("p").await;
    machine.finish().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn an_ephemeral_container_shows_why_a_pod_does_not_start() {
    let machine = Machine::start().await;
    machine
        .create(
            "p",
            json!({"initContainers": [shell("first", "until test -e /tmp/never; do sleep 0.1; done")],
                "containers": [shell("c", "true")], "terminationGracePeriodSeconds": 1}),
        )
        .await;
    machine
        .pod_with("p", "initialising", |pod| {
            let statuses = pod
                .status
                .as_ref()
                .and_then(|status| status.init_container_statuses.as_ref());
            statuses.is_some_and(|statuses| {
                statuses[0]
                    .state
                    .as_ref()
                    .is_some_and(|state| state.running.is_some())
            })
        })
        .await;
    add(&machine, "p", shell("debug", "exec sleep 1000")).await;
    let pod = machine
        .pod_with("p", "with a running ephemeral container", |pod| {
            ephemeral(pod, "debug")
                .is_some_and(|status| status.state.is_some_and(|state| state.running.is_some()))
        })
        .await;
    assert_eq!(run(&machine, &pod, "debug", "echo here").await, "here\n");
    let events: kube::Api<k8s_openapi::api::core::v1::Event> =
        kube::Api::namespaced(machine.client.clone(), "t");
    eventually("an event about the ephemeral container", || async {
        let all = events
            .list(&kube::api::ListParams::default())
            .await
            .unwrap();
        let mut all = all.items.into_iter();
        all.find(|event| {
            event.involved_object.field_path.as_deref() == Some("spec.ephemeralContainers{debug}")
        })
    })
    .await;
    assert_eq!(pod.name_any(), "p");
    machine.delete("p").await;
    machine.finish().await;
}

//! After pods have come and gone in every state, with the node stopped in between, the machine is as it was.

#![expect(
    clippy::unwrap_used,
    reason = "a test that cannot go on says so by panicking"
)]

mod support;

use std::collections::BTreeSet;

use kube::ResourceExt;
use kube::api::{DeleteParams, ListParams};
use serde_json::json;
use support::Machine;

/// What the machine has of the things a node makes.
#[derive(Debug, PartialEq, Eq)]
struct Inventory {
    links: BTreeSet<String>,
    mounts: usize,
    groups: BTreeSet<String>,
    agents: BTreeSet<String>,
}

fn inventory() -> Inventory {
    let names = |path: &str| -> BTreeSet<String> {
        let entries = std::fs::read_dir(path).into_iter().flatten().flatten();
        entries
            .filter_map(|entry| entry.file_name().into_string().ok())
            .collect()
    };
    let mut groups = BTreeSet::new();
    for hierarchy in names("/sys/fs/cgroup") {
        let found = names(&format!("/sys/fs/cgroup/{hierarchy}"));
        groups.extend(
            found
                .into_iter()
                .filter(|name| name.starts_with("agent-sandbox-")),
        );
    }
    let agents = names("/proc").into_iter().filter(|pid| {
        std::fs::read(format!("/proc/{pid}/cmdline"))
            .is_ok_and(|line| line.starts_with(b"sandbox-init"))
    });
    Inventory {
        links: names("/sys/class/net"),
        mounts: std::fs::read_to_string("/proc/self/mountinfo")
            .unwrap()
            .lines()
            .count(),
        groups,
        agents: agents.collect(),
    }
}

fn descriptors() -> usize {
    std::fs::read_dir("/proc/self/fd").unwrap().count()
}

#[tokio::test(flavor = "multi_thread")]
async fn pods_in_every_state_leave_nothing_behind() {
    const ROUNDS: usize = 4;
    const PODS: usize = 12;
    let before = inventory();
    let mut machine = Machine::start().await;
    let mut open = Vec::new();
    for round in 0..ROUNDS {
        for number in 0..PODS {
            let script = [
                "sleep 1000",
                "exit 1",
                "exit 0",
                "trap '' TERM; while :; do sleep 0.05; done",
            ][number % 4];
            let spec = json!({"terminationGracePeriodSeconds": 1,
                "restartPolicy": if number % 3 == 0 { "Never" } else { "Always" },
                "volumes": [{"name": "m", "emptyDir": {"medium": "Memory"}}],
                "containers": [{"name": "c", "image": "host", "command": ["sh", "-c", script],
                    "volumeMounts": [{"name": "m", "mountPath": "/m"}]}]});
            machine.create(&format!("p-{round}-{number}"), spec).await;
        }
        if round % 2 == 0 {
            // Stopped while pods are starting, running and ending.
            machine.stop_node().await;
            machine.start_node().await;
        } else {
            machine.ready(&format!("p-{round}-0")).await;
        }
        for pod in machine.pods().list(&ListParams::default()).await.unwrap() {
            machine
                .pods()
                .delete(&pod.name_any(), &DeleteParams::default())
                .await
                .unwrap();
        }
        for number in 0..PODS {
            machine.gone(&format!("p-{round}-{number}")).await;
        }
        let pods = machine.config.data_dir.join("pods");
        support::eventually("the pods to be gone from the machine", || async {
            support::entries(&pods).is_empty().then_some(())
        })
        .await;
        open.push(descriptors());
    }
    let grown = open.last().unwrap().saturating_sub(open[1]);
    assert!(grown <= 8, "descriptors grow with every round: {open:?}");
    machine.finish().await;
    assert_eq!(inventory(), before);
}

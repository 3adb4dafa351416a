//! `bench node --density`: the cost of many idle pods on one machine, and the start of the last pods compared with the first.

use std::time::{Duration, Instant};

use container_runtime::ContainerId;
use container_runtime::native::NativeRuntime;
use futures::StreamExt;
use k8s_openapi::api::core::v1::Pod;
use kube::api::DeleteParams;
use kube::{Api, Client, ResourceExt};

use super::NAMESPACE;
use super::pods::{Distribution, remove_pod, start_pod};
use crate::process;

/// The number of first and of last pods that are compared.
const SAMPLE: usize = 20;
/// The time over which idle CPU time is measured.
const IDLE: Duration = Duration::from_secs(10);

/// All figures.
#[derive(Debug, Clone)]
pub struct Density {
    pub pods: usize,
    pub seconds_to_start_all: f64,
    /// Creation to Ready of the first pods, one at a time on an empty node.
    pub first: Distribution,
    /// Creation to Ready of the last pods, one at a time on a full node.
    pub last: Distribution,
    pub last_against_first: f64,
    /// The decrease of the machine's available memory, for each pod.
    pub memory_per_pod_bytes: u64,
    /// The memory of its cgroup, for each pod: agent, sandboxd and their files.
    pub counted_per_pod_bytes: u64,
    /// The growth of the node's process, for each pod.
    pub node_per_pod_bytes: u64,
    /// The CPU time of the machine, in per cent of one CPU, with idle pods and without pods.
    pub idle_cpu_percent: f64,
    pub empty_cpu_percent: f64,
}

/// Starts `count` pods, measures, and removes them.
pub async fn run(client: Client, runtime: &NativeRuntime, count: usize) -> anyhow::Result<Density> {
    let pods = Api::<Pod>::namespaced(client, NAMESPACE);
    let name = |number: usize| format!("density-{number}");
    // The first pod of a node creates what all pods share.
    start_pod(&pods, "density-warm-up").await?;
    remove_pod(&pods, "density-warm-up").await?;
    let empty = cpu_percent().await;
    let (free, own) = (available_memory(), process::resident(std::process::id())?);
    let began = Instant::now();
    let (mut first, mut last, mut started) = (Vec::new(), Vec::new(), Vec::new());
    let edge = SAMPLE.min(count / 2);
    for number in 0..edge {
        let pod = start_pod(&pods, &name(number)).await?;
        first.push(pod.ready_after);
        started.push(pod.pod);
    }
    let middle: Vec<anyhow::Result<_>> = futures::stream::iter(edge..count - edge)
        .map(|number| {
            let (pods, name) = (pods.clone(), name(number));
            async move { start_pod(&pods, &name).await }
        })
        .buffer_unordered(8)
        .collect()
        .await;
    for pod in middle {
        started.push(pod?.pod);
    }
    for number in count - edge..count {
        let pod = start_pod(&pods, &name(number)).await?;
        last.push(pod.ready_after);
        started.push(pod.pod);
    }
    let seconds_to_start_all = began.elapsed().as_secs_f64();
    let idle = cpu_percent().await;
    let per_pod = |bytes: u64| bytes / u64::try_from(count.max(1)).unwrap_or(1);
    let counted = started.iter().filter_map(|pod| {
        runtime.memory_bytes(&ContainerId {
            pod: pod.uid()?,
            container: "c".to_owned(),
            attempt: 0,
        })
    });
    let (first, last) = (Distribution::of(first), Distribution::of(last));
    let report = Density {
        pods: started.len(),
        seconds_to_start_all,
        first,
        last,
        last_against_first: last.p50_ms / first.p50_ms,
        memory_per_pod_bytes: per_pod(free.saturating_sub(available_memory())),
        counted_per_pod_bytes: per_pod(counted.sum()),
        node_per_pod_bytes: per_pod(process::resident(std::process::id())?.saturating_sub(own)),
        idle_cpu_percent: idle,
        empty_cpu_percent: empty,
    };
    for pod in &started {
        pods.delete(&pod.name_any(), &DeleteParams::default())
            .await?;
    }
    for pod in &started {
        while pods.get_opt(&pod.name_any()).await?.is_some() {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    }
    Ok(report)
}

/// The available memory of the machine, in bytes.
fn available_memory() -> u64 {
    let text = std::fs::read_to_string("/proc/meminfo").unwrap_or_default();
    let line = text
        .lines()
        .find_map(|line| line.strip_prefix("MemAvailable:"));
    let kibibytes = line.and_then(|rest| rest.split_whitespace().next()?.parse::<u64>().ok());
    kibibytes.unwrap_or(0) << 10
}

/// The CPU time of the whole machine, in per cent of one CPU.
async fn cpu_percent() -> f64 {
    let before = busy_ticks();
    let began = Instant::now();
    tokio::time::sleep(IDLE).await;
    #[expect(clippy::cast_precision_loss, reason = "ticks of a few seconds")]
    let ticks = busy_ticks().saturating_sub(before) as f64;
    // `/proc/stat` counts hundredths of a second (`USER_HZ`).
    ticks / began.elapsed().as_secs_f64()
}

fn busy_ticks() -> u64 {
    let text = std::fs::read_to_string("/proc/stat").unwrap_or_default();
    let mut columns = text
        .lines()
        .next()
        .unwrap_or_default()
        .split_whitespace()
        .skip(1)
        .map(|word| word.parse::<u64>().unwrap_or(0));
    let mut busy = 0;
    for index in 0..8 {
        let value = columns.next().unwrap_or(0);
        // Idle, and waiting for I/O.
        if index != 3 && index != 4 {
            busy += value;
        }
    }
    busy
}

//! Many idle pods on one machine: what each costs, and whether the last is as quick as the first.

use std::time::{Duration, Instant};

use futures::StreamExt;
use k8s_openapi::api::core::v1::Pod;
use kube::api::DeleteParams;
use kube::{Api, Client, ResourceExt};
use serde::Serialize;

use super::{BenchError, Distribution, remove_pod, start_pod};
use crate::runtime::ContainerId;
use crate::runtime::native::NativeRuntime;

/// How many at each end are compared.
const SAMPLE: usize = 20;
/// Over which time idle pods are watched.
const IDLE: Duration = Duration::from_secs(10);

#[derive(Debug, Clone, Serialize)]
pub struct Density {
    pub pods: usize,
    pub seconds_to_start_all: f64,
    /// Creation to Ready of the first pods, one at a time on an empty node.
    pub first: Distribution,
    /// The same of the last ones, on a full node.
    pub last: Distribution,
    pub last_against_first: f64,
    /// What the machine has less of, for each pod.
    pub memory_per_pod_bytes: u64,
    /// What the control groups count, for each pod: its agent, sandboxd and their files.
    pub counted_per_pod_bytes: u64,
    /// What the node's own process has grown by, for each pod.
    pub node_per_pod_bytes: u64,
    /// Of one processor, of the whole machine, while all pods are idle; and before there were any.
    pub idle_processor_percent: f64,
    pub empty_processor_percent: f64,
}

/// Starts `count` pods, looks at them, and removes them.
pub async fn run(
    client: Client,
    runtime: &NativeRuntime,
    namespace: &str,
    count: usize,
) -> Result<Density, BenchError> {
    let pods = Api::<Pod>::namespaced(client, namespace);
    let name = |number: usize| format!("density-{number}");
    // The first pod of a node pays for what is made once.
    start_pod(&pods, "density-warm-up").await?;
    remove_pod(&pods, "density-warm-up").await?;
    let empty = processor_percent().await;
    let (free, own) = (available_memory(), own_memory());
    let began = Instant::now();
    let (mut first, mut last, mut started) = (Vec::new(), Vec::new(), Vec::new());
    let edge = SAMPLE.min(count / 2);
    for number in 0..edge {
        let (_, ready, pod) = start_pod(&pods, &name(number)).await?;
        first.push(ready);
        started.push(pod);
    }
    let middle: Vec<Result<_, BenchError>> = futures::stream::iter(edge..count - edge)
        .map(|number| {
            let (pods, name) = (pods.clone(), name(number));
            async move { start_pod(&pods, &name).await }
        })
        .buffer_unordered(8)
        .collect()
        .await;
    for pod in middle {
        started.push(pod?.2);
    }
    for number in count - edge..count {
        let (_, ready, pod) = start_pod(&pods, &name(number)).await?;
        last.push(ready);
        started.push(pod);
    }
    let seconds_to_start_all = began.elapsed().as_secs_f64();
    let idle = processor_percent().await;
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
        node_per_pod_bytes: per_pod(own_memory().saturating_sub(own)),
        idle_processor_percent: idle,
        empty_processor_percent: empty,
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

fn kilobytes(file: &str, key: &str) -> u64 {
    let text = std::fs::read_to_string(file).unwrap_or_default();
    let line = text.lines().find_map(|line| line.strip_prefix(key));
    let number = line.and_then(|rest| rest.split_whitespace().next()?.parse::<u64>().ok());
    number.unwrap_or(0) * 1024
}

fn available_memory() -> u64 {
    kilobytes("/proc/meminfo", "MemAvailable:")
}

fn own_memory() -> u64 {
    kilobytes("/proc/self/status", "VmRSS:")
}

/// What the whole machine uses of one processor, in percent.
async fn processor_percent() -> f64 {
    let before = busy_ticks();
    let began = Instant::now();
    tokio::time::sleep(IDLE).await;
    #[expect(clippy::cast_precision_loss, reason = "ticks of a few seconds")]
    let ticks = busy_ticks().saturating_sub(before) as f64;
    // The kernel shows hundredths of a second to programs, whatever it counts in.
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
        // Idle, and waiting for a disk.
        if index != 3 && index != 4 {
            busy += value;
        }
    }
    busy
}

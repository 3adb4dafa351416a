//! `bench node`: pods one at a time and in parallel, execs, containers, and other container runtimes in the same run, so that the ratios
//! can be compared where the absolute figures depend on the machine.

use std::time::{Duration, Instant};

use anyhow::Context;
use container_runtime::agent::Output;
use container_runtime::cgroups::Limits;
use container_runtime::native::NativeRuntime;
use container_runtime::{
    ContainerId, ContainerSpec, ImageSource, PodIdentity, PodSandboxSpec, Runtime,
};
use futures::StreamExt;
use k8s_openapi::api::core::v1::Pod;
use kube::{Api, Client, ResourceExt};

use super::NAMESPACE;
use super::peers::{self, Peer};
use super::pods::{Distribution, remove_pod, start_pod};

/// Execs of `true`.
const EXECS: usize = 200;
/// Pods that start at the same time in the parallel measurement.
const PARALLEL: usize = 8;

/// All figures.
#[derive(Debug, Clone)]
pub struct Report {
    /// From the creation of a pod until its status is Running.
    pub pod_running: Distribution,
    /// From the creation of a pod until it is Ready.
    pub pod_ready: Distribution,
    pub exec: Distribution,
    /// A container of `true`, from the request to the runtime until it has ended.
    pub start_to_exit: Distribution,
    pub pods_per_second_8_parallel: f64,
    /// The memory of the cgroup of an idle pod, with its agent and sandboxd.
    pub idle_pod_bytes: Option<u64>,
    pub peers: Vec<Peer>,
}

/// Measures with `count` pods.
pub async fn run(client: Client, runtime: &NativeRuntime, count: usize) -> anyhow::Result<Report> {
    let pods = Api::<Pod>::namespaced(client, NAMESPACE);
    let (mut running, mut ready) = (Vec::new(), Vec::new());
    for number in 0..count {
        let name = format!("bench-{number}");
        let started = start_pod(&pods, &name).await?;
        running.push(started.running_after);
        ready.push(started.ready_after);
        remove_pod(&pods, &name).await?;
    }
    let pod = start_pod(&pods, "bench-exec").await?.pod;
    let id = ContainerId {
        pod: pod.uid().context("a pod has no UID")?,
        container: "c".to_owned(),
        attempt: 0,
    };
    let idle_pod_bytes = runtime.memory_bytes(&id);
    let exec = exec_latency(runtime, &id, EXECS).await?;
    remove_pod(&pods, "bench-exec").await?;
    let began = Instant::now();
    let batch: Vec<anyhow::Result<_>> = futures::stream::iter(0..count)
        .map(|number| {
            let pods = pods.clone();
            async move { start_pod(&pods, &format!("bench-parallel-{number}")).await }
        })
        .buffer_unordered(PARALLEL)
        .collect()
        .await;
    let elapsed = began.elapsed();
    for number in 0..count {
        remove_pod(&pods, &format!("bench-parallel-{number}")).await?;
    }
    let started = batch.into_iter().collect::<Result<Vec<_>, _>>()?.len();
    let start_to_exit = Distribution::of(start_and_end(runtime, count).await?);
    #[expect(clippy::cast_precision_loss, reason = "a few pods")]
    let pods_per_second_8_parallel = started as f64 / elapsed.as_secs_f64();
    Ok(Report {
        pod_running: Distribution::of(running),
        pod_ready: Distribution::of(ready),
        exec,
        start_to_exit,
        pods_per_second_8_parallel,
        idle_pod_bytes,
        peers: peers::measure(count, start_to_exit.p50_ms),
    })
}

async fn exec_latency(
    runtime: &NativeRuntime,
    id: &ContainerId,
    count: usize,
) -> anyhow::Result<Distribution> {
    let mut sample = Vec::new();
    for _ in 0..count {
        let began = Instant::now();
        let request = shim_protocol::ExecRequest {
            arguments: vec!["/usr/bin/true".to_owned()],
            environment: Vec::new(),
            terminal: false,
            stdin: false,
            window: None,
        };
        let mut session = runtime.exec(id, request).await?;
        while !matches!(session.output.next().await?, Output::Exit(_)) {}
        sample.push(began.elapsed());
    }
    Ok(Distribution::of(sample))
}

/// Runs containers of `true` in one pod, one after the other: the time from the request until each has ended.
async fn start_and_end(runtime: &NativeRuntime, count: usize) -> anyhow::Result<Vec<Duration>> {
    let uid = "bench-runtime".to_owned();
    let spec = PodSandboxSpec {
        identity: PodIdentity {
            uid: uid.clone(),
            namespace: "bench".to_owned(),
            name: "bench".to_owned(),
        },
        hostname: "bench".to_owned(),
        host_aliases: Vec::new(),
        fully_qualified_name: None,
        resolver: String::new(),
        shared_processes: false,
        containers: 1,
        driver: None,
    };
    runtime.create_sandbox(&spec).await?;
    let mut sample = Vec::new();
    for number in 0..count {
        let id = ContainerId {
            pod: uid.clone(),
            container: "c".to_owned(),
            attempt: u32::try_from(number).unwrap_or(0),
        };
        let began = Instant::now();
        runtime.start(command(&id, "/usr/bin/true")).await?;
        runtime.wait(&id).await;
        sample.push(began.elapsed());
    }
    runtime.remove_sandbox(&uid).await?;
    Ok(sample)
}

fn command(id: &ContainerId, path: &str) -> ContainerSpec {
    ContainerSpec {
        limits: Limits {
            processes: Some(64),
            ..Limits::default()
        },
        ..ContainerSpec::plain(id.clone(), ImageSource::Host, vec![path.to_owned()])
    }
}

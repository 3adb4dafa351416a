//! Measurements of the node on the machine it runs on, beside other ways to start a confined process.
//!
//! Every figure comes from one run, so that the ratios mean something where the absolute numbers do not.

pub mod density;
pub mod neighbour;

use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use futures::StreamExt;
use k8s_openapi::api::core::v1::Pod;
use kube::api::{DeleteParams, PostParams, WatchEvent, WatchParams};
use kube::{Api, Client, ResourceExt};
use serde::Serialize;
use serde_json::json;

use crate::runtime::agent::{AgentError, Output};
use crate::runtime::control_groups::Limits;
use crate::runtime::native::NativeRuntime;
use crate::runtime::{
    ContainerId, ContainerSpec, ImageSource, PodIdentity, PodSandboxSpec, Runtime, RuntimeError,
    StartError,
};

#[derive(Debug, thiserror::Error)]
pub enum BenchError {
    #[error("the Kubernetes API")]
    Api(#[from] kube::Error),
    #[error("the container runtime")]
    Runtime(#[from] RuntimeError),
    #[error("starting a container")]
    Start(#[from] StartError),
    #[error("running a command in a container")]
    Exec(#[from] AgentError),
    #[error("pod {0} did not become ready")]
    NotReady(String),
    #[error("a pod has no UID")]
    NoUid,
    #[error("{failed} of {of} requests to a pod beside {beside} failed")]
    Neighbour {
        beside: &'static str,
        failed: usize,
        of: usize,
        source: std::io::Error,
    },
}

/// A sample of durations, in milliseconds.
#[derive(Debug, Clone, Copy, Serialize)]
pub struct Distribution {
    pub count: usize,
    pub p50_ms: f64,
    pub p99_ms: f64,
    pub maximum_ms: f64,
}

impl Distribution {
    fn of(mut sample: Vec<Duration>) -> Self {
        sample.sort();
        let at = |numerator: usize| {
            let index = (sample.len().saturating_sub(1)) * numerator / 100;
            sample
                .get(index)
                .map_or(0.0, |duration| duration.as_secs_f64() * 1000.0)
        };
        Self {
            count: sample.len(),
            p50_ms: at(50),
            p99_ms: at(99),
            maximum_ms: at(100),
        }
    }
}

/// Another way to start a confined process.
#[derive(Debug, Clone, Serialize)]
pub struct Peer {
    pub name: &'static str,
    pub start_to_exit: Distribution,
    /// How many times our median its median is.
    pub ratio: f64,
}

#[derive(Debug, Clone, Serialize)]
pub struct Report {
    /// From the request that creates a pod to its status saying Running.
    pub pod_running: Distribution,
    /// From the request that creates a pod to its Ready condition.
    pub pod_ready: Distribution,
    pub exec: Distribution,
    /// A container of `true`, from the request to the runtime to its end.
    pub start_to_exit: Distribution,
    pub pods_per_second_8_parallel: f64,
    /// Memory the control group of an idle pod counts, its agent and sandboxd included.
    pub idle_pod_bytes: Option<u64>,
    pub peers: Vec<Peer>,
}

/// How much to measure.
#[derive(Debug, Clone)]
pub struct Options {
    pub namespace: String,
    pub pods: usize,
    pub execs: usize,
}

impl Default for Options {
    fn default() -> Self {
        Self {
            namespace: "default".to_owned(),
            pods: 30,
            execs: 200,
        }
    }
}

/// Measures a running node.
pub async fn run(
    client: Client,
    runtime: &NativeRuntime,
    options: &Options,
) -> Result<Report, BenchError> {
    let pods = Api::<Pod>::namespaced(client, &options.namespace);
    let (mut running, mut ready) = (Vec::new(), Vec::new());
    for number in 0..options.pods {
        let name = format!("bench-{number}");
        let (to_running, to_ready, _) = start_pod(&pods, &name).await?;
        running.push(to_running);
        ready.push(to_ready);
        remove_pod(&pods, &name).await?;
    }
    let (_, _, pod) = start_pod(&pods, "bench-exec").await?;
    let id = ContainerId {
        pod: pod.uid().ok_or(BenchError::NoUid)?,
        container: "c".to_owned(),
        attempt: 0,
    };
    let idle_pod_bytes = runtime.memory_bytes(&id);
    let exec = exec_latency(runtime, &id, options.execs).await?;
    remove_pod(&pods, "bench-exec").await?;
    let began = Instant::now();
    let batch: Vec<Result<_, BenchError>> = futures::stream::iter(0..options.pods)
        .map(|number| {
            let pods = pods.clone();
            async move { start_pod(&pods, &format!("bench-parallel-{number}")).await }
        })
        .buffer_unordered(8)
        .collect()
        .await;
    let elapsed = began.elapsed();
    for number in 0..options.pods {
        remove_pod(&pods, &format!("bench-parallel-{number}")).await?;
    }
    let started = batch.into_iter().collect::<Result<Vec<_>, _>>()?.len();
    let start_to_exit = Distribution::of(start_and_end(runtime, options.pods).await?);
    #[expect(clippy::cast_precision_loss, reason = "a few pods")]
    let pods_per_second_8_parallel = started as f64 / elapsed.as_secs_f64();
    Ok(Report {
        pod_running: Distribution::of(running),
        pod_ready: Distribution::of(ready),
        exec,
        start_to_exit,
        pods_per_second_8_parallel,
        idle_pod_bytes,
        peers: peers(options.pods, start_to_exit.p50_ms),
    })
}

/// Creates a pod and waits for it: the times to Running and to Ready.
async fn start_pod(pods: &Api<Pod>, name: &str) -> Result<(Duration, Duration, Pod), BenchError> {
    let object = json!({"metadata": {"name": name}, "spec": {"terminationGracePeriodSeconds": 1, "containers": [{"name": "c",
        "image": "host", "readinessProbe": {"httpGet": {"path": "/", "port": 8888}, "periodSeconds": 1}}]}});
    let object: Pod = serde_json::from_value(object).map_err(kube::Error::SerdeError)?;
    let began = Instant::now();
    let created = pods.create(&PostParams::default(), &object).await?;
    let parameters = WatchParams::default()
        .fields(&format!("metadata.name={name}"))
        .timeout(30);
    let version = created.resource_version().unwrap_or_default();
    let mut events = std::pin::pin!(pods.watch(&parameters, &version).await?);
    let mut running = None;
    while let Some(event) = events.next().await {
        let WatchEvent::Modified(pod) = event? else {
            continue;
        };
        let status = pod.status.clone().unwrap_or_default();
        if status.phase.as_deref() == Some("Running") {
            running.get_or_insert_with(|| began.elapsed());
        }
        let conditions = status.conditions.iter().flatten();
        if conditions
            .into_iter()
            .any(|condition| condition.type_ == "Ready" && condition.status == "True")
        {
            let ready = began.elapsed();
            return Ok((running.unwrap_or(ready), ready, pod));
        }
    }
    Err(BenchError::NotReady(name.to_owned()))
}

async fn remove_pod(pods: &Api<Pod>, name: &str) -> Result<(), BenchError> {
    pods.delete(name, &DeleteParams::default()).await?;
    while pods.get_opt(name).await?.is_some() {
        tokio::time::sleep(Duration::from_millis(2)).await;
    }
    Ok(())
}

async fn exec_latency(
    runtime: &NativeRuntime,
    id: &ContainerId,
    count: usize,
) -> Result<Distribution, BenchError> {
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

/// Containers of `true` in one pod, from the request to the end.
async fn start_and_end(runtime: &NativeRuntime, count: usize) -> Result<Vec<Duration>, BenchError> {
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

/// The peers that are installed here.
fn peers(count: usize, own_ms: f64) -> Vec<Peer> {
    let mut found = Vec::new();
    let mut add = |name: &'static str, sample: Option<Vec<Duration>>| {
        if let Some(sample) = sample {
            let start_to_exit = Distribution::of(sample);
            found.push(Peer {
                name,
                start_to_exit,
                ratio: start_to_exit.p50_ms / own_ms,
            });
        }
    };
    add(
        "fork and exec",
        time(count, || Command::new("/usr/bin/true")),
    );
    add(
        "bubblewrap",
        time(count, || {
            let mut command = Command::new("bwrap");
            command.args([
                "--ro-bind",
                "/usr",
                "/usr",
                "--symlink",
                "usr/lib",
                "/lib",
                "--symlink",
                "usr/lib64",
                "/lib64",
            ]);
            command.args([
                "--proc",
                "/proc",
                "--dev",
                "/dev",
                "--unshare-all",
                "/usr/bin/true",
            ]);
            command
        }),
    );
    add("runc", runc(count));
    found
}

fn time(count: usize, command: impl Fn() -> Command) -> Option<Vec<Duration>> {
    (0..count)
        .map(|_| {
            let began = Instant::now();
            let mut command = command();
            command
                .stdin(Stdio::null())
                .stdout(Stdio::null())
                .stderr(Stdio::null());
            command
                .status()
                .ok()
                .filter(std::process::ExitStatus::success)
                .map(|_| began.elapsed())
        })
        .collect()
}

/// runc with a bundle of the machine's own programs, read-only.
fn runc(count: usize) -> Option<Vec<Duration>> {
    let bundle = std::env::temp_dir().join(format!("agent-sandbox-bench-{}", std::process::id()));
    std::fs::create_dir_all(&bundle).ok()?;
    let sample = runc_in(&bundle, count);
    let _ = std::fs::remove_dir_all(&bundle);
    sample
}

fn runc_in(bundle: &Path, count: usize) -> Option<Vec<Duration>> {
    Command::new("runc")
        .arg("spec")
        .current_dir(bundle)
        .status()
        .ok()
        .filter(std::process::ExitStatus::success)?;
    let path = bundle.join("config.json");
    let mut config: serde_json::Value = serde_json::from_slice(&std::fs::read(&path).ok()?).ok()?;
    config["process"]["terminal"] = json!(false);
    config["process"]["args"] = json!(["/usr/bin/true"]);
    // As ours, the container has this machine's programs and nothing else of it.
    std::fs::create_dir(bundle.join("rootfs")).ok()?;
    let mounts = config["mounts"].as_array_mut()?;
    // Where both versions of control groups are mounted, runc fails over its own mount of them.
    mounts.retain(|mount| mount["type"] != "cgroup");
    mounts.extend(["/usr", "/bin", "/lib", "/lib64"].map(
        |path| json!({"destination": path, "source": path, "type": "bind", "options": ["rbind", "ro"]}),
    ));
    std::fs::write(&path, config.to_string()).ok()?;
    time(count, || {
        let mut command = Command::new("runc");
        command
            .args(["run", "--bundle"])
            .arg(bundle)
            .arg(format!("bench-{}", std::process::id()));
        command
    })
}

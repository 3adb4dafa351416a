//! `bench api --wrk`: the Kubernetes API over HTTPS under the load of `wrk`: creates and gets. The same load can be put on another server
//! that a kubeconfig names, so that one run compares two servers.

use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context, ensure};
use k8s_openapi::api::authorization::v1::SubjectAccessReview;
use k8s_openapi::api::core::v1::{ConfigMap, Namespace, ServiceAccount};
use k8s_openapi::api::rbac::v1::{Role, RoleBinding};
use kube::api::{DeleteParams, PostParams};
use kube::config::{KubeConfigOptions, Kubeconfig};
use kube::{Api, Client, Config};
use serde::Deserialize;
use serde_json::json;
use tokio::process::Command;
use tokio_util::sync::CancellationToken;

use crate::process;
use crate::table::{Table, bytes};

/// Bytes of text in each object, as in the measurements in process.
const PAYLOAD_BYTES: usize = 2048;

const THREADS: usize = 2;

/// Samples of each figure.
const SAMPLES: usize = 3;

/// The object that is read.
const READ: &str = "read";

/// The loads, each with its number of connections.
const LOADS: [(Load, usize); 3] = [(Load::Create, 16), (Load::Create, 64), (Load::Get, 32)];

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Load {
    Create,
    Get,
}

/// What the script prints at the end of a run.
#[derive(Debug, Deserialize)]
struct Outcome {
    requests: f64,
    seconds: f64,
    p50_ms: f64,
    p99_ms: f64,
    failures: u64,
}

/// The figures of one server.
#[derive(Debug)]
struct Measured {
    /// In the order of [`LOADS`].
    figures: Vec<Figure>,
    /// Memory of its processes after the load, if they are known.
    resident: Option<u64>,
}

/// One load, in samples.
#[derive(Debug)]
struct Figure {
    lowest: f64,
    median: f64,
    highest: f64,
    p50_ms: f64,
    p99_ms: f64,
}

/// A server to measure.
struct Target {
    client: Client,
    url: String,
    /// Reads the memory of the server's processes.
    resident: Box<dyn Fn() -> Option<u64> + Send + Sync>,
}

/// Measures an embedded server and, if a kubeconfig is given, another one in the same run.
pub async fn run(
    directory: &Path,
    against: Option<&Path>,
    processes: Option<&Path>,
    duration: Duration,
) -> anyhow::Result<()> {
    eprintln!("the embedded server");
    let ours = embedded(directory, duration).await?;
    let theirs = match against {
        Some(kubeconfig) => {
            eprintln!("the server of {}", kubeconfig.display());
            let processes = processes.map(Path::to_owned);
            let resident = move || processes.as_deref().and_then(resident_of_control_plane);
            Some(measure(&target(kubeconfig, Box::new(resident)).await?, duration).await?)
        }
        None => None,
    };
    print!("{}", table(&ours, theirs.as_ref()).render());
    Ok(())
}

async fn target(
    kubeconfig: &Path,
    resident: Box<dyn Fn() -> Option<u64> + Send + Sync>,
) -> anyhow::Result<Target> {
    let read = Kubeconfig::read_from(kubeconfig)
        .with_context(|| format!("cannot read the kubeconfig {}", kubeconfig.display()))?;
    let config = Config::from_custom_kubeconfig(read, &KubeConfigOptions::default()).await?;
    let url = config.cluster_url.to_string();
    Ok(Target {
        client: Client::try_from(config)?,
        url: url.trim_end_matches('/').to_owned(),
        resident,
    })
}

/// An embedded server with a new data directory, in this process.
async fn embedded(directory: &Path, duration: Duration) -> anyhow::Result<Measured> {
    let server = apiserver::Server::open(apiserver::Config::new(directory.join("data"))).await?;
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await?;
    let kubeconfig = directory.join("kubeconfig");
    server.write_kubeconfig(&kubeconfig, &format!("https://{}", listener.local_addr()?))?;
    let server = Arc::new(server);
    let stop = CancellationToken::new();
    let serving = tokio::spawn({
        let (server, stop) = (server.clone(), stop.clone());
        async move { server.serve(listener, stop).await }
    });
    // The server needs most of the memory of this process.
    let resident = || process::resident(std::process::id()).ok();
    let measured = measure(&target(&kubeconfig, Box::new(resident)).await?, duration).await;
    stop.cancel();
    serving.await??;
    if let Some(server) = Arc::into_inner(server) {
        server.shutdown().await;
    }
    measured
}

/// The memory of a kube-apiserver and its etcd, whose process IDs are in files of a directory.
fn resident_of_control_plane(directory: &Path) -> Option<u64> {
    let resident = |part: &str| {
        let pid = std::fs::read_to_string(directory.join(format!("{part}.pid"))).ok()?;
        process::resident(pid.trim().parse().ok()?).ok()
    };
    Some(resident("kube-apiserver")? + resident("etcd")?)
}

/// Measures in a new namespace, as a service account with only the permissions of the load.
async fn measure(target: &Target, duration: Duration) -> anyhow::Result<Measured> {
    let namespaces: Api<Namespace> = Api::all(target.client.clone());
    let namespace = serde_json::from_value(json!({"metadata": {"generateName": "bench-wrk-"}}))?;
    let made = namespaces
        .create(&PostParams::default(), &namespace)
        .await?;
    let name = made.metadata.name.context("a namespace has a name")?;
    let measured = measure_in(target, &name, duration).await;
    namespaces.delete(&name, &DeleteParams::default()).await?;
    measured
}

async fn measure_in(
    target: &Target,
    namespace: &str,
    duration: Duration,
) -> anyhow::Result<Measured> {
    let token = token(&target.client, namespace).await?;
    let maps: Api<ConfigMap> = Api::namespaced(target.client.clone(), namespace);
    let object = json!({"metadata": {"name": READ}, "data": {"text": "x".repeat(PAYLOAD_BYTES)}});
    maps.create(&PostParams::default(), &serde_json::from_value(object)?)
        .await?;
    let mut figures = Vec::new();
    for (load, connections) in LOADS {
        eprintln!("  {} over {connections} connections", load.name());
        let mut outcomes = Vec::new();
        for sample in 0..SAMPLES {
            let script = script(load, &token, namespace, &format!("{connections}-{sample}"));
            let outcome = wrk(&target.url, &script, connections, duration).await?;
            ensure!(
                outcome.failures == 0,
                "{} of {} requests failed",
                outcome.failures,
                outcome.requests
            );
            outcomes.push(outcome);
        }
        figures.push(Figure::of(outcomes));
    }
    Ok(Measured {
        figures,
        resident: (target.resident)(),
    })
}

/// The token of a service account that may create and get config maps in a namespace.
async fn token(client: &Client, namespace: &str) -> anyhow::Result<String> {
    const ACCOUNT: &str = "bench";
    let accounts: Api<ServiceAccount> = Api::namespaced(client.clone(), namespace);
    let account = serde_json::from_value(json!({"metadata": {"name": ACCOUNT}}))?;
    accounts.create(&PostParams::default(), &account).await?;
    let role: Role = serde_json::from_value(json!({
        "metadata": {"name": ACCOUNT},
        "rules": [{"apiGroups": [""], "resources": ["configmaps"], "verbs": ["create", "get"]}],
    }))?;
    Api::namespaced(client.clone(), namespace)
        .create(&PostParams::default(), &role)
        .await?;
    let binding: RoleBinding = serde_json::from_value(json!({
        "metadata": {"name": ACCOUNT},
        "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "Role", "name": ACCOUNT},
        "subjects": [{"kind": "ServiceAccount", "name": ACCOUNT, "namespace": namespace}],
    }))?;
    Api::namespaced(client.clone(), namespace)
        .create(&PostParams::default(), &binding)
        .await?;
    let request = serde_json::from_value(json!({"spec": {"audiences": []}}))?;
    let granted = accounts
        .create_token_request(ACCOUNT, &PostParams::default(), &request)
        .await?;
    let token = granted.status.context("the server granted no token")?.token;
    may_create(client, namespace, ACCOUNT).await?;
    Ok(token)
}

/// Waits until the server grants the account's role: its caches may be stale for a short time.
async fn may_create(client: &Client, namespace: &str, account: &str) -> anyhow::Result<()> {
    const DEADLINE: Duration = Duration::from_secs(30);
    let review: SubjectAccessReview = serde_json::from_value(json!({"spec": {
        "user": format!("system:serviceaccount:{namespace}:{account}"),
        "resourceAttributes": {"namespace": namespace, "verb": "create", "resource": "configmaps"},
    }}))?;
    let reviews: Api<SubjectAccessReview> = Api::all(client.clone());
    let begin = Instant::now();
    loop {
        let reviewed = reviews.create(&PostParams::default(), &review).await?;
        if reviewed.status.is_some_and(|status| status.allowed) {
            return Ok(());
        }
        ensure!(
            begin.elapsed() < DEADLINE,
            "the server does not let a service account do what its role allows"
        );
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
}

/// A row for each load and each server, with the ratio if there are two servers.
fn table(ours: &Measured, theirs: Option<&Measured>) -> Table {
    let mut table = Table::new(&[
        "WHAT",
        "CONNECTIONS",
        "SERVER",
        "MEDIAN",
        "LOWEST",
        "HIGHEST",
        "P50",
        "P99",
        "OURS IS BETTER",
    ]);
    let servers = |theirs| [("embedded", Some(ours)), ("other", theirs)];
    for (index, (load, connections)) in LOADS.into_iter().enumerate() {
        for (name, measured) in servers(theirs) {
            let Some(figure) = measured.and_then(|measured| measured.figures.get(index)) else {
                continue;
            };
            let rate = |value: f64| format!("{value:.0}/s");
            let mut row = vec![
                load.name().to_owned(),
                connections.to_string(),
                name.to_owned(),
                rate(figure.median),
                rate(figure.lowest),
                rate(figure.highest),
                format!("{:.2} ms", figure.p50_ms),
                format!("{:.2} ms", figure.p99_ms),
            ];
            if name == "other" {
                let ours = ours.figures.get(index).map_or(0.0, |ours| ours.median);
                row.push(format!("{:.1}×", ours / figure.median));
            }
            table.row(row);
        }
    }
    let resident_of = |measured: Option<&Measured>| measured.and_then(|measured| measured.resident);
    for (name, measured) in servers(theirs) {
        let Some(resident) = resident_of(measured) else {
            continue;
        };
        let mut row = vec!["memory".to_owned(), String::new(), name.to_owned()];
        row.push(bytes(resident));
        if let (true, Some(ours)) = (name == "other", ours.resident) {
            row.resize(8, String::new());
            row.push(format!("{:.1}×", kibibytes(resident) / kibibytes(ours)));
        }
        table.row(row);
    }
    table
}

fn kibibytes(bytes: u64) -> f64 {
    f64::from(u32::try_from(bytes >> 10).unwrap_or(u32::MAX))
}

impl Load {
    fn name(self) -> &'static str {
        match self {
            Self::Create => "creates",
            Self::Get => "gets",
        }
    }
}

impl Figure {
    fn of(mut outcomes: Vec<Outcome>) -> Self {
        outcomes.sort_by(|left, right| left.rate().total_cmp(&right.rate()));
        let rate = |outcome: Option<&Outcome>| outcome.map_or(0.0, Outcome::rate);
        let median = outcomes.get(outcomes.len() / 2);
        Self {
            lowest: rate(outcomes.first()),
            median: rate(median),
            highest: rate(outcomes.last()),
            p50_ms: median.map_or(0.0, |median| median.p50_ms),
            p99_ms: median.map_or(0.0, |median| median.p99_ms),
        }
    }
}

impl Outcome {
    fn rate(&self) -> f64 {
        self.requests / self.seconds
    }
}

async fn wrk(
    url: &str,
    script: &str,
    connections: usize,
    duration: Duration,
) -> anyhow::Result<Outcome> {
    // The script holds the token; the directory is readable by its owner alone.
    let directory = tempfile::tempdir()?;
    let path = directory.path().join("load.lua");
    std::fs::write(&path, script)?;
    let output = Command::new("wrk")
        .arg(format!("-t{}", THREADS.min(connections)))
        .arg(format!("-c{connections}"))
        .arg(format!("-d{}s", duration.as_secs()))
        .arg("-s")
        .arg(&path)
        .arg(url)
        .output()
        .await
        .context("cannot run `wrk`, which makes the load: install it (Debian's package is wrk)")?;
    let printed = String::from_utf8_lossy(&output.stdout);
    let result = printed
        .lines()
        .find_map(|line| line.strip_prefix("RESULT "))
        .with_context(|| {
            format!(
                "wrk printed no result: {printed}{}",
                String::from_utf8_lossy(&output.stderr)
            )
        })?;
    Ok(serde_json::from_str(result)?)
}

/// The Lua program that makes the requests and prints a summary. Names are unique by run, thread and count.
fn script(load: Load, token: &str, namespace: &str, run: &str) -> String {
    let path = format!("/api/v1/namespaces/{namespace}/configmaps");
    let request = match load {
        Load::Create => format!(
            r#"
  count = count + 1
  local name = "w-{run}-" .. id .. "-" .. count
  local body = '{{"apiVersion":"v1","kind":"ConfigMap","metadata":{{"name":"' .. name .. '"}},"data":{{"text":"' .. payload .. '"}}}}'
  return wrk.format("POST", "{path}", headers, body)"#
        ),
        Load::Get => format!(r#"return wrk.format("GET", "{path}/{READ}", headers)"#),
    };
    format!(
        r#"
local threads = 0
function setup(thread)
  thread:set("id", threads)
  threads = threads + 1
end
function init(arguments)
  count = 0
  payload = string.rep("x", {PAYLOAD_BYTES})
  headers = {{ ["Authorization"] = "Bearer {token}", ["Content-Type"] = "application/json", ["Accept"] = "application/json" }}
end
function request()
  {request}
end
function done(summary, latency, requests)
  local errors = summary.errors
  local failures = errors.connect + errors.read + errors.write + errors.status + errors.timeout
  io.write(string.format('RESULT {{"requests":%d,"seconds":%f,"p50_ms":%f,"p99_ms":%f,"failures":%d}}\n',
    summary.requests, summary.duration / 1e6, latency:percentile(50) / 1e3, latency:percentile(99) / 1e3, failures))
end
"#
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    fn measured(rate: f64, resident: Option<u64>) -> Measured {
        let outcome = |requests| Outcome {
            requests,
            seconds: 1.0,
            p50_ms: 1.0,
            p99_ms: 2.0,
            failures: 0,
        };
        let figures = LOADS
            .iter()
            .map(|_| Figure::of([3.0, 1.0, 2.0].map(|times| outcome(times * rate)).into()));
        Measured {
            figures: figures.collect(),
            resident,
        }
    }

    #[test]
    fn two_servers_are_compared() {
        let (ours, theirs) = (
            measured(500.0, Some(100 << 20)),
            measured(100.0, Some(400 << 20)),
        );
        let text = table(&ours, Some(&theirs)).render();
        let lines: Vec<&str> = text.lines().collect();
        assert!(
            lines[1].contains("embedded") && lines[1].contains("1000/s"),
            "{text}"
        );
        assert!(
            lines[2].contains("other") && lines[2].ends_with("5.0×"),
            "{text}"
        );
        assert!(
            lines[8].starts_with("memory") && lines[8].ends_with("4.0×"),
            "{text}"
        );
        let alone = table(&measured(500.0, None), None).render();
        assert!(
            !alone.contains("other") && !alone.contains("memory"),
            "{alone}"
        );
    }
}

//! The Kubernetes API over HTTPS under the load of `wrk`: creates and gets. The same load can be put on any server that a kubeconfig
//! names, so that two servers can be compared in one sitting.

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, ensure};
use k8s_openapi::api::core::v1::{ConfigMap, Namespace};
use kube::api::{DeleteParams, PostParams};
use kube::config::{KubeConfigOptions, Kubeconfig};
use kube::{Api, Client, Config};
use serde::Deserialize;
use serde_json::json;
use tokio::process::Command;
use tokio_util::sync::CancellationToken;

use crate::output::Table;

/// Bytes of text in each object, as in the measurements in process.
const PAYLOAD_BYTES: usize = 2048;

const THREADS: usize = 2;

/// How often each figure is taken.
const SAMPLES: usize = 3;

/// The object that is read.
const READ: &str = "read";

/// What wrk does, and over how many connections.
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

/// Measures the server that a kubeconfig names.
pub async fn against(kubeconfig: &Path, duration: Duration) -> anyhow::Result<()> {
    let read = Kubeconfig::read_from(kubeconfig)
        .with_context(|| format!("cannot read the kubeconfig {}", kubeconfig.display()))?;
    let config = Config::from_custom_kubeconfig(read, &KubeConfigOptions::default()).await?;
    // Written out, a kubeconfig shows its secrets, which its types otherwise keep.
    let user = serde_json::to_value(&config.auth_info)?;
    let token = user["token"].as_str().map(ToOwned::to_owned).with_context(|| {
        format!(
            "{} has no token, and wrk knows no other way in: make one with `kubectl create token`",
            kubeconfig.display()
        )
    })?;
    let url = config.cluster_url.to_string();
    let client = Client::try_from(config)?;
    let namespace = Namespace {
        metadata: kube::core::ObjectMeta {
            generate_name: Some("bench-wrk-".into()),
            ..Default::default()
        },
        ..Namespace::default()
    };
    let namespaces: Api<Namespace> = Api::all(client.clone());
    let made = namespaces
        .create(&PostParams::default(), &namespace)
        .await?;
    let name = made.metadata.name.context("a namespace has a name")?;
    let measured = measure(&client, url.trim_end_matches('/'), &token, &name, duration).await;
    namespaces.delete(&name, &DeleteParams::default()).await?;
    println!("{}", measured?);
    Ok(())
}

/// Measures an embedded server with a new data directory.
pub async fn embedded(directory: &Path, duration: Duration) -> anyhow::Result<()> {
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
    let measured = against(&kubeconfig, duration).await;
    stop.cancel();
    serving.await??;
    if let Some(server) = Arc::into_inner(server) {
        server.shutdown().await;
    }
    measured
}

async fn measure(
    client: &Client,
    url: &str,
    token: &str,
    namespace: &str,
    duration: Duration,
) -> anyhow::Result<String> {
    let maps: Api<ConfigMap> = Api::namespaced(client.clone(), namespace);
    let object = json!({"metadata": {"name": READ}, "data": {"text": "x".repeat(PAYLOAD_BYTES)}});
    maps.create(&PostParams::default(), &serde_json::from_value(object)?)
        .await?;
    let mut table = Table::new(&[
        "WHAT",
        "CONNECTIONS",
        "MEDIAN",
        "LOWEST",
        "HIGHEST",
        "P50",
        "P99",
    ]);
    for (load, connections) in LOADS {
        let mut outcomes = Vec::new();
        for sample in 0..SAMPLES {
            let script = script(load, token, namespace, &format!("{connections}-{sample}"));
            let outcome = wrk(url, &script, connections, duration).await?;
            ensure!(
                outcome.failures == 0,
                "{} of {} requests failed",
                outcome.failures,
                outcome.requests
            );
            outcomes.push(outcome);
        }
        outcomes.sort_by(|left, right| left.rate().total_cmp(&right.rate()));
        let rate = |index: usize| format!("{:.0}/s", outcomes[index].rate());
        let median = &outcomes[SAMPLES / 2];
        table.row(vec![
            match load {
                Load::Create => "creates".to_owned(),
                Load::Get => "gets".to_owned(),
            },
            connections.to_string(),
            rate(SAMPLES / 2),
            rate(0),
            rate(SAMPLES - 1),
            format!("{:.2} ms", median.p50_ms),
            format!("{:.2} ms", median.p99_ms),
        ]);
    }
    Ok(table.render())
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
    let said = String::from_utf8_lossy(&output.stdout);
    let result = said
        .lines()
        .find_map(|line| line.strip_prefix("RESULT "))
        .with_context(|| {
            format!(
                "wrk said no result: {said}{}",
                String::from_utf8_lossy(&output.stderr)
            )
        })?;
    Ok(serde_json::from_str(result)?)
}

/// The Lua program that makes the requests and sums up. Names are unique by run, thread and count.
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

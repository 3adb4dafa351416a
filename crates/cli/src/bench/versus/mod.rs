//! `agent-sandbox bench versus-upstream`: our controller and the other implementation's, over the same job on the same API server.
//!
//! Each runs alone, as a process of its own, in a namespace of its own, beside a node that marks every pod Ready at once. What it cost
//! is read from outside: memory and processor time from the operating system, writes from the API server's own metrics.

use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use anyhow::{Context, ensure};
use api::conditions::{self, ConditionType};
use api::{SandboxClaim, SandboxTemplate, SandboxWarmPool};
use clap::Args;
use futures::StreamExt;
use k8s_openapi::api::core::v1::Namespace;
use kube::api::{DeleteParams, PostParams};
use kube::config::{KubeConfigOptions, Kubeconfig};
use kube::runtime::watcher::{self, Event, watcher};
use kube::{Api, Client, Config, ResourceExt};
use serde_json::json;
use tokio::process::{Child, Command};
use tokio::task::JoinSet;

use crate::output::Table;

const TEMPLATE: &str = "bench";
const POOL: &str = "bench";
/// How long a pool may take to fill, or claims to be met.
const DEADLINE: Duration = Duration::from_secs(600);
const LOOK_AGAIN: Duration = Duration::from_millis(50);

/// Our controller and the other implementation's, over the same job on one kube-apiserver
#[derive(Clone, Debug, Args)]
pub struct Arguments {
    /// Kubeconfig of an administrator of a kube-apiserver where nothing else runs [default: $KUBECONFIG]
    #[arg(long, env = "KUBECONFIG", value_name = "FILE")]
    kubeconfig: PathBuf,

    /// The other implementation's agent-sandbox-controller; without it only ours is measured
    #[arg(long, env = "UPSTREAM_CONTROLLER", value_name = "FILE")]
    upstream: Option<PathBuf>,

    /// Sandboxes that are warm before the first claim
    #[arg(long, default_value_t = 500)]
    pool: usize,

    /// Claims made at once
    #[arg(long, default_value_t = 300)]
    burst: usize,

    /// Claims a second after that
    #[arg(long, default_value_t = 45)]
    rate: usize,

    /// For so many seconds
    #[arg(long, default_value_t = 60)]
    seconds: usize,
}

/// Who is measured, and the program that it is.
struct Contender {
    name: &'static str,
    program: PathBuf,
    /// What comes before the flags.
    command: &'static [&'static str],
}

/// What was measured of one.
#[derive(Debug, Default)]
struct Figures {
    filled: Duration,
    burst: Vec<Duration>,
    burst_took: Duration,
    burst_writes: f64,
    sustained: Vec<Duration>,
    processor: Duration,
    resident: u64,
}

pub async fn run(arguments: Arguments) -> anyhow::Result<()> {
    let kubeconfig = Kubeconfig::read_from(&arguments.kubeconfig)
        .with_context(|| format!("cannot read {}", arguments.kubeconfig.display()))?;
    let config = Config::from_custom_kubeconfig(kubeconfig, &KubeConfigOptions::default()).await?;
    let client = Client::try_from(config)?;
    crate::up::install_kinds(&client).await?;
    let ours = Contender {
        name: "ours",
        program: std::env::current_exe()?,
        command: &["controller"],
    };
    let mut measured = vec![("ours", measure(&client, &arguments, &ours).await?)];
    match &arguments.upstream {
        Some(program) => {
            let upstream = Contender {
                name: "upstream",
                program: program.clone(),
                command: &[],
            };
            measured.push(("upstream", measure(&client, &arguments, &upstream).await?));
        }
        None => println!(
            "upstream not available: no controller of it was given with --upstream. `cargo xtask kube-assets` builds it where the \
             module proxy has it, and says why where it has not.\n"
        ),
    }
    print!("{}", table(&arguments, &measured).render());
    Ok(())
}

async fn measure(
    client: &Client,
    arguments: &Arguments,
    contender: &Contender,
) -> anyhow::Result<Figures> {
    let namespace = format!("bench-{}", contender.name);
    create_namespace(client, &namespace).await?;
    let mut controller = start(contender, &arguments.kubeconfig)?;
    let pid = controller.id().context("the controller has ended")?;
    let arrivals = Arc::new(Arrivals::default());
    let mut tasks = JoinSet::new();
    tasks.spawn(controllers::bench::mark_pods_ready(client.clone()));
    tasks.spawn(Arc::clone(&arrivals).follow(client.clone(), namespace.clone()));
    let job = Job {
        client: client.clone(),
        namespace: namespace.clone(),
        arrivals,
    };
    let figures = tokio::select! {
        figures = job.run(arguments, pid) => figures,
        ended = controller.wait() => Err(anyhow::anyhow!("the controller {} ended: {}", contender.name, ended?)),
    };
    // The namespace goes while the controller can still help it to.
    let namespaces = Api::<Namespace>::all(client.clone());
    namespaces
        .delete(&namespace, &DeleteParams::default())
        .await?;
    let begin = Instant::now();
    while namespaces.get_opt(&namespace).await?.is_some() && begin.elapsed() < DEADLINE {
        tokio::time::sleep(LOOK_AGAIN).await;
    }
    controller.kill().await?;
    tasks.shutdown().await;
    figures
}

fn start(contender: &Contender, kubeconfig: &Path) -> anyhow::Result<Child> {
    Command::new(&contender.program)
        .args(contender.command)
        .args([
            "--leader-elect=false",
            "--extensions",
            "--metrics-bind-address=0",
            "--health-probe-bind-address=0",
        ])
        .env("KUBECONFIG", kubeconfig)
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .kill_on_drop(true)
        .spawn()
        .with_context(|| format!("cannot start {}", contender.program.display()))
}

async fn create_namespace(client: &Client, name: &str) -> anyhow::Result<()> {
    let namespace: Namespace = serde_json::from_value(json!({"metadata": {"name": name}}))?;
    Api::all(client.clone())
        .create(&PostParams::default(), &namespace)
        .await
        .with_context(|| format!("cannot make namespace {name}"))?;
    Ok(())
}

/// When each claim was seen to be Ready.
#[derive(Debug, Default)]
struct Arrivals(Mutex<HashMap<String, Instant>>);

impl Arrivals {
    async fn follow(self: Arc<Self>, client: Client, namespace: String) {
        let claims = Api::<SandboxClaim>::namespaced(client, &namespace);
        let mut events = std::pin::pin!(watcher(claims, watcher::Config::default()));
        while let Some(event) = events.next().await {
            let Ok(Event::Apply(claim) | Event::InitApply(claim)) = event else {
                continue;
            };
            let is_ready = claim.status.as_ref().is_some_and(|status| {
                conditions::is_true(&status.conditions, ConditionType::Ready)
            });
            if is_ready {
                self.lock()
                    .entry(claim.name_any())
                    .or_insert_with(Instant::now);
            }
        }
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, HashMap<String, Instant>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The job in its namespace.
#[derive(Clone)]
struct Job {
    client: Client,
    namespace: String,
    arrivals: Arc<Arrivals>,
}

impl Job {
    async fn run(&self, arguments: &Arguments, pid: u32) -> anyhow::Result<Figures> {
        let mut figures = Figures::default();
        let begin = Instant::now();
        self.create_pool(arguments.pool).await?;
        self.await_full(arguments.pool).await?;
        figures.filled = begin.elapsed();

        let (writes, processor) = (self.writes().await?, processor_time(pid));
        let begin = Instant::now();
        let asked = self.claim_at_once(arguments.burst).await?;
        let (latencies, last) = self.await_claims(&asked).await?;
        figures.burst = latencies;
        figures.burst_took = last - begin;
        figures.processor = processor_time(pid).saturating_sub(processor);
        figures.burst_writes = self.writes().await? - writes - count(arguments.burst);

        self.await_full(arguments.pool).await?;
        let asked = self
            .claim_steadily(arguments.rate, arguments.seconds)
            .await?;
        figures.sustained = self.await_claims(&asked).await?.0;
        figures.resident = resident_bytes(pid);
        Ok(figures)
    }

    async fn create_pool(&self, replicas: usize) -> anyhow::Result<()> {
        // A scheduler that is not there leaves the pods to the node that marks them.
        let pod = json!({"schedulerName": "none", "automountServiceAccountToken": false, "containers": [{"name": "main", "image": "bench"}]});
        let template: SandboxTemplate = serde_json::from_value(
            json!({"metadata": {"name": TEMPLATE}, "spec": {"podTemplate": {"spec": pod}}}),
        )?;
        let pool: SandboxWarmPool = serde_json::from_value(
            json!({"metadata": {"name": POOL}, "spec": {"replicas": replicas, "sandboxTemplateRef": {"name": TEMPLATE}}}),
        )?;
        Api::namespaced(self.client.clone(), &self.namespace)
            .create(&PostParams::default(), &template)
            .await?;
        Api::namespaced(self.client.clone(), &self.namespace)
            .create(&PostParams::default(), &pool)
            .await?;
        Ok(())
    }

    async fn await_full(&self, wanted: usize) -> anyhow::Result<()> {
        let pools = Api::<SandboxWarmPool>::namespaced(self.client.clone(), &self.namespace);
        let begin = Instant::now();
        loop {
            let ready = pools
                .get(POOL)
                .await?
                .status
                .map_or(0, |status| status.ready_replicas);
            if usize::try_from(ready).is_ok_and(|ready| ready >= wanted) {
                return Ok(());
            }
            ensure!(
                begin.elapsed() < DEADLINE,
                "the pool has {ready} of {wanted} sandboxes after {DEADLINE:?}"
            );
            tokio::time::sleep(LOOK_AGAIN).await;
        }
    }

    async fn claim_at_once(&self, claims: usize) -> anyhow::Result<HashMap<String, Instant>> {
        let mut making = JoinSet::new();
        for number in 0..claims {
            making.spawn(self.clone().claim(format!("burst-{number}")));
        }
        all_made(making).await
    }

    async fn claim_steadily(
        &self,
        rate: usize,
        seconds: usize,
    ) -> anyhow::Result<HashMap<String, Instant>> {
        let mut making = JoinSet::new();
        let mut ticks = tokio::time::interval(Duration::from_secs(1) / u32::try_from(rate.max(1))?);
        for number in 0..rate * seconds {
            ticks.tick().await;
            making.spawn(self.clone().claim(format!("steady-{number}")));
        }
        all_made(making).await
    }

    async fn claim(self, name: String) -> anyhow::Result<(String, Instant)> {
        // The oldest spelling, which every generation understands.
        let claim: SandboxClaim = serde_json::from_value(
            json!({"metadata": {"name": name}, "spec": {"sandboxTemplateRef": {"name": TEMPLATE}}}),
        )?;
        let asked = Instant::now();
        Api::namespaced(self.client, &self.namespace)
            .create(&PostParams::default(), &claim)
            .await?;
        Ok((name, asked))
    }

    /// How long each claim took, and when the last was met.
    async fn await_claims(
        &self,
        asked: &HashMap<String, Instant>,
    ) -> anyhow::Result<(Vec<Duration>, Instant)> {
        let begin = Instant::now();
        loop {
            let met: Vec<(Duration, Instant)> = {
                let arrived = self.arrivals.lock();
                let met = asked.iter().filter_map(|(name, asked)| {
                    let ready = *arrived.get(name)?;
                    Some((ready.saturating_duration_since(*asked), ready))
                });
                met.collect()
            };
            if met.len() == asked.len() {
                let last = met.iter().map(|(_, ready)| *ready).max();
                let mut latencies: Vec<Duration> = met.into_iter().map(|(took, _)| took).collect();
                latencies.sort_unstable();
                return Ok((latencies, last.unwrap_or(begin)));
            }
            ensure!(
                begin.elapsed() < DEADLINE,
                "{} of {} claims are met after {DEADLINE:?}",
                met.len(),
                asked.len()
            );
            tokio::time::sleep(LOOK_AGAIN).await;
        }
    }

    /// Writes that the API server has answered so far, but for those of the node that marks pods.
    async fn writes(&self) -> anyhow::Result<f64> {
        let request = http::Request::get("/metrics").body(Vec::new())?;
        let text = self.client.request_text(request).await?;
        Ok(writes_in(&text))
    }
}

async fn all_made(
    mut making: JoinSet<anyhow::Result<(String, Instant)>>,
) -> anyhow::Result<HashMap<String, Instant>> {
    let mut made = HashMap::new();
    while let Some(claim) = making.join_next().await {
        let (name, asked) = claim??;
        made.insert(name, asked);
    }
    Ok(made)
}

/// Sums `apiserver_request_total` over writes of what controllers write.
fn writes_in(metrics: &str) -> f64 {
    metrics
        .lines()
        .filter(|line| line.starts_with("apiserver_request_total{"))
        .filter(|line| {
            let has = |label: &str| line.contains(label);
            let is_write = ["POST", "PUT", "PATCH", "APPLY", "DELETE"]
                .iter()
                .any(|verb| has(&format!("verb=\"{verb}\"")));
            let is_ours = has("resource=\"sandbox")
                || has("resource=\"events\"")
                || has("resource=\"networkpolicies\"");
            let is_pod = has("resource=\"pods\"") && has("subresource=\"\"");
            is_write && (is_ours || is_pod)
        })
        .filter_map(|line| line.rsplit(' ').next()?.parse::<f64>().ok())
        .sum()
}

fn resident_bytes(pid: u32) -> u64 {
    let status = std::fs::read_to_string(format!("/proc/{pid}/status")).unwrap_or_default();
    let line = status.lines().find(|line| line.starts_with("VmRSS:"));
    let kibibytes = line.and_then(|line| line.split_whitespace().nth(1)?.parse::<u64>().ok());
    kibibytes.unwrap_or_default() << 10
}

/// What a process has computed so far, in hundredths of a second as the operating system counts.
fn processor_time(pid: u32) -> Duration {
    const TICK: Duration = Duration::from_millis(10);
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    // The second field is a name in parentheses that may hold spaces.
    let fields = stat.rsplit_once(')').map_or("", |(_, fields)| fields);
    let ticks: u32 = fields
        .split_whitespace()
        .skip(11)
        .take(2)
        .filter_map(|field| field.parse::<u32>().ok())
        .sum();
    TICK * ticks
}

fn percentile(sorted: &[Duration], percent: usize) -> Duration {
    let index = (sorted.len() * percent).div_ceil(100).saturating_sub(1);
    sorted.get(index).copied().unwrap_or_default()
}

#[expect(
    clippy::cast_precision_loss,
    reason = "counts here are far below what a double holds exactly"
)]
fn count(number: usize) -> f64 {
    number as f64
}

/// How a figure is read from what was measured.
type Reading = Box<dyn Fn(&Figures) -> f64>;

/// One row per figure, one column per contender, and how ours compares where there is a peer.
fn table(arguments: &Arguments, measured: &[(&str, Figures)]) -> Table {
    let milliseconds = |duration: Duration| duration.as_secs_f64() * 1_000.0;
    let burst = count(arguments.burst);
    let rows: Vec<(String, Reading)> = vec![
        (
            format!("filling a pool of {}, s", arguments.pool),
            Box::new(|figures| figures.filled.as_secs_f64()),
        ),
        (
            format!("{} claims at once, claims/s", arguments.burst),
            Box::new(move |figures| burst / figures.burst_took.as_secs_f64()),
        ),
        (
            "  p50, ms".to_owned(),
            Box::new(move |figures| milliseconds(percentile(&figures.burst, 50))),
        ),
        (
            "  p90, ms".to_owned(),
            Box::new(move |figures| milliseconds(percentile(&figures.burst, 90))),
        ),
        (
            "  p99, ms".to_owned(),
            Box::new(move |figures| milliseconds(percentile(&figures.burst, 99))),
        ),
        (
            "  API writes per claim, refills included".to_owned(),
            Box::new(move |figures| figures.burst_writes / burst),
        ),
        (
            "  processor time of the controller, s".to_owned(),
            Box::new(|figures| figures.processor.as_secs_f64()),
        ),
        (
            format!(
                "{} claims/s for {} s, p50, ms",
                arguments.rate, arguments.seconds
            ),
            Box::new(move |figures| milliseconds(percentile(&figures.sustained, 50))),
        ),
        (
            "  p90, ms".to_owned(),
            Box::new(move |figures| milliseconds(percentile(&figures.sustained, 90))),
        ),
        (
            "  p99, ms".to_owned(),
            Box::new(move |figures| milliseconds(percentile(&figures.sustained, 99))),
        ),
        (
            "memory of the controller at the end, MiB".to_owned(),
            Box::new(|figures| count(usize::try_from(figures.resident >> 20).unwrap_or_default())),
        ),
    ];
    let mut header = vec!["WHAT"];
    header.extend(measured.iter().map(|(name, _)| *name));
    if measured.len() == 2 {
        header.push("upstream / ours");
    }
    let mut table = Table::new(&header);
    for (what, figure) in rows {
        let values: Vec<f64> = measured
            .iter()
            .map(|(_, figures)| figure(figures))
            .collect();
        let mut row = vec![what];
        row.extend(values.iter().map(|value| format!("{value:.1}")));
        if let [ours, upstream] = values[..] {
            row.push(format!("{:.2}", upstream / ours));
        }
        table.row(row);
    }
    table
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn writes_of_controllers_are_told_from_the_rest() {
        let metrics = r#"
apiserver_request_total{code="201",component="apiserver",dry_run="",group="",resource="pods",scope="resource",subresource="",verb="POST",version="v1"} 7
apiserver_request_total{code="200",component="apiserver",dry_run="",group="",resource="pods",scope="resource",subresource="status",verb="PATCH",version="v1"} 100
apiserver_request_total{code="200",component="apiserver",dry_run="",group="agents.x-k8s.io",resource="sandboxes",scope="resource",subresource="status",verb="PATCH",version="v1beta1"} 5
apiserver_request_total{code="200",component="apiserver",dry_run="",group="agents.x-k8s.io",resource="sandboxes",scope="resource",subresource="",verb="GET",version="v1beta1"} 50
apiserver_request_total{code="200",component="apiserver",dry_run="",group="coordination.k8s.io",resource="leases",scope="resource",subresource="",verb="PUT",version="v1"} 1
"#;
        assert!((writes_in(metrics) - 12.0).abs() < f64::EPSILON);
    }

    #[test]
    fn percentiles_are_of_the_sorted_list() {
        let sorted: Vec<Duration> = (1..=100).map(Duration::from_millis).collect();
        assert_eq!(percentile(&sorted, 50), Duration::from_millis(50));
        assert_eq!(percentile(&sorted, 99), Duration::from_millis(99));
        assert_eq!(percentile(&[], 50), Duration::ZERO);
    }
}

//! `bench node`: pods, containers and execs of a node in this process, beside other container runtimes.
//!
//! | module | measures |
//! |---|---|
//! | [`alone`] | pods one at a time, execs, containers |
//! | [`density`] | many idle pods |
//! | [`hostile`] | a pod while another attacks |
//! | [`peers`] | other container runtimes |
//!
//! Containers and execs are measured through [`container_runtime`], pods through the Kubernetes API.

mod alone;
mod density;
mod hostile;
mod peers;
pub mod pods;

use std::path::Path;
use std::time::Duration;

use ::node::{Config, Node};
use anyhow::Context;
use clap::Args;
use clap::builder::PossibleValuesParser;
use k8s_openapi::api::core::v1::Pod;
use kube::api::{DeleteParams, ListParams};
use kube::{Api, Client};
use machine_control_plane::scheduler;
use tokio::task::JoinHandle;
use tokio_util::sync::CancellationToken;

use crate::table::{Table, bytes};
use alone::Report;
use density::Density;
use hostile::Beside;
use pods::Distribution;

pub const NAMESPACE: &str = "default";
/// The timeout for the deletion of pods that a failed measurement has left.
const CLEAN_UP_DEADLINE: Duration = Duration::from_secs(30);

#[derive(Clone, Debug, Args)]
pub struct Arguments {
    /// Pods that are started one at a time
    #[arg(long, default_value_t = 30)]
    pods: usize,
    /// Instead: this many idle pods at once, what each costs, and the last against the first
    #[arg(long, value_name = "PODS", conflicts_with = "hostile")]
    density: Option<usize>,
    /// Instead: requests to a pod while another attacks
    #[arg(long)]
    hostile: bool,
    /// With --hostile, only this attack; may be given several times
    #[arg(long, value_name = "NAME", requires = "hostile", value_parser = PossibleValuesParser::new(hostile::attacks()))]
    attack: Vec<String>,
    /// With --hostile, requests to the neighbour beside each attack, before it and after it
    #[arg(long, default_value_t = 1000, value_parser = clap::value_parser!(u16).range(1..), requires = "hostile")]
    requests: u16,
}

impl Arguments {
    /// Starts an API server and a node in `directory`, measures them, and prints.
    pub async fn measure(self, directory: &Path) -> anyhow::Result<()> {
        let machine = Machine::start(directory).await?;
        let measured = self.measure_node(&machine.client, &machine.node).await;
        print!("{}", machine.stop_after(measured).await?.render());
        Ok(())
    }

    async fn measure_node(self, client: &Client, node: &Node) -> anyhow::Result<Table> {
        let (client, runtime) = (client.clone(), node.runtime());
        if self.hostile {
            let options = hostile::Options {
                requests: self.requests.into(),
                attacks: self.attack,
            };
            let measured = hostile::run(client, &options).await?;
            Ok(beside_attackers(&measured))
        } else if let Some(count) = self.density {
            let measured = density::run(client, runtime, count).await?;
            Ok(full_node(&measured))
        } else {
            let measured = alone::run(client, runtime, self.pods).await?;
            Ok(one_at_a_time(&measured))
        }
    }
}

/// An API server and a node in this process.
pub struct Machine {
    server: apiserver::Server,
    pub client: Client,
    pub node: Node,
    scheduler: JoinHandle<()>,
    shutdown: CancellationToken,
}

impl Machine {
    /// Starts them below an empty `directory`.
    pub async fn start(directory: &Path) -> anyhow::Result<Self> {
        let config = apiserver::Config::new(directory.join("api"));
        let server = apiserver::Server::open(config).await?;
        let client = server.client();
        let shutdown = CancellationToken::new();
        let config = Config::new(directory.join("node"));
        let node_name = config.node_name.clone();
        let node = Node::start(config, client.clone(), shutdown.clone()).await?;
        let scheduling = scheduler::run(client.clone(), node_name, shutdown.clone());
        let scheduler = tokio::spawn(scheduling);
        Ok(Self {
            server,
            client,
            node,
            scheduler,
            shutdown,
        })
    }

    /// Deletes all pods and stops. Then returns what was measured.
    pub async fn stop_after<T>(self, measured: anyhow::Result<T>) -> anyhow::Result<T> {
        let cleaned_up = delete_pods(&self.client).await;
        self.shutdown.cancel();
        self.scheduler.await?;
        self.node.dismantle().await?;
        drop(self.client);
        self.server.shutdown().await;
        let measured = measured?;
        cleaned_up.map(|()| measured)
    }
}

/// Deletes the pods that a failed measurement has left, and waits until they are gone.
async fn delete_pods(client: &Client) -> anyhow::Result<()> {
    let pods = Api::<Pod>::namespaced(client.clone(), NAMESPACE);
    let everything = ListParams::default();
    pods.delete_collection(&DeleteParams::default(), &everything)
        .await?;
    let gone = async {
        while !pods.list_metadata(&everything).await?.items.is_empty() {
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
        anyhow::Ok(())
    };
    let gone = tokio::time::timeout(CLEAN_UP_DEADLINE, gone).await;
    gone.context("pods are still running after the deadline")?
}

fn one_at_a_time(report: &Report) -> Table {
    let mut table = Table::new(&["WHAT", "P50", "P99", "HIGHEST", "TO OURS"]);
    let mut times = |what: &str, sample: &Distribution, ratio: String| {
        let [p50, p99, highest] = percentiles(sample);
        table.row(vec![what.to_owned(), p50, p99, highest, ratio]);
    };
    times("pod created to Running", &report.pod_running, String::new());
    times("pod created to Ready", &report.pod_ready, String::new());
    times("exec of `true`", &report.exec, String::new());
    let ours = "container of `true`, start to end";
    times(ours, &report.start_to_exit, "1.00×".to_owned());
    for peer in &report.peers {
        let what = format!("{}, start of `true` to its end", peer.name);
        times(&what, &peer.start_to_exit, format!("{:.2}×", peer.ratio));
    }
    let mut figure = |what: &str, value: String| table.row(vec![what.to_owned(), value]);
    let rate = report.pods_per_second_8_parallel;
    figure("pods a second, 8 at a time", format!("{rate:.0}"));
    if let Some(memory) = report.idle_pod_bytes {
        figure("memory of an idle pod", bytes(memory));
    }
    table
}

fn full_node(density: &Density) -> Table {
    let mut table = Table::new(&["WHAT", "P50", "P99", "HIGHEST"]);
    for (what, sample) in [
        ("first pods, created to Ready", &density.first),
        ("last pods, created to Ready", &density.last),
    ] {
        let [p50, p99, highest] = percentiles(sample);
        table.row(vec![what.to_owned(), p50, p99, highest]);
    }
    let mut figure = |what: &str, value: String| table.row(vec![what.to_owned(), value]);
    let ratio = density.last_against_first;
    figure("last against first", format!("{ratio:.2}×"));
    let seconds = density.seconds_to_start_all;
    figure(&format!("{} pods", density.pods), format!("{seconds:.1} s"));
    for (what, memory) in [
        ("machine's memory, each pod", density.memory_per_pod_bytes),
        ("of that counted to the pod", density.counted_per_pod_bytes),
        ("of that the node itself", density.node_per_pod_bytes),
    ] {
        figure(what, bytes(memory));
    }
    let percent = |share: f64| format!("{share:.1} % of one");
    let idle = density.idle_cpu_percent;
    figure("CPU, all pods idle", percent(idle));
    let empty = density.empty_cpu_percent;
    figure("CPU, without pods", percent(empty));
    table
}

fn beside_attackers(attacks: &[Beside]) -> Table {
    let mut table = Table::new(&[
        "BESIDE",
        "P50",
        "P99",
        "HIGHEST",
        "P50 TO QUIET",
        "P99 TO QUIET",
    ]);
    for beside in attacks {
        let [p50, p99, highest] = percentiles(&beside.latency);
        let against = |ratio: f64, quiet: f64| format!("{ratio:.2}× ({quiet:.2} ms)");
        table.row(vec![
            beside.attack.to_owned(),
            p50,
            p99,
            highest,
            against(beside.ratio, beside.quiet.p50_ms),
            against(beside.p99_ratio, beside.quiet.p99_ms),
        ]);
    }
    table
}

fn percentiles(sample: &Distribution) -> [String; 3] {
    [sample.p50_ms, sample.p99_ms, sample.maximum_ms].map(|value| format!("{value:.2} ms"))
}

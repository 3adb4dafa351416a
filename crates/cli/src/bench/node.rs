//! `agent-sandbox bench node`: what the node measures of itself, as tables.

use std::path::Path;

use anyhow::Context;
use clap::Args;
use clap::builder::PossibleValuesParser;
use node::bench::density::Density;
use node::bench::neighbour::Beside;
use node::bench::{self, Distribution, Report};

use crate::output::{Table, bytes};
use crate::up::Quickstart;

#[derive(Clone, Debug, Args)]
pub struct Arguments {
    /// Pods that are started one at a time
    #[arg(long, default_value_t = 30)]
    pods: usize,
    /// Instead: this many idle pods at once, what each costs, and the last against the first
    #[arg(long, value_name = "PODS", conflicts_with = "hostile")]
    density: Option<usize>,
    /// Instead: requests to a pod while another means harm
    #[arg(long)]
    hostile: bool,
    /// With --hostile, only this attack; may be given several times
    #[arg(long, value_name = "NAME", requires = "hostile", value_parser = PossibleValuesParser::new(bench::neighbour::attacks()))]
    attack: Vec<String>,
    /// With --hostile, requests to the neighbour beside each attack, before it and after it
    #[arg(long, default_value_t = 1000, value_parser = clap::value_parser!(u16).range(1..), requires = "hostile")]
    requests: u16,
}

impl Arguments {
    /// Measures a node that runs everything in `directory`, and prints.
    pub async fn measure(self, directory: &Path) -> anyhow::Result<()> {
        let up = super::start(directory, Quickstart::Nothing).await?;
        let runtime = up.node().context("the node runs")?.runtime();
        let table = if self.hostile {
            let options = bench::neighbour::Options {
                requests: self.requests.into(),
                attacks: self.attack,
            };
            let measured = bench::neighbour::run(up.client(), "default", &options).await;
            measured.map(|measured| beside_attackers(&measured))
        } else if let Some(count) = self.density {
            let measured = bench::density::run(up.client(), runtime, "default", count).await;
            measured.map(|measured| full_node(&measured))
        } else {
            let options = bench::Options {
                pods: self.pods,
                ..bench::Options::default()
            };
            let measured = bench::run(up.client(), runtime, &options).await;
            measured.map(|measured| alone(&measured))
        };
        up.stop_with_sandboxes().await?;
        print!("{}", table?.render());
        Ok(())
    }
}

fn alone(report: &Report) -> Table {
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
    let idle = density.idle_processor_percent;
    figure("processor, all pods idle", percent(idle));
    let empty = density.empty_processor_percent;
    figure("processor, without pods", percent(empty));
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

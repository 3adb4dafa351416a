//! `bench claims` and `bench reconcile`: how fast claims become Ready, and what they cost.
//!
//! | module | owns |
//! |---|---|
//! | [`measurement`] | the pool, the phases of a measurement, and its figures |
//! | [`load`] | the ways to create claims |
//! | [`ready_watch`] | when a claim becomes Ready |
//! | [`reconciles`] | the duration of reconciles |
//! | [`report`] | figures, as text |
//!
//! The API server and a fake node run in this process. The controllers run here, too, or in a process of their own. Only the number of
//! writes is judged: budgets of time depend on the machine.

mod load;
mod measurement;
mod ready_watch;
mod reconciles;
mod report;

use std::net::{Ipv4Addr, SocketAddr};
use std::path::Path;
use std::process::{Child, Command};
use std::time::{Duration, Instant};

use anyhow::{Context, ensure};
use clap::Args;
use futures::FutureExt;
use tokio::net::{TcpListener, TcpStream};
use tokio_util::sync::CancellationToken;

use crate::table::Table;
use crate::{agent_sandbox, kinds};
use measurement::{Controllers, Options};
pub use report::Latencies;
use report::Report;

/// The timeout for the start of the controllers.
const START_TIMEOUT: Duration = Duration::from_secs(60);

#[derive(Clone, Copy, Debug, Args)]
pub struct Arguments {
    /// Sandboxes that are warm before each measurement
    #[arg(
        long,
        visible_alias = "pool",
        default_value_t = 2_500,
        value_name = "N"
    )]
    warm: usize,
    /// Claims made one at a time
    #[arg(long, default_value_t = 200, value_name = "N")]
    sequential: usize,
    /// Claims made all at once
    #[arg(long, default_value_t = 500, value_name = "N")]
    claims: usize,
    /// Claims made by clients that each wait for one before they create the next
    #[arg(long, default_value_t = 2_000, value_name = "N")]
    sustained: usize,
    /// How many such clients there are
    #[arg(long, default_value_t = 32, value_name = "N")]
    clients: usize,
    /// Claims made at a steady rate
    #[arg(long, default_value_t = 2_000, value_name = "N")]
    at_rate: usize,
    /// That rate, in claims a second
    #[arg(long, default_value_t = 1_000, value_name = "N")]
    rate: u32,
    /// Run the controllers in a process of their own, over HTTPS, and print its memory and CPU time
    #[arg(long)]
    controllers_apart: bool,
}

impl Arguments {
    /// Measures with an API server in `directory`, and prints. More writes than allowed are an error.
    pub async fn measure(self, directory: &Path) -> anyhow::Result<()> {
        let server = apiserver::Server::open(apiserver::Config::new(directory)).await?;
        kinds::install(&server.client()).await?;
        let report = if self.controllers_apart {
            let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await?;
            let address = listener.local_addr()?;
            let kubeconfig = directory.join("kubeconfig");
            server.write_kubeconfig(&kubeconfig, &format!("https://{address}"))?;
            let shutdown = CancellationToken::new();
            let serving = server.serve(listener, shutdown.clone());
            let measuring = async {
                let controllers = Apart::start(&kubeconfig).await?;
                let report = self.run(server.client(), controllers.place()).await?;
                anyhow::Ok(report)
            };
            let measuring = measuring.inspect(|_| shutdown.cancel());
            let (end, report) = tokio::join!(serving, measuring);
            end?;
            report?
        } else {
            self.run(server.client(), Controllers::Here).await?
        };
        server.shutdown().await;
        println!("{report}");
        let excess = report.excess_writes();
        ensure!(excess.is_empty(), "too many writes: {}", excess.join("; "));
        Ok(())
    }

    async fn run(self, client: kube::Client, controllers: Controllers) -> anyhow::Result<Report> {
        let options = Options {
            controllers,
            pool: self.warm,
            sequential: self.sequential,
            at_once: self.claims,
            sustained: self.sustained,
            clients: self.clients,
            at_rate: self.at_rate,
            per_second: self.rate,
            ..Options::default()
        };
        measurement::claims(client, &options).await
    }
}

/// Measures reconciles with few and with many sandboxes in the caches, and prints both. The API server is in memory, so that the disk
/// does not matter.
pub async fn reconcile(many: usize, claims: usize) -> anyhow::Result<()> {
    const FEW: usize = 100;
    let mut table = Table::new(&["CONTROLLER", "CACHED", "RECONCILES", "P50", "P90", "P99"]);
    for cached in [FEW, many] {
        let server = apiserver::Server::open(apiserver::Config::in_memory()).await?;
        kinds::install(&server.client()).await?;
        let measured = reconciles::reconciles(server.client(), cached, claims).await?;
        server.shutdown().await;
        let mut measured: Vec<_> = measured.into_iter().collect();
        measured.sort_by_key(|(controller, _)| *controller);
        for (controller, took) in measured {
            let at = |percent| format!("{:.3} ms", took.percentile(percent).as_secs_f64() * 1e3);
            table.row(vec![
                controller.to_owned(),
                cached.to_string(),
                took.len().to_string(),
                at(50),
                at(90),
                at(99),
            ]);
        }
    }
    print!("{}", table.render());
    Ok(())
}

/// Controllers in their own process, which is killed on drop.
struct Apart(Child);

impl Apart {
    async fn start(kubeconfig: &Path) -> anyhow::Result<Self> {
        // The port stays free until the controllers listen on it.
        let health = TcpListener::bind((Ipv4Addr::LOCALHOST, 0))
            .await?
            .local_addr()?;
        let child = Command::new(agent_sandbox::program()?)
            .arg("controller")
            .arg("--kubeconfig")
            .arg(kubeconfig)
            .args(["--extensions", "--leader-elect=false"])
            .args(["--metrics-bind-address", "0"])
            .args(["--health-probe-bind-address", &health.to_string()])
            .spawn()
            .context("cannot start the controllers")?;
        let apart = Self(child);
        apart.listening(health).await?;
        Ok(apart)
    }

    async fn listening(&self, health: SocketAddr) -> anyhow::Result<()> {
        let started = Instant::now();
        while TcpStream::connect(health).await.is_err() {
            ensure!(
                started.elapsed() < START_TIMEOUT,
                "the controllers did not start within {START_TIMEOUT:?}"
            );
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
        Ok(())
    }

    fn place(&self) -> Controllers {
        Controllers::InProcess(self.0.id())
    }
}

impl Drop for Apart {
    fn drop(&mut self) {
        // The process may have ended already.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

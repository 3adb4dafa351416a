//! The phases of `bench claims`: fill a pool, then create claims in each way of [`Claimant`].

use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context, ensure};
use api::sandbox::PodTemplate;
use api::template::SandboxTemplateRef;
use api::{Sandbox, SandboxTemplate, SandboxTemplateSpec, SandboxWarmPool, SandboxWarmPoolSpec};
use controllers::Parts;
use controllers::trimmed::Trimmed;
use k8s_openapi::api::core::v1::{Container, PodSpec};
use kube::api::{ListParams, ObjectList, PostParams};
use kube::{Api, Client, Resource};
use testkit::writes::Writes;

use super::load::{Claimant, Met};
use super::report::{Phase, Report, Resident, Used};
use crate::fake_cluster::{self, FakeCluster};
use crate::process;

const TEMPLATE: &str = "bench";
pub(super) const POOL: &str = "bench";
/// The timeout for filling a pool.
const POOL_DEADLINE: Duration = Duration::from_secs(300);
/// The API server counts as quiet after this time without a write.
const QUIET: Duration = Duration::from_millis(100);

/// Where the measured controllers run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Controllers {
    /// In this process, beside everything else.
    Here,
    /// In this process, which is running; its figures are separate.
    InProcess(u32),
}

impl Controllers {
    fn process(self) -> Option<u32> {
        match self {
            Self::Here => None,
            Self::InProcess(pid) => Some(pid),
        }
    }
}

/// The size of a measurement.
#[derive(Clone, Debug)]
pub struct Options {
    pub controllers: Controllers,
    pub namespace: String,
    /// Warm sandboxes before each phase.
    pub pool: usize,
    /// Claims created one at a time.
    pub sequential: usize,
    /// Claims created all at once.
    pub at_once: usize,
    /// Claims created by clients that each wait for one before they create the next.
    pub sustained: usize,
    /// The number of these clients.
    pub clients: usize,
    /// Claims created at a steady rate.
    pub at_rate: usize,
    /// That rate.
    pub per_second: u32,
}

impl Default for Options {
    fn default() -> Self {
        Self {
            controllers: Controllers::Here,
            namespace: "default".to_owned(),
            pool: 2_500,
            sequential: 200,
            at_once: 500,
            sustained: 2_000,
            clients: 32,
            at_rate: 2_000,
            per_second: 1_000,
        }
    }
}

/// Measures how fast claims become Ready.
pub async fn claims(client: Client, options: &Options) -> anyhow::Result<Report> {
    let cluster = match options.controllers {
        Controllers::Here => {
            let parts = Parts::new(client.clone(), fake_cluster::with_extensions());
            FakeCluster::start(parts)
        }
        Controllers::InProcess(_) => FakeCluster::start_node(client.clone()),
    };
    let claimant = Claimant::start(client, &options.namespace);
    let report = measure(&claimant, options).await;
    cluster.stop().await?;
    report
}

async fn measure(claimant: &Claimant, options: &Options) -> anyhow::Result<Report> {
    let started = Instant::now();
    create_pool(&claimant.client, options).await?;
    wait_for_pool(&claimant.client, options).await?;
    let controllers = options.controllers.process();
    let resident = || Resident {
        here: process::resident(std::process::id()).ok(),
        controllers: controllers.and_then(|pid| process::resident(pid).ok()),
    };
    let mut report = Report {
        pool: options.pool,
        filled_in: started.elapsed(),
        resident_when_full: resident(),
        list: list(&claimant.client, options).await?,
        ..Report::default()
    };
    quiet(&claimant.client).await?;
    let bench = Bench { claimant, options };
    let phases = [
        bench
            .phase("one at a time", claimant.one_by_one(options.sequential))
            .await?,
        bench
            .phase("all at once", claimant.at_once(options.at_once))
            .await?,
        bench
            .phase(
                &format!("{} clients, each one after the other", options.clients),
                claimant.sustained(options.sustained, options.clients),
            )
            .await?,
        bench
            .phase(
                &format!("{} a second", options.per_second),
                claimant.at_rate(options.at_rate, options.per_second),
            )
            .await?,
    ];
    report.phases.extend(phases.into_iter().flatten());
    report.resident_at_end = resident();
    Ok(report)
}

struct Bench<'a> {
    claimant: &'a Claimant,
    options: &'a Options,
}

impl Bench<'_> {
    /// Creates claims in one way, and waits until the API server is quiet and the pool is full. `None` without claims.
    async fn phase(
        &self,
        name: &str,
        load: impl Future<Output = anyhow::Result<Met>>,
    ) -> anyhow::Result<Option<Phase>> {
        let client = &self.claimant.client;
        let controllers = self.options.controllers.process();
        let used = || Used {
            here: process::cpu_time(std::process::id()).unwrap_or_default(),
            controllers: controllers.map(|pid| process::cpu_time(pid).unwrap_or_default()),
        };
        let (writes, before) = (so_far(client).await?, used());
        let met = load.await?;
        if met.latencies.is_empty() {
            return Ok(None);
        }
        let (cpu, after) = (used().since(&before), so_far(client).await?.since(&writes));
        quiet(client).await?;
        wait_for_pool(client, self.options).await?;
        Ok(Some(Phase {
            name: name.to_owned(),
            claims: met.latencies.len(),
            latencies: met.latencies,
            took: met.took,
            cpu,
            refills: after.of("POST sandboxes"),
            writes: quiet(client).await?.since(&writes),
        }))
    }
}

/// Waits until the API server is quiet. Returns its writes so far.
pub(super) async fn quiet(client: &Client) -> anyhow::Result<Writes> {
    let mut before = so_far(client).await?;
    loop {
        tokio::time::sleep(QUIET).await;
        let now = so_far(client).await?;
        if now == before {
            return Ok(now);
        }
        before = now;
    }
}

async fn so_far(client: &Client) -> anyhow::Result<Writes> {
    Writes::so_far(client)
        .await
        .context("cannot read the API server's metrics")
}

/// The time to list all sandboxes, and the time to decode the list.
async fn list(client: &Client, options: &Options) -> anyhow::Result<(Duration, Duration)> {
    let list = kube::core::Request::new(Sandbox::url_path(&(), Some(&options.namespace)))
        .list(&ListParams::default())
        .expect("a list without options is well formed");
    let started = Instant::now();
    let answer = client
        .request_text(list)
        .await
        .context("cannot list the sandboxes")?;
    let listed = started.elapsed();
    let started = Instant::now();
    let decoded = serde_json::from_str::<ObjectList<Trimmed<Sandbox>>>(&answer);
    let decoded = decoded.context("cannot decode the list of sandboxes")?;
    let took = started.elapsed();
    drop(decoded);
    Ok((listed, took))
}

/// Creates the template and the pool.
pub(super) async fn create_pool(client: &Client, options: &Options) -> anyhow::Result<()> {
    let params = PostParams::default();
    let namespace = &options.namespace;
    let container = Container {
        name: "main".to_owned(),
        image: Some("bench".to_owned()),
        ..Container::default()
    };
    let pod_template = PodTemplate {
        spec: Arc::new(PodSpec {
            containers: vec![container],
            ..PodSpec::default()
        }),
        ..PodTemplate::default()
    };
    let template = SandboxTemplate::new(
        TEMPLATE,
        SandboxTemplateSpec {
            pod_template,
            ..SandboxTemplateSpec::default()
        },
    );
    Api::namespaced(client.clone(), namespace)
        .create(&params, &template)
        .await
        .context("cannot create the template")?;
    let pool = SandboxWarmPool::new(
        POOL,
        SandboxWarmPoolSpec {
            replicas: Some(i32::try_from(options.pool).unwrap_or(i32::MAX)),
            sandbox_template_ref: SandboxTemplateRef {
                name: TEMPLATE.to_owned(),
            },
            update_strategy: None,
        },
    );
    Api::namespaced(client.clone(), namespace)
        .create(&params, &pool)
        .await
        .map(drop)
        .context("cannot create the pool")
}

/// Waits until every sandbox of the pool is Ready.
pub(super) async fn wait_for_pool(client: &Client, options: &Options) -> anyhow::Result<()> {
    let pools = Api::<SandboxWarmPool>::namespaced(client.clone(), &options.namespace);
    let started = Instant::now();
    let mut ready = 0;
    while ready < options.pool {
        ensure!(
            started.elapsed() < POOL_DEADLINE,
            "the pool did not become ready: {ready} of {} sandboxes after {POOL_DEADLINE:?}",
            options.pool
        );
        tokio::time::sleep(Duration::from_millis(20)).await;
        let pool = pools.get(POOL).await.context("cannot read the pool")?;
        ready = pool
            .status
            .and_then(|status| usize::try_from(status.ready_replicas).ok())
            .unwrap_or(0);
    }
    Ok(())
}

//! How fast claims are met: `agent-sandbox bench claims`.
//!
//! The benchmark runs the controllers against whatever API server its client speaks to, with a node that marks every pod Ready at
//! once, so that what it measures is the controllers and the API server. It reports figures and judges none but one, the number of
//! writes: budgets of time belong to those who know the machine.

mod arrivals;
mod load;
mod node;
mod process;
mod reconcile;
mod report;
mod requests;

use std::sync::Arc;
use std::time::{Duration, Instant};

use api::sandbox::PodTemplate;
use api::template::SandboxTemplateRef;
use api::{Sandbox, SandboxTemplate, SandboxTemplateSpec, SandboxWarmPool, SandboxWarmPoolSpec};
use k8s_openapi::api::core::v1::{Container, PodSpec};
use kube::api::{ListParams, ObjectList, PostParams};
use kube::{Api, Client, Resource};
use tokio_util::sync::CancellationToken;

pub use node::mark_pods_ready;
pub use process::{cpu_time, resident_bytes};
pub use reconcile::reconciles;
pub use report::{Latencies, Phase, Report, Resident, Used};
pub use requests::Writes;

use crate::runtime::Parts;
use crate::slim::Slim;
use crate::{Config, assemble};
use arrivals::Arrivals;
use load::{Claimant, Met};

const TEMPLATE: &str = "bench";
const POOL: &str = "bench";
/// How long a pool may take to fill.
const POOL_DEADLINE: Duration = Duration::from_secs(300);
/// How long the API server must have been asked for nothing to count as quiet.
const QUIET: Duration = Duration::from_millis(100);

/// Where the controllers run that are measured.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Controllers {
    /// In this process, beside everything else.
    Here,
    /// In a process of their own, already started, which is told apart in the figures.
    InProcess(u32),
}

impl Controllers {
    fn process(self) -> Option<String> {
        match self {
            Self::Here => None,
            Self::InProcess(id) => Some(id.to_string()),
        }
    }
}

/// What to measure.
#[derive(Clone, Debug)]
pub struct Options {
    pub controllers: Controllers,
    pub namespace: String,
    /// How many sandboxes are warm before each way of making claims.
    pub pool: usize,
    /// How many claims are made one at a time.
    pub sequential: usize,
    /// How many claims are made all at once.
    pub at_once: usize,
    /// How many claims are made by clients who each wait for one before they ask for the next.
    pub sustained: usize,
    /// How many such clients there are.
    pub clients: usize,
    /// How many claims are made at a steady rate.
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

/// Why nothing could be measured.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error("cannot {what}")]
    Request {
        what: &'static str,
        #[source]
        source: kube::Error,
    },
    #[error("the pool did not become ready: {ready} of {wanted} sandboxes after {after:?}")]
    PoolNotReady {
        ready: usize,
        wanted: usize,
        after: Duration,
    },
    #[error("claim {name:?} did not become Ready within {after:?}")]
    ClaimNotReady { name: String, after: Duration },
}

/// Measures how fast claims are met.
pub async fn claims(client: Client, options: &Options) -> Result<Report, Error> {
    let shutdown = CancellationToken::new();
    let claimant = Claimant {
        client: client.clone(),
        namespace: options.namespace.clone(),
        arrivals: Arrivals::default(),
    };
    let controllers = run_controllers(&client, options.controllers, shutdown.clone());
    let mut tasks = tokio::task::JoinSet::new();
    tasks.spawn(node::mark_pods_ready(client.clone()));
    let arrivals = claimant.arrivals.clone();
    tasks.spawn(arrivals.follow(client, options.namespace.clone()));
    let report = measure(&claimant, options).await;
    shutdown.cancel();
    if let Err(error) = controllers.await {
        std::panic::resume_unwind(error.into_panic());
    }
    // The node and the watch have no end of their own.
    tasks.shutdown().await;
    report
}

/// Runs the controllers until `shutdown`, unless another process does.
fn run_controllers(
    client: &Client,
    controllers: Controllers,
    shutdown: CancellationToken,
) -> tokio::task::JoinHandle<()> {
    let config = Config {
        extensions: true,
        ..Config::default()
    };
    let parts = Parts::new(client.clone(), config);
    tokio::spawn(async move {
        if controllers == Controllers::Here {
            let (never, lead) = (CancellationToken::new(), std::future::ready(()));
            assemble(parts).run(shutdown, never, || {}, lead).await;
        }
    })
}

async fn measure(claimant: &Claimant, options: &Options) -> Result<Report, Error> {
    let started = Instant::now();
    make_pool(&claimant.client, options).await?;
    wait_for_pool(&claimant.client, options).await?;
    let controllers = options.controllers.process();
    let resident = || Resident {
        here: resident_bytes("self"),
        controllers: controllers.as_deref().and_then(resident_bytes),
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
    /// Makes claims in one way, and waits until their traces and the pool have settled. Nothing if there were none to make.
    async fn phase(
        &self,
        name: &str,
        load: impl Future<Output = Result<Met, Error>>,
    ) -> Result<Option<Phase>, Error> {
        let client = &self.claimant.client;
        let controllers = self.options.controllers.process();
        let used = || Used {
            here: cpu_time("self"),
            controllers: controllers.as_deref().map(cpu_time),
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

/// Waits until the API server is asked to change nothing for a while.
async fn quiet(client: &Client) -> Result<Writes, Error> {
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

async fn so_far(client: &Client) -> Result<Writes, Error> {
    Writes::so_far(client)
        .await
        .map_err(|source| request("read the API server's metrics", source))
}

/// How long it takes to list all sandboxes: until the answer is there, and to decode it.
async fn list(client: &Client, options: &Options) -> Result<(Duration, Duration), Error> {
    let list = kube::core::Request::new(Sandbox::url_path(&(), Some(&options.namespace)))
        .list(&ListParams::default())
        .expect("a list without options is well formed");
    let started = Instant::now();
    let answer = client
        .request_text(list)
        .await
        .map_err(|source| request("list the sandboxes", source))?;
    let listed = started.elapsed();
    let started = Instant::now();
    let decoded = serde_json::from_str::<ObjectList<Slim<Sandbox>>>(&answer);
    let decoded =
        decoded.map_err(|error| request("decode the list", kube::Error::SerdeError(error)))?;
    let took = started.elapsed();
    drop(decoded);
    Ok((listed, took))
}

async fn make_pool(client: &Client, options: &Options) -> Result<(), Error> {
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
        .map_err(|source| request("create the template", source))?;
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
        .map_err(|source| request("create the pool", source))
}

/// Waits until every sandbox of the pool is Ready.
async fn wait_for_pool(client: &Client, options: &Options) -> Result<(), Error> {
    let pools = Api::<SandboxWarmPool>::namespaced(client.clone(), &options.namespace);
    let started = Instant::now();
    let mut ready = 0;
    while ready < options.pool {
        if started.elapsed() > POOL_DEADLINE {
            return Err(Error::PoolNotReady {
                ready,
                wanted: options.pool,
                after: POOL_DEADLINE,
            });
        }
        tokio::time::sleep(Duration::from_millis(20)).await;
        let pool = pools
            .get(POOL)
            .await
            .map_err(|source| request("look at the pool", source))?;
        ready = pool
            .status
            .and_then(|status| usize::try_from(status.ready_replicas).ok())
            .unwrap_or(0);
    }
    Ok(())
}

fn request(what: &'static str, source: kube::Error) -> Error {
    Error::Request { what, source }
}

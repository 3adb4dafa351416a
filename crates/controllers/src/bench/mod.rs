//! How fast claims are met: `agent-sandbox bench claims`.
//!
//! The benchmark runs the controllers against whatever API server its client speaks to, with a node that marks every pod Ready at
//! once, so that what it measures is the controllers and the API server. It reports figures and judges none: budgets belong to
//! those who know the machine.

mod node;
mod report;

use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use api::claim::WarmPoolRef;
use api::conditions::{self, ConditionType};
use api::sandbox::PodTemplate;
use api::template::SandboxTemplateRef;
use api::{
    SandboxClaim, SandboxClaimSpec, SandboxTemplate, SandboxTemplateSpec, SandboxWarmPool,
    SandboxWarmPoolSpec,
};
use futures::{StreamExt, stream};
use k8s_openapi::api::core::v1::{Container, PodSpec};
use kube::api::PostParams;
use kube::runtime::watcher::{self, Event, watcher};
use kube::{Api, Client, ResourceExt};
use tokio::sync::Notify;
use tokio_util::sync::CancellationToken;

pub use node::mark_pods_ready;
pub use report::{Latencies, Report};

use crate::instrumentation::{Instrumentation, RequestReport, Verb};
use crate::runtime::Parts;
use crate::{Config, assemble};

const TEMPLATE: &str = "bench";
const POOL: &str = "bench";

/// What to measure.
#[derive(Clone, Debug)]
pub struct Options {
    pub namespace: String,
    /// How many sandboxes are warm before the first claim.
    pub pool: usize,
    /// How many claims are made one at a time.
    pub sequential: usize,
    /// How many claims are made after that, all at once.
    pub claims: usize,
    /// How many of those are being created at a time.
    pub concurrency: usize,
}

impl Default for Options {
    fn default() -> Self {
        Self {
            namespace: "default".to_owned(),
            pool: 1_000,
            sequential: 100,
            claims: 500,
            concurrency: 64,
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
    #[error("{missing} of {made} claims did not become Ready within {after:?}")]
    ClaimsNotReady {
        missing: usize,
        made: usize,
        after: Duration,
    },
}

/// Counts what the controllers send to the API server.
#[derive(Debug, Default)]
struct Counter {
    writes: AtomicU64,
    by_kind: Mutex<HashMap<(String, Verb), u64>>,
}

impl Counter {
    fn writes(&self) -> HashMap<(String, Verb), u64> {
        self.by_kind
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .clone()
    }
}

impl Instrumentation for Counter {
    fn requested(&self, report: &RequestReport<'_>) {
        if report.verb != Verb::Get {
            self.writes.fetch_add(1, Ordering::Relaxed);
        }
        let mut by_kind = self.by_kind.lock().unwrap_or_else(PoisonError::into_inner);
        *by_kind
            .entry((report.kind.to_owned(), report.verb))
            .or_default() += 1;
    }
}

/// When each claim was seen to be Ready.
#[derive(Debug, Default)]
struct Arrivals {
    at: Mutex<HashMap<String, Instant>>,
    changed: Notify,
}

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
                let mut at = self.at.lock().unwrap_or_else(PoisonError::into_inner);
                at.entry(claim.name_any()).or_insert_with(Instant::now);
                drop(at);
                self.changed.notify_waiters();
            }
        }
    }

    fn of(&self, name: &str) -> Option<Instant> {
        let at = self.at.lock().unwrap_or_else(PoisonError::into_inner);
        at.get(name).copied()
    }

    /// Waits until all of these have arrived; how many have not when the time is up.
    async fn wait_for(&self, names: &[String], deadline: Duration) -> usize {
        let missing = || names.iter().filter(|name| self.of(name).is_none()).count();
        let until = tokio::time::Instant::now() + deadline;
        loop {
            let changed = self.changed.notified();
            let left = missing();
            if left == 0 || tokio::time::timeout_at(until, changed).await.is_err() {
                return left;
            }
        }
    }
}

/// Measures how fast claims are met.
pub async fn claims(client: Client, options: &Options) -> Result<Report, Error> {
    let shutdown = CancellationToken::new();
    let counter = Arc::new(Counter::default());
    let runtime = assemble(Parts {
        instrumentation: counter.clone(),
        ..Parts::new(
            client.clone(),
            Config {
                extensions: true,
                ..Config::default()
            },
        )
    });
    let arrivals = Arc::new(Arrivals::default());
    let mut tasks = tokio::task::JoinSet::new();
    tasks.spawn(runtime.run(
        shutdown.clone(),
        CancellationToken::new(),
        || {},
        std::future::ready(()),
    ));
    tasks.spawn(node::mark_pods_ready(client.clone()));
    tasks.spawn(
        arrivals
            .clone()
            .follow(client.clone(), options.namespace.clone()),
    );
    let report = measure(&client, options, &counter, &arrivals).await;
    shutdown.cancel();
    // The controllers end by themselves; the node and the watch have no end.
    let _ = tasks.join_next().await;
    tasks.shutdown().await;
    report
}

async fn measure(
    client: &Client,
    options: &Options,
    counter: &Counter,
    arrivals: &Arrivals,
) -> Result<Report, Error> {
    let started = Instant::now();
    fill_pool(client, options).await?;
    let filled_in = started.elapsed();
    let mut report = Report {
        pool: options.pool,
        filled_in,
        resident_when_full: report::resident_bytes(),
        ..Report::default()
    };
    let names: Vec<String> = (0..options.sequential)
        .map(|index| format!("one-{index}"))
        .collect();
    for name in &names {
        let asked = Instant::now();
        create_claim(client, options, name).await?;
        wait(arrivals, std::slice::from_ref(name)).await?;
        report
            .sequential
            .extend(arrivals.of(name).map(|ready| ready - asked));
    }
    let before = (counter.writes.load(Ordering::Relaxed), report::cpu_time());
    let by_kind = counter.writes();
    let started = Instant::now();
    let names: Vec<String> = (0..options.claims)
        .map(|index| format!("burst-{index}"))
        .collect();
    let asked: Vec<(String, Result<Instant, Error>)> = stream::iter(names.clone())
        .map(|name| {
            let (client, options) = (client.clone(), options.clone());
            // Each on a task of its own, as clients are.
            let task = tokio::spawn(async move {
                let asked = Instant::now();
                let outcome = create_claim(&client, &options, &name).await;
                (name, outcome.map(|()| asked))
            });
            async move {
                task.await
                    .unwrap_or_else(|error| panic!("a client ended: {error}"))
            }
        })
        .buffer_unordered(options.concurrency)
        .collect()
        .await;
    wait(arrivals, &names).await?;
    let mut last = started;
    for (name, asked) in asked {
        let asked = asked?;
        if let Some(ready) = arrivals.of(&name) {
            report.burst.extend(Some(ready - asked));
            last = last.max(ready);
        }
    }
    report.burst_took = last - started;
    report.burst_claims = options.claims;
    report.burst_cpu = report::cpu_time().saturating_sub(before.1);
    report.burst_writes = counter.writes.load(Ordering::Relaxed) - before.0;
    report.burst_writes_by_kind = report::difference(&by_kind, &counter.writes());
    report.resident_at_end = report::resident_bytes();
    Ok(report)
}

async fn wait(arrivals: &Arrivals, names: &[String]) -> Result<(), Error> {
    const DEADLINE: Duration = Duration::from_secs(120);
    match arrivals.wait_for(names, DEADLINE).await {
        0 => Ok(()),
        missing => Err(Error::ClaimsNotReady {
            missing,
            made: names.len(),
            after: DEADLINE,
        }),
    }
}

async fn fill_pool(client: &Client, options: &Options) -> Result<(), Error> {
    const DEADLINE: Duration = Duration::from_secs(300);
    let params = PostParams::default();
    let namespace = &options.namespace;
    let container = Container {
        name: "main".to_owned(),
        image: Some("bench".to_owned()),
        ..Container::default()
    };
    let pod_template = PodTemplate {
        spec: PodSpec {
            containers: vec![container],
            ..PodSpec::default()
        },
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
    let pools = Api::<SandboxWarmPool>::namespaced(client.clone(), namespace);
    pools
        .create(&params, &pool)
        .await
        .map_err(|source| request("create the pool", source))?;
    let started = Instant::now();
    let mut ready = 0;
    while ready < options.pool {
        if started.elapsed() > DEADLINE {
            return Err(Error::PoolNotReady {
                ready,
                wanted: options.pool,
                after: DEADLINE,
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

async fn create_claim(client: &Client, options: &Options, name: &str) -> Result<(), Error> {
    let claim = SandboxClaim::new(
        name,
        SandboxClaimSpec {
            warm_pool_ref: Some(WarmPoolRef {
                name: POOL.to_owned(),
            }),
            ..SandboxClaimSpec::default()
        },
    );
    Api::namespaced(client.clone(), &options.namespace)
        .create(&PostParams::default(), &claim)
        .await
        .map(drop)
        .map_err(|source| request("create a claim", source))
}

fn request(what: &'static str, source: kube::Error) -> Error {
    Error::Request { what, source }
}

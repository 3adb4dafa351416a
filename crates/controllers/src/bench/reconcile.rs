//! Whether a reconcile costs the same however many objects the caches hold.
//!
//! Sandboxes that are suspended fill the caches and need nothing; beside them claims are made one at a time on a small pool, and
//! every reconcile of these is timed.

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use api::sandbox::PodTemplate;
use api::{Sandbox, SandboxSpec};
use futures::{StreamExt, TryStreamExt, stream};
use k8s_openapi::api::core::v1::{Container, PodSpec};
use kube::api::PostParams;
use kube::{Api, Client};
use tokio_util::sync::CancellationToken;

use super::arrivals::Arrivals;
use super::load::Claimant;
use super::report::Latencies;
use super::{Error, Options, make_pool, node, quiet, request, wait_for_pool};
use crate::instrumentation::{Instrumentation, ReconcileResult};
use crate::runtime::Parts;
use crate::{Config, assemble};

/// How many objects are made at a time.
const CONCURRENCY: usize = 64;

/// How long reconciles of each controller took.
#[derive(Debug, Default)]
struct Stopwatch {
    runs: AtomicBool,
    took: Mutex<HashMap<&'static str, Latencies>>,
}

impl Instrumentation for Stopwatch {
    fn reconcile_finished(
        &self,
        controller: &'static str,
        took: Duration,
        _result: ReconcileResult,
    ) {
        if self.runs.load(Ordering::Relaxed) {
            let mut all = self.took.lock().unwrap_or_else(PoisonError::into_inner);
            all.entry(controller).or_default().extend([took]);
        }
    }
}

/// How long reconciles took, by controller, with so many suspended sandboxes in the caches.
pub async fn reconciles(
    client: Client,
    cached: usize,
    claims: usize,
) -> Result<HashMap<&'static str, Latencies>, Error> {
    let options = Options {
        pool: claims,
        ..Options::default()
    };
    suspended_sandboxes(&client, &options.namespace, cached).await?;
    let stopwatch = Arc::new(Stopwatch::default());
    let config = Config {
        extensions: true,
        ..Config::default()
    };
    let runtime = assemble(Parts {
        instrumentation: stopwatch.clone(),
        ..Parts::new(client.clone(), config)
    });
    let claimant = Claimant {
        client: client.clone(),
        namespace: options.namespace.clone(),
        arrivals: Arrivals::default(),
    };
    let (shutdown, never) = (CancellationToken::new(), CancellationToken::new());
    let running = tokio::spawn(runtime.run(shutdown.clone(), never, || {}, std::future::ready(())));
    let mut tasks = tokio::task::JoinSet::new();
    tasks.spawn(node::mark_pods_ready(client.clone()));
    let arrivals = claimant.arrivals.clone();
    tasks.spawn(arrivals.follow(client, options.namespace.clone()));
    let measured = measure(&claimant, &options, claims, &stopwatch).await;
    shutdown.cancel();
    if let Err(error) = running.await {
        std::panic::resume_unwind(error.into_panic());
    }
    tasks.shutdown().await;
    measured?;
    let mut took = stopwatch
        .took
        .lock()
        .unwrap_or_else(PoisonError::into_inner);
    Ok(std::mem::take(&mut *took))
}

async fn measure(
    claimant: &Claimant,
    options: &Options,
    claims: usize,
    stopwatch: &Stopwatch,
) -> Result<(), Error> {
    make_pool(&claimant.client, options).await?;
    wait_for_pool(&claimant.client, options).await?;
    quiet(&claimant.client).await?;
    stopwatch.runs.store(true, Ordering::Relaxed);
    claimant.one_by_one(claims).await?;
    stopwatch.runs.store(false, Ordering::Relaxed);
    Ok(())
}

async fn suspended_sandboxes(client: &Client, namespace: &str, count: usize) -> Result<(), Error> {
    let container = Container {
        name: "main".to_owned(),
        image: Some("bench".to_owned()),
        ..Container::default()
    };
    let spec = SandboxSpec {
        pod_template: PodTemplate {
            spec: Arc::new(PodSpec {
                containers: vec![container],
                ..PodSpec::default()
            }),
            ..PodTemplate::default()
        },
        replicas: Some(0),
        ..SandboxSpec::default()
    };
    let sandboxes = Api::<Sandbox>::namespaced(client.clone(), namespace);
    stream::iter(0..count)
        .map(|index| {
            let sandbox = Sandbox::new(&format!("suspended-{index}"), spec.clone());
            let sandboxes = sandboxes.clone();
            async move { sandboxes.create(&PostParams::default(), &sandbox).await }
        })
        .buffer_unordered(CONCURRENCY)
        .try_for_each(|_| std::future::ready(Ok(())))
        .await
        .map_err(|source| request("create a sandbox", source))
}

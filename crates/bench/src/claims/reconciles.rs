//! `bench reconcile`: whether the duration of a reconcile depends on the number of objects in the caches.
//!
//! Suspended sandboxes fill the caches. Then claims are created one at a time on a small pool, and the duration of every reconcile is
//! recorded.

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use anyhow::Context;
use api::sandbox::PodTemplate;
use api::{Sandbox, SandboxSpec};
use controllers::Parts;
use controllers::instrumentation::{Instrumentation, ReconcileResult};
use futures::{StreamExt, TryStreamExt, stream};
use k8s_openapi::api::core::v1::{Container, PodSpec};
use kube::api::PostParams;
use kube::{Api, Client};

use super::load::Claimant;
use super::measurement::{Options, create_pool, quiet, wait_for_pool};
use super::report::Latencies;
use crate::fake_cluster::{self, FakeCluster};

/// Objects created at a time.
const CONCURRENCY: usize = 64;

/// Records the duration of reconciles, by controller, while it runs.
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

/// The durations of reconciles, by controller, with `cached` suspended sandboxes in the caches.
pub async fn reconciles(
    client: Client,
    cached: usize,
    claims: usize,
) -> anyhow::Result<HashMap<&'static str, Latencies>> {
    let options = Options {
        pool: claims,
        ..Options::default()
    };
    suspended_sandboxes(&client, &options.namespace, cached).await?;
    let stopwatch = Arc::new(Stopwatch::default());
    let cluster = FakeCluster::start(Parts {
        instrumentation: stopwatch.clone(),
        ..Parts::new(client.clone(), fake_cluster::with_extensions())
    });
    let claimant = Claimant::start(client, &options.namespace);
    let measured = measure(&claimant, &options, claims, &stopwatch).await;
    cluster.stop().await?;
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
) -> anyhow::Result<()> {
    create_pool(&claimant.client, options).await?;
    wait_for_pool(&claimant.client, options).await?;
    quiet(&claimant.client).await?;
    stopwatch.runs.store(true, Ordering::Relaxed);
    claimant.one_by_one(claims).await?;
    stopwatch.runs.store(false, Ordering::Relaxed);
    Ok(())
}

async fn suspended_sandboxes(client: &Client, namespace: &str, count: usize) -> anyhow::Result<()> {
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
        .context("cannot create a sandbox")
}

//! Pods of a measurement: creation, deletion, and the distribution of their times.

use std::time::{Duration, Instant};

use anyhow::bail;
use futures::StreamExt;
use k8s_openapi::api::core::v1::Pod;
use kube::api::{DeleteParams, PostParams, WatchEvent, WatchParams};
use kube::{Api, ResourceExt};
use serde_json::json;

/// The distribution of durations, in milliseconds.
#[derive(Debug, Clone, Copy)]
#[expect(clippy::struct_field_names, reason = "the unit is a part of each name")]
pub struct Distribution {
    pub p50_ms: f64,
    pub p99_ms: f64,
    pub maximum_ms: f64,
}

impl Distribution {
    pub fn of(mut sample: Vec<Duration>) -> Self {
        sample.sort();
        let at = |numerator: usize| {
            let index = (sample.len().saturating_sub(1)) * numerator / 100;
            sample
                .get(index)
                .map_or(0.0, |duration| duration.as_secs_f64() * 1000.0)
        };
        Self {
            p50_ms: at(50),
            p99_ms: at(99),
            maximum_ms: at(100),
        }
    }
}

/// A started pod.
pub struct Started {
    pub pod: Pod,
    /// From the creation until its status was Running.
    pub running_after: Duration,
    /// From the creation until it was Ready.
    pub ready_after: Duration,
}

/// Creates a pod and waits until it is Ready.
pub async fn start_pod(pods: &Api<Pod>, name: &str) -> anyhow::Result<Started> {
    let object = json!({"metadata": {"name": name}, "spec": {"terminationGracePeriodSeconds": 1, "containers": [{"name": "c",
        "image": "host", "readinessProbe": {"httpGet": {"path": "/", "port": 8888}, "periodSeconds": 1}}]}});
    let object: Pod = serde_json::from_value(object)?;
    let began = Instant::now();
    let created = pods.create(&PostParams::default(), &object).await?;
    let parameters = WatchParams::default()
        .fields(&format!("metadata.name={name}"))
        .timeout(30);
    let version = created.resource_version().unwrap_or_default();
    let mut events = std::pin::pin!(pods.watch(&parameters, &version).await?);
    let mut running = None;
    while let Some(event) = events.next().await {
        let WatchEvent::Modified(pod) = event? else {
            continue;
        };
        let status = pod.status.clone().unwrap_or_default();
        if status.phase.as_deref() == Some("Running") {
            running.get_or_insert_with(|| began.elapsed());
        }
        let conditions = status.conditions.iter().flatten();
        if conditions
            .into_iter()
            .any(|condition| condition.type_ == "Ready" && condition.status == "True")
        {
            let ready = began.elapsed();
            return Ok(Started {
                pod,
                running_after: running.unwrap_or(ready),
                ready_after: ready,
            });
        }
    }
    bail!("pod {name} did not become ready")
}

/// Deletes a pod and waits until it is gone.
pub async fn remove_pod(pods: &Api<Pod>, name: &str) -> anyhow::Result<()> {
    pods.delete(name, &DeleteParams::default()).await?;
    while pods.get_opt(name).await?.is_some() {
        tokio::time::sleep(Duration::from_millis(2)).await;
    }
    Ok(())
}

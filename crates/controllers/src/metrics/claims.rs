//! How claims get their sandboxes: how many, from where, how fast.

use std::time::Duration;

use prometheus::{HistogramOpts, HistogramVec, IntCounterVec, Opts};

use super::{Metrics, WELL_FORMED};
use crate::instrumentation::{ClaimReadiness, Launch, Provisioning};

/// Histogram buckets for claims in milliseconds. The first row is not upstream's: a warm claim takes a few milliseconds.
const CLAIM_BUCKETS: &[f64] = &[
    1.0, 2.0, 3.0, 5.0, 7.5, 10.0, 15.0, 20.0, 30.0, 50.0, 75.0, //
    100.0, 250.0, 500.0, 750.0, 1_000.0, 1_250.0, 1_500.0, 2_000.0, 2_500.0, 5_000.0, 10_000.0,
    30_000.0, 60_000.0, 120_000.0, 240_000.0,
];
/// Histogram buckets for sandboxes, which may have to wait for an image.
const SANDBOX_BUCKETS: &[f64] = &[
    5.0, 10.0, 15.0, 20.0, 30.0, 40.0, //
    50.0, 100.0, 250.0, 500.0, 1_000.0, 2_500.0, 5_000.0, 10_000.0, 30_000.0, 60_000.0, 120_000.0,
    240_000.0, 300_000.0, 600_000.0,
];
/// The template of a sandbox that names none.
const UNKNOWN: &str = "unknown";
/// The pool of a sandbox that came from none.
const NO_POOL: &str = "none";

#[derive(Debug)]
pub(super) struct Claims {
    since_admission: HistogramVec,
    since_request: HistogramVec,
    since_observation: HistogramVec,
    sandbox_creation: HistogramVec,
    created: IntCounterVec,
    warm_misses: IntCounterVec,
}

impl Claims {
    pub fn new() -> Self {
        let claim = |name: &str, help: &str| {
            let options = HistogramOpts::new(name, help).buckets(CLAIM_BUCKETS.to_vec());
            HistogramVec::new(options, &["launch_type", "sandbox_template"]).expect(WELL_FORMED)
        };
        Self {
            since_admission: claim(
                "agent_sandbox_claim_startup_latency_ms",
                "End-to-end latency from SandboxClaim creation to Sandbox Ready state in milliseconds.",
            ),
            since_request: claim(
                "agent_sandbox_client_claim_startup_latency_ms",
                "Latency from the client's request for the SandboxClaim, by the client's clock, to Sandbox Ready state in \
                 milliseconds.",
            ),
            since_observation: claim(
                "agent_sandbox_claim_controller_startup_latency_ms",
                "Latency from controller first observed SandboxClaim to Sandbox Ready state in milliseconds.",
            ),
            sandbox_creation: HistogramVec::new(
                HistogramOpts::new(
                    "agent_sandbox_creation_latency_ms",
                    "Latency from Sandbox creation to Pod Ready state in milliseconds. For warm launches, this measures \
                     controller synchronization overhead since the Pod is pre-provisioned.",
                )
                .buckets(SANDBOX_BUCKETS.to_vec()),
                &["namespace", "launch_type", "sandbox_template"],
            )
            .expect(WELL_FORMED),
            created: IntCounterVec::new(
                Opts::new(
                    "agent_sandbox_claim_creation_total",
                    "Total number of SandboxClaims created, labeled by namespace, sandbox template, launch type, warmpool \
                     name, and pod condition.",
                ),
                &[
                    "namespace",
                    "sandbox_template",
                    "launch_type",
                    "warmpool_name",
                    "pod_condition",
                ],
            )
            .expect(WELL_FORMED),
            warm_misses: IntCounterVec::new(
                Opts::new(
                    "agent_sandbox_claim_warm_misses_total",
                    "Total number of SandboxClaims that asked for a warm sandbox, found none and started their own.",
                ),
                &["namespace", "sandbox_template"],
            )
            .expect(WELL_FORMED),
        }
    }

    pub fn register(&self, metrics: &Metrics) {
        for histogram in [
            &self.since_admission,
            &self.since_request,
            &self.since_observation,
            &self.sandbox_creation,
        ] {
            metrics.register(histogram.clone());
        }
        metrics.register(self.created.clone());
        metrics.register(self.warm_misses.clone());
    }

    pub fn provisioned(&self, provisioning: &Provisioning<'_>) {
        let condition = if provisioning.was_ready {
            "ready"
        } else {
            "not_ready"
        };
        self.created
            .with_label_values(&[
                provisioning.namespace,
                known(provisioning.template),
                provisioning.launch.as_str(),
                provisioning.pool.unwrap_or(NO_POOL),
                condition,
            ])
            .inc();
        if provisioning.wanted_warm && provisioning.launch == Launch::Cold {
            self.warm_misses
                .with_label_values(&[provisioning.namespace, known(provisioning.template)])
                .inc();
        }
    }

    pub fn ready(&self, readiness: &ClaimReadiness<'_>) {
        let template = known(readiness.template);
        let labels = [readiness.launch.as_str(), template];
        for (histogram, latency) in [
            (&self.since_admission, readiness.since_admission),
            (&self.since_request, readiness.since_request),
            (&self.since_observation, readiness.since_first_observed),
        ] {
            if let Some(latency) = latency {
                histogram
                    .with_label_values(&labels)
                    .observe(milliseconds(latency));
            }
        }
        if let Some(latency) = readiness.sandbox_creation {
            self.sandbox_creation
                .with_label_values(&[readiness.namespace, labels[0], template])
                .observe(milliseconds(latency));
        }
    }
}

fn known(template: &str) -> &str {
    if template.is_empty() {
        UNKNOWN
    } else {
        template
    }
}

fn milliseconds(latency: Duration) -> f64 {
    latency.as_secs_f64() * 1_000.0
}

//! The output of a scrape.

use api::SandboxSpec;
use api::conditions::Reason;
use api::labels;
use proptest::prelude::*;
use serde_json::json;

use super::*;
use crate::instrumentation::{Launch, Verb};

fn scrape(metrics: &Metrics) -> String {
    metrics.exposition()
}

fn assert_lines(text: &str, lines: &[&str]) {
    for line in lines {
        assert!(
            text.lines().any(|found| found == *line),
            "{line} is not in\n{text}"
        );
    }
}

#[test]
fn dashboards_find_the_names_they_know() {
    let metrics = Metrics::new("api:6443", BuildInfo::UNKNOWN);
    metrics.controller_registered("sandbox", 7);
    metrics.queue_added("sandbox", 1);
    metrics.reconcile_started("sandbox", Duration::from_millis(1), 0);
    let took = Duration::from_millis(2);
    metrics.reconcile_finished("sandbox", took, ReconcileResult::Panic);
    metrics.requested(&RequestReport {
        kind: "Pod",
        verb: Verb::Create,
        code: Some(409),
        took,
    });
    metrics.requested(&RequestReport {
        kind: "Pod",
        verb: Verb::Get,
        code: None,
        took,
    });
    metrics.set_leader("a-lease", true);
    assert_lines(
        &scrape(&metrics),
        &[
            "# HELP controller_runtime_reconcile_total Total number of reconciliations per controller",
            "# TYPE controller_runtime_reconcile_total counter",
            r#"workqueue_adds_total{controller="sandbox",name="sandbox"} 1"#,
            r#"workqueue_retries_total{controller="sandbox",name="sandbox"} 1"#,
            r#"workqueue_depth{controller="sandbox",name="sandbox"} 0"#,
            r#"workqueue_queue_duration_seconds_bucket{controller="sandbox",name="sandbox",le="0.001"} 1"#,
            r#"controller_runtime_reconcile_total{controller="sandbox",result="error"} 1"#,
            r#"controller_runtime_reconcile_total{controller="sandbox",result="success"} 0"#,
            r#"controller_runtime_reconcile_errors_total{controller="sandbox"} 1"#,
            r#"controller_runtime_reconcile_panics_total{controller="sandbox"} 1"#,
            r#"controller_runtime_active_workers{controller="sandbox"} 0"#,
            r#"controller_runtime_max_concurrent_reconciles{controller="sandbox"} 7"#,
            r#"controller_runtime_reconcile_time_seconds_count{controller="sandbox"} 1"#,
            r#"controller_runtime_reconcile_time_seconds_bucket{controller="sandbox",le="0.0025"} 1"#,
            r#"rest_client_requests_total{code="409",host="api:6443",method="POST"} 1"#,
            r#"rest_client_requests_total{code="<error>",host="api:6443",method="GET"} 1"#,
            r#"agent_sandbox_api_requests_total{kind="Pod",outcome="error",verb="create"} 1"#,
            r#"leader_election_master_status{name="a-lease"} 1"#,
        ],
    );
}

#[test]
fn structures_of_the_same_labels_are_counted_together() {
    let metrics = Metrics::new("", BuildInfo::UNKNOWN);
    metrics.count_entries("cache", "SandboxClaim", Box::new(|| 3));
    metrics.count_entries("cache", "SandboxClaim", Box::new(|| 0));
    metrics.count_entries("cache", "Pod", Box::new(|| 2));
    let expected = [
        r#"agent_sandbox_controller_entries{of="SandboxClaim",structure="cache"} 3"#,
        r#"agent_sandbox_controller_entries{of="Pod",structure="cache"} 2"#,
    ];
    assert_lines(&scrape(&metrics), &expected);
    assert_lines(&scrape(&metrics), &expected);
}

#[test]
fn the_build_is_in_the_labels_of_a_constant_gauge() {
    let text = scrape(&Metrics::new("", BuildInfo::UNKNOWN));
    let platform = format!("{}/{}", std::env::consts::OS, std::env::consts::ARCH);
    let line = format!(
        "agent_sandbox_build_info{{build_date=\"{}\",compiler=\"rustc {}\",git_commit=\"{}\",git_version=\"v{}\",\
         go_version=\"none\",platform=\"{platform}\"}} 1",
        BuildInfo::UNKNOWN.build_date,
        env!("CARGO_PKG_RUST_VERSION"),
        BuildInfo::UNKNOWN.git_commit,
        env!("CARGO_PKG_VERSION"),
    );
    assert_lines(
        &text,
        &[
            "# HELP agent_sandbox_build_info Agent sandbox controller build metadata exposed as labels with a constant value of 1.",
            "# TYPE agent_sandbox_build_info gauge",
            &line,
        ],
    );
}

#[test]
fn latencies_fall_into_buckets_that_tell_them_apart() {
    let metrics = Metrics::new("", BuildInfo::UNKNOWN);
    let readiness = ClaimReadiness {
        namespace: "team",
        template: "python",
        launch: Launch::Warm,
        since_admission: Some(Duration::from_millis(4)),
        since_request: None,
        since_first_observed: Some(Duration::from_micros(900)),
        sandbox_creation: Some(Duration::from_secs(1)),
    };
    metrics.claim_ready(&readiness);
    let text = scrape(&metrics);
    assert_lines(
        &text,
        &[
            r#"agent_sandbox_claim_startup_latency_ms_bucket{launch_type="warm",sandbox_template="python",le="3"} 0"#,
            r#"agent_sandbox_claim_startup_latency_ms_bucket{launch_type="warm",sandbox_template="python",le="5"} 1"#,
            r#"agent_sandbox_claim_startup_latency_ms_bucket{launch_type="warm",sandbox_template="python",le="240000"} 1"#,
            r#"agent_sandbox_claim_controller_startup_latency_ms_bucket{launch_type="warm",sandbox_template="python",le="1"} 1"#,
            r#"agent_sandbox_creation_latency_ms_bucket{launch_type="warm",namespace="team",sandbox_template="python",le="1000"} 1"#,
            r#"agent_sandbox_creation_latency_ms_count{launch_type="warm",namespace="team",sandbox_template="python"} 1"#,
        ],
    );
    assert!(
        !text.contains("agent_sandbox_client_claim_startup_latency_ms"),
        "an unknown latency is not recorded: {text}"
    );
}

#[test]
fn claims_are_counted_by_where_their_sandbox_came_from() {
    let metrics = Metrics::new("", BuildInfo::UNKNOWN);
    let warm = Provisioning {
        namespace: "team",
        template: "python",
        launch: Launch::Warm,
        pool: Some("fast"),
        was_ready: true,
        wanted_warm: true,
    };
    metrics.claim_provisioned(&warm);
    let cold = Provisioning {
        launch: Launch::Cold,
        pool: None,
        was_ready: false,
        ..warm
    };
    metrics.claim_provisioned(&cold);
    metrics.claim_provisioned(&Provisioning {
        template: "",
        wanted_warm: false,
        ..cold
    });
    assert_lines(
        &scrape(&metrics),
        &[
            r#"agent_sandbox_claim_creation_total{launch_type="warm",namespace="team",pod_condition="ready",sandbox_template="python",warmpool_name="fast"} 1"#,
            r#"agent_sandbox_claim_creation_total{launch_type="cold",namespace="team",pod_condition="not_ready",sandbox_template="unknown",warmpool_name="none"} 1"#,
            r#"agent_sandbox_claim_warm_misses_total{namespace="team",sandbox_template="python"} 1"#,
        ],
    );
    assert!(
        !scrape(&metrics).contains(r#"misses_total{namespace="team",sandbox_template="unknown"}"#),
        "a claim that asked to start cold has missed nothing"
    );
}

/// A sandbox with one of a few sets of labels.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Look {
    namespace: &'static str,
    ready: Option<(&'static str, &'static str)>,
    warm: bool,
    template: &'static str,
    owner: Option<(&'static str, &'static str)>,
}

impl Look {
    fn sandbox(&self) -> Sandbox {
        let mut sandbox = Sandbox::new("s", SandboxSpec::default());
        sandbox.metadata.namespace = Some(self.namespace.to_owned());
        let annotations = sandbox.metadata.annotations.get_or_insert_default();
        if self.warm {
            annotations.insert(labels::POD_NAME.into(), "s".into());
        }
        annotations.insert(labels::SANDBOX_TEMPLATE_REF.into(), self.template.into());
        if let Some((api_version, kind)) = self.owner {
            let owner = json!([{ "apiVersion": api_version, "kind": kind, "name": "o", "uid": "u", "controller": true }]);
            sandbox.metadata.owner_references = serde_json::from_value(owner).unwrap();
        }
        if let Some((status, reason)) = self.ready {
            let condition = json!({
                "type": "Ready", "status": status, "reason": reason, "message": "", "lastTransitionTime": "2026-11-16T00:00:00Z",
            });
            let status = json!({ "conditions": [condition] });
            sandbox.status = Some(serde_json::from_value(status).unwrap());
        }
        sandbox
    }

    /// The series that counts it, as specified.
    fn series(&self) -> String {
        let is_ready = self.ready.is_some_and(|(status, _)| status == "True");
        let has_expired = self
            .ready
            .is_some_and(|(_, reason)| reason == "SandboxExpired");
        let owner = match self.owner {
            Some((version, kind)) if version.starts_with("extensions.agents.x-k8s.io/") => kind,
            _ => "None",
        };
        format!(
            "agent_sandboxes{{expired=\"{has_expired}\",launch_type=\"{}\",namespace=\"{}\",owned_by=\"{owner}\",\
             ready_condition=\"{is_ready}\",sandbox_template=\"{}\"}}",
            if self.warm { "warm" } else { "cold" },
            self.namespace,
            if self.template.is_empty() {
                "unknown"
            } else {
                self.template
            },
        )
    }
}

fn looks() -> impl Strategy<Value = Look> {
    let ready = prop::sample::select(vec![
        None,
        Some(("True", Reason::DependenciesReady.as_str())),
        Some(("False", Reason::DependenciesNotReady.as_str())),
        Some(("False", Reason::SandboxExpired.as_str())),
    ]);
    let owner = prop::sample::select(vec![
        None,
        Some(("extensions.agents.x-k8s.io/v1beta1", "SandboxClaim")),
        Some(("extensions.agents.x-k8s.io/v1alpha1", "SandboxWarmPool")),
        Some(("apps/v1", "SandboxClaim")),
    ]);
    let namespace = prop::sample::select(vec!["default", "team"]);
    let template = prop::sample::select(vec!["", "python"]);
    (namespace, ready, any::<bool>(), template, owner).prop_map(
        |(namespace, ready, warm, template, owner)| Look {
            namespace,
            ready,
            warm,
            template,
            owner,
        },
    )
}

proptest! {
    /// After any changes of sandboxes, reported by two threads in any order, the counts equal a recount.
    #[test]
    fn the_counts_are_those_of_a_recount(
        steps in prop::collection::vec((0_usize..8, prop::option::of(looks())), 1..120),
        swaps in prop::collection::vec(any::<bool>(), 120),
    ) {
        let metrics = Metrics::new("", BuildInfo::UNKNOWN);
        let mut sandboxes: Vec<Option<Look>> = vec![None; 8];
        let mut changes = Vec::new();
        for (index, after) in steps {
            let before = std::mem::replace(&mut sandboxes[index], after.clone());
            changes.push((before, after));
        }
        for (index, swap) in swaps.iter().enumerate() {
            if *swap && index + 1 < changes.len() {
                changes.swap(index, index + 1);
            }
        }
        for (before, after) in &changes {
            let (before, after) = (before.as_ref().map(Look::sandbox), after.as_ref().map(Look::sandbox));
            metrics.sandboxes.count(before.as_ref(), after.as_ref());
        }
        let mut recount = std::collections::BTreeMap::<String, usize>::new();
        for look in sandboxes.iter().flatten() {
            *recount.entry(look.series()).or_default() += 1;
        }
        let text = scrape(&metrics);
        let counted: std::collections::BTreeMap<String, usize> = text
            .lines()
            .filter(|line| line.starts_with("agent_sandboxes{"))
            .map(|line| {
                let (series, value) = line.rsplit_once(' ').unwrap();
                (series.to_owned(), value.parse().unwrap())
            })
            .collect();
        prop_assert_eq!(&counted, &recount);
        prop_assert_eq!(metrics.sandboxes.series(), recount.len());
    }
}

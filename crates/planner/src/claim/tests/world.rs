//! A claim with the objects around it, and the decision for it.

use std::collections::BTreeMap;
use std::sync::Arc;

use api::claim::WarmPoolRef;
use api::names::name_hash;
use api::template::SandboxTemplateRef;
use api::{SandboxStatus, labels};
use k8s_openapi::api::core::v1::Container;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{Condition, Time};

use super::super::*;
use crate::owner::controller_reference;
use crate::pool_view::tests::undisturbed;
use crate::warm_pool;

pub(super) fn at(second: i64) -> Timestamp {
    Timestamp::from_second(second).unwrap()
}

pub(super) const NOW: i64 = 1_000;

pub(super) fn pairs(entries: &[(&str, &str)]) -> BTreeMap<String, String> {
    entries
        .iter()
        .map(|(key, value)| ((*key).to_owned(), (*value).to_owned()))
        .collect()
}

pub(super) fn claim() -> SandboxClaim {
    let mut claim = SandboxClaim::default();
    claim.metadata.name = Some("mine".into());
    claim.metadata.namespace = Some("ns".into());
    claim.metadata.uid = Some("claim-uid".into());
    claim.metadata.resource_version = Some("1".into());
    claim.metadata.generation = Some(4);
    claim.spec.sandbox_template_ref = Some(SandboxTemplateRef { name: "py".into() });
    claim
}

pub(super) fn claim_by_pool() -> SandboxClaim {
    let mut claim = claim();
    claim.spec.sandbox_template_ref = None;
    claim.spec.warm_pool_ref = Some(WarmPoolRef {
        name: "pool".into(),
    });
    claim
}

pub(super) fn bound_to(name: &str) -> SandboxClaim {
    bound(claim(), name)
}

pub(super) fn bound(mut claim: SandboxClaim, name: &str) -> SandboxClaim {
    let binding = pairs(&[(labels::ASSIGNED_SANDBOX_NAME, name)]);
    claim.metadata.labels = Some(binding.clone());
    claim.metadata.annotations = Some(binding);
    claim
}

pub(super) fn template() -> SandboxTemplate {
    let mut template = SandboxTemplate::default();
    template.metadata.name = Some("py".into());
    template.metadata.namespace = Some("ns".into());
    template.spec.pod_template.metadata.labels = Some(pairs(&[("app", "demo")]));
    template.spec.pod_template.spec_mut().containers = vec![Container {
        name: "main".into(),
        ..Container::default()
    }];
    template
}

pub(super) fn pool() -> SandboxWarmPool {
    let mut pool = SandboxWarmPool::default();
    pool.metadata.name = Some("pool".into());
    pool.metadata.namespace = Some("ns".into());
    pool.metadata.uid = Some("pool-uid".into());
    pool.spec.sandbox_template_ref = SandboxTemplateRef { name: "py".into() };
    pool
}

pub(super) fn ready_condition(status: &str, reason: &str, second: i64) -> Condition {
    Condition {
        type_: "Ready".into(),
        status: status.into(),
        reason: reason.into(),
        message: "from the sandbox".into(),
        observed_generation: Some(9),
        last_transition_time: Time(at(second)),
    }
}

pub(super) fn finished_condition(second: i64) -> Condition {
    Condition {
        type_: "Finished".into(),
        reason: "PodSucceeded".into(),
        ..ready_condition("True", "", second)
    }
}

pub(super) fn with_conditions(mut sandbox: Sandbox, conditions: Vec<Condition>) -> Sandbox {
    sandbox.status = Some(SandboxStatus {
        conditions,
        pod_ips: vec!["10.0.0.9".into()],
        ..SandboxStatus::default()
    });
    sandbox
}

/// A Ready sandbox as the pool makes it.
pub(super) fn warm(name: &str) -> Sandbox {
    let (pool, template) = (pool(), template());
    let observed = warm_pool::WarmPoolFacts {
        pool: &pool,
        template: Some(&template),
        view: undisturbed(&[]),
    };
    let plan = warm_pool::decide(&observed, &crate::pacing::Pacing::default(), at(NOW));
    let (_, mut sandbox) = plan.creations.unwrap();
    sandbox.metadata.name = Some(name.into());
    sandbox.metadata.uid = Some(format!("uid-{name}"));
    sandbox.metadata.resource_version = Some("5".into());
    with_conditions(
        *sandbox,
        vec![ready_condition("True", "DependenciesReady", 900)],
    )
}

/// A sandbox that the claim controls.
pub(super) fn owned(name: &str) -> Sandbox {
    let claim = claim();
    let mut sandbox = warm(name);
    sandbox.metadata.owner_references = Some(vec![controller_reference(&claim)]);
    sandbox.metadata.labels = Some(pairs(&[(labels::CLAIM_UID, "claim-uid")]));
    sandbox.spec.pod_template.metadata.labels = Some(pairs(&[
        ("app", "demo"),
        (labels::CLAIM_UID, "claim-uid"),
        (labels::SANDBOX_TEMPLATE_REF_HASH, &name_hash("py")),
    ]));
    sandbox
}

pub(super) struct World {
    pub claim: SandboxClaim,
    pub pool: Option<SandboxWarmPool>,
    pub template: Option<SandboxTemplate>,
    pub sandboxes: Vec<Sandbox>,
    pub candidate: Option<Sandbox>,
    pub legacy_policy: Option<NetworkPolicy>,
}

impl World {
    pub fn of(claim: SandboxClaim) -> Self {
        Self {
            claim,
            pool: None,
            template: Some(template()),
            sandboxes: Vec::new(),
            candidate: None,
            legacy_policy: None,
        }
    }

    pub fn decide(&self) -> ClaimPlan {
        let mut found: Vec<(String, Option<Arc<Sandbox>>)> = names_to_look_up(&self.claim)
            .into_iter()
            .map(|name| {
                let found = self
                    .sandboxes
                    .iter()
                    .find(|sandbox| sandbox.name_any() == name);
                (name.to_owned(), found.cloned().map(Arc::new))
            })
            .collect();
        let controlled = self
            .sandboxes
            .iter()
            .filter(|sandbox| is_controlled_by(&sandbox.metadata, "claim-uid"))
            .map(|sandbox| (sandbox.name_any(), Some(Arc::new(sandbox.clone()))));
        found.extend(controlled);
        let holding = holding(&self.claim, &found);
        let namesake = self
            .sandboxes
            .iter()
            .find(|sandbox| sandbox.name_any() == self.claim.name_any())
            .filter(|sandbox| !is_controlled_by(&sandbox.metadata, "claim-uid"));
        let asks_pool = self.claim.spec.warm_pool_ref.is_some();
        let observed = ClaimFacts {
            claim: &self.claim,
            pool: match &self.pool {
                Some(pool) => Lookup::Found(pool),
                None if asks_pool => Lookup::Missing,
                None => Lookup::NotAsked,
            },
            template: self
                .template
                .as_ref()
                .map_or(Lookup::Missing, Lookup::Found),
            holding,
            unreadable: None,
            namesake,
            candidate: self.candidate.as_ref(),
            legacy_policy: self.legacy_policy.as_ref(),
            first_observed: at(990),
        };
        decide(&observed, at(NOW))
    }

    pub fn blocked(&self) -> Obstacle {
        match self.decide().planned_status {
            PlannedStatus::Blocked(obstacle) => obstacle,
            other => panic!("expected an obstacle, got {other:?}"),
        }
    }

    pub fn created(&self) -> Sandbox {
        let plan = self.decide();
        match plan.effects.as_slice() {
            [.., Effect::Create { sandbox }] => (**sandbox).clone(),
            other => panic!(
                "expected a cold start, got {other:?} and {:?}",
                plan.planned_status
            ),
        }
    }
}

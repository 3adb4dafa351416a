//! What to do about a SandboxWarmPool.
//!
//! This module decides which sandboxes are members and of what revision; [`pool`](crate::pool) decides how many there should be, and
//! which are deleted first.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;

use api::conditions::{self, ConditionType, Finding, Reason};
use api::names::name_hash;
use api::warm_pool::UpdateStrategyKind;
use api::{Sandbox, SandboxTemplate, SandboxWarmPool, SandboxWarmPoolStatus, labels};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{Condition, Time};
use k8s_openapi::jiff::Timestamp;
use kube::ResourceExt;
use serde_json::{Value, json};

use crate::blueprint::Blueprint;
use crate::owner::{controller_of, controller_reference};
use crate::pacing::Pacing;
use crate::pool::{self, Deletion, Goal, Member, Pool, Restraint, Revision, Strategy};
use crate::pool_view::{Adoption, PoolPlan, PoolView, READINESS_GRACE, adoption, member};
use crate::version::Version;

/// The facts that a decision about a pool rests on.
#[derive(Clone, Debug)]
pub struct WarmPoolFacts<'a> {
    pub pool: &'a SandboxWarmPool,
    /// The pool's template. `None` only if the API server has confirmed that it is missing, because the status reports it.
    pub template: Option<&'a SandboxTemplate>,
    pub view: PoolView<'a>,
}

/// What to do about the pool.
pub type WarmPoolPlan = PoolPlan<SandboxWarmPoolStatus>;

/// The value of the label by which a pool's sandboxes are found.
pub fn pool_hash(pool: &SandboxWarmPool) -> String {
    name_hash(&pool.name_any())
}

impl Pool for SandboxWarmPool {
    const LABEL: &'static str = labels::WARM_POOL_SANDBOX;
    type Blueprint = Option<Arc<SandboxTemplate>>;

    fn label(&self) -> String {
        pool_hash(self)
    }

    fn template(&self) -> Option<&str> {
        Some(&self.spec.sandbox_template_ref.name)
    }

    fn blueprint(&self, template: Option<Arc<SandboxTemplate>>) -> Self::Blueprint {
        template
    }

    fn decide(
        &self,
        template: &Self::Blueprint,
        view: PoolView<'_>,
        pacing: &Pacing,
        now: Timestamp,
    ) -> WarmPoolPlan {
        let observed = WarmPoolFacts {
            pool: self,
            template: template.as_deref(),
            view,
        };
        decide(&observed, pacing, now)
    }

    fn conditions(status: &SandboxWarmPoolStatus) -> &[Condition] {
        &status.conditions
    }

    /// Writes zeros too, for clients that read the object without its schema.
    fn written(status: &SandboxWarmPoolStatus) -> Value {
        json!({
            "replicas": status.replicas,
            "readyReplicas": status.ready_replicas,
            "updatedReplicas": status.updated_replicas,
            "selector": status.selector,
            "observedGeneration": status.observed_generation,
            "conditions": status.conditions,
        })
    }

    fn warning(&self, published: &SandboxWarmPoolStatus) -> Option<(Reason, String)> {
        let template_not_found = |status: &SandboxWarmPoolStatus| {
            conditions::find(&status.conditions, ConditionType::Updated)
                .filter(|updated| updated.reason == Reason::TemplateNotFound.as_str())
                .map(|updated| updated.message.clone())
        };
        let message = template_not_found(published)?;
        let before = self.status.as_ref().and_then(template_not_found);
        (before.as_ref() != Some(&message)).then_some((Reason::TemplateNotFound, message))
    }
}

/// Decides what to do about a pool.
pub fn decide(observed: &WarmPoolFacts<'_>, pacing: &Pacing, now: Timestamp) -> WarmPoolPlan {
    if observed.pool.metadata.deletion_timestamp.is_some() {
        return WarmPoolPlan::default();
    }
    let blueprint = observed.template.map(Blueprint::new);
    let membership = Membership::survey(observed, blueprint.as_ref());
    let goal = goal(observed);
    let mut arithmetic = pool::plan(&membership.members, observed.view.unseen, &goal, now);
    arithmetic.deletions.splice(0..0, membership.impostors);

    let restraint = Restraint {
        pacing,
        demand: observed.view.demand,
        held_back_since: observed.view.held_back_since,
        at_most: if blueprint.is_some() { usize::MAX } else { 0 },
    };
    let refill = pool::refill(&arithmetic, &goal, &restraint, now);
    let creations = blueprint
        .as_ref()
        .filter(|_| refill.count > 0)
        .map(|blueprint| (refill.count, Box::new(new_member(observed.pool, blueprint))));
    WarmPoolPlan {
        adoptions: membership.adoptions,
        deletions: arithmetic.deletions,
        creations,
        status: status(observed, arithmetic.counts, now),
        holds_back: refill.holds_back,
        recheck_after: refill.recheck_after,
    }
}

fn goal(observed: &WarmPoolFacts<'_>) -> Goal {
    let spec = &observed.pool.spec;
    let desired = usize::try_from(spec.desired_replicas()).unwrap_or(0);
    let strategy = match spec.update_strategy_kind() {
        // Without a template nothing is outdated, and nothing could be made in its place.
        _ if observed.template.is_none() => Strategy::OnReplenish,
        UpdateStrategyKind::OnReplenish => Strategy::OnReplenish,
        UpdateStrategyKind::Recreate => Strategy::Recreate,
        UpdateStrategyKind::RollingUpdate => Strategy::RollingUpdate {
            max_unavailable: pool::max_unavailable(
                spec.update_strategy
                    .as_ref()
                    .and_then(|strategy| strategy.max_unavailable.as_ref()),
                desired,
            ),
        },
    };
    Goal {
        desired,
        strategy,
        max_batch: observed.view.max_batch,
        readiness_grace: READINESS_GRACE,
    }
}

/// The labelled sandboxes that belong to the pool, and the others.
#[derive(Default)]
struct Membership {
    members: Vec<Member>,
    adoptions: Vec<Adoption>,
    /// Unowned sandboxes that are not what the template would make.
    impostors: Vec<Deletion>,
}

impl Membership {
    fn survey(observed: &WarmPoolFacts<'_>, blueprint: Option<&Blueprint<'_>>) -> Self {
        let pool_uid = observed.pool.metadata.uid.as_deref().unwrap_or_default();
        let mut revisions = Revisions::new(blueprint);
        let mut membership = Self::default();
        for sandbox in observed.view.staying() {
            let is_reserved = observed.view.is_reserved.holds(sandbox);
            match controller_of(&sandbox.metadata) {
                Some(owner) if owner.uid == pool_uid => {
                    let revision = revisions.of_member(sandbox);
                    membership
                        .members
                        .push(member(sandbox, revision, is_reserved));
                }
                Some(_) => {}
                None if is_reserved => {}
                None => match revisions.of_orphan(sandbox) {
                    None => {}
                    Some(Revision::Current) => {
                        membership.adoptions.push(adoption(observed.pool, sandbox));
                        membership
                            .members
                            .push(member(sandbox, Revision::Current, false));
                    }
                    Some(Revision::Outdated | Revision::Foreign) => {
                        membership.impostors.push(Deletion {
                            version: Version::of(sandbox),
                            cause: pool::Cause::Outdated,
                        });
                    }
                },
            }
        }
        membership
    }
}

/// Compares sandboxes with the current template, each revision only once.
struct Revisions<'a> {
    blueprint: Option<&'a Blueprint<'a>>,
    compared: HashMap<String, Revision>,
}

impl<'a> Revisions<'a> {
    fn new(blueprint: Option<&'a Blueprint<'a>>) -> Self {
        Self {
            blueprint,
            compared: HashMap::new(),
        }
    }

    /// A sandbox of the pool's own: its label can be trusted, because we wrote it.
    fn of_member(&mut self, sandbox: &Sandbox) -> Revision {
        let Some(blueprint) = self.blueprint else {
            return Revision::Current;
        };
        if !is_of_template(sandbox, blueprint) {
            return Revision::Foreign;
        }
        let label = sandbox.labels().get(labels::SANDBOX_POD_TEMPLATE_HASH);
        // Without a revision of our own to compare with, nothing may look outdated: that would empty the pool.
        if blueprint.revision.is_none() || label == blueprint.revision.as_ref() {
            return Revision::Current;
        }
        let Some(label) = label else {
            return compare(sandbox, blueprint);
        };
        if let Some(known) = self.compared.get(label) {
            return *known;
        }
        let revision = compare(sandbox, blueprint);
        self.compared.insert(label.clone(), revision);
        revision
    }

    /// The labels of a sandbox without an owner cannot be trusted: only what it would run counts. `None` without a template.
    fn of_orphan(&self, sandbox: &Sandbox) -> Option<Revision> {
        let blueprint = self.blueprint?;
        Some(if is_of_template(sandbox, blueprint) {
            compare(sandbox, blueprint)
        } else {
            Revision::Foreign
        })
    }
}

fn is_of_template(sandbox: &Sandbox, blueprint: &Blueprint<'_>) -> bool {
    sandbox.labels().get(labels::SANDBOX_TEMPLATE_REF_HASH) == Some(&blueprint.name_hash)
}

fn compare(sandbox: &Sandbox, blueprint: &Blueprint<'_>) -> Revision {
    if blueprint.would_make(&sandbox.spec.pod_template.spec) {
        Revision::Current
    } else {
        Revision::Outdated
    }
}

/// A new sandbox of the pool. The server completes its name, so that the same object makes any number of them.
fn new_member(pool: &SandboxWarmPool, blueprint: &Blueprint<'_>) -> Sandbox {
    let mut identity = BTreeMap::from([
        (labels::WARM_POOL_SANDBOX.to_owned(), pool_hash(pool)),
        (
            labels::SANDBOX_TEMPLATE_REF_HASH.to_owned(),
            blueprint.name_hash.clone(),
        ),
    ]);
    if let Some(revision) = &blueprint.revision {
        identity.insert(
            labels::SANDBOX_POD_TEMPLATE_HASH.to_owned(),
            revision.clone(),
        );
    }
    let mut sandbox = blueprint.sandbox(
        blueprint.pod_spec(),
        blueprint.pod_metadata(identity.clone()),
        blueprint.template.spec.volume_claim_templates.clone(),
    );
    sandbox.metadata.namespace = pool.namespace();
    sandbox.metadata.generate_name = Some(format!("{}-", pool.name_any()));
    let mut own_labels = identity;
    own_labels.insert(
        labels::LAUNCH_TYPE.to_owned(),
        labels::LAUNCH_TYPE_WARM.to_owned(),
    );
    sandbox.metadata.labels = Some(own_labels);
    sandbox.metadata.owner_references = Some(vec![controller_reference(pool)]);
    sandbox
}

fn status(
    observed: &WarmPoolFacts<'_>,
    counts: pool::Counts,
    now: Timestamp,
) -> SandboxWarmPoolStatus {
    let pool = observed.pool;
    let number = |count: usize| i32::try_from(count).unwrap_or(i32::MAX);
    let mut conditions = pool
        .status
        .as_ref()
        .map(|status| status.conditions.clone())
        .unwrap_or_default();
    // This condition exists only while nothing can be decided about the pool.
    conditions::remove(&mut conditions, ConditionType::Ready);
    let finding = match observed.template {
        Some(_) => rollout(counts, pool.spec.desired_replicas()),
        None => template_missing(&pool.spec.sandbox_template_ref.name),
    };
    let now = Time(Timestamp::from_second(now.as_second()).unwrap_or(now));
    conditions::merge(&mut conditions, &finding, pool.metadata.generation, &now);
    SandboxWarmPoolStatus {
        replicas: number(counts.replicas),
        ready_replicas: number(counts.ready),
        updated_replicas: number(counts.updated),
        selector: Some(format!("{}={}", labels::WARM_POOL_SANDBOX, pool_hash(pool))),
        observed_generation: pool.metadata.generation,
        conditions,
    }
}

fn template_missing(name: &str) -> Finding {
    Finding::new(
        ConditionType::Updated,
        false,
        Reason::TemplateNotFound,
        format!("SandboxTemplate {name:?} not found"),
    )
}

fn rollout(counts: pool::Counts, desired: i32) -> Finding {
    let outdated = counts.replicas - counts.updated;
    if outdated == 0 {
        return Finding::new(
            ConditionType::Updated,
            true,
            Reason::RolloutComplete,
            "All sandboxes are of the current template revision",
        );
    }
    let message = format!(
        "{outdated} of {} sandboxes are of an older template revision; {desired} are desired",
        counts.replicas
    );
    Finding::new(
        ConditionType::Updated,
        false,
        Reason::RolloutInProgress,
        message,
    )
}

#[cfg(test)]
#[path = "warm_pool_tests.rs"]
mod tests;

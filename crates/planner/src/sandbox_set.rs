//! What to do about a SandboxSet of the OpenKruise dialect.
//!
//! This module decides which sandboxes are members, of what revision, and how a new one is made; [`pool`](crate::pool) decides how many
//! there should be, and which are deleted first. A sandbox that carries a claim's lock is no longer a member.

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::sync::Arc;

use api::conditions::{self, ConditionType, Finding, Reason};
use api::kruise::{SandboxSet, SandboxSetSpec, SandboxSetStatus};
use api::labels::{self, kruise as keys};
use api::names::{LabelValue, name_hash};
use api::template::NetworkPolicyManagement;
use api::{Sandbox, SandboxTemplate, SandboxTemplateSpec};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{Condition, Time};
use k8s_openapi::jiff::Timestamp;
use kube::ResourceExt;

use crate::blueprint::Blueprint;
use crate::owner::{controller_of, controller_reference, refers_to};
use crate::pacing::Pacing;
use crate::pool::{self, Goal, Member, Pool, Readiness, Restraint, Revision, Strategy};
use crate::pool_view::{Adoption, PoolPlan, PoolView, READINESS_GRACE, adoption, member};
use crate::warm_queue::{Candidate, SandboxKey};

type Pairs = BTreeMap<String, String>;

/// The facts that a decision about a set rests on.
#[derive(Clone, Debug)]
pub struct SandboxSetFacts<'a> {
    pub set: &'a SandboxSet,
    /// What its sandboxes are made from, or why there is nothing to make them from.
    pub blueprint: &'a Result<SetBlueprint, Problem>,
    pub view: PoolView<'a>,
}

/// What to do about the set.
pub type SandboxSetPlan = PoolPlan<SandboxSetStatus>;

/// Why a set has nothing to make sandboxes from.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Problem {
    #[error("spec.templateRef: SandboxTemplate {0:?} does not exist")]
    TemplateMissing(String),
    #[error(
        "spec.templateRef: {0} is not a kind of template; use SandboxTemplate of extensions.agents.x-k8s.io"
    )]
    NotATemplate(String),
    #[error("spec: exactly one of template and templateRef must be set")]
    NotExactlyOne,
}

/// Where a set's sandboxes are described.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Source<'a> {
    Inline,
    /// The SandboxTemplate of this name.
    Template(&'a str),
}

/// Where a set's sandboxes are described, if its spec is valid.
pub fn source(spec: &SandboxSetSpec) -> Result<Source<'_>, Problem> {
    match (&spec.template, &spec.template_ref) {
        (Some(_), None) => Ok(Source::Inline),
        (None, Some(reference)) => {
            let kind = reference.kind.as_deref().unwrap_or("SandboxTemplate");
            let group = reference
                .api_version
                .as_deref()
                .map(|version| version.split('/').next().unwrap_or_default());
            let is_template =
                kind == "SandboxTemplate" && group.is_none_or(|it| it == api::EXTENSIONS_GROUP);
            if is_template {
                Ok(Source::Template(&reference.name))
            } else {
                let group = group.unwrap_or(api::EXTENSIONS_GROUP);
                Err(Problem::NotATemplate(format!("{kind} of {group}")))
            }
        }
        _ => Err(Problem::NotExactlyOne),
    }
}

/// What a set's sandboxes are made from.
#[derive(Clone, Debug)]
pub struct SetBlueprint {
    /// A sandbox without a name, an owner and the labels of its owner.
    sandbox: Sandbox,
    /// The hash of all that decides what a sandbox runs.
    pub revision: String,
}

impl SetBlueprint {
    /// The blueprint of a set. `template` is the SandboxTemplate that it refers to, if it does and there is one.
    pub fn new(set: &SandboxSet, template: Option<&SandboxTemplate>) -> Result<Self, Problem> {
        let (template, source) = match source(&set.spec)? {
            Source::Inline => (Cow::Owned(inline_template(set)), Source::Inline),
            Source::Template(name) => {
                let found = template.ok_or_else(|| Problem::TemplateMissing(name.to_owned()))?;
                (Cow::Borrowed(found), Source::Template(name))
            }
        };
        let blueprint = Blueprint::new(&template);
        let pod_metadata = match source {
            Source::Inline => template.spec.pod_template.metadata.clone(),
            Source::Template(_) => blueprint.pod_metadata(Pairs::new()),
        };
        let own_volumes = set.spec.volume_claim_templates.clone();
        let volumes = own_volumes.or_else(|| template.spec.volume_claim_templates.clone());
        let mut sandbox = blueprint.sandbox(blueprint.pod_spec(), pod_metadata, volumes);
        if source == Source::Inline {
            sandbox.metadata.annotations = None;
        }
        // A spec that cannot be written as JSON could not have been read from it.
        let revision = serde_json::to_string(&sandbox.spec)
            .map(|json| name_hash(&json))
            .unwrap_or_default();
        Ok(Self { sandbox, revision })
    }

    /// A new sandbox, as yet without a name or an owner, with the labels that it has before and after it is claimed.
    pub fn sandbox(&self, set: &SandboxSet) -> Sandbox {
        let mut sandbox = self.sandbox.clone();
        let identity = Pairs::from([
            (
                keys::SANDBOX_TEMPLATE.to_owned(),
                set_label(&set.name_any()),
            ),
            (keys::TEMPLATE_HASH.to_owned(), self.revision.clone()),
        ]);
        let pod_labels = &mut sandbox.spec.pod_template.metadata.labels;
        pod_labels.get_or_insert_default().extend(identity.clone());
        sandbox.metadata.namespace = set.namespace();
        sandbox.metadata.labels = Some(identity);
        sandbox
    }

    /// Whether a sandbox is what this blueprint makes. Its labels are not trusted.
    fn would_make(&self, sandbox: &Sandbox, set: &SandboxSet) -> bool {
        let expected = self.sandbox(set).spec;
        sandbox.spec.pod_template == expected.pod_template
            && sandbox.spec.volume_claim_templates == expected.volume_claim_templates
    }
}

/// An inline pod template as a SandboxTemplate. It has no network policy.
fn inline_template(set: &SandboxSet) -> SandboxTemplate {
    let spec = SandboxTemplateSpec {
        pod_template: set.spec.template.clone().unwrap_or_default(),
        network_policy_management: Some(NetworkPolicyManagement::Unmanaged),
        ..SandboxTemplateSpec::default()
    };
    SandboxTemplate::new("", spec)
}

/// The value by which labels refer to a set: its name where that fits, else a hash of it.
pub fn set_label(name: &str) -> String {
    match name.parse::<LabelValue>() {
        Ok(value) => value.to_string(),
        Err(_) => name_hash(name),
    }
}

/// Whether the sandbox is locked or marked as claimed.
pub fn is_taken(sandbox: &Sandbox) -> bool {
    let is_locked = sandbox
        .annotations()
        .get(keys::LOCK)
        .is_some_and(|lock| !lock.is_empty());
    let is_claimed = sandbox
        .labels()
        .get(keys::SANDBOX_CLAIMED)
        .is_some_and(|claimed| claimed != "false");
    is_locked || is_claimed
}

/// The warm queue's entry for a sandbox, if it can be claimed: it is a set's, not locked, and Ready.
pub fn candidate(sandbox: &Sandbox) -> Option<Candidate> {
    let owner = controller_of(&sandbox.metadata).filter(|owner| refers_to::<SandboxSet>(owner))?;
    let conditions = sandbox
        .status
        .as_ref()
        .map_or(&[][..], |status| &status.conditions);
    let is_claimable = sandbox.metadata.deletion_timestamp.is_none()
        && !is_taken(sandbox)
        && !sandbox.spec.suspension().is_requested()
        && conditions::is_true(conditions, ConditionType::Ready)
        && !conditions::is_true(conditions, ConditionType::Finished);
    is_claimable.then(|| Candidate {
        key: SandboxKey {
            namespace: sandbox.namespace().unwrap_or_default(),
            name: sandbox.name_any(),
        },
        uid: sandbox.uid().unwrap_or_default(),
        template_hash: owner.uid.clone(),
        pool_hash: owner.uid.clone(),
        revision: revision_of(sandbox).unwrap_or_default().to_owned(),
        ready: true,
    })
}

fn revision_of(sandbox: &Sandbox) -> Option<&str> {
    sandbox
        .labels()
        .get(keys::TEMPLATE_HASH)
        .map(String::as_str)
}

impl Pool for SandboxSet {
    const LABEL: &'static str = keys::SANDBOX_POOL;
    type Blueprint = Result<SetBlueprint, Problem>;

    fn label(&self) -> String {
        set_label(&self.name_any())
    }

    fn template(&self) -> Option<&str> {
        match source(&self.spec) {
            Ok(Source::Template(name)) => Some(name),
            _ => None,
        }
    }

    fn blueprint(&self, template: Option<Arc<SandboxTemplate>>) -> Self::Blueprint {
        SetBlueprint::new(self, template.as_deref())
    }

    fn own_revision(blueprint: &Self::Blueprint) -> Option<&str> {
        blueprint
            .as_ref()
            .ok()
            .map(|blueprint| blueprint.revision.as_str())
    }

    fn decide(
        &self,
        blueprint: &Self::Blueprint,
        view: PoolView<'_>,
        pacing: &Pacing,
        now: Timestamp,
    ) -> SandboxSetPlan {
        let set = self;
        decide(
            &SandboxSetFacts {
                set,
                blueprint,
                view,
            },
            pacing,
            now,
        )
    }

    fn conditions(status: &SandboxSetStatus) -> &[Condition] {
        &status.conditions
    }
}

/// Decides what to do about a set.
pub fn decide(observed: &SandboxSetFacts<'_>, pacing: &Pacing, now: Timestamp) -> SandboxSetPlan {
    if observed.set.metadata.deletion_timestamp.is_some() {
        return SandboxSetPlan::default();
    }
    let blueprint = observed.blueprint.as_ref().ok();
    let (members, adoptions) = survey(observed, blueprint);
    let goal = goal(observed);
    let arithmetic = pool::plan(&members, observed.view.unseen, &goal, now);
    let restraint = Restraint {
        pacing,
        demand: observed.view.demand,
        held_back_since: observed.view.held_back_since,
        at_most: blueprint.map_or(0, |_| room_to_grow(observed, &members, goal.desired)),
    };
    let refill = pool::refill(&arithmetic, &goal, &restraint, now);
    let creations = blueprint
        .filter(|_| refill.count > 0)
        .map(|blueprint| (refill.count, Box::new(new_member(observed.set, blueprint))));
    SandboxSetPlan {
        adoptions,
        deletions: arithmetic.deletions,
        creations,
        status: status(observed, arithmetic.counts, now),
        holds_back: refill.holds_back,
        recheck_after: refill.recheck_after,
    }
}

/// The labelled sandboxes that belong to the set. A sandbox without an owner is adopted only if the set would create it just so: its labels
/// cannot be trusted.
fn survey(
    observed: &SandboxSetFacts<'_>,
    blueprint: Option<&SetBlueprint>,
) -> (Vec<Member>, Vec<Adoption>) {
    let uid = observed.set.metadata.uid.as_deref().unwrap_or_default();
    let (mut members, mut adoptions) = (Vec::new(), Vec::new());
    for sandbox in observed.view.staying().filter(|it| !is_taken(it)) {
        let is_reserved = observed.view.is_reserved.holds(sandbox);
        match (controller_of(&sandbox.metadata), blueprint) {
            (Some(owner), _) if owner.uid == uid => {
                let is_current = blueprint
                    .is_none_or(|blueprint| revision_of(sandbox) == Some(&blueprint.revision));
                let revision = if is_current {
                    Revision::Current
                } else {
                    Revision::Outdated
                };
                members.push(member(sandbox, revision, is_reserved));
            }
            (None, Some(blueprint))
                if !is_reserved && blueprint.would_make(sandbox, observed.set) =>
            {
                adoptions.push(adoption(observed.set, sandbox));
                members.push(member(sandbox, Revision::Current, false));
            }
            _ => {}
        }
    }
    (members, adoptions)
}

fn goal(observed: &SandboxSetFacts<'_>) -> Goal {
    let spec = &observed.set.spec;
    let desired = usize::try_from(spec.replicas).unwrap_or(0);
    let amount = spec
        .update_strategy
        .as_ref()
        .and_then(|strategy| strategy.max_unavailable.as_ref());
    Goal {
        desired,
        strategy: Strategy::RollingUpdate {
            max_unavailable: pool::max_unavailable(amount, desired),
        },
        max_batch: observed.view.max_batch,
        readiness_grace: READINESS_GRACE,
    }
}

/// How many sandboxes may be made before more are unavailable than the scale strategy allows.
fn room_to_grow(observed: &SandboxSetFacts<'_>, members: &[Member], desired: usize) -> usize {
    let amount = observed
        .set
        .spec
        .scale_strategy
        .as_ref()
        .and_then(|strategy| strategy.max_unavailable.as_ref());
    let Some(amount) = amount else {
        return usize::MAX;
    };
    let unavailable = members
        .iter()
        .filter(|member| member.readiness != Readiness::Ready)
        .count();
    pool::max_unavailable(Some(amount), desired).saturating_sub(unavailable + observed.view.unseen)
}

/// A new sandbox of the set. The server completes its name, so that the same object makes any number of them.
fn new_member(set: &SandboxSet, blueprint: &SetBlueprint) -> Sandbox {
    let mut sandbox = blueprint.sandbox(set);
    sandbox.metadata.generate_name = Some(format!("{}-", set.name_any()));
    sandbox.metadata.owner_references = Some(vec![controller_reference(set)]);
    sandbox.labels_mut().extend([
        (keys::SANDBOX_POOL.to_owned(), set_label(&set.name_any())),
        (keys::SANDBOX_CLAIMED.to_owned(), "false".to_owned()),
    ]);
    sandbox
}

fn status(
    observed: &SandboxSetFacts<'_>,
    counts: pool::Counts,
    now: Timestamp,
) -> SandboxSetStatus {
    let set = observed.set;
    let before = set.status.clone().unwrap_or_default();
    let number = |count: usize| i32::try_from(count).unwrap_or(i32::MAX);
    let mut conditions = before.conditions;
    let moment = Time(Timestamp::from_second(now.as_second()).unwrap_or(now));
    for finding in findings(observed, counts) {
        conditions::merge(&mut conditions, &finding, set.metadata.generation, &moment);
    }
    let update_revision = match observed.blueprint {
        Ok(blueprint) => Some(blueprint.revision.clone()),
        Err(_) => before.update_revision,
    };
    let is_updated = counts.updated == counts.replicas;
    SandboxSetStatus {
        replicas: number(counts.replicas),
        available_replicas: number(counts.ready),
        updated_replicas: number(counts.updated),
        updated_available_replicas: number(counts.updated_ready),
        current_revision: before
            .current_revision
            .filter(|_| !is_updated)
            .or_else(|| update_revision.clone()),
        update_revision,
        selector: Some(selector(&set.name_any())),
        conditions,
        observed_generation: set.metadata.generation,
    }
}

/// Selects the unclaimed sandboxes of a set.
pub fn selector(set: &str) -> String {
    format!("{}={}", labels::kruise::SANDBOX_POOL, set_label(set))
}

fn findings(observed: &SandboxSetFacts<'_>, counts: pool::Counts) -> Vec<Finding> {
    let desired = usize::try_from(observed.set.spec.replicas).unwrap_or(0);
    let problem = match observed.blueprint {
        Ok(_) => None,
        Err(problem @ Problem::TemplateMissing(_)) => Some((Reason::TemplateNotFound, problem)),
        Err(problem) => Some((Reason::InvalidConfiguration, problem)),
    };
    if let Some((reason, problem)) = problem {
        let message = problem.to_string();
        return vec![Finding::new(ConditionType::Ready, false, reason, message)];
    }
    let is_full = counts.ready >= desired;
    let reason = if is_full {
        Reason::Replenished
    } else {
        Reason::Replenishing
    };
    let message = format!("{} of {desired} sandboxes can be claimed", counts.ready);
    let ready = Finding::new(ConditionType::Ready, is_full, reason, message);
    let outdated = counts.replicas - counts.updated;
    let (reason, message) = if outdated == 0 {
        let message = "All sandboxes are of the current revision".to_owned();
        (Reason::RolloutComplete, message)
    } else {
        let message = format!(
            "{outdated} of {} sandboxes are of an older revision",
            counts.replicas
        );
        (Reason::RolloutInProgress, message)
    };
    let updated = Finding::new(ConditionType::Updated, outdated == 0, reason, message);
    vec![ready, updated]
}

#[cfg(test)]
#[path = "sandbox_set_tests.rs"]
mod tests;

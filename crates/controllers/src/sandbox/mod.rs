//! The controller of `Sandbox`: gathers what a decision needs, lets [`planner::sandbox`] decide, carries the plan out, and
//! publishes the status. What to do is not decided here.

mod apply;
mod observe;
mod publish;

use std::sync::Arc;
use std::time::Duration;

use api::Sandbox;
use api::rbac::{MANAGE, Rule, SUBRESOURCE};
use planner::owner::{controller_of, refers_to};
use planner::sandbox::{Adoption, Settings, Stage, decide, is_first_start, is_handed_over, status};

use crate::cache::Change;
use crate::cached::Cached;
use crate::context::Context;
use crate::key::ObjectKey;
use crate::not_ready::Subject;
use crate::queue::{Queue, Urgency};
use crate::rbac::SANDBOXES;
use crate::runtime::{Action, Runtime};
use crate::starting::Starting;
use crate::trace;
use crate::writes::WriteError;

use observe::Freshness;
use publish::Published;

/// What the controller needs to be allowed, leader election and events included.
pub const RBAC: &[Rule] = &[
    Rule {
        groups: &[""],
        resources: &["pods", "services", "persistentvolumeclaims"],
        verbs: MANAGE,
    },
    SANDBOXES,
    Rule {
        groups: &[api::CORE_GROUP],
        resources: &["sandboxes/finalizers", "sandboxes/status"],
        verbs: SUBRESOURCE,
    },
    Rule {
        groups: &["coordination.k8s.io"],
        resources: &["leases"],
        verbs: &["create", "get", "list", "patch", "update", "watch"],
    },
    Rule {
        groups: &["events.k8s.io"],
        resources: &["events"],
        verbs: &["create", "patch"],
    },
];

/// The controller's name in logs, metrics and events.
pub const CONTROLLER: &str = "sandbox";
/// The name under which its writes are filed in managed fields.
const FIELD_MANAGER: &str = "sandbox-controller";
/// How soon an expired sandbox is cleaned up once its status says that it has expired.
const IMMEDIATELY: Duration = Duration::from_millis(1);

/// Why a sandbox could not be brought to what its spec says.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error("cannot observe the sandbox")]
    Observe(#[source] WriteError),
    #[error("cannot carry out what was decided for the sandbox")]
    Apply(#[source] WriteError),
    #[error("cannot publish the sandbox's status")]
    Publish(#[source] WriteError),
    #[error("cannot serialize the sandbox's status")]
    Serialize(#[source] serde_json::Error),
}

/// Adds the controller to a runtime. Its queue yields to whoever it is told to.
pub fn register(runtime: &mut Runtime) -> Queue {
    let context = Arc::clone(&runtime.context);
    let caches = &context.caches;
    let instrumentation = Arc::clone(&context.instrumentation);
    caches
        .sandboxes
        .subscribe(move |change| instrumentation.sandbox_changed(change));
    let workers = context.config.sandbox_workers.get();
    let starting = Starting::of(&caches.sandboxes, &context, CONTROLLER);
    let queue = runtime.controller(
        CONTROLLER,
        workers,
        &caches.sandboxes,
        urgency,
        move |sandbox, context| reconcile(sandbox, context, starting.clone()),
    );
    runtime.follow(&caches.pods);
    runtime.follow(&caches.services);
    runtime.follow(&caches.volume_claims);
    caches.pods.subscribe(relate(&queue, &context));
    caches.services.subscribe(relate(&queue, &context));
    caches.volume_claims.subscribe(relate(&queue, &context));
    queue
}

/// Whoever is given a sandbox does not wait for its pod's labels.
fn urgency(change: &Change<'_, Sandbox>) -> Urgency {
    match (change.before, change.after) {
        (Some(before), Some(after)) if is_handed_over(before, after) => Urgency::Later,
        _ => Urgency::Now,
    }
}

/// Enqueues the sandboxes that a changed object belongs to: those that control it now or did before, and the one of its name,
/// which may be waiting for the name to be free.
fn relate<K: Cached>(
    queue: &Queue,
    context: &Arc<Context>,
) -> impl Fn(&Change<'_, K>) + Send + Sync + use<K> {
    let queue = queue.clone();
    let sandboxes = context.caches.sandboxes.clone();
    move |change| {
        let versions = [change.before, change.after];
        let mut related: Option<ObjectKey> = None;
        for object in versions.into_iter().flatten() {
            if let Some(key) = sandbox_of(object.as_ref())
                && related.as_ref() != Some(&key)
            {
                queue.add(key.clone());
                related = Some(key);
            }
        }
        let namesake = ObjectKey::of(change.latest().as_ref());
        if related.as_ref() != Some(&namesake) && sandboxes.get(&namesake).is_some() {
            queue.add(namesake);
        }
    }
}

fn sandbox_of<K: Cached>(object: &K) -> Option<ObjectKey> {
    let owner = controller_of(object.meta()).filter(|owner| refers_to::<Sandbox>(owner))?;
    Some(ObjectKey::of(object).sibling(&owner.name))
}

/// Brings one sandbox a step closer to what its spec says.
async fn reconcile(
    sandbox: Arc<Sandbox>,
    context: Arc<Context>,
    starting: Starting<Sandbox>,
) -> Result<Action, Error> {
    let key = ObjectKey::of(sandbox.as_ref());
    let settings = settings(&context);
    if telemetry::spans::are_exported() {
        trace::describe(&key);
        trace::persist(&context, &key, &sandbox, FIELD_MANAGER).await;
    }
    for freshness in [Freshness::Cached, Freshness::Live] {
        let observed = match observe::observe(&context, &key, freshness).await {
            Ok(observed) => observed,
            Err(error) => return unobserved(&context, &key, &sandbox, error).await,
        };
        let Some(observed) = observed else {
            return Ok(Action::AwaitChange);
        };
        let plan = decide(&observed, &settings, context.clock.now());
        let applied = apply::apply(&context, &key, &observed, &plan).await;
        if applied.is_outdated {
            continue;
        }
        if !applied.sandbox_deleted {
            let now = context.clock.api_time();
            let status = status(&observed, plan.stage, &applied.outcome, &settings, &now);
            if is_first_start(&observed, &applied.outcome, &status)
                && let Some(left) = starting.unsaid_for(&key)
            {
                return Ok(Action::RequeueAfter(left));
            }
            starting.forget(&key);
            let published =
                publish::publish(&context, &key, &applied.sandbox, &observed, status).await?;
            if published == Published::Outdated {
                return Ok(Action::Retry);
            }
        }
        return match applied.failure {
            Some(failure) => Err(Error::Apply(failure)),
            None if plan.stage == Stage::Expiring => Ok(Action::RequeueAfter(IMMEDIATELY)),
            None if plan
                .problems
                .iter()
                .any(|problem| !problem.is_invalid_spec()) =>
            {
                // Nothing tells us when another controller lets go of an object we do not watch.
                Ok(Action::Retry)
            }
            None => Ok(plan
                .requeue
                .map_or(Action::AwaitChange, Action::RequeueAfter)),
        };
    }
    Ok(Action::Retry)
}

/// Says that what the sandbox depends on could not be looked at. What a retry cannot mend waits for a change.
async fn unobserved(
    context: &Context,
    key: &ObjectKey,
    sandbox: &Sandbox,
    failure: WriteError,
) -> Result<Action, Error> {
    let subject = Subject {
        context,
        controller: CONTROLLER,
        cache: &context.caches.sandboxes,
        key,
    };
    let status = sandbox.status.as_ref();
    let conditions = status.map_or(&[][..], |status| &status.conditions);
    let published = subject.unobserved(sandbox, conditions, &failure).await;
    if published.is_ok() && failure.failure.is_lasting() {
        return Ok(Action::AwaitChange);
    }
    Err(Error::Observe(failure))
}

fn settings(context: &Context) -> Settings<'_> {
    Settings {
        cluster_domain: &context.config.cluster_domain,
        adoption: if context.config.require_adoptable_label {
            Adoption::Labelled
        } else {
            Adoption::Any
        },
    }
}

//! The controller of `Sandbox`: wires watches to its queue, and runs the pass of [`planner::sandbox`] over each sandbox.

mod environment;

use std::sync::Arc;

use api::Sandbox;
use api::rbac::{MANAGE, Rule, SUBRESOURCE};
use planner::owner::{controller_of, refers_to};
use planner::pass::Error;
use planner::sandbox::is_handed_over;

use crate::cache::Change;
use crate::cached::Cached;
use crate::context::Context;
use crate::key::ObjectKey;
use crate::queue::{Queue, Urgency};
use crate::rbac::SANDBOXES;
use crate::runtime::{Action, Runtime};
use crate::status_delay::StatusDelay;
use crate::trace;
use crate::writes::WriteError;

use environment::SandboxEnvironment;

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
/// The field manager of its writes.
const FIELD_MANAGER: &str = "sandbox-controller";
/// Adds the controller to a runtime, and returns its queue, for the caller to let other queues go first.
pub fn register(runtime: &mut Runtime) -> Queue {
    let context = Arc::clone(&runtime.context);
    let caches = &context.caches;
    let instrumentation = Arc::clone(&context.instrumentation);
    caches
        .sandboxes
        .subscribe(move |change| instrumentation.sandbox_changed(change));
    let workers = context.config.sandbox_workers.get();
    let status_delay = StatusDelay::of(&caches.sandboxes, &context, CONTROLLER);
    let queue = runtime.controller(
        CONTROLLER,
        workers,
        &caches.sandboxes,
        urgency,
        move |sandbox, context| reconcile(sandbox, context, status_delay.clone()),
    );
    runtime.follow(&caches.pods);
    runtime.follow(&caches.services);
    runtime.follow(&caches.volume_claims);
    caches.pods.subscribe(relate(&queue, &context));
    caches.services.subscribe(relate(&queue, &context));
    caches.volume_claims.subscribe(relate(&queue, &context));
    queue
}

/// A claim that got its sandbox does not wait for the labels of the pod, so they are written later.
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

/// Brings one sandbox a step closer to its spec.
async fn reconcile(
    sandbox: Arc<Sandbox>,
    context: Arc<Context>,
    status_delay: StatusDelay<Sandbox>,
) -> Result<Action, Error<WriteError>> {
    let key = ObjectKey::of(sandbox.as_ref());
    if telemetry::spans::are_exported() {
        trace::describe(&key);
        trace::persist(&context, &key, &sandbox, FIELD_MANAGER).await;
    }
    let environment = SandboxEnvironment {
        context: &context,
        status_delay: &status_delay,
        key: &key,
    };
    planner::sandbox::reconcile(&environment, &sandbox).await
}

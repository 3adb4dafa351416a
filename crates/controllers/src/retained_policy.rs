//! The controller of network policies whose template is gone: each stays in force as long as a sandbox or a pod of the template is left,
//! and is deleted after that. [`planner::policy_retention`] keeps it from being garbage-collected with the template.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use api::{Sandbox, labels};
use k8s_openapi::api::networking::v1::NetworkPolicy;
use kube::ResourceExt;
use kube::core::ObjectMeta;
use planner::policy_retention::{policy_name, selected_hash, template_of};
use planner::sandbox::ObservedPod;
use tokio::time::Instant;

use crate::cache::Change;
use crate::cached::Cached;
use crate::context::{Caches, Context};
use crate::events::{Occurrence, Severity};
use crate::key::{ObjectKey, within};
use crate::queue::Queue;
use crate::runtime::{Action, Runtime, at_once};
use crate::writes::{Deletion, Precondition, WriteError, Writer, list_metadata};

/// The controller's name in logs, metrics and events.
const CONTROLLER: &str = "retained-network-policy";
const FIELD_MANAGER: &str = "sandboxtemplate-controller";
const WORKERS: usize = 2;
/// The index of sandboxes, pods and policies by namespace and the hash of the template's name.
const BY_TEMPLATE_HASH: &str = "template-hash";
/// The shortest interval between two lists from the API server.
const RECHECK: Duration = Duration::from_secs(1);

/// Why a retained policy could not be checked or deleted.
#[derive(Debug, thiserror::Error)]
enum Error {
    #[error("cannot look for the policy's template")]
    Template(#[source] WriteError),
    #[error("cannot list what the policy applies to")]
    List(#[source] kube::Error),
    #[error("cannot delete the policy")]
    Delete(#[source] WriteError),
}

/// Adds the controller to a runtime.
pub fn register(runtime: &mut Runtime) {
    let context = Arc::clone(&runtime.context);
    let caches = &context.caches;
    let memory = Memory::default();
    let known = memory.clone();
    caches.network_policies.subscribe(move |change| {
        if let Some(policy) = change.departed() {
            known.forget(&ObjectKey::of(policy.as_ref()));
        }
    });
    let counted = memory.clone();
    let count = Box::new(move || counted.entries().len());
    context
        .instrumentation
        .count_entries("retained", CONTROLLER, count);
    let queue = runtime.controller(
        CONTROLLER,
        WORKERS,
        &caches.network_policies,
        at_once,
        move |policy, context| reconcile(policy, context, memory.clone()),
    );
    runtime.follow(&caches.templates);
    runtime.follow(&caches.sandboxes);
    runtime.follow(&caches.pods);
    caches
        .network_policies
        .index_by(BY_TEMPLATE_HASH, |policy| {
            let hash = selected_hash(policy);
            hash.map(|hash| within(policy, hash)).into_iter().collect()
        });
    caches.sandboxes.index_by(BY_TEMPLATE_HASH, |sandbox| {
        let hash = hash_of_sandbox(sandbox);
        hash.map(|hash| within(sandbox, hash)).into_iter().collect()
    });
    caches.pods.index_by(BY_TEMPLATE_HASH, |pod| {
        let hash = hash_of_pod(pod);
        hash.map(|hash| within(pod, hash)).into_iter().collect()
    });
    let own = queue.clone();
    caches.templates.subscribe(move |change| {
        if let Some(template) = change.departed() {
            let key = ObjectKey::of(template.as_ref());
            own.add(key.sibling(&policy_name(&key.name)));
        }
    });
    caches
        .sandboxes
        .subscribe(wake_by(hash_of_sandbox, caches, &queue));
    caches.pods.subscribe(wake_by(hash_of_pod, caches, &queue));
}

fn hash_of_sandbox(sandbox: &Sandbox) -> Option<&str> {
    let labels = sandbox.spec.pod_template.metadata.labels.as_ref()?;
    labels
        .get(labels::SANDBOX_TEMPLATE_REF_HASH)
        .map(String::as_str)
}

fn hash_of_pod(pod: &ObservedPod) -> Option<&str> {
    let labels = pod.metadata.labels.as_ref()?;
    labels
        .get(labels::SANDBOX_TEMPLATE_REF_HASH)
        .map(String::as_str)
}

/// Reconciles a policy without a template when a sandbox or a pod that it applied to is deleted.
fn wake_by<K: Cached>(
    hash_of: fn(&K) -> Option<&str>,
    caches: &Caches,
    queue: &Queue,
) -> impl Fn(&Change<'_, K>) + Send + Sync + use<K> {
    let (policies, templates) = (caches.network_policies.clone(), caches.templates.clone());
    let queue = queue.clone();
    move |change| {
        let Some(gone) = change.departed() else {
            return;
        };
        let Some(hash) = hash_of(gone.as_ref()) else {
            return;
        };
        for policy in policies.indexed(BY_TEMPLATE_HASH, &within(gone.as_ref(), hash)) {
            let key = ObjectKey::of(policy.as_ref());
            let template = template_of(&policy).map(|template| key.sibling(template));
            if template.is_some_and(|template| templates.get(&template).is_none()) {
                queue.add(key);
            }
        }
    }
}

async fn reconcile(
    policy: Arc<NetworkPolicy>,
    context: Arc<Context>,
    memory: Memory,
) -> Result<Action, Error> {
    let key = ObjectKey::of(policy.as_ref());
    let Some(template) = template_of(&policy) else {
        return Ok(Action::AwaitChange);
    };
    if policy.metadata.deletion_timestamp.is_some()
        || has_template(&context, &key, template).await?
    {
        memory.forget(&key);
        return Ok(Action::AwaitChange);
    }
    if is_used(&context, &policy) {
        if memory.is_first_report(&key) {
            tell_retained(&context, &policy, template);
        }
        return Ok(Action::AwaitChange);
    }
    let grace = context.config.unused_policy_grace;
    let left = memory.left(&key, grace);
    if !left.is_zero() {
        return Ok(Action::RequeueAfter(left));
    }
    if is_used_on_the_server(&context, &key, &policy, template).await? {
        // The cache will show it.
        memory.forget(&key);
        return Ok(Action::RequeueAfter(grace.max(RECHECK)));
    }
    let policies = Writer::new(&context, &context.caches.network_policies, FIELD_MANAGER);
    let deletion = Deletion::given(Precondition::unchanged(policy.as_ref()));
    match policies.delete(&key, deletion).await {
        Err(error) if !error.is_conflict() => Err(Error::Delete(error)),
        _ => Ok(Action::AwaitChange),
    }
}

/// Whether the template exists. If the cache does not have it, the API server is asked.
async fn has_template(
    context: &Context,
    policy: &ObjectKey,
    template: &str,
) -> Result<bool, Error> {
    let key = policy.sibling(template);
    let templates = &context.caches.templates;
    if templates.get(&key).is_some() || templates.unreadable(&key).is_some() {
        return Ok(true);
    }
    let live = Writer::new(context, templates, FIELD_MANAGER)
        .get(&key)
        .await;
    match live {
        Ok(template) => Ok(template.is_some()),
        Err(error) if error.is_unreadable() => Ok(true),
        Err(error) => Err(Error::Template(error)),
    }
}

/// Whether the caches show a sandbox or a pod that the policy applies to. A sandbox that cannot be decoded counts as one.
fn is_used(context: &Context, policy: &NetworkPolicy) -> bool {
    let caches = &context.caches;
    let value = within(policy, selected_hash(policy).unwrap_or_default());
    let namespace = policy.metadata.namespace.as_deref().unwrap_or_default();
    !caches
        .sandboxes
        .indexed(BY_TEMPLATE_HASH, &value)
        .is_empty()
        || !caches.pods.indexed(BY_TEMPLATE_HASH, &value).is_empty()
        || !caches.sandboxes.unreadable_in(namespace).is_empty()
}

/// Whether the API server has a sandbox or a pod that the policy applies to. The caches may be stale.
async fn is_used_on_the_server(
    context: &Context,
    key: &ObjectKey,
    policy: &NetworkPolicy,
    template: &str,
) -> Result<bool, Error> {
    let hash = selected_hash(policy).unwrap_or_default();
    let selector = format!("{}={hash}", labels::SANDBOX_TEMPLATE_REF_HASH);
    let pods = list_metadata::<ObservedPod>(context, &key.namespace, &selector).await;
    if !pods.map_err(Error::List)?.is_empty() {
        return Ok(true);
    }
    // A claimed sandbox has the label only on its pod; an annotation names its template.
    let is_of_template = |sandbox: &ObjectMeta| {
        let annotations = sandbox.annotations.as_ref();
        let made_from =
            annotations.and_then(|annotations| annotations.get(labels::SANDBOX_TEMPLATE_REF));
        made_from.is_some_and(|made_from| made_from == template)
    };
    let sandboxes = list_metadata::<Sandbox>(context, &key.namespace, "").await;
    Ok(sandboxes.map_err(Error::List)?.iter().any(is_of_template))
}

fn tell_retained(context: &Context, policy: &NetworkPolicy, template: &str) {
    let occurrence = Occurrence {
        severity: Severity::Normal,
        reason: "NetworkPolicyRetained",
        action: "Retain",
        note: format!(
            "SandboxTemplate {template:?} is gone; network policy {:?} stays in force until the last sandbox of the template is gone",
            policy.name_any()
        ),
    };
    context.events.record(CONTROLLER, policy, occurrence);
}

/// The state of policies without a template. Clones refer to the same.
#[derive(Clone, Debug, Default)]
struct Memory(Arc<Mutex<HashMap<ObjectKey, Known>>>);

#[derive(Debug, Default)]
struct Known {
    /// Its retention was reported.
    is_reported: bool,
    /// Since when it applies to nothing.
    unused_since: Option<Instant>,
}

impl Memory {
    /// Whether the retention of the policy has not been reported yet. Marks it as reported, and the policy as in use.
    fn is_first_report(&self, key: &ObjectKey) -> bool {
        let mut entries = self.entries();
        let known = entries.entry(key.clone()).or_default();
        known.unused_since = None;
        !std::mem::replace(&mut known.is_reported, true)
    }

    /// How long an unused policy still stays.
    fn left(&self, key: &ObjectKey, grace: Duration) -> Duration {
        let now = Instant::now();
        let mut entries = self.entries();
        let known = entries.entry(key.clone()).or_default();
        let since = *known.unused_since.get_or_insert(now);
        grace.saturating_sub(now.duration_since(since))
    }

    fn forget(&self, key: &ObjectKey) {
        self.entries().remove(key);
    }

    fn entries(&self) -> MutexGuard<'_, HashMap<ObjectKey, Known>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

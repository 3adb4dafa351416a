//! The controller of `SandboxTemplate`: keeps the network policy that a template's sandboxes share. The policy of a deleted
//! template belongs to [`crate::retained_policy`].

use std::sync::{Arc, Once};

use api::SandboxTemplate;
use api::rbac::{MANAGE, Rule, SUBRESOURCE};
use k8s_openapi::api::core::v1::Namespace;
use k8s_openapi::api::networking::v1::NetworkPolicy;
use kube::{Api, ResourceExt};
use planner::owner::{controller_of, refers_to};
use planner::template::{Decision, TemplateFacts, decide, is_retained, policy_name};
use tracing::warn;

use crate::context::Context;
use crate::events::{Occurrence, Severity};
use crate::key::ObjectKey;
use crate::rbac::EVENTS;
use crate::runtime::{Action, Runtime, at_once};
use crate::writes::{Deletion, Precondition, WriteError, Writer};

/// What the controller needs to be allowed.
pub const RBAC: &[Rule] = &[
    Rule {
        groups: &[api::EXTENSIONS_GROUP],
        resources: &["sandboxtemplates"],
        verbs: MANAGE,
    },
    Rule {
        groups: &[api::EXTENSIONS_GROUP],
        resources: &["sandboxtemplates/finalizers"],
        verbs: SUBRESOURCE,
    },
    Rule {
        groups: &["networking.k8s.io"],
        resources: &["networkpolicies"],
        verbs: MANAGE,
    },
    Rule {
        groups: &[""],
        resources: &["namespaces"],
        verbs: &["get"],
    },
    EVENTS,
];

/// The controller's name in logs, metrics and events.
pub const CONTROLLER: &str = "sandboxtemplate";
/// The field manager of its writes.
const FIELD_MANAGER: &str = "sandboxtemplate-controller";

/// Why a template's network policy could not be reconciled.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error("cannot look for the template's network policy")]
    Observe(#[source] WriteError),
    #[error("cannot write the template's network policy")]
    Apply(#[source] WriteError),
}

/// Adds the controller to a runtime.
pub fn register(runtime: &mut Runtime) {
    let context = Arc::clone(&runtime.context);
    let caches = &context.caches;
    let workers = context.config.template_workers.get();
    let queue = runtime.controller(CONTROLLER, workers, &caches.templates, at_once, reconcile);
    runtime.follow(&caches.network_policies);
    caches.network_policies.subscribe(move |change| {
        let policy = change.latest();
        let key = ObjectKey::of(policy.as_ref());
        if let Some(owner) =
            controller_of(&policy.metadata).filter(|owner| refers_to::<SandboxTemplate>(owner))
        {
            queue.add(key.sibling(&owner.name));
        } else if let Some(template) = key.name.strip_suffix("-network-policy") {
            queue.add(key.sibling(template));
        }
    });
}

/// Creates, repairs or deletes the network policy of a template.
pub async fn reconcile(
    template: Arc<SandboxTemplate>,
    context: Arc<Context>,
) -> Result<Action, Error> {
    let key = ObjectKey::of(template.as_ref());
    let policy_key = key.sibling(&policy_name(&key.name));
    let policies = Writer::new(&context, &context.caches.network_policies, FIELD_MANAGER);
    let mut policy = context.caches.network_policies.get(&policy_key);
    for _ in 0..2 {
        let is_retained = policy
            .as_ref()
            .is_some_and(|policy| is_retained(&policy.metadata));
        let namespace_uid = if is_retained {
            None
        } else {
            namespace_uid(&context, &key.namespace).await
        };
        let decision = decide(TemplateFacts {
            template: &template,
            policy: policy.as_deref(),
            namespace_uid: namespace_uid.as_deref(),
        });
        let applied = apply(&context, &template, &policies, &policy_key, decision).await;
        match applied {
            Err(error) if is_outdated(&error) => {
                policy = policies.get(&policy_key).await.map_err(Error::Observe)?;
            }
            Err(error) if error.is_namespace_terminating() => return Ok(Action::AwaitChange),
            Err(error) => return Err(Error::Apply(error)),
            Ok(()) => return Ok(Action::AwaitChange),
        }
    }
    Ok(Action::Retry)
}

/// The UID of a namespace. A policy that is created without it is deleted with its template, which is better than no policy.
async fn namespace_uid(context: &Context, namespace: &str) -> Option<String> {
    let namespaces = Api::<Namespace>::all(context.client.clone());
    match namespaces.get_metadata(namespace).await {
        Ok(namespace) => namespace.metadata.uid,
        // The role of upstream's releases has no such right, and every template would warn again.
        Err(kube::Error::Api(status)) if status.code == 403 => {
            static WARNED: Once = Once::new();
            WARNED.call_once(|| {
                warn!(
                    "this account may not get namespaces: a template's network policy will go with the template, though its sandboxes run on; apply the role of this release"
                );
            });
            None
        }
        Err(error) => {
            warn!(
                error = &error as &dyn std::error::Error,
                namespace,
                "cannot read the namespace: a template's network policy will go with the template, though its sandboxes run on"
            );
            None
        }
    }
}

fn is_outdated(error: &WriteError) -> bool {
    use crate::writes::Failure::{AlreadyExists, Conflict, NotFound};
    matches!(error.failure, AlreadyExists | Conflict | NotFound)
}

async fn apply(
    context: &Context,
    template: &SandboxTemplate,
    policies: &Writer<'_, NetworkPolicy>,
    key: &ObjectKey,
    decision: Decision,
) -> Result<(), WriteError> {
    let tell = |severity, reason, action, note| {
        let occurrence = Occurrence {
            severity,
            reason,
            action,
            note,
        };
        context.events.record(CONTROLLER, template, occurrence);
    };
    match decision {
        Decision::Nothing => {}
        Decision::Create(policy) => {
            policies.create(key, &policy).await?;
        }
        Decision::Repair(policy) => {
            policies.replace(key, &policy).await?;
        }
        Decision::Adopt(policy) => {
            policies.replace(key, &policy).await?;
            tell(
                Severity::Normal,
                "NetworkPolicyAdopted",
                "Adopt",
                format!(
                    "Adopted network policy {:?}, which had no owner",
                    policy.name_any()
                ),
            );
        }
        Decision::Delete { uid, .. } => {
            let deletion = Deletion::given(Precondition::uid(uid));
            policies.delete(key, deletion).await?;
        }
        Decision::HandsOff { name, owner } => tell(
            Severity::Warning,
            "NetworkPolicyConflict",
            "Skip",
            format!(
                "Network policy {name:?} belongs to {owner} and is left alone: the template's rules are not in force"
            ),
        ),
    }
    Ok(())
}

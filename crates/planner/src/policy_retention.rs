//! How a template's network policy outlives the template, and when it is deleted.
//!
//! The template controls its policy, and garbage collection deletes an object once all of its owners are gone. If the template were the
//! only owner, its deletion would open the network of every sandbox that still runs. So the policy has its namespace as a second owner.
//! When the template goes, garbage collection only takes the reference to it off the policy, also while no controller runs. The controller
//! deletes the policy once no sandbox and no pod of the template is left.

use api::SandboxTemplate;
use api::labels;
use api::names::name_hash;
use k8s_openapi::api::core::v1::Namespace;
use k8s_openapi::api::networking::v1::NetworkPolicy;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{ObjectMeta, OwnerReference};

use crate::owner::{controller_of, refers_to};

const SUFFIX: &str = "-network-policy";

/// The name of the policy of a template.
pub fn policy_name(template: &str) -> String {
    format!("{template}{SUFFIX}")
}

/// The reference that keeps a policy when its template goes. It controls nothing, and does not block the namespace's deletion.
pub(crate) fn namespace_reference(name: &str, uid: &str) -> OwnerReference {
    OwnerReference {
        api_version: "v1".to_owned(),
        kind: "Namespace".to_owned(),
        name: name.to_owned(),
        uid: uid.to_owned(),
        controller: None,
        block_owner_deletion: None,
    }
}

/// Whether a policy outlives its template.
pub fn is_retained(policy: &ObjectMeta) -> bool {
    let owners = policy.owner_references.iter().flatten();
    let mut namespaces = owners.filter(|owner| refers_to_namespace(owner));
    namespaces.any(|owner| Some(&owner.name) == policy.namespace.as_ref())
}

fn refers_to_namespace(owner: &OwnerReference) -> bool {
    owner.api_version == <Namespace as k8s_openapi::Resource>::API_VERSION
        && owner.kind == <Namespace as k8s_openapi::Resource>::KIND
}

/// The hash of the template's name by which a policy selects pods.
pub fn selected_hash(policy: &NetworkPolicy) -> Option<&str> {
    let selector = policy.spec.as_ref()?.pod_selector.as_ref()?;
    let labels = selector.match_labels.as_ref()?;
    labels
        .get(labels::SANDBOX_TEMPLATE_REF_HASH)
        .map(String::as_str)
}

/// The name of the template that a policy was made for, if the template controller made it and no other controller has it.
pub fn template_of(policy: &NetworkPolicy) -> Option<&str> {
    let template = policy.metadata.name.as_deref()?.strip_suffix(SUFFIX)?;
    let is_ours = is_retained(&policy.metadata)
        && selected_hash(policy) == Some(&name_hash(template))
        && controller_of(&policy.metadata)
            .is_none_or(|owner| refers_to::<SandboxTemplate>(owner) && owner.name == template);
    is_ours.then_some(template)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::template::{Decision, TemplateFacts, decide};

    fn policy() -> NetworkPolicy {
        let mut template = SandboxTemplate::default();
        template.metadata.name = Some("py".into());
        template.metadata.namespace = Some("ns".into());
        template.metadata.uid = Some("template-uid".into());
        let observed = TemplateFacts {
            template: &template,
            policy: None,
            namespace_uid: Some("ns-uid"),
        };
        match decide(observed) {
            Decision::Create(policy) => *policy,
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn a_policy_is_the_templates_with_and_without_the_template_and_no_one_elses() {
        let made = policy();
        assert_eq!(template_of(&made), Some("py"));
        assert_eq!(made.metadata.owner_references.as_ref().unwrap().len(), 2);
        let change = |edit: fn(&mut NetworkPolicy)| {
            let mut policy = policy();
            edit(&mut policy);
            template_of(&policy).map(str::to_owned)
        };
        assert_eq!(
            change(|policy| policy
                .metadata
                .owner_references
                .as_mut()
                .unwrap()
                .retain(|it| it.kind == "Namespace"))
            .as_deref(),
            Some("py"),
            "garbage collection took the template's reference off"
        );
        for stranger in [
            change(|policy| policy.metadata.owner_references = None),
            change(|policy| {
                policy.metadata.owner_references.as_mut().unwrap()[0].kind = "App".into();
            }),
            change(|policy| policy.metadata.name = Some("py-policy".into())),
            change(|policy| policy.metadata.name = Some("js-network-policy".into())),
            change(|policy| policy.metadata.namespace = Some("another".into())),
            change(|policy| policy.spec = None),
        ] {
            assert_eq!(stranger, None);
        }
    }
}

//! The network policy that all sandboxes of a template share.
//!
//! Pure: given the template and the policy of its name, what to do. [`warm_pool`](crate::warm_pool) and [`claim`](crate::claim) apply
//! template changes to sandboxes.

use std::collections::BTreeMap;

use api::names::name_hash;
use api::template::NetworkPolicyManagement;
use api::{SYSTEM_NAMESPACE, SandboxTemplate, labels};
use k8s_openapi::api::networking::v1::{
    IPBlock, NetworkPolicy, NetworkPolicyEgressRule, NetworkPolicyIngressRule, NetworkPolicyPeer,
    NetworkPolicyPort, NetworkPolicySpec,
};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{
    LabelSelector, LabelSelectorRequirement, ObjectMeta, OwnerReference,
};

use crate::owner::{controller_of, controller_reference, is_controlled_by, refers_to_predecessor};
pub use crate::policy_retention::{is_retained, policy_name};
use crate::policy_retention::{namespace_reference, template_of};

/// The facts that a decision about a template's policy rests on.
#[derive(Clone, Copy, Debug)]
pub struct TemplateFacts<'a> {
    pub template: &'a SandboxTemplate,
    /// The policy of the name that [`policy_name`] gives, of any owner.
    pub policy: Option<&'a NetworkPolicy>,
    /// The UID of the namespace, needed to make a policy that outlives its template ([`is_retained`]).
    pub namespace_uid: Option<&'a str>,
}

/// What to do about a template's policy.
#[derive(Clone, Debug, PartialEq)]
pub enum Decision {
    /// The policy is as desired, or belongs to another owner.
    Nothing,
    Create(Box<NetworkPolicy>),
    /// Replace it, as of the resource version it carries.
    Repair(Box<NetworkPolicy>),
    /// It has no owner: take it over, as of the resource version it carries.
    Adopt(Box<NetworkPolicy>),
    Delete {
        name: String,
        uid: String,
    },
    /// Another controller owns it: leave it alone, and emit an event.
    HandsOff {
        name: String,
        owner: String,
    },
}

pub fn decide(observed: TemplateFacts<'_>) -> Decision {
    let template = observed.template;
    if template.metadata.deletion_timestamp.is_some() {
        return Decision::Nothing;
    }
    match template.spec.network_policy_management() {
        NetworkPolicyManagement::Unmanaged => decide_unmanaged(observed),
        NetworkPolicyManagement::Managed => decide_managed(observed),
    }
}

fn decide_unmanaged(observed: TemplateFacts<'_>) -> Decision {
    let template_uid = observed
        .template
        .metadata
        .uid
        .as_deref()
        .unwrap_or_default();
    match observed.policy {
        Some(policy)
            if (is_controlled_by(&policy.metadata, template_uid)
                || is_left_behind(policy, observed.template))
                && policy.metadata.deletion_timestamp.is_none() =>
        {
            Decision::Delete {
                name: policy.metadata.name.clone().unwrap_or_default(),
                uid: policy.metadata.uid.clone().unwrap_or_default(),
            }
        }
        _ => Decision::Nothing,
    }
}

fn decide_managed(observed: TemplateFacts<'_>) -> Decision {
    let template = observed.template;
    let name = template.metadata.name.as_deref().unwrap_or_default();
    let spec = without_empty_lists(desired_spec(template));
    let Some(policy) = observed.policy else {
        return Decision::Create(Box::new(NetworkPolicy {
            metadata: ObjectMeta {
                name: Some(policy_name(name)),
                namespace: template.metadata.namespace.clone(),
                owner_references: Some(owners(observed, &[])),
                ..ObjectMeta::default()
            },
            spec: Some(spec),
        }));
    };
    if policy.metadata.deletion_timestamp.is_some() {
        // Its deletion causes another reconcile.
        return Decision::Nothing;
    }
    let is_as_it_should_be = policy.spec.clone().map(without_empty_lists).as_ref() == Some(&spec);
    let desired = || {
        let mut desired = policy.clone();
        let present = policy.metadata.owner_references.as_deref();
        desired.metadata.owner_references = Some(owners(observed, present.unwrap_or_default()));
        desired.spec = Some(spec);
        Box::new(desired)
    };
    match controller_of(&policy.metadata) {
        _ if is_left_behind(policy, template) => Decision::Repair(desired()),
        None => Decision::Adopt(desired()),
        Some(owner) if Some(&owner.uid) == template.metadata.uid.as_ref() => {
            let can_be_retained = observed.namespace_uid.is_some();
            if is_as_it_should_be && (is_retained(&policy.metadata) || !can_be_retained) {
                return Decision::Nothing;
            }
            Decision::Repair(desired())
        }
        Some(owner) => Decision::HandsOff {
            name: policy.metadata.name.clone().unwrap_or_default(),
            owner: format!("{} {:?}", owner.kind, owner.name),
        },
    }
}

/// Whether a policy is that of an earlier template of this name.
fn is_left_behind(policy: &NetworkPolicy, template: &SandboxTemplate) -> bool {
    let name = template.metadata.name.as_deref().unwrap_or_default();
    let uid = template.metadata.uid.as_deref();
    match controller_of(&policy.metadata) {
        Some(owner) => refers_to_predecessor::<SandboxTemplate>(owner, name, uid),
        None => template_of(policy) == Some(name),
    }
}

/// The owners that a template's policy should have: the template, which controls it, the namespace, and those it has besides.
fn owners(observed: TemplateFacts<'_>, present: &[OwnerReference]) -> Vec<OwnerReference> {
    let template = observed.template;
    let namespace = template.metadata.namespace.as_deref().unwrap_or_default();
    let ours = [
        Some(controller_reference(template)),
        observed
            .namespace_uid
            .map(|uid| namespace_reference(namespace, uid)),
    ];
    let mut owners: Vec<OwnerReference> = ours.into_iter().flatten().collect();
    let name = template.metadata.name.as_deref().unwrap_or_default();
    let uid = template.metadata.uid.as_deref();
    let others = present.iter().filter(|owner| {
        let is_ours = owners.iter().any(|ours| ours.uid == owner.uid);
        !is_ours && !refers_to_predecessor::<SandboxTemplate>(owner, name, uid)
    });
    let others: Vec<OwnerReference> = others.cloned().collect();
    owners.extend(others);
    owners
}

/// The spec that a template's policy should have. The selector and the policy types are always ours, so that whatever the
/// template does not allow is denied.
fn desired_spec(template: &SandboxTemplate) -> NetworkPolicySpec {
    let name = template.metadata.name.as_deref().unwrap_or_default();
    let (ingress, egress) = match &template.spec.network_policy {
        None => (Some(vec![router_ingress()]), Some(vec![public_egress()])),
        Some(rules) => (rules.ingress.clone(), rules.egress.clone()),
    };
    NetworkPolicySpec {
        pod_selector: Some(selector(
            labels::SANDBOX_TEMPLATE_REF_HASH,
            &name_hash(name),
        )),
        policy_types: Some(vec!["Ingress".to_owned(), "Egress".to_owned()]),
        ingress: ingress.map(|rules| {
            rules
                .into_iter()
                .map(|rule| NetworkPolicyIngressRule {
                    ports: with_protocols(rule.ports),
                    ..rule
                })
                .collect()
        }),
        egress: egress.map(|rules| {
            rules
                .into_iter()
                .map(|rule| NetworkPolicyEgressRule {
                    ports: with_protocols(rule.ports),
                    ..rule
                })
                .collect()
        }),
    }
}

/// The same spec with every list left out that has nothing in it. A server does not keep those, and they mean the same: no rules admit
/// nothing, a rule without peers or ports admits all.
fn without_empty_lists(mut spec: NetworkPolicySpec) -> NetworkPolicySpec {
    fn drop_empty<T>(list: &mut Option<Vec<T>>) {
        if list.as_ref().is_some_and(Vec::is_empty) {
            *list = None;
        }
    }
    fn tidy_selector(selector: &mut LabelSelector) {
        drop_empty(&mut selector.match_expressions);
        if selector
            .match_labels
            .as_ref()
            .is_some_and(BTreeMap::is_empty)
        {
            selector.match_labels = None;
        }
    }
    fn tidy_peers(peers: &mut Option<Vec<NetworkPolicyPeer>>) {
        drop_empty(peers);
        for peer in peers.iter_mut().flatten() {
            let selectors = [&mut peer.pod_selector, &mut peer.namespace_selector];
            selectors.into_iter().flatten().for_each(tidy_selector);
            if let Some(block) = &mut peer.ip_block {
                drop_empty(&mut block.except);
            }
        }
    }
    drop_empty(&mut spec.ingress);
    drop_empty(&mut spec.egress);
    for rule in spec.ingress.iter_mut().flatten() {
        drop_empty(&mut rule.ports);
        tidy_peers(&mut rule.from);
    }
    for rule in spec.egress.iter_mut().flatten() {
        drop_empty(&mut rule.ports);
        tidy_peers(&mut rule.to);
    }
    spec
}

/// The API server sets this default; without it here, the policy would always look changed.
fn with_protocols(ports: Option<Vec<NetworkPolicyPort>>) -> Option<Vec<NetworkPolicyPort>> {
    let fill = |port: NetworkPolicyPort| NetworkPolicyPort {
        protocol: port.protocol.or_else(|| Some("TCP".to_owned())),
        ..port
    };
    ports.map(|ports| ports.into_iter().map(fill).collect())
}

/// Only the router may connect, from the sandbox's own namespace or from the system's. The pod of a sandbox is not the router, however it is
/// labelled: a tenant chooses some of its labels. It always has the label of its name, which only the controllers write.
fn router_ingress() -> NetworkPolicyIngressRule {
    let (key, value) = labels::ROUTER_APP;
    let router = LabelSelector {
        match_expressions: Some(vec![LabelSelectorRequirement {
            key: labels::SANDBOX_NAME_HASH.to_owned(),
            operator: "DoesNotExist".to_owned(),
            values: None,
        }]),
        ..selector(key, value)
    };
    NetworkPolicyIngressRule {
        from: Some(vec![
            NetworkPolicyPeer {
                pod_selector: Some(router.clone()),
                ..NetworkPolicyPeer::default()
            },
            NetworkPolicyPeer {
                pod_selector: Some(router),
                namespace_selector: Some(selector("kubernetes.io/metadata.name", SYSTEM_NAMESPACE)),
                ..NetworkPolicyPeer::default()
            },
        ]),
        ports: None,
    }
}

/// Only public addresses are reachable: no private networks (the cluster's, the cloud's), no link-local ones (metadata
/// servers). That keeps the cluster's DNS out of reach too, on purpose.
fn public_egress() -> NetworkPolicyEgressRule {
    let block = |cidr: &str, except: &[&str]| NetworkPolicyPeer {
        ip_block: Some(IPBlock {
            cidr: cidr.to_owned(),
            except: Some(except.iter().map(|&range| range.to_owned()).collect()),
        }),
        ..NetworkPolicyPeer::default()
    };
    NetworkPolicyEgressRule {
        to: Some(vec![
            block(
                "0.0.0.0/0",
                &[
                    "10.0.0.0/8",
                    "172.16.0.0/12",
                    "192.168.0.0/16",
                    "169.254.0.0/16",
                ],
            ),
            block("::/0", &["fc00::/7", "fe80::/10"]),
        ]),
        ports: None,
    }
}

fn selector(key: &str, value: &str) -> LabelSelector {
    LabelSelector {
        match_labels: Some(BTreeMap::from([(key.to_owned(), value.to_owned())])),
        match_expressions: None,
    }
}

#[cfg(test)]
mod tests {
    use api::template::NetworkPolicyRules;
    use k8s_openapi::apimachinery::pkg::util::intstr::IntOrString;

    use super::*;

    fn template() -> SandboxTemplate {
        let mut template = SandboxTemplate::default();
        template.metadata.name = Some("py".into());
        template.metadata.namespace = Some("ns".into());
        template.metadata.uid = Some("template-uid".into());
        template
    }

    fn created(template: &SandboxTemplate) -> NetworkPolicy {
        let observed = TemplateFacts {
            template,
            policy: None,
            namespace_uid: Some("ns-uid"),
        };
        let Decision::Create(mut policy) = decide(observed) else {
            panic!("expected a policy to be made");
        };
        policy.metadata.uid = Some("policy-uid".into());
        policy.metadata.resource_version = Some("7".into());
        *policy
    }

    fn decide_for(template: &SandboxTemplate, policy: &NetworkPolicy) -> Decision {
        decide(TemplateFacts {
            template,
            policy: Some(policy),
            namespace_uid: Some("ns-uid"),
        })
    }

    fn unmanaged() -> SandboxTemplate {
        let mut unmanaged = template();
        unmanaged.spec.network_policy_management = Some(NetworkPolicyManagement::Unmanaged);
        unmanaged.spec.network_policy = Some(NetworkPolicyRules::default());
        unmanaged
    }

    #[test]
    fn the_default_lets_the_router_in_and_public_addresses_out() {
        let policy = created(&template());
        assert_eq!(policy.metadata.name.as_deref(), Some("py-network-policy"));
        let owner = &policy.metadata.owner_references.as_ref().unwrap()[0];
        assert_eq!(
            (owner.uid.as_str(), owner.controller),
            ("template-uid", Some(true))
        );

        let spec = policy.spec.unwrap();
        assert_eq!(spec.policy_types.unwrap(), ["Ingress", "Egress"]);
        let matched = spec.pod_selector.unwrap().match_labels.unwrap();
        assert_eq!(matched[labels::SANDBOX_TEMPLATE_REF_HASH], name_hash("py"));

        let peers = spec.ingress.unwrap().remove(0).from.unwrap();
        assert_eq!(peers.len(), 2);
        for peer in &peers {
            let matched = peer.pod_selector.as_ref().unwrap().match_labels.as_ref();
            assert_eq!(matched.unwrap()["app"], "sandbox-router");
            let excluded = &peer.pod_selector.as_ref().unwrap().match_expressions;
            let excluded = &excluded.as_ref().unwrap()[0];
            assert_eq!(
                (excluded.key.as_str(), excluded.operator.as_str()),
                (labels::SANDBOX_NAME_HASH, "DoesNotExist"),
                "a sandbox is not the router, whatever labels its tenant chose"
            );
        }
        assert_eq!(peers[0].namespace_selector, None);
        let blocks: Vec<_> = spec.egress.unwrap()[0]
            .to
            .iter()
            .flatten()
            .map(|peer| peer.ip_block.clone().unwrap())
            .collect();
        assert!(
            blocks[0]
                .except
                .as_ref()
                .unwrap()
                .contains(&"169.254.0.0/16".to_owned())
        );
        assert_eq!(
            blocks[1].except.as_ref().unwrap(),
            &["fc00::/7", "fe80::/10"]
        );
    }

    #[test]
    fn rules_of_its_own_are_taken_over_under_our_selector() {
        let mut template = template();
        template.spec.network_policy = Some(NetworkPolicyRules {
            ingress: None,
            egress: Some(vec![NetworkPolicyEgressRule {
                ports: Some(vec![NetworkPolicyPort {
                    port: Some(IntOrString::Int(53)),
                    ..NetworkPolicyPort::default()
                }]),
                to: None,
            }]),
        });
        let spec = created(&template).spec.unwrap();
        assert_eq!(spec.ingress, None);
        assert_eq!(
            spec.policy_types.unwrap().len(),
            2,
            "no ingress rules means no ingress"
        );
        let ports = spec.egress.unwrap().remove(0).ports.unwrap();
        assert_eq!(ports[0].protocol.as_deref(), Some("TCP"));
        assert!(spec.pod_selector.unwrap().match_labels.is_some());
    }

    #[test]
    fn drift_is_repaired_by_replacing_the_whole_spec() {
        let policy = created(&template());
        assert_eq!(decide_for(&template(), &policy), Decision::Nothing);

        let mut drifted = policy.clone();
        drifted.spec.as_mut().unwrap().pod_selector = Some(selector("old-label", "x"));
        let Decision::Repair(repaired) = decide_for(&template(), &drifted) else {
            panic!("expected a repair");
        };
        assert_eq!(*repaired, policy);
    }

    #[test]
    fn lists_that_a_server_drops_because_they_are_empty_are_no_drift() {
        let mut template = template();
        template.spec.network_policy = Some(NetworkPolicyRules {
            ingress: Some(Vec::new()),
            egress: Some(vec![NetworkPolicyEgressRule {
                ports: Some(Vec::new()),
                to: Some(vec![NetworkPolicyPeer {
                    ip_block: Some(IPBlock {
                        cidr: "192.0.2.0/24".into(),
                        except: Some(Vec::new()),
                    }),
                    pod_selector: Some(LabelSelector {
                        match_labels: Some(BTreeMap::new()),
                        match_expressions: Some(Vec::new()),
                    }),
                    ..NetworkPolicyPeer::default()
                }]),
            }]),
        });
        // As a server returns it that omits empty lists.
        let mut kept = created(&template);
        let spec = kept.spec.as_mut().unwrap();
        spec.ingress = None;
        let rule = &mut spec.egress.as_mut().unwrap()[0];
        rule.ports = None;
        let peer = &mut rule.to.as_mut().unwrap()[0];
        peer.ip_block.as_mut().unwrap().except = None;
        peer.pod_selector = Some(LabelSelector::default());
        assert_eq!(decide_for(&template, &kept), Decision::Nothing);
        // A server may also keep them.
        kept.spec.as_mut().unwrap().ingress = Some(Vec::new());
        assert_eq!(decide_for(&template, &kept), Decision::Nothing);
        // An empty selector selects every pod, and is not the same as none.
        let peer = &mut kept.spec.as_mut().unwrap().egress.as_mut().unwrap()[0];
        peer.to.as_mut().unwrap()[0].pod_selector = None;
        assert!(matches!(decide_for(&template, &kept), Decision::Repair(_)));
    }

    #[test]
    fn a_policy_without_owner_is_adopted_and_one_of_another_owner_is_not() {
        let mut unowned = created(&template());
        unowned.metadata.owner_references = None;
        unowned.spec = None;
        let Decision::Adopt(adopted) = decide_for(&template(), &unowned) else {
            panic!("expected an adoption");
        };
        assert_eq!(*adopted, created(&template()));

        let mut foreign = created(&template());
        foreign.metadata.owner_references = Some(vec![OwnerReference {
            kind: "App".into(),
            name: "x".into(),
            uid: "other".into(),
            controller: Some(true),
            ..OwnerReference::default()
        }]);
        assert!(matches!(
            decide_for(&template(), &foreign),
            Decision::HandsOff { owner, .. } if owner == "App \"x\""
        ));
        assert_eq!(decide_for(&unmanaged(), &foreign), Decision::Nothing);
    }

    #[test]
    fn unmanaged_deletes_only_our_own_policy() {
        let ours = created(&template());
        assert_eq!(
            decide_for(&unmanaged(), &ours),
            Decision::Delete {
                name: "py-network-policy".into(),
                uid: "policy-uid".into()
            }
        );
        let mut users = ours;
        users.metadata.owner_references = None;
        assert_eq!(decide_for(&unmanaged(), &users), Decision::Nothing);
        let absent = TemplateFacts {
            template: &unmanaged(),
            policy: None,
            namespace_uid: None,
        };
        assert_eq!(decide(absent), Decision::Nothing);
    }

    #[test]
    fn a_policy_outlives_its_template_and_is_taken_over_by_the_next_of_its_name() {
        let policy = created(&template());
        let owners = policy.metadata.owner_references.as_ref().unwrap();
        assert_eq!(owners[1], namespace_reference("ns", "ns-uid"));
        let mut unretained = policy.clone();
        unretained.metadata.owner_references.as_mut().unwrap().pop();
        assert_eq!(
            decide_for(&template(), &unretained),
            Decision::Repair(Box::new(policy.clone())),
            "a policy that an earlier release made outlives its template too"
        );

        let mut next = template();
        next.metadata.uid = Some("next-uid".into());
        next.spec.network_policy = Some(NetworkPolicyRules::default());
        let mut taken_over = created(&next);
        taken_over.metadata.uid.clone_from(&policy.metadata.uid);
        let mut collected = policy.clone();
        collected
            .metadata
            .owner_references
            .as_mut()
            .unwrap()
            .remove(0);
        let mut unmanaged = unmanaged();
        unmanaged.metadata.uid = Some("next-uid".into());
        // Before and after garbage collection.
        for left in [policy, collected] {
            assert_eq!(
                decide_for(&next, &left),
                Decision::Repair(Box::new(taken_over.clone()))
            );
            assert!(matches!(
                decide_for(&unmanaged, &left),
                Decision::Delete { .. }
            ));
        }
    }

    #[test]
    fn a_template_that_is_going_is_left_to_garbage_collection() {
        let mut going = template();
        going.metadata.deletion_timestamp =
            Some(k8s_openapi::apimachinery::pkg::apis::meta::v1::Time(
                k8s_openapi::jiff::Timestamp::UNIX_EPOCH,
            ));
        let observed = TemplateFacts {
            template: &going,
            policy: None,
            namespace_uid: None,
        };
        assert_eq!(decide(observed), Decision::Nothing);
    }
}

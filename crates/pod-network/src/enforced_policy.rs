//! A network policy as it is enforced. One that cannot be decoded denies all traffic of the pods that it selects (fail closed).

use std::borrow::Cow;

use api::decoding::{Decoded, text_of};
use k8s_openapi::api::networking::v1::{NetworkPolicy, NetworkPolicySpec};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{LabelSelector, ObjectMeta};
use kube::Resource;
use kube::core::NamespaceResourceScope;
use serde::{Deserialize, Deserializer};

use api::readable::warn;

#[derive(Clone, Debug, Default)]
pub struct EnforcedPolicy(pub NetworkPolicy);

impl<'de> Deserialize<'de> for EnforcedPolicy {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let text = &text_of(deserializer)?;
        Ok(Self(match Decoded::from_json(text) {
            Decoded::Readable(policy) => policy,
            Decoded::Unreadable(left) => {
                warn::<NetworkPolicy>(&left);
                deny_all(left.metadata, selector(text))
            }
        }))
    }
}

/// The pods that an undecodable policy selects: all pods of its namespace if its selector cannot be decoded either.
fn selector(text: &str) -> LabelSelector {
    #[derive(Deserialize)]
    struct Policy {
        spec: Spec,
    }
    #[derive(Deserialize)]
    #[serde(rename_all = "camelCase")]
    struct Spec {
        pod_selector: LabelSelector,
    }
    serde_json::from_str(text)
        .map(|policy: Policy| policy.spec.pod_selector)
        .unwrap_or_default()
}

fn deny_all(metadata: ObjectMeta, pod_selector: LabelSelector) -> NetworkPolicy {
    NetworkPolicy {
        metadata,
        spec: Some(NetworkPolicySpec {
            pod_selector: Some(pod_selector),
            policy_types: Some(vec!["Ingress".to_owned(), "Egress".to_owned()]),
            ..NetworkPolicySpec::default()
        }),
    }
}

impl Resource for EnforcedPolicy {
    type DynamicType = ();
    type Scope = NamespaceResourceScope;

    fn kind((): &()) -> Cow<'_, str> {
        NetworkPolicy::kind(&())
    }

    fn group((): &()) -> Cow<'_, str> {
        NetworkPolicy::group(&())
    }

    fn version((): &()) -> Cow<'_, str> {
        NetworkPolicy::version(&())
    }

    fn plural((): &()) -> Cow<'_, str> {
        NetworkPolicy::plural(&())
    }

    fn meta(&self) -> &ObjectMeta {
        &self.0.metadata
    }

    fn meta_mut(&mut self) -> &mut ObjectMeta {
        &mut self.0.metadata
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(text: &str) -> NetworkPolicySpec {
        let EnforcedPolicy(policy) = serde_json::from_str(text).unwrap();
        assert_eq!(policy.metadata.name.as_deref(), Some("p"));
        policy.spec.unwrap()
    }

    #[test]
    fn a_policy_that_cannot_be_decoded_denies_all_traffic_of_its_pods() {
        let spec = read(
            r#"{"metadata":{"name":"p"},"spec":{"podSelector":{"matchLabels":{"a":"b"}},"policyTypes":["Ingress"],
                "ingress":[{"ports":[{"port":1,"endPort":3000000000}]}]}}"#,
        );
        let selector = spec.pod_selector.unwrap();
        assert_eq!(selector.match_labels.unwrap()["a"], "b");
        assert_eq!(spec.policy_types.unwrap(), ["Ingress", "Egress"]);
        assert_eq!((spec.ingress, spec.egress), (None, None));
    }

    #[test]
    fn a_policy_whose_selector_cannot_be_decoded_denies_all_traffic_of_all_pods() {
        let spec =
            read(r#"{"metadata":{"name":"p"},"spec":{"podSelector":{"matchLabels":{"a":1}}}}"#);
        assert_eq!(spec.pod_selector, Some(LabelSelector::default()));
        assert_eq!(spec.policy_types.unwrap(), ["Ingress", "Egress"]);
    }

    #[test]
    fn a_decodable_policy_is_enforced_unchanged() {
        let spec = read(
            r#"{"metadata":{"name":"p"},"spec":{"podSelector":{},"policyTypes":["Ingress"],"ingress":[{}]}}"#,
        );
        assert_eq!(spec.policy_types.unwrap(), ["Ingress"]);
        assert_eq!(spec.ingress.unwrap().len(), 1);
    }
}

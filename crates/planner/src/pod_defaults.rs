//! The secure defaults of pods that are created from a template.

use api::SandboxTemplateSpec;
use k8s_openapi::api::core::v1::{PodDNSConfig, PodSpec};

/// Public resolvers, for sandboxes whose default network policy keeps them from the cluster's.
const PUBLIC_RESOLVERS: [&str; 2] = ["8.8.8.8", "1.1.1.1"];

/// Fills in the secure defaults.
///
/// No service account token is mounted. Under the default network policy the cluster's own DNS is out of reach, and would
/// reveal the names of internal services if it were not: public resolvers take its place. A template with rules of its
/// own, or with an unmanaged network, keeps its DNS: it may have no way out to public resolvers.
pub fn apply(template: &SandboxTemplateSpec, spec: &mut PodSpec) {
    spec.automount_service_account_token.get_or_insert(false);
    let chooses_dns = spec
        .dns_policy
        .as_ref()
        .is_some_and(|policy| !policy.is_empty());
    if template.is_secure_by_default() && !chooses_dns {
        spec.dns_policy = Some("None".to_owned());
        spec.dns_config = Some(PodDNSConfig {
            nameservers: Some(PUBLIC_RESOLVERS.map(str::to_owned).to_vec()),
            ..PodDNSConfig::default()
        });
    }
}

#[cfg(test)]
mod tests {
    use api::template::{NetworkPolicyManagement, NetworkPolicyRules};

    use super::*;

    #[test]
    fn a_plain_template_gets_no_token_and_public_resolvers() {
        let mut spec = PodSpec::default();
        apply(&SandboxTemplateSpec::default(), &mut spec);
        assert_eq!(spec.automount_service_account_token, Some(false));
        assert_eq!(spec.dns_policy.as_deref(), Some("None"));
        let resolvers = spec.dns_config.unwrap().nameservers.unwrap();
        assert_eq!(resolvers, PUBLIC_RESOLVERS);
    }

    #[test]
    fn what_the_template_chooses_stays() {
        let mut spec = PodSpec {
            automount_service_account_token: Some(true),
            dns_policy: Some("ClusterFirst".into()),
            ..PodSpec::default()
        };
        let chosen = spec.clone();
        apply(&SandboxTemplateSpec::default(), &mut spec);
        assert_eq!(spec, chosen);
    }

    #[test]
    fn dns_is_left_alone_unless_the_network_is_the_default_one() {
        let own_rules = SandboxTemplateSpec {
            network_policy: Some(NetworkPolicyRules::default()),
            ..SandboxTemplateSpec::default()
        };
        let unmanaged = SandboxTemplateSpec {
            network_policy_management: Some(NetworkPolicyManagement::Unmanaged),
            ..SandboxTemplateSpec::default()
        };
        for template in [own_rules, unmanaged] {
            let mut spec = PodSpec::default();
            apply(&template, &mut spec);
            assert_eq!(spec.dns_policy, None);
            assert_eq!(spec.automount_service_account_token, Some(false));
        }
    }
}

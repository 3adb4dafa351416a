//! The specification of a pod sandbox: its hostname, its entries in `/etc/hosts` and its `resolv.conf`. Pure, except that it reads the
//! machine's `resolv.conf`.

use std::fmt::Write;

use k8s_openapi::api::core::v1::{Pod, PodSpec};

use crate::config::Config;
use crate::pod_uid::PodUid;
use crate::runtime::{PodIdentity, PodSandboxSpec};

/// A hostname that the kernel accepts.
const LONGEST_HOSTNAME: usize = 63;

pub fn sandbox_spec(uid: &PodUid, pod: &Pod, config: &Config) -> PodSandboxSpec {
    let spec = pod.spec.clone().unwrap_or_default();
    let metadata = &pod.metadata;
    let namespace = metadata.namespace.clone().unwrap_or_default();
    let name = metadata.name.clone().unwrap_or_default();
    let mut hostname = spec
        .hostname
        .clone()
        .filter(|hostname| !hostname.is_empty())
        .unwrap_or_else(|| name.clone());
    hostname.truncate(LONGEST_HOSTNAME);
    let hostname = hostname.trim_end_matches(['-', '.']).to_owned();
    let domain = spec
        .subdomain
        .as_ref()
        .filter(|subdomain| !subdomain.is_empty());
    let fully_qualified_name = domain.map(|subdomain| {
        format!(
            "{hostname}.{subdomain}.{namespace}.svc.{}",
            config.cluster_domain
        )
    });
    let host_resolver = std::fs::read_to_string(&config.resolver_file).unwrap_or_default();
    PodSandboxSpec {
        driver: None,
        identity: PodIdentity {
            uid: uid.to_string(),
            namespace: namespace.clone(),
            name,
        },
        host_aliases: spec
            .host_aliases
            .iter()
            .flatten()
            .map(|alias| {
                (
                    alias.ip.clone(),
                    alias.hostnames.clone().unwrap_or_default(),
                )
            })
            .collect(),
        fully_qualified_name,
        resolver: resolver(&spec, &namespace, &host_resolver, config),
        shared_processes: spec.share_process_namespace == Some(true),
        containers: spec.containers.len() + spec.init_containers.as_ref().map_or(0, Vec::len),
        hostname,
    }
}

/// The pod's `resolv.conf`.
fn resolver(spec: &PodSpec, namespace: &str, host: &str, config: &Config) -> String {
    let of_host = |key: &str| -> Vec<String> {
        host.lines()
            .filter_map(|line| line.trim().strip_prefix(key))
            .flat_map(|rest| {
                rest.split_whitespace()
                    .map(str::to_owned)
                    .collect::<Vec<_>>()
            })
            .collect()
    };
    // The pod cannot reach a resolver on the machine's loopback.
    let is_reachable = |server: &String| !server.starts_with("127.") && server != "::1";
    let policy = spec.dns_policy.as_deref().unwrap_or("ClusterFirst");
    let (mut servers, mut searches, mut options) = match policy {
        "None" => (Vec::new(), Vec::new(), Vec::new()),
        "ClusterFirst" | "ClusterFirstWithHostNet" if !config.name_servers.is_empty() => {
            let domain = &config.cluster_domain;
            let mut searches = vec![
                format!("{namespace}.svc.{domain}"),
                format!("svc.{domain}"),
                domain.clone(),
            ];
            searches.extend(of_host("search"));
            (
                config.name_servers.clone(),
                searches,
                vec!["ndots:5".to_owned()],
            )
        }
        _ => {
            let servers: Vec<String> = of_host("nameserver")
                .into_iter()
                .filter(is_reachable)
                .collect();
            (servers, of_host("search"), of_host("options"))
        }
    };
    if let Some(own) = &spec.dns_config {
        servers.extend(own.nameservers.iter().flatten().cloned());
        searches.extend(own.searches.iter().flatten().cloned());
        for option in own.options.iter().flatten() {
            let name = option.name.clone().unwrap_or_default();
            options.retain(|existing| existing.split(':').next() != Some(name.as_str()));
            options.push(
                option
                    .value
                    .as_ref()
                    .map_or(name.clone(), |value| format!("{name}:{value}")),
            );
        }
    }
    let mut text = String::new();
    for server in servers.iter().take(3) {
        let _ = writeln!(text, "nameserver {server}");
    }
    if !searches.is_empty() {
        let _ = writeln!(text, "search {}", searches.join(" "));
    }
    if !options.is_empty() {
        let _ = writeln!(text, "options {}", options.join(" "));
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn resolved(spec: serde_json::Value, servers: &[&str]) -> String {
        let mut config = Config::new("/nowhere");
        config.name_servers = servers.iter().map(|server| (*server).to_owned()).collect();
        let spec: PodSpec = serde_json::from_value(spec).unwrap();
        resolver(
            &spec,
            "ns",
            "nameserver 127.0.0.53\nnameserver 9.9.9.9\nsearch lan\n",
            &config,
        )
    }

    #[test]
    fn each_dns_policy_gives_its_resolver_file() {
        let containers = json!([]);
        assert_eq!(
            resolved(
                json!({"containers": containers, "dnsPolicy": "Default"}),
                &[]
            ),
            "nameserver 9.9.9.9\nsearch lan\n"
        );
        assert_eq!(
            resolved(json!({"containers": containers}), &["10.0.0.1"]),
            "nameserver 10.0.0.1\nsearch ns.svc.cluster.local svc.cluster.local cluster.local lan\noptions ndots:5\n"
        );
        let own = json!({"containers": containers, "dnsPolicy": "None",
            "dnsConfig": {"nameservers": ["8.8.8.8", "1.1.1.1"], "searches": ["a"], "options": [{"name": "ndots", "value": "2"}]}});
        assert_eq!(
            resolved(own, &["10.0.0.1"]),
            "nameserver 8.8.8.8\nnameserver 1.1.1.1\nsearch a\noptions ndots:2\n"
        );
    }

    #[test]
    fn a_pod_with_a_subdomain_has_a_fully_qualified_name() {
        let pod: Pod = serde_json::from_value(
            json!({"metadata": {"name": "p", "namespace": "n", "uid": "u"},
            "spec": {"containers": [], "hostname": "h", "subdomain": "s"}}),
        )
        .unwrap();
        let uid = PodUid::of(&pod.metadata).unwrap();
        let spec = sandbox_spec(&uid, &pod, &Config::new("/nowhere"));
        assert_eq!(spec.hostname, "h");
        assert_eq!(
            spec.fully_qualified_name.as_deref(),
            Some("h.s.n.svc.cluster.local")
        );
    }
}

//! The names of a cluster, as in Kubernetes' DNS specification. Pure.
//!
//! ```text
//! <service>.<namespace>.svc.<domain>                   the addresses of the service's ready pods
//! <hostname>.<service>.<namespace>.svc.<domain>        the pod of that hostname
//! _<port>._<protocol>.<service>.<namespace>.svc.…      where the port is served
//! 10-0-0-7.<namespace>.pod.<domain>                    a pod by its address
//! ```
//!
//! A Service with a cluster IP also resolves to the addresses of its pods, because there is no service proxy here.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;

use k8s_openapi::api::core::v1::Service;
use k8s_openapi::api::discovery::v1::EndpointSlice;

use super::message::{Record, TYPE_A, TYPE_AAAA, TYPE_ANY, TYPE_SRV};

#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Answer {
    /// The name exists, possibly without records of the queried type.
    Records(Vec<Record>),
    NoSuchName,
    /// The name is outside of the cluster; another resolver answers.
    NotOurs,
}

#[derive(Debug, Clone, Default, PartialEq, Eq)]
struct ServiceNames {
    external: Option<String>,
    /// Addresses and hostname of each ready endpoint.
    endpoints: Vec<(Vec<IpAddr>, Option<String>)>,
    /// Name, protocol in lower case, number.
    ports: BTreeSet<(String, String, u16)>,
}

/// All names of a cluster.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Zone {
    domain: String,
    services: BTreeMap<(String, String), ServiceNames>,
    pods: BTreeSet<(String, IpAddr)>,
    namespaces: BTreeSet<String>,
}

impl Zone {
    pub fn new<'a>(
        domain: &str,
        services: impl IntoIterator<Item = &'a Service>,
        slices: impl IntoIterator<Item = &'a EndpointSlice>,
        pods: impl IntoIterator<Item = (String, Vec<IpAddr>)>,
    ) -> Self {
        let mut zone = Self {
            domain: domain.trim_matches('.').to_lowercase(),
            ..Self::default()
        };
        for service in services {
            let metadata = &service.metadata;
            let namespace = metadata.namespace.clone().unwrap_or_default();
            let spec = service.spec.as_ref();
            let external = spec
                .filter(|spec| spec.type_.as_deref() == Some("ExternalName"))
                .and_then(|spec| spec.external_name.clone());
            zone.namespaces.insert(namespace.clone());
            let key = (namespace, metadata.name.clone().unwrap_or_default());
            zone.services.entry(key).or_default().external = external;
        }
        for slice in slices {
            zone.add_slice(slice);
        }
        for (namespace, addresses) in pods {
            zone.namespaces.insert(namespace.clone());
            for address in addresses {
                zone.pods.insert((namespace.clone(), address));
            }
        }
        zone
    }

    fn add_slice(&mut self, slice: &EndpointSlice) {
        let labels = slice.metadata.labels.as_ref();
        let service = labels.and_then(|labels| labels.get("kubernetes.io/service-name"));
        let namespace = slice.metadata.namespace.clone().unwrap_or_default();
        let key = (namespace, service.cloned().unwrap_or_default());
        let Some(names) = self.services.get_mut(&key) else {
            return;
        };
        for endpoint in &slice.endpoints {
            let conditions = endpoint.conditions.as_ref();
            // In Kubernetes an absent condition means ready.
            if conditions.and_then(|conditions| conditions.ready) == Some(false) {
                continue;
            }
            let addresses = endpoint.addresses.iter();
            let addresses = addresses
                .filter_map(|address| address.parse().ok())
                .collect();
            let hostname = endpoint.hostname.as_ref().map(|name| name.to_lowercase());
            names.endpoints.push((addresses, hostname));
        }
        for port in slice.ports.iter().flatten() {
            let name = port.name.clone().unwrap_or_default();
            let protocol = port.protocol.as_deref().unwrap_or("TCP").to_lowercase();
            let number = port.port.and_then(|number| u16::try_from(number).ok());
            names
                .ports
                .extend(number.map(|number| (name, protocol, number)));
        }
    }

    /// Looks up a name in lower case and without the trailing dot.
    pub fn look_up(&self, name: &str, kind: u16) -> Answer {
        let Some(inside) = name.strip_suffix(&self.domain) else {
            return Answer::NotOurs;
        };
        if inside.is_empty() {
            return Answer::Records(Vec::new());
        }
        let Some(inside) = inside.strip_suffix('.') else {
            return Answer::NotOurs;
        };
        let labels: Vec<&str> = inside.rsplit('.').collect();
        match labels.as_slice() {
            ["svc" | "pod"] => Answer::Records(Vec::new()),
            ["svc" | "pod", namespace] if self.namespaces.contains(*namespace) => {
                Answer::Records(Vec::new())
            }
            ["svc", namespace, service, rest @ ..] => {
                let key = ((*namespace).to_owned(), (*service).to_owned());
                self.services.get(&key).map_or(Answer::NoSuchName, |found| {
                    self.of_service(found, namespace, service, rest, kind)
                })
            }
            ["pod", namespace, address] => self.of_pod(namespace, address, kind),
            _ => Answer::NoSuchName,
        }
    }

    fn of_service(
        &self,
        found: &ServiceNames,
        namespace: &str,
        service: &str,
        rest: &[&str],
        kind: u16,
    ) -> Answer {
        let own = format!("{service}.{namespace}.svc.{}", self.domain);
        match rest {
            [] => {
                // A CNAME applies to every type.
                if let Some(target) = &found.external {
                    return Answer::Records(vec![Record::Cname(target.clone())]);
                }
                let all = found.endpoints.iter().flat_map(|(addresses, _)| addresses);
                Answer::Records(records(all, kind))
            }
            [hostname] if !hostname.starts_with('_') => {
                let named: Vec<&IpAddr> = found
                    .endpoints
                    .iter()
                    .filter(|(_, own)| own.as_deref() == Some(*hostname))
                    .flat_map(|(addresses, _)| addresses)
                    .collect();
                if named.is_empty() {
                    return Answer::NoSuchName;
                }
                Answer::Records(records(named, kind))
            }
            [protocol, port] if protocol.starts_with('_') && port.starts_with('_') => {
                let wanted = |(name, of, _): &&(String, String, u16)| {
                    name == &port[1..] && of == &protocol[1..]
                };
                let ports: Vec<u16> = found
                    .ports
                    .iter()
                    .filter(wanted)
                    .map(|port| port.2)
                    .collect();
                if ports.is_empty() {
                    return Answer::NoSuchName;
                }
                let hosts: BTreeSet<&String> = found
                    .endpoints
                    .iter()
                    .filter_map(|(_, name)| name.as_ref())
                    .collect();
                let mut targets: Vec<String> =
                    hosts.iter().map(|host| format!("{host}.{own}")).collect();
                if found.endpoints.iter().any(|(_, name)| name.is_none()) {
                    targets.push(own);
                }
                let all = ports.iter().flat_map(|port| {
                    targets.iter().map(|target| Record::Srv {
                        port: *port,
                        target: target.clone(),
                    })
                });
                Answer::Records(
                    all.filter(|_| kind == TYPE_SRV || kind == TYPE_ANY)
                        .collect(),
                )
            }
            _ => Answer::NoSuchName,
        }
    }

    fn of_pod(&self, namespace: &str, label: &str, kind: u16) -> Answer {
        let four = label.replace('-', ".").parse::<IpAddr>().ok();
        let six = || label.replace('-', ":").parse::<IpAddr>().ok();
        match four.or_else(six) {
            Some(address) if self.pods.contains(&(namespace.to_owned(), address)) => {
                Answer::Records(records([&address], kind))
            }
            _ => Answer::NoSuchName,
        }
    }
}

fn records<'a>(addresses: impl IntoIterator<Item = &'a IpAddr>, kind: u16) -> Vec<Record> {
    addresses
        .into_iter()
        .filter_map(|address| match address {
            IpAddr::V4(address) if kind == TYPE_A || kind == TYPE_ANY => Some(Record::A(*address)),
            IpAddr::V6(address) if kind == TYPE_AAAA || kind == TYPE_ANY => {
                Some(Record::Aaaa(*address))
            }
            _ => None,
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn zone() -> Zone {
        let service = |name: &str, spec: serde_json::Value| -> Service {
            serde_json::from_value(
                json!({"metadata": {"name": name, "namespace": "n"}, "spec": spec}),
            )
            .unwrap()
        };
        let slice = json!({"metadata": {"name": "x", "namespace": "n", "labels": {"kubernetes.io/service-name": "box"}},
            "addressType": "IPv4", "ports": [{"name": "http", "port": 8888, "protocol": "TCP"}],
            "endpoints": [
                {"addresses": ["10.0.0.7"], "conditions": {"ready": true}, "hostname": "One"},
                {"addresses": ["10.0.0.8"]},
                {"addresses": ["10.0.0.9"], "conditions": {"ready": false}}]});
        let slice: EndpointSlice = serde_json::from_value(slice).unwrap();
        let pod = (
            "n".to_owned(),
            vec!["10.0.0.7".parse().unwrap(), "fd00::7".parse().unwrap()],
        );
        Zone::new(
            "cluster.local",
            &[
                service("box", json!({"clusterIP": "None"})),
                service("empty", json!({"clusterIP": "None"})),
                service(
                    "far",
                    json!({"type": "ExternalName", "externalName": "far.example"}),
                ),
            ],
            [&slice],
            [pod],
        )
    }

    #[test]
    fn every_form_of_name_resolves() {
        let a = |text: &str| Record::A(text.parse().unwrap());
        let srv = |target: &str| Record::Srv {
            port: 8888,
            target: target.to_owned(),
        };
        let none = || Answer::Records(Vec::new());
        for (name, kind, expected) in [
            (
                "box.n.svc.cluster.local",
                TYPE_A,
                Answer::Records(vec![a("10.0.0.7"), a("10.0.0.8")]),
            ),
            ("box.n.svc.cluster.local", TYPE_AAAA, none()),
            ("empty.n.svc.cluster.local", TYPE_A, none()),
            (
                "one.box.n.svc.cluster.local",
                TYPE_A,
                Answer::Records(vec![a("10.0.0.7")]),
            ),
            ("two.box.n.svc.cluster.local", TYPE_A, Answer::NoSuchName),
            (
                "_http._tcp.box.n.svc.cluster.local",
                TYPE_SRV,
                Answer::Records(vec![
                    srv("one.box.n.svc.cluster.local"),
                    srv("box.n.svc.cluster.local"),
                ]),
            ),
            (
                "_http._udp.box.n.svc.cluster.local",
                TYPE_SRV,
                Answer::NoSuchName,
            ),
            (
                "far.n.svc.cluster.local",
                TYPE_A,
                Answer::Records(vec![Record::Cname("far.example".to_owned())]),
            ),
            (
                "10-0-0-7.n.pod.cluster.local",
                TYPE_A,
                Answer::Records(vec![a("10.0.0.7")]),
            ),
            (
                "fd00--7.n.pod.cluster.local",
                TYPE_AAAA,
                Answer::Records(vec![Record::Aaaa("fd00::7".parse().unwrap())]),
            ),
            ("10-0-0-8.n.pod.cluster.local", TYPE_A, Answer::NoSuchName),
            ("box.m.svc.cluster.local", TYPE_A, Answer::NoSuchName),
            ("n.svc.cluster.local", TYPE_A, none()),
            ("m.svc.cluster.local", TYPE_A, Answer::NoSuchName),
            ("svc.cluster.local", TYPE_A, none()),
            ("cluster.local", TYPE_A, none()),
            ("x.y.z.box.n.svc.cluster.local", TYPE_A, Answer::NoSuchName),
            ("example.com.cluster.local", TYPE_A, Answer::NoSuchName),
            ("example.com", TYPE_A, Answer::NotOurs),
            ("notcluster.local", TYPE_A, Answer::NotOurs),
        ] {
            assert_eq!(zone().look_up(name, kind), expected, "{name}");
        }
    }
}

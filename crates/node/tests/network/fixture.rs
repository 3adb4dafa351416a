//! Pods that answer, and a way to ask from inside of a pod which of them do.

use std::net::IpAddr;
use std::path::PathBuf;
use std::time::Duration;

use k8s_openapi::api::core::v1::{Namespace, Pod};
use k8s_openapi::api::networking::v1::NetworkPolicy;
use kube::api::{DeleteParams, ListParams, PostParams};
use kube::{Api, ResourceExt};
use serde_json::{Value, json};
use testkit::eventually;

use crate::support::internet::Internet;
use crate::support::{Machine, is_ready};

/// Answers on two TCP ports and one UDP port of every family, and counts what it is asked.
const SERVER: &str = r"
import socket, threading, sys
def tcp(family, port):
    s = socket.socket(family, socket.SOCK_STREAM)
    s.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    if family == socket.AF_INET6: s.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
    s.bind(('', port)); s.listen(512)
    def serve():
        while True:
            c, _ = s.accept()
            threading.Thread(target=echo, args=(c,), daemon=True).start()
    threading.Thread(target=serve, daemon=True).start()
def echo(c):
    with c:
        while (data := c.recv(4096)): c.sendall(data)
def udp(family, port):
    s = socket.socket(family, socket.SOCK_DGRAM)
    if family == socket.AF_INET6: s.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
    s.bind(('', port))
    def serve():
        while True:
            data, peer = s.recvfrom(4096)
            if data == b'forbidden': open('/tmp/forbidden', 'a').write('x')
            s.sendto(data, peer)
    threading.Thread(target=serve, daemon=True).start()
for family in (socket.AF_INET, socket.AF_INET6):
    for port in (8080, 8081): tcp(family, port)
    udp(family, 5353)
open('/tmp/serving', 'w').close()
threading.Event().wait()
";

/// Tries many things at once: prints a word per argument, `yes` or `no`.
const PROBE: &str = r"
import socket, sys, concurrent.futures
def probe(what):
    protocol, address, port = what.split()
    family = socket.AF_INET6 if ':' in address else socket.AF_INET
    kind = socket.SOCK_DGRAM if protocol == 'udp' else socket.SOCK_STREAM
    try:
        with socket.socket(family, kind) as s:
            s.settimeout(0.6)
            s.connect((address, int(port)))
            if protocol == 'udp':
                s.send(b'question'); s.recv(100)
        return 'yes'
    except OSError:
        return 'no'
with concurrent.futures.ThreadPoolExecutor(64) as pool:
    print(' '.join(pool.map(probe, sys.argv[1:])))
";

/// A machine with an internet beside it, and a second namespace.
pub struct Network {
    pub machine: Machine,
    pub internet: Internet,
}

impl Network {
    pub async fn start() -> Self {
        Self::start_with(|_| {}).await
    }

    pub async fn start_with(adjust: impl FnOnce(&mut agent_sandbox_node::Config)) -> Self {
        let internet = Internet::beside_machine().await;
        let machine = Machine::start_with(adjust).await;
        let other = json!({"metadata": {"name": "other", "labels": {"team": "x"}}});
        let namespaces = Api::<Namespace>::all(machine.client.clone());
        namespaces
            .create(
                &PostParams::default(),
                &serde_json::from_value(other).unwrap(),
            )
            .await
            .unwrap();
        let ranges = machine.runtime().network().layout().ranges();
        let ranges = ranges.iter();
        internet.route_to_pods(
            ranges
                .map(|range| (range.address().to_string(), range.length()))
                .collect(),
        );
        Self { machine, internet }
    }

    /// Two pods of one namespace, `a` and `b`.
    pub async fn pair(&self) -> (Pod, Pod) {
        tokio::join!(self.server("t", "a"), self.server("t", "b"))
    }

    pub fn pods(&self, namespace: &str) -> Api<Pod> {
        Api::namespaced(self.machine.client.clone(), namespace)
    }

    pub async fn server(&self, namespace: &str, name: &str) -> Pod {
        let pod = json!({"metadata": {"name": name, "labels": {"app": name}}, "spec": {
            "terminationGracePeriodSeconds": 0, "containers": [{"name": "c", "image": "host", "command": ["python3", "-c", SERVER],
            "ports": [{"name": "web", "containerPort": 8080}, {"name": "names", "containerPort": 5353, "protocol": "UDP"}],
            "readinessProbe": {"exec": {"command": ["test", "-e", "/tmp/serving"]}, "periodSeconds": 1}}]}});
        let pods = self.pods(namespace);
        pods.create(
            &PostParams::default(),
            &serde_json::from_value(pod).unwrap(),
        )
        .await
        .unwrap();
        eventually("the pod to serve", || async {
            pods.get_opt(name).await.unwrap().filter(is_ready)
        })
        .await
    }

    /// Replaces all policies by these, by namespace.
    pub async fn policies(&self, policies: &[(&str, Value)]) {
        for namespace in ["t", "other"] {
            let api = Api::<NetworkPolicy>::namespaced(self.machine.client.clone(), namespace);
            for policy in api.list(&ListParams::default()).await.unwrap() {
                api.delete(&policy.name_any(), &DeleteParams::default())
                    .await
                    .unwrap();
            }
        }
        for (index, (namespace, spec)) in policies.iter().enumerate() {
            let api = Api::<NetworkPolicy>::namespaced(self.machine.client.clone(), namespace);
            let policy = json!({"metadata": {"name": format!("p{index}")}, "spec": spec});
            let policy = serde_json::from_value(policy).unwrap();
            api.create(&PostParams::default(), &policy).await.unwrap();
        }
    }

    async fn probe(&self, from: &Pod, what: &[String]) -> Vec<bool> {
        let mut command = vec!["python3", "-c", PROBE];
        command.extend(what.iter().map(String::as_str));
        let (code, out, err) = self.machine.exec(from, &command).await;
        assert_eq!(code, 0, "{err}");
        out.split_whitespace().map(|word| word == "yes").collect()
    }

    /// Waits until exactly what is expected to pass does: rules take effect a moment after the policy is written.
    pub async fn expect(&self, case: &str, expected: &[(&Pod, String, bool)]) {
        let last = std::sync::Mutex::new(String::new());
        let matches = || async {
            let mut wrong = Vec::new();
            let mut rest = expected.to_vec();
            while let Some((from, _, _)) = rest.first().cloned() {
                let (own, others): (Vec<_>, Vec<_>) = rest
                    .into_iter()
                    .partition(|(pod, _, _)| pod.uid() == from.uid());
                rest = others;
                let what: Vec<String> = own.iter().map(|(_, what, _)| what.clone()).collect();
                let found = self.probe(from, &what).await;
                let differ = own
                    .iter()
                    .zip(found)
                    .filter(|((_, _, wanted), found)| wanted != found);
                wrong.extend(differ.map(|((from, what, wanted), _)| {
                    format!("{} to {what}: expected {wanted}", from.name_any())
                }));
            }
            *last.lock().unwrap() = format!("{wrong:#?}");
            wrong.is_empty().then_some(())
        };
        let limit = Duration::from_secs(120);
        let outcome = tokio::time::timeout(limit, async { while matches().await.is_none() {} });
        assert!(outcome.await.is_ok(), "{case}: {}", last.lock().unwrap());
    }

    /// Leaves a Python program running in a pod.
    pub async fn in_background(&self, pod: &Pod, program: &str) {
        let script = "python3 -c \"$0\" > /tmp/problem 2>&1 &";
        self.machine.exec(pod, &["sh", "-c", script, program]).await;
    }

    /// The machine's own addresses in the pods' network.
    pub fn node_addresses(&self) -> Vec<IpAddr> {
        self.machine.runtime().network().layout().node_addresses()
    }

    /// Where the pod's network namespace is pinned.
    pub fn pin(&self, pod: &Pod) -> PathBuf {
        let directory = self.machine.config.data_dir.join("pods");
        let record = directory.join(pod.uid().unwrap()).join("sandbox.json");
        let record: Value = serde_json::from_slice(&std::fs::read(record).unwrap()).unwrap();
        let slot = u32::try_from(record["slot"].as_u64().unwrap()).unwrap();
        self.machine.runtime().slots().pins(slot).network
    }

    pub async fn finish(self) {
        for pod in self
            .pods("other")
            .list(&ListParams::default())
            .await
            .unwrap()
        {
            let now = DeleteParams::default().grace_period(0);
            let _ = self.pods("other").delete(&pod.name_any(), &now).await;
        }
        self.machine.finish().await;
    }
}

pub fn addresses(pod: &Pod) -> Vec<IpAddr> {
    let status = pod.status.as_ref().unwrap();
    let addresses = status.pod_ips.as_ref().unwrap();
    addresses
        .iter()
        .map(|address| address.ip.parse().unwrap())
        .collect()
}

/// The same expectation for every address of the target.
pub fn to<'a>(
    from: &'a Pod,
    target: &Pod,
    what: &str,
    passes: bool,
) -> Vec<(&'a Pod, String, bool)> {
    let (protocol, port) = what.split_once('/').unwrap();
    let addresses = addresses(target);
    assert_eq!(addresses.len(), 2, "an address of each family");
    addresses
        .iter()
        .map(|address| (from, format!("{protocol} {address} {port}"), passes))
        .collect()
}

/// The same expectation for every one of some addresses outside.
pub fn to_each<'a>(
    from: &'a Pod,
    addresses: impl IntoIterator<Item = impl std::fmt::Display>,
    what: &str,
    passes: bool,
) -> Vec<(&'a Pod, String, bool)> {
    let (protocol, port) = what.split_once('/').unwrap();
    addresses
        .into_iter()
        .map(|address| (from, format!("{protocol} {address} {port}"), passes))
        .collect()
}

/// Lets every pod of a namespace be reached by all.
pub fn open_ingress() -> Value {
    json!({"podSelector": {}, "policyTypes": ["Ingress"], "ingress": [{}]})
}

/// Lets every pod of a namespace reach all.
pub fn open_egress() -> Value {
    json!({"podSelector": {}, "policyTypes": ["Egress"], "egress": [{}]})
}

/// Both.
pub fn open() -> Value {
    json!({"podSelector": {}, "policyTypes": ["Ingress", "Egress"], "ingress": [{}], "egress": [{}]})
}

/// Who reaches a pod, by its name.
pub fn ingress_of(app: &str, rules: &Value) -> Value {
    json!({"podSelector": {"matchLabels": {"app": app}}, "policyTypes": ["Ingress"], "ingress": rules})
}

/// Whom a pod reaches, by its name.
pub fn egress_of(app: &str, rules: &Value) -> Value {
    json!({"podSelector": {"matchLabels": {"app": app}}, "policyTypes": ["Egress"], "egress": rules})
}

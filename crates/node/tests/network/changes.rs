//! Enforcement while policies, pods and the node change.

use k8s_openapi::api::core::v1::Pod;
use k8s_openapi::api::networking::v1::NetworkPolicy;
use kube::api::{DeleteParams, PostParams};
use kube::{Api, ResourceExt};
use serde_json::json;
use testkit::eventually;

use crate::fixture::{Network, addresses, egress_of, open, open_ingress, to};
use crate::support::internet::on_own_network;

/// Distinguishes attempts that failed from those that were late because a CPU stalled, which happens for seconds on a shared machine. A
/// thread on each CPU detects stalls.
const BEATS: &str = r"
import os, threading, time
stood_still_at = 0.0
def beat(cpu):
    global stood_still_at
    os.sched_setaffinity(0, {cpu})
    last = time.monotonic()
    while True:
        time.sleep(0.02); now = time.monotonic()
        if now - last > 0.3: stood_still_at = now
        last = now
for cpu in os.sched_getaffinity(0): threading.Thread(target=beat, args=(cpu,), daemon=True).start()
def was_held_up(began):
    time.sleep(0.5)
    return stood_still_at >= began
";

#[test]
fn a_connection_is_cut_when_it_is_denied_and_continues_when_it_is_allowed_again() {
    on_own_network(|| async {
        let network = Network::start().await;
        let (a, b) = network.pair().await;
        let closed = json!({"podSelector": {"matchLabels": {"app": "b"}}, "policyTypes": ["Ingress", "Egress"]});
        let only_a = json!({"podSelector": {"matchLabels": {"app": "a"}}, "policyTypes": ["Ingress", "Egress"], "ingress": [{}], "egress": [{}]});
        network.policies(&[("t", open())]).await;
        network.expect("open", &to(&a, &b, "tcp/8080", true)).await;
        // Keeps one connection and prints every 50 ms whether a response arrived.
        let script = format!(
            r"
import socket, time
s = socket.create_connection(('{}', 8080)); s.settimeout(0.05)
while True:
    try: s.send(b'x')
    except OSError: pass
    try: answered = len(s.recv(4096)) > 0
    except OSError: answered = False
    open('/tmp/talk', 'w').write('yes' if answered else 'no'); time.sleep(0.05)
",
            addresses(&b)[0]
        );
        network.in_background(&a, &script).await;
        let talks = |wanted: &'static str| {
            let (machine, a) = (&network.machine, &a);
            async move {
                eventually(&format!("the connection to answer {wanted}"), || async {
                    let (_, out, _) = machine.exec(a, &["cat", "/tmp/talk"]).await;
                    (out == wanted).then_some(())
                })
                .await;
            }
        };
        talks("yes").await;
        network.policies(&[("t", only_a), ("t", closed)]).await;
        talks("no").await;
        network.policies(&[("t", open())]).await;
        talks("yes").await;
        network.finish().await;
    });
}

#[test]
fn changes_of_policies_and_pods_leave_no_gap_in_either_direction() {
    on_own_network(|| async {
        let network = Network::start().await;
        let ((a, b), c) = tokio::join!(network.pair(), network.server("t", "c"));
        // Always in force: a reaches b, and not c.
        let to_b = json!([{"to": [{"podSelector": {"matchLabels": {"app": "b"}}}]}]);
        network
            .policies(&[("t", egress_of("a", &to_b)), ("t", open_ingress())])
            .await;
        let mut expected = to(&a, &b, "tcp/8080", true);
        expected.extend(to(&a, &c, "udp/5353", false));
        network.expect("the lasting policies", &expected).await;
        // The kernel of the other end accepts the connection and the data, so these are fast unless a packet is lost. The program sends
        // the response, and may have to wait for a CPU on a busy machine.
        let script = format!(
            r"
{BEATS}
import socket
def await_delivery(s):
    end = time.monotonic() + 0.9
    while True:
        late = time.monotonic() > end
        # How many packets are not acknowledged.
        if int.from_bytes(s.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 104)[24:28], 'little') == 0: return
        if late: raise TimeoutError
        time.sleep(0.001)
done = failed = 0
u = socket.socket(socket.AF_INET, socket.SOCK_DGRAM); u.setblocking(False)
while not os.path.exists('/tmp/stop'):
    began = time.monotonic()
    try:
        with socket.create_connection(('{}', 8080), timeout=0.9) as s:
            s.send(b'x'); await_delivery(s)
            s.settimeout(60); s.recv(1)
        done += 1
    except OSError: failed += not was_held_up(began)
    time.sleep(0.003)
    try: u.sendto(b'forbidden', ('{}', 5353))
    except OSError: pass
    open('/tmp/count.new', 'w').write(f'{{done}} {{failed}}'); os.rename('/tmp/count.new', '/tmp/count')
",
            addresses(&b)[0],
            addresses(&c)[0]
        );
        network.in_background(&a, &script).await;
        let api = Api::<NetworkPolicy>::namespaced(network.machine.client.clone(), "t");
        for round in 0..12_u16 {
            // Created, changed and deleted beside them: for other pods, for the same one, with new sets and chains.
            let extra = json!({"metadata": {"name": "extra"}, "spec": {"podSelector": {}, "policyTypes": ["Ingress", "Egress"],
                "ingress": [{"ports": [{"port": 7000 + round}]}],
                "egress": [{"to": [{"ipBlock": {"cidr": format!("192.0.2.{round}/32")}}]}]}});
            api.create(
                &PostParams::default(),
                &serde_json::from_value(extra).unwrap(),
            )
            .await
            .unwrap();
            let passing = json!({"metadata": {"name": format!("passing-{round}"), "labels": {"app": "b"}}, "spec": {
                "terminationGracePeriodSeconds": 0, "containers": [{"name": "c", "image": "host", "command": ["sleep", "100"]}]}});
            let pods = network.pods("t");
            let passing: Pod = serde_json::from_value(passing).unwrap();
            pods.create(&PostParams::default(), &passing).await.unwrap();
            network.machine.ready(&passing.name_any()).await;
            api.delete("extra", &DeleteParams::default()).await.unwrap();
            network.machine.delete(&passing.name_any()).await;
        }
        let counts = || async {
            let (_, out, _) = network.machine.exec(&a, &["cat", "/tmp/count"]).await;
            let mut words = out
                .split_whitespace()
                .map(|word| word.parse::<u32>().unwrap());
            Some((words.next()?, words.next()?))
        };
        eventually("some attempts", || async {
            counts().await.filter(|(done, _)| *done > 20)
        })
        .await;
        network.machine.exec(&a, &["touch", "/tmp/stop"]).await;
        let (done, failed) = counts().await.unwrap();
        assert_eq!(
            failed,
            0,
            "of {} attempts that are always allowed",
            done + failed
        );
        let (code, ..) = network
            .machine
            .exec(&c, &["test", "-e", "/tmp/forbidden"])
            .await;
        assert_ne!(code, 0, "something passed that is never allowed");
        network.finish().await;
    });
}

#[test]
fn rules_stay_in_force_while_the_node_is_down() {
    on_own_network(|| async {
        let mut network = Network::start().await;
        let (a, b) = network.pair().await;
        let policy = json!({"podSelector": {}, "policyTypes": ["Ingress", "Egress"],
            "ingress": [{"ports": [{"port": 8080}]}], "egress": [{}]});
        network.policies(&[("t", policy)]).await;
        let mut expected = to(&a, &b, "tcp/8080", true);
        expected.extend(to(&a, &b, "tcp/8081", false));
        network.expect("with the node", &expected).await;
        let script = format!(
            r"
{BEATS}
import socket
failed = wrong = 0
while not os.path.exists('/tmp/stop'):
    for port, limit in ((8080, 0.9), (8081, 0.3)):
        began = time.monotonic()
        try:
            socket.create_connection(('{}', port), timeout=limit).close()
            wrong += port == 8081
        except OSError: failed += port == 8080 and not was_held_up(began)
open('/tmp/result', 'w').write(f'{{failed}} {{wrong}}')
",
            addresses(&b)[0]
        );
        network.in_background(&a, &script).await;
        network.machine.stop_node().await;
        network.machine.start_node().await;
        network.expect("after the restart", &expected).await;
        network.machine.exec(&a, &["touch", "/tmp/stop"]).await;
        let result = eventually("the result", || async {
            let (code, out, _) = network.machine.exec(&a, &["cat", "/tmp/result"]).await;
            (code == 0 && !out.is_empty()).then_some(out)
        })
        .await;
        assert_eq!(
            result, "0 0",
            "allowed attempts that failed, forbidden ones that passed"
        );
        network.finish().await;
    });
}

//! Cluster DNS, and forwarding to the machine's resolvers.

use std::net::UdpSocket;
use std::sync::{Arc, Mutex};

use k8s_openapi::api::core::v1::Service;
use kube::Api;
use kube::api::PostParams;
use serde_json::json;
use testkit::eventually;

use crate::fixture::{Network, addresses};
use crate::secure_default::secure_default;
use crate::support::internet::on_own_network;

/// A resolver of the machine that resolves `example.com` and its subdomains.
fn fake_upstream(address: &'static str) -> Arc<Mutex<Vec<String>>> {
    let asked = Arc::<Mutex<Vec<String>>>::default();
    let socket = UdpSocket::bind((address, 53)).unwrap();
    let seen = asked.clone();
    std::thread::spawn(move || {
        let mut buffer = [0; 2048];
        while let Ok((count, from)) = socket.recv_from(&mut buffer) {
            let question = &buffer[..count];
            let name: String = question[12..]
                .iter()
                .take_while(|byte| **byte != 0)
                .map(|byte| char::from(*byte))
                .collect();
            let end = 12 + question[12..].iter().position(|byte| *byte == 0).unwrap() + 5;
            let is_known = name.ends_with("example\u{3}com");
            let has_answer = is_known && question[end - 3] == 1;
            let code = if is_known { 0x80 } else { 0x83 };
            let mut answer = question[..end].to_vec();
            answer[2..12].copy_from_slice(&[0x81, code, 0, 1, 0, u8::from(has_answer), 0, 0, 0, 0]);
            if has_answer {
                answer.extend([0xc0, 0x0c, 0, 1, 0, 1, 0, 0, 0, 9, 0, 4, 203, 0, 113, 1]);
            }
            seen.lock().unwrap().push(name);
            let _ = socket.send_to(&answer, from);
        }
    });
    asked
}

#[test]
fn pods_with_cluster_dns_resolve_services_and_external_names() {
    on_own_network(|| async {
        let directory = tempfile::tempdir().unwrap();
        let file = directory.path().join("resolv.conf");
        std::fs::write(&file, "nameserver 127.0.0.1\nsearch lan.example\n").unwrap();
        let mut asked = Arc::default();
        let network = Network::start_with(|config| {
            asked = fake_upstream("127.0.0.1");
            config.resolver_file.clone_from(&file);
        })
        .await;
        let stop = tokio_util::sync::CancellationToken::new();
        let client = &network.machine.client;
        tokio::spawn(machine_control_plane::endpoints::run(
            client.clone(),
            stop.clone(),
        ));
        let service = json!({"metadata": {"name": "sandbox"}, "spec": {"clusterIP": "None", "selector": {"app": "sandbox"},
            "ports": [{"name": "http", "port": 8080}]}});
        Api::<Service>::namespaced(client.clone(), "t")
            .create(
                &PostParams::default(),
                &serde_json::from_value(service).unwrap(),
            )
            .await
            .unwrap();
        let (sandbox, client) = tokio::join!(
            network.server("t", "sandbox"),
            network.server("t", "client")
        );
        let (_, file, _) = network
            .machine
            .exec(&client, &["cat", "/etc/resolv.conf"])
            .await;
        let gateway = network.machine.runtime().node_address();
        let expected = format!(
            "nameserver {gateway}\nsearch t.svc.cluster.local svc.cluster.local cluster.local lan.example\noptions ndots:5\n"
        );
        assert_eq!(file, expected);
        let looks_up = |name: &'static str| {
            let (machine, client) = (&network.machine, &client);
            async move {
                let code = format!(
                    "import socket\ntry: print(sorted({{a[4][0] for a in socket.getaddrinfo('{name}', 80, socket.AF_INET)}})[0])\nexcept OSError: print('unknown')"
                );
                machine
                    .exec(client, &["python3", "-c", &code])
                    .await
                    .1
                    .trim()
                    .to_owned()
            }
        };
        let address = addresses(&sandbox)[0].to_string();
        for name in [
            "sandbox",
            "sandbox.t",
            "sandbox.t.svc",
            "sandbox.t.svc.cluster.local",
            "sandbox.t.svc.cluster.local.",
        ] {
            eventually(&format!("{name} to resolve"), || async {
                (looks_up(name).await == address).then_some(())
            })
            .await;
        }
        assert_eq!(looks_up("missing.t.svc.cluster.local").await, "unknown");
        // Retried: the client may time out on a busy machine.
        eventually("a name of the world to resolve", || async {
            (looks_up("www.example.com").await == "203.0.113.1").then_some(())
        })
        .await;
        let asked = asked.lock().unwrap().clone();
        assert!(
            !asked.iter().any(|name| name.ends_with("cluster\u{5}local")),
            "the cluster's names stay inside: {asked:?}"
        );
        // Under the secure default policy the resolver cannot be reached.
        network.policies(&[("t", secure_default())]).await;
        eventually("the resolver to be out of reach", || async {
            (looks_up("www.example.com").await == "unknown").then_some(())
        })
        .await;
        stop.cancel();
        network.finish().await;
    });
}

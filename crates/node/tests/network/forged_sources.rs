//! Packets whose sender is not who they say.

use std::net::{IpAddr, UdpSocket};

use crate::fixture::{Network, addresses, open, to};
use crate::support::internet::{self, PUBLIC, on_own_network};
use testkit::eventually;

#[test]
fn a_pod_cannot_send_from_an_address_that_is_not_its_own() {
    on_own_network(|| async {
        let network = Network::start().await;
        network.policies(&[("t", open())]).await;
        let (a, b) = network.pair().await;
        network.expect("open", &to(&a, &b, "udp/5353", true)).await;
        let pin = network.pin(&a);
        // From inside, with all the rights over the namespace that the default tier never gives.
        let victim = addresses(&b)[0].to_string();
        let victim: &'static str = victim.leak();
        for (spoofed, target) in [
            (victim, PUBLIC[0]),
            ("198.51.100.99", PUBLIC[0]),
            ("10.99.0.1", PUBLIC[0]),
            ("2001:db8:5::5", PUBLIC[2]),
        ] {
            let sent = internet::inside(&pin, move || {
                internet::take_address("eth0", spoofed);
                let send = |from: &str, text: &str| {
                    let socket = UdpSocket::bind((from.parse::<IpAddr>().unwrap(), 0)).unwrap();
                    socket
                        .send_to(text.as_bytes(), (target.parse::<IpAddr>().unwrap(), 80))
                        .is_ok()
                };
                send(spoofed, "forged")
            });
            assert!(sent, "the pod's own end lets it go");
        }
        // What is sent honestly after that arrives, and nothing of the rest has.
        let own = addresses(&a)[0];
        internet::inside(&pin, move || {
            let socket = UdpSocket::bind((own, 0)).unwrap();
            socket
                .send_to(b"honest", (PUBLIC[0].parse::<IpAddr>().unwrap(), 80))
                .unwrap();
        });
        let received = network.internet.received.clone();
        eventually("the honest datagram", || async {
            let received = received.lock().unwrap();
            received
                .iter()
                .any(|(_, text)| text == "honest")
                .then_some(())
        })
        .await;
        let forged: Vec<_> = received
            .lock()
            .unwrap()
            .iter()
            .filter(|(_, text)| text == "forged")
            .cloned()
            .collect();
        assert!(forged.is_empty(), "{forged:?}");
        network.finish().await;
    });
}

//! The server over HTTPS, with the kubeconfig that it writes.

mod support;

use std::os::unix::fs::PermissionsExt;

use apiserver::{Config, Server};
use k8s_openapi::api::core::v1::ConfigMap;
use kube::{
    Api, Client, ResourceExt,
    api::{ListParams, PostParams},
    config::{KubeConfigOptions, Kubeconfig},
};
use serde_json::json;
use tokio::net::TcpListener;
use tokio_util::sync::CancellationToken;

async fn connect(kubeconfig: &std::path::Path) -> Client {
    let config = Kubeconfig::read_from(kubeconfig).expect("cannot read the kubeconfig");
    let config = kube::Config::from_custom_kubeconfig(config, &KubeConfigOptions::default())
        .await
        .expect("the kubeconfig is invalid");
    Client::try_from(config).expect("cannot create a client from the kubeconfig")
}

#[tokio::test(flavor = "multi_thread")]
async fn a_kubeconfig_connects_to_the_server_and_stays_valid_after_a_restart() {
    let directory = tempfile::tempdir().unwrap();
    let kubeconfig = directory.path().join("kubeconfig");
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    let mut listener = Some(listener);
    for round in 0..2 {
        let server = std::sync::Arc::new(
            Server::open(Config::new(directory.path().join("data")))
                .await
                .unwrap(),
        );
        if round == 0 {
            server
                .write_kubeconfig(&kubeconfig, &format!("https://{address}"))
                .unwrap();
            assert_eq!(
                std::fs::metadata(&kubeconfig).unwrap().permissions().mode() & 0o777,
                0o600
            );
        }
        let listener = match listener.take() {
            Some(listener) => listener,
            None => TcpListener::bind(address).await.unwrap(),
        };
        let stop = CancellationToken::new();
        let serving = tokio::spawn({
            let (server, stop) = (server.clone(), stop.clone());
            async move { server.serve(listener, stop).await }
        });
        let client = connect(&kubeconfig).await;
        let maps: Api<ConfigMap> = Api::default_namespaced(client.clone());
        let name = format!("round-{round}");
        let map = serde_json::from_value(
            json!({"metadata": {"name": name}, "data": {"text": "x".repeat(200_000)}}),
        )
        .unwrap();
        maps.create(&PostParams::default(), &map).await.unwrap();
        let listed = maps.list(&ListParams::default()).await.unwrap();
        let ours = listed
            .items
            .iter()
            .filter(|map| map.name_any().starts_with("round-"));
        assert_eq!(ours.count(), round + 1);
        assert_eq!(client.apiserver_version().await.unwrap().major, "1");

        let mut anonymous = kube::Config::new(format!("https://{address}").parse().unwrap());
        anonymous.accept_invalid_certs = true;
        let anonymous: Api<ConfigMap> =
            Api::default_namespaced(Client::try_from(anonymous).unwrap());
        assert_eq!(
            support::code(anonymous.list(&ListParams::default()).await),
            401
        );

        drop((client, maps, anonymous));
        stop.cancel();
        serving.await.unwrap().unwrap();
        std::sync::Arc::into_inner(server).unwrap().shutdown().await;
    }
}

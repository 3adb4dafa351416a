//! The connection modes: through a Gateway, through a port-forward of the Kubernetes API, directly to the pod; and the
//! blocking client over one of them.

#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

mod support;

use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use futures::future::BoxFuture;
use http::Uri;
use k8s_openapi::apiextensions_apiserver::pkg::apis::apiextensions::v1::CustomResourceDefinition;
use kube::Api;
use kube::api::{ApiResource, DeleteParams, DynamicObject, Patch, PatchParams, PostParams};
use kube::core::GroupVersionKind;
use sdk::process::Start;
use sdk::transport::{Dialer, Io};
use sdk::{Connection, CreateOptions, ErrorKind, InClusterAddress, Options, Scheme, blocking};
use serde_json::{Value, json};
use support::http_server::{ApiFront, Runtime, TlsFront};
use support::{World, options};

/// Dials one address for every URL.
#[derive(Debug)]
struct FixedDialer(SocketAddr);

impl Dialer for FixedDialer {
    fn dial<'a>(&'a self, _: &'a Uri) -> BoxFuture<'a, io::Result<Box<dyn Io>>> {
        Box::pin(async move {
            let stream = tokio::net::TcpStream::connect(self.0).await?;
            Ok(Box::new(stream) as Box<dyn Io>)
        })
    }
}

fn gateways(world: &World) -> Api<DynamicObject> {
    let kind = GroupVersionKind::gvk("gateway.networking.k8s.io", "v1", "Gateway");
    let resource = ApiResource::from_gvk_with_plural(&kind, "gateways");
    Api::namespaced_with(world.kubernetes(), "edge", &resource)
}

async fn create<K>(api: Api<K>, object: Value)
where
    K: Clone + serde::Serialize + serde::de::DeserializeOwned + std::fmt::Debug,
{
    let object: K = serde_json::from_value(object).unwrap();
    api.create(&PostParams::default(), &object).await.unwrap();
}

async fn create_gateway(world: &World) {
    let definitions: Api<CustomResourceDefinition> = Api::all(world.kubernetes());
    let schema = json!({"type": "object", "x-kubernetes-preserve-unknown-fields": true});
    let definition = json!({
        "metadata": {"name": "gateways.gateway.networking.k8s.io"},
        "spec": {
            "group": "gateway.networking.k8s.io", "scope": "Namespaced",
            "names": {"plural": "gateways", "singular": "gateway", "kind": "Gateway"},
            "versions": [{"name": "v1", "served": true, "storage": true, "subresources": {"status": {}},
                          "schema": {"openAPIV3Schema": schema}}],
        },
    });
    create(definitions, definition).await;
    let namespaces: Api<k8s_openapi::api::core::v1::Namespace> = Api::all(world.kubernetes());
    create(namespaces, json!({"metadata": {"name": "edge"}})).await;
    let gateway = json!({"apiVersion": "gateway.networking.k8s.io/v1", "kind": "Gateway", "metadata": {"name": "g"}, "spec": {}});
    create(gateways(world), gateway).await;
}

async fn set_address(world: &World, address: &str) {
    let patch = Patch::Merge(json!({"status": {"addresses": [{"value": address}]}}));
    let patched = gateways(world)
        .patch_status("g", &PatchParams::default(), &patch)
        .await;
    patched.unwrap();
}

fn through_gateway(runtime: &Runtime) -> Options {
    Options {
        connection: Connection::Gateway {
            name: "g".into(),
            namespace: "edge".into(),
            scheme: Scheme::Http,
        },
        dialer: Some(Arc::new(FixedDialer(([127, 0, 0, 1], runtime.port).into()))),
        gateway_ready_timeout: Duration::from_secs(120),
        ..options("http://unused")
    }
}

#[tokio::test]
async fn a_gateway_is_used_once_it_has_an_address() {
    let world = World::start().await;
    let runtime = Runtime::start().await;
    create_gateway(&world).await;
    let client = world.client(through_gateway(&runtime));
    let creating = tokio::spawn(async move { client.create(CreateOptions::from_pool("p")).await });
    testkit::eventually("the gateway to be watched", async || {
        let watched =
            |request: &String| request.contains("/gateways?") && request.contains("watch=true");
        world.requests().iter().any(watched).then_some(())
    })
    .await;
    set_address(&world, "router.example").await;
    let sandbox = creating.await.unwrap().unwrap();
    let result = sandbox.commands().run("echo through").await.unwrap();
    assert_eq!(result.stdout, "through\n");
}

#[tokio::test]
async fn a_gateway_without_a_valid_address_is_an_error_and_leaves_no_claim() {
    let world = World::start().await;
    let runtime = Runtime::start().await;
    create_gateway(&world).await;
    set_address(&world, "evil.example/path?x=@").await;
    let client = world.client(through_gateway(&runtime));
    let error = client
        .create(CreateOptions::from_pool("p"))
        .await
        .unwrap_err();
    assert!(
        matches!(error.kind(), ErrorKind::GatewayAddress { .. }),
        "{error:?}"
    );
    world.wait_for_no_claims().await;

    set_address(&world, "").await;
    let creating = tokio::spawn(async move { client.create(CreateOptions::from_pool("p")).await });
    testkit::eventually("the gateway to be watched", async || {
        let watched =
            |request: &String| request.contains("/gateways?") && request.contains("watch=true");
        world.requests().iter().any(watched).then_some(())
    })
    .await;
    gateways(&world)
        .delete("g", &DeleteParams::default())
        .await
        .unwrap();
    let error = creating.await.unwrap().unwrap_err();
    assert!(
        matches!(error.kind(), ErrorKind::GatewayDeleted { .. }),
        "{error:?}"
    );
    world.wait_for_no_claims().await;
}

#[tokio::test]
async fn inside_the_cluster_the_pod_is_reached_by_its_address() {
    let world = World::start().await;
    let runtime = Runtime::start().await;
    let client = world.client(Options {
        connection: Connection::InCluster(InClusterAddress::PodIp),
        server_port: runtime.port,
        ..options("http://unused")
    });
    let sandbox = client.create(CreateOptions::from_pool("p")).await.unwrap();
    assert_eq!(
        sandbox
            .commands()
            .run("echo straight")
            .await
            .unwrap()
            .stdout,
        "straight\n"
    );
    assert_eq!(
        world.requests().len(),
        2,
        "the claim's status contains the address"
    );

    // A handle that was attached while there was no pod finds the new pod.
    sandbox.suspend().await.unwrap();
    let other = world.client(Options {
        connection: Connection::InCluster(InClusterAddress::PodIp),
        server_port: runtime.port,
        ..options("http://unused")
    });
    let attached = other.attach(sandbox.id()).await.unwrap();
    attached.resume().await.unwrap();
    assert_eq!(
        attached.commands().run("echo again").await.unwrap().stdout,
        "again\n"
    );
}

async fn create_router_endpoint(world: &World) {
    let namespaces: Api<k8s_openapi::api::core::v1::Namespace> = Api::all(world.kubernetes());
    create(
        namespaces,
        json!({"metadata": {"name": "agent-sandbox-system"}}),
    )
    .await;
    let slices: Api<k8s_openapi::api::discovery::v1::EndpointSlice> =
        Api::namespaced(world.kubernetes(), "agent-sandbox-system");
    let slice = json!({
        "metadata": {"name": "router", "labels": {"kubernetes.io/service-name": "sandbox-router-svc"}},
        "addressType": "IPv4",
        "endpoints": [{"addresses": ["10.0.0.1"], "conditions": {"ready": true},
                       "targetRef": {"kind": "Pod", "name": "router-0", "namespace": "agent-sandbox-system"}}],
        "ports": [{"port": 8080}],
    });
    create(slices, slice).await;
}

/// Runs a command and a process.
async fn assert_is_reached(sandbox: &sdk::Sandbox) {
    let command = sandbox.commands().run("echo command").await.unwrap();
    assert_eq!(command.stdout, "command\n");
    let process = sandbox
        .process()
        .output(Start::command("cat; echo process"), 100)
        .await
        .unwrap();
    assert_eq!(process.stdout, b"process\n");
}

#[tokio::test]
async fn a_tunnel_carries_commands_and_processes() {
    let world = World::start().await;
    let runtime = Runtime::start().await;
    create_router_endpoint(&world).await;
    let front = ApiFront::start(world.kubernetes(), runtime.port).await;
    let options = Options {
        connection: Connection::Tunnel,
        ..options("http://unused")
    };
    let client = sdk::Client::new(front.client(), options).unwrap();
    let sandbox = client.create(CreateOptions::from_pool("p")).await.unwrap();
    assert_is_reached(&sandbox).await;
    let forwarded = front.forwarded();
    assert!(!forwarded.is_empty());
    assert!(
        forwarded
            .iter()
            .all(|to| to == "agent-sandbox-system/router-0:8080"),
        "{forwarded:?}"
    );

    front.refuse_forwarding();
    sandbox
        .process()
        .start(Start::argv(["true"]))
        .await
        .unwrap_err();
    let error = client
        .create(CreateOptions::from_pool("p"))
        .await
        .unwrap_err();
    assert!(
        matches!(error.kind(), ErrorKind::PortForwardDied { .. }),
        "{error:?}"
    );
    assert_eq!(world.claim_names().await, [sandbox.id()]);
}

#[tokio::test]
async fn a_tunnel_without_a_router_names_the_namespaces_searched() {
    let world = World::start().await;
    let client = world.client(Options {
        connection: Connection::Tunnel,
        ..options("http://unused")
    });
    let error = client
        .create(CreateOptions::from_pool("p"))
        .await
        .unwrap_err();
    let text = error.to_string();
    assert!(
        text.ends_with(
            "no ready endpoint of service sandbox-router-svc in default or agent-sandbox-system"
        ),
        "{text}"
    );
    world.wait_for_no_claims().await;
}

#[tokio::test]
async fn a_tls_router_is_used_only_if_its_certificate_is_trusted() {
    let world = World::start().await;
    let runtime = Runtime::start().await;
    let front = TlsFront::start(runtime.port).await;
    let trusting = Options {
        tls: Some(front.trust()),
        ..options(&front.url)
    };
    let client = world.client(trusting);
    let sandbox = client.create(CreateOptions::from_pool("p")).await.unwrap();
    assert_is_reached(&sandbox).await;

    let wary = world.client(options(&front.url));
    let sandbox = wary.attach(sandbox.id()).await.unwrap();
    let error = sandbox.commands().run("echo secret").await.unwrap_err();
    assert!(
        matches!(error.kind(), ErrorKind::Transport { .. }),
        "{error:?}"
    );
}

#[test]
fn the_blocking_client_does_the_same_without_async() {
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(2)
        .enable_all()
        .build()
        .unwrap();
    let (world, sandboxd, kubernetes) = runtime.block_on(async {
        let world = World::start().await;
        let kubernetes = world.recorded();
        (world, Runtime::start().await, kubernetes)
    });
    let client = {
        let _inside = runtime.enter();
        blocking::Client::new(kubernetes, options(&sandboxd.url)).unwrap()
    };
    let sandbox = client.create(CreateOptions::from_pool("p")).unwrap();
    sandbox.files().write("a.txt", "content").unwrap();
    assert_eq!(sandbox.files().read("a.txt").unwrap(), "content");
    assert_eq!(
        sandbox.commands().run("cat a.txt").unwrap().stdout,
        "content"
    );
    let mut process = sandbox.process().start(Start::argv(["cat"])).unwrap();
    process.control().write("typed").unwrap();
    assert!(
        matches!(process.next_event().unwrap(), Some(sdk::process::Event::Stdout(bytes)) if bytes == "typed")
    );
    process.control().close_stdin().unwrap();
    assert_eq!(process.wait().unwrap().exit_code, 0);
    sandbox.suspend().unwrap();
    client.attach(sandbox.id()).unwrap().resume().unwrap();
    assert_eq!(client.list().unwrap(), [sandbox.id()]);
    assert!(client.delete_all().is_empty());
    runtime.block_on(world.wait_for_no_claims());
}

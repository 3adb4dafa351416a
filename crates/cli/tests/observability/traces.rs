//! One trace from the call of a client to the command in the sandbox, as a collector receives it.

use std::fmt::Write;
use std::sync::Arc;

use k8s_openapi::api::core::v1::Pod;
use kube::api::ListParams;
use rustix::process::Signal;
use telemetry::Exporter;
use testkit::eventually;
use tracing_subscriber::Layer;
use tracing_subscriber::filter::LevelFilter;

use crate::receiver::{Received, Receiver};
use crate::support::Up;

/// The propagator that an instrumented program passes to the SDK.
#[derive(Debug)]
struct Propagator;

impl sdk::trace::Propagator for Propagator {
    fn inject(&self, set: &mut dyn FnMut(&str, String)) {
        if let Some(context) = telemetry::spans::current() {
            for (name, value) in context.headers() {
                set(name, value.to_owned());
            }
        }
    }
}

async fn kubernetes_of(up: &Up) -> kube::Client {
    let kubeconfig =
        kube::config::Kubeconfig::read_from(up.ready()["kubeconfig"].as_str().unwrap());
    let chosen = kube::config::KubeConfigOptions::default();
    let config = kube::Config::from_custom_kubeconfig(kubeconfig.unwrap(), &chosen).await;
    kube::Client::try_from(config.unwrap()).unwrap()
}

fn client_of(up: &Up, kubernetes: kube::Client) -> sdk::Client {
    let options = sdk::Options {
        connection: sdk::Connection::Direct {
            url: up.ready()["router"].as_str().unwrap().to_owned(),
        },
        propagator: Some(Arc::new(Propagator)),
        ..sdk::Options::default()
    };
    sdk::Client::new(kubernetes, options).unwrap()
}

/// Waits until the pod of a claimed sandbox has the claim's label. Neither the claim's status nor the SDK waits for that.
async fn await_labelled_pod(kubernetes: kube::Client) {
    let pods = kube::Api::<Pod>::default_namespaced(kubernetes);
    let claimed = ListParams::default().labels(api::labels::CLAIM_UID);
    eventually("the claim's label on the pod", async || {
        let found = pods.list(&claimed).await.unwrap().items;
        (!found.is_empty()).then_some(())
    })
    .await;
}

/// Starts an `up` that exports spans to an endpoint, with a full pool: an earlier claim may start cold.
async fn start_tracing_to(endpoint: &str) -> Up {
    let variables = [(
        "OTEL_EXPORTER_OTLP_ENDPOINT".to_owned(),
        endpoint.to_owned(),
    )];
    let starting = tokio::task::spawn_blocking(move || {
        let up = Up::start_with(&["--enable-tracing"], &variables);
        let full = ["scale", "python-warmpool", "--replicas=2", "--wait"];
        crate::support::stdout_of(up.command().args(full));
        up
    });
    starting.await.unwrap()
}

#[tokio::test(flavor = "multi_thread")]
async fn one_trace_connects_the_call_of_a_client_with_the_command() {
    let (receiver, address) = Receiver::start().await;
    let endpoint = format!("http://{address}");
    let exporter = Exporter::start_to("the-test", Some(&endpoint))
        .await
        .unwrap();
    let silent = tracing_subscriber::fmt::layer().with_filter(LevelFilter::OFF);
    telemetry::export::install(silent, Some(&exporter)).unwrap();

    let mut up = start_tracing_to(&endpoint).await;
    let kubernetes = kubernetes_of(&up).await;
    let client = client_of(&up, kubernetes.clone());
    let sandbox = client
        .create(sdk::CreateOptions::from_pool("python-warmpool"))
        .await
        .unwrap();
    let output = sandbox
        .commands()
        .run("sh -c 'echo $TRACEPARENT'")
        .await
        .unwrap();
    await_labelled_pod(kubernetes).await;
    sandbox.terminate().await.unwrap();
    drop(sandbox);
    // A cold start for this client.
    let cold =
        sdk::CreateOptions::from_template("python-runtime-template").warm_pool(sdk::WarmPool::None);
    let cold = client.create(cold).await.unwrap();
    cold.terminate().await.unwrap();
    drop(cold);
    // The remaining spans are sent when the processes end.
    up = tokio::task::spawn_blocking(move || {
        up.delete_everything();
        up.signal(Signal::TERM);
        up
    })
    .await
    .unwrap();
    drop(up);
    exporter.stop().await;

    let spans = receiver.spans();
    let named = |name: &str| -> &Received {
        let found = spans.iter().find(|span| span.name == name);
        found.unwrap_or_else(|| panic!("no span {name} among {:#?}", names(&spans)))
    };
    let root = named("sandbox-client.lifecycle");
    assert!(root.parent.is_empty(), "the trace begins with the client");
    let trace: Vec<&Received> = spans
        .iter()
        .filter(|span| span.trace == root.trace)
        .collect();
    for (name, service) in [
        ("sandbox-client.run", "the-test"),
        ("ReconcileSandboxClaim", "agent-sandbox"),
        ("ReconcileSandbox", "agent-sandbox"),
        ("POST sandbox", "agent-sandbox"),
        ("sandboxd.execute", "agent-sandbox"),
    ] {
        let span = trace.iter().find(|span| span.name == name);
        let span = span.unwrap_or_else(|| panic!("no {name} in the trace {:#?}", names(&spans)));
        assert_eq!(span.service, service, "{name}");
    }
    for span in &trace {
        let is_connected =
            span.parent.is_empty() || trace.iter().any(|other| other.id == span.parent);
        assert!(
            is_connected,
            "{} hangs in the air: {:#?}",
            span.name,
            names(&spans)
        );
        assert!(span.end >= span.start, "{}", span.name);
    }
    // From the command back to the call.
    let parent_of = |span: &Received| trace.iter().find(|other| other.id == span.parent).copied();
    let execution = trace.iter().find(|span| span.name == "sandboxd.execute");
    let request = parent_of(execution.unwrap()).unwrap();
    assert_eq!(request.name, "POST sandbox");
    assert_eq!(parent_of(request).unwrap().name, "sandbox-client.run");
    assert_eq!(
        output.stdout.trim().get(3..35),
        Some(hexadecimal(&root.trace).as_str()),
        "the command can go on with the trace: {output:?}"
    );
    assert_traces_the_node(&spans);
    assert_traces_the_steps_of_a_sandbox(&spans);
    // Span events report what was done.
    let claim = trace
        .iter()
        .filter(|span| span.name == "ReconcileSandboxClaim")
        .flat_map(|span| &span.events);
    assert!(
        claim.clone().any(|event| event == "changed"),
        "{:?}",
        claim.collect::<Vec<_>>()
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn a_command_line_is_a_step_of_the_trace_that_its_environment_names() {
    const TRACE: &str = "4bf92f3577b34da6a3ce929d0e0e4736";
    const PARENT: &str = "00f067aa0ba902b7";
    let (receiver, address) = Receiver::start().await;
    let output = tokio::task::spawn_blocking(move || {
        let up = Up::start(&[]);
        let mut command = up.command();
        command
            .env("OTEL_EXPORTER_OTLP_ENDPOINT", format!("http://{address}"))
            .env("TRACEPARENT", format!("00-{TRACE}-{PARENT}-01"))
            .args(["run", "--", "sh", "-c", "echo $TRACEPARENT"]);
        crate::support::stdout_of(&mut command)
    });
    let traceparent = output.await.unwrap();
    assert_eq!(
        traceparent.get(3..35),
        Some(TRACE),
        "the command got {traceparent:?}"
    );
    let spans = receiver.spans();
    let command = spans.iter().find(|span| span.name == "agent-sandbox run");
    let command = command.unwrap_or_else(|| panic!("{:#?}", names(&spans)));
    assert_eq!(hexadecimal(&command.trace), TRACE);
    assert_eq!(hexadecimal(&command.parent), PARENT);
    let lifecycle = spans
        .iter()
        .find(|span| span.name == "sandbox-client.lifecycle");
    assert_eq!(lifecycle.unwrap().parent, command.id);
}

fn hexadecimal(bytes: &[u8]) -> String {
    bytes.iter().fold(String::new(), |mut text, byte| {
        let _ = write!(text, "{byte:02x}");
        text
    })
}

/// A reconcile of a sandbox names it, and has a child for its volumes and one for its pod, which records the pod's state.
fn assert_traces_the_steps_of_a_sandbox(spans: &[Received]) {
    let reconciles: Vec<&Received> = spans
        .iter()
        .filter(|span| span.name == "ReconcileSandbox")
        .collect();
    assert!(!reconciles.is_empty());
    for span in &reconciles {
        assert_eq!(
            span.attributes.get("sandbox.namespace").map(String::as_str),
            Some("default")
        );
        assert!(span.attributes.contains_key("sandbox.name"), "{span:?}");
    }
    for step in ["reconcilePVCs", "reconcilePod"] {
        let steps: Vec<&Received> = spans.iter().filter(|span| span.name == step).collect();
        assert!(!steps.is_empty(), "no {step} among {:#?}", names(spans));
        for span in steps {
            let parent = reconciles.iter().find(|other| other.id == span.parent);
            assert!(parent.is_some(), "{span:?} hangs in the air");
        }
    }
    let events = spans
        .iter()
        .filter(|span| span.name == "reconcilePod")
        .flat_map(|span| &span.events);
    assert!(
        events.clone().any(|event| event == "NewPodStatusObserved"),
        "{:?}",
        events.collect::<Vec<_>>()
    );
}

/// What the node does for a sandbox that is started for its claim is part of the claim's trace.
fn assert_traces_the_node(spans: &[Received]) {
    let roots = spans
        .iter()
        .filter(|span| span.name == "sandbox-client.lifecycle");
    let steps = |trace: &[u8]| {
        let of_node = spans.iter().filter(|span| span.trace == trace);
        let mut steps: Vec<&str> = of_node
            .filter(|span| ["PreparePod", "StartContainer"].contains(&span.name.as_str()))
            .map(|span| span.name.as_str())
            .collect();
        steps.sort_unstable();
        steps
    };
    let mut traced: Vec<Vec<&str>> = roots.map(|root| steps(&root.trace)).collect();
    traced.sort();
    // The warm sandbox was started before its claim existed, so its start belongs to another trace.
    assert_eq!(
        traced,
        [vec![], vec!["PreparePod", "StartContainer"]],
        "{:#?}",
        names(spans)
    );
}

fn names(spans: &[Received]) -> Vec<String> {
    spans
        .iter()
        .map(|span| format!("{} {} {:02x?}", span.service, span.name, &span.trace[..3]))
        .collect()
}

//! The spans that an exporter receives for a sandbox.

#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

mod support;

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use sdk::{Connection, CreateOptions, Options, Scheme};
use support::http_server::ScriptedRouter;
use support::{World, options};
use tracing::field::{Field, Visit};
use tracing::span::{Attributes, Id, Record};
use tracing_subscriber::layer::{Context, SubscriberExt};
use tracing_subscriber::registry::LookupSpan;
use tracing_subscriber::{Layer, Registry};

/// Spans by number, with their fields and the number of their parent.
type Spans = Arc<Mutex<BTreeMap<u64, Span>>>;

struct Recorder(Spans);

struct Fields<'a>(&'a mut BTreeMap<String, String>);

impl Visit for Fields<'_> {
    fn record_debug(&mut self, field: &Field, value: &dyn std::fmt::Debug) {
        self.0.insert(field.name().to_owned(), format!("{value:?}"));
    }

    fn record_str(&mut self, field: &Field, value: &str) {
        self.0.insert(field.name().to_owned(), value.to_owned());
    }
}

impl<S> Layer<S> for Recorder
where
    S: tracing::Subscriber + for<'lookup> LookupSpan<'lookup>,
{
    fn on_new_span(&self, attributes: &Attributes<'_>, id: &Id, context: Context<'_, S>) {
        let mut fields = BTreeMap::new();
        attributes.record(&mut Fields(&mut fields));
        let span = context.span(id).unwrap();
        let parent = span.parent().map(|parent| parent.id().into_u64());
        self.0
            .lock()
            .unwrap()
            .insert(id.into_u64(), (fields, parent));
    }

    fn on_record(&self, id: &Id, record: &Record<'_>, _: Context<'_, S>) {
        if let Some((fields, _)) = self.0.lock().unwrap().get_mut(&id.into_u64()) {
            record.record(&mut Fields(fields));
        }
    }
}

type Span = (BTreeMap<String, String>, Option<u64>);

fn find<'a>(spans: &'a BTreeMap<u64, Span>, name: &str) -> (&'a u64, &'a Span) {
    let found = spans
        .iter()
        .find(|(_, (fields, _))| fields.get("otel.name").is_some_and(|found| found == name));
    found.unwrap_or_else(|| panic!("no span {name} in {spans:#?}"))
}

#[tokio::test]
async fn discovering_the_gateway_has_its_own_span() {
    let spans = Spans::default();
    let subscriber = Registry::default().with(Recorder(Arc::clone(&spans)));
    let _recording = tracing::subscriber::set_default(subscriber);
    let world = World::start().await;
    let client = world.client(Options {
        connection: Connection::Gateway {
            name: "front".into(),
            namespace: "edge".into(),
            scheme: Scheme::Http,
        },
        gateway_ready_timeout: Duration::from_millis(50),
        ..options("http://unused")
    });
    let request = CreateOptions::from_pool("p");
    client.create(request).await.unwrap_err();
    let spans = spans.lock().unwrap().clone();
    let (lifecycle, _) = find(&spans, "sandbox-client.lifecycle");
    let (_, (fields, parent)) = find(&spans, "sandbox-client.wait_for_gateway");
    assert_eq!(*parent, Some(*lifecycle));
    assert_eq!(fields["sandbox.gateway.name"], "front");
    assert_eq!(fields["sandbox.gateway.namespace"], "edge");
    assert_eq!(fields["otel.status_code"], "ERROR");
}

#[tokio::test]
async fn operations_are_children_of_the_lifecycle_and_failures_are_marked() {
    let spans = Spans::default();
    let subscriber = Registry::default().with(Recorder(Arc::clone(&spans)));
    let _recording = tracing::subscriber::set_default(subscriber);

    let world = World::start().await;
    let router = ScriptedRouter::always(200, r#"{"stdout":"","stderr":"","exit_code":4}"#).await;
    let client = world.client(Options {
        trace_service_name: "my-agent".into(),
        ..options(&router.url)
    });
    let sandbox = client.create(CreateOptions::from_pool("p")).await.unwrap();
    sandbox.commands().run("false").await.unwrap();
    sandbox.files().list("x").await.unwrap_err();

    let spans = spans.lock().unwrap().clone();
    let named = |name: &str| find(&spans, name);
    let (lifecycle, (fields, _)) = named("my-agent.lifecycle");
    assert_eq!(fields["sandbox.claim.name"], sandbox.id());
    assert_eq!(fields["sandbox.name"], sandbox.sandbox_name().unwrap());

    for step in ["my-agent.create_claim", "my-agent.wait_for_sandbox_ready"] {
        let (_, (fields, parent)) = named(step);
        assert_eq!(*parent, Some(*lifecycle), "{step}");
        assert_eq!(fields["sandbox.claim.name"], sandbox.id(), "{step}");
        assert!(!fields.contains_key("otel.status_code"), "{step}");
    }

    let (_, (fields, parent)) = named("my-agent.run");
    assert_eq!(*parent, Some(*lifecycle));
    assert_eq!(fields["sandbox.command"], "false");
    assert_eq!(fields["sandbox.exit_code"], "4");
    assert_eq!(
        fields["sandbox.request_id"],
        router.received()[0].header("x-request-id")
    );
    assert!(!fields.contains_key("otel.status_code"));

    let (_, (fields, parent)) = named("my-agent.list");
    assert_eq!(*parent, Some(*lifecycle));
    assert_eq!(fields["otel.status_code"], "ERROR");
    assert!(fields["error"].contains("cannot be decoded"), "{fields:?}");
}

//! Spans: what an exporter would see of a sandbox's life.

#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

mod support;

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};

use sdk::{CreateOptions, Options};
use support::http_server::ScriptedRouter;
use support::{World, options};
use tracing::field::{Field, Visit};
use tracing::span::{Attributes, Id, Record};
use tracing_subscriber::layer::{Context, SubscriberExt};
use tracing_subscriber::registry::LookupSpan;
use tracing_subscriber::{Layer, Registry};

/// Spans by number, with their fields and the number of their parent.
type Spans = Arc<Mutex<BTreeMap<u64, (BTreeMap<String, String>, Option<u64>)>>>;

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
    let named = |name: &str| {
        let found = spans
            .iter()
            .find(|(_, (fields, _))| fields.get("otel.name").is_some_and(|found| found == name));
        found.unwrap_or_else(|| panic!("no span {name} in {spans:#?}"))
    };
    let (lifecycle, (fields, _)) = named("my-agent.lifecycle");
    assert_eq!(fields["sandbox.claim.name"], sandbox.id());
    assert_eq!(fields["sandbox.name"], sandbox.sandbox_name().unwrap());

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
    assert!(fields["error"].contains("not understood"), "{fields:?}");
}

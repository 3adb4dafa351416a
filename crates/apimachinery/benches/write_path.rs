//! Benchmarks the work of every write (decoding, pruning, defaulting, validation, CEL rules and field ownership, for an object
//! the size of a sandbox) and of every watch (label matching).

use std::hint::black_box;

use agent_sandbox_apimachinery::apply::{Writer, apply, track_update};
use agent_sandbox_apimachinery::schema::Schema;
use agent_sandbox_apimachinery::selector::LabelSelector;
use agent_sandbox_apimachinery::strict;
use agent_sandbox_apimachinery::types::TypeRef;
use criterion::{Criterion, criterion_group, criterion_main};
use serde_json::{Value, json};

/// A schema like that of Sandbox: a pod template with typed containers, defaults, enums, patterns and rules.
fn schema() -> Schema {
    let quantity = json!({"anyOf": [{"type": "integer"}, {"type": "string"}], "x-kubernetes-int-or-string": true,
        "pattern": "^(\\+|-)?(([0-9]+(\\.[0-9]*)?)|(\\.[0-9]+))(([KMGTPE]i)|[numkMGTPE]|([eE](\\+|-)?(([0-9]+(\\.[0-9]*)?)|(\\.[0-9]+))))?$"});
    let container = json!({
        "type": "object", "required": ["name"],
        "properties": {
            "name": {"type": "string", "maxLength": 63}, "image": {"type": "string"},
            "args": {"type": "array", "items": {"type": "string"}},
            "env": {"type": "array", "x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": ["name"],
                "items": {"type": "object", "required": ["name"], "properties": {"name": {"type": "string"}, "value": {"type": "string"}}}},
            "ports": {"type": "array", "x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": ["containerPort", "protocol"],
                "items": {"type": "object", "required": ["containerPort"], "properties": {
                    "containerPort": {"type": "integer", "format": "int32"}, "name": {"type": "string"},
                    "protocol": {"type": "string", "default": "TCP", "enum": ["TCP", "UDP", "SCTP"]}}}},
            "resources": {"type": "object", "properties": {
                "limits": {"type": "object", "additionalProperties": quantity}, "requests": {"type": "object", "additionalProperties": quantity}}}
        }
    });
    let whole = json!({
        "type": "object",
        "properties": {
            "spec": {
                "type": "object",
                "x-kubernetes-validations": [
                    {"rule": "!has(self.operatingMode) || self.operatingMode != 'Suspended' || self.replicas == 0"},
                    {"rule": "self.podTemplate.spec.containers.size() > 0"}
                ],
                "properties": {
                    "replicas": {"type": "integer", "minimum": 0, "maximum": 1, "default": 1},
                    "operatingMode": {"type": "string", "enum": ["Running", "Suspended"]},
                    "shutdownTime": {"type": "string", "format": "date-time"},
                    "podTemplate": {"type": "object", "properties": {
                        "metadata": {"type": "object", "properties": {"labels": {"type": "object", "additionalProperties": {"type": "string"}}}},
                        "spec": {"type": "object", "required": ["containers"], "properties": {
                            "containers": {"type": "array", "x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": ["name"], "items": container},
                            "restartPolicy": {"type": "string", "default": "Always"}, "nodeName": {"type": "string"}}}
                    }}
                }
            },
            "status": {"type": "object", "properties": {
                "conditions": {"type": "array", "x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": ["type"],
                    "items": {"type": "object", "required": ["type"], "properties": {"type": {"type": "string"}, "status": {"type": "string"},
                        "reason": {"type": "string"}, "message": {"type": "string"}, "lastTransitionTime": {"type": "string", "format": "date-time"}}}},
                "replicas": {"type": "integer"}, "nodeName": {"type": "string"}}}
        }
    });
    Schema::compile(&whole, "schema").expect("the schema is structural")
}

fn sandbox() -> Value {
    let env: Vec<Value> = (0..8)
        .map(|i| json!({"name": format!("VARIABLE_{i}"), "value": "some value"}))
        .collect();
    json!({
        "apiVersion": "agents.x-k8s.io/v1beta1", "kind": "Sandbox",
        "metadata": {"name": "sandbox-1", "namespace": "default", "uid": "f7c1", "labels": {"app": "agent", "tier": "sandbox", "agents.x-k8s.io/pool": "warm"}},
        "spec": {"replicas": 1, "podTemplate": {"metadata": {"labels": {"app": "agent"}}, "spec": {"containers": [{
            "name": "main", "image": "registry.local/python:3.12", "args": ["serve", "--port", "8888"], "env": env,
            "ports": [{"containerPort": 8888, "name": "http"}], "resources": {"limits": {"cpu": "500m", "memory": "512Mi"}, "requests": {"cpu": "100m", "memory": "128Mi"}}}]}}},
        "status": {"replicas": 1, "nodeName": "n1", "conditions": [{"type": "Ready", "status": "True", "reason": "PodReady", "message": "Pod is Ready; Service Exists", "lastTransitionTime": "2026-01-01T00:00:00Z"}]}
    })
}

fn bench(criterion: &mut Criterion) {
    let schema = schema();
    let object = sandbox();
    let body = object.to_string();
    criterion.bench_function("decode strictly", |b| {
        b.iter(|| strict::decode(black_box(body.as_bytes())));
    });
    criterion.bench_function("prune, default, validate", |b| {
        b.iter_batched(
            || object.clone(),
            |mut object| {
                schema.prune(&mut object);
                schema.default(&mut object);
                schema.validate(&object)
            },
            criterion::BatchSize::SmallInput,
        );
    });
    criterion.bench_function("rules", |b| {
        b.iter(|| schema.validate_rules(black_box(&object), None));
    });

    let writer = Writer {
        manager: "controller",
        api_version: "agents.x-k8s.io/v1beta1",
        subresource: "",
        types: TypeRef::custom(&schema),
        ignored: &[],
        now: "2026-01-01T00:00:00Z".parse().expect("a time"),
    };
    let mut live = object.clone();
    track_update(None, &mut live, &writer);
    let mut changed = live.clone();
    changed["status"]["conditions"][0]["status"] = json!("False");
    criterion.bench_function("ownership of a create", |b| {
        b.iter_batched(
            || object.clone(),
            |mut new| track_update(None, &mut new, &writer),
            criterion::BatchSize::SmallInput,
        );
    });
    criterion.bench_function("ownership of a status update", |b| {
        b.iter_batched(
            || changed.clone(),
            |mut new| track_update(Some(&live), &mut new, &writer),
            criterion::BatchSize::SmallInput,
        );
    });
    let config = json!({"apiVersion": "agents.x-k8s.io/v1beta1", "kind": "Sandbox", "metadata": {"name": "sandbox-1"}, "spec": {"replicas": 1}});
    criterion.bench_function("server-side apply", |b| {
        b.iter(|| apply(Some(&live), black_box(&config), &writer, false).is_ok());
    });

    let selector =
        LabelSelector::parse("app=agent,tier in (sandbox,pool),!legacy").expect("a selector");
    criterion.bench_function("match labels", |b| {
        b.iter(|| selector.matches_object(black_box(&object)));
    });
}

criterion_group!(benches, bench);
criterion_main!(benches);

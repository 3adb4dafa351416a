use std::collections::BTreeMap;

use api::SandboxSpec;

use super::world::{HASH, NAME, World, ready_pod, sandbox};

#[expect(
    clippy::unnecessary_wraps,
    reason = "metadata is optional where it stands"
)]
fn pairs(text: &str) -> Option<BTreeMap<String, String>> {
    Some(
        text.split_whitespace()
            .filter_map(|pair| pair.split_once('='))
            .map(|(key, value)| (key.to_owned(), value.to_owned()))
            .collect(),
    )
}

fn labels(world: &World) -> BTreeMap<String, String> {
    world.pods[0].metadata.labels.clone().unwrap_or_default()
}

fn annotations(world: &World) -> BTreeMap<String, String> {
    world.pods[0]
        .metadata
        .annotations
        .clone()
        .unwrap_or_default()
}

#[test]
fn a_new_pod_carries_the_templates_metadata_and_the_list_of_its_keys() {
    let mut sandbox = sandbox(SandboxSpec::default());
    sandbox.spec.pod_template.metadata.labels = pairs("tier=web app=demo");
    sandbox.spec.pod_template.metadata.annotations = pairs("owner=me");
    sandbox.metadata.annotations = pairs("opentelemetry.io/trace-context={}");
    let mut world = World::new(sandbox);
    world.settle();
    assert_eq!(
        Some(labels(&world)),
        pairs(&format!(
            "tier=web app=demo agents.x-k8s.io/sandbox-name-hash={HASH}"
        ))
    );
    assert_eq!(
        Some(annotations(&world)),
        pairs(
            "owner=me opentelemetry.io/trace-context={} agents.x-k8s.io/propagated-labels=app,tier \
             agents.x-k8s.io/propagated-annotations=owner"
        )
    );
}

#[test]
fn a_cold_sandbox_is_never_marked_as_warm() {
    let mut world = World::new(sandbox(SandboxSpec::default()));
    world.settle();
    assert_eq!(world.sandbox().metadata.annotations, None);
}

#[test]
fn keys_dropped_from_the_template_are_dropped_from_the_pod_and_no_others() {
    let mut world = World::new(sandbox(SandboxSpec::default())).with_own_pod(ready_pod(NAME));
    world.spec_mut().pod_template.metadata.labels = pairs("app=demo tier=web");
    world.spec_mut().pod_template.metadata.annotations = pairs("a=1 b=2");
    world.settle();
    let pod = &mut world.pods[0].metadata;
    pod.labels
        .as_mut()
        .unwrap()
        .insert("foreign".to_owned(), "x".to_owned());
    pod.labels
        .as_mut()
        .unwrap()
        .insert("app".to_owned(), "tampered".to_owned());
    pod.annotations
        .as_mut()
        .unwrap()
        .insert("foreign".to_owned(), "y".to_owned());

    world.spec_mut().pod_template.metadata.labels = pairs("app=demo");
    world.spec_mut().pod_template.metadata.annotations = pairs("b=3");
    world.settle();
    assert_eq!(
        Some(labels(&world)),
        pairs(&format!(
            "app=demo foreign=x agents.x-k8s.io/sandbox-name-hash={HASH}"
        ))
    );
    assert_eq!(
        Some(annotations(&world)),
        pairs(
            "b=3 foreign=y agents.x-k8s.io/propagated-labels=app agents.x-k8s.io/propagated-annotations=b"
        )
    );

    world.spec_mut().pod_template.metadata.labels = None;
    world.spec_mut().pod_template.metadata.annotations = None;
    world.settle();
    assert_eq!(
        Some(labels(&world)),
        pairs(&format!(
            "foreign=x agents.x-k8s.io/sandbox-name-hash={HASH}"
        ))
    );
    assert_eq!(Some(annotations(&world)), pairs("foreign=y"));
}

#[test]
fn a_template_cannot_take_over_the_identity_or_the_bookkeeping() {
    let mut world = World::new(sandbox(SandboxSpec::default()));
    let template = &mut world.spec_mut().pod_template.metadata;
    template.labels = pairs("agents.x-k8s.io/sandbox-name-hash=forged");
    template.annotations = pairs("agents.x-k8s.io/propagated-labels=app a=1");
    world.settle();
    assert_eq!(labels(&world)["agents.x-k8s.io/sandbox-name-hash"], HASH);
    assert_eq!(
        annotations(&world)["agents.x-k8s.io/propagated-annotations"],
        "a"
    );
    world.spec_mut().pod_template.metadata.labels = None;
    world.settle();
    assert_eq!(labels(&world)["agents.x-k8s.io/sandbox-name-hash"], HASH);
}

#[test]
fn a_sandbox_never_carries_the_label_of_the_router() {
    let mut world = World::new(sandbox(SandboxSpec::default()));
    let template = &mut world.spec_mut().pod_template.metadata;
    template.labels = pairs("app=sandbox-router tier=web");
    world.settle();
    assert_eq!(
        Some(labels(&world)),
        pairs(&format!(
            "tier=web agents.x-k8s.io/sandbox-name-hash={HASH}"
        ))
    );
}

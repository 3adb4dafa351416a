use kube::core::{ObjectList, WatchEvent};
use serde_json::{Value, json};

use super::*;
use crate::{Sandbox, SandboxClaim, SandboxWarmPool};
use k8s_openapi::api::core::v1::{Pod, Secret};
use k8s_openapi::api::networking::v1::NetworkPolicy;
use kube::ResourceExt;

fn sandbox(name: &str, spec: &Value) -> Value {
    json!({
        "apiVersion": "agents.x-k8s.io/v1beta1",
        "kind": "Sandbox",
        "metadata": { "name": name, "namespace": "n", "uid": "u", "resourceVersion": "7", "generation": 3 },
        "spec": spec,
    })
}

fn with_port(port: u64) -> Value {
    json!({ "podTemplate": { "spec": { "containers": [
        { "name": "a", "image": "i", "env": [{ "name": "TOKEN", "value": "hunter2" }] },
        { "name": "b", "ports": [{ "containerPort": 80 }, { "containerPort": port }] },
    ] } } })
}

fn problem<K: DeserializeOwned + fmt::Debug>(object: &Value) -> String {
    match Decoded::<K>::from_json(&object.to_string()) {
        Decoded::Unreadable(unreadable) => unreadable.problem.to_string(),
        readable @ Decoded::Readable(_) => panic!("{readable:?}"),
    }
}

#[test]
fn an_unreadable_item_does_not_affect_the_others_of_its_list() {
    let list = json!({
        "apiVersion": "agents.x-k8s.io/v1beta1",
        "kind": "SandboxList",
        "metadata": { "resourceVersion": "9" },
        "items": [
            sandbox("good", &with_port(1)),
            sandbox("bad", &with_port(3_000_000_000)),
            sandbox("fine", &with_port(2)),
        ],
    });
    let list: ObjectList<Decoded<Sandbox>> = serde_json::from_str(&list.to_string()).unwrap();
    let names: Vec<String> = list.items.iter().map(ResourceExt::name_any).collect();
    assert_eq!(names, ["good", "bad", "fine"]);
    let [
        Decoded::Readable(_),
        Decoded::Unreadable(bad),
        Decoded::Readable(_),
    ] = &list.items[..]
    else {
        panic!("{:?}", list.items);
    };
    assert_eq!(bad.metadata.resource_version.as_deref(), Some("7"));
    assert_eq!(bad.metadata.generation, Some(3));
}

#[test]
fn an_unreadable_object_in_a_watch_is_still_an_event() {
    let object = sandbox("bad", &with_port(1 << 40));
    // Servers write the type first. An object before it is buffered until the type is known.
    for event in [
        format!(r#"{{"type":"MODIFIED","object":{object}}}"#),
        format!(r#"{{"object":{object},"type":"MODIFIED"}}"#),
    ] {
        let event: WatchEvent<Decoded<Sandbox>> = serde_json::from_str(&event).unwrap();
        let WatchEvent::Modified(object) = event else {
            panic!("{event:?}");
        };
        assert_eq!(object.name_any(), "bad");
        assert!(object.readable().is_none());
    }
}

#[test]
fn a_problem_names_the_unreadable_field() {
    let pool = json!({ "metadata": {}, "spec": {
        "sandboxTemplateRef": { "name": "t" }, "replicas": 3_000_000_000_u64 } });
    let claim = json!({ "spec": { "lifecycle": { "ttlSecondsAfterFinished": 2_147_483_648_u64 } }, "metadata": {} });
    let policy = json!({ "metadata": {}, "spec": { "podSelector": {}, "ingress": [
        {}, { "ports": [{ "port": 1, "endPort": 3_000_000_000_u64 }] }] } });
    let deadline = "{\"metadata\":{},\"spec\":{\"containers\":[],\"activeDeadlineSeconds\":99999999999999999999}}";
    let table = [
        (
            problem::<Sandbox>(&sandbox("s", &with_port(3_000_000_000))),
            "spec.podTemplate.spec.containers[1].ports[1].containerPort: invalid value: integer `3000000000`, expected i32",
        ),
        (
            problem::<SandboxWarmPool>(&pool),
            "spec.replicas: invalid value: integer `3000000000`, expected i32",
        ),
        (
            problem::<SandboxClaim>(&claim),
            "spec.lifecycle.ttlSecondsAfterFinished: invalid value: integer `2147483648`, expected i32",
        ),
        (
            problem::<NetworkPolicy>(&policy),
            "spec.ingress[1].ports[0].endPort: invalid value: integer `3000000000`, expected i32",
        ),
        (
            problem::<Pod>(&serde_json::from_str(deadline).unwrap()),
            "spec.activeDeadlineSeconds: invalid type: floating point `1e+20`, expected i64",
        ),
        (
            problem::<Sandbox>(&sandbox("s", &json!({ "replicas": 1 }))),
            "spec: missing field `podTemplate`",
        ),
        (
            problem::<SandboxWarmPool>(&json!({ "metadata": {}, "spec": {
                "replicas": { "of": 1 }, "sandboxTemplateRef": { "name": "t" } } })),
            "spec.replicas: invalid type: map, expected i32",
        ),
        (
            problem::<Pod>(&json!({ "spec": { "containers": [[], {}] } })),
            "spec.containers[0]: invalid type: sequence, expected Container",
        ),
    ];
    for (found, expected) in table {
        assert_eq!(found, expected);
    }
}

#[test]
fn a_problem_contains_no_text_of_the_object() {
    let secret = "hunter2\", expected i32 and string \"";
    let claim =
        json!({ "metadata": {}, "spec": { "lifecycle": { "ttlSecondsAfterFinished": secret } } });
    assert_eq!(
        problem::<SandboxClaim>(&claim),
        "spec.lifecycle.ttlSecondsAfterFinished: invalid type: string, expected i32"
    );
    let data = json!({ "metadata": {}, "data": { "password": "hunter2!" } });
    let problem_of_data = problem::<Secret>(&data);
    assert!(!problem_of_data.contains("hunter2"), "{problem_of_data}");
    assert!(
        problem_of_data.starts_with("data.password: "),
        "{problem_of_data}"
    );
    let time =
        json!({ "metadata": { "creationTimestamp": "hunter2" }, "spec": { "containers": [] } });
    assert_eq!(
        problem::<Pod>(&time),
        "metadata.creationTimestamp: its text cannot be parsed"
    );
}

#[test]
fn times_beyond_the_maximum_are_clamped_in_every_field() {
    let never = "9999-12-31T23:59:59Z";
    let last = Timestamp::MAX.as_second();
    let mut object = sandbox("s", &with_port(1));
    object["spec"]["shutdownTime"] = json!(never);
    object["metadata"]["deletionTimestamp"] = json!("9999-12-31T23:59:59+02:00");
    object["metadata"]["managedFields"] = json!([{ "manager": "m", "time": never }]);
    object["status"] = json!({ "conditions": [
        { "type": "Ready", "status": "True", "reason": "R", "message": "", "lastTransitionTime": never }] });
    let Decoded::Readable(read) = Decoded::<Sandbox>::from_json(&object.to_string()) else {
        panic!("a late time must not make an object unreadable");
    };
    assert_eq!(read.spec.shutdown_time.unwrap().0.as_second(), last);
    assert_eq!(
        read.metadata.deletion_timestamp.unwrap().0.as_second(),
        last
    );
    assert_eq!(
        read.status.unwrap().conditions[0]
            .last_transition_time
            .0
            .as_second(),
        last
    );
    // Clamping also works without [`Decoded`].
    let spec: crate::SandboxSpec = serde_json::from_value(object["spec"].clone()).unwrap();
    assert_eq!(spec.shutdown_time.unwrap().0.as_second(), last);
}

#[test]
fn only_times_beyond_the_maximum_are_clamped() {
    for (text, clamped) in [
        ("9999-12-31T23:59:59Z", true),
        ("9999-12-31T23:59:59.999999999Z", true),
        ("9999-12-31T00:00:00-05:00", true),
        ("9999-12-30T00:00:00Z", false),
        ("2026-01-01T00:00:00Z", false),
        ("9999-13-31T23:59:59Z", false),
        ("9999-12-31T23:59:59", false),
        ("never", false),
        ("", false),
        ("é", false),
    ] {
        assert_eq!(clamped_time(text).is_some(), clamped, "{text}");
    }
}

#[test]
fn an_unreadable_object_keeps_its_conditions_and_metadata() {
    let mut object = sandbox("s", &with_port(1 << 40));
    object["metadata"]["labels"] = json!({ "a": "b" });
    object["metadata"]["creationTimestamp"] = json!("yesterday");
    object["metadata"]["deletionTimestamp"] = json!("today");
    object["status"] = json!({ "replicas": "one", "conditions": [
        { "type": "Broken", "status": 1 },
        { "type": "Ready", "status": "True", "reason": "R", "message": "", "lastTransitionTime": "2026-01-01T00:00:00Z" },
    ] });
    let Decoded::Unreadable(left) = Decoded::<Sandbox>::from_json(&object.to_string()) else {
        panic!("it must not be readable");
    };
    assert_eq!(left.metadata.labels.as_ref().unwrap()["a"], "b");
    assert_eq!(left.metadata.uid.as_deref(), Some("u"));
    assert!(left.metadata.deletion_timestamp.is_some());
    let types: Vec<&str> = left
        .conditions
        .iter()
        .map(|one| one.type_.as_str())
        .collect();
    assert_eq!(types, ["Ready"]);
}

#[test]
fn a_deeply_nested_object_and_a_non_object_do_not_panic() {
    let deep = format!(
        r#"{{"metadata":{{"managedFields":[{{"fieldsV1":{}1{}}}],"name":"deep"}},"spec":{{}}}}"#,
        r#"{"f":"#.repeat(400),
        "}".repeat(400)
    );
    let Decoded::Unreadable(left) = Decoded::<Sandbox>::from_json(&deep) else {
        panic!("it must not be readable");
    };
    assert_eq!(left.metadata.name.as_deref(), Some("deep"));
    for nothing in ["null", "3", "[]", "\"text\"", "{}"] {
        assert!(Decoded::<Sandbox>::from_json(nothing).readable().is_none());
    }
}

mod properties {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        /// A path is found for any text and any offset.
        #[test]
        fn a_path_is_found_in_any_text(text in "[{}\\[\\],:\"\\\\a1 \n]{0,40}", offset in 0_usize..41) {
            let offset = offset.min(text.len());
            let place = walk(text.as_bytes(), offset);
            prop_assert!(place.last.end <= text.len());
        }
    }
}

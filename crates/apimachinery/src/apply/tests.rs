#![expect(
    clippy::needless_pass_by_value,
    reason = "tests read better with json! literals as arguments"
)]

use serde_json::{Value, json};

use super::{Writer, apply, track_update};
use crate::status::Status;
use crate::types::TypeRef;

fn writer(manager: &str) -> Writer<'_> {
    Writer {
        manager,
        api_version: "v1",
        subresource: "",
        types: TypeRef::builtin("v1", "Pod").unwrap(),
        ignored: &[&["status"]],
        now: "2026-01-01T00:00:00Z".parse().unwrap(),
    }
}

fn pod(spec: Value) -> Value {
    json!({"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "p"}, "spec": spec})
}

fn applied(
    live: Option<&Value>,
    config: Value,
    manager: &str,
    force: bool,
) -> Result<Value, Status> {
    apply(live, &config, &writer(manager), force)
}

fn created(spec: Value, manager: &str) -> Value {
    let mut object = pod(spec);
    track_update(None, &mut object, &writer(manager));
    object
}

fn fields(object: &Value, manager: &str) -> Value {
    let entries = object["metadata"]["managedFields"]
        .as_array()
        .cloned()
        .unwrap_or_default();
    entries
        .iter()
        .find(|entry| entry["manager"] == manager)
        .map_or(Value::Null, |entry| entry["fieldsV1"].clone())
}

#[test]
fn a_create_is_owned_by_its_manager_field_by_field() {
    let object = created(
        json!({"containers": [{"name": "c", "image": "i", "args": ["a"]}], "nodeSelector": {"a": "b"}}),
        "kubectl",
    );
    assert_eq!(
        object["metadata"]["managedFields"],
        json!([{
            "apiVersion": "v1", "fieldsType": "FieldsV1", "manager": "kubectl", "operation": "Update", "time": "2026-01-01T00:00:00Z",
            "fieldsV1": {"f:spec": {".": {}, "f:containers": {".": {}, "k:{\"name\":\"c\"}": {".": {}, "f:args": {}, "f:image": {}, "f:name": {}}}, "f:nodeSelector": {}}}
        }])
    );
}

#[test]
fn an_update_takes_ownership_of_exactly_the_changed_fields() {
    let live = created(
        json!({"containers": [{"name": "c", "image": "i"}], "hostname": "h"}),
        "creator",
    );
    let mut new = live.clone();
    new["spec"]["containers"][0]["image"] = json!("j");
    new["spec"].as_object_mut().unwrap().remove("hostname");
    track_update(Some(&live), &mut new, &writer("editor"));
    assert_eq!(
        fields(&new, "editor"),
        json!({"f:spec": {"f:containers": {"k:{\"name\":\"c\"}": {"f:image": {}}}}})
    );
    assert_eq!(
        fields(&new, "creator"),
        json!({"f:spec": {".": {}, "f:containers": {".": {}, "k:{\"name\":\"c\"}": {".": {}, "f:name": {}}}}})
    );
    let mut same = new.clone();
    track_update(Some(&new), &mut same, &writer("unrelated"));
    assert_eq!(same, new);
}

#[test]
fn applying_merges_and_owns() {
    let object = applied(
        None,
        pod(json!({"containers": [{"name": "c", "image": "i"}]})),
        "a",
        false,
    )
    .unwrap();
    assert_eq!(
        fields(&object, "a"),
        json!({"f:spec": {"f:containers": {"k:{\"name\":\"c\"}": {".": {}, "f:image": {}, "f:name": {}}}}})
    );
    let both = applied(
        Some(&object),
        pod(json!({"containers": [{"name": "d", "image": "k"}]})),
        "b",
        false,
    )
    .unwrap();
    assert_eq!(
        both["spec"]["containers"],
        json!([{"name": "c", "image": "i"}, {"name": "d", "image": "k"}])
    );
    assert_eq!(
        both["metadata"]["managedFields"].as_array().unwrap().len(),
        2
    );
}

#[test]
fn a_contested_field_is_a_conflict_until_forced() {
    let live = created(
        json!({"containers": [{"name": "c", "image": "i"}]}),
        "kubectl-client-side-apply",
    );
    let config = pod(json!({"containers": [{"name": "c", "image": "j"}]}));
    let status = applied(Some(&live), config.clone(), "mine", false).unwrap_err();
    assert_eq!(
        status.message,
        "Apply failed with 1 conflict: conflict with \"kubectl-client-side-apply\" using v1: .spec.containers[name=\"c\"].image"
    );
    assert_eq!(status.code, 409);
    let cause = &status.details.unwrap().causes[0];
    assert_eq!(
        (cause.reason.as_str(), cause.field.as_str()),
        ("FieldManagerConflict", ".spec.containers[name=\"c\"].image")
    );
    assert_eq!(
        cause.message,
        "conflict with \"kubectl-client-side-apply\" using v1"
    );
    let forced = applied(Some(&live), config, "mine", true).unwrap();
    assert_eq!(forced["spec"]["containers"][0]["image"], "j");
    assert!(
        fields(&forced, "kubectl-client-side-apply")
            .pointer("/f:spec/f:containers/k:{\"name\":\"c\"}/f:image")
            .is_none()
    );
    let agreed = applied(
        Some(&live),
        pod(json!({"containers": [{"name": "c", "image": "i"}]})),
        "mine",
        false,
    );
    assert!(agreed.is_ok());
}

#[test]
fn several_conflicts_are_listed_by_manager() {
    let live = created(json!({"hostname": "a", "subdomain": "b"}), "m");
    let status = applied(
        Some(&live),
        pod(json!({"hostname": "x", "subdomain": "y"})),
        "mine",
        false,
    )
    .unwrap_err();
    assert_eq!(
        status.message,
        "Apply failed with 2 conflicts: conflicts with \"m\" using v1:\n- .spec.hostname\n- .spec.subdomain"
    );
}

#[test]
fn a_field_no_longer_applied_is_removed_unless_another_manager_owns_it() {
    let first = pod(
        json!({"hostname": "h", "subdomain": "s", "containers": [{"name": "c", "image": "i"}, {"name": "d", "image": "i"}]}),
    );
    let object = applied(None, first, "a", false).unwrap();
    let shared = applied(Some(&object), pod(json!({"hostname": "h"})), "b", false).unwrap();
    let second = applied(
        Some(&shared),
        pod(json!({"containers": [{"name": "c", "image": "i"}]})),
        "a",
        false,
    )
    .unwrap();
    assert_eq!(
        second["spec"],
        json!({"hostname": "h", "containers": [{"name": "c", "image": "i"}]})
    );
    assert_eq!(fields(&second, "b"), json!({"f:spec": {"f:hostname": {}}}));
}

#[test]
fn an_item_no_longer_applied_stays_while_another_applier_owns_it() {
    let item =
        |image: &str| pod(json!({"containers": [{"name": "c", "image": image}, {"name": "d"}]}));
    let object = applied(None, item("i"), "a", false).unwrap();
    let shared = applied(
        Some(&object),
        pod(json!({"containers": [{"name": "c", "tty": true}]})),
        "b",
        false,
    )
    .unwrap();
    let given_up = pod(json!({"containers": [{"name": "d"}]}));
    let after = applied(Some(&shared), given_up.clone(), "a", false).unwrap();
    assert_eq!(
        after["spec"]["containers"],
        json!([{"name": "c", "tty": true}, {"name": "d"}])
    );
    // An update of one field does not give the updater ownership of the item.
    let mut updated = object.clone();
    updated["spec"]["containers"][0]["tty"] = json!(true);
    track_update(Some(&object), &mut updated, &writer("u"));
    let after = applied(Some(&updated), given_up, "a", false).unwrap();
    assert_eq!(after["spec"]["containers"], json!([{"name": "d"}]));
}

#[test]
fn sets_and_port_defaults_have_their_keys() {
    let mut config = pod(json!({"containers": [{"name": "c", "ports": [{"containerPort": 80}]}]}));
    config["metadata"]["finalizers"] = json!(["x/y"]);
    let object = applied(None, config, "a", false).unwrap();
    assert_eq!(
        fields(&object, "a"),
        json!({"f:metadata": {"f:finalizers": {"v:\"x/y\"": {}}}, "f:spec": {"f:containers": {"k:{\"name\":\"c\"}": {".": {}, "f:name": {},
            "f:ports": {"k:{\"containerPort\":80,\"protocol\":\"TCP\"}": {".": {}, "f:containerPort": {}}}}}}})
    );
}

#[test]
fn invalid_configurations_are_refused() {
    let cases = [
        (
            pod(json!({"containerz": []})),
            500,
            "failed to create typed patch object (/p; v1, Kind=Pod): .spec.containerz: field not declared in schema",
        ),
        (
            pod(json!({"containers": [{"image": "i"}]})),
            500,
            "failed to create typed patch object (/p; v1, Kind=Pod): .spec.containers: element 0: associative list with keys has an element that omits key field \"name\" (and doesn't have default value)",
        ),
        (
            pod(json!({"containers": [{"name": "c"}, {"name": "c"}]})),
            500,
            "failed to create typed patch object (/p; v1, Kind=Pod): .spec.containers: duplicate entries for key [name=\"c\"]",
        ),
        (
            json!({"apiVersion": "v2", "kind": "Pod"}),
            400,
            "Incorrect version specified in apply patch. Specified patch version: v2, expected: v1",
        ),
        (
            json!({"apiVersion": "v1", "kind": "Pod", "metadata": {"managedFields": []}}),
            400,
            "metadata.managedFields must be nil",
        ),
    ];
    for (config, code, message) in cases {
        let status = applied(None, config, "a", false).unwrap_err();
        assert_eq!((status.code, status.message.as_str()), (code, message));
    }
}

#[test]
fn kubectl_takes_over_from_client_side_apply() {
    let last = pod(json!({"hostname": "h", "subdomain": "s"}));
    let mut live = last.clone();
    live["metadata"]["annotations"] =
        json!({"kubectl.kubernetes.io/last-applied-configuration": last.to_string()});
    track_update(None, &mut live, &writer("kubectl-client-side-apply"));
    let change = pod(json!({"hostname": "new", "subdomain": "s"}));
    assert!(applied(Some(&live), change.clone(), "other", false).is_err());
    let taken = applied(Some(&live), change, "kubectl", false).unwrap();
    assert_eq!(taken["spec"]["hostname"], "new");
}

#[test]
fn the_first_apply_records_the_existing_fields() {
    let live = pod(json!({"hostname": "h"}));
    let status = applied(Some(&live), pod(json!({"hostname": "x"})), "a", false).unwrap_err();
    assert_eq!(
        status.message,
        "Apply failed with 1 conflict: conflict with \"before-first-apply\" using v1: .spec.hostname"
    );
    let mut untouched = live.clone();
    untouched["spec"]["hostname"] = json!("y");
    track_update(Some(&live), &mut untouched, &writer("u"));
    assert_eq!(untouched["metadata"].get("managedFields"), None);
}

#[test]
fn managed_fields_can_be_reset_and_never_grow_without_bound() {
    let mut object = created(json!({"hostname": "h"}), "m0");
    for round in 1..30 {
        let mut next = object.clone();
        next["metadata"]["labels"][format!("l{round}")] = json!("x");
        let name = format!("m{round}");
        track_update(Some(&object), &mut next, &writer(&name));
        object = next;
    }
    let entries = object["metadata"]["managedFields"].as_array().unwrap();
    assert_eq!(entries.len(), 10);
    assert!(
        entries
            .iter()
            .any(|entry| entry["manager"] == "ancient-changes")
    );
    let mut reset = object.clone();
    reset["metadata"]["managedFields"] = json!([{}]);
    track_update(Some(&object), &mut reset, &writer("r"));
    assert_eq!(reset["metadata"].get("managedFields"), None);
}

#[test]
fn applying_the_same_again_changes_nothing() {
    let config =
        pod(json!({"containers": [{"name": "b", "image": "i"}, {"name": "a", "image": "i"}]}));
    let object = applied(None, config.clone(), "a", false).unwrap();
    let later = Writer {
        now: "2027-01-01T00:00:00Z".parse().unwrap(),
        ..writer("a")
    };
    assert_eq!(
        apply(Some(&object), &config, &later, false).unwrap(),
        object
    );
}

#[test]
fn shared_items_take_the_order_of_the_configuration() {
    let live = created(
        json!({"containers": [{"name": "x"}, {"name": "a"}, {"name": "b"}]}),
        "c",
    );
    let after = applied(
        Some(&live),
        pod(json!({"containers": [{"name": "b"}, {"name": "n"}, {"name": "a"}]})),
        "m",
        false,
    )
    .unwrap();
    let names: Vec<&str> = after["spec"]["containers"]
        .as_array()
        .unwrap()
        .iter()
        .filter_map(|c| c["name"].as_str())
        .collect();
    assert_eq!(names, ["x", "b", "n", "a"]);
}

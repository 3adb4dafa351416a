use jiff::Timestamp;
use serde_json::{Value, json};

use super::{IncludeObject, Printer};

fn now() -> Timestamp {
    "2026-01-01T01:00:00Z".parse().unwrap()
}

fn shown(resource: &str, object: &Value) -> String {
    let cells = Printer::builtin(resource).cells(object, now());
    let text = |cell: &Value| {
        cell.as_str()
            .map_or_else(|| cell.to_string(), str::to_owned)
    };
    cells.iter().map(text).collect::<Vec<_>>().join(" | ")
}

#[test]
fn pods_show_their_state_in_one_word() {
    let pod = |spec: Value, status: Value| json!({"kind": "Pod", "metadata": {"name": "p", "creationTimestamp": "2026-01-01T00:00:00Z"}, "spec": spec, "status": status});
    let one = json!({"containers": [{"name": "c"}], "nodeName": "n"});
    let cases = [
        (
            pod(
                one.clone(),
                json!({"phase": "Running", "podIPs": [{"ip": "10.0.0.1"}], "containerStatuses": [{"ready": true, "restartCount": 0, "state": {"running": {}}}]}),
            ),
            "p | 1/1 | Running | 0 | 60m | 10.0.0.1 | n | <none> | <none>",
        ),
        (
            pod(one.clone(), json!({"phase": "Pending"})),
            "p | 0/1 | Pending | 0 | 60m | <none> | n | <none> | <none>",
        ),
        (
            pod(
                one.clone(),
                json!({"phase": "Running", "containerStatuses": [{"restartCount": 3, "lastState": {"terminated": {"finishedAt": "2026-01-01T00:59:00Z"}}, "state": {"waiting": {"reason": "CrashLoopBackOff"}}}]}),
            ),
            "p | 0/1 | CrashLoopBackOff | 3 (60s ago) | 60m | <none> | n | <none> | <none>",
        ),
        (
            pod(
                one.clone(),
                json!({"phase": "Failed", "containerStatuses": [{"state": {"terminated": {"exitCode": 3}}}]}),
            ),
            "p | 0/1 | ExitCode:3 | 0 | 60m | <none> | n | <none> | <none>",
        ),
        (
            pod(
                json!({"containers": [{"name": "c"}], "initContainers": [{"name": "i"}, {"name": "j"}]}),
                json!({"phase": "Pending", "initContainerStatuses": [{"name": "i", "state": {"terminated": {"exitCode": 0}}}, {"name": "j", "state": {"running": {}}}]}),
            ),
            "p | 0/1 | Init:1/2 | 0 | 60m | <none> | <none> | <none> | <none>",
        ),
    ];
    for (pod, expected) in cases {
        assert_eq!(shown("pods", &pod), expected);
    }
    let mut dying = pod(one, json!({"phase": "Running"}));
    dying["metadata"]["deletionTimestamp"] = json!("2026-01-01T00:59:00Z");
    assert!(shown("pods", &dying).contains("Terminating"));
}

#[test]
#[expect(clippy::too_many_lines, reason = "one table, row by row")]
fn built_in_resources_have_the_columns_kubectl_users_know() {
    let with = |name: &str, rest: Value| {
        let mut object =
            json!({"metadata": {"name": name, "creationTimestamp": "2026-01-01T00:00:00Z"}});
        object
            .as_object_mut()
            .unwrap()
            .extend(rest.as_object().cloned().unwrap_or_default());
        object
    };
    let cases = [
        (
            "services",
            with(
                "s",
                json!({"spec": {"type": "ClusterIP", "clusterIP": "10.0.0.1", "ports": [{"port": 80}, {"port": 443, "nodePort": 30443, "protocol": "TCP"}], "selector": {"a": "b"}}}),
            ),
            "s | ClusterIP | 10.0.0.1 | <none> | 80/TCP,443:30443/TCP | 60m | a=b",
        ),
        (
            "namespaces",
            with("n", json!({"status": {"phase": "Active"}})),
            "n | Active | 60m",
        ),
        (
            "configmaps",
            with("c", json!({"data": {"a": "1"}, "binaryData": {"b": ""}})),
            "c | 2 | 60m",
        ),
        (
            "secrets",
            with("s", json!({"type": "Opaque", "data": {"a": ""}})),
            "s | Opaque | 1 | 60m",
        ),
        ("serviceaccounts", with("a", json!({})), "a | 60m"),
        (
            "leases",
            with("l", json!({"spec": {"holderIdentity": "me"}})),
            "l | me | 60m",
        ),
        (
            "persistentvolumeclaims",
            with(
                "c",
                json!({"spec": {"volumeName": "v", "storageClassName": "std", "volumeMode": "Filesystem"}, "status": {"phase": "Bound", "capacity": {"storage": "1Gi"}, "accessModes": ["ReadWriteOnce"]}}),
            ),
            "c | Bound | v | 1Gi | RWO | std | <unset> | 60m | Filesystem",
        ),
        (
            "persistentvolumes",
            with(
                "v",
                json!({"spec": {"capacity": {"storage": "1Gi"}, "accessModes": ["ReadWriteOnce"], "persistentVolumeReclaimPolicy": "Delete", "claimRef": {"namespace": "d", "name": "c"}, "storageClassName": "std"}, "status": {"phase": "Bound"}}),
            ),
            "v | 1Gi | RWO | Delete | Bound | d/c | std | <unset> |  | 60m | <unset>",
        ),
        (
            "nodes",
            with(
                "n",
                json!({"spec": {"unschedulable": true}, "status": {"conditions": [{"type": "Ready", "status": "True"}], "nodeInfo": {"kubeletVersion": "v1"}, "addresses": [{"type": "InternalIP", "address": "10.0.0.2"}]}}),
            ),
            "n | Ready,SchedulingDisabled | <none> | 60m | v1 | 10.0.0.2 | <none> | <unknown> | <unknown> | <unknown>",
        ),
        (
            "events",
            with(
                "e",
                json!({"type": "Normal", "reason": "Started", "message": "ok ", "involvedObject": {"kind": "Pod", "name": "p"}, "source": {"component": "kubelet", "host": "n"}, "firstTimestamp": "2026-01-01T00:00:00Z", "lastTimestamp": "2026-01-01T00:59:30Z", "count": 4}),
            ),
            "30s | Normal | Started | pod/p |  | kubelet, n | ok | 60m | 4 | e",
        ),
        (
            "events",
            with(
                "e",
                json!({"type": "Normal", "reason": "R", "note": "hi", "regarding": {"kind": "Pod", "name": "p"}, "eventTime": "2026-01-01T00:59:00.000000Z", "reportingController": "c", "reportingInstance": "i"}),
            ),
            "60s | Normal | R | pod/p |  | c, i | hi | 60s | 1 | e",
        ),
        (
            "endpointslices",
            with(
                "e",
                json!({"addressType": "IPv4", "ports": [{"port": 80}], "endpoints": [{"addresses": ["1", "2"]}, {"addresses": ["3", "4"]}]}),
            ),
            "e | IPv4 | 80 | 1,2,3 + 1 more... | 60m",
        ),
        (
            "endpoints",
            with(
                "e",
                json!({"subsets": [{"addresses": [{"ip": "10.0.0.1"}], "ports": [{"port": 80}]}]}),
            ),
            "e | 10.0.0.1:80 | 60m",
        ),
        (
            "networkpolicies",
            with(
                "n",
                json!({"spec": {"podSelector": {"matchLabels": {"a": "b"}}}}),
            ),
            "n | a=b | 60m",
        ),
        (
            "networkpolicies",
            with("n", json!({"spec": {"podSelector": {}}})),
            "n | <none> | 60m",
        ),
        (
            "runtimeclasses",
            with("r", json!({"handler": "runc"})),
            "r | runc | 60m",
        ),
        (
            "storageclasses",
            with("s", json!({"provisioner": "p"})),
            "s | p | Delete | Immediate | false | 60m",
        ),
        (
            "customresourcedefinitions",
            with("x.g", json!({})),
            "x.g | 2026-01-01T00:00:00Z",
        ),
    ];
    for (resource, object, expected) in cases {
        assert_eq!(shown(resource, &object), expected, "{resource}");
        let definitions = Printer::builtin(resource).definitions();
        assert_eq!(
            definitions.as_array().unwrap().len(),
            expected.split(" | ").count(),
            "{resource}"
        );
    }
}

#[test]
fn custom_columns_are_cells_of_their_type() {
    let columns = json!([
        {"name": "Ready", "type": "string", "jsonPath": ".status.conditions[?(@.type==\"Ready\")].status"},
        {"name": "Replicas", "type": "integer", "jsonPath": ".spec.replicas", "priority": 1},
        {"name": "On", "type": "boolean", "jsonPath": ".spec.on"},
        {"name": "Labels", "type": "string", "jsonPath": ".spec.labels"},
        {"name": "Missing", "type": "string", "jsonPath": ".spec.nope"},
        {"name": "Age", "type": "date", "jsonPath": ".metadata.creationTimestamp"}
    ]);
    let printer = Printer::custom(Some(&columns), "$").unwrap();
    let object = json!({"metadata": {"name": "x", "creationTimestamp": "2026-01-01T00:59:00Z"}, "spec": {"replicas": 2.0, "on": true, "labels": {"a": "b"}},
        "status": {"conditions": [{"type": "Ready", "status": "True"}]}});
    let table = printer.table(
        [&object],
        &json!({"resourceVersion": "7"}),
        IncludeObject::Metadata,
        true,
        now(),
    );
    assert_eq!(
        table["rows"][0]["cells"],
        json!(["x", "True", 2, true, "{\"a\":\"b\"}", null, "60s"])
    );
    assert_eq!(table["rows"][0]["object"]["kind"], "PartialObjectMetadata");
    assert_eq!(table["columnDefinitions"][2]["priority"], 1);
    assert_eq!(table["columnDefinitions"][0]["format"], "name");
    assert_eq!(table["metadata"]["resourceVersion"], "7");
}

#[test]
fn without_columns_a_custom_resource_shows_its_age() {
    let printer = Printer::custom(None, "$").unwrap();
    let object = json!({"metadata": {"name": "x"}});
    assert_eq!(printer.cells(&object, now()), [json!("x"), Value::Null]);
    let bad = json!([{"name": "X", "type": "string", "jsonPath": ".a["}]);
    let errors =
        Printer::custom(Some(&bad), "spec.versions[0].additionalPrinterColumns").unwrap_err();
    assert_eq!(
        errors[0].field,
        "spec.versions[0].additionalPrinterColumns[0].jsonPath"
    );
}

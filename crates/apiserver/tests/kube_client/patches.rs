//! Server-side apply and strategic merge patches.

use k8s_openapi::api::core::v1::Pod;
use kube::{
    Api, ResourceExt,
    api::{Patch, PatchParams},
};
use serde_json::{Value, json};

use crate::requests::{create, merge, pod};
use crate::support::{code, define_widgets, refusal, server, widget, widgets};

#[tokio::test(flavor = "multi_thread")]
async fn server_side_apply_creates_merges_and_reports_conflicts() {
    let server = server().await;
    define_widgets(&server.client()).await;
    let api = widgets(&server.client());
    let apply = async |manager: &str, spec: Value, force: bool| {
        let parameters = PatchParams {
            field_manager: Some(manager.into()),
            force,
            ..PatchParams::default()
        };
        let object = json!({"apiVersion": "example.x-k8s.io/v1", "kind": "Widget", "metadata": {"name": "one"}, "spec": spec});
        api.patch("one", &parameters, &Patch::Apply(object)).await
    };
    let made = apply("first", json!({"size": 1, "color": "blue"}), false)
        .await
        .unwrap();
    let owners: Vec<_> = made
        .managed_fields()
        .iter()
        .map(|entry| {
            (
                entry.manager.clone().unwrap(),
                entry.operation.clone().unwrap(),
            )
        })
        .collect();
    assert_eq!(owners, [("first".to_owned(), "Apply".to_owned())]);
    let again = apply("first", json!({"size": 1, "color": "blue"}), false)
        .await
        .unwrap();
    assert_eq!(
        again.resource_version(),
        made.resource_version(),
        "applying the same configuration changes nothing"
    );

    let conflict = refusal(apply("second", json!({"size": 2}), false).await);
    assert_eq!((conflict.code, conflict.reason.as_str()), (409, "Conflict"));
    assert!(
        conflict.message.contains("\"first\""),
        "{}",
        conflict.message
    );
    let taken = apply("second", json!({"size": 2}), true).await.unwrap();
    assert_eq!(
        (&taken.data["spec"]["size"], &taken.data["spec"]["color"]),
        (&json!(2), &json!("blue"))
    );
    let given_up = apply("first", json!({"size": 2}), false).await.unwrap();
    assert_eq!(
        given_up.data["spec"]["color"], "red",
        "a field that is no longer applied gets its default"
    );

    let updated = merge(&api, "one", json!({"spec": {"replicas": 3}})).await;
    assert!(
        updated
            .managed_fields()
            .iter()
            .any(|entry| entry.operation.as_deref() == Some("Update"))
    );
    server.shutdown().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_strategic_merge_patch_merges_lists_by_their_key() {
    let server = server().await;
    let pods: Api<Pod> = Api::default_namespaced(server.client());
    create(&pods, &pod("p")).await;
    let patch = json!({"spec": {"containers": [{"name": "main", "image": "other"}]}, "status": {"phase": "Running"}});
    let patched = pods
        .patch("p", &PatchParams::default(), &Patch::Strategic(patch))
        .await
        .unwrap();
    let spec = patched.spec.unwrap();
    assert_eq!(
        (spec.containers.len(), spec.containers[0].image.as_deref()),
        (1, Some("other"))
    );
    assert_eq!(patched.status.unwrap().phase.as_deref(), Some("Pending"));
    for (kind, status) in [
        ("Ready", "True"),
        ("Initialized", "True"),
        ("Ready", "False"),
    ] {
        let condition = json!({"status": {"conditions": [{"type": kind, "status": status}]}});
        pods.patch_status("p", &PatchParams::default(), &Patch::Strategic(condition))
            .await
            .unwrap();
    }
    let status = pods.get("p").await.unwrap().status.unwrap();
    let mut conditions: Vec<_> = status
        .conditions
        .iter()
        .flatten()
        .map(|condition| (condition.type_.as_str(), condition.status.as_str()))
        .collect();
    conditions.sort_unstable();
    assert_eq!(conditions, [("Initialized", "True"), ("Ready", "False")]);
    define_widgets(&server.client()).await;
    let api = widgets(&server.client());
    create(&api, &widget("w", json!({"size": 1}))).await;
    let strategic = Patch::Strategic(json!({}));
    assert_eq!(
        code(api.patch("w", &PatchParams::default(), &strategic).await),
        415
    );
    server.shutdown().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_status_patch_with_another_uid_is_refused() {
    let server = server().await;
    let pods: Api<Pod> = Api::default_namespaced(server.client());
    let made = create(&pods, &pod("p")).await;
    for (uid, expected) in [
        (Some("of-one-that-is-gone"), Err(422)),
        (made.metadata.uid.as_deref(), Ok("Failed")),
    ] {
        let patch = json!({"metadata": {"uid": uid}, "status": {"phase": "Failed"}});
        for patch in [Patch::Strategic(patch.clone()), Patch::Merge(patch)] {
            let answer = pods
                .patch_status("p", &PatchParams::default(), &patch)
                .await;
            match expected {
                Ok(phase) => {
                    let status = answer.unwrap().status.unwrap();
                    assert_eq!(status.phase.as_deref(), Some(phase));
                }
                Err(refused) => assert_eq!(code(answer), refused),
            }
        }
    }
    server.shutdown().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_patch_cannot_nest_an_object_too_deeply() {
    let server = server().await;
    let pods: Api<Pod> = Api::default_namespaced(server.client());
    create(&pods, &pod("p")).await;
    let deep = (0..100).fold(json!({}), |inner, _| json!({ "f:x": inner }));
    let fields = "/metadata/managedFields/0/fieldsV1/f:metadata";
    let below = format!("{fields}{}", "/f:x".repeat(100));
    let nesting = json!([
        {"op": "add", "path": fields, "value": deep},
        {"op": "add", "path": below, "value": deep},
    ]);
    let request = http::Request::patch("/api/v1/namespaces/default/pods/p")
        .header("content-type", "application/json-patch+json")
        .body(nesting.to_string().into_bytes())
        .unwrap();
    let refused = refusal(server.client().request::<Pod>(request).await);
    assert_eq!(refused.code, 422, "{refused:?}");
    assert!(refused.message.contains("120 levels"), "{refused:?}");
    pods.get("p").await.unwrap();
    server.shutdown().await;
}

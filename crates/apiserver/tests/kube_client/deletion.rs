//! Deletion: finalizers, propagation to dependents, and the contents of namespaces and definitions.

use k8s_openapi::api::core::v1::{
    ConfigMap, Namespace, PersistentVolumeClaim, Pod, ServiceAccount,
};
use k8s_openapi::apiextensions_apiserver::pkg::apis::apiextensions::v1::CustomResourceDefinition;
use kube::{
    Api, ResourceExt,
    api::{DeleteParams, DynamicObject, PropagationPolicy},
};
use serde_json::json;
use testkit::eventually;

use crate::requests::{
    config_map, create, delete, held_config_map, merge, parsed, release, try_create, try_merge,
    until_gone,
};
use crate::support::{code, define_widgets, refusal, server, widget, widget_resource, widgets};

#[tokio::test(flavor = "multi_thread")]
async fn finalizers_delay_the_removal_of_an_object() {
    let server = server().await;
    let maps: Api<ConfigMap> = Api::default_namespaced(server.client());
    create(&maps, &held_config_map("held")).await;
    let deleting = delete(&maps, "held").await.unwrap();
    assert!(deleting.metadata.deletion_timestamp.is_some());
    let more = json!({"metadata": {"finalizers": ["example.com/hold", "example.com/more"]}});
    assert_eq!(
        code(try_merge(&maps, "held", more).await),
        422,
        "no finalizers can be added to a terminating object"
    );
    release(&maps, "held").await;
    assert_eq!(code(maps.get("held").await), 404);
    server.shutdown().await;
}

fn owned_by(owner: &ConfigMap, name: &str, blocks: bool) -> ConfigMap {
    let mut object = config_map(name);
    object.metadata.owner_references = Some(vec![parsed(json!({
        "apiVersion": "v1", "kind": "ConfigMap", "name": owner.name_any(), "uid": owner.uid(), "blockOwnerDeletion": blocks,
    }))]);
    object
}

#[tokio::test(flavor = "multi_thread")]
async fn dependents_follow_the_propagation_policy_of_their_owner() {
    let server = server().await;
    let maps: Api<ConfigMap> = Api::default_namespaced(server.client());
    for policy in [
        PropagationPolicy::Background,
        PropagationPolicy::Foreground,
        PropagationPolicy::Orphan,
    ] {
        let owner = create(&maps, &config_map("owner")).await;
        let child = create(&maps, &owned_by(&owner, "child", true)).await;
        create(&maps, &owned_by(&child, "grandchild", true)).await;
        let orphan = matches!(policy, PropagationPolicy::Orphan);
        let parameters = DeleteParams {
            propagation_policy: Some(policy),
            ..DeleteParams::default()
        };
        maps.delete("owner", &parameters).await.unwrap();
        until_gone(&maps, "owner").await;
        if orphan {
            let child = maps.get("child").await.unwrap();
            assert!(
                child.owner_references().is_empty(),
                "an orphan has no reference left"
            );
        } else {
            until_gone(&maps, "grandchild").await;
            assert!(maps.get_opt("child").await.unwrap().is_none());
        }
    }
    let mut never_was = config_map("x");
    never_was.metadata.uid = Some("00000000-0000-0000-0000-000000000000".into());
    create(&maps, &owned_by(&never_was, "dangling", false)).await;
    until_gone(&maps, "dangling").await;
    server.shutdown().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_terminating_namespace_deletes_its_contents_and_refuses_new_objects() {
    let server = server().await;
    let client = server.client();
    define_widgets(&client).await;
    let namespaces: Api<Namespace> = Api::all(client.clone());
    create(&namespaces, &parsed(json!({"metadata": {"name": "team"}}))).await;
    let maps: Api<ConfigMap> = Api::namespaced(client.clone(), "team");
    create(&maps, &held_config_map("held")).await;
    let widgets: Api<DynamicObject> =
        Api::namespaced_with(client.clone(), "team", &widget_resource("v1"));
    create(&widgets, &widget("w", json!({"size": 1}))).await;
    let accounts: Api<ServiceAccount> = Api::namespaced(client.clone(), "team");
    eventually("the service account", || async {
        accounts.get_opt("default").await.unwrap()
    })
    .await;

    delete(&namespaces, "team").await;
    assert_eq!(code(try_create(&maps, &config_map("late")).await), 403);
    until_gone(&widgets, "w").await;
    let team = namespaces.get("team").await.unwrap();
    assert_eq!(team.status.unwrap().phase.unwrap(), "Terminating");
    release(&maps, "held").await;
    until_gone(&namespaces, "team").await;
    assert_eq!(code(try_create(&maps, &config_map("late")).await), 404);
    server.shutdown().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_terminating_definition_refuses_new_objects_of_its_kind() {
    let server = server().await;
    let client = server.client();
    define_widgets(&client).await;
    let widgets = widgets(&client);
    let mut held = widget("held", json!({"size": 1}));
    held.metadata.finalizers = Some(vec!["example.com/hold".to_owned()]);
    create(&widgets, &held).await;
    let definitions: Api<CustomResourceDefinition> = Api::all(client.clone());
    let name = "widgets.example.x-k8s.io";
    delete(&definitions, name).await;
    let late = try_create(&widgets, &widget("late", json!({"size": 1}))).await;
    let refused = refusal(late);
    assert_eq!(refused.code, 405, "{refused:?}");
    assert!(refused.message.contains("is terminating"), "{refused:?}");
    merge(&widgets, "held", json!({"metadata": {"finalizers": null}})).await;
    until_gone(&definitions, name).await;
    server.shutdown().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_volume_claim_is_not_removed_while_a_pod_uses_it() {
    let server = server().await;
    let client = server.client();
    let claims: Api<PersistentVolumeClaim> = Api::default_namespaced(client.clone());
    let pods: Api<Pod> = Api::default_namespaced(client.clone());
    for name in ["used", "unused"] {
        let claim = json!({"metadata": {"name": name}, "spec": {"accessModes": ["ReadWriteOnce"], "resources": {"requests": {"storage": "1Gi"}}}});
        create(&claims, &parsed(claim)).await;
    }
    let pod = json!({"metadata": {"name": "user"}, "spec": {
        "nodeName": "node", "terminationGracePeriodSeconds": 0,
        "containers": [{"name": "main", "image": "x"}],
        "volumes": [{"name": "data", "persistentVolumeClaim": {"claimName": "used"}}],
    }});
    create(&pods, &parsed(pod)).await;
    for name in ["used", "unused"] {
        delete(&claims, name).await;
    }
    until_gone(&claims, "unused").await;
    let held = claims.get("used").await.unwrap();
    assert!(held.metadata.deletion_timestamp.is_some());
    assert_eq!(held.finalizers(), ["kubernetes.io/pvc-protection"]);
    let at_once = DeleteParams::default().grace_period(0);
    pods.delete("user", &at_once).await.unwrap();
    until_gone(&claims, "used").await;
}

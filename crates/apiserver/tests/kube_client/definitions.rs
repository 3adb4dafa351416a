//! CustomResourceDefinitions, and the discovery of their kinds.

use kube::{
    Api,
    api::{DynamicObject, ListParams, Patch, PatchParams},
};
use serde_json::{Value, json};

use crate::requests::{create, merge, try_create};
use crate::support::{code, define_widgets, server, widget, widget_resource, widgets};

#[tokio::test(flavor = "multi_thread")]
async fn a_definition_serves_its_kind_with_schema_status_scale_and_versions() {
    let server = server().await;
    let client = server.client();
    define_widgets(&client).await;
    let api = widgets(&client);
    for spec in [json!({"size": 0}), json!({})] {
        let bad = widget("bad", spec.clone());
        assert_eq!(code(try_create(&api, &bad).await), 422, "{spec}");
    }

    let mut fresh = widget("one", json!({"size": 2, "unknown": true}));
    fresh.data["status"] = json!({"phase": "Made up"});
    let created = create(&api, &fresh).await;
    assert_eq!(
        created.data["spec"],
        json!({"size": 2, "color": "red"}),
        "defaulted and pruned"
    );
    assert!(
        created.data.get("status").is_none(),
        "status is a subresource"
    );
    assert_eq!(created.metadata.generation, Some(1));

    let reported = api
        .patch_status(
            "one",
            &PatchParams::default(),
            &Patch::Merge(json!({"status": {"phase": "Ready"}, "spec": {"size": 9}})),
        )
        .await
        .unwrap();
    assert_eq!(
        (
            reported.data["spec"]["size"].as_i64(),
            reported.metadata.generation
        ),
        (Some(2), Some(1))
    );
    let larger = json!({"spec": {"size": 3}, "status": {"phase": "No"}});
    let resized = merge(&api, "one", larger).await;
    assert_eq!(
        (
            resized.metadata.generation,
            &resized.data["status"]["phase"]
        ),
        (Some(2), &json!("Ready"))
    );

    let scaled = api
        .patch_scale(
            "one",
            &PatchParams::default(),
            &Patch::Merge(json!({"spec": {"replicas": 4}})),
        )
        .await
        .unwrap();
    assert_eq!(scaled.spec.unwrap().replicas, Some(4));
    assert_eq!(api.get("one").await.unwrap().data["spec"]["replicas"], 4);

    let older: Api<DynamicObject> =
        Api::namespaced_with(client.clone(), "default", &widget_resource("v1alpha1"));
    let listed = older.list(&ListParams::default()).await.unwrap().items;
    for seen in [older.get("one").await.unwrap(), listed[0].clone()] {
        assert_eq!(seen.types.unwrap().api_version, "example.x-k8s.io/v1alpha1");
    }
    server.shutdown().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn kubectl_finds_tables_discovery_and_openapi() {
    let server = server().await;
    let client = server.client();
    define_widgets(&client).await;
    create(&widgets(&client), &widget("w", json!({"size": 1}))).await;
    let get = async |path: &str, accept: &str| {
        let request = http::Request::get(path)
            .header("accept", accept)
            .body(Vec::new())
            .unwrap();
        client.request::<Value>(request).await.unwrap()
    };
    let table = get(
        "/apis/example.x-k8s.io/v1/widgets",
        "application/json;as=Table;v=v1;g=meta.k8s.io,application/json",
    )
    .await;
    assert_eq!(table["kind"], "Table");
    assert_eq!(table["columnDefinitions"][0]["name"], "Name");
    assert_eq!(table["rows"][0]["cells"][0], "w");
    assert_eq!(table["rows"][0]["object"]["kind"], "PartialObjectMetadata");

    let aggregated =
        "application/json;g=apidiscovery.k8s.io;v=v2;as=APIGroupDiscoveryList,application/json";
    let groups = get("/apis", aggregated).await;
    assert_eq!(
        groups["items"][0]["metadata"]["name"], "example.x-k8s.io",
        "the sandbox groups come first"
    );
    let plain = get("/apis", "application/json").await;
    assert_eq!(
        plain["groups"].as_array().unwrap().len(),
        groups["items"].as_array().unwrap().len()
    );
    let resources = get("/apis/example.x-k8s.io/v1", "application/json").await;
    let names: Vec<&str> = resources["resources"]
        .as_array()
        .unwrap()
        .iter()
        .map(|entry| entry["name"].as_str().unwrap())
        .collect();
    assert_eq!(names, ["widgets", "widgets/status", "widgets/scale"]);

    let index = get("/openapi/v3", "application/json").await;
    let url = index["paths"]["apis/example.x-k8s.io/v1"]["serverRelativeURL"]
        .as_str()
        .unwrap();
    let document = get(url, "application/json").await;
    let patch = &document["paths"]["/apis/example.x-k8s.io/v1/namespaces/{namespace}/widgets/{name}"]
        ["patch"];
    assert!(
        patch["parameters"]
            .as_array()
            .unwrap()
            .iter()
            .any(|parameter| parameter["name"] == "fieldValidation")
    );
    let schema = &document["components"]["schemas"]["io.x-k8s.example.v1.Widget"];
    let size = &schema["properties"]["spec"]["properties"]["size"];
    assert_eq!(size["minimum"].as_f64(), Some(1.0));
    server.shutdown().await;
}

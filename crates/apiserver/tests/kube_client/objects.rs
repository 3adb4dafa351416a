//! Objects of built-in kinds: writes, reads, validation, and the initial objects of a server.

use k8s_openapi::api::core::v1::{
    ConfigMap, Event, Namespace, PersistentVolumeClaim, Pod, Service, ServiceAccount,
};
use k8s_openapi::api::storage::v1::StorageClass;
use kube::{
    Api, ResourceExt,
    api::{ListParams, Patch, PatchParams, PostParams},
};
use serde_json::{Value, json};
use testkit::eventually;

use crate::requests::{config_map, create, delete, merge, names, parsed, pod, try_create};
use crate::support::{code, define_widgets, refusal, server, widget, widgets};

#[tokio::test(flavor = "multi_thread")]
async fn a_new_server_has_the_default_namespaces_and_accounts() {
    let server = server().await;
    let namespaces: Api<Namespace> = Api::all(server.client());
    assert_eq!(
        names(&namespaces, &ListParams::default()).await,
        ["default", "kube-node-lease", "kube-public", "kube-system"]
    );
    Api::<ServiceAccount>::namespaced(server.client(), "default")
        .get("default")
        .await
        .unwrap();
    server.shutdown().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn objects_are_created_read_changed_and_deleted() {
    let server = server().await;
    let maps: Api<ConfigMap> = Api::default_namespaced(server.client());
    let created = create(&maps, &config_map("one")).await;
    assert!(
        created.uid().is_some()
            && created.resource_version().is_some()
            && created.creation_timestamp().is_some()
    );
    assert_eq!(code(try_create(&maps, &config_map("one")).await), 409);

    let mut changed = created.clone();
    changed
        .data
        .as_mut()
        .unwrap()
        .insert("c".into(), "d".into());
    let replace = async || maps.replace("one", &PostParams::default(), &changed).await;
    let replaced = replace().await.unwrap();
    assert_ne!(replaced.resource_version(), created.resource_version());
    assert_eq!(code(replace().await), 409, "the version is stale");

    let merged = merge(&maps, "one", json!({"data": {"a": null}})).await;
    assert_eq!(merged.data.unwrap().into_keys().collect::<Vec<_>>(), ["c"]);
    let operations = parsed(json!([{"op": "replace", "path": "/data/c", "value": "e"}]));
    let patched = maps
        .patch(
            "one",
            &PatchParams::default(),
            &Patch::<ConfigMap>::Json(operations),
        )
        .await
        .unwrap();
    assert_eq!(patched.data.as_ref().unwrap()["c"], "e");
    let same = merge(&maps, "one", json!({"data": {"c": "e"}})).await;
    assert_eq!(
        same.resource_version(),
        patched.resource_version(),
        "a patch without changes writes nothing"
    );

    delete(&maps, "one").await;
    assert_eq!(code(maps.get("one").await), 404);
    server.shutdown().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn names_are_generated_and_validation_errors_name_the_field() {
    let server = server().await;
    let pods: Api<Pod> = Api::default_namespaced(server.client());
    let mut generated = pod("");
    generated.metadata.name = None;
    generated.metadata.generate_name = Some("job-".into());
    let made = create(&pods, &generated).await.name_any();
    assert!(made.starts_with("job-") && made.len() == 9, "{made}");

    let cases = [
        (
            json!({"metadata": {"name": "x"}, "spec": {"containers": []}}),
            "spec.containers",
        ),
        (
            json!({"metadata": {"name": "X_y"}, "spec": {"containers": [{"name": "a", "image": "i"}]}}),
            "metadata.name",
        ),
        (
            json!({"metadata": {"name": "x"}, "spec": {"containers": [{"name": "a", "image": "i"}], "volumes": [{"name": "v"}, {"name": "v"}]}}),
            "spec.volumes[1].name",
        ),
    ];
    for (body, field) in cases {
        let status = refusal(try_create(&pods, &parsed(body)).await);
        assert_eq!(status.code, 422);
        let reported = status.details.unwrap().causes;
        assert!(
            reported.iter().any(|cause| cause.field == field),
            "{field}: {reported:?}"
        );
    }
    let services: Api<Service> = Api::default_namespaced(server.client());
    let service = parsed(json!({"metadata": {"name": "s"}, "spec": {"ports": [{"port": 0}]}}));
    let message = refusal(try_create(&services, &service).await).message;
    assert!(message.contains("spec.ports[0].port"), "{message}");
    server.shutdown().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn unknown_fields_are_refused_when_strict_and_dropped_otherwise() {
    let server = server().await;
    define_widgets(&server.client()).await;
    let lenient = widget("lenient", json!({"size": 1, "colour": "x"}));
    create(&widgets(&server.client()), &lenient).await;
    let post = async |path: &str, body: &Value| {
        let request = http::Request::post(path)
            .header("content-type", "application/json")
            .body(serde_json::to_vec(body).unwrap())
            .unwrap();
        server.client().request::<Value>(request).await
    };
    let widget = json!({"apiVersion": "example.x-k8s.io/v1", "kind": "Widget", "metadata": {"name": "w"}, "spec": {"size": 1, "colour": "x"}});
    let path = "/apis/example.x-k8s.io/v1/namespaces/default/widgets?fieldValidation=Strict";
    assert_eq!(
        refusal(post(path, &widget).await).message,
        "strict decoding error: unknown field \"spec.colour\""
    );
    let pod = json!({"metadata": {"name": "p"}, "spec": {"containers": [{"name": "a", "image": "b", "imagee": "c"}]}});
    let path = "/api/v1/namespaces/default/pods?fieldValidation=Strict";
    let message = refusal(post(path, &pod).await).message;
    assert!(
        message.contains("unknown field \"spec.containers[0].imagee\""),
        "{message}"
    );
    let made = post("/api/v1/namespaces/default/pods?dryRun=All", &pod)
        .await
        .unwrap();
    assert!(made["spec"]["containers"][0].get("imagee").is_none());
    let pods: Api<Pod> = Api::default_namespaced(server.client());
    assert_eq!(code(pods.get("p").await), 404, "a dry run stores nothing");
    server.shutdown().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn both_event_groups_serve_the_same_objects() {
    let server = server().await;
    let core: Api<Event> = Api::default_namespaced(server.client());
    let event = json!({"metadata": {"name": "e"}, "involvedObject": {"kind": "Pod", "name": "p", "namespace": "default"}, "message": "hello", "reason": "Tried", "type": "Normal"});
    create(&core, &parsed(event)).await;
    let newer: Api<k8s_openapi::api::events::v1::Event> = Api::default_namespaced(server.client());
    let seen = newer
        .list(&ListParams::default().fields("regarding.name=p"))
        .await
        .unwrap();
    assert_eq!(seen.items[0].note.as_deref(), Some("hello"));
    let others = ListParams::default().fields("involvedObject.name=q");
    assert!(names(&core, &others).await.is_empty());
    server.shutdown().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn the_default_objects_of_a_namespace_are_restored() {
    let server = server().await;
    let client = server.client();
    let accounts: Api<ServiceAccount> = Api::default_namespaced(client.clone());
    let maps: Api<ConfigMap> = Api::default_namespaced(client.clone());
    let account = accounts.get("default").await.unwrap();
    let authority = maps.get("kube-root-ca.crt").await.unwrap();
    let certificate = authority.data.as_ref().unwrap()["ca.crt"].clone();
    assert!(certificate.starts_with("-----BEGIN CERTIFICATE-----"));

    delete(&accounts, "default").await;
    eventually("another service account", || async {
        let found = accounts.get_opt("default").await.unwrap()?;
        (found.uid() != account.uid()).then_some(())
    })
    .await;
    let forged = json!({"data": {"ca.crt": "forged"}});
    merge(&maps, "kube-root-ca.crt", forged).await;
    let is_right = |found: &ConfigMap| found.data.as_ref().unwrap()["ca.crt"] == certificate;
    eventually("the right certificate", || async {
        let found = maps.get("kube-root-ca.crt").await.unwrap();
        is_right(&found).then_some(())
    })
    .await;
    delete(&maps, "kube-root-ca.crt").await;
    eventually("another copy of the certificate", || async {
        let found = maps.get_opt("kube-root-ca.crt").await.unwrap()?;
        (found.uid() != authority.uid() && is_right(&found)).then_some(())
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_new_claim_without_a_class_gets_the_default_one() {
    let server = server().await;
    let claims: Api<PersistentVolumeClaim> = Api::default_namespaced(server.client());
    let claim = |name: &str, class: Value| -> PersistentVolumeClaim {
        let mut spec = json!({"accessModes": ["ReadWriteOnce"], "resources": {"requests": {"storage": "1Gi"}}});
        if !class.is_null() {
            spec["storageClassName"] = class;
        }
        parsed(json!({"metadata": {"name": name}, "spec": spec}))
    };
    let class_of = |claim: PersistentVolumeClaim| claim.spec.unwrap().storage_class_name;
    let before = create(&claims, &claim("before", json!(null))).await;
    assert_eq!(class_of(before), None, "there is no default class yet");
    let classes: Api<StorageClass> = Api::all(server.client());
    for (name, mark) in [("fast", "false"), ("usual", "true")] {
        let annotations = json!({"storageclass.kubernetes.io/is-default-class": mark});
        let class =
            json!({"metadata": {"name": name, "annotations": annotations}, "provisioner": "p"});
        create(&classes, &parsed(class)).await;
    }
    for (name, class, expected) in [
        ("without", json!(null), "usual"),
        ("empty", json!(""), ""),
        ("other", json!("fast"), "fast"),
    ] {
        let created = create(&claims, &claim(name, class)).await;
        assert_eq!(class_of(created).as_deref(), Some(expected), "{name}");
    }
    let before = claims.get("before").await.unwrap();
    assert_eq!(class_of(before), None, "it is for new claims alone");
    server.shutdown().await;
}

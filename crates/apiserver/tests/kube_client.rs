//! kube-rs against the in-process client: what controllers rely on.

mod support;

use futures::{StreamExt, TryStreamExt};
use k8s_openapi::api::core::v1::{
    ConfigMap, Event, Namespace, PersistentVolumeClaim, Pod, Service, ServiceAccount,
};
use kube::{
    Api, ResourceExt,
    api::{
        DeleteParams, DynamicObject, ListParams, Patch, PatchParams, PostParams, PropagationPolicy,
        WatchEvent, WatchParams,
    },
    runtime::{reflector, watcher},
};
use serde_json::json;
use support::{
    DEADLINE, code, define_widgets, eventually, server, widget, widget_resource, widgets,
};

fn pod(name: &str) -> Pod {
    serde_json::from_value(json!({"metadata": {"name": name}, "spec": {"containers": [{"name": "main", "image": "host"}]}})).expect("the object is well formed")
}

fn config_map(name: &str) -> ConfigMap {
    serde_json::from_value(
        json!({"metadata": {"name": name, "labels": {"app": "test"}}, "data": {"a": "b"}}),
    )
    .expect("the object is well formed")
}

#[tokio::test(flavor = "multi_thread")]
async fn a_fresh_server_has_its_namespaces_and_accounts() {
    let server = server().await;
    let names: Vec<String> = Api::<Namespace>::all(server.client())
        .list(&ListParams::default())
        .await
        .unwrap()
        .iter()
        .map(ResourceExt::name_any)
        .collect();
    assert_eq!(
        names,
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
    let created = maps
        .create(&PostParams::default(), &config_map("one"))
        .await
        .unwrap();
    assert!(
        created.uid().is_some()
            && created.resource_version().is_some()
            && created.creation_timestamp().is_some()
    );
    assert_eq!(
        code(
            maps.create(&PostParams::default(), &config_map("one"))
                .await
        ),
        409
    );

    let mut changed = created.clone();
    changed
        .data
        .as_mut()
        .unwrap()
        .insert("c".into(), "d".into());
    let replaced = maps
        .replace("one", &PostParams::default(), &changed)
        .await
        .unwrap();
    assert_ne!(replaced.resource_version(), created.resource_version());
    assert_eq!(
        code(maps.replace("one", &PostParams::default(), &changed).await),
        409,
        "the version is stale"
    );

    let merged = maps
        .patch(
            "one",
            &PatchParams::default(),
            &Patch::Merge(json!({"data": {"a": null}})),
        )
        .await
        .unwrap();
    assert_eq!(merged.data.unwrap().into_keys().collect::<Vec<_>>(), ["c"]);
    let operations =
        serde_json::from_value(json!([{"op": "replace", "path": "/data/c", "value": "e"}]))
            .unwrap();
    let patched = maps
        .patch(
            "one",
            &PatchParams::default(),
            &Patch::<ConfigMap>::Json(operations),
        )
        .await
        .unwrap();
    assert_eq!(patched.data.as_ref().unwrap()["c"], "e");
    let same = maps
        .patch(
            "one",
            &PatchParams::default(),
            &Patch::Merge(json!({"data": {"c": "e"}})),
        )
        .await
        .unwrap();
    assert_eq!(
        same.resource_version(),
        patched.resource_version(),
        "a change of nothing writes nothing"
    );

    maps.delete("one", &DeleteParams::default()).await.unwrap();
    assert_eq!(code(maps.get("one").await), 404);
    server.shutdown().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn names_are_generated_and_bad_objects_name_their_field() {
    let server = server().await;
    let pods: Api<Pod> = Api::default_namespaced(server.client());
    let mut generated = pod("");
    generated.metadata.name = None;
    generated.metadata.generate_name = Some("job-".into());
    let made = pods
        .create(&PostParams::default(), &generated)
        .await
        .unwrap();
    assert!(
        made.name_any().starts_with("job-") && made.name_any().len() == 9,
        "{}",
        made.name_any()
    );

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
        let refused = pods
            .create(
                &PostParams::default(),
                &serde_json::from_value(body).unwrap(),
            )
            .await
            .unwrap_err();
        let kube::Error::Api(status) = refused else {
            panic!("{refused}")
        };
        assert_eq!(status.code, 422);
        let reported_causes = status.details.as_ref().unwrap().causes.clone();
        assert!(
            reported_causes.iter().any(|cause| cause.field == field),
            "{field}: {reported_causes:?}"
        );
    }
    let services: Api<Service> = Api::default_namespaced(server.client());
    let service = serde_json::from_value(
        json!({"metadata": {"name": "s"}, "spec": {"ports": [{"port": 0}]}}),
    )
    .unwrap();
    let kube::Error::Api(status) = services
        .create(&PostParams::default(), &service)
        .await
        .unwrap_err()
    else {
        panic!()
    };
    assert!(
        status.message.contains("spec.ports[0].port"),
        "{}",
        status.message
    );
    server.shutdown().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_definition_serves_its_kind_with_schema_status_scale_and_versions() {
    let server = server().await;
    let client = server.client();
    define_widgets(&client).await;
    let api = widgets(&client);
    assert_eq!(
        code(
            api.create(&PostParams::default(), &widget("bad", json!({"size": 0})))
                .await
        ),
        422
    );
    assert_eq!(
        code(
            api.create(&PostParams::default(), &widget("bad", json!({})))
                .await
        ),
        422
    );

    let mut fresh = widget("one", json!({"size": 2, "unknown": true}));
    fresh.data["status"] = json!({"phase": "Made up"});
    let created = api.create(&PostParams::default(), &fresh).await.unwrap();
    assert_eq!(
        created.data["spec"],
        json!({"size": 2, "color": "red"}),
        "defaulted and pruned"
    );
    assert!(
        created.data.get("status").is_none(),
        "status is written apart"
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
    let resized = api
        .patch(
            "one",
            &PatchParams::default(),
            &Patch::Merge(json!({"spec": {"size": 3}, "status": {"phase": "No"}})),
        )
        .await
        .unwrap();
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
    let seen = older.get("one").await.unwrap();
    assert_eq!(seen.types.unwrap().api_version, "example.x-k8s.io/v1alpha1");
    assert_eq!(
        older.list(&ListParams::default()).await.unwrap().items[0]
            .types
            .as_ref()
            .unwrap()
            .api_version,
        "example.x-k8s.io/v1alpha1"
    );
    server.shutdown().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn lists_come_in_consistent_pages_and_by_selector() {
    let server = server().await;
    let maps: Api<ConfigMap> = Api::default_namespaced(server.client());
    for index in 0..7 {
        maps.create(&PostParams::default(), &config_map(&format!("m{index}")))
            .await
            .unwrap();
    }
    // The first is the certificate that every namespace has.
    let first = maps.list(&ListParams::default().limit(4)).await.unwrap();
    assert_eq!(first.items.len(), 4);
    assert_eq!(first.metadata.remaining_item_count, Some(4));
    maps.delete("m4", &DeleteParams::default()).await.unwrap();
    maps.create(&PostParams::default(), &config_map("m33"))
        .await
        .unwrap();
    let token = first.metadata.continue_.unwrap();
    let rest = maps
        .list(&ListParams::default().continue_token(&token))
        .await
        .unwrap();
    let names: Vec<String> = rest.items.iter().map(ResourceExt::name_any).collect();
    assert_eq!(names, ["m3", "m4", "m5", "m6"], "as of the first page");

    assert_eq!(
        maps.list(&ListParams::default().labels("app=test"))
            .await
            .unwrap()
            .items
            .len(),
        7
    );
    assert_eq!(
        maps.list(&ListParams::default().labels("app!=test"))
            .await
            .unwrap()
            .items
            .len(),
        1
    );
    assert_eq!(
        maps.list(&ListParams::default().fields("metadata.name=m5"))
            .await
            .unwrap()
            .items
            .len(),
        1
    );
    assert_eq!(
        code(
            maps.list(&ListParams::default().fields("spec.nonsense=1"))
                .await
        ),
        400
    );
    server.shutdown().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_watch_translates_changes_of_its_selection() {
    let server = server().await;
    let maps: Api<ConfigMap> = Api::default_namespaced(server.client());
    let version = maps
        .list(&ListParams::default())
        .await
        .unwrap()
        .metadata
        .resource_version
        .unwrap();
    maps.create(&PostParams::default(), &config_map("one"))
        .await
        .unwrap();
    for label in [json!("other"), json!("test")] {
        maps.patch(
            "one",
            &PatchParams::default(),
            &Patch::Merge(json!({"metadata": {"labels": {"app": label}}})),
        )
        .await
        .unwrap();
    }
    maps.delete("one", &DeleteParams::default()).await.unwrap();
    let mut stream = maps
        .watch(&WatchParams::default().labels("app=test"), &version)
        .await
        .unwrap()
        .boxed();
    let mut seen = Vec::new();
    let mut versions = Vec::new();
    while seen.len() < 4 {
        let event = tokio::time::timeout(DEADLINE, stream.try_next())
            .await
            .unwrap()
            .unwrap()
            .unwrap();
        let (kind, object) = match event {
            WatchEvent::Added(object) => ("ADDED", object),
            WatchEvent::Modified(object) => ("MODIFIED", object),
            WatchEvent::Deleted(object) => ("DELETED", object),
            other => panic!("{other:?}"),
        };
        assert_eq!(
            object.labels()["app"],
            "test",
            "a watcher only sees what it selected"
        );
        versions.push(object.resource_version().unwrap().parse::<u64>().unwrap());
        seen.push(kind);
    }
    assert_eq!(seen, ["ADDED", "DELETED", "ADDED", "DELETED"]);
    assert!(
        versions.is_sorted() && versions[0] != versions[1],
        "{versions:?}"
    );
    server.shutdown().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn watchers_and_reflectors_follow_in_both_list_modes() {
    let server = server().await;
    let maps: Api<ConfigMap> = Api::default_namespaced(server.client());
    maps.create(&PostParams::default(), &config_map("before"))
        .await
        .unwrap();
    for config in [
        watcher::Config::default(),
        watcher::Config::default().streaming_lists(),
    ] {
        let config = config.any_semantic().labels("app=test");
        let (reader, writer) = reflector::store();
        let stream = reflector(writer, watcher(maps.clone(), config));
        let follow = tokio::spawn(async move {
            stream
                .for_each(|event| async { event.map(drop).unwrap() })
                .await;
        });
        reader.wait_until_ready().await.unwrap();
        assert_eq!(reader.len(), 1);
        maps.create(&PostParams::default(), &config_map("after"))
            .await
            .unwrap();
        eventually("the new object", || async {
            (reader.len() == 2).then_some(())
        })
        .await;
        maps.delete("after", &DeleteParams::default())
            .await
            .unwrap();
        eventually("the deletion", || async {
            (reader.len() == 1).then_some(())
        })
        .await;
        follow.abort();
    }
    server.shutdown().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn finalizers_hold_an_object_until_they_are_removed() {
    let server = server().await;
    let maps: Api<ConfigMap> = Api::default_namespaced(server.client());
    let mut held = config_map("held");
    held.finalizers_mut().push("example.com/hold".into());
    maps.create(&PostParams::default(), &held).await.unwrap();
    let deleting = maps
        .delete("held", &DeleteParams::default())
        .await
        .unwrap()
        .left()
        .unwrap();
    assert!(deleting.metadata.deletion_timestamp.is_some());
    let added =
        Patch::Merge(json!({"metadata": {"finalizers": ["example.com/hold", "example.com/more"]}}));
    assert_eq!(
        code(maps.patch("held", &PatchParams::default(), &added).await),
        422,
        "no finalizers are added to what goes"
    );
    maps.patch(
        "held",
        &PatchParams::default(),
        &Patch::Merge(json!({"metadata": {"finalizers": null}})),
    )
    .await
    .unwrap();
    assert_eq!(code(maps.get("held").await), 404);
    server.shutdown().await;
}

fn owned_by(owner: &ConfigMap, name: &str, blocks: bool) -> ConfigMap {
    let mut object = config_map(name);
    object.metadata.owner_references = Some(vec![serde_json::from_value(json!({
        "apiVersion": "v1", "kind": "ConfigMap", "name": owner.name_any(), "uid": owner.uid(), "blockOwnerDeletion": blocks,
    })).expect("the object is well formed")]);
    object
}

#[tokio::test(flavor = "multi_thread")]
async fn dependents_go_after_before_or_not_with_their_owner() {
    let server = server().await;
    let maps: Api<ConfigMap> = Api::default_namespaced(server.client());
    for policy in [
        PropagationPolicy::Background,
        PropagationPolicy::Foreground,
        PropagationPolicy::Orphan,
    ] {
        let owner = maps
            .create(&PostParams::default(), &config_map("owner"))
            .await
            .unwrap();
        let child = maps
            .create(&PostParams::default(), &owned_by(&owner, "child", true))
            .await
            .unwrap();
        maps.create(
            &PostParams::default(),
            &owned_by(&child, "grandchild", true),
        )
        .await
        .unwrap();
        let orphan = matches!(policy, PropagationPolicy::Orphan);
        let parameters = DeleteParams {
            propagation_policy: Some(policy),
            ..DeleteParams::default()
        };
        maps.delete("owner", &parameters).await.unwrap();
        eventually("the owner is gone", || async {
            maps.get_opt("owner").await.unwrap().is_none().then_some(())
        })
        .await;
        if orphan {
            let child = maps.get("child").await.unwrap();
            assert!(
                child.owner_references().is_empty(),
                "an orphan has no reference left"
            );
        } else {
            eventually("all are gone", || async {
                maps.get_opt("grandchild")
                    .await
                    .unwrap()
                    .is_none()
                    .then_some(())
            })
            .await;
            assert!(maps.get_opt("child").await.unwrap().is_none());
        }
    }
    let mut dangling = config_map("dangling");
    dangling.metadata.owner_references = owned_by(&config_map("x"), "y", false)
        .metadata
        .owner_references;
    dangling.metadata.owner_references.as_mut().unwrap()[0].uid =
        "00000000-0000-0000-0000-000000000000".into();
    maps.create(&PostParams::default(), &dangling)
        .await
        .unwrap();
    eventually("an object whose owner never was is collected", || async {
        maps.get_opt("dangling")
            .await
            .unwrap()
            .is_none()
            .then_some(())
    })
    .await;
    server.shutdown().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_namespace_finishes_its_contents_and_takes_no_more() {
    let server = server().await;
    let client = server.client();
    define_widgets(&client).await;
    let namespaces: Api<Namespace> = Api::all(client.clone());
    let namespace = serde_json::from_value(json!({"metadata": {"name": "team"}})).unwrap();
    namespaces
        .create(&PostParams::default(), &namespace)
        .await
        .unwrap();
    let maps: Api<ConfigMap> = Api::namespaced(client.clone(), "team");
    let mut held = config_map("held");
    held.finalizers_mut().push("example.com/hold".into());
    maps.create(&PostParams::default(), &held).await.unwrap();
    let api: Api<DynamicObject> =
        Api::namespaced_with(client.clone(), "team", &widget_resource("v1"));
    api.create(&PostParams::default(), &widget("w", json!({"size": 1})))
        .await
        .unwrap();
    eventually("the service account", || async {
        Api::<ServiceAccount>::namespaced(client.clone(), "team")
            .get_opt("default")
            .await
            .unwrap()
    })
    .await;

    namespaces
        .delete("team", &DeleteParams::default())
        .await
        .unwrap();
    assert_eq!(
        code(
            maps.create(&PostParams::default(), &config_map("late"))
                .await
        ),
        403
    );
    eventually("the widget goes", || async {
        api.get_opt("w").await.unwrap().is_none().then_some(())
    })
    .await;
    assert_eq!(
        namespaces
            .get("team")
            .await
            .unwrap()
            .status
            .unwrap()
            .phase
            .unwrap(),
        "Terminating"
    );
    maps.patch(
        "held",
        &PatchParams::default(),
        &Patch::Merge(json!({"metadata": {"finalizers": null}})),
    )
    .await
    .unwrap();
    eventually("the namespace goes", || async {
        namespaces
            .get_opt("team")
            .await
            .unwrap()
            .is_none()
            .then_some(())
    })
    .await;
    assert_eq!(
        code(
            maps.create(&PostParams::default(), &config_map("late"))
                .await
        ),
        404
    );
    server.shutdown().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn pods_are_bound_once_and_end_gracefully() {
    let server = server().await;
    let pods: Api<Pod> = Api::default_namespaced(server.client());
    let made = pods
        .create(&PostParams::default(), &pod("p"))
        .await
        .unwrap();
    assert_eq!(made.status.unwrap().phase.unwrap(), "Pending");
    let binding = |node: &str| json!({"apiVersion": "v1", "kind": "Binding", "metadata": {"name": "p"}, "target": {"kind": "Node", "name": node}});
    let bind = |node: &'static str| {
        let body = binding(node);
        let pods = pods.clone();
        async move {
            pods.create_subresource::<_, serde_json::Value>(
                "binding",
                "p",
                &PostParams::default(),
                &body,
            )
            .await
        }
    };
    bind("one").await.unwrap();
    assert_eq!(code(bind("two").await), 409);
    assert_eq!(
        pods.get("p")
            .await
            .unwrap()
            .spec
            .unwrap()
            .node_name
            .unwrap(),
        "one"
    );
    let images = Patch::Merge(json!({"spec": {"restartPolicy": "Never"}}));
    assert_eq!(
        code(pods.patch("p", &PatchParams::default(), &images).await),
        422,
        "a pod's spec stays"
    );

    let going = pods
        .delete("p", &DeleteParams::default())
        .await
        .unwrap()
        .left()
        .unwrap();
    assert_eq!(going.metadata.deletion_grace_period_seconds, Some(30));
    assert!(pods.get("p").await.is_ok(), "the node removes it");
    pods.delete("p", &DeleteParams::default().grace_period(0))
        .await
        .unwrap();
    assert_eq!(code(pods.get("p").await), 404);
    server.shutdown().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn events_are_one_store_in_two_groups() {
    let server = server().await;
    let core: Api<Event> = Api::default_namespaced(server.client());
    let event = json!({"metadata": {"name": "e"}, "involvedObject": {"kind": "Pod", "name": "p", "namespace": "default"}, "message": "hello", "reason": "Tried", "type": "Normal"});
    core.create(
        &PostParams::default(),
        &serde_json::from_value(event).unwrap(),
    )
    .await
    .unwrap();
    let newer: Api<k8s_openapi::api::events::v1::Event> = Api::default_namespaced(server.client());
    let seen = newer
        .list(&ListParams::default().fields("regarding.name=p"))
        .await
        .unwrap();
    assert_eq!(seen.items[0].note.as_deref(), Some("hello"));
    assert_eq!(
        core.list(&ListParams::default().fields("involvedObject.name=q"))
            .await
            .unwrap()
            .items
            .len(),
        0
    );
    server.shutdown().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn server_side_apply_creates_merges_and_reports_conflicts() {
    let server = server().await;
    define_widgets(&server.client()).await;
    let api = widgets(&server.client());
    let apply = |manager: &'static str, spec: serde_json::Value, force: bool| {
        let api = api.clone();
        async move {
            let parameters = PatchParams {
                field_manager: Some(manager.into()),
                force,
                ..PatchParams::default()
            };
            let object = json!({"apiVersion": "example.x-k8s.io/v1", "kind": "Widget", "metadata": {"name": "one"}, "spec": spec});
            api.patch("one", &parameters, &Patch::Apply(object)).await
        }
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
        "applying the same changes nothing"
    );

    let kube::Error::Api(conflict) = apply("second", json!({"size": 2}), false)
        .await
        .unwrap_err()
    else {
        panic!()
    };
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
        "a field given up falls back to its default"
    );

    let updated = api
        .patch(
            "one",
            &PatchParams::default(),
            &Patch::Merge(json!({"spec": {"replicas": 3}})),
        )
        .await
        .unwrap();
    assert!(
        updated
            .managed_fields()
            .iter()
            .any(|entry| entry.operation.as_deref() == Some("Update"))
    );
    server.shutdown().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn unknown_fields_are_refused_when_strict_and_dropped_otherwise() {
    let server = server().await;
    define_widgets(&server.client()).await;
    let strict = PostParams {
        field_manager: None,
        ..PostParams::default()
    };
    let api = widgets(&server.client());
    api.create(
        &strict,
        &widget("lenient", json!({"size": 1, "colour": "x"})),
    )
    .await
    .unwrap();
    let request = |path: &str, body: serde_json::Value| {
        let request = http::Request::post(path)
            .header("content-type", "application/json")
            .body(serde_json::to_vec(&body).unwrap())
            .unwrap();
        let client = server.client();
        async move { client.request::<serde_json::Value>(request).await }
    };
    let widget = json!({"apiVersion": "example.x-k8s.io/v1", "kind": "Widget", "metadata": {"name": "w"}, "spec": {"size": 1, "colour": "x"}});
    let path = "/apis/example.x-k8s.io/v1/namespaces/default/widgets?fieldValidation=Strict";
    let kube::Error::Api(refused) = request(path, widget).await.unwrap_err() else {
        panic!()
    };
    assert_eq!(
        refused.message,
        "strict decoding error: unknown field \"spec.colour\""
    );
    let pod = json!({"metadata": {"name": "p"}, "spec": {"containers": [{"name": "a", "image": "b", "imagee": "c"}]}});
    let kube::Error::Api(refused) = request(
        "/api/v1/namespaces/default/pods?fieldValidation=Strict",
        pod.clone(),
    )
    .await
    .unwrap_err() else {
        panic!()
    };
    assert!(
        refused
            .message
            .contains("unknown field \"spec.containers[0].imagee\""),
        "{}",
        refused.message
    );
    let made = request("/api/v1/namespaces/default/pods?dryRun=All", pod)
        .await
        .unwrap();
    assert!(made["spec"]["containers"][0].get("imagee").is_none());
    assert_eq!(
        code(
            Api::<Pod>::default_namespaced(server.client())
                .get("p")
                .await
        ),
        404,
        "a dry run stores nothing"
    );
    server.shutdown().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_strategic_merge_patch_merges_lists_by_their_key() {
    let server = server().await;
    let pods: Api<Pod> = Api::default_namespaced(server.client());
    pods.create(&PostParams::default(), &pod("p"))
        .await
        .unwrap();
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
    let mut conditions = pods
        .get("p")
        .await
        .unwrap()
        .status
        .unwrap()
        .conditions
        .unwrap();
    conditions.sort_by(|left, right| left.type_.cmp(&right.type_));
    let conditions: Vec<_> = conditions
        .iter()
        .map(|condition| (condition.type_.as_str(), condition.status.as_str()))
        .collect();
    assert_eq!(conditions, [("Initialized", "True"), ("Ready", "False")]);
    define_widgets(&server.client()).await;
    let api = widgets(&server.client());
    api.create(&PostParams::default(), &widget("w", json!({"size": 1})))
        .await
        .unwrap();
    assert_eq!(
        code(
            api.patch("w", &PatchParams::default(), &Patch::Strategic(json!({})))
                .await
        ),
        415
    );
    server.shutdown().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn kubectl_finds_tables_discovery_and_openapi() {
    let server = server().await;
    let client = server.client();
    define_widgets(&client).await;
    widgets(&client)
        .create(&PostParams::default(), &widget("w", json!({"size": 1})))
        .await
        .unwrap();
    let get = |path: &str, accept: &str| {
        let request = http::Request::get(path)
            .header("accept", accept)
            .body(Vec::new())
            .unwrap();
        let client = client.clone();
        async move { client.request::<serde_json::Value>(request).await.unwrap() }
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
        .unwrap()
        .to_owned();
    let document = get(&url, "application/json").await;
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

#[tokio::test(flavor = "multi_thread")]
async fn what_every_namespace_has_comes_back() {
    let server = server().await;
    let client = server.client();
    let accounts: Api<ServiceAccount> = Api::default_namespaced(client.clone());
    let maps: Api<ConfigMap> = Api::default_namespaced(client.clone());
    let account = accounts.get("default").await.unwrap();
    let authority = maps.get("kube-root-ca.crt").await.unwrap();
    let certificate = authority.data.as_ref().unwrap()["ca.crt"].clone();
    assert!(certificate.starts_with("-----BEGIN CERTIFICATE-----"));

    let parameters = DeleteParams::default();
    accounts.delete("default", &parameters).await.unwrap();
    eventually("another service account", || async {
        let found = accounts.get_opt("default").await.unwrap()?;
        (found.uid() != account.uid()).then_some(())
    })
    .await;
    let patch = Patch::Merge(json!({"data": {"ca.crt": "forged"}}));
    maps.patch("kube-root-ca.crt", &PatchParams::default(), &patch)
        .await
        .unwrap();
    let is_right = |found: &ConfigMap| found.data.as_ref().unwrap()["ca.crt"] == certificate;
    eventually("the right certificate", || async {
        let found = maps.get("kube-root-ca.crt").await.unwrap();
        is_right(&found).then_some(())
    })
    .await;
    maps.delete("kube-root-ca.crt", &parameters).await.unwrap();
    eventually("another copy of the certificate", || async {
        let found = maps.get_opt("kube-root-ca.crt").await.unwrap()?;
        (found.uid() != authority.uid() && is_right(&found)).then_some(())
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_volume_claim_stays_while_a_pod_uses_it() {
    let server = server().await;
    let client = server.client();
    let claims: Api<PersistentVolumeClaim> = Api::default_namespaced(client.clone());
    let pods: Api<Pod> = Api::default_namespaced(client.clone());
    let parameters = PostParams::default();
    for name in ["used", "unused"] {
        let claim = json!({"metadata": {"name": name}, "spec": {"accessModes": ["ReadWriteOnce"], "resources": {"requests": {"storage": "1Gi"}}}});
        let claim = serde_json::from_value(claim).unwrap();
        claims.create(&parameters, &claim).await.unwrap();
    }
    let pod = json!({"metadata": {"name": "user"}, "spec": {
        "nodeName": "node", "terminationGracePeriodSeconds": 0,
        "containers": [{"name": "main", "image": "x"}],
        "volumes": [{"name": "data", "persistentVolumeClaim": {"claimName": "used"}}],
    }});
    let pod = serde_json::from_value(pod).unwrap();
    pods.create(&parameters, &pod).await.unwrap();
    let gone = |name: &'static str| {
        let claims = claims.clone();
        async move { claims.get_opt(name).await.unwrap().is_none().then_some(()) }
    };
    for name in ["used", "unused"] {
        claims.delete(name, &DeleteParams::default()).await.unwrap();
    }
    eventually("the claim that nobody uses to go", || gone("unused")).await;
    let held = claims.get("used").await.unwrap();
    assert!(held.metadata.deletion_timestamp.is_some());
    assert_eq!(held.finalizers(), ["kubernetes.io/pvc-protection"]);
    let at_once = DeleteParams::default().grace_period(0);
    pods.delete("user", &at_once).await.unwrap();
    eventually("the other to go after its pod", || gone("used")).await;
}

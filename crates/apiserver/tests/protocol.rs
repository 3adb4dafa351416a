//! The HTTP protocol as clients other than kube-rs see it: query parameters, body formats, warnings, and watch events.

mod support;

use apiserver::{Config, Server, store::Window};
use http::{HeaderMap, Request, StatusCode, header};
use http_body_util::BodyExt;
use kube::{Client, client::Body};
use serde_json::{Value, json};
use support::{define_widgets, server};

const MAPS: &str = "/api/v1/namespaces/default/configmaps";

struct Answer {
    code: StatusCode,
    headers: HeaderMap,
    body: Value,
}

/// Sends a request and reads the whole response. A body that is not one JSON document is parsed line by line.
async fn send(
    client: &Client,
    method: &str,
    target: &str,
    kind: &str,
    body: impl Into<Body>,
) -> Answer {
    let request = Request::builder()
        .method(method)
        .uri(target)
        .header(header::CONTENT_TYPE, kind)
        .body(body.into())
        .expect("well formed");
    let (parts, content) = client
        .send(request)
        .await
        .expect("well formed")
        .into_parts();
    let bytes = content.collect().await.expect("well formed").to_bytes();
    let body = serde_json::from_slice(&bytes).unwrap_or_else(|_| {
        let text = String::from_utf8_lossy(&bytes);
        text.lines()
            .map(|line| serde_json::from_str(line).unwrap_or_else(|_| Value::from(line)))
            .collect()
    });
    Answer {
        code: parts.status,
        headers: parts.headers,
        body,
    }
}

async fn get(client: &Client, target: &str) -> Answer {
    send(client, "GET", target, "", Vec::new()).await
}

async fn send_json(client: &Client, method: &str, target: &str, object: &Value) -> Answer {
    let body = object.to_string().into_bytes();
    send(client, method, target, "application/json", body).await
}

async fn post(client: &Client, target: &str, object: Value) -> Answer {
    send_json(client, "POST", target, &object).await
}

async fn delete(client: &Client, target: &str, options: Value) -> Answer {
    send_json(client, "DELETE", target, &options).await
}

fn config_map(name: &str) -> Value {
    json!({"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": name, "labels": {"name": name}}, "data": {"a": "b"}})
}

async fn create(client: &Client, name: &str) -> Value {
    let created = post(client, MAPS, config_map(name)).await;
    assert_eq!(created.code, StatusCode::CREATED, "{}", created.body);
    created.body
}

fn version(object: &Value) -> &str {
    object["metadata"]["resourceVersion"]
        .as_str()
        .expect("well formed")
}

fn names(list: &Value) -> Vec<&str> {
    let items = list["items"].as_array().expect("well formed").iter();
    items
        .map(|item| item["metadata"]["name"].as_str().expect("well formed"))
        .collect()
}

/// Type and name of each event.
fn events(stream: &Value) -> Vec<(&str, &str)> {
    let lines = match stream {
        Value::Array(lines) => lines.as_slice(),
        line => std::slice::from_ref(line),
    };
    lines
        .iter()
        .map(|event| {
            (
                event["type"].as_str().expect("well formed"),
                event["object"]["metadata"]["name"]
                    .as_str()
                    .unwrap_or_default(),
            )
        })
        .collect()
}

#[tokio::test(flavor = "multi_thread")]
async fn a_dry_run_makes_every_check_and_stores_nothing() {
    let server = server().await;
    let client = server.client();
    let made = post(&client, &format!("{MAPS}?dryRun=All"), config_map("one")).await;
    assert_eq!(made.code, StatusCode::CREATED);
    assert!(made.body["metadata"]["uid"].is_string());
    assert_eq!(
        get(&client, &format!("{MAPS}/one")).await.code,
        StatusCode::NOT_FOUND
    );
    let before = create(&client, "one").await;
    let again = post(&client, &format!("{MAPS}?dryRun=All"), config_map("one")).await;
    assert_eq!(again.code, StatusCode::CONFLICT);
    let gone = delete(&client, &format!("{MAPS}/one?dryRun=All"), json!({})).await;
    assert_eq!(gone.code, StatusCode::OK);
    assert_eq!(get(&client, &format!("{MAPS}/one")).await.body, before);
    let wrong = post(&client, &format!("{MAPS}?dryRun=Some"), config_map("two")).await;
    assert!(wrong.code.is_client_error(), "{}", wrong.body);
    server.shutdown().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_deletion_checks_its_preconditions() {
    let server = server().await;
    let client = server.client();
    let one = create(&client, "one").await;
    let path = format!("{MAPS}/one");
    for preconditions in [json!({"uid": "another"}), json!({"resourceVersion": "1"})] {
        let refused = delete(&client, &path, json!({"preconditions": preconditions})).await;
        assert_eq!(
            (refused.code, &refused.body["reason"]),
            (StatusCode::CONFLICT, &json!("Conflict"))
        );
    }
    let matching =
        json!({"preconditions": {"uid": one["metadata"]["uid"], "resourceVersion": version(&one)}});
    assert_eq!(delete(&client, &path, matching).await.code, StatusCode::OK);
    assert_eq!(get(&client, &path).await.code, StatusCode::NOT_FOUND);
    server.shutdown().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_timestamp_may_have_another_format_but_not_another_value() {
    let server = server().await;
    let client = server.client();
    let mut one = create(&client, "one").await;
    let created = one["metadata"]["creationTimestamp"]
        .as_str()
        .unwrap()
        .to_owned();
    let path = format!("{MAPS}/one");
    let put = async |object: &Value| send_json(&client, "PUT", &path, object).await;
    one["metadata"]["creationTimestamp"] = json!(created.replace('Z', ".000+00:00"));
    let replaced = put(&one).await;
    assert_eq!(
        (
            replaced.code,
            &replaced.body["metadata"]["creationTimestamp"]
        ),
        (StatusCode::OK, &json!(created))
    );
    let mut other = replaced.body;
    other["metadata"]["creationTimestamp"] = json!("2001-01-01T00:00:00Z");
    assert_eq!(put(&other).await.code, StatusCode::UNPROCESSABLE_ENTITY);
    server.shutdown().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_collection_is_deleted_by_its_selector() {
    let server = server().await;
    let client = server.client();
    for name in ["one", "two", "three"] {
        create(&client, name).await;
    }
    let selected = format!("{MAPS}?labelSelector=name+in+(one,three)");
    assert_eq!(
        delete(&client, &selected, json!({})).await.code,
        StatusCode::OK
    );
    assert_eq!(
        names(
            &get(&client, &format!("{MAPS}?labelSelector=name"))
                .await
                .body
        ),
        ["two"]
    );
    server.shutdown().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_list_has_the_requested_resource_version() {
    let server = server().await;
    let client = server.client();
    let one = create(&client, "one").await;
    create(&client, "two").await;
    let exactly = format!(
        "{MAPS}?labelSelector=name&resourceVersion={}&resourceVersionMatch=Exact",
        version(&one)
    );
    let then = get(&client, &exactly).await.body;
    assert_eq!((names(&then), version(&then)), (vec!["one"], version(&one)));
    for query in [
        "resourceVersion=0",
        &format!(
            "resourceVersion={}&resourceVersionMatch=NotOlderThan",
            version(&one)
        ),
    ] {
        let now = get(&client, &format!("{MAPS}?labelSelector=name&{query}"))
            .await
            .body;
        assert_eq!(names(&now), ["one", "two"], "{query}");
    }
    let early = get(&client, &format!("{MAPS}?resourceVersion=999999")).await;
    assert_eq!(early.code, StatusCode::GATEWAY_TIMEOUT, "{}", early.body);
    let refused = get(&client, &format!("{MAPS}?resourceVersionMatch=Exact")).await;
    assert!(refused.code.is_client_error(), "{}", refused.body);
    server.shutdown().await;
}

/// A server with a very short event history.
async fn server_with_short_history() -> Server {
    let mut config = Config::in_memory();
    config.window = Window {
        events_per_kind: 4,
        ..Window::default()
    };
    Server::open(config).await.expect("it opens")
}

/// Writes more events than a [`server_with_short_history`] retains.
async fn exceed_history(client: &Client) {
    for number in 0..20 {
        create(client, &format!("more-{number}")).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_compacted_resource_version_is_expired() {
    let server = server_with_short_history().await;
    let client = server.client();
    let first = create(&client, "one").await;
    let page = get(&client, &format!("{MAPS}?limit=1")).await.body;
    let next = page["metadata"]["continue"].as_str().unwrap();
    exceed_history(&client).await;
    let since = format!("{MAPS}?resourceVersion={}", version(&first));
    let watched = get(&client, &format!("{since}&watch=1&timeoutSeconds=1")).await;
    let status = match watched.code {
        StatusCode::OK => &watched.body["object"],
        _ => &watched.body,
    };
    assert_eq!(
        (&status["code"], &status["reason"]),
        (&json!(410), &json!("Expired")),
        "{}",
        watched.body
    );
    for target in [
        format!("{since}&resourceVersionMatch=Exact"),
        format!("{MAPS}?limit=1&continue={next}"),
    ] {
        assert_eq!(
            get(&client, &target).await.code,
            StatusCode::GONE,
            "{target}"
        );
    }
    server.shutdown().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_watcher_that_does_not_read_gets_an_expired_error() {
    let server = server_with_short_history().await;
    let client = server.client();
    let first = create(&client, "first").await;
    let watch = format!(
        "{MAPS}?watch=1&timeoutSeconds=30&resourceVersion={}",
        version(&first)
    );
    let request = Request::get(watch).body(Body::from(Vec::new())).unwrap();
    let answer = client.send(request).await.unwrap();
    exceed_history(&client).await;
    let bytes = answer.into_body().collect().await.unwrap().to_bytes();
    let text = String::from_utf8_lossy(&bytes);
    let last: Value = serde_json::from_str(text.lines().last().unwrap()).unwrap();
    assert_eq!(
        (&last["type"], &last["object"]["code"]),
        (&json!("ERROR"), &json!(410)),
        "{text}"
    );
    server.shutdown().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_watch_starts_and_ends_according_to_its_parameters() {
    let server = server().await;
    let client = server.client();
    let one = create(&client, "one").await;
    create(&client, "two").await;
    let watch = format!("{MAPS}?watch=1&timeoutSeconds=1&labelSelector=name");
    let both = [("ADDED", "one"), ("ADDED", "two")];
    // Without a resource version, or with "0", a watch starts with the current objects; with another version, with later events.
    assert_eq!(events(&get(&client, &watch).await.body), both);
    assert_eq!(
        events(
            &get(&client, &format!("{watch}&resourceVersion=0"))
                .await
                .body
        ),
        both
    );
    let after = format!("{watch}&resourceVersion={}", version(&one));
    assert_eq!(events(&get(&client, &after).await.body), both[1..]);

    let initial = format!(
        "{watch}&sendInitialEvents=true&allowWatchBookmarks=true&resourceVersionMatch=NotOlderThan"
    );
    let stream = get(&client, &initial).await.body;
    assert_eq!(events(&stream)[..3], [both[0], both[1], ("BOOKMARK", "")]);
    let mark = &stream[2]["object"]["metadata"];
    assert_eq!(mark["annotations"]["k8s.io/initial-events-end"], "true");
    assert!(mark["resourceVersion"].is_string());
    let without = get(&client, &format!("{watch}&sendInitialEvents=true")).await;
    assert!(
        without.code.is_client_error(),
        "initial events need bookmarks: {}",
        without.body
    );
    server.shutdown().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn every_body_format_is_decoded_and_large_bodies_are_refused() {
    let server = server().await;
    let client = server.client();
    let yaml = "apiVersion: v1\nkind: ConfigMap\nmetadata: {name: by-yaml}\ndata: {a: 'yes'}\n";
    let made = send(
        &client,
        "POST",
        MAPS,
        "application/yaml",
        yaml.as_bytes().to_vec(),
    )
    .await;
    assert_eq!(
        (made.code, &made.body["data"]["a"]),
        (StatusCode::CREATED, &json!("yes"))
    );

    // An envelope with `v1 ConfigMap`, and the message `{metadata: {name: "by-proto"}, data: {"a": "b"}}`.
    let identity = b"\x0a\x0f\x0a\x02v1\x12\x09ConfigMap";
    let message = b"\x12\x14\x0a\x0a\x0a\x08by-proto\x12\x06\x0a\x01a\x12\x01b";
    let made = send(
        &client,
        "POST",
        MAPS,
        "application/vnd.kubernetes.protobuf",
        [&b"k8s\0"[..], identity, message, b"\x1a\x00\x22\x00"].concat(),
    )
    .await;
    assert_eq!(
        (made.code, &made.body["data"]["a"]),
        (StatusCode::CREATED, &json!("b")),
        "{}",
        made.body
    );

    let unknown = send(&client, "POST", MAPS, "application/xml", b"<a/>".to_vec()).await;
    assert_eq!(
        (unknown.code, &unknown.body["reason"]),
        (
            StatusCode::UNSUPPORTED_MEDIA_TYPE,
            &json!("UnsupportedMediaType")
        )
    );
    let large = json!({"data": {"a": "x".repeat(3 << 20)}});
    let large = post(&client, MAPS, large).await;
    assert_eq!(
        (large.code, &large.body["reason"]),
        (
            StatusCode::PAYLOAD_TOO_LARGE,
            &json!("RequestEntityTooLarge")
        )
    );
    server.shutdown().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn clients_get_warnings_about_unknown_fields_and_deprecated_versions() {
    let server = server().await;
    let client = server.client();
    define_widgets(&client).await;
    let warning = |answer: &Answer| {
        let text = answer
            .headers
            .get(header::WARNING)
            .map(|value| value.to_str().unwrap().to_owned());
        text.unwrap_or_default()
    };
    let widgets =
        |version: &str| format!("/apis/example.x-k8s.io/{version}/namespaces/default/widgets");
    let object = json!({"apiVersion": "example.x-k8s.io/v1", "kind": "Widget", "metadata": {"generateName": "w-"}, "spec": {"size": 1, "sise": 2}});
    let validated = async |how: &str| {
        let target = format!("{}?fieldValidation={how}", widgets("v1"));
        post(&client, &target, object.clone()).await
    };
    assert_eq!(
        warning(&validated("Warn").await),
        r#"299 - "unknown field \"spec.sise\"""#
    );
    let ignored = validated("Ignore").await;
    assert_eq!(
        (ignored.code, warning(&ignored).as_str()),
        (StatusCode::CREATED, "")
    );
    assert_eq!(validated("Strict").await.code, StatusCode::BAD_REQUEST);
    let old = get(&client, &widgets("v1alpha1")).await;
    assert!(
        warning(&old).contains("example.x-k8s.io/v1alpha1 Widget is deprecated"),
        "{}",
        warning(&old)
    );
    server.shutdown().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_pod_is_evicted_and_bound_by_its_subresources() {
    let server = server().await;
    let client = server.client();
    let pods = "/api/v1/namespaces/default/pods";
    let pod = json!({"metadata": {"name": "p"}, "spec": {"terminationGracePeriodSeconds": 0, "containers": [{"name": "main", "image": "host"}]}});
    post(&client, pods, pod).await;
    let binding = json!({"apiVersion": "v1", "kind": "Binding", "metadata": {"name": "p"}, "target": {"kind": "Node", "name": "n"}});
    assert_eq!(
        post(&client, &format!("{pods}/p/binding"), binding)
            .await
            .code,
        StatusCode::CREATED
    );
    assert_eq!(
        get(&client, &format!("{pods}/p")).await.body["spec"]["nodeName"],
        "n"
    );
    let eviction =
        json!({"apiVersion": "policy/v1", "kind": "Eviction", "metadata": {"name": "p"}});
    let evicted = post(&client, &format!("{pods}/p/eviction"), eviction).await;
    assert_eq!(evicted.code, StatusCode::CREATED, "{}", evicted.body);
    let left = get(&client, &format!("{pods}/p")).await;
    assert!(
        left.code == StatusCode::NOT_FOUND
            || left.body["metadata"]["deletionTimestamp"].is_string(),
        "{}",
        left.body
    );
    server.shutdown().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn unserved_paths_are_not_found() {
    let server = server().await;
    let client = server.client();
    for path in [
        "/apis/apps/v1",
        "/apis/apps/v1/deployments",
        "/api/v1/replicationcontrollers",
        "/apis/none.example.com",
        "/nothing",
    ] {
        assert_eq!(
            get(&client, path).await.code,
            StatusCode::NOT_FOUND,
            "{path}"
        );
    }
    let unserved = get(&client, "/apis/none.example.com/v1/things").await;
    assert_eq!(unserved.body, json!(["404 page not found"]));
    let unknown = get(&client, "/api/v1/replicationcontrollers").await;
    assert_eq!(unknown.body["reason"], "NotFound", "core is served");
    let method = send(&client, "PUT", MAPS, "application/json", b"{}".to_vec()).await;
    assert_eq!(method.code, StatusCode::METHOD_NOT_ALLOWED);
    let all = delete(&client, "/api/v1/namespaces", json!({})).await;
    assert_eq!(all.code, StatusCode::METHOD_NOT_ALLOWED);
    for path in ["/healthz", "/livez", "/readyz"] {
        let request = Request::get(path).body(Body::from(Vec::new())).unwrap();
        assert_eq!(
            client.send(request).await.unwrap().status(),
            StatusCode::OK,
            "{path}"
        );
    }
    assert_eq!(get(&client, "/version").await.body["major"], "1");
    server.shutdown().await;
}

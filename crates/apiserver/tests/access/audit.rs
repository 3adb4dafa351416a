//! The audit log of requests over HTTPS.

use apiserver::Config;
use futures::StreamExt;
use k8s_openapi::api::core::v1::ConfigMap;
use kube::{
    Api,
    api::{PostParams, WatchParams},
};
use serde_json::{Value, json};

use crate::{served::Served, support::code};

#[tokio::test(flavor = "multi_thread")]
async fn requests_are_audited_without_their_bodies() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("audit.log");
    let mut config = Config::new(directory.path().join("data"));
    config.audit = Some(apiserver::audit::Options {
        path: path.clone(),
        max_bytes: 1 << 20,
        max_backups: 1,
    });
    let served = Served::start_with(config).await;
    let token = std::fs::read_to_string(directory.path().join("data/pki/admin.token")).unwrap();
    let admin = served.connect(token.trim());
    let map = serde_json::from_value(
        json!({"metadata": {"name": "one"}, "data": {"password": "hidden"}}),
    )
    .unwrap();
    Api::<ConfigMap>::default_namespaced(admin.clone())
        .create(&PostParams::default(), &map)
        .await
        .unwrap();
    let as_ann: Api<ConfigMap> =
        Api::default_namespaced(served.connect_as(token.trim(), Some("ann")));
    assert_eq!(code(as_ann.get("one").await), 403);
    let unauthenticated: Api<ConfigMap> = Api::default_namespaced(served.connect("wrong"));
    assert_eq!(code(unauthenticated.get("one").await), 401);
    let watch = WatchParams::default().timeout(1);
    let events = Api::<ConfigMap>::default_namespaced(admin)
        .watch(&watch, "0")
        .await
        .unwrap();
    events.for_each(|_| futures::future::ready(())).await;

    let lines = testkit::eventually("the audit log is complete", || async {
        let text = std::fs::read_to_string(&path).ok()?;
        let lines: Vec<Value> = text
            .lines()
            .map_while(|line| serde_json::from_str(line).ok())
            .collect();
        let ended = |line: &Value| {
            line["verb"] == "watch"
                && line["stage"] == "ResponseComplete"
                && line["objectRef"]["resource"] == "configmaps"
        };
        lines.iter().any(ended).then_some(lines)
    })
    .await;
    let find = |verb: &str, code: u16| {
        let wanted = |line: &&Value| {
            line["verb"] == verb
                && line["responseStatus"]["code"] == code
                && line["objectRef"]["resource"] == "configmaps"
        };
        lines
            .iter()
            .find(wanted)
            .unwrap_or_else(|| panic!("no {verb} with {code}: {lines:#?}"))
    };
    let created = find("create", 201);
    assert_eq!(
        (&created["level"], &created["stage"]),
        (&json!("Metadata"), &json!("ResponseComplete"))
    );
    assert_eq!(created["user"]["username"], "system:admin");
    assert_eq!(created["sourceIPs"], json!(["127.0.0.1"]));
    assert_eq!(
        created["objectRef"],
        json!({"resource": "configmaps", "namespace": "default", "apiVersion": "v1"})
    );
    let refused = find("get", 403);
    assert_eq!(refused["impersonatedUser"]["username"], "ann");
    assert_eq!(
        refused["annotations"]["authorization.k8s.io/decision"],
        "forbid"
    );
    assert_eq!(find("get", 401)["user"], json!({}));
    assert!(!std::fs::read_to_string(&path).unwrap().contains("hidden"));
    served.end().await;
}

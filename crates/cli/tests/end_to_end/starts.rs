//! Sandboxes that do not start: the messages of the command line, and when it stops waiting.

use std::time::{Duration, Instant};

use api::{Sandbox, SandboxTemplate};
use kube::Api;
use kube::api::PostParams;
use serde_json::{Value, json};

use crate::streams::client;
use crate::support::{Up, run, stderr_of, stdout_of};

/// Long after a failed start is given up, and long before the default timeout.
const SOON: Duration = Duration::from_secs(120);

/// Makes a template of this name whose pods have this spec.
fn create_template(up: &Up, name: &str, pod_spec: &Value) {
    let template: SandboxTemplate = serde_json::from_value(json!({
        "apiVersion": "extensions.agents.x-k8s.io/v1beta1", "kind": "SandboxTemplate",
        "metadata": {"name": name}, "spec": {"podTemplate": {"spec": pod_spec}},
    }))
    .unwrap();
    let runtime = tokio::runtime::Runtime::new().unwrap();
    runtime.block_on(async {
        let templates: Api<SandboxTemplate> = Api::default_namespaced(client(up).await);
        let parameters = PostParams::default();
        templates.create(&parameters, &template).await.unwrap();
    });
}

#[test]
fn a_sandbox_that_no_waiting_starts_is_given_up_at_once_with_the_reason() {
    let up = Up::start(&["--no-quickstart"]);
    let container = |image: &str| json!([{"name": "main", "image": image}]);
    create_template(
        &up,
        "unheard-of",
        &json!({"containers": container("host"), "runtimeClassName": "unheard-of"}),
    );
    create_template(
        &up,
        "misnamed",
        &json!({"containers": container("Example.invalid/UPPER/case")}),
    );
    let begun = Instant::now();
    for (template, reason) in [
        ("unheard-of", "RuntimeClassUnavailable"),
        ("misnamed", "InvalidImageName"),
    ] {
        let error = stderr_of(
            up.command()
                .args(["run", "--template", template, "--", "true"]),
        );
        let expected = format!("container \"main\": {reason}: ");
        assert!(error.contains(&expected), "{error}");
    }
    assert!(begun.elapsed() < SOON, "{:?}", begun.elapsed());
    let claims = stdout_of(up.command().args(["list", "-o", "name"]));
    assert_eq!(claims, "", "the claims were taken back");

    let kept = [
        "claim",
        "--template",
        "misnamed",
        "--keep-on-failure",
        "mine",
    ];
    let error = stderr_of(up.command().args(kept));
    for expected in [
        "InvalidImageName",
        "agent-sandbox get mine",
        "agent-sandbox delete mine",
    ] {
        assert!(error.contains(expected), "{error}");
    }
    let shown = stdout_of(up.command().args(["get", "mine", "-o", "json"]));
    let claim: Value = serde_json::from_str(&shown).unwrap();
    let ready = &claim["status"]["conditions"][0];
    assert_eq!(ready["reason"], "DependenciesNotReady", "{claim}");
    let message = ready["message"].as_str().unwrap();
    assert!(
        message.contains("container \"main\": InvalidImageName: "),
        "{message}"
    );
    stdout_of(up.command().args(["delete", "--wait", "mine"]));
}

#[test]
fn a_wait_prints_what_keeps_the_sandbox_from_starting() {
    let up = Up::start(&["--no-quickstart"]);
    // A registry that is not allowed, so that none is contacted.
    create_template(
        &up,
        "unreachable",
        &json!({"containers": [{"name": "main", "image": "127.0.0.1:1/example/x:1"}]}),
    );
    let arguments = ["claim", "--template", "unreachable", "--timeout", "8s"];
    let output = run(up.command().args(arguments));
    assert!(!output.status.success());
    let stderr = String::from_utf8_lossy(&output.stderr).into_owned();
    let waiting: Vec<&str> = stderr
        .lines()
        .filter(|line| line.starts_with("waiting: container \"main\": "))
        .collect();
    // Once as a failure and once as a back-off: further attempts are not reported.
    assert!((1..=2).contains(&waiting.len()), "{stderr}");
    let last = stderr.lines().last().unwrap();
    assert!(last.contains("took longer than 8s"), "{stderr}");
    assert!(last.contains("ImagePullBackOff: "), "{stderr}");
    let claims = stdout_of(up.command().args(["list", "-o", "name"]));
    assert_eq!(claims, "", "the claim was taken back");
}

#[test]
fn a_sandbox_that_sets_neither_field_is_of_the_newer_form() {
    let up = Up::start(&["--no-quickstart"]);
    let created = |name: &str, version: &str, spec: Value| {
        let mut spec = spec;
        spec["podTemplate"] = json!({"spec": {"containers": [
            {"name": "main", "image": "host", "command": ["sleep", "1000"]},
        ]}});
        let runtime = tokio::runtime::Runtime::new().unwrap();
        let object = json!({
            "apiVersion": format!("agents.x-k8s.io/{version}"), "kind": "Sandbox",
            "metadata": {"name": name}, "spec": spec,
        });
        runtime.block_on(async {
            let client = client(&up).await;
            let path = format!("/apis/agents.x-k8s.io/{version}/namespaces/default/sandboxes");
            let body = serde_json::to_vec(&object).unwrap();
            let request = http::Request::post(path).body(body).unwrap();
            client.request::<Value>(request).await.unwrap();
            let sandboxes: Api<Sandbox> = Api::default_namespaced(client);
            let ready = testkit::eventually("the sandbox to be ready", async || {
                let sandbox = sandboxes.get(name).await.unwrap();
                let status = sandbox.status.clone().unwrap_or_default();
                let ready = api::conditions::ConditionType::Ready;
                api::conditions::is_true(&status.conditions, ready).then_some(sandbox)
            })
            .await;
            serde_json::to_value(ready).unwrap()
        })
    };
    let reported = |sandbox: &Value, kind: &str| -> Option<(String, String)> {
        let conditions = sandbox["status"]["conditions"].as_array().unwrap();
        let condition = conditions
            .iter()
            .find(|condition| condition["type"] == kind)?;
        let text = |field: &str| condition[field].as_str().unwrap().to_owned();
        Some((text("status"), text("reason")))
    };
    let pair = |status: &str, reason: &str| Some((status.to_owned(), reason.to_owned()));
    for (name, version, spec, mode) in [
        ("neither", "v1beta1", json!({}), Some("Running")),
        (
            "mode",
            "v1beta1",
            json!({"operatingMode": "Running"}),
            Some("Running"),
        ),
        ("replicas", "v1beta1", json!({"replicas": 1}), None),
        ("older", "v1alpha1", json!({}), None),
    ] {
        let sandbox = created(name, version, spec);
        assert_eq!(sandbox["spec"]["operatingMode"].as_str(), mode, "{name}");
        assert_eq!(sandbox["spec"]["replicas"], 1, "{name}");
        let (suspended, scheduled) = match mode {
            Some(_) => (pair("False", "NotSuspended"), pair("True", "PodScheduled")),
            None => (None, None),
        };
        assert_eq!(reported(&sandbox, "Suspended"), suspended, "{name}");
        assert_eq!(reported(&sandbox, "PodScheduled"), scheduled, "{name}");
    }
    up.delete_everything();
}

//! Every recorded exchange, asked of the embedded server, or of the one that `CONFORMANCE_KUBECONFIG` names.

#![expect(clippy::unwrap_used, reason = "a test stops at the first surprise")]

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use conformance::exchange::{self, Answer};
use conformance::scenario::{Scenario, Step};
use kube::Client;
use kube::config::{KubeConfigOptions, Kubeconfig};
use tokio::net::TcpListener;
use tokio_util::sync::CancellationToken;

type Recorded = BTreeMap<String, Vec<Answer>>;

/// The server that is asked.
enum Server {
    /// Whatever it does otherwise than recorded must be noted in the scenario.
    Embedded,
    /// Does what is recorded.
    Kubernetes,
}

async fn connect(kubeconfig: &Path) -> Client {
    let config = Kubeconfig::read_from(kubeconfig).unwrap();
    let config = kube::Config::from_custom_kubeconfig(config, &KubeConfigOptions::default())
        .await
        .unwrap();
    Client::try_from(config).unwrap()
}

#[tokio::test(flavor = "multi_thread")]
async fn every_request_is_answered_as_kubernetes_answers_it() {
    let directory = tempfile::tempdir().unwrap();
    let stop = CancellationToken::new();
    let (server, client) = match std::env::var_os("CONFORMANCE_KUBECONFIG") {
        Some(kubeconfig) => (
            Server::Kubernetes,
            connect(&PathBuf::from(kubeconfig)).await,
        ),
        None => (
            Server::Embedded,
            embedded(directory.path(), stop.clone()).await,
        ),
    };
    install_kinds(&client).await;
    let is_recording = std::env::var_os("CONFORMANCE_RECORD").is_some();
    assert!(
        !is_recording || matches!(server, Server::Kubernetes),
        "only what a real kube-apiserver answers is recorded"
    );
    let mut complaints = Vec::new();
    for (file, scenarios) in conformance::all().unwrap() {
        let mut answers = Recorded::new();
        for (number, scenario) in scenarios.iter().enumerate() {
            let namespace = format!("{}-{number}", file.replace('_', "-"));
            match exchange::run(&client, scenario, &namespace).await {
                Ok(answered) => {
                    answers.insert(scenario.scenario.clone(), answered);
                }
                Err(error) => complaints.push(format!("{error:#}")),
            }
        }
        let path = conformance::recorded(&file);
        if is_recording {
            let text = serde_json::to_string_pretty(&answers).unwrap() + "\n";
            std::fs::write(path, text).unwrap();
            continue;
        }
        let text = std::fs::read_to_string(&path)
            .unwrap_or_else(|error| panic!("{}: {error}", path.display()));
        let recorded: Recorded = serde_json::from_str(&text).unwrap();
        for scenario in &scenarios {
            complaints.extend(compare(&server, scenario, &recorded, &answers));
        }
    }
    stop.cancel();
    assert!(
        complaints.is_empty(),
        "{} answers are not as recorded:\n\n{}",
        complaints.len(),
        complaints.join("\n\n")
    );
}

fn compare(
    server: &Server,
    scenario: &Scenario,
    recorded: &Recorded,
    answers: &Recorded,
) -> Vec<String> {
    let name = &scenario.scenario;
    let Some(recorded) = recorded.get(name) else {
        return vec![format!("{name}: nothing is recorded; use --record")];
    };
    let Some(answers) = answers.get(name) else {
        return Vec::new();
    };
    if recorded.len() != scenario.steps.len() {
        return vec![format!("{name}: record it anew")];
    }
    let steps = scenario.steps.iter().zip(recorded).zip(answers);
    steps
        .filter_map(|((step, recorded), answer)| complaint(server, name, step, recorded, answer))
        .collect()
}

fn complaint(
    server: &Server,
    name: &str,
    step: &Step,
    recorded: &Answer,
    answer: &Answer,
) -> Option<String> {
    let is_equal = recorded == answer;
    let is_meant = matches!(server, Server::Embedded) && step.differs.is_some();
    match (is_equal, is_meant) {
        (true, false) | (false, true) => None,
        (true, true) => Some(format!(
            "{name}: {}: is no longer different; take out the note",
            step.request
        )),
        (false, false) => Some(format!(
            "{name}: {}\n  recorded {} {}\n  answered {} {}",
            step.request,
            recorded.code,
            shown(recorded),
            answer.code,
            shown(answer)
        )),
    }
}

fn shown(answer: &Answer) -> String {
    let headers = if answer.headers.is_empty() {
        String::new()
    } else {
        format!("{:?} ", answer.headers)
    };
    format!("{headers}{}", answer.answer)
}

async fn embedded(directory: &Path, stop: CancellationToken) -> Client {
    let server = apiserver::Server::open(apiserver::Config::new(directory.join("data")))
        .await
        .unwrap();
    let server = Arc::new(server);
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    let kubeconfig = directory.join("kubeconfig");
    server
        .write_kubeconfig(&kubeconfig, &format!("https://{address}"))
        .unwrap();
    tokio::spawn(async move { server.serve(listener, stop).await.unwrap() });
    connect(&kubeconfig).await
}

/// Our own kinds are part of what is asked.
async fn install_kinds(client: &Client) {
    use http_body_util::BodyExt;
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../deploy/crds");
    for entry in std::fs::read_dir(folder).unwrap() {
        let text = std::fs::read_to_string(entry.unwrap().path()).unwrap();
        let definition: serde_json::Value = serde_yaml_ng::from_str(&text).unwrap();
        let name = definition["metadata"]["name"].as_str().unwrap().to_owned();
        let request =
            http::Request::post("/apis/apiextensions.k8s.io/v1/customresourcedefinitions")
                .header("content-type", "application/json")
                .body(kube::client::Body::from(
                    definition.to_string().into_bytes(),
                ))
                .unwrap();
        let answer = client.send(request).await.unwrap();
        assert_eq!(answer.status().as_u16(), 201, "{name}");
        answer.into_body().collect().await.unwrap();
        let (plural, group) = name.split_once('.').unwrap();
        let path = format!("/apis/{group}/v1beta1/{plural}");
        let deadline = std::time::Instant::now() + std::time::Duration::from_secs(180);
        loop {
            let request = http::Request::get(&path)
                .body(kube::client::Body::empty())
                .unwrap();
            if client.send(request).await.unwrap().status().is_success() {
                break;
            }
            assert!(std::time::Instant::now() < deadline, "{name} is not served");
            tokio::time::sleep(std::time::Duration::from_millis(20)).await;
        }
    }
}

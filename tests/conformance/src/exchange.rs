//! Asking a server what a scenario says, and keeping the essence of what it answers.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use anyhow::{Context, ensure};
use http::{Request, header};
use http_body_util::BodyExt;
use kube::Client;
use kube::client::Body;
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use crate::essence::Essence;
use crate::scenario::{Scenario, Step};

/// How long a step may wait for what it waits for.
const DEADLINE: Duration = Duration::from_secs(180);
const LOOK_AGAIN: Duration = Duration::from_millis(20);

/// What a server answered to a step.
#[derive(Clone, Debug, Deserialize, PartialEq, Serialize)]
pub struct Answer {
    pub request: String,
    pub code: u16,
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub headers: BTreeMap<String, Vec<String>>,
    pub answer: Value,
}

/// Asks everything, in a new namespace.
pub async fn run(
    client: &Client,
    scenario: &Scenario,
    namespace: &str,
) -> anyhow::Result<Vec<Answer>> {
    make_namespace(client, namespace).await?;
    let mut kept = BTreeMap::from([("namespace".to_owned(), namespace.to_owned())]);
    let mut essence = Essence::new(namespace, scenario.managed_fields);
    let mut answers = Vec::new();
    for step in &scenario.steps {
        let answer = ask(client, step, &mut kept, &mut essence)
            .await
            .with_context(|| format!("{}: {}", scenario.scenario, step.request))?;
        answers.push(answer);
    }
    Ok(answers)
}

async fn make_namespace(client: &Client, namespace: &str) -> anyhow::Result<()> {
    let body = json!({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": namespace}});
    let request = Request::post("/api/v1/namespaces")
        .header(header::CONTENT_TYPE, "application/json")
        .body(Body::from(body.to_string().into_bytes()))?;
    let (code, _, _) = send(client, request).await?;
    ensure!(code == 201, "making namespace {namespace}: {code}");
    // Pods are refused until their service account is there.
    let deadline = Instant::now() + DEADLINE;
    loop {
        let path = format!("/api/v1/namespaces/{namespace}/serviceaccounts/default");
        let (code, _, _) = send(client, Request::get(path).body(Body::empty())?).await?;
        if code == 200 {
            return Ok(());
        }
        ensure!(
            Instant::now() < deadline,
            "{namespace} has no service account"
        );
        tokio::time::sleep(LOOK_AGAIN).await;
    }
}

async fn ask(
    client: &Client,
    step: &Step,
    kept: &mut BTreeMap<String, String>,
    essence: &mut Essence,
) -> anyhow::Result<Answer> {
    let deadline = Instant::now() + DEADLINE;
    loop {
        let (code, headers, text) = send(client, request(step, kept)?).await?;
        let answer = parse(&text, step.request.contains("watch=true"));
        if let Some(until) = &step.until
            && !until.holds(code, &answer)
        {
            ensure!(
                Instant::now() < deadline,
                "waited in vain; at last: {code} {text}"
            );
            tokio::time::sleep(LOOK_AGAIN).await;
            continue;
        }
        for (name, pointer) in &step.keep {
            let value = answer.pointer(pointer).and_then(Value::as_str);
            let value =
                value.with_context(|| format!("{pointer} is not in the answer: {code} {text}"))?;
            kept.insert(name.clone(), value.to_owned());
        }
        let headers = step
            .headers
            .iter()
            .map(|name| {
                let values = headers.get_all(name).iter();
                let values = values.filter_map(|value| Some(value.to_str().ok()?.to_owned()));
                (name.clone(), values.collect())
            })
            .collect();
        return Ok(Answer {
            request: step.request.clone(),
            code,
            headers,
            answer: essence.of(answer, step),
        });
    }
}

fn request(step: &Step, kept: &BTreeMap<String, String>) -> anyhow::Result<Request<Body>> {
    let (method, path) = step
        .request
        .split_once(' ')
        .context("a request is a method and a path")?;
    let mut builder = Request::builder()
        .method(method)
        .uri(filled(path, kept))
        .header(header::USER_AGENT, "conformance/1")
        .header(
            header::ACCEPT,
            step.accept.as_deref().unwrap_or("application/json"),
        );
    if let Some(user) = &step.user {
        builder = builder.header("Impersonate-User", filled(user, kept));
    }
    let body = match (&step.body, &step.text) {
        (Some(body), _) => Some(filled(&body.to_string(), kept)),
        (None, text) => text.clone(),
    };
    let Some(body) = body else {
        return Ok(builder.body(Body::empty())?);
    };
    let content_type = step.content_type.as_deref().unwrap_or("application/json");
    Ok(builder
        .header(header::CONTENT_TYPE, content_type)
        .body(Body::from(body.into_bytes()))?)
}

fn filled(text: &str, kept: &BTreeMap<String, String>) -> String {
    kept.iter().fold(text.to_owned(), |text, (name, value)| {
        text.replace(&format!("{{{name}}}"), value)
    })
}

async fn send(
    client: &Client,
    request: Request<Body>,
) -> anyhow::Result<(u16, http::HeaderMap, String)> {
    let answer = client.send(request).await?;
    let (parts, body) = answer.into_parts();
    let bytes = body.collect().await?.to_bytes();
    let text = String::from_utf8_lossy(&bytes).into_owned();
    Ok((parts.status.as_u16(), parts.headers, text))
}

/// An object, the events of a watch, or plain text.
fn parse(text: &str, is_watch: bool) -> Value {
    if is_watch {
        let events: Result<Vec<Value>, _> = text.lines().map(serde_json::from_str).collect();
        if let Ok(events) = events {
            return Value::Array(events);
        }
    }
    serde_json::from_str(text).unwrap_or_else(|_| Value::from(text))
}

//! A cluster for tests: the embedded API server, a small controller that fulfils claims, and a record of every request
//! that the client under test makes. Faults can be injected.

#![expect(
    dead_code,
    reason = "each test program uses a different part of this module"
)]

use std::sync::{Arc, Mutex};
use std::time::Duration;

use api::claim::ClaimedSandbox;
use api::sandbox::SuspensionType;
use api::{Sandbox, SandboxClaim, SandboxClaimStatus};
use futures::StreamExt;
use http::{Method, Request, Response};
use k8s_openapi::apiextensions_apiserver::pkg::apis::apiextensions::v1::CustomResourceDefinition;
use kube::api::{ListParams, Patch, PatchParams, PostParams};
use kube::client::Body;
use kube::runtime::{WatchStreamExt, watcher};
use kube::{Api, Client, ResourceExt};
use sdk::{Connection, Options, RetryPolicy};
use serde_json::{Value, json};

pub mod http_server;

/// A claim by this template is never fulfilled.
pub const NEVER: &str = "never";
/// A claim by this template is refused.
pub const MISSING: &str = "missing";
/// A template whose pods cannot pull their image, for a transient reason.
pub const FAILING: &str = "failing";

type Fault = Box<dyn FnMut(&Request<Body>) -> Option<Injected> + Send>;

/// The effect of an injected fault on a request.
#[derive(Clone, Copy, Debug)]
pub enum Injected {
    /// The request is not executed; the client gets this status.
    Instead(u16),
    /// The request is executed, but the client gets this status.
    After(u16),
}

/// A running cluster.
pub struct World {
    server: apiserver::Server,
    requests: Arc<Mutex<Vec<String>>>,
    fault: Arc<Mutex<Option<Fault>>>,
    controllers: Vec<tokio::task::JoinHandle<()>>,
}

impl Drop for World {
    fn drop(&mut self) {
        for controller in &self.controllers {
            controller.abort();
        }
    }
}

impl World {
    pub async fn start() -> Self {
        let server = apiserver::Server::open(apiserver::Config::in_memory())
            .await
            .unwrap();
        let client = server.client();
        install_definitions(&client).await;
        let controllers = vec![
            tokio::spawn(meet_claims(client.clone())),
            tokio::spawn(run_sandboxes(client)),
        ];
        Self {
            server,
            requests: Arc::default(),
            fault: Arc::default(),
            controllers,
        }
    }

    /// A connection that is not recorded.
    pub fn kubernetes(&self) -> Client {
        self.server.client()
    }

    pub fn claims(&self) -> Api<SandboxClaim> {
        Api::namespaced(self.kubernetes(), "default")
    }

    pub fn sandboxes(&self) -> Api<Sandbox> {
        Api::namespaced(self.kubernetes(), "default")
    }

    /// The connection of the client under test: its requests are recorded, and faults may be injected.
    pub fn recorded(&self) -> Client {
        let inner = self.kubernetes();
        let requests = Arc::clone(&self.requests);
        let fault = Arc::clone(&self.fault);
        let service = tower::service_fn(move |request: Request<Body>| {
            let target = request.uri().path_and_query().unwrap().to_string();
            requests
                .lock()
                .unwrap()
                .push(format!("{} {target}", request.method()));
            let injected = fault
                .lock()
                .unwrap()
                .as_mut()
                .and_then(|fault| fault(&request));
            let inner = inner.clone();
            async move {
                match injected {
                    None => inner.send(request).await,
                    Some(Injected::Instead(code)) => Ok(failure(code)),
                    Some(Injected::After(code)) => {
                        inner.send(request).await?;
                        Ok(failure(code))
                    }
                }
            }
        });
        Client::new(service, "default")
    }

    /// The requests to the API so far.
    pub fn requests(&self) -> Vec<String> {
        self.requests.lock().unwrap().clone()
    }

    /// Responds to the requests for which `fault` returns a status with that status.
    pub fn inject(&self, fault: impl FnMut(&Request<Body>) -> Option<Injected> + Send + 'static) {
        *self.fault.lock().unwrap() = Some(Box::new(fault));
    }

    pub fn heal(&self) {
        *self.fault.lock().unwrap() = None;
    }

    pub fn client(&self, options: Options) -> sdk::Client {
        sdk::Client::new(self.recorded(), options).unwrap()
    }

    pub async fn claim_names(&self) -> Vec<String> {
        let claims = self.claims().list(&ListParams::default()).await.unwrap();
        claims.iter().map(ResourceExt::name_any).collect()
    }

    pub async fn has_no_claims(&self) {
        assert_eq!(self.claim_names().await, Vec::<String>::new());
    }

    pub async fn wait_for_no_claims(&self) {
        testkit::eventually("no claims to be left", async || {
            self.claim_names().await.is_empty().then_some(())
        })
        .await;
    }
}

/// Options with short timeouts and pauses, for a router at this URL.
pub fn options(url: &str) -> Options {
    Options {
        connection: Connection::Direct { url: url.into() },
        sandbox_ready_timeout: Duration::from_secs(120),
        cleanup_timeout: Duration::from_secs(60),
        retry: RetryPolicy {
            base_backoff: Duration::from_millis(1),
            max_backoff: Duration::from_millis(4),
            ..RetryPolicy::default()
        },
        ..Options::default()
    }
}

pub fn is_delete(request: &Request<Body>) -> bool {
    request.method() == Method::DELETE
}

pub fn is_watch(request: &Request<Body>) -> bool {
    request
        .uri()
        .query()
        .unwrap_or_default()
        .contains("watch=true")
}

fn failure(code: u16) -> Response<Body> {
    let status = json!({
        "kind": "Status", "apiVersion": "v1", "status": "Failure", "code": code, "reason": "Injected", "message": "injected",
    });
    Response::builder()
        .status(code)
        .header("content-type", "application/json")
        .body(Body::from(serde_json::to_vec(&status).unwrap()))
        .unwrap()
}

pub async fn install_definitions(client: &Client) {
    let directory = concat!(env!("CARGO_MANIFEST_DIR"), "/../../deploy/crds");
    let definitions: Api<CustomResourceDefinition> = Api::all(client.clone());
    for entry in std::fs::read_dir(directory).unwrap() {
        let text = std::fs::read_to_string(entry.unwrap().path()).unwrap();
        let definition = serde_yaml_ng::from_str(&text).unwrap();
        definitions
            .create(&PostParams::default(), &definition)
            .await
            .unwrap();
    }
}

pub fn condition(kind: &str, status: &str, reason: &str, generation: Option<i64>) -> Value {
    json!({
        "type": kind, "status": status, "reason": reason, "message": format!("{kind} is {status}"),
        "observedGeneration": generation.unwrap_or(1), "lastTransitionTime": "2026-01-01T00:00:00Z",
    })
}

/// Fulfils each claim with a sandbox of another name, as a warm pool does.
async fn meet_claims(client: Client) {
    let mut claims = watcher(
        Api::<SandboxClaim>::all(client.clone()),
        watcher::Config::default(),
    )
    .applied_objects()
    .boxed();
    while let Some(claim) = claims.next().await {
        let Ok(claim) = claim else { continue };
        if claim.status.is_none() && claim.metadata.deletion_timestamp.is_none() {
            meet(&client, &claim).await;
        }
    }
}

async fn meet(client: &Client, claim: &SandboxClaim) {
    let namespace = claim.namespace().unwrap();
    let template = claim
        .spec
        .sandbox_template_ref
        .as_ref()
        .map(|template| template.name.as_str());
    let (ready, sandbox) = match template {
        Some(NEVER) => return,
        Some(FAILING) => {
            let mut ready = condition("Ready", "False", "DependenciesNotReady", Some(1));
            ready["message"] = "Pod exists with phase: Pending; container \"main\": ErrImagePull: registry.example does not answer".into();
            (ready, None)
        }
        Some(MISSING) => (
            condition("Ready", "False", "TemplateNotFound", Some(1)),
            None,
        ),
        _ => {
            let name = format!("warm-{}", claim.name_any());
            let sandbox: Sandbox = serde_json::from_value(json!({
                "apiVersion": "agents.x-k8s.io/v1beta1", "kind": "Sandbox",
                "metadata": {"name": name},
                "spec": {"podTemplate": {"spec": {"containers": [{"name": "c", "image": "host"}]}}},
            }))
            .unwrap();
            let api: Api<Sandbox> = Api::namespaced(client.clone(), &namespace);
            let _ = api.create(&PostParams::default(), &sandbox).await;
            let bound = ClaimedSandbox {
                name,
                pod_ips: vec!["127.0.0.1".into()],
            };
            (
                condition("Ready", "True", "DependenciesReady", Some(1)),
                Some(bound),
            )
        }
    };
    let status = SandboxClaimStatus {
        conditions: vec![serde_json::from_value(ready).unwrap()],
        sandbox,
    };
    let api: Api<SandboxClaim> = Api::namespaced(client.clone(), &namespace);
    let patch = Patch::Merge(json!({ "status": status }));
    // A test may have deleted the claim.
    let _ = api
        .patch_status(&claim.name_any(), &PatchParams::default(), &patch)
        .await;
}

/// Suspends and resumes sandboxes according to their specs, on a node that can only stop them.
async fn run_sandboxes(client: Client) {
    let mut sandboxes = watcher(
        Api::<Sandbox>::all(client.clone()),
        watcher::Config::default(),
    )
    .applied_objects()
    .boxed();
    while let Some(sandbox) = sandboxes.next().await {
        let Ok(sandbox) = sandbox else { continue };
        let generation = sandbox.metadata.generation;
        let suspended = sandbox.spec.suspension().is_requested();
        let status = if suspended {
            json!({"conditions": [
                condition("Ready", "False", "SandboxSuspended", generation),
                suspension(&sandbox),
            ], "podIPs": null})
        } else {
            json!({
                "conditions": [condition("Ready", "True", "DependenciesReady", generation)],
                "podIPs": ["127.0.0.1"],
            })
        };
        let observed = sandbox
            .status
            .as_ref()
            .and_then(|status| status.conditions.first());
        if observed.and_then(|condition| condition.observed_generation) == generation {
            continue;
        }
        let api: Api<Sandbox> = Api::namespaced(client.clone(), &sandbox.namespace().unwrap());
        let patch = Patch::Merge(json!({ "status": status }));
        let _ = api
            .patch_status(&sandbox.name_any(), &PatchParams::default(), &patch)
            .await;
        mirror(&client, &sandbox, suspended).await;
    }
}

fn suspension(sandbox: &Sandbox) -> Value {
    let (status, reason) = match sandbox.spec.suspension_type() {
        SuspensionType::Stop => ("True", "PodTerminated"),
        SuspensionType::Freeze => ("False", "FreezeNotSupported"),
        SuspensionType::Hibernate => ("False", "HibernateNotSupported"),
        SuspensionType::Unknown => ("False", "InvalidConfiguration"),
    };
    condition("Suspended", status, reason, sandbox.metadata.generation)
}

/// Copies the Ready condition of a sandbox to its claim.
async fn mirror(client: &Client, sandbox: &Sandbox, suspended: bool) {
    let name = sandbox.name_any();
    let Some(claim) = name.strip_prefix("warm-") else {
        return;
    };
    let ready = if suspended {
        condition("Ready", "False", "SandboxSuspended", Some(1))
    } else {
        condition("Ready", "True", "DependenciesReady", Some(1))
    };
    let api: Api<SandboxClaim> = Api::namespaced(client.clone(), &sandbox.namespace().unwrap());
    let patch = Patch::Merge(json!({"status": {"conditions": [ready]}}));
    let _ = api
        .patch_status(claim, &PatchParams::default(), &patch)
        .await;
}

//! A cluster in this process: the embedded API server, the controllers, and a node that marks pods Ready.

#![allow(dead_code, reason = "each test binary uses its own part of this")]

mod running;

use std::collections::HashMap;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use api::claim::{ClaimShutdownPolicy, Lifecycle, WarmPoolRef};
use api::conditions::{self, ConditionType};
use api::template::SandboxTemplateRef;
use api::warm_pool::{UpdateStrategy, UpdateStrategyKind};
use api::{
    Sandbox, SandboxClaim, SandboxClaimSpec, SandboxTemplate, SandboxWarmPool, SandboxWarmPoolSpec,
};
use controllers::clock::Clock;
use controllers::instrumentation::{
    ClaimReadiness, Instrumentation, Provisioning, RequestReport, Verb,
};
use controllers::{Config, Parts};
use k8s_openapi::api::core::v1::{Container, EnvVar, Pod};
use k8s_openapi::api::events::v1::Event;
use kube::api::{DeleteParams, ListParams, Patch, PatchParams, PostParams};
use kube::{Api, Client};
use planner::owner::controller_of;
use running::Running;
use serde_json::{Value, json};
use testkit::cluster::Kind;
use testkit::node::mark_pods_ready;
use testkit::writes::Writes;
use testkit::{Tap, eventually};
use tokio::task::JoinHandle;

pub const NAMESPACE: &str = "scenario";

/// What the controllers reported.
#[derive(Debug, Default)]
pub struct Observations {
    requests: Mutex<HashMap<(String, Verb), usize>>,
    provisioned: Mutex<Vec<(&'static str, Option<String>, bool)>>,
    ready: Mutex<Vec<(&'static str, bool)>>,
    since_request: Mutex<Vec<Option<Duration>>>,
}

impl Instrumentation for Observations {
    fn requested(&self, report: &RequestReport<'_>) {
        if matches!(report.code, Some(200..300)) {
            let mut requests = self.requests.lock().unwrap();
            let request = (report.kind.to_owned(), report.verb);
            *requests.entry(request).or_default() += 1;
        }
    }

    fn claim_provisioned(&self, provisioning: &Provisioning<'_>) {
        self.provisioned.lock().unwrap().push((
            provisioning.launch.as_str(),
            provisioning.pool.map(str::to_owned),
            provisioning.was_ready,
        ));
    }

    fn claim_ready(&self, readiness: &ClaimReadiness<'_>) {
        let since_request = readiness.since_request;
        self.since_request.lock().unwrap().push(since_request);
        let measured = readiness.since_first_observed.is_some();
        self.ready
            .lock()
            .unwrap()
            .push((readiness.launch.as_str(), measured));
    }
}

impl Observations {
    pub fn count(&self, kind: &str, verb: Verb) -> usize {
        let requests = self.requests.lock().unwrap();
        requests.get(&(kind.to_owned(), verb)).copied().unwrap_or(0)
    }

    pub fn provisioned(&self) -> Vec<(&'static str, Option<String>, bool)> {
        self.provisioned.lock().unwrap().clone()
    }

    /// How long ago each claim that became Ready was asked for, if that is known.
    pub fn since_request(&self) -> Vec<Option<Duration>> {
        self.since_request.lock().unwrap().clone()
    }

    pub fn ready(&self) -> Vec<(&'static str, bool)> {
        self.ready.lock().unwrap().clone()
    }
}

pub struct Cluster {
    server: testkit::Cluster,
    pub client: Client,
    /// What its controllers reported.
    pub observations: Arc<Observations>,
    node: JoinHandle<()>,
}

impl Cluster {
    pub async fn start() -> Self {
        let server = testkit::Cluster::start().await;
        server.create_namespace(NAMESPACE).await;
        let client = server.client();
        let node = tokio::spawn(mark_pods_ready(client.clone()));
        Self {
            server,
            client,
            observations: Arc::default(),
            node,
        }
    }

    /// Starts the controllers with the defaults of the command line.
    pub fn controllers(&self) -> Running {
        self.controllers_by(self.client.clone(), Clock::default())
    }

    /// Starts the controllers with a tap between them and the server.
    pub fn tapped_controllers(&self) -> (Tap, Running) {
        let (tap, client) = Tap::on(self.client.clone());
        (tap, self.controllers_by(client, Clock::default()))
    }

    /// Starts the controllers with a client and a clock of the test's own.
    pub fn controllers_by(&self, client: Client, clock: Clock) -> Running {
        let config = Config {
            extensions: true,
            unused_policy_grace: Duration::ZERO,
            ..Config::default()
        };
        let parts = Parts {
            instrumentation: self.observations.clone(),
            clock,
            ..Parts::new(client, config)
        };
        Running::start(parts, || {})
    }

    /// Makes the template `py` and the pool `warm` of it, and waits until the pool is full.
    pub async fn full_pool(&self, size: i32) {
        self.create(&template("py")).await;
        self.create(&pool("warm", "py", size)).await;
        self.pool_ready("warm", size).await;
    }

    pub async fn stop(self) {
        self.node.abort();
        self.server.stop().await;
    }

    /// Stops the fake node: pods no longer become Ready.
    pub fn lose_node(&self) {
        self.node.abort();
    }

    /// Waits for an event of this reason on an object of this name.
    pub async fn event(&self, regarding: &str, reason: &str) -> Event {
        eventually(&format!("event {reason} on {regarding}"), async || {
            let mut events = self.list::<Event>().await.into_iter();
            events.find(|event| {
                let object = event.regarding.as_ref();
                event.reason.as_deref() == Some(reason)
                    && object.and_then(|object| object.name.as_deref()) == Some(regarding)
            })
        })
        .await
    }

    pub fn api<K: Kind>(&self) -> Api<K> {
        Api::namespaced(self.client.clone(), NAMESPACE)
    }

    pub async fn create<K: Kind>(&self, object: &K) -> K {
        self.api::<K>()
            .create(&PostParams::default(), object)
            .await
            .unwrap()
    }

    pub async fn get<K: Kind>(&self, name: &str) -> Option<K> {
        self.api::<K>().get_opt(name).await.unwrap()
    }

    pub async fn list<K: Kind>(&self) -> Vec<K> {
        self.api::<K>()
            .list(&ListParams::default())
            .await
            .unwrap()
            .items
    }

    pub async fn patch<K: Kind>(&self, name: &str, patch: Value) -> K {
        self.api::<K>()
            .patch(name, &PatchParams::default(), &Patch::Merge(patch))
            .await
            .unwrap()
    }

    pub async fn delete<K: Kind>(&self, name: &str) {
        self.api::<K>()
            .delete(name, &DeleteParams::default())
            .await
            .unwrap();
    }

    pub async fn gone<K: Kind>(&self, name: &str) {
        eventually(&format!("{name} to be gone"), async || {
            self.get::<K>(name).await.is_none().then_some(())
        })
        .await;
    }

    pub async fn claim_with(&self, name: &str, status: &str, reason: &str) -> SandboxClaim {
        eventually(
            &format!("claim {name} to be {status}/{reason}"),
            async || {
                let claim = self.get::<SandboxClaim>(name).await?;
                (ready_of(&claim)? == (status.to_owned(), reason.to_owned())).then_some(claim)
            },
        )
        .await
    }

    pub async fn claim_ready(&self, name: &str) -> SandboxClaim {
        self.claim_with(name, "True", "DependenciesReady").await
    }

    pub async fn pool_ready(&self, name: &str, count: i32) -> SandboxWarmPool {
        eventually(&format!("pool {name} to have {count} ready"), async || {
            let pool = self.get::<SandboxWarmPool>(name).await?;
            let status = pool.status.clone()?;
            (status.ready_replicas == count && status.replicas == count).then_some(pool)
        })
        .await
    }

    /// The sandbox that a claim holds.
    pub async fn sandbox_of(&self, claim: &SandboxClaim) -> Sandbox {
        let name = claim.status.as_ref().unwrap().sandbox.as_ref().unwrap();
        self.get(&name.name).await.unwrap()
    }

    /// The sandboxes that a pool holds.
    pub async fn members(&self, pool: &str) -> Vec<Sandbox> {
        let mut members = self.list::<Sandbox>().await;
        members.retain(|sandbox| {
            sandbox.metadata.deletion_timestamp.is_none()
                && controller_of(&sandbox.metadata)
                    .is_some_and(|owner| owner.kind == "SandboxWarmPool" && owner.name == pool)
        });
        members
    }

    /// The requests to the API server, once no more arrive.
    pub async fn writes_when_quiet(&self) -> Writes {
        // Counts consecutive polls without a new request, not time: a slow machine delays the controllers as well.
        const QUIET_LOOKS: u32 = 100;
        let mut last: Option<(Writes, u32)> = None;
        eventually("the API server to be left alone", async || {
            let writes = Writes::so_far(&self.client).await.unwrap();
            match &mut last {
                Some((before, looks)) if *before == writes => {
                    *looks += 1;
                    (*looks >= QUIET_LOOKS).then_some(writes)
                }
                _ => {
                    last = Some((writes, 0));
                    None
                }
            }
        })
        .await
    }

    pub async fn finish_pod(&self, name: &str, phase: &str) {
        let status = json!({ "status": { "phase": phase, "conditions": [{ "type": "Ready", "status": "False" }] } });
        self.api::<Pod>()
            .patch_status(name, &PatchParams::default(), &Patch::Merge(status))
            .await
            .unwrap();
    }
}

pub fn ready_of(claim: &SandboxClaim) -> Option<(String, String)> {
    let status = claim.status.as_ref()?;
    let ready = conditions::find(&status.conditions, ConditionType::Ready)?;
    Some((ready.status.clone(), ready.reason.clone()))
}

pub fn message_of(claim: &SandboxClaim) -> String {
    let status = claim.status.as_ref().unwrap();
    let ready = conditions::find(&status.conditions, ConditionType::Ready).unwrap();
    ready.message.clone()
}

pub fn template(name: &str) -> SandboxTemplate {
    let mut template = SandboxTemplate::new(name, api::SandboxTemplateSpec::default());
    template.spec.pod_template.spec_mut().containers = vec![Container {
        name: "main".into(),
        image: Some("image-v1".into()),
        env: Some(vec![EnvVar {
            name: "MODE".into(),
            value: Some("template".into()),
            value_from: None,
        }]),
        ..Container::default()
    }];
    template
}

pub fn pool(name: &str, template: &str, replicas: i32) -> SandboxWarmPool {
    SandboxWarmPool::new(
        name,
        SandboxWarmPoolSpec {
            replicas: Some(replicas),
            sandbox_template_ref: SandboxTemplateRef {
                name: template.into(),
            },
            update_strategy: None,
        },
    )
}

pub fn with_strategy(mut pool: SandboxWarmPool, kind: UpdateStrategyKind) -> SandboxWarmPool {
    pool.spec.update_strategy = Some(UpdateStrategy {
        kind: Some(kind),
        max_unavailable: None,
    });
    pool
}

pub fn claim(name: &str, template: &str) -> SandboxClaim {
    SandboxClaim::new(
        name,
        SandboxClaimSpec {
            sandbox_template_ref: Some(SandboxTemplateRef {
                name: template.into(),
            }),
            ..SandboxClaimSpec::default()
        },
    )
}

pub fn claim_from(name: &str, pool: &str) -> SandboxClaim {
    SandboxClaim::new(
        name,
        SandboxClaimSpec {
            warm_pool_ref: Some(WarmPoolRef { name: pool.into() }),
            ..SandboxClaimSpec::default()
        },
    )
}

pub fn expiring(mut claim: SandboxClaim, policy: ClaimShutdownPolicy) -> SandboxClaim {
    claim.spec.lifecycle = Some(Lifecycle {
        ttl_seconds_after_finished: Some(0),
        shutdown_policy: Some(policy),
        ..Lifecycle::default()
    });
    claim
}

pub fn image_of(sandbox: &Sandbox) -> &str {
    sandbox.spec.pod_template.spec.containers[0]
        .image
        .as_deref()
        .unwrap_or_default()
}

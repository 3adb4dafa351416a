//! A cluster in this process with the controllers of the OpenKruise kinds, and a node that marks pods Ready.

use std::collections::BTreeMap;
use std::net::IpAddr;
use std::sync::{Arc, Mutex};
use std::time::Instant;

use api::Sandbox;
use api::conditions::{self, ConditionType};
use api::kruise::{ClaimPhase, SandboxClaim, SandboxSet};
use controllers::initialise::{Initialise, Settings};
use controllers::{Config, Parts};
use futures::FutureExt;
use futures::future::BoxFuture;
use kube::api::{DeleteParams, ListParams, Patch, PatchParams, PostParams};
use kube::{Client, ResourceExt};
use planner::kruise_claim::Initialisation;
use planner::owner::{controller_of, is_controlled_by};
use serde_json::{Value, json};
use testkit::cluster::{Kind, object};
use testkit::{Cluster, FakeNode, eventually};

use crate::running::Running;

/// A call to a sandbox's runtime.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Call {
    pub sandbox: IpAddr,
    pub token: String,
    pub variables: BTreeMap<String, String>,
}

type Answer = Box<dyn Fn(usize) -> Initialisation + Send + Sync>;

/// Runtimes whose responses the test determines, by the number of earlier calls.
pub struct Runtimes {
    pub calls: Mutex<Vec<Call>>,
    answer: Answer,
}

impl std::fmt::Debug for Runtimes {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter.write_str("Runtimes")
    }
}

impl Initialise for Runtimes {
    fn initialise<'a>(
        &'a self,
        sandbox: IpAddr,
        settings: &'a Settings<'a>,
    ) -> BoxFuture<'a, Initialisation> {
        let mut calls = self.calls.lock().unwrap();
        let before = calls.len();
        calls.push(Call {
            sandbox,
            token: settings.access_token.to_owned(),
            variables: settings.env_vars.clone(),
        });
        std::future::ready((self.answer)(before)).boxed()
    }
}

/// Controllers of their own caches and queues, on this client.
pub fn controllers_on(client: Client, initialise: Arc<dyn Initialise>) -> Running {
    let config = Config {
        extensions: true,
        kruise: true,
        ..Config::default()
    };
    let parts = Parts {
        initialise,
        ..Parts::new(client, config)
    };
    Running::start(parts, || {})
}

pub struct Scene {
    pub cluster: Cluster,
    pub runtimes: Arc<Runtimes>,
    node: Option<FakeNode>,
    controllers: Option<Running>,
}

impl Scene {
    /// A cluster whose sandboxes all let themselves be initialised.
    pub async fn start() -> Self {
        Self::start_with(|_| Initialisation::Done).await
    }

    pub async fn start_with(
        answer: impl Fn(usize) -> Initialisation + Send + Sync + 'static,
    ) -> Self {
        let cluster = Cluster::start().await;
        let runtimes = Arc::new(Runtimes {
            calls: Mutex::default(),
            answer: Box::new(answer),
        });
        let node = FakeNode::start(cluster.client());
        let controllers = controllers_on(cluster.client(), runtimes.clone());
        Self {
            cluster,
            runtimes,
            node: Some(node),
            controllers: Some(controllers),
        }
    }

    pub async fn stop(mut self) {
        if let Some(controllers) = self.controllers.take() {
            controllers.stop().await;
        }
        drop(self.node.take());
        self.cluster.stop().await;
    }

    /// From now on no pod becomes Ready.
    pub fn stop_node(&mut self) {
        drop(self.node.take());
    }

    /// Ends the controllers as a crash would, and starts others.
    pub async fn crash_and_restart(&mut self) {
        self.controllers.take().unwrap().kill().await;
        self.controllers = Some(controllers_on(self.cluster.client(), self.runtimes.clone()));
    }

    pub async fn create<K: Kind>(&self, manifest: Value) -> K {
        self.try_create(manifest).await.unwrap()
    }

    pub async fn try_create<K: Kind>(&self, manifest: Value) -> Result<K, kube::Error> {
        let created: K = object(manifest);
        self.cluster
            .api::<K>()
            .create(&PostParams::default(), &created)
            .await
    }

    pub async fn try_patch<K: Kind>(&self, name: &str, patch: Value) -> Result<K, kube::Error> {
        self.cluster
            .api::<K>()
            .patch(name, &PatchParams::default(), &Patch::Merge(patch))
            .await
    }

    /// Sets a claim's timeout to a few seconds from now. The timeout counts from the claim's start, which is not before `began`. A claim
    /// that is created with a short timeout could time out before its first batch on a slow machine.
    pub async fn time_out(&self, name: &str, began: Instant) {
        let timeout = format!("{}s", began.elapsed().as_secs() + 3);
        let patch = json!({ "spec": { "claimTimeout": timeout } });
        self.try_patch::<SandboxClaim>(name, patch).await.unwrap();
    }

    pub async fn delete<K: Kind>(&self, name: &str) {
        let objects = self.cluster.api::<K>();
        objects
            .delete(name, &DeleteParams::default())
            .await
            .unwrap();
    }

    pub async fn sandboxes(&self, selector: &str) -> Vec<Sandbox> {
        let listed = ListParams::default().labels(selector);
        self.cluster
            .api::<Sandbox>()
            .list(&listed)
            .await
            .unwrap()
            .items
    }

    pub async fn held_by(&self, claim: &SandboxClaim) -> Vec<Sandbox> {
        let uid = claim.uid().unwrap();
        let mut sandboxes = self.sandboxes("").await;
        sandboxes.retain(|sandbox| is_controlled_by(&sandbox.metadata, &uid));
        sandboxes
    }

    /// A set of one container, once it is full.
    pub async fn full_set(&self, name: &str, replicas: i32) -> SandboxSet {
        self.create::<SandboxSet>(set(name, replicas)).await;
        self.set_available(name, replicas).await
    }

    pub async fn set_available(&self, name: &str, count: i32) -> SandboxSet {
        let is_so = move |set: &SandboxSet| {
            let status = set.status.as_ref();
            status.is_some_and(|it| it.available_replicas == count && it.replicas == count)
        };
        self.cluster.until(name, "to be full", is_so).await
    }

    pub async fn completed(&self, name: &str) -> SandboxClaim {
        self.cluster
            .until(name, "to be Completed", is_completed)
            .await
    }

    pub async fn members(&self, set: &str) -> Vec<Sandbox> {
        let mut members = self
            .sandboxes(&format!("agents.kruise.io/sandbox-pool={set}"))
            .await;
        members.retain(|sandbox| {
            let owner = controller_of(&sandbox.metadata);
            owner.is_some_and(|owner| owner.kind == "SandboxSet" && owner.name == set)
                && sandbox.metadata.deletion_timestamp.is_none()
        });
        members
    }

    /// Waits until a set has this many members. Its status may be older.
    pub async fn until_members(&self, set: &str, count: usize) {
        eventually(&format!("{set} to have {count} members"), async || {
            (self.members(set).await.len() == count).then_some(())
        })
        .await;
    }

    pub async fn until_held(&self, claim: &SandboxClaim, count: usize) -> Vec<Sandbox> {
        let what = format!("{} to hold {count}", claim.name_any());
        eventually(&what, async || {
            let held = self.held_by(claim).await;
            (held.len() == count).then_some(held)
        })
        .await
    }
}

pub fn is_completed(claim: &SandboxClaim) -> bool {
    let status = claim.status.as_ref();
    status.is_some_and(|status| status.phase == Some(ClaimPhase::Completed))
}

pub fn claimed(claim: &SandboxClaim) -> i32 {
    claim.status.as_ref().unwrap().claimed_replicas
}

/// The status and reason of a claim's condition.
pub fn condition(claim: &SandboxClaim) -> (String, String) {
    let status = claim.status.as_ref().unwrap();
    let condition = conditions::find(&status.conditions, ConditionType::Completed).unwrap();
    (condition.status.clone(), condition.reason.clone())
}

pub fn set(name: &str, replicas: i32) -> Value {
    json!({
        "apiVersion": "agents.kruise.io/v1alpha1",
        "kind": "SandboxSet",
        "metadata": { "name": name },
        "spec": {
            "replicas": replicas,
            "template": { "spec": { "containers": [{ "name": "main", "image": "v1" }] } },
        },
    })
}

/// A claim with these fields beside the name of its set.
pub fn claim(name: &str, set: &str, fields: Value) -> Value {
    let mut spec = fields;
    spec["templateName"] = Value::from(set);
    json!({
        "apiVersion": "agents.kruise.io/v1alpha1",
        "kind": "SandboxClaim",
        "metadata": { "name": name },
        "spec": spec,
    })
}

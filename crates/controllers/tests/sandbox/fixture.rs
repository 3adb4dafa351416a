//! A cluster with a node and the sandbox controller.

use api::conditions::{self, ConditionType};
use api::{Sandbox, SandboxStatus};
use controllers::clock::Clock;
use controllers::{Config, Parts};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{Condition, Time};
use kube::api::{Patch, PatchParams};
use serde_json::Value;
use testkit::node::Behaviour;
use testkit::{Cluster, FakeClock, FakeNode, Tap};

use crate::running::Running;

pub struct Fixture {
    pub cluster: Cluster,
    pub clock: FakeClock,
    /// Between the controllers and the server.
    pub tap: Tap,
    controllers: Running,
    _node: FakeNode,
}

impl Fixture {
    pub async fn start() -> Self {
        Self::start_with(Behaviour::Ready, Config::default()).await
    }

    pub async fn start_with(behaviour: Behaviour, config: Config) -> Self {
        let cluster = Cluster::start().await;
        let node = FakeNode::start_with(cluster.client(), behaviour);
        Self::assemble(cluster, node, config).await
    }

    pub async fn assemble(cluster: Cluster, node: FakeNode, config: Config) -> Self {
        let clock = FakeClock::at(k8s_openapi::jiff::Timestamp::now());
        let (tap, client) = Tap::on(cluster.client());
        let read = clock.clone();
        let parts = Parts {
            clock: Clock::new(move || read.now()),
            ..Parts::new(client, config)
        };
        let (ready, is_ready) = tokio::sync::oneshot::channel();
        let controllers = Running::start(parts, move || {
            let _ = ready.send(());
        });
        is_ready.await.expect("controllers become ready");
        Self {
            cluster,
            clock,
            tap,
            controllers,
            _node: node,
        }
    }

    /// Stops everything, and fails if the controllers did not stop by themselves.
    pub async fn stop(self) {
        self.controllers.stop().await;
        self.cluster.stop().await;
    }

    pub async fn patch_sandbox(&self, name: &str, patch: Value) -> Sandbox {
        self.cluster
            .api::<Sandbox>()
            .patch(name, &PatchParams::default(), &Patch::Merge(patch))
            .await
            .expect("a sandbox is patched")
    }

    /// Waits until the sandbox's Ready condition has this reason and message, and returns the sandbox.
    pub async fn until_reported(&self, name: &str, reason: &str, message: &str) -> Sandbox {
        let what = format!("Ready to say {reason}: {message}");
        self.cluster
            .until(name, &what, |sandbox: &Sandbox| {
                condition(sandbox, ConditionType::Ready)
                    .is_some_and(|ready| ready.reason == reason && ready.message == message)
            })
            .await
    }

    pub async fn until_ready(&self, name: &str) -> Sandbox {
        self.cluster
            .until(name, "to be ready", |sandbox: &Sandbox| {
                conditions::is_true(&status(sandbox).conditions, ConditionType::Ready)
            })
            .await
    }

    /// A time this many seconds from the controllers' now.
    pub fn in_seconds(&self, seconds: i64) -> Time {
        let span = k8s_openapi::jiff::SignedDuration::from_secs(seconds);
        Time(self.clock.now().checked_add(span).expect("a time near now"))
    }
}

pub fn status(sandbox: &Sandbox) -> SandboxStatus {
    sandbox.status.clone().unwrap_or_default()
}

pub fn condition(sandbox: &Sandbox, kind: ConditionType) -> Option<Condition> {
    conditions::find(&status(sandbox).conditions, kind).cloned()
}

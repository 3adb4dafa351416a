//! A small model of the API: everything that one sandbox may touch.

use std::sync::{Arc, Mutex};

use api::conditions::{self, ConditionType};
use api::{Sandbox, SandboxSpec, SandboxStatus};
use k8s_openapi::api::core::v1::{
    Container, PersistentVolumeClaim, Pod, PodCondition, PodIP, PodSpec, PodStatus, Service,
    ServiceSpec,
};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{Condition, ObjectMeta, OwnerReference};
use k8s_openapi::jiff::{SignedDuration, Timestamp};

use futures::FutureExt;

use super::super::{
    Adoption, ObservedPod, Problem, SandboxFacts, SandboxPlan, Settings, decide, reconcile,
};
use super::cluster::WorldPass;
use crate::owner::controller_reference;

pub const NAME: &str = "box";
pub const NAMESPACE: &str = "team";
pub const HASH: &str = "70c67e32";

pub fn settings() -> Settings<'static> {
    Settings {
        cluster_domain: "cluster.local",
        adoption: Adoption::Any,
    }
}

pub fn other_owner() -> OwnerReference {
    OwnerReference {
        api_version: "apps/v1".to_owned(),
        kind: "ReplicaSet".to_owned(),
        name: "someone".to_owned(),
        uid: "uid-of-someone".to_owned(),
        controller: Some(true),
        block_owner_deletion: None,
    }
}

/// An earlier sandbox of the same name, which is gone.
pub fn predecessor() -> OwnerReference {
    OwnerReference {
        api_version: "agents.x-k8s.io/v1alpha1".to_owned(),
        kind: "Sandbox".to_owned(),
        name: NAME.to_owned(),
        uid: "uid-of-predecessor".to_owned(),
        ..other_owner()
    }
}

pub fn sandbox(spec: SandboxSpec) -> Sandbox {
    let mut sandbox = Sandbox::new(NAME, spec);
    sandbox.metadata.namespace = Some(NAMESPACE.to_owned());
    sandbox.metadata.uid = Some("uid-of-box".to_owned());
    sandbox.metadata.resource_version = Some("1".to_owned());
    sandbox.metadata.generation = Some(1);
    sandbox.spec.pod_template.spec_mut().containers = vec![Container {
        name: "main".to_owned(),
        image: Some("host".to_owned()),
        ..Container::default()
    }];
    sandbox
}

/// An object without an owner, as the API server would hold it.
pub fn metadata(name: &str) -> ObjectMeta {
    ObjectMeta {
        name: Some(name.to_owned()),
        namespace: Some(NAMESPACE.to_owned()),
        uid: Some(format!("uid-of-{name}-0")),
        resource_version: Some("1".to_owned()),
        ..ObjectMeta::default()
    }
}

pub fn pod(name: &str, phase: &str) -> Pod {
    Pod {
        metadata: metadata(name),
        spec: Some(PodSpec {
            node_name: Some("node-1".to_owned()),
            ..PodSpec::default()
        }),
        status: Some(PodStatus {
            phase: Some(phase.to_owned()),
            ..PodStatus::default()
        }),
    }
}

pub fn ready_pod(name: &str) -> Pod {
    let mut pod = pod(name, "Running");
    make_ready(&mut pod);
    pod
}

pub fn make_ready(pod: &mut Pod) {
    let status = pod.status.get_or_insert_default();
    status.phase = Some("Running".to_owned());
    status.conditions = Some(vec![PodCondition {
        type_: "Ready".to_owned(),
        status: "True".to_owned(),
        ..PodCondition::default()
    }]);
    status.pod_ips = Some(vec![PodIP {
        ip: "10.0.0.7".to_owned(),
    }]);
}

pub fn service(cluster_ip: Option<&str>) -> Service {
    Service {
        metadata: metadata(NAME),
        spec: Some(ServiceSpec {
            cluster_ip: cluster_ip.map(str::to_owned),
            ..ServiceSpec::default()
        }),
        status: None,
    }
}

/// What exists, and the time.
#[derive(Clone, Debug)]
pub struct World {
    pub sandbox: Option<Sandbox>,
    pub pods: Vec<Pod>,
    pub service: Option<Service>,
    pub volume_claims: Vec<PersistentVolumeClaim>,
    pub adoption: Adoption,
    pub now: Timestamp,
    version: u64,
}

impl World {
    pub fn new(sandbox: Sandbox) -> Self {
        Self {
            sandbox: Some(sandbox),
            pods: Vec::new(),
            service: None,
            volume_claims: Vec::new(),
            adoption: Adoption::Any,
            now: Timestamp::from_second(1_776_081_600).unwrap(),
            version: 100,
        }
    }

    pub fn with_pod(mut self, pod: Pod) -> Self {
        self.pods.push(pod);
        self
    }

    /// Adds a pod that the sandbox controls and whose metadata is as the sandbox wants it.
    pub fn with_own_pod(mut self, pod: Pod) -> Self {
        self.pods.push(pod);
        self.settle();
        self
    }

    pub fn with_service(mut self, service: Service) -> Self {
        self.service = Some(service);
        self
    }

    pub fn sandbox(&self) -> &Sandbox {
        self.sandbox.as_ref().expect("the sandbox still exists")
    }

    pub fn spec_mut(&mut self) -> &mut SandboxSpec {
        &mut self
            .sandbox
            .as_mut()
            .expect("the sandbox still exists")
            .spec
    }

    pub fn status(&self) -> SandboxStatus {
        self.sandbox().status.clone().unwrap_or_default()
    }

    pub fn condition(&self, kind: ConditionType) -> Option<Condition> {
        conditions::find(&self.status().conditions, kind).cloned()
    }

    /// Status, reason and message of the Ready condition.
    pub fn ready(&self) -> (String, String, String) {
        let ready = self
            .condition(ConditionType::Ready)
            .expect("a status has a Ready condition");
        (ready.status, ready.reason, ready.message)
    }

    pub fn owner(&self) -> OwnerReference {
        controller_reference(self.sandbox())
    }

    pub fn advance(&mut self, seconds: i64) {
        self.now = self
            .now
            .checked_add(SignedDuration::from_secs(seconds))
            .unwrap();
    }

    pub fn observed(&self) -> SandboxFacts {
        SandboxFacts {
            sandbox: Arc::new(self.sandbox().clone()),
            pods: self.pods.iter().map(read).map(Arc::new).collect(),
            service: self.service.clone().map(Arc::new),
            volume_claims: self.volume_claims.iter().cloned().map(Arc::new).collect(),
        }
    }

    pub fn decide(&self) -> SandboxPlan {
        decide(&self.observed(), &self.settings(), self.now)
    }

    pub fn problems(&self) -> Vec<Problem> {
        self.decide().problems
    }

    pub fn settings(&self) -> Settings<'static> {
        Settings {
            adoption: self.adoption,
            ..settings()
        }
    }

    /// One pass, as the controller runs it. Returns its plan.
    pub fn reconcile(&mut self) -> SandboxPlan {
        let (plan, sandbox) = (self.decide(), self.sandbox().clone());
        let pass = WorldPass(Mutex::new(self));
        let ended = reconcile(&pass, &sandbox).now_or_never();
        ended.expect("every request is answered").unwrap();
        plan
    }

    /// Reconciles until nothing is left to do.
    pub fn settle(&mut self) {
        for _ in 0..10 {
            if self.sandbox.is_none() {
                return;
            }
            let before = self.status();
            let plan = self.reconcile();
            if plan.effects.is_empty() && self.sandbox.is_some() && self.status() == before {
                return;
            }
        }
        panic!("does not settle: {:#?}", self.decide());
    }

    pub fn next_version(&mut self) -> u64 {
        self.version += 1;
        self.version
    }
}

/// A pod as a controller reads it from the API server.
pub fn read(pod: &Pod) -> ObservedPod {
    serde_json::from_value(serde_json::to_value(pod).unwrap()).unwrap()
}

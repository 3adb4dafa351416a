//! The API server, with the pools and claims that there can be.

use std::collections::BTreeMap;

use agent_sandbox_planner::owner::{controller_of, is_controlled_by};
use api::claim::{ClaimShutdownPolicy, Lifecycle, WarmPoolRef};
use api::conditions::{self, ConditionType, Finding, Reason};
use api::template::SandboxTemplateRef;
use api::warm_pool::{UpdateStrategy, UpdateStrategyKind};
use api::{Sandbox, SandboxClaim, SandboxTemplate, SandboxWarmPool, labels};
use k8s_openapi::api::core::v1::Container;
use k8s_openapi::api::networking::v1::NetworkPolicy;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use k8s_openapi::jiff::Timestamp;
use kube::ResourceExt;

use super::objects::Cluster;
use super::process::Process;
use super::writes::NAMESPACE;

/// The API server: the only truth.
pub struct Server {
    revision: u64,
    /// The time, in seconds.
    pub time: i64,
    pub claims: BTreeMap<String, SandboxClaim>,
    pub sandboxes: BTreeMap<String, Sandbox>,
    pub pools: BTreeMap<String, SandboxWarmPool>,
    pub(super) templates: BTreeMap<String, SandboxTemplate>,
    /// Of older controllers; the model has none.
    pub(super) network_policies: BTreeMap<String, NetworkPolicy>,
}

/// The pools there are, unless they are deleted: their names, their templates, and whether they replace what is outdated at once.
pub(super) const POOLS: [(&str, &str, UpdateStrategyKind); 2] = [
    ("pool-a", "py", UpdateStrategyKind::OnReplenish),
    ("pool-b", "js", UpdateStrategyKind::Recreate),
];

/// A claim that takes no warm sandbox.
const COLD: &str = "c5";

/// Where a claim's sandbox comes from: by template or from a pool, of either template.
fn source_of(name: &str) -> (Option<&'static str>, Option<&'static str>) {
    match name {
        "c0" | "c1" | COLD => (Some("py"), None),
        "c2" => (Some("js"), None),
        "c3" => (None, Some("pool-a")),
        _ => (None, Some("pool-b")),
    }
}

impl Server {
    /// A server with every pool at this size.
    pub fn new(replicas: i32) -> Self {
        let mut server = Self {
            revision: 1,
            time: 1_000,
            claims: BTreeMap::new(),
            sandboxes: BTreeMap::new(),
            pools: BTreeMap::new(),
            templates: BTreeMap::new(),
            network_policies: BTreeMap::new(),
        };
        for (index, (_, template, _)) in POOLS.iter().enumerate() {
            server.edit_template(index);
            assert!(server.templates.contains_key(*template));
            server.create_pool(index, replicas);
        }
        server
    }

    /// Makes a template, or changes what its sandboxes run.
    pub fn edit_template(&mut self, index: usize) {
        let image = self.next_revision();
        let name = POOLS[index].1;
        let template = self.templates.entry(name.into()).or_default();
        template.metadata.name = Some(name.into());
        template.metadata.namespace = Some(NAMESPACE.into());
        template.spec.pod_template.spec_mut().containers = vec![Container {
            name: "main".into(),
            image: Some(image),
            ..Container::default()
        }];
    }

    /// Makes a pool, unless it is there.
    pub fn create_pool(&mut self, index: usize, replicas: i32) {
        let (name, template, strategy) = POOLS[index];
        if self.pools.contains_key(name) {
            return;
        }
        let revision = self.next_revision();
        let mut pool = SandboxWarmPool::default();
        pool.metadata.name = Some(name.into());
        pool.metadata.namespace = Some(NAMESPACE.into());
        pool.metadata.uid = Some(format!("pool-{revision}"));
        pool.spec.replicas = Some(replicas);
        pool.spec.sandbox_template_ref = SandboxTemplateRef {
            name: template.into(),
        };
        pool.spec.update_strategy = Some(UpdateStrategy {
            kind: Some(strategy),
            max_unavailable: None,
        });
        self.pools.insert(name.into(), pool);
    }

    pub fn scale(&mut self, index: usize, replicas: i32) {
        if let Some(pool) = self.pools.get_mut(POOLS[index].0) {
            pool.spec.replicas = Some(replicas);
        }
    }

    /// Deletes a pool and what it controls, as garbage collection does.
    pub fn delete_pool(&mut self, index: usize) {
        self.pools.remove(POOLS[index].0);
        self.collect_ownerless();
    }

    /// Has a claim end now, in one way or another.
    pub fn expire(&mut self, name: &str, policy: ClaimShutdownPolicy) {
        let (revision, now) = (self.next_revision(), self.now());
        if let Some(claim) = self.claims.get_mut(name) {
            claim.spec.lifecycle = Some(Lifecycle {
                shutdown_time: Some(Time(now)),
                shutdown_policy: Some(policy),
                ..Lifecycle::default()
            });
            claim.metadata.resource_version = Some(revision);
        }
    }

    pub fn create_claim(&mut self, name: &str) {
        if self.claims.contains_key(name) {
            return;
        }
        let mut claim = SandboxClaim::default();
        let revision = self.next_revision();
        claim.metadata.name = Some(name.into());
        claim.metadata.namespace = Some(NAMESPACE.into());
        claim.metadata.uid = Some(format!("claim-{revision}"));
        claim.metadata.resource_version = Some(revision);
        let (template, pool) = source_of(name);
        claim.spec.sandbox_template_ref =
            template.map(|name| SandboxTemplateRef { name: name.into() });
        claim.spec.warm_pool_ref = pool.map(|name| WarmPoolRef { name: name.into() });
        claim.spec.warmpool = (name == COLD).then(|| "none".into());
        self.claims.insert(name.into(), claim);
    }

    /// A user writes another binding on a claim, or takes it off.
    pub fn edit_binding(&mut self, name: &str, sandbox: Option<&str>) {
        let revision = self.next_revision();
        let Some(claim) = self.claims.get_mut(name) else {
            return;
        };
        claim.metadata.resource_version = Some(revision);
        let (labels, annotations) = (&mut claim.metadata.labels, &mut claim.metadata.annotations);
        for entries in [labels, annotations] {
            let entries = entries.get_or_insert_default();
            match sandbox {
                Some(sandbox) => {
                    entries.insert(labels::ASSIGNED_SANDBOX_NAME.into(), sandbox.into());
                }
                None => entries.clear(),
            }
        }
    }

    /// Deletes a claim and what it controls, as garbage collection does.
    pub fn delete_claim(&mut self, name: &str) {
        self.claims.remove(name);
        self.collect_ownerless();
    }

    pub fn mark_ready(&mut self, name: &str) {
        let (revision, now) = (self.next_revision(), self.now());
        if let Some(sandbox) = self.sandboxes.get_mut(name) {
            let status = sandbox.status.get_or_insert_default();
            let ready = Finding::new(ConditionType::Ready, true, Reason::DependenciesReady, "");
            conditions::merge(&mut status.conditions, &ready, None, &Time(now));
            sandbox.metadata.resource_version = Some(revision);
        }
    }

    /// How many sandboxes are the pool's.
    pub fn members(&self, pool: &SandboxWarmPool) -> usize {
        let uid = pool.uid().unwrap();
        self.sandboxes
            .values()
            .filter(|sandbox| is_controlled_by(&sandbox.metadata, &uid))
            .count()
    }
}

impl Cluster for Server {
    type Process = Process;

    fn now(&self) -> Timestamp {
        Timestamp::from_second(self.time).unwrap()
    }

    fn next_revision(&mut self) -> String {
        self.revision += 1;
        self.revision.to_string()
    }

    fn collect_ownerless(&mut self) {
        let claims = self.claims.values().filter_map(ResourceExt::uid);
        let pools = self.pools.values().filter_map(ResourceExt::uid);
        let owners: Vec<String> = claims.chain(pools).collect();
        self.sandboxes.retain(|_, sandbox| {
            controller_of(&sandbox.metadata).is_none_or(|owner| owners.contains(&owner.uid))
        });
    }

    fn check(&self) {
        let mut held = BTreeMap::new();
        for sandbox in self.sandboxes.values() {
            assert_eq!(
                sandbox.owner_references().len(),
                1,
                "a sandbox has one owner"
            );
            let owner = controller_of(&sandbox.metadata).unwrap();
            if owner.kind == "SandboxClaim" {
                let other = held.insert(owner.uid.clone(), sandbox.name_any());
                assert_eq!(other, None, "claim {} holds two sandboxes", owner.name);
                check_source(sandbox, &owner.name);
            }
        }
    }
}

/// A claim has no sandbox but one that its spec asks for.
fn check_source(sandbox: &Sandbox, claim: &str) {
    let (template, pool) = source_of(claim);
    let of_pool = || {
        POOLS
            .iter()
            .find(|(name, ..)| Some(*name) == pool)
            .unwrap()
            .1
    };
    let made_from = sandbox.annotations().get(labels::SANDBOX_TEMPLATE_REF);
    assert_eq!(
        made_from.map(String::as_str),
        Some(template.unwrap_or_else(of_pool)),
        "claim {claim} has the sandbox of another template"
    );
    let is_warm = sandbox.annotations().contains_key(labels::POD_NAME);
    assert!(
        !is_warm || claim != COLD,
        "{claim} asked for no warm sandbox"
    );
}

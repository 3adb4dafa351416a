//! The API server and a process of controllers, both small enough to be checked at every step.

use std::collections::BTreeMap;
use std::sync::Arc;

use agent_sandbox_planner::blueprint::Blueprint;
use agent_sandbox_planner::claim::{
    self, Effect, Holding, Lookup, Report, Verdict, candidate, decide, holding, names_to_look_up,
    template_name, warm_request,
};
use agent_sandbox_planner::expectations::Expectations;
use agent_sandbox_planner::owner::{controller_of, is_controlled_by};
use agent_sandbox_planner::pacing::Pacing;
use agent_sandbox_planner::version::Version;
use agent_sandbox_planner::warm_pool::{self, SandboxSet, pool_hash};
use agent_sandbox_planner::warm_queue::{SandboxKey, WarmQueue};
use api::claim::{ClaimShutdownPolicy, ClaimSource, Lifecycle, WarmPoolRef};
use api::conditions::{self, ConditionType, Finding, Reason};
use api::names::name_hash;
use api::template::SandboxTemplateRef;
use api::warm_pool::{UpdateStrategy, UpdateStrategyKind};
use api::{Sandbox, SandboxClaim, SandboxTemplate, SandboxWarmPool, labels};
use k8s_openapi::api::core::v1::Container;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use k8s_openapi::jiff::Timestamp;
use kube::ResourceExt;
use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::Value;

const NAMESPACE: &str = "ns";

/// A write that did not happen.
#[derive(Debug, PartialEq)]
pub enum Refused {
    Conflict,
    NotFound,
    AlreadyExists,
}

/// The process ended in the middle of something.
#[derive(Debug)]
pub struct Crash;

/// The API server: the only truth.
pub struct Server {
    revision: u64,
    /// The time, in seconds.
    pub time: i64,
    pub claims: BTreeMap<String, SandboxClaim>,
    pub sandboxes: BTreeMap<String, Sandbox>,
    pub pools: BTreeMap<String, SandboxWarmPool>,
    templates: BTreeMap<String, SandboxTemplate>,
}

/// The pools there are, unless they are deleted: their names, their templates, and whether they replace what is outdated at once.
const POOLS: [(&str, &str, UpdateStrategyKind); 2] = [
    ("pool-a", "py", UpdateStrategyKind::OnReplenish),
    ("pool-b", "js", UpdateStrategyKind::Recreate),
];

/// Where a claim's sandbox comes from: by template or from a pool, of either template.
fn source_of(name: &str) -> (Option<&'static str>, Option<&'static str>) {
    match name {
        "c0" | "c1" => (Some("py"), None),
        "c2" => (Some("js"), None),
        "c3" => (None, Some("pool-a")),
        _ => (None, Some("pool-b")),
    }
}

fn merge_patch(target: &mut Value, patch: &Value) {
    let Value::Object(patch) = patch else {
        *target = patch.clone();
        return;
    };
    if !target.is_object() {
        *target = Value::Object(serde_json::Map::new());
    }
    let object = target.as_object_mut().unwrap();
    for (key, value) in patch {
        if value.is_null() {
            object.remove(key);
        } else {
            merge_patch(object.entry(key.clone()).or_insert(Value::Null), value);
        }
    }
}

fn patched<K: Serialize + DeserializeOwned>(object: &K, patch: &Value) -> K {
    let mut value = serde_json::to_value(object).unwrap();
    merge_patch(&mut value, patch);
    serde_json::from_value(value).unwrap()
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

    fn now(&self) -> Timestamp {
        Timestamp::from_second(self.time).unwrap()
    }

    fn next_revision(&mut self) -> String {
        self.revision += 1;
        self.revision.to_string()
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
        self.claims.insert(name.into(), claim);
    }

    /// Deletes a claim and what it controls, as garbage collection does.
    pub fn delete_claim(&mut self, name: &str) {
        self.claims.remove(name);
        self.collect_ownerless();
    }

    fn create_sandbox(&mut self, mut sandbox: Sandbox) -> Result<Sandbox, Refused> {
        let revision = self.next_revision();
        let prefix = sandbox.metadata.generate_name.clone().unwrap_or_default();
        let name = sandbox
            .metadata
            .name
            .clone()
            .unwrap_or_else(|| format!("{prefix}{revision}"));
        if self.sandboxes.contains_key(&name) {
            return Err(Refused::AlreadyExists);
        }
        sandbox.metadata.name = Some(name.clone());
        sandbox.metadata.uid = Some(format!("sandbox-{revision}"));
        sandbox.metadata.resource_version = Some(revision);
        sandbox.metadata.creation_timestamp = Some(Time(self.now()));
        self.sandboxes.insert(name, sandbox.clone());
        self.collect_ownerless();
        Ok(sandbox)
    }

    /// Garbage collection: what belongs to a claim or a pool that no longer exists goes.
    fn collect_ownerless(&mut self) {
        let claims = self.claims.values().filter_map(ResourceExt::uid);
        let pools = self.pools.values().filter_map(ResourceExt::uid);
        let owners: Vec<String> = claims.chain(pools).collect();
        self.sandboxes.retain(|_, sandbox| {
            controller_of(&sandbox.metadata).is_none_or(|owner| owners.contains(&owner.uid))
        });
    }

    fn patch_sandbox(&mut self, version: &Version, patch: &Value) -> Result<Sandbox, Refused> {
        let current = self.sandboxes.get(&version.name).ok_or(Refused::NotFound)?;
        if Version::of(current) != *version {
            return Err(Refused::Conflict);
        }
        let mut sandbox = patched(current, patch);
        sandbox.metadata.resource_version = Some(self.next_revision());
        self.sandboxes.insert(version.name.clone(), sandbox.clone());
        self.collect_ownerless();
        Ok(sandbox)
    }

    fn patch_claim(&mut self, seen: &SandboxClaim, patch: &Value) -> Result<SandboxClaim, Refused> {
        let name = seen.name_any();
        let current = self.claims.get(&name).ok_or(Refused::NotFound)?;
        if Version::of(current) != Version::of(seen) {
            return Err(Refused::Conflict);
        }
        let mut claim = patched(current, patch);
        claim.metadata.resource_version = Some(self.next_revision());
        self.claims.insert(name, claim.clone());
        Ok(claim)
    }

    fn delete_sandbox(&mut self, version: &Version) -> Result<(), Refused> {
        let current = self.sandboxes.get(&version.name).ok_or(Refused::NotFound)?;
        if Version::of(current) != *version {
            return Err(Refused::Conflict);
        }
        self.sandboxes.remove(&version.name);
        Ok(())
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

    /// What must hold at every moment.
    pub fn check(&self) {
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
            }
        }
    }
}

/// What the process knows, and loses when it ends.
#[derive(Default)]
pub struct Process {
    claims: BTreeMap<String, SandboxClaim>,
    pub sandboxes: BTreeMap<String, Sandbox>,
    pub queue: WarmQueue,
    /// By the pool's UID.
    pub expectations: BTreeMap<String, Expectations>,
}

#[derive(Debug)]
struct Taken<'a>(&'a WarmQueue);

impl SandboxSet for Taken<'_> {
    fn holds(&self, sandbox: &Sandbox) -> bool {
        self.0.is_taken(&key_of(&sandbox.name_any()))
    }
}

#[derive(Debug)]
struct Going<'a>(&'a Expectations);

impl SandboxSet for Going<'_> {
    fn holds(&self, sandbox: &Sandbox) -> bool {
        self.0
            .is_deleted(&sandbox.name_any(), &sandbox.uid().unwrap())
    }
}

fn look_up_in<'a, K>(objects: &'a BTreeMap<String, K>, name: &str) -> Lookup<'a, K> {
    objects.get(name).map_or(Lookup::Missing, Lookup::Found)
}

fn key_of(name: &str) -> SandboxKey {
    SandboxKey {
        namespace: NAMESPACE.into(),
        name: name.into(),
    }
}

/// What came of one effect after the other.
struct Progress {
    claim: SandboxClaim,
    sandbox: Option<Sandbox>,
    outdated: bool,
    transferred: bool,
}

impl Process {
    pub fn started(server: &Server) -> Self {
        let mut process = Self::default();
        process.catch_up(server);
        process
    }

    /// Every event that the watches still owe.
    pub fn catch_up(&mut self, server: &Server) {
        self.claims = server.claims.clone();
        for (name, template) in &server.templates {
            let revision = Blueprint::new(template).revision.unwrap();
            self.queue
                .set_current_revision(NAMESPACE, &name_hash(name), &revision);
        }
        for (name, _, _) in POOLS {
            if !server.pools.contains_key(name) {
                self.queue.forget_pool(NAMESPACE, &name_hash(name));
            }
        }
        self.expectations.retain(|uid, _| {
            server
                .pools
                .values()
                .any(|pool| pool.uid().as_ref() == Some(uid))
        });
        let known = self.sandboxes.keys().chain(server.sandboxes.keys());
        let names: Vec<String> = known.cloned().collect();
        for name in names {
            self.see_sandbox(server, &name);
        }
    }

    /// An event of the watch, about one sandbox.
    pub fn see_sandbox(&mut self, server: &Server, name: &str) {
        let Some(sandbox) = server.sandboxes.get(name) else {
            self.queue.withdraw(&key_of(name));
            self.sandboxes.remove(name);
            return;
        };
        match candidate(sandbox) {
            Some(candidate) => self.queue.observe(candidate),
            None => self.queue.withdraw(&key_of(name)),
        }
        self.sandboxes.insert(name.to_owned(), sandbox.clone());
    }

    /// An event of the watch, about one claim.
    pub fn see_claim(&mut self, server: &Server, name: &str) {
        match server.claims.get(name) {
            Some(claim) => self.claims.insert(name.to_owned(), claim.clone()),
            None => self.claims.remove(name),
        };
    }

    /// One pass over a claim, as the controller makes it, in a process that ends after so many writes.
    pub fn reconcile_claim(
        &mut self,
        server: &mut Server,
        name: &str,
        crash_after: usize,
    ) -> Result<(), Crash> {
        let mut writes_left = crash_after;
        for _ in 0..3 {
            let Some(claim) = self.claims.get(name).cloned() else {
                return Ok(());
            };
            if self.attempt(server, &claim, &mut writes_left)? {
                return Ok(());
            }
            self.see_claim(server, name);
        }
        Ok(())
    }

    /// False if what was decided upon had changed.
    fn attempt(
        &mut self,
        server: &mut Server,
        claim: &SandboxClaim,
        writes_left: &mut usize,
    ) -> Result<bool, Crash> {
        let found = self.look_up(server, claim);
        let held = holding(claim, &found);
        let (pools, templates) = (server.pools.clone(), server.templates.clone());
        let pool = match (held, claim.spec.source()) {
            (Holding::Owned(_), _) => Lookup::NotAsked,
            (_, Ok(ClaimSource::Pool { pool })) => look_up_in(&pools, pool),
            _ => Lookup::NotAsked,
        };
        let template = template_name(claim, held, pool)
            .map_or(Lookup::NotAsked, |name| look_up_in(&templates, name));
        let reserved = warm_request(claim, pool, held)
            .and_then(|request| self.queue.take(&request))
            .map(|taken| taken.key);
        let candidate = reserved
            .as_ref()
            .and_then(|key| self.sandboxes.get(&key.name))
            .cloned();
        let uid = claim.uid().unwrap();
        let namesake = self
            .sandboxes
            .get(&claim.name_any())
            .filter(|sandbox| !is_controlled_by(&sandbox.metadata, &uid))
            .cloned();
        let plan = decide(
            &claim::Observed {
                claim,
                pool,
                template,
                holding: held,
                namesake: namesake.as_ref(),
                candidate: candidate.as_ref(),
                legacy_policy: None,
                first_observed: server.now(),
            },
            server.now(),
        );
        let owned = match held {
            Holding::Owned(sandbox) => Some(sandbox.clone()),
            _ => None,
        };
        let mut progress = Progress {
            claim: claim.clone(),
            sandbox: owned,
            outdated: false,
            transferred: false,
        };
        for effect in &plan.effects {
            write(writes_left)?;
            self.carry_out(server, effect, &mut progress);
            server.check();
            if progress.outdated {
                break;
            }
        }
        if let Some(key) = reserved.filter(|_| !progress.transferred) {
            self.queue.release(&key);
        }
        if progress.outdated {
            return Ok(false);
        }
        write(writes_left)?;
        publish(server, &plan.verdict, &progress);
        Ok(true)
    }

    fn look_up(
        &mut self,
        server: &Server,
        claim: &SandboxClaim,
    ) -> Vec<(String, Option<Arc<Sandbox>>)> {
        let mut found: Vec<(String, Option<Arc<Sandbox>>)> = names_to_look_up(claim)
            .into_iter()
            .map(|name| {
                let cached = self.sandboxes.get(name).cloned().map(Arc::new);
                (name.to_owned(), cached)
            })
            .collect();
        if let Holding::Broken { name } = holding(claim, &found) {
            let name = name.to_owned();
            self.see_sandbox(server, &name);
            for (looked_up, sandbox) in &mut found {
                if *looked_up == name {
                    *sandbox = server.sandboxes.get(&name).cloned().map(Arc::new);
                }
            }
        }
        found
    }

    fn carry_out(&mut self, server: &mut Server, effect: &Effect, progress: &mut Progress) {
        let answer = match effect {
            Effect::Bind { patch, .. } | Effect::Unbind { patch } => server
                .patch_claim(&progress.claim, patch)
                .map(|bound| progress.claim = bound),
            Effect::Transfer {
                sandbox: version,
                patch,
            }
            | Effect::SyncMetadata {
                sandbox: version,
                patch,
            } => {
                let answer = server.patch_sandbox(version, patch);
                self.see_sandbox(server, &version.name);
                progress.transferred |= answer.is_ok();
                answer.map(|changed| progress.sandbox = Some(changed))
            }
            Effect::Create { sandbox } => {
                let answer = server.create_sandbox((**sandbox).clone());
                self.see_sandbox(server, &sandbox.name_any());
                answer.map(|made| progress.sandbox = Some(made))
            }
            Effect::DeleteSandbox { sandbox: version } => {
                let current = server.sandboxes.get(&version.name);
                let is_same =
                    current.is_some_and(|current| current.uid().as_ref() == Some(&version.uid));
                if is_same {
                    server.sandboxes.remove(&version.name);
                }
                self.see_sandbox(server, &version.name);
                progress.sandbox = None;
                if is_same {
                    Ok(())
                } else {
                    Err(Refused::NotFound)
                }
            }
            Effect::DeleteClaim { .. } => {
                let name = progress.claim.name_any();
                let current = server.claims.get(&name);
                if current.is_some_and(|current| current.uid() == progress.claim.uid()) {
                    server.delete_claim(&name);
                }
                Ok(())
            }
            Effect::DeleteLegacyPolicy { policy } => panic!("nobody made {policy:?}"),
        };
        progress.outdated = answer.is_err();
    }

    /// One pass over a pool, as the controller makes it. Of the creations, one answer may be lost.
    pub fn reconcile_pool(&mut self, server: &mut Server, index: usize, loses_an_answer: bool) {
        let Some(pool) = server.pools.get(POOLS[index].0).cloned() else {
            return;
        };
        let uid = pool.uid().unwrap();
        let mut expectations = self.expectations.remove(&uid).unwrap_or_default();
        self.settle_expectations(server, &pool, &mut expectations);
        let labelled: Vec<Arc<Sandbox>> = self
            .sandboxes
            .values()
            .filter(|sandbox| is_labelled(sandbox, &pool))
            .cloned()
            .map(Arc::new)
            .collect();
        let template = server.templates.get(&pool.spec.sandbox_template_ref.name);
        let plan = warm_pool::decide(
            &warm_pool::Observed {
                pool: &pool,
                template,
                sandboxes: &labelled,
                spoken_for: &Taken(&self.queue),
                going: &Going(&expectations),
                unseen: expectations.unseen(),
                waiting_claims: 0,
                held_back_since: None,
                max_batch: 3,
            },
            &Pacing::default(),
            server.now(),
        );
        for deletion in &plan.deletions {
            let version = &deletion.version;
            let key = key_of(&version.name);
            if self.queue.is_taken(&key) {
                continue;
            }
            self.queue.take_exactly(&key);
            match server.delete_sandbox(version) {
                Ok(()) => expectations.deleted(&version.name, &version.uid, server.now()),
                Err(_) => self.queue.release(&key),
            }
        }
        let (count, blueprint) = plan.creations.unwrap_or_default();
        for index in 0..count {
            let made = server.create_sandbox((*blueprint).clone()).unwrap();
            if loses_an_answer && index == 0 {
                expectations.doubt();
            } else {
                let uid = made.uid().unwrap();
                expectations.made(&made.name_any(), &uid, server.now());
            }
        }
        let desired = usize::try_from(pool.spec.desired_replicas()).unwrap();
        let members = server.members(&pool);
        assert!(
            count == 0 || members <= desired,
            "{members} members where {desired} were asked for"
        );
        self.expectations.insert(uid, expectations);
    }

    fn settle_expectations(
        &self,
        server: &Server,
        pool: &SandboxWarmPool,
        expectations: &mut Expectations,
    ) {
        let sandboxes = &self.sandboxes;
        expectations.settle(|name| {
            let sandbox = sandboxes.get(name)?;
            Some((sandbox.uid().unwrap(), false))
        });
        if expectations.needs_confirmation(server.now()) {
            let identities = |sandboxes: &BTreeMap<String, Sandbox>| -> Vec<(String, String)> {
                sandboxes
                    .values()
                    .filter(|sandbox| is_labelled(sandbox, pool))
                    .map(|sandbox| (sandbox.name_any(), sandbox.uid().unwrap()))
                    .collect()
            };
            let (listed, cached) = (identities(&server.sandboxes), identities(sandboxes));
            expectations.confirm(&listed, &cached, server.now());
        }
    }
}

fn is_labelled(sandbox: &Sandbox, pool: &SandboxWarmPool) -> bool {
    sandbox.labels().get(labels::WARM_POOL_SANDBOX) == Some(&pool_hash(pool))
}

fn write(writes_left: &mut usize) -> Result<(), Crash> {
    *writes_left = writes_left.checked_sub(1).ok_or(Crash)?;
    Ok(())
}

fn publish(server: &mut Server, verdict: &Verdict, progress: &Progress) {
    let sandbox = progress.sandbox.as_ref();
    let report = match verdict {
        Verdict::Silent => return,
        Verdict::Blocked(obstacle) => Report::Blocked { obstacle, sandbox },
        Verdict::Expired => Report::Expired { sandbox },
        Verdict::Reflect => Report::Reflects { sandbox },
    };
    let status = claim::status(&progress.claim, &report, server.now());
    let revision = server.next_revision();
    if let Some(stored) = server.claims.get_mut(&progress.claim.name_any())
        && stored.uid() == progress.claim.uid()
        && stored.status.as_ref() != Some(&status)
    {
        stored.status = Some(status);
        stored.metadata.resource_version = Some(revision);
    }
}

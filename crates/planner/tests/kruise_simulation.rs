//! Batch claims over a set under random schedules, over a small model of the API: two processes that do not know of each other,
//! conflicts, caches that lag behind, crashes between any two writes, sandboxes that refuse to be initialised, and users who
//! delete and lock things by hand.
//!
//! What must hold at every moment: a sandbox never goes from one claim to another, and no claim holds more than it asked for. What
//! must hold when a claim is Completed: its count is what it holds. What must hold once the dust has settled: every claim is
//! Completed, by its timeout if it has one.

#![expect(
    clippy::unwrap_used,
    reason = "what a test's helpers cannot do fails the test"
)]

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use agent_sandbox_planner::kruise_claim::{
    Entry, Initialisation, Life, Next, NextBatch, Outcome, Pick, Surroundings, Verdict,
    agrees_with_status, batch, decide, held_besides, life, next, progress, status,
};
use agent_sandbox_planner::owner::{controller_of, controller_reference, is_controlled_by};
use agent_sandbox_planner::sandbox_set::{Mould, candidate};
use agent_sandbox_planner::version::Version;
use agent_sandbox_planner::warm_queue::{Request, SandboxKey, WarmQueue};
use api::Sandbox;
use api::conditions::{self, ConditionType, Finding, Reason};
use api::kruise::{
    ClaimPhase, SandboxClaim, SandboxClaimSpec, SandboxClaimStatus, SandboxSet, SandboxSetSpec,
};
use api::labels::kruise as keys;
use api::sandbox::PodTemplate;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use k8s_openapi::jiff::Timestamp;
use kube::ResourceExt;
use proptest::prelude::*;
use serde_json::Value;

const NAMESPACE: &str = "ns";
const SET_UID: &str = "set-uid";

#[derive(Debug, PartialEq)]
enum Refused {
    Conflict,
    NotFound,
    AlreadyExists,
}

/// The process ended in the middle of something.
#[derive(Debug)]
struct Crash;

fn merge(target: &mut Value, patch: &Value) {
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
            merge(object.entry(key.clone()).or_insert(Value::Null), value);
        }
    }
}

/// The API server: the only truth.
struct Server {
    revision: u64,
    time: i64,
    set: Option<SandboxSet>,
    mould: Mould,
    claims: BTreeMap<String, SandboxClaim>,
    sandboxes: BTreeMap<String, Sandbox>,
    /// Sandboxes whose runtime refuses to be initialised.
    broken: BTreeSet<String>,
    /// How many sandboxes of each claim somebody else has deleted, by the claim's UID.
    bereaved: BTreeMap<String, usize>,
}

impl Server {
    fn new() -> Self {
        let spec = SandboxSetSpec {
            replicas: 4,
            template: Some(PodTemplate::default()),
            ..SandboxSetSpec::default()
        };
        let mut set = SandboxSet::new("set", spec);
        set.metadata.namespace = Some(NAMESPACE.into());
        set.metadata.uid = Some(SET_UID.into());
        Self {
            revision: 1,
            time: 1_000,
            mould: Mould::new(&set, None).unwrap(),
            set: Some(set),
            claims: BTreeMap::new(),
            sandboxes: BTreeMap::new(),
            broken: BTreeSet::new(),
            bereaved: BTreeMap::new(),
        }
    }

    fn now(&self) -> Timestamp {
        Timestamp::from_second(self.time).unwrap()
    }

    fn next_revision(&mut self) -> String {
        self.revision += 1;
        self.revision.to_string()
    }

    /// A sandbox of the set becomes Ready.
    fn add_member(&mut self, is_broken: bool) {
        let Some(set) = self.set.clone() else { return };
        let revision = self.next_revision();
        let name = format!("set-{revision}");
        let mut sandbox = self.mould.sandbox(&set);
        sandbox.metadata.name = Some(name.clone());
        sandbox.metadata.uid = Some(format!("sandbox-{revision}"));
        sandbox.metadata.resource_version = Some(revision);
        sandbox.metadata.owner_references = Some(vec![controller_reference(&set)]);
        sandbox
            .labels_mut()
            .insert(keys::SANDBOX_CLAIMED.into(), "false".into());
        let status = sandbox.status.get_or_insert_default();
        status.pod_ips = vec!["10.0.0.1".into()];
        self.sandboxes.insert(name.clone(), sandbox);
        self.mark_ready(&name);
        if is_broken {
            self.broken.insert(name);
        }
    }

    fn mark_ready(&mut self, name: &str) {
        let (revision, now) = (self.next_revision(), self.now());
        if let Some(sandbox) = self.sandboxes.get_mut(name) {
            let status = sandbox.status.get_or_insert_default();
            status.pod_ips = vec!["10.0.0.1".into()];
            let ready = Finding::new(ConditionType::Ready, true, Reason::DependenciesReady, "");
            conditions::merge(&mut status.conditions, &ready, None, &Time(now));
            sandbox.metadata.resource_version = Some(revision);
        }
    }

    fn create_claim(&mut self, name: &str, wish: Wish) {
        if self.claims.contains_key(name) {
            return;
        }
        let revision = self.next_revision();
        let env = BTreeMap::from([("KEY".to_owned(), "value".to_owned())]);
        let spec = SandboxClaimSpec {
            template_name: "set".into(),
            replicas: Some(i32::from(wish.replicas)),
            claim_timeout: wish
                .timeout
                .map(|seconds| Duration::from_secs(u64::from(seconds)).into()),
            env_vars: wish.initialises.then_some(env),
            create_on_no_stock: Some(wish.creates),
            ..SandboxClaimSpec::default()
        };
        let mut claim = SandboxClaim::new(name, spec);
        claim.metadata.namespace = Some(NAMESPACE.into());
        claim.metadata.uid = Some(format!("claim-{revision}"));
        claim.metadata.resource_version = Some(revision);
        claim.metadata.creation_timestamp = Some(Time(self.now()));
        self.claims.insert(name.into(), claim);
    }

    fn write_status(
        &mut self,
        seen: &SandboxClaim,
        status: SandboxClaimStatus,
    ) -> Result<SandboxClaim, Refused> {
        let revision = self.next_revision();
        let claim = self
            .claims
            .get_mut(&seen.name_any())
            .ok_or(Refused::NotFound)?;
        if Version::of(claim) != Version::of(seen) {
            return Err(Refused::Conflict);
        }
        assert!(!is_completed(claim), "a Completed claim does not change");
        claim.status = Some(status);
        claim.metadata.resource_version = Some(revision);
        let claim = claim.clone();
        if is_completed(&claim) {
            self.check_count(&claim);
        }
        Ok(claim)
    }

    /// What a Completed claim says it holds is what it holds, and what somebody took away before it could know.
    fn check_count(&self, claim: &SandboxClaim) {
        let uid = claim.uid().unwrap();
        let said = usize::try_from(claim.status.as_ref().unwrap().claimed_replicas).unwrap();
        let held = self.held(&uid);
        let bereaved = self.bereaved.get(&uid).copied().unwrap_or(0);
        assert!(
            (held..=held + bereaved).contains(&said),
            "{said} claimed, {held} held, {bereaved} taken away"
        );
    }

    fn held(&self, uid: &str) -> usize {
        let sandboxes = self.sandboxes.values();
        sandboxes
            .filter(|sandbox| is_controlled_by(&sandbox.metadata, uid))
            .count()
    }

    fn create(&mut self, mut sandbox: Sandbox) -> Result<Sandbox, Refused> {
        let (name, revision) = (sandbox.name_any(), self.next_revision());
        if self.sandboxes.contains_key(&name) {
            return Err(Refused::AlreadyExists);
        }
        sandbox.metadata.uid = Some(format!("sandbox-{revision}"));
        sandbox.metadata.resource_version = Some(revision);
        self.sandboxes.insert(name, sandbox.clone());
        self.collect();
        Ok(sandbox)
    }

    fn patch(&mut self, version: &Version, patch: &Value) -> Result<Sandbox, Refused> {
        let revision = self.next_revision();
        let current = self.sandboxes.get(&version.name).ok_or(Refused::NotFound)?;
        if Version::of(current) != *version {
            return Err(Refused::Conflict);
        }
        let mut value = serde_json::to_value(current).unwrap();
        merge(&mut value, patch);
        let mut sandbox: Sandbox = serde_json::from_value(value).unwrap();
        let before = controller_of(&current.metadata).unwrap();
        assert_eq!(
            before.kind, "SandboxSet",
            "a claimed sandbox is taken again"
        );
        assert_eq!(sandbox.owner_references().len(), 1);
        sandbox.metadata.resource_version = Some(revision);
        self.sandboxes.insert(version.name.clone(), sandbox.clone());
        self.collect();
        Ok(sandbox)
    }

    fn delete(&mut self, version: &Version) -> Result<(), Refused> {
        let current = self.sandboxes.get(&version.name).ok_or(Refused::NotFound)?;
        if Version::of(current) != *version {
            return Err(Refused::Conflict);
        }
        self.sandboxes.remove(&version.name);
        Ok(())
    }

    /// Garbage collection: what belongs to an owner that no longer exists goes.
    fn collect(&mut self) {
        let mut owners: BTreeSet<String> =
            self.claims.values().filter_map(ResourceExt::uid).collect();
        owners.extend(self.set.as_ref().and_then(ResourceExt::uid));
        self.sandboxes.retain(|_, sandbox| {
            controller_of(&sandbox.metadata).is_none_or(|owner| owners.contains(&owner.uid))
        });
    }

    fn delete_by_hand(&mut self, name: &str) {
        if let Some(sandbox) = self.sandboxes.remove(name) {
            let owner = controller_of(&sandbox.metadata).unwrap().uid.clone();
            *self.bereaved.entry(owner).or_default() += 1;
        }
    }

    fn lock_by_hand(&mut self, name: &str) {
        let revision = self.next_revision();
        let sandbox = self.sandboxes.get_mut(name);
        if let Some(sandbox) = sandbox.filter(|sandbox| candidate(sandbox).is_some()) {
            sandbox
                .annotations_mut()
                .insert(keys::LOCK.into(), "by hand".into());
            sandbox.metadata.resource_version = Some(revision);
        }
    }

    fn check(&self) {
        for claim in self.claims.values() {
            let held = self.held(&claim.uid().unwrap());
            let desired = usize::try_from(claim.spec.desired_replicas()).unwrap();
            assert!(held <= desired, "{} holds {held}", claim.name_any());
        }
    }
}

fn is_completed(claim: &SandboxClaim) -> bool {
    let status = claim.status.as_ref();
    status.is_some_and(|status| status.phase == Some(ClaimPhase::Completed))
}

/// What a process knows, and loses when it ends.
#[derive(Default)]
struct Process {
    claims: BTreeMap<String, SandboxClaim>,
    sandboxes: BTreeMap<String, Sandbox>,
    queue: WarmQueue,
    names_made: u32,
}

fn key(name: &str) -> SandboxKey {
    SandboxKey {
        namespace: NAMESPACE.into(),
        name: name.into(),
    }
}

impl Process {
    fn started(server: &Server) -> Self {
        let mut process = Self::default();
        process.catch_up(server);
        process
    }

    fn catch_up(&mut self, server: &Server) {
        self.claims = server.claims.clone();
        let known = self.sandboxes.keys().chain(server.sandboxes.keys());
        let names: Vec<String> = known.cloned().collect();
        for name in names {
            self.see(server, &name);
        }
    }

    /// An event of the watch, or an answer of the server, about one sandbox.
    fn see(&mut self, server: &Server, name: &str) {
        let sandbox = server.sandboxes.get(name);
        match sandbox.and_then(candidate) {
            Some(candidate) => self.queue.observe(candidate),
            None => self.queue.withdraw(&key(name)),
        }
        match sandbox {
            Some(sandbox) => self.sandboxes.insert(name.to_owned(), sandbox.clone()),
            None => self.sandboxes.remove(name),
        };
    }

    fn see_claim(&mut self, server: &Server, name: &str) {
        match server.claims.get(name) {
            Some(claim) => self.claims.insert(name.to_owned(), claim.clone()),
            None => self.claims.remove(name),
        };
    }

    /// One reconcile, as the controller makes it, in a process that ends after so many writes.
    fn reconcile(
        &mut self,
        server: &mut Server,
        name: &str,
        mut writes: usize,
    ) -> Result<(), Crash> {
        for _ in 0..4 {
            let Some(claim) = self.claims.get(name).cloned() else {
                return Ok(());
            };
            if life(&claim, server.now()) != Life::Active {
                return Ok(());
            }
            let mut outcomes = Vec::new();
            for pick in batch(&claim) {
                let outcome = self.settle(server, &claim, &pick, &mut writes)?;
                outcomes.push((pick, outcome));
            }
            let seen = self.sandboxes.values().map(|sandbox| &sandbox.metadata);
            let mut held = held_besides(&claim, seen);
            if !agrees_with_status(&claim, held) {
                let listed = server.sandboxes.values().map(|sandbox| &sandbox.metadata);
                held = held_besides(&claim, listed);
            }
            let progress = progress(&claim, held, outcomes);
            if progress.unsettled.is_empty() {
                for pick in batch(&claim) {
                    self.queue.release(&key(&pick.name));
                }
            }
            let surroundings = Surroundings {
                set_exists: server.set.is_some(),
                paused_until: None,
                max_batch: 2,
                now: server.now(),
            };
            let verdict = decide(&claim, &progress, &surroundings);
            let next = match verdict {
                Verdict::Claim(count) => self.pick(&claim, count),
                _ => NextBatch::default(),
            };
            let status = status(&claim, &progress, &verdict, &next, server.now());
            let is_new = claim.status.as_ref() != Some(&status);
            if is_new {
                spend(&mut writes)?;
                let written = server.write_status(&claim, status);
                server.check();
                if written.is_err() {
                    for name in &next.claiming {
                        self.queue.release(&key(name));
                    }
                    self.see_claim(server, name);
                    continue;
                }
                self.see_claim(server, name);
            }
            if next.is_empty() {
                return Ok(());
            }
        }
        Ok(())
    }

    fn pick(&mut self, claim: &SandboxClaim, count: usize) -> NextBatch {
        let request = Request {
            namespace: NAMESPACE.into(),
            template_hash: SET_UID.into(),
            pool_hash: None,
        };
        let taken = std::iter::from_fn(|| self.queue.take(&request).map(|taken| taken.key.name));
        let claiming: Vec<String> = taken.take(count).collect();
        let mut creating = Vec::new();
        if claim.spec.create_on_no_stock == Some(true) {
            for _ in claiming.len()..count {
                self.names_made += 1;
                creating.push(format!("made-{}-{}", claim.uid().unwrap(), self.names_made));
            }
        }
        NextBatch { claiming, creating }
    }

    fn settle(
        &mut self,
        server: &mut Server,
        claim: &SandboxClaim,
        pick: &Pick,
        writes: &mut usize,
    ) -> Result<Outcome, Crash> {
        let mut initialisation = Initialisation::Untried;
        if !self.sandboxes.contains_key(&pick.name) {
            self.see(server, &pick.name);
        }
        let mould = (server.set.clone(), server.mould.clone());
        for _ in 0..8 {
            let sandbox = self.sandboxes.get(&pick.name).cloned();
            let entry = Entry {
                name: &pick.name,
                origin: pick.origin,
                sandbox: sandbox.as_ref(),
                initialisation: &initialisation,
                mould: mould.0.as_ref().map(|set| (set, &mould.1)),
                token: "token",
            };
            match next(claim, &entry, server.now()) {
                Next::Settled(outcome) => return Ok(outcome),
                Next::Initialise { .. } => {
                    initialisation = if server.broken.contains(&pick.name) {
                        Initialisation::Refused("broken".into())
                    } else {
                        Initialisation::Done
                    };
                }
                Next::Take { sandbox, patch } | Next::SetAside { sandbox, patch, .. } => {
                    spend(writes)?;
                    let _ = server.patch(&sandbox, &patch);
                }
                Next::Make { sandbox } => {
                    spend(writes)?;
                    let _ = server.create(*sandbox);
                }
                Next::Release { sandbox, .. } => {
                    spend(writes)?;
                    let released = server.delete(&sandbox).is_ok();
                    if released {
                        self.see(server, &pick.name);
                        return Ok(Outcome::Failed);
                    }
                }
            }
            server.check();
            self.see(server, &pick.name);
        }
        Ok(Outcome::Unsettled)
    }
}

fn spend(writes: &mut usize) -> Result<(), Crash> {
    *writes = writes.checked_sub(1).ok_or(Crash)?;
    Ok(())
}

#[derive(Clone, Copy, Debug)]
struct Wish {
    replicas: u8,
    timeout: Option<u8>,
    initialises: bool,
    creates: bool,
}

#[derive(Clone, Debug)]
enum Step {
    CreateClaim(u8, Wish),
    DeleteClaim(u8),
    AddMember(bool),
    MarkReady(u8),
    DeleteSandbox(u8),
    Lock(u8),
    DeleteSet,
    SeeSandbox(usize, u8),
    SeeClaim(usize, u8),
    CatchUp(usize),
    Reconcile(usize, u8, u8),
    Wait(u8),
}

fn wish() -> impl Strategy<Value = Wish> {
    (
        1..6u8,
        prop::option::of(0..20u8),
        any::<bool>(),
        prop::bool::weighted(0.2),
    )
        .prop_map(|(replicas, timeout, initialises, creates)| Wish {
            replicas,
            timeout,
            initialises,
            creates,
        })
}

fn step() -> impl Strategy<Value = Step> {
    prop_oneof![
        30 => (0..4u8, wish()).prop_map(|(claim, wish)| Step::CreateClaim(claim, wish)),
        3 => (0..4u8).prop_map(Step::DeleteClaim),
        60 => prop::bool::weighted(0.15).prop_map(Step::AddMember),
        10 => (0..12u8).prop_map(Step::MarkReady),
        6 => (0..12u8).prop_map(Step::DeleteSandbox),
        4 => (0..12u8).prop_map(Step::Lock),
        1 => Just(Step::DeleteSet),
        30 => (0..2usize, 0..12u8).prop_map(|(process, sandbox)| Step::SeeSandbox(process, sandbox)),
        30 => (0..2usize, 0..4u8).prop_map(|(process, claim)| Step::SeeClaim(process, claim)),
        20 => (0..2usize).prop_map(Step::CatchUp),
        80 => (0..2usize, 0..4u8, 0..12u8)
            .prop_map(|(process, claim, crash)| Step::Reconcile(process, claim, crash)),
        8 => (0..6u8).prop_map(Step::Wait),
    ]
}

fn nth(server: &Server, index: u8) -> Option<String> {
    server.sandboxes.keys().nth(usize::from(index)).cloned()
}

fn perform(server: &mut Server, processes: &mut [Process; 2], step: &Step) {
    match *step {
        Step::CreateClaim(claim, wish) => server.create_claim(&format!("c{claim}"), wish),
        Step::DeleteClaim(claim) => {
            server.claims.remove(&format!("c{claim}"));
            server.collect();
        }
        Step::AddMember(is_broken) => server.add_member(is_broken),
        Step::DeleteSet => {
            server.set = None;
            server.collect();
        }
        Step::MarkReady(index) => {
            if let Some(name) = nth(server, index) {
                server.mark_ready(&name);
            }
        }
        Step::DeleteSandbox(index) => {
            if let Some(name) = nth(server, index) {
                server.delete_by_hand(&name);
            }
        }
        Step::Lock(index) => {
            if let Some(name) = nth(server, index) {
                server.lock_by_hand(&name);
            }
        }
        Step::SeeSandbox(process, index) => {
            if let Some(name) = nth(server, index) {
                processes[process].see(server, &name);
            }
        }
        Step::SeeClaim(process, claim) => {
            processes[process].see_claim(server, &format!("c{claim}"));
        }
        Step::CatchUp(process) => processes[process].catch_up(server),
        Step::Reconcile(process, claim, crash_after) => {
            let name = format!("c{claim}");
            let outcome = processes[process].reconcile(server, &name, usize::from(crash_after));
            if outcome.is_err() {
                processes[process] = Process::started(server);
            }
        }
        Step::Wait(seconds) => server.time += i64::from(seconds),
    }
    server.check();
}

/// Lets a process that sees everything look at every claim.
fn look_at_all(server: &mut Server, process: &mut Process) {
    for name in server.claims.keys().cloned().collect::<Vec<_>>() {
        process.catch_up(server);
        let outcome = process.reconcile(server, &name, usize::MAX);
        assert!(outcome.is_ok(), "nothing crashes any more");
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 128, ..ProptestConfig::default() })]

    #[test]
    fn claims_are_met_exactly_and_in_time_whatever_happens(steps in prop::collection::vec(step(), 0..150)) {
        let mut server = Server::new();
        let mut processes = [Process::started(&server), Process::started(&server)];
        for step in &steps {
            perform(&mut server, &mut processes, step);
        }
        let [mut process, _] = processes;
        // When a claim's time is up, which runs from when it was first seen, it needs no stock to end.
        look_at_all(&mut server, &mut process);
        server.time += 60;
        for _ in 0..3 {
            look_at_all(&mut server, &mut process);
        }
        for claim in server.claims.values().filter(|claim| claim.spec.claim_timeout.is_some()) {
            prop_assert!(is_completed(claim), "past its timeout: {claim:?}");
        }
        // The others end when there is enough to claim.
        for _ in 0..12 {
            for _ in 0..4 {
                server.add_member(false);
            }
            for name in server.sandboxes.keys().cloned().collect::<Vec<_>>() {
                server.mark_ready(&name);
            }
            look_at_all(&mut server, &mut process);
        }
        for claim in server.claims.values() {
            prop_assert!(is_completed(claim), "with stock for all: {claim:?}");
            let status = claim.status.as_ref().unwrap();
            prop_assert!(status.claiming.is_empty() && status.creating.is_empty());
        }
        let claimed = server.sandboxes.values().filter(|sandbox| {
            controller_of(&sandbox.metadata).is_some_and(|owner| owner.kind == "SandboxClaim")
        });
        let total: usize = server.claims.values().map(|claim| server.held(&claim.uid().unwrap())).sum();
        prop_assert_eq!(claimed.count(), total, "nothing is left over");
    }
}

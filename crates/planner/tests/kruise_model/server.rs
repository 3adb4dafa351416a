//! The API server, with one set and the claims of it.

use std::collections::{BTreeMap, BTreeSet};
use std::net::{IpAddr, Ipv4Addr};
use std::time::Duration;

use agent_sandbox_planner::owner::{controller_of, controller_reference, is_controlled_by};
use agent_sandbox_planner::sandbox_set::{SetBlueprint, candidate};
use api::conditions::{self, ConditionType, Finding, Reason};
use api::kruise::{ClaimPhase, SandboxClaim, SandboxClaimSpec, SandboxSet, SandboxSetSpec};
use api::labels::kruise as keys;
use api::sandbox::PodTemplate;
use api::{Sandbox, SandboxTemplate};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use k8s_openapi::jiff::Timestamp;
use kube::ResourceExt;

use super::objects::{Cluster, Modelled};
use super::process::Process;
use super::writes::NAMESPACE;

pub(super) const SET_UID: &str = "set-uid";

/// What a claim asks for.
#[derive(Clone, Copy, Debug)]
pub struct Wish {
    pub replicas: u8,
    pub timeout: Option<u8>,
    pub initialises: bool,
    pub creates: bool,
}

/// The API server: the only truth.
pub struct Server {
    revision: u64,
    /// The time, in seconds.
    pub time: i64,
    pub sets: BTreeMap<String, SandboxSet>,
    /// Sets of the model name none.
    templates: BTreeMap<String, SandboxTemplate>,
    blueprint: SetBlueprint,
    pub claims: BTreeMap<String, SandboxClaim>,
    pub sandboxes: BTreeMap<String, Sandbox>,
    /// Sandboxes whose runtime refuses to be initialised.
    broken: BTreeSet<String>,
    /// How many sandboxes of each claim users have deleted, by the claim's UID.
    deleted_by_users: BTreeMap<String, usize>,
}

impl Server {
    pub fn new() -> Self {
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
            blueprint: SetBlueprint::new(&set, None).unwrap(),
            sets: BTreeMap::from([("set".to_owned(), set)]),
            templates: BTreeMap::new(),
            claims: BTreeMap::new(),
            sandboxes: BTreeMap::new(),
            broken: BTreeSet::new(),
            deleted_by_users: BTreeMap::new(),
        }
    }

    /// A sandbox of the set becomes Ready.
    pub fn add_member(&mut self, is_broken: bool) {
        let Some(set) = self.sets.get("set").cloned() else {
            return;
        };
        let revision = self.next_revision();
        let name = format!("set-{revision}");
        let mut sandbox = self.blueprint.sandbox(&set);
        sandbox.metadata.name = Some(name.clone());
        sandbox.metadata.uid = Some(format!("sandbox-{revision}"));
        sandbox.metadata.resource_version = Some(revision);
        sandbox.metadata.owner_references = Some(vec![controller_reference(&set)]);
        sandbox
            .labels_mut()
            .insert(keys::SANDBOX_CLAIMED.into(), "false".into());
        self.sandboxes.insert(name.clone(), sandbox);
        self.mark_ready(&name);
        if is_broken {
            self.broken.insert(name);
        }
    }

    pub fn mark_ready(&mut self, name: &str) {
        let (revision, now) = (self.next_revision(), self.now());
        if let Some(sandbox) = self.sandboxes.get_mut(name) {
            let address = address_of(sandbox);
            let status = sandbox.status.get_or_insert_default();
            status.pod_ips = vec![address];
            let ready = Finding::new(ConditionType::Ready, true, Reason::DependenciesReady, "");
            conditions::merge(&mut status.conditions, &ready, None, &Time(now));
            sandbox.metadata.resource_version = Some(revision);
        }
    }

    pub fn create_claim(&mut self, name: &str, wish: Wish) {
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

    /// A Completed claim counts the sandboxes that it holds, and those that users deleted before it could know.
    fn check_count(&self, claim: &SandboxClaim) {
        let uid = claim.uid().unwrap();
        let counted = usize::try_from(claim.status.as_ref().unwrap().claimed_replicas).unwrap();
        let held = self.held(&uid);
        let deleted_by_users = self.deleted_by_users.get(&uid).copied().unwrap_or(0);
        assert!(
            (held..=held + deleted_by_users).contains(&counted),
            "{counted} claimed, {held} held, {deleted_by_users} deleted by users"
        );
    }

    /// Whether the runtime at this address refuses to be initialised.
    pub(super) fn is_broken(&self, address: IpAddr) -> bool {
        let address = address.to_string();
        self.sandboxes
            .iter()
            .any(|(name, sandbox)| self.broken.contains(name) && address_of(sandbox) == address)
    }

    pub fn held(&self, uid: &str) -> usize {
        let sandboxes = self.sandboxes.values();
        sandboxes
            .filter(|sandbox| is_controlled_by(&sandbox.metadata, uid))
            .count()
    }

    pub fn delete_by_hand(&mut self, name: &str) {
        if let Some(sandbox) = self.sandboxes.remove(name) {
            let owner = controller_of(&sandbox.metadata).unwrap().uid.clone();
            *self.deleted_by_users.entry(owner).or_default() += 1;
        }
    }

    pub fn lock_by_hand(&mut self, name: &str) {
        let revision = self.next_revision();
        let sandbox = self.sandboxes.get_mut(name);
        if let Some(sandbox) = sandbox.filter(|sandbox| candidate(sandbox).is_some()) {
            sandbox
                .annotations_mut()
                .insert(keys::LOCK.into(), "by hand".into());
            sandbox.metadata.resource_version = Some(revision);
        }
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
        let mut owners: BTreeSet<String> =
            self.claims.values().filter_map(ResourceExt::uid).collect();
        owners.extend(self.sets.values().filter_map(ResourceExt::uid));
        self.sandboxes.retain(|_, sandbox| {
            controller_of(&sandbox.metadata).is_none_or(|owner| owners.contains(&owner.uid))
        });
    }

    fn check(&self) {
        for claim in self.claims.values() {
            let held = self.held(&claim.uid().unwrap());
            let desired = usize::try_from(claim.spec.desired_replicas()).unwrap();
            assert!(held <= desired, "{} holds {held}", claim.name_any());
        }
    }
}

impl Modelled<Server> for Sandbox {
    fn stored(server: &Server) -> &BTreeMap<String, Self> {
        &server.sandboxes
    }

    fn stored_mut(server: &mut Server) -> &mut BTreeMap<String, Self> {
        &mut server.sandboxes
    }

    fn cached<'a>(_: &'a Server, process: &'a Process) -> &'a BTreeMap<String, Self> {
        &process.sandboxes
    }

    fn learn(process: &mut Process, server: &Server, name: &str) {
        process.see(server, name);
    }

    /// A sandbox never goes from one claim to another.
    fn check_write(before: &Self, after: &Self, _: &Server, _: &Process) {
        let owner = controller_of(&before.metadata).unwrap();
        assert_eq!(owner.kind, "SandboxSet", "a claimed sandbox is taken again");
        assert_eq!(after.owner_references().len(), 1);
    }
}

impl Modelled<Server> for SandboxClaim {
    fn stored(server: &Server) -> &BTreeMap<String, Self> {
        &server.claims
    }

    fn stored_mut(server: &mut Server) -> &mut BTreeMap<String, Self> {
        &mut server.claims
    }

    fn cached<'a>(_: &'a Server, process: &'a Process) -> &'a BTreeMap<String, Self> {
        &process.claims
    }

    fn learn(process: &mut Process, server: &Server, name: &str) {
        process.see_claim(server, name);
    }

    fn check_write(before: &Self, after: &Self, server: &Server, _: &Process) {
        assert!(!is_completed(before), "a Completed claim does not change");
        if is_completed(after) {
            server.check_count(after);
        }
    }
}

impl Modelled<Server> for SandboxSet {
    fn stored(server: &Server) -> &BTreeMap<String, Self> {
        &server.sets
    }

    fn stored_mut(server: &mut Server) -> &mut BTreeMap<String, Self> {
        &mut server.sets
    }
}

impl Modelled<Server> for SandboxTemplate {
    fn stored(server: &Server) -> &BTreeMap<String, Self> {
        &server.templates
    }

    fn stored_mut(server: &mut Server) -> &mut BTreeMap<String, Self> {
        &mut server.templates
    }
}

/// The address of a sandbox's pod: its own, by the number in its UID.
fn address_of(sandbox: &Sandbox) -> String {
    let uid = sandbox.uid().unwrap();
    let number: u32 = uid.rsplit('-').next().unwrap().parse().unwrap();
    Ipv4Addr::from_bits(0x0a00_0000 + number).to_string()
}

pub fn is_completed(claim: &SandboxClaim) -> bool {
    let status = claim.status.as_ref();
    status.is_some_and(|status| status.phase == Some(ClaimPhase::Completed))
}

//! Claims and pools under random schedules, over a small model of the API: conflicts, caches that lag behind, answers that are
//! lost, crashes between any two writes, restarts, claims that expire, templates that are edited, and users who delete things, strip
//! bindings from claims and forge others.
//!
//! The passes are those that the controllers run, over the environment of [`model`].
//!
//! Invariants at every step: no claim holds two sandboxes, or one that its spec does not ask for, no sandbox is held by two claims, no claim
//! is bound to a warm sandbox that another one is bound to, and no pool makes more than it was asked for. Invariants once all objects are settled: every claim is Ready or reports why it is not, every pool is full, and
//! nothing is left in the queue or among the expectations that should not be.

#![expect(
    clippy::unwrap_used,
    reason = "what a test's helpers cannot do fails the test"
)]

mod model;

use agent_sandbox_planner::owner::{controller_of, is_controlled_by};
use api::claim::ClaimShutdownPolicy;
use api::conditions::{self, ConditionType, Reason};
use api::{SandboxClaim, labels};
use kube::ResourceExt;
use model::{Cluster, Faults, Process, Server};
use proptest::prelude::*;

#[derive(Clone, Debug)]
enum Step {
    CreateClaim(u8),
    /// A claim that is made with a binding to some sandbox.
    ForgeClaim(u8, u8),
    StripBinding(u8),
    ForgeBinding(u8, u8),
    DeleteClaim(u8),
    DeleteSandbox(u8),
    Expire(u8, bool),
    EditTemplate(usize),
    CreatePool(usize),
    DeletePool(usize),
    Scale(usize, u8),
    MarkReady(u8),
    SeeSandbox(u8),
    SeeClaim(u8),
    CatchUp,
    /// A pass over a claim, in a process that ends after so many writes, or does not get the answer to one.
    ReconcileClaim(u8, u8, bool),
    /// A pass over a pool, one of whose answers may be lost.
    ReconcilePool(usize, bool),
    Restart,
    Wait(u8),
}

fn step() -> impl Strategy<Value = Step> {
    prop_oneof![
        4 => (0..6u8).prop_map(Step::CreateClaim),
        1 => (0..6u8, 0..8u8).prop_map(|(claim, sandbox)| Step::ForgeClaim(claim, sandbox)),
        2 => (0..6u8).prop_map(Step::StripBinding),
        1 => (0..6u8, 0..8u8).prop_map(|(claim, sandbox)| Step::ForgeBinding(claim, sandbox)),
        1 => (0..6u8).prop_map(Step::DeleteClaim),
        1 => (0..8u8).prop_map(Step::DeleteSandbox),
        1 => (0..6u8, any::<bool>()).prop_map(|(claim, retain)| Step::Expire(claim, retain)),
        1 => (0..2usize).prop_map(Step::EditTemplate),
        2 => (0..2usize).prop_map(Step::CreatePool),
        1 => (0..2usize).prop_map(Step::DeletePool),
        1 => (0..2usize, 0..5u8).prop_map(|(pool, replicas)| Step::Scale(pool, replicas)),
        3 => (0..8u8).prop_map(Step::MarkReady),
        4 => (0..8u8).prop_map(Step::SeeSandbox),
        4 => (0..6u8).prop_map(Step::SeeClaim),
        2 => Just(Step::CatchUp),
        8 => (0..6u8, 0..6u8, prop::bool::weighted(0.2))
            .prop_map(|(claim, crash, loses)| Step::ReconcileClaim(claim, crash, loses)),
        6 => (0..2usize, any::<bool>()).prop_map(|(pool, loses)| Step::ReconcilePool(pool, loses)),
        1 => Just(Step::Restart),
        1 => (0..12u8).prop_map(Step::Wait),
    ]
}

fn nth_sandbox(server: &Server, process: &Process, index: u8) -> Option<String> {
    let names: std::collections::BTreeSet<&String> = server
        .sandboxes
        .keys()
        .chain(process.sandboxes.keys())
        .collect();
    names.into_iter().nth(usize::from(index)).cloned()
}

fn perform(server: &mut Server, process: &mut Process, step: &Step) {
    match *step {
        Step::CreateClaim(index) => server.create_claim(&format!("c{index}")),
        Step::ForgeClaim(index, sandbox) => {
            let claim = format!("c{index}");
            let bound = nth_sandbox(server, process, sandbox);
            if !server.claims.contains_key(&claim) {
                server.create_claim(&claim);
                server.edit_binding(&claim, bound.as_deref());
            }
        }
        Step::StripBinding(index) => server.edit_binding(&format!("c{index}"), None),
        Step::ForgeBinding(index, sandbox) => {
            let bound = nth_sandbox(server, process, sandbox);
            server.edit_binding(&format!("c{index}"), bound.as_deref());
        }
        Step::DeleteClaim(index) => server.delete_claim(&format!("c{index}")),
        Step::Expire(index, retain) => {
            let policy = if retain {
                ClaimShutdownPolicy::Retain
            } else {
                ClaimShutdownPolicy::Delete
            };
            server.expire(&format!("c{index}"), policy);
        }
        Step::EditTemplate(index) => server.edit_template(index),
        Step::CreatePool(index) => server.create_pool(index, 2),
        Step::DeletePool(index) => server.delete_pool(index),
        Step::Scale(index, replicas) => server.scale(index, i32::from(replicas)),
        Step::DeleteSandbox(index) => {
            if let Some(name) = nth_sandbox(server, process, index) {
                server.sandboxes.remove(&name);
            }
        }
        Step::MarkReady(index) => {
            if let Some(name) = nth_sandbox(server, process, index) {
                server.mark_ready(&name);
            }
        }
        Step::SeeSandbox(index) => {
            if let Some(name) = nth_sandbox(server, process, index) {
                process.see_sandbox(server, &name);
            }
        }
        Step::SeeClaim(index) => process.see_claim(server, &format!("c{index}")),
        Step::CatchUp => process.catch_up(server),
        Step::ReconcileClaim(index, crash_after, loses_answer) => {
            let name = format!("c{index}");
            let faults = Faults {
                crash_after: usize::from(crash_after),
                loses_answer,
            };
            let outcome = process.reconcile_claim(server, &name, faults);
            if outcome.is_err() {
                *process = Process::started(server);
            }
        }
        Step::ReconcilePool(index, loses_an_answer) => {
            process.reconcile_pool(server, index, loses_an_answer);
        }
        Step::Restart => *process = Process::started(server),
        Step::Wait(seconds) => server.time += i64::from(seconds),
    }
    server.check();
}

/// Runs every pending step, in more rounds than any schedule needs.
fn settle(server: &mut Server, process: &mut Process) {
    for _ in 0..12 {
        server.time += 10;
        process.catch_up(server);
        reconcile_pools(server, process);
        process.catch_up(server);
        let names: Vec<String> = server.claims.keys().cloned().collect();
        for name in names {
            let outcome = process.reconcile_claim(server, &name, Faults::NONE);
            assert!(outcome.is_ok(), "nothing crashes any more");
            process.catch_up(server);
        }
        let sandboxes: Vec<String> = server.sandboxes.keys().cloned().collect();
        for name in &sandboxes {
            server.mark_ready(name);
        }
    }
    process.catch_up(server);
    reconcile_pools(server, process);
}

fn reconcile_pools(server: &mut Server, process: &mut Process) {
    for index in 0..2 {
        process.reconcile_pool(server, index, false);
    }
}

/// Why a claim may be without a sandbox, if it may: it has expired, or the pool that it names is not there.
fn may_be_without(server: &Server, claim: &SandboxClaim) -> Option<Reason> {
    if claim.spec.lifecycle.is_some() {
        return Some(Reason::ClaimExpired);
    }
    let pool = claim.spec.warm_pool_ref.as_ref()?;
    (!server.pools.contains_key(&pool.name)).then_some(Reason::WarmPoolNotFound)
}

#[test]
fn a_sandbox_that_a_crash_left_bound_stays_with_its_claim() {
    let mut server = Server::new(1);
    let mut process = Process::started(&server);
    settle(&mut server, &mut process);
    server.create_claim("c0");
    process.catch_up(&server);
    let after_binding = Faults {
        crash_after: 1,
        ..Faults::NONE
    };
    let outcome = process.reconcile_claim(&mut server, "c0", after_binding);
    assert!(outcome.is_err(), "the process ended");
    let bound = server.claims["c0"].annotations()[labels::ASSIGNED_SANDBOX_NAME].clone();

    server.create_claim("c1");
    let mut process = Process::started(&server);
    for claim in ["c1", "c0"] {
        let outcome = process.reconcile_claim(&mut server, claim, Faults::NONE);
        assert!(outcome.is_ok());
    }
    let owner = controller_of(&server.sandboxes[&bound].metadata);
    assert_eq!(owner.map(|owner| owner.name.as_str()), Some("c0"));
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 256, ..ProptestConfig::default() })]

    #[test]
    fn every_claim_gets_exactly_one_sandbox_whatever_happens(steps in prop::collection::vec(step(), 0..120)) {
        let mut server = Server::new(3);
        let mut process = Process::started(&server);
        for step in &steps {
            perform(&mut server, &mut process, step);
        }
        settle(&mut server, &mut process);

        let mut holding = 0;
        for claim in server.claims.values() {
            let status = claim.status.as_ref().unwrap();
            let ready = conditions::find(&status.conditions, ConditionType::Ready).unwrap();
            if ready.status == "True" {
                let held = &status.sandbox.as_ref().unwrap().name;
                prop_assert!(is_controlled_by(&server.sandboxes[held].metadata, &claim.uid().unwrap()));
                prop_assert_eq!(claim.annotations().get(labels::ASSIGNED_SANDBOX_NAME), Some(held));
                prop_assert_eq!(claim.labels().get(labels::ASSIGNED_SANDBOX_NAME), Some(held));
                holding += 1;
            } else {
                let reason = may_be_without(&server, claim);
                prop_assert_eq!(Some(ready.reason.as_str()), reason.map(Reason::as_str), "{:?}", claim);
            }
        }
        let mut desired = 0;
        for pool in server.pools.values() {
            let replicas = usize::try_from(pool.spec.desired_replicas()).unwrap();
            prop_assert_eq!(server.members(pool), replicas);
            desired += replicas;
        }
        prop_assert_eq!(server.sandboxes.len(), desired + holding, "nothing is left over");
        let depth = process.queue().depth();
        prop_assert_eq!((depth.waiting, depth.taken), (desired, 0));
        prop_assert!(process.pools.values().all(|memory| memory.expectations.is_empty()));
    }
}

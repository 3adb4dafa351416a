//! Batch claims over a set under random schedules, over a small model of the API: two processes that do not know of each other,
//! conflicts, caches that lag behind, crashes between any two writes, sandboxes that refuse to be initialised, and users who
//! delete and lock things by hand.
//!
//! The passes are those that the controller runs, over the environment of [`kruise_model`].
//!
//! Invariants at every step: a sandbox never goes from one claim to another, and no claim holds more than it asked for. When a
//! claim is Completed, its count equals the sandboxes that it holds. Once all objects are settled, every claim is Completed, by its
//! timeout if it has one.

#![expect(
    clippy::unwrap_used,
    reason = "what a test's helpers cannot do fails the test"
)]

mod kruise_model;

use agent_sandbox_planner::owner::controller_of;
use kruise_model::{Cluster, Process, Server, Wish, is_completed};
use kube::ResourceExt;
use proptest::prelude::*;

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
            server.collect_ownerless();
        }
        Step::AddMember(is_broken) => server.add_member(is_broken),
        Step::DeleteSet => {
            server.sets.clear();
            server.collect_ownerless();
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
        // A claim whose timeout is over ends even if the set has no free sandboxes. The timeout runs from when it was first seen.
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
            // Longer than the pause of a claim after failures.
            server.time += 61;
            for _ in 0..4 {
                server.add_member(false);
            }
            for name in server.sandboxes.keys().cloned().collect::<Vec<_>>() {
                server.mark_ready(&name);
            }
            look_at_all(&mut server, &mut process);
        }
        for claim in server.claims.values() {
            prop_assert!(is_completed(claim), "with free sandboxes for all: {claim:?}");
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

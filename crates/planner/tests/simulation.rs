//! Claims and a pool under random schedules, over a small model of the API: conflicts, caches that lag behind, answers that are
//! lost, crashes between any two writes, restarts, and users who delete things.
//!
//! What must hold at every moment: no claim holds two sandboxes, no sandbox is held by two claims, and the pool never makes more
//! than it was asked for. What must hold once the dust has settled: every claim is Ready, the pool is full, and nothing is left
//! in the queue or among the expectations that should not be.

#![expect(
    clippy::unwrap_used,
    reason = "what a test's helpers cannot do fails the test"
)]

mod model;

use agent_sandbox_planner::owner::is_controlled_by;
use api::conditions::{self, ConditionType};
use kube::ResourceExt;
use model::{Process, Server};
use proptest::prelude::*;

#[derive(Clone, Debug)]
enum Step {
    CreateClaim(u8),
    DeleteClaim(u8),
    DeleteSandbox(u8),
    Scale(u8),
    MarkReady(u8),
    SeeSandbox(u8),
    SeeClaim(u8),
    CatchUp,
    /// A pass over a claim, in a process that ends after so many writes.
    ReconcileClaim(u8, u8),
    /// A pass over the pool, one of whose answers may be lost.
    ReconcilePool(bool),
    Restart,
    Wait(u8),
}

fn step() -> impl Strategy<Value = Step> {
    prop_oneof![
        4 => (0..5u8).prop_map(Step::CreateClaim),
        1 => (0..5u8).prop_map(Step::DeleteClaim),
        1 => (0..8u8).prop_map(Step::DeleteSandbox),
        1 => (0..5u8).prop_map(Step::Scale),
        3 => (0..8u8).prop_map(Step::MarkReady),
        4 => (0..8u8).prop_map(Step::SeeSandbox),
        4 => (0..5u8).prop_map(Step::SeeClaim),
        2 => Just(Step::CatchUp),
        8 => (0..5u8, 0..6u8).prop_map(|(claim, crash)| Step::ReconcileClaim(claim, crash)),
        4 => any::<bool>().prop_map(Step::ReconcilePool),
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
        Step::DeleteClaim(index) => server.delete_claim(&format!("c{index}")),
        Step::Scale(replicas) => server.pool.spec.replicas = Some(i32::from(replicas)),
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
        Step::ReconcileClaim(index, crash_after) => {
            let name = format!("c{index}");
            let outcome = process.reconcile_claim(server, &name, usize::from(crash_after));
            if outcome.is_err() {
                *process = Process::started(server);
            }
        }
        Step::ReconcilePool(loses_an_answer) => process.reconcile_pool(server, loses_an_answer),
        Step::Restart => *process = Process::started(server),
        Step::Wait(seconds) => server.time += i64::from(seconds),
    }
    server.check();
}

/// Lets everything happen that still can. More rounds than any schedule needs.
fn settle(server: &mut Server, process: &mut Process) {
    for _ in 0..12 {
        server.time += 10;
        process.catch_up(server);
        process.reconcile_pool(server, false);
        process.catch_up(server);
        let names: Vec<String> = server.claims.keys().cloned().collect();
        for name in names {
            let outcome = process.reconcile_claim(server, &name, usize::MAX);
            assert!(outcome.is_ok(), "nothing crashes any more");
            process.catch_up(server);
        }
        let sandboxes: Vec<String> = server.sandboxes.keys().cloned().collect();
        for name in &sandboxes {
            server.mark_ready(name);
        }
    }
    process.catch_up(server);
    process.reconcile_pool(server, false);
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

        for claim in server.claims.values() {
            let status = claim.status.as_ref().unwrap();
            prop_assert!(conditions::is_true(&status.conditions, ConditionType::Ready), "{claim:?}");
            let held = &status.sandbox.as_ref().unwrap().name;
            prop_assert!(is_controlled_by(&server.sandboxes[held].metadata, &claim.uid().unwrap()));
        }
        let desired = usize::try_from(server.pool.spec.desired_replicas()).unwrap();
        prop_assert_eq!(server.members(), desired);
        prop_assert_eq!(server.sandboxes.len(), desired + server.claims.len(), "nothing is left over");
        let depth = process.queue.depth();
        prop_assert_eq!((depth.waiting, depth.taken), (desired, 0));
        prop_assert!(process.expectations.is_empty());
    }
}

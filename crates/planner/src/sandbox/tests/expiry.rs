use std::time::Duration;

use api::SandboxSpec;
use api::conditions::ConditionType;
use api::sandbox::ShutdownPolicy;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use k8s_openapi::jiff::SignedDuration;

use super::super::{Effect, Stage};
use super::world::{NAME, World, other_owner, pod, ready_pod, sandbox, service};

fn expiring(policy: Option<ShutdownPolicy>, seconds: i64) -> World {
    let mut world = World::new(sandbox(SandboxSpec::default()));
    let shutdown = world
        .now
        .checked_add(SignedDuration::from_secs(seconds))
        .unwrap();
    world.spec_mut().shutdown_time = Some(Time(shutdown));
    world.spec_mut().shutdown_policy = policy;
    world.spec_mut().service = Some(true);
    world
}

#[test]
fn a_live_sandbox_is_looked_at_again_when_it_expires_but_not_too_often() {
    for (seconds, expected) in [(3_600, 3_600), (2, 2), (1, 2)] {
        let plan = expiring(None, seconds).decide();
        assert_eq!(plan.stage, Stage::Live);
        assert_eq!(plan.requeue, Some(Duration::from_secs(expected)));
    }
}

#[test]
fn expiry_is_reported_before_anything_is_removed_and_the_result_of_the_pod_stays() {
    for (phase, reason) in [("Succeeded", "PodSucceeded"), ("Failed", "PodFailed")] {
        let mut world = expiring(Some(ShutdownPolicy::Retain), 60).with_own_pod(ready_pod(NAME));
        // The pod ends and the sandbox expires before the next reconcile.
        world.pods[0].status = pod(NAME, phase).status;
        world.advance(60);

        let plan = world.reconcile();
        assert_eq!(plan.stage, Stage::Expiring);
        assert!(plan.effects.is_empty());
        assert_eq!(world.ready().1, "SandboxExpired");
        let finished = world.condition(ConditionType::Finished).unwrap();
        assert_eq!(finished.reason, reason);

        let plan = world.reconcile();
        assert_eq!(plan.stage, Stage::Expired);
        assert!(matches!(
            &plan.effects[..],
            [Effect::DeletePod { .. }, Effect::DeleteService { .. }]
        ));
        assert!(world.pods.is_empty() && world.service.is_none());
        let status = world.status();
        assert_eq!(world.condition(ConditionType::Finished), Some(finished));
        assert_eq!(
            world.ready(),
            (
                "False".to_owned(),
                "SandboxExpired".to_owned(),
                "Sandbox has expired".to_owned()
            )
        );
        assert_eq!(
            (status.replicas, status.selector, status.service),
            (0, None, None)
        );
        assert!(world.decide().effects.is_empty());
    }
}

#[test]
fn the_delete_policy_removes_the_sandbox_in_the_second_pass() {
    let mut world = expiring(Some(ShutdownPolicy::Delete), 0);
    assert_eq!(world.reconcile().stage, Stage::Expiring);
    assert!(world.sandbox.is_some());
    let plan = world.reconcile();
    assert!(matches!(&plan.effects[..], [Effect::DeleteSandbox { .. }]));
    assert!(world.sandbox.is_none());
}

#[test]
fn what_is_not_the_sandboxs_survives_its_expiry() {
    let mut foreign_pod = ready_pod(NAME);
    foreign_pod.metadata.owner_references = Some(vec![other_owner()]);
    let mut world = expiring(None, 0)
        .with_pod(foreign_pod)
        .with_service(service(Some("None")));
    world.settle();
    assert_eq!(world.pods.len(), 1);
    assert!(world.service.is_some());
    assert_eq!(world.ready().1, "SandboxExpired");
}

#[test]
fn a_retained_sandbox_lives_again_when_its_time_is_extended() {
    let mut world = expiring(None, 0);
    world.settle();
    assert!(world.pods.is_empty());
    let later = world
        .now
        .checked_add(SignedDuration::from_secs(60))
        .unwrap();
    world.spec_mut().shutdown_time = Some(Time(later));
    world.settle();
    assert_eq!(world.pods.len(), 1);
    assert_eq!(world.ready().1, "DependenciesNotReady");
}

#[test]
fn an_expired_sandbox_that_resumes_is_no_longer_reported_as_suspended() {
    let mut world = expiring(None, 60);
    world.spec_mut().replicas = Some(0);
    world.settle();
    world.advance(60);
    world.settle();
    let suspended = |world: &World| {
        let condition = world.condition(ConditionType::Suspended);
        condition.is_some_and(|condition| condition.status == "True")
    };
    assert_eq!(world.ready().1, "SandboxExpired");
    assert!(suspended(&world));
    world.spec_mut().replicas = Some(1);
    world.settle();
    assert_eq!(world.ready().1, "SandboxExpired");
    assert!(!suspended(&world));
}

#[test]
fn a_sandbox_that_is_being_deleted_is_left_to_garbage_collection() {
    let mut world = expiring(None, 0).with_pod(ready_pod(NAME));
    let now = Time(world.now);
    world.sandbox.as_mut().unwrap().metadata.deletion_timestamp = Some(now);
    let plan = world.reconcile();
    assert_eq!(plan.stage, Stage::Deleting);
    assert!(plan.effects.is_empty());
    assert_eq!(world.status(), api::SandboxStatus::default());
}

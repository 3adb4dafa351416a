//! The conditions of objects that set `operatingMode`, as clients of upstream 0.5.6 and later expect them.

use api::SandboxSpec;
use api::conditions::ConditionType;
use api::sandbox::OperatingMode;
use k8s_openapi::api::core::v1::{Pod, PodCondition};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{Condition, Time};

use super::super::{disagreement, is_reported_suspended};
use super::world::{NAME, World, make_ready, other_owner, pod, ready_pod, sandbox};

fn world(mode: Option<OperatingMode>, replicas: Option<i32>) -> World {
    World::new(sandbox(SandboxSpec {
        operating_mode: mode,
        replicas,
        ..SandboxSpec::default()
    }))
}

fn running() -> World {
    world(Some(OperatingMode::Running), Some(1))
}

/// Status, reason and message of the condition, if there is one.
fn condition_of(world: &World, kind: ConditionType) -> Option<[String; 3]> {
    let to_array = |condition: Condition| [condition.status, condition.reason, condition.message];
    world.condition(kind).map(to_array)
}

#[expect(
    clippy::unnecessary_wraps,
    reason = "compared with what `condition_of` may not find"
)]
fn words(status: &str, reason: &str, message: &str) -> Option<[String; 3]> {
    Some([status, reason, message].map(str::to_owned))
}

fn scheduled(status: &str, reason: Option<&str>, message: Option<&str>) -> PodCondition {
    PodCondition {
        type_: "PodScheduled".to_owned(),
        status: status.to_owned(),
        reason: reason.map(str::to_owned),
        message: message.map(str::to_owned),
        ..PodCondition::default()
    }
}

/// The pod was asked to stop, and still does.
fn begin_stopping(world: &mut World) {
    world.pods[0].metadata.deletion_timestamp = Some(Time(world.now));
    world.settle();
}

fn with_conditions(mut pod: Pod, conditions: Vec<PodCondition>) -> Pod {
    let status = pod.status.get_or_insert_default();
    status.conditions.get_or_insert_default().extend(conditions);
    pod
}

#[test]
fn an_object_that_sets_its_mode_always_has_the_condition_suspended() {
    let not_suspended = words("False", "NotSuspended", "Sandbox is not suspended");
    let mut world = running();
    world.settle();
    assert_eq!(
        condition_of(&world, ConditionType::Suspended),
        not_suspended
    );
    assert!(!is_reported_suspended(&world.status()));

    make_ready(&mut world.pods[0]);
    world.spec_mut().operating_mode = Some(OperatingMode::Suspended);
    begin_stopping(&mut world);
    let terminating = "Pod is terminating. Sandbox is suspending";
    assert_eq!(
        condition_of(&world, ConditionType::Suspended),
        words("False", "PodTerminating", terminating)
    );
    assert_eq!(world.ready().2, "Sandbox is suspending");
    assert!(is_reported_suspended(&world.status()));

    world.pods.clear();
    world.settle();
    let terminated = "Pod has been terminated. Sandbox is suspended";
    assert_eq!(
        condition_of(&world, ConditionType::Suspended),
        words("True", "PodTerminated", terminated)
    );
    assert_eq!(world.ready().2, "Sandbox is suspended");
    assert_eq!(condition_of(&world, ConditionType::PodScheduled), None);

    world.spec_mut().operating_mode = Some(OperatingMode::Running);
    world.settle();
    assert_eq!(
        condition_of(&world, ConditionType::Suspended),
        not_suspended
    );
}

#[test]
fn a_foreign_pod_of_the_name_is_left_alone_and_reported() {
    for owner in [None, Some(other_owner())] {
        let mut foreign = ready_pod(NAME);
        foreign.metadata.owner_references = owner.map(|owner| vec![owner]);
        let foreign = with_conditions(foreign, vec![scheduled("True", None, None)]);
        let mut world = world(Some(OperatingMode::Suspended), Some(1)).with_pod(foreign);
        world.settle();
        let refused = "Refused to delete pod because it is not owned by this sandbox";
        assert_eq!(
            condition_of(&world, ConditionType::Suspended),
            words("False", "PodNotOwned", refused)
        );
        assert_eq!(world.ready().2, "Sandbox is suspending");
        assert_eq!(condition_of(&world, ConditionType::PodScheduled), None);
        assert_eq!(world.pods.len(), 1);
    }
}

#[test]
fn an_object_that_sets_only_replicas_keeps_the_older_form() {
    for replicas in [None, Some(1)] {
        let own = with_conditions(ready_pod(NAME), vec![scheduled("True", None, None)]);
        let mut world = world(None, replicas).with_own_pod(own);
        assert_eq!(condition_of(&world, ConditionType::Suspended), None);
        assert_eq!(condition_of(&world, ConditionType::PodScheduled), None);
        world.spec_mut().replicas = Some(0);
        begin_stopping(&mut world);
        assert_eq!(
            condition_of(&world, ConditionType::Suspended),
            words("False", "PodNotTerminated", "Pod is being terminated")
        );
        world.pods.clear();
        world.settle();
        assert_eq!(
            condition_of(&world, ConditionType::Suspended),
            words("True", "PodTerminated", "Pod is terminated")
        );
    }
}

#[test]
fn pod_scheduled_is_the_pods() {
    let unknown = "Pod has not reported a PodScheduled condition yet";
    let nothing = words("Unknown", "PodSchedulingUnknown", unknown);
    let initialized = || PodCondition {
        type_: "Initialized".to_owned(),
        status: "True".to_owned(),
        ..PodCondition::default()
    };
    let table = vec![
        (vec![], nothing.clone()),
        // A binding alone is not written to the status.
        (vec![scheduled("True", None, None)], nothing),
        (
            vec![scheduled("True", None, None), initialized()],
            words("True", "PodScheduled", ""),
        ),
        (
            vec![scheduled("False", Some("Unschedulable"), Some("no room"))],
            words("False", "Unschedulable", "no room"),
        ),
        (
            vec![scheduled("False", None, None)],
            words("False", "PodSchedulingUnknown", ""),
        ),
        (
            vec![scheduled("False", Some("not a word"), Some("m"))],
            words("False", "PodSchedulingUnknown", "m"),
        ),
        (
            vec![scheduled("odd", Some("Gated"), None)],
            words("Unknown", "Gated", ""),
        ),
    ];
    for (conditions, expected) in table {
        let pod = with_conditions(pod(NAME, "Pending"), conditions.clone());
        let world = running().with_own_pod(pod);
        assert_eq!(
            condition_of(&world, ConditionType::PodScheduled),
            expected,
            "{conditions:?}"
        );
    }
    let long = scheduled("False", Some("Unschedulable"), Some(&"é".repeat(40_000)));
    let world = running().with_own_pod(with_conditions(pod(NAME, "Pending"), vec![long]));
    assert!(condition_of(&world, ConditionType::PodScheduled).unwrap()[2].len() <= 4096);
}

#[test]
fn pod_scheduled_goes_with_the_expiry() {
    let own = with_conditions(ready_pod(NAME), vec![scheduled("True", None, None)]);
    let mut world = running().with_own_pod(own);
    assert!(condition_of(&world, ConditionType::PodScheduled).is_some());
    let suspended = condition_of(&world, ConditionType::Suspended);
    let past = world.now;
    world.spec_mut().shutdown_time = Some(Time(past));
    world.settle();
    assert_eq!(condition_of(&world, ConditionType::PodScheduled), None);
    assert_eq!(condition_of(&world, ConditionType::Suspended), suspended);
}

#[test]
fn fields_that_disagree_explicitly_are_named_by_the_one_that_decides() {
    let modes = [
        None,
        Some(OperatingMode::Running),
        Some(OperatingMode::Suspended),
    ];
    for mode in modes {
        for replicas in [None, Some(0), Some(1)] {
            let mut resting = world(mode, replicas);
            resting.settle();
            let spec = resting.sandbox().spec.clone();
            let before = resting.status();
            let fresh = disagreement(&spec, &api::SandboxStatus::default());
            let changed = disagreement(&spec, &before);
            let case = format!("{mode:?} {replicas:?}");
            match (mode, replicas) {
                (Some(OperatingMode::Running), Some(0)) => {
                    assert!(fresh.unwrap().contains("because spec.replicas is 0"));
                    assert_eq!(fresh, changed, "{case}");
                }
                // The schema fills in `replicas: 1`: it counts only as a request to resume.
                (Some(OperatingMode::Suspended), Some(1)) => {
                    assert_eq!(fresh, None, "{case}");
                    assert!(changed.unwrap().contains("spec.operatingMode is Suspended"));
                }
                _ => assert_eq!((fresh, changed), (None, None), "{case}"),
            }
        }
    }
}

//! Suspension with a strategy that keeps the pod.

use api::SandboxSpec;
use api::conditions::ConditionType;
use api::freezing::{FROZEN, is_asked_for, reason};
use api::labels;
use api::sandbox::{OperatingMode, SuspensionStrategy, SuspensionType};
use k8s_openapi::api::core::v1::{Pod, PodCondition};

use super::super::{DeletionCause, Effect};
use super::world::{NAME, World, make_ready, pod, ready_pod, sandbox};

/// A running sandbox with this strategy, and its pod.
fn running(strategy: SuspensionType, own: Pod) -> World {
    let spec = SandboxSpec {
        operating_mode: Some(OperatingMode::Running),
        suspension_strategy: Some(SuspensionStrategy { kind: strategy }),
        ..SandboxSpec::default()
    };
    World::new(sandbox(spec)).with_own_pod(own)
}

fn set_mode(world: &mut World, mode: OperatingMode) {
    world.spec_mut().operating_mode = Some(mode);
    world.settle();
}

/// What the node reports of the pod's freezer. A frozen pod is not ready.
fn report(world: &mut World, status: &str, reason: &str, message: Option<&str>) {
    let own = &mut world.pods[0];
    make_ready(own);
    let conditions = own
        .status
        .get_or_insert_default()
        .conditions
        .as_mut()
        .unwrap();
    if status == "True" {
        conditions[0].status = "False".to_owned();
    }
    conditions.push(PodCondition {
        type_: FROZEN.to_owned(),
        status: status.to_owned(),
        reason: Some(reason.to_owned()),
        message: message.map(str::to_owned),
        ..PodCondition::default()
    });
    world.settle();
}

fn is_asked(world: &World) -> bool {
    is_asked_for(world.pods[0].metadata.annotations.as_ref())
}

/// Status and reason of the condition Suspended.
fn suspended(world: &World) -> (String, String) {
    let condition = world.condition(ConditionType::Suspended).unwrap();
    (condition.status, condition.reason)
}

fn expected(status: &str, reason: &str) -> (String, String) {
    (status.to_owned(), reason.to_owned())
}

/// A sandbox that is suspended with Freeze on a node that can do it, and frozen.
fn frozen() -> World {
    let mut world = running(SuspensionType::Freeze, ready_pod(NAME));
    report(&mut world, "False", reason::RUNNING, None);
    set_mode(&mut world, OperatingMode::Suspended);
    report(&mut world, "True", reason::FROZEN, None);
    world
}

#[test]
fn a_frozen_sandbox_keeps_its_pod_and_goes_on_with_it() {
    let mut world = running(SuspensionType::Freeze, ready_pod(NAME));
    report(&mut world, "False", reason::RUNNING, None);
    assert!(!is_asked(&world));
    let uid = world.pods[0].metadata.uid.clone();

    set_mode(&mut world, OperatingMode::Suspended);
    assert!(is_asked(&world));
    assert_eq!(suspended(&world), expected("False", "Freezing"));
    assert_eq!(world.ready().2, "Sandbox is suspending");

    report(&mut world, "True", reason::FROZEN, Some("40 MiB paged out"));
    assert_eq!(suspended(&world), expected("True", "Frozen"));
    let condition = world.condition(ConditionType::Suspended).unwrap();
    assert_eq!(condition.message, "Pod is frozen: 40 MiB paged out");
    assert_eq!(world.ready().1, "SandboxSuspended");
    assert_eq!(world.ready().2, "Sandbox is suspended");
    let status = world.status();
    assert_eq!((status.replicas, status.pod_ips.len()), (1, 0));
    assert_eq!(status.node_name.as_deref(), Some("node-1"));

    set_mode(&mut world, OperatingMode::Running);
    assert!(!is_asked(&world));
    assert_eq!(suspended(&world), expected("False", "NotSuspended"));
    // The pod does not answer before its node reports that it is thawed.
    assert_eq!(world.ready().0, "False");
    assert!(world.status().pod_ips.is_empty());
    report(&mut world, "False", reason::RUNNING, None);
    assert_eq!(world.ready().0, "True");
    assert_eq!(world.status().pod_ips.len(), 1);
    assert_eq!(world.pods[0].metadata.uid, uid);
}

#[test]
fn what_a_node_reports_of_the_freezer_is_what_the_sandbox_reports() {
    let table = [
        (
            "False",
            reason::RUNNING,
            expected("False", "Freezing"),
            true,
        ),
        (
            "False",
            reason::FREEZING,
            expected("False", "Freezing"),
            true,
        ),
        (
            "False",
            reason::FAILED,
            expected("False", "FreezeFailed"),
            true,
        ),
        ("True", reason::FROZEN, expected("True", "Frozen"), true),
        (
            "False",
            reason::NOT_SUPPORTED,
            expected("False", "FreezeNotSupported"),
            false,
        ),
    ];
    for (status, reason, expected, asked) in table {
        for form in [Some(OperatingMode::Suspended), None] {
            let mut world = running(SuspensionType::Freeze, ready_pod(NAME));
            report(&mut world, "False", reason, None);
            world.spec_mut().operating_mode = form;
            world.spec_mut().replicas = Some(0);
            world.settle();
            report(&mut world, status, reason, None);
            assert_eq!(suspended(&world), expected);
            assert_eq!(is_asked(&world), asked, "{reason}");
        }
    }
}

#[test]
fn a_pod_that_cannot_be_kept_as_asked_runs_on_and_the_condition_says_why() {
    let kubelet = "Sandbox runs on because node \"node-1\" is not a node of agent-sandbox and cannot freeze pods; \
                   set spec.suspensionStrategy.type to Stop to suspend it without its memory, or resume it";
    let hibernate = "Sandbox runs on because no node of this version can write the memory of a pod to disk; \
                     set spec.suspensionStrategy.type to Stop to suspend it without its memory, or resume it";
    let unknown = "Sandbox runs on because spec.suspensionStrategy.type: this version does not know it; \
                   set spec.suspensionStrategy.type to Stop to suspend it without its memory, or resume it";
    for (strategy, reason, message) in [
        (SuspensionType::Freeze, "FreezeNotSupported", kubelet),
        (
            SuspensionType::Hibernate,
            "HibernateNotSupported",
            hibernate,
        ),
        (SuspensionType::Unknown, "InvalidConfiguration", unknown),
    ] {
        let mut world = running(strategy, ready_pod(NAME));
        set_mode(&mut world, OperatingMode::Suspended);
        assert_eq!(world.pods.len(), 1);
        assert!(world.pods[0].metadata.deletion_timestamp.is_none());
        assert!(!is_asked(&world));
        assert_eq!(suspended(&world), expected("False", reason));
        let condition = world.condition(ConditionType::Suspended).unwrap();
        assert_eq!(condition.message, message);
        assert_eq!(world.ready().1, "SandboxSuspended");
    }
}

#[test]
fn a_pod_that_starts_is_frozen_once_it_runs() {
    let mut world = running(SuspensionType::Freeze, pod(NAME, "Pending"));
    set_mode(&mut world, OperatingMode::Suspended);
    assert_eq!(suspended(&world), expected("False", "Freezing"));
    assert!(!is_asked(&world), "what its node can do is not known yet");
    report(&mut world, "False", reason::RUNNING, None);
    assert!(is_asked(&world));
}

#[test]
fn a_sandbox_without_a_pod_is_suspended_whatever_its_strategy() {
    for strategy in [
        SuspensionType::Freeze,
        SuspensionType::Hibernate,
        SuspensionType::Unknown,
    ] {
        let mut world = World::new(sandbox(SandboxSpec {
            operating_mode: Some(OperatingMode::Suspended),
            suspension_strategy: Some(SuspensionStrategy { kind: strategy }),
            ..SandboxSpec::default()
        }));
        world.settle();
        assert_eq!(world.pods.len(), 0);
        assert_eq!(suspended(&world), expected("True", "PodTerminated"));
    }
}

#[test]
fn a_frozen_pod_that_is_lost_goes_and_is_made_anew_on_resume() {
    let mut world = frozen();
    let status = world.pods[0].status.as_mut().unwrap();
    status.phase = Some("Failed".to_owned());
    status.reason = Some("Evicted".to_owned());
    let effects = world.decide().effects;
    assert!(
        matches!(
            &effects[..],
            [Effect::DeletePod {
                cause: DeletionCause::LostSuspended(_),
                ..
            }]
        ),
        "{effects:?}"
    );
    world.settle();
    assert_eq!(world.pods.len(), 0);
    assert_eq!(suspended(&world), expected("True", "PodTerminated"));
    set_mode(&mut world, OperatingMode::Running);
    assert_eq!(world.pods.len(), 1);
    assert!(!is_asked(&world));
}

#[test]
fn a_pod_that_ends_while_it_is_frozen_is_reported_as_ended() {
    let mut world = frozen();
    let status = world.pods[0].status.as_mut().unwrap();
    status.phase = Some("Failed".to_owned());
    status.reason = Some("DeadlineExceeded".to_owned());
    world.settle();
    assert_eq!(world.pods.len(), 1);
    assert_eq!(suspended(&world), expected("True", "PodTerminated"));
    assert_eq!(
        world.condition(ConditionType::Finished).unwrap().status,
        "True"
    );
}

#[test]
fn changing_the_strategy_of_a_frozen_sandbox_to_stop_deletes_its_pod() {
    let mut world = frozen();
    world.spec_mut().suspension_strategy = None;
    world.settle();
    assert_eq!(world.pods.len(), 0);
    assert_eq!(suspended(&world), expected("True", "PodTerminated"));
}

#[test]
fn a_template_cannot_freeze_a_pod() {
    let mut world = running(SuspensionType::Freeze, ready_pod(NAME));
    let annotation = (labels::FREEZE.to_owned(), "true".to_owned());
    let metadata = &mut world.spec_mut().pod_template.metadata;
    metadata.annotations = Some([annotation.clone()].into());
    world.pods[0].metadata.annotations = Some([annotation].into());
    world.settle();
    assert!(!is_asked(&world));
}

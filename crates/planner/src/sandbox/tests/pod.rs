use api::SandboxSpec;
use api::sandbox::OperatingMode;
use k8s_openapi::api::core::v1::{Pod, PodCondition};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use std::time::Duration;

use super::super::{Adoption, DeletionCause, Effect, Loss, Problem, loss};
use super::world::{NAME, World, other_owner, pod, predecessor, read, ready_pod, sandbox};

fn running() -> World {
    World::new(sandbox(SandboxSpec::default()))
}

/// A sandbox whose annotation names a pod.
fn warm(pod_name: &str) -> World {
    let mut sandbox = sandbox(SandboxSpec::default());
    let annotation = ("agents.x-k8s.io/pod-name".to_owned(), pod_name.to_owned());
    sandbox.metadata.annotations = Some([annotation].into());
    World::new(sandbox)
}

fn annotated(world: &World) -> Option<String> {
    let annotations = world.sandbox().metadata.annotations.as_ref()?;
    annotations.get("agents.x-k8s.io/pod-name").cloned()
}

fn pod_names(world: &World) -> Vec<String> {
    world
        .pods
        .iter()
        .filter_map(|pod| pod.metadata.name.clone())
        .collect()
}

fn controlled_by_other(mut pod: Pod) -> Pod {
    pod.metadata.owner_references = Some(vec![other_owner()]);
    pod
}

fn terminating(world: &mut World, index: usize) {
    let now = Time(world.now);
    world.pods[index].metadata.deletion_timestamp = Some(now);
}

#[test]
fn a_pod_that_is_going_or_a_predecessors_is_waited_for_and_no_error() {
    let mut going = controlled_by_other(pod(NAME, "Running"));
    going.metadata.deletion_timestamp = Some(Time(running().now));
    let mut left_behind = pod(NAME, "Running");
    left_behind.metadata.owner_references = Some(vec![predecessor()]);
    for left in [going, left_behind] {
        let mut world = running().with_pod(left);
        let plan = world.reconcile();
        assert!(plan.effects.is_empty(), "{plan:?}");
        let (_, reason, message) = world.ready();
        assert_eq!(reason, "DependenciesNotReady");
        assert_eq!(
            message,
            "pod \"box\" is being deleted; a new one is made once it is gone"
        );
        world.pods.clear();
        world.settle();
        assert_eq!(
            world.pods[0].metadata.owner_references,
            Some(vec![world.owner()])
        );
    }
}

#[test]
fn a_fresh_pod_is_named_after_the_sandbox() {
    let mut world = running();
    world.settle();
    assert_eq!(pod_names(&world), [NAME]);
    let pod = &world.pods[0];
    assert_eq!(pod.metadata.owner_references, Some(vec![world.owner()]));
    assert_eq!(pod.spec.as_ref().unwrap().containers[0].name, "main");
    assert_eq!(world.status().replicas, 1);
}

#[test]
fn an_unowned_pod_of_the_name_is_adopted() {
    let mut world = running().with_pod(ready_pod(NAME));
    assert!(matches!(&world.decide().effects[..], [Effect::AdoptPod { name, .. }] if name == NAME));
    world.settle();
    assert_eq!(world.ready().0, "True");
    assert_eq!(annotated(&world), None);
}

#[test]
fn adoption_can_demand_a_label() {
    let mut world = running().with_pod(ready_pod(NAME));
    world.adoption = Adoption::Labelled;
    world.reconcile();
    assert_eq!(
        world.ready().2,
        "Error seen: refusing to adopt pod \"box\": it lacks the label agents.x-k8s.io/adoptable: \"true\""
    );
    world.pods[0].metadata.labels =
        Some([("agents.x-k8s.io/adoptable".to_owned(), "true".to_owned())].into());
    world.settle();
    assert_eq!(world.ready().0, "True");
}

#[test]
fn a_pod_of_another_controller_is_refused_whatever_is_asked() {
    let mut world = running().with_pod(controlled_by_other(ready_pod(NAME)));
    let plan = world.reconcile();
    assert!(plan.effects.is_empty());
    assert!(matches!(
        &plan.problems[..],
        [Problem::OwnedByOther { kind: "pod", .. }]
    ));
    assert_eq!(world.ready().1, "ReconcilerError");
    assert_eq!(world.status().replicas, 0);

    world.spec_mut().replicas = Some(0);
    let plan = world.reconcile();
    assert!(
        plan.effects.is_empty() && plan.problems.is_empty(),
        "{plan:?}"
    );
    assert_eq!(world.ready().2, "Sandbox is suspended");
}

#[test]
fn the_annotated_pod_is_used_while_it_exists() {
    let mut world = warm("warm-1").with_own_pod(ready_pod("warm-1"));
    assert_eq!(pod_names(&world), ["warm-1"]);
    assert_eq!(world.ready().0, "True");

    world.pods.clear();
    world.settle();
    assert_eq!(pod_names(&world), [NAME]);
    assert_eq!(annotated(&world), None);
}

#[test]
fn suspension_forgets_the_annotated_pod_only_once_it_is_gone() {
    let mut world = warm("warm-1").with_own_pod(ready_pod("warm-1"));
    world.spec_mut().operating_mode = Some(OperatingMode::Suspended);
    world.spec_mut().replicas = Some(0);
    let plan = world.decide();
    assert!(
        matches!(&plan.effects[..], [Effect::DeletePod { name, cause: DeletionCause::Suspended, .. }] if name == "warm-1")
    );
    terminating(&mut world, 0);
    let plan = world.reconcile();
    assert!(plan.effects.is_empty(), "{plan:?}");
    assert_eq!(world.ready().2, "Sandbox is suspending");
    world.pods.clear();
    world.settle();
    assert_eq!(annotated(&world), None);
    assert_eq!(world.ready().2, "Sandbox is suspended");
}

#[test]
fn a_resumed_sandbox_waits_for_its_old_pod_to_go() {
    let mut world = running().with_own_pod(ready_pod(NAME));
    terminating(&mut world, 0);
    assert!(world.decide().effects.is_empty());
    world.reconcile();
    assert_eq!(world.ready().2, "Pod is terminating");
    world.pods.clear();
    world.settle();
    assert_eq!(pod_names(&world), [NAME]);
}

#[test]
fn a_second_pod_of_the_sandbox_is_removed_and_only_then() {
    let mut world = running().with_own_pod(ready_pod(NAME));
    let mut stray = ready_pod("stray");
    stray.metadata.owner_references = Some(vec![world.owner()]);
    world.pods.push(stray.clone());
    world.settle();
    assert_eq!(pod_names(&world), [NAME]);

    // The only pod is the sandbox's, even if the annotation names a pod that is gone.
    let mut world = warm("gone").with_pod(ready_pod(NAME));
    world.pods[0].metadata.owner_references = Some(vec![world.owner()]);
    world.settle();
    assert_eq!(pod_names(&world), [NAME]);
}

#[test]
fn a_pod_that_came_to_its_own_end_stays() {
    for (phase, reason, message) in [
        ("Succeeded", "PodSucceeded", "Pod completed successfully"),
        ("Failed", "PodFailed", "Pod failed"),
    ] {
        let mut world = running().with_own_pod(pod(NAME, phase));
        let plan = world.reconcile();
        assert!(plan.effects.is_empty() && plan.requeue.is_none());
        let finished = world
            .condition(api::conditions::ConditionType::Finished)
            .unwrap();
        assert_eq!(
            (finished.status.as_str(), finished.reason.as_str()),
            ("True", reason)
        );
        assert_eq!(finished.message, message);
        assert_eq!(
            world.ready(),
            ("False".to_owned(), reason.to_owned(), message.to_owned())
        );
    }
}

#[test]
fn a_pod_that_is_stopped_by_its_deletion_has_not_failed() {
    for phase in ["Succeeded", "Failed"] {
        let mut world = running().with_own_pod(pod(NAME, phase));
        terminating(&mut world, 0);
        world.reconcile();
        let finished = world.condition(api::conditions::ConditionType::Finished);
        assert_eq!(finished, None);
        assert_eq!(world.ready().1, "DependenciesNotReady");
    }
}

#[test]
fn only_what_took_the_pod_away_counts_as_a_loss() {
    let failed = |reason: Option<&str>, disrupted: bool| {
        let mut pod = pod(NAME, "Failed");
        let status = pod.status.as_mut().unwrap();
        status.reason = reason.map(str::to_owned);
        if disrupted {
            status.conditions = Some(vec![PodCondition {
                type_: "DisruptionTarget".to_owned(),
                status: "True".to_owned(),
                reason: Some("PreemptionByScheduler".to_owned()),
                ..PodCondition::default()
            }]);
        }
        loss(&read(&pod)).map(|loss| loss.reason)
    };
    let table = [
        (None, false, None),
        (Some("Error"), false, None),
        (Some("OOMKilled"), false, None),
        (Some("DeadlineExceeded"), false, None),
        (Some("DeadlineExceeded"), true, None),
        (Some("Evicted"), false, Some("Evicted")),
        (Some("NodeLost"), false, Some("NodeLost")),
        (Some("NodeShutdown"), false, Some("NodeShutdown")),
        (Some("Terminated"), false, Some("Terminated")),
        (None, true, Some("PreemptionByScheduler")),
    ];
    for (reason, disrupted, expected) in table {
        assert_eq!(
            failed(reason, disrupted).as_deref(),
            expected,
            "{reason:?} {disrupted}"
        );
    }
    let mut alive = ready_pod(NAME);
    alive.status.as_mut().unwrap().reason = Some("Evicted".to_owned());
    assert_eq!(loss(&read(&alive)), None);
}

fn evict(world: &mut World) {
    let now = Time(world.now);
    let status = world.pods[0].status.get_or_insert_default();
    status.phase = Some("Failed".to_owned());
    status.reason = Some("Evicted".to_owned());
    status.conditions = Some(vec![PodCondition {
        type_: "Ready".to_owned(),
        status: "False".to_owned(),
        last_transition_time: Some(now),
        ..PodCondition::default()
    }]);
}

#[test]
fn a_lost_pod_is_replaced_later_each_time_until_one_lasts() {
    let mut world = running();
    world.settle();
    let mut delays = Vec::new();
    for _ in 0..7 {
        evict(&mut world);
        let plan = world.reconcile();
        delays.push(plan.requeue.unwrap_or_default().as_secs());
        if let Some(delay) = plan.requeue {
            assert!(plan.effects.is_empty());
            assert_eq!(
                world.ready().2,
                "Pod was lost (Evicted) and will be recreated"
            );
            assert_eq!(
                world.condition(api::conditions::ConditionType::Finished),
                None
            );
            world.advance(i64::try_from(delay.as_secs()).unwrap());
            world.reconcile();
        }
        assert_eq!(world.ready().2, "Pod exists with phase: Pending");
    }
    assert_eq!(delays, [0, 10, 20, 40, 80, 160, 300]);

    world.advance(600);
    evict(&mut world);
    let plan = world.decide();
    assert_eq!(plan.requeue, None);
    let lost = Loss {
        reason: "Evicted".to_owned(),
    };
    assert!(matches!(&plan.effects[..],
        [Effect::DeletePod { cause: DeletionCause::Lost(cause), .. }, Effect::CreatePod(_)] if *cause == lost));
}

#[test]
fn a_lost_pod_is_replaced_though_the_annotation_names_one_that_is_gone() {
    let mut world = warm("gone").with_pod(ready_pod(NAME));
    world.pods[0].metadata.owner_references = Some(vec![world.owner()]);
    evict(&mut world);
    world.settle();
    assert_eq!(annotated(&world), None);
    assert_eq!(world.ready().2, "Pod exists with phase: Pending");
}

#[test]
fn a_node_whose_clock_is_ahead_delays_a_replacement_no_longer_than_the_rule() {
    let mut world = running();
    world.settle();
    evict(&mut world);
    world.settle();
    world.advance(3_600);
    evict(&mut world);
    world.advance(-3_600);
    assert_eq!(world.decide().requeue, None);

    let created = world.pods[0].metadata.creation_timestamp.clone().unwrap();
    let condition = &mut world.pods[0]
        .status
        .as_mut()
        .unwrap()
        .conditions
        .as_mut()
        .unwrap()[0];
    condition.last_transition_time = Some(Time(
        created
            .0
            .checked_add(k8s_openapi::jiff::SignedDuration::from_secs(60))
            .unwrap(),
    ));
    assert_eq!(world.decide().requeue, Some(Duration::from_secs(10)));
}

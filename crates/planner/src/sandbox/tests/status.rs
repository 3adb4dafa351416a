use api::SandboxSpec;
use api::conditions::ConditionType;
use api::sandbox::OperatingMode;
use k8s_openapi::api::core::v1::Pod;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use k8s_openapi::jiff::Timestamp;

use super::super::{Outcome, Stage, Trouble, is_first_start, status};
use super::world::{HASH, NAME, World, make_ready, pod, ready_pod, sandbox, service, settings};

fn with(spec: SandboxSpec, pod: Option<Pod>, service_exists: bool) -> World {
    let mut world = World::new(sandbox(spec));
    if service_exists {
        world.service = Some(service(Some("None")));
    }
    if let Some(mut pod) = pod {
        pod.metadata.owner_references = Some(vec![world.owner()]);
        world.pods.push(pod);
    }
    world
}

/// The status that is published if nothing was done about the observed objects.
fn published(world: &World) -> World {
    let observed = world.observed();
    let outcome = Outcome::before(&observed);
    let now = Time(world.now);
    let mut world = world.clone();
    let status = status(&observed, Stage::Live, &outcome, &settings(), &now);
    world.sandbox.as_mut().unwrap().status = Some(status);
    world
}

/// The Ready condition, by `spec.service`, the pod, and whether the service exists.
fn reported(wish: Option<bool>, pod: Option<Pod>, service_exists: bool) -> [String; 3] {
    let spec = SandboxSpec {
        service: wish,
        ..SandboxSpec::default()
    };
    let (status, reason, message) = published(&with(spec, pod, service_exists)).ready();
    [status, reason, message]
}

#[test]
fn ready_says_what_is_missing() {
    let mut without_address = ready_pod(NAME);
    without_address.status.as_mut().unwrap().pod_ips = None;
    let table = vec![
        (None, None, false, "Pod does not exist"),
        (None, None, true, "Pod does not exist; Service Exists"),
        (
            Some(true),
            None,
            false,
            "Pod does not exist; Service does not exist",
        ),
        (
            None,
            Some(pod(NAME, "Pending")),
            false,
            "Pod exists with phase: Pending",
        ),
        (
            None,
            Some(pod(NAME, "Unknown")),
            false,
            "Pod exists with phase: Unknown",
        ),
        (
            None,
            Some(pod(NAME, "Running")),
            false,
            "Pod is Running but not Ready",
        ),
        (
            None,
            Some(without_address),
            false,
            "Pod is Ready but has no IP address",
        ),
        (
            Some(true),
            Some(ready_pod(NAME)),
            false,
            "Pod is Ready; Service does not exist",
        ),
    ];
    for (wish, pod, service_exists, message) in table {
        let expected = ["False", "DependenciesNotReady", message];
        assert_eq!(reported(wish, pod, service_exists), expected);
    }
}

#[test]
fn ready_needs_the_pod_and_the_service_that_was_asked_for() {
    let table = [
        (None, false, "Pod is Ready"),
        (None, true, "Pod is Ready; Service Exists"),
        (Some(true), true, "Pod is Ready; Service Exists"),
        (Some(false), true, "Pod is Ready"),
        (Some(false), false, "Pod is Ready"),
    ];
    for (wish, service_exists, message) in table {
        let reported = reported(wish, Some(ready_pod(NAME)), service_exists);
        assert_eq!(reported, ["True", "DependenciesReady", message]);
    }
}

#[test]
fn suspension_is_reported_by_two_conditions() {
    let spec = |replicas, operating_mode| SandboxSpec {
        replicas,
        operating_mode,
        ..SandboxSpec::default()
    };
    let suspended = Some(OperatingMode::Suspended);
    let table = vec![
        (spec(Some(0), None), true, "Sandbox is suspending"),
        (spec(Some(0), None), false, "Sandbox is suspended"),
        (spec(Some(0), suspended), false, "Sandbox is suspended"),
        (spec(None, suspended), false, "Sandbox is suspended"),
        (spec(Some(1), suspended), false, "Sandbox is suspended"),
        (
            spec(Some(0), Some(OperatingMode::Running)),
            true,
            "Sandbox is suspending",
        ),
    ];
    for (spec, has_pod, message) in table {
        let stopping = match spec.operating_mode {
            None => "PodNotTerminated",
            Some(_) => "PodTerminating",
        };
        let world = published(&with(spec, has_pod.then(|| ready_pod(NAME)), false));
        let (status, reason, reported) = world.ready();
        assert_eq!(
            (status.as_str(), reason.as_str()),
            ("False", "SandboxSuspended")
        );
        assert_eq!(reported, message);
        let suspended = world.condition(ConditionType::Suspended).unwrap();
        let expected = if has_pod {
            ("False", stopping)
        } else {
            ("True", "PodTerminated")
        };
        assert_eq!(
            (suspended.status.as_str(), suspended.reason.as_str()),
            expected
        );
        let status = world.status();
        assert_eq!(status.replicas, i32::from(has_pod));
        assert!(status.pod_ips.is_empty() && status.node_name.is_none());
        assert!(status.selector.is_some());
    }
}

#[test]
fn the_suspended_condition_goes_when_the_sandbox_is_resumed() {
    let mut world = with(SandboxSpec::default(), None, false);
    world.spec_mut().replicas = Some(0);
    world.settle();
    assert!(world.condition(ConditionType::Suspended).is_some());
    world.spec_mut().replicas = Some(1);
    world.settle();
    assert_eq!(world.condition(ConditionType::Suspended), None);
    assert_eq!(world.ready().2, "Pod exists with phase: Pending");
}

#[test]
fn finished_goes_with_the_pod_that_finished() {
    let mut world = with(SandboxSpec::default(), Some(pod(NAME, "Failed")), false);
    world.settle();
    assert!(world.condition(ConditionType::Finished).is_some());
    world.pods.clear();
    world.settle();
    assert_eq!(world.condition(ConditionType::Finished), None);
}

#[test]
fn the_status_mirrors_the_pod_for_scale_and_clients() {
    let mut world = with(SandboxSpec::default(), None, false);
    world.settle();
    let status = world.status();
    assert_eq!(status.replicas, 1);
    let selector = format!("agents.x-k8s.io/sandbox-name-hash={HASH}");
    assert_eq!(status.selector, Some(selector));
    assert!(status.pod_ips.is_empty());

    make_ready(&mut world.pods[0]);
    world.pods[0].spec.as_mut().unwrap().node_name = Some("node-9".to_owned());
    world.settle();
    let status = world.status();
    assert_eq!(status.pod_ips, ["10.0.0.7"]);
    assert_eq!(status.node_name.as_deref(), Some("node-9"));
    let ready = world.condition(ConditionType::Ready).unwrap();
    assert_eq!(ready.observed_generation, Some(1));
}

#[test]
fn trouble_comes_before_everything_but_expiry() {
    let world = with(SandboxSpec::default(), Some(ready_pod(NAME)), false);
    let reported = |stage, trouble: Vec<Trouble>| {
        let observed = world.observed();
        let outcome = Outcome {
            trouble,
            ..Outcome::before(&observed)
        };
        let now = Time(world.now);
        let status = status(&observed, stage, &outcome, &settings(), &now);
        let ready = api::conditions::find(&status.conditions, ConditionType::Ready).unwrap();
        (ready.reason.clone(), ready.message.clone())
    };
    let failed = |message: &str| Trouble::Failed(message.to_owned());
    let invalid = |message: &str| Trouble::Invalid(message.to_owned());
    let pair = |reason: &str, message: &str| (reason.to_owned(), message.to_owned());
    assert_eq!(
        reported(Stage::Live, vec![failed("a"), failed("b")]),
        pair("ReconcilerError", "Error seen: a; b")
    );
    assert_eq!(
        reported(Stage::Live, vec![failed("a"), invalid("image is required")]),
        pair("InvalidConfiguration", "image is required")
    );
    assert_eq!(
        reported(Stage::Expired, vec![failed("a")]),
        pair("SandboxExpired", "Sandbox has expired")
    );
}

#[test]
fn only_the_status_of_a_first_pod_that_is_starting_may_be_delayed() {
    let going = || {
        let mut going = pod(NAME, "Running");
        going.metadata.deletion_timestamp = Some(Time(Timestamp::UNIX_EPOCH));
        going
    };
    let suspended = SandboxSpec {
        operating_mode: Some(OperatingMode::Suspended),
        ..SandboxSpec::default()
    };
    let plain = SandboxSpec::default;
    let table = vec![
        (plain(), Some(pod(NAME, "Pending")), true),
        (plain(), Some(pod(NAME, "Running")), true),
        (plain(), Some(ready_pod(NAME)), false),
        (plain(), Some(pod(NAME, "Failed")), false),
        (plain(), Some(going()), false),
        (plain(), None, false),
        (suspended, Some(pod(NAME, "Running")), false),
    ];
    for (spec, pod, is_delayed) in table {
        let case = format!("{:?} {pod:?}", spec.operating_mode);
        let world = with(spec, pod, false);
        assert_eq!(may_be_delayed(&world, Vec::new()), is_delayed, "{case}");
        assert!(
            !may_be_delayed(&published(&world), Vec::new()),
            "{case}, again"
        );
        let trouble = vec![Trouble::Failed("no quota".to_owned())];
        assert!(!may_be_delayed(&world, trouble), "{case}, in trouble");
    }
}

fn may_be_delayed(world: &World, trouble: Vec<Trouble>) -> bool {
    let observed = world.observed();
    let outcome = Outcome {
        trouble,
        ..Outcome::before(&observed)
    };
    let status = status(
        &observed,
        Stage::Live,
        &outcome,
        &settings(),
        &Time(world.now),
    );
    is_first_start(&observed, &outcome, &status)
}

//! The message of Ready for a pod that does not start.

use api::SandboxSpec;
use serde_json::{Value, json};

use super::super::{Outcome, is_first_start};
use super::world::{NAME, World, pod, sandbox, settings};

/// A sandbox whose pod has this status.
fn world(status: &Value) -> World {
    let mut own = pod(NAME, "Pending");
    own.status = Some(serde_json::from_value(status.clone()).unwrap());
    World::new(sandbox(SandboxSpec::default())).with_own_pod(own)
}

fn waiting(reason: &str, message: &str) -> Value {
    let waiting = json!({"reason": reason, "message": message});
    json!({"phase": "Pending", "containerStatuses": [container(&json!({"waiting": waiting}))]})
}

fn container(state: &Value) -> Value {
    json!({"name": "main", "image": "x", "imageID": "", "ready": false, "restartCount": 3, "state": state})
}

fn become_(world: &mut World, status: &Value) {
    world.pods[0].status = Some(serde_json::from_value(status.clone()).unwrap());
    world.settle();
}

#[test]
fn the_message_ends_with_what_keeps_the_pod_from_starting() {
    let mut crashed = container(&json!({"waiting": {
        "reason": "CrashLoopBackOff", "message": "back-off 40s restarting failed container=main",
    }}));
    crashed["lastState"] = json!({"terminated": {
        "exitCode": 137, "reason": "OOMKilled", "message": "token=hunter2",
    }});
    let mut failed = crashed.clone();
    failed["lastState"]["terminated"] = json!({"exitCode": 1, "reason": "Error"});
    let table = [
        (
            waiting("ErrImagePull", "x:1 is not found at r.example"),
            "Pod exists with phase: Pending; container \"main\": ErrImagePull: x:1 is not found at r.example",
        ),
        (
            waiting("RuntimeClassUnavailable", "no handler"),
            "Pod exists with phase: Pending; container \"main\": RuntimeClassUnavailable: no handler",
        ),
        (
            waiting("ContainerCreating", "secret \"s\" not found"),
            "Pod exists with phase: Pending; container \"main\": FailedMount: secret \"s\" not found",
        ),
        (
            waiting(
                "ImagePullBackOff",
                "Back-off pulling image \"x:1\": ErrImagePull: no such host",
            ),
            "Pod exists with phase: Pending; container \"main\": ImagePullBackOff: no such host",
        ),
        (
            json!({"phase": "Running", "containerStatuses": [crashed]}),
            "Pod is Running but not Ready; container \"main\": CrashLoopBackOff: the last run ended with code 137 (OOMKilled)",
        ),
        (
            json!({"phase": "Running", "containerStatuses": [failed]}),
            "Pod is Running but not Ready; container \"main\": CrashLoopBackOff: the last run ended with code 1",
        ),
        (
            json!({"phase": "Pending", "conditions": [{
                "type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": "no node has room",
            }]}),
            "Pod exists with phase: Pending; pod: Unschedulable: no node has room",
        ),
        (
            json!({"phase": "Pending", "initContainerStatuses": [
                {"name": "setup", "image": "", "imageID": "", "ready": false, "restartCount": 0,
                 "state": {"waiting": {"reason": "CreateContainerConfigError", "message": "secret \"s\" not found"}}},
            ], "containerStatuses": [container(&json!({"waiting": {"reason": "PodInitializing"}}))]}),
            "Pod exists with phase: Pending; container \"setup\": CreateContainerConfigError: secret \"s\" not found",
        ),
        (
            json!({"phase": "Pending", "containerStatuses": [container(&json!({"waiting": {"reason": "ContainerCreating"}}))]}),
            "Pod exists with phase: Pending",
        ),
    ];
    for (status, message) in table {
        let (_, reason, reported) = world(&status).ready();
        assert_eq!(
            (reason.as_str(), reported.as_str()),
            ("DependenciesNotReady", message)
        );
    }
}

#[test]
fn attempts_that_fail_alike_do_not_change_the_status() {
    let why = "x:1 is not found at r.example";
    let back_off = waiting(
        "ImagePullBackOff",
        &format!("Back-off pulling image \"x:1\": {why}"),
    );
    let mut world = world(&waiting("ErrImagePull", why));
    become_(&mut world, &back_off);
    let reported = world.status();
    let expected =
        format!("Pod exists with phase: Pending; container \"main\": ImagePullBackOff: {why}");
    assert_eq!(world.ready().2, expected);
    for status in [waiting("ErrImagePull", why), back_off] {
        become_(&mut world, &status);
        assert_eq!(world.status(), reported, "{status}");
    }
    // Older kubelets do not repeat why the pull failed.
    become_(
        &mut world,
        &waiting("ImagePullBackOff", "Back-off pulling image \"x:1\""),
    );
    assert_eq!(world.status(), reported);
    become_(
        &mut world,
        &waiting("ErrImagePull", "r.example does not answer"),
    );
    assert!(
        world
            .ready()
            .2
            .ends_with("ErrImagePull: r.example does not answer")
    );

    let crash = |delay: u32, restarts: u32| {
        json!({"phase": "Running", "containerStatuses": [{
            "name": "main", "image": "", "imageID": "", "ready": false, "restartCount": restarts,
            "state": {"waiting": {"reason": "CrashLoopBackOff", "message": format!("back-off {delay}s restarting")}},
            "lastState": {"terminated": {"exitCode": 1, "reason": "Error"}},
        }]})
    };
    become_(&mut world, &crash(10, 1));
    let reported = world.status();
    become_(&mut world, &crash(20, 2));
    assert_eq!(world.status(), reported);
}

#[test]
fn a_start_that_fails_is_reported_at_once() {
    let may_be_delayed = |status: &Value| {
        let mut world = world(status);
        world.sandbox.as_mut().unwrap().status = None;
        let observed = world.observed();
        let outcome = Outcome::before(&observed);
        let now = k8s_openapi::apimachinery::pkg::apis::meta::v1::Time(world.now);
        let status = super::super::status(
            &observed,
            super::super::Stage::Live,
            &outcome,
            &settings(),
            &now,
        );
        is_first_start(&observed, &outcome, &status)
    };
    assert!(may_be_delayed(&json!({"phase": "Pending"})));
    assert!(!may_be_delayed(&waiting("InvalidImageName", "x")));
}

#[test]
fn a_pod_that_is_up_or_stopping_has_no_failure_to_start() {
    let ready = json!({"phase": "Running", "podIPs": [{"ip": "10.0.0.7"}],
        "conditions": [{"type": "Ready", "status": "True"}],
        "containerStatuses": [container(&json!({"waiting": {"reason": "CrashLoopBackOff"}}))]});
    assert_eq!(world(&ready).ready().2, "Pod is Ready");
}

//! Tables over single decisions, and properties over whole lives of pods under a fake runtime.

use std::collections::BTreeMap;
use std::net::Ipv4Addr;
use std::time::Duration;

use jiff::Timestamp;
use k8s_openapi::api::core::v1::{ContainerStatus, Pod};
use proptest::prelude::*;
use serde_json::{Value, json};

use super::*;
use crate::runtime::PodSandbox;

fn at(seconds: i64) -> Timestamp {
    Timestamp::from_second(1_800_000_000 + seconds).unwrap()
}

#[expect(
    clippy::needless_pass_by_value,
    reason = "a table reads better with its values in place"
)]
fn pod(spec: Value) -> Pod {
    serde_json::from_value(
        json!({"metadata": {"name": "p", "namespace": "n", "uid": "u"}, "spec": spec}),
    )
    .unwrap()
}

fn uid() -> PodUid {
    PodUid::parse("u").unwrap()
}

fn sandbox() -> Sandbox {
    Sandbox::Ready(PodSandbox {
        address: Ipv4Addr::new(10, 0, 0, 5),
        ipv6_address: Some("fd00::5".parse().unwrap()),
        uid_base: 1 << 20,
    })
}

fn ended(code: i32, started: i64, finished: i64) -> Termination {
    Termination {
        exit_code: code,
        signal: None,
        reason: if code == 0 { "Completed" } else { "Error" }.to_owned(),
        message: None,
        started_at: Some(at(started)),
        finished_at: at(finished),
    }
}

fn running() -> ContainerState {
    ContainerState {
        phase: Phase::Running { started_at: at(0) },
        runs: 1,
        started: true,
        ready: true,
        ..ContainerState::default()
    }
}

fn crashed(times: u32, finished: i64) -> ContainerState {
    let mut state = ContainerState {
        runs: times,
        crashes: times - 1,
        ..ContainerState::default()
    };
    state.end(ended(1, finished - 1, finished));
    state
}

struct Case {
    pod: Pod,
    sandbox: Sandbox,
    containers: BTreeMap<String, ContainerState>,
    freezer: Freezer,
    cannot_freeze: Option<&'static str>,
}

impl Case {
    fn new(spec: Value) -> Self {
        Self {
            pod: pod(spec),
            sandbox: sandbox(),
            containers: BTreeMap::new(),
            freezer: Freezer::Thawed,
            cannot_freeze: None,
        }
    }

    /// The pod with a freezer in this state, and an annotation that asks for freezing or does not.
    fn freezer(mut self, freezer: Freezer, is_asked: bool) -> Self {
        self.freezer = freezer;
        let asked = (api::labels::FREEZE.to_owned(), "true".to_owned());
        let annotations = is_asked.then(|| [asked].into());
        self.pod.metadata.annotations = annotations;
        self
    }

    fn with(mut self, name: &str, state: ContainerState) -> Self {
        self.containers.insert(name.to_owned(), state);
        self
    }

    fn deleted(mut self, deadline: i64, grace: i64) -> Self {
        self.pod.metadata.deletion_timestamp = Some(
            k8s_openapi::apimachinery::pkg::apis::meta::v1::Time(at(deadline)),
        );
        self.pod.metadata.deletion_grace_period_seconds = Some(grace);
        self
    }

    fn plan(&self, now: i64) -> Plan {
        let observed = Observed {
            uid: &uid(),
            pod: &self.pod,
            sandbox: &self.sandbox,
            containers: &self.containers,
            verdict: None,
            accepted_at: at(0),
            node_address: "10.0.0.1".to_owned(),
            freezer: &self.freezer,
            cannot_freeze: self.cannot_freeze,
        };
        decide(&observed, at(now))
    }
}

fn probed() -> Case {
    Case::new(json!({"containers": [{"name": "c", "livenessProbe": {"tcpSocket": {"port": 1}}}]}))
}

fn frozen() -> Freezer {
    Freezer::Frozen { note: None }
}

fn failed(message: &str, retry: i64) -> Freezer {
    Freezer::FreezeFailed {
        message: message.to_owned(),
        retry_at: at(retry),
    }
}

fn reported(plan: &Plan, kind: &str) -> Option<(String, Option<String>)> {
    let mut conditions = plan.status.conditions.iter().flatten();
    let found = conditions.find(|condition| condition.type_ == kind)?;
    Some((found.status.clone(), found.reason.clone()))
}

fn status_and_reason(status: &str, reason: &str) -> (String, Option<String>) {
    (status.to_owned(), Some(reason.to_owned()))
}

#[test]
fn the_freezer_follows_the_annotation_once_the_pod_runs() {
    let starting = ContainerState {
        phase: Phase::Starting,
        runs: 2,
        previous: Some(ended(1, 0, 1)),
        ..ContainerState::default()
    };
    let thaw_failed = |retry| Freezer::ThawFailed {
        message: "m".to_owned(),
        retry_at: at(retry),
    };
    let table = vec![
        // A pod that has not started goes on to start.
        (
            probed().freezer(Freezer::Thawed, true),
            vec![start("c", 0, 0)],
        ),
        (
            probed().with("c", starting).freezer(Freezer::Thawed, true),
            vec![],
        ),
        (
            probed().with("c", running()).freezer(Freezer::Thawed, true),
            vec![Action::Freeze],
        ),
        // Nothing restarts in a frozen pod.
        (
            probed()
                .with("c", crashed(1, 0))
                .freezer(Freezer::Thawed, true),
            vec![Action::Freeze],
        ),
        (
            probed().with("c", crashed(1, 0)).freezer(frozen(), true),
            vec![],
        ),
        (
            probed().with("c", running()).freezer(frozen(), true),
            vec![],
        ),
        (
            probed().with("c", running()).freezer(frozen(), false),
            vec![Action::Thaw],
        ),
        (
            probed()
                .with("c", running())
                .freezer(Freezer::Freezing, false),
            vec![],
        ),
        (
            probed()
                .with("c", running())
                .freezer(Freezer::Thawing, true),
            vec![],
        ),
        (
            probed()
                .with("c", running())
                .freezer(failed("m", 200), true),
            vec![],
        ),
        (
            probed()
                .with("c", running())
                .freezer(failed("m", 100), true),
            vec![Action::Freeze],
        ),
        (
            probed()
                .with("c", running())
                .freezer(failed("m", 200), false),
            vec![Action::Thaw],
        ),
        (
            probed()
                .with("c", running())
                .freezer(thaw_failed(200), true),
            vec![Action::Freeze],
        ),
        (
            probed()
                .with("c", running())
                .freezer(thaw_failed(200), false),
            vec![],
        ),
        (
            probed()
                .with("c", running())
                .freezer(thaw_failed(100), false),
            vec![Action::Thaw],
        ),
    ];
    for (number, (case, expected)) in table.into_iter().enumerate() {
        assert_eq!(case.plan(100).actions, expected, "row {number}");
    }
    let waits = probed()
        .with("c", running())
        .freezer(failed("m", 200), true);
    assert_eq!(waits.plan(100).wake_at, Some(at(200)));
}

#[test]
fn a_frozen_pod_is_thawed_before_it_ends() {
    let mut timed_out = probed().with("c", running()).freezer(frozen(), true);
    timed_out.pod.spec.as_mut().unwrap().active_deadline_seconds = Some(50);
    let deleted = || probed().with("c", running()).deleted(130, 30);
    for case in [
        timed_out,
        deleted().freezer(frozen(), true),
        deleted().freezer(failed("m", 500), true),
        probed()
            .with("c", running())
            .deleted(100, 0)
            .freezer(frozen(), true),
    ] {
        assert_eq!(case.plan(100).actions, [Action::Thaw]);
    }
    // One that cannot be thawed is ended all the same.
    let stuck = Freezer::ThawFailed {
        message: "m".to_owned(),
        retry_at: at(500),
    };
    for freezer in [Freezer::Thawed, stuck] {
        let plan = deleted().freezer(freezer, true).plan(100);
        assert!(
            matches!(plan.actions[..], [Action::Stop { .. }]),
            "{plan:?}"
        );
    }
}

#[test]
fn the_deadline_of_a_frozen_pod_still_comes() {
    let mut case = probed().with("c", running()).freezer(frozen(), true);
    case.pod.spec.as_mut().unwrap().active_deadline_seconds = Some(150);
    assert_eq!(case.plan(100).wake_at, Some(at(150)));
}

#[test]
fn the_status_reports_the_freezer_of_pods_that_may_be_frozen() {
    let of_sandbox = |mut case: Case| {
        let label = (api::labels::SANDBOX_NAME_HASH.to_owned(), "1".to_owned());
        case.pod.metadata.labels = Some([label].into());
        case
    };
    let unlabelled = probed().with("c", running()).plan(100);
    assert_eq!(reported(&unlabelled, "Frozen"), None);
    let run = || probed().with("c", running());
    let table = vec![
        (
            of_sandbox(run()),
            status_and_reason("False", "Running"),
            "True",
        ),
        (
            of_sandbox(probed()),
            status_and_reason("False", "Running"),
            "False",
        ),
        (
            run().freezer(Freezer::Thawed, true),
            status_and_reason("False", "Freezing"),
            "True",
        ),
        (
            run().freezer(Freezer::Freezing, true),
            status_and_reason("False", "Freezing"),
            "False",
        ),
        (
            run().freezer(frozen(), true),
            status_and_reason("True", "Frozen"),
            "False",
        ),
        (
            of_sandbox(run().freezer(Freezer::Thawing, false)),
            status_and_reason("True", "Frozen"),
            "False",
        ),
        (
            run().freezer(failed("m", 0), true),
            status_and_reason("False", "FreezeFailed"),
            "False",
        ),
    ];
    for (number, (case, wanted, ready)) in table.into_iter().enumerate() {
        let plan = case.plan(100);
        assert_eq!(reported(&plan, "Frozen"), Some(wanted), "row {number}");
        assert_eq!(reported(&plan, "Ready").unwrap().0, ready, "row {number}");
    }
    let frozen = run().freezer(frozen(), true).plan(100);
    assert_eq!(
        reported(&frozen, "Ready"),
        Some(status_and_reason("False", "Frozen"))
    );
    // What its probes had found counts again once it is thawed.
    assert!(frozen.status.container_statuses.unwrap()[0].ready);
}

#[test]
fn a_node_without_a_freezer_reports_it_and_lets_the_pod_run() {
    let mut case = probed().with("c", running()).freezer(Freezer::Thawed, true);
    case.cannot_freeze = Some("no cgroups");
    let plan = case.plan(100);
    assert_eq!(plan.actions, []);
    assert_eq!(
        reported(&plan, "Frozen"),
        Some(status_and_reason("False", "FreezeNotSupported"))
    );
    assert_eq!(reported(&plan, "Ready").unwrap().0, "True");
}

fn start(container: &str, run: u32, crashes: u32) -> Action {
    Action::Start {
        container: container.to_owned(),
        run,
        crashes,
    }
}

fn one() -> Value {
    json!({"containers": [{"name": "c", "image": "host"}]})
}

fn status_of(plan: &Plan, index: usize) -> ContainerStatus {
    plan.status.container_statuses.as_ref().unwrap()[index].clone()
}

fn condition(plan: &Plan, kind: &str) -> (String, Option<String>) {
    let conditions = plan.status.conditions.as_ref().unwrap();
    let found = conditions
        .iter()
        .find(|condition| condition.type_ == kind)
        .unwrap();
    (found.status.clone(), found.reason.clone())
}

#[test]
fn a_new_pod_gets_a_sandbox_and_then_its_containers_together() {
    let two = json!({"containers": [{"name": "a"}, {"name": "b"}]});
    let mut case = Case::new(two);
    case.sandbox = Sandbox::Missing;
    let plan = case.plan(0);
    assert_eq!(plan.actions, [Action::CreateSandbox]);
    assert_eq!(plan.status.phase.as_deref(), Some("Pending"));
    let waiting = status_of(&plan, 0).state.unwrap().waiting.unwrap();
    assert_eq!(waiting.reason.as_deref(), Some("ContainerCreating"));
    case.sandbox = sandbox();
    let plan = case.plan(0);
    assert_eq!(plan.actions, [start("a", 0, 0), start("b", 0, 0)]);
    assert_eq!(plan.status.pod_ip.as_deref(), Some("10.0.0.5"));
    let addresses = plan.status.pod_ips.clone().unwrap_or_default();
    let addresses: Vec<String> = addresses.into_iter().map(|address| address.ip).collect();
    assert_eq!(addresses, ["10.0.0.5", "fd00::5"]);
}

#[test]
fn init_containers_run_one_after_the_other_before_the_rest() {
    let spec =
        json!({"initContainers": [{"name": "i"}, {"name": "j"}], "containers": [{"name": "c"}]});
    let plan = Case::new(spec.clone()).plan(0);
    assert_eq!(plan.actions, [start("i", 0, 0)]);
    assert_eq!(
        condition(&plan, "Initialized"),
        (
            "False".to_owned(),
            Some("ContainersNotInitialized".to_owned())
        )
    );
    let waiting = status_of(&plan, 0).state.unwrap().waiting.unwrap();
    assert_eq!(waiting.reason.as_deref(), Some("PodInitializing"));

    let done = ContainerState {
        phase: Phase::Ended(ended(0, 0, 1)),
        runs: 1,
        ..ContainerState::default()
    };
    let plan = Case::new(spec.clone()).with("i", done.clone()).plan(1);
    assert_eq!(plan.actions, [start("j", 0, 0)]);
    let plan = Case::new(spec.clone())
        .with("i", done.clone())
        .with("j", done)
        .plan(1);
    assert_eq!(plan.actions, [start("c", 0, 0)]);
    assert_eq!(condition(&plan, "Initialized").0, "True");

    let never = json!({"restartPolicy": "Never", "initContainers": [{"name": "i"}], "containers": [{"name": "c"}]});
    let plan = Case::new(never).with("i", crashed(1, 1)).plan(2);
    assert_eq!(plan.status.phase.as_deref(), Some("Failed"));
    assert_eq!(plan.actions, [Action::StopSandbox]);
}

#[test]
fn a_sidecar_keeps_running_and_goes_last() {
    let spec = json!({"initContainers": [{"name": "s", "restartPolicy": "Always"}], "containers": [{"name": "c"}]});
    assert_eq!(Case::new(spec.clone()).plan(0).actions, [start("s", 0, 0)]);
    let plan = Case::new(spec.clone()).with("s", running()).plan(0);
    assert_eq!(plan.actions, [start("c", 0, 0)]);
    let case = Case::new(spec)
        .with("s", running())
        .with("c", running())
        .deleted(30, 30);
    let stopped: Vec<_> = case.plan(0).actions;
    assert!(
        matches!(&stopped[..], [Action::Stop { container, .. }] if container == "c"),
        "{stopped:?}"
    );
}

#[test]
fn crashes_back_off_as_a_kubelet_does() {
    for (crashes, seconds) in [
        (1, 0),
        (2, 10),
        (3, 20),
        (4, 40),
        (5, 80),
        (6, 160),
        (7, 300),
        (40, 300),
    ] {
        assert_eq!(back_off(crashes), Duration::from_secs(seconds), "{crashes}");
    }
    assert_eq!(
        Case::new(one()).with("c", crashed(1, 5)).plan(5).actions,
        [start("c", 1, 1)],
        "the first restart is at once"
    );
    let plan = Case::new(one()).with("c", crashed(2, 5)).plan(6);
    assert_eq!((plan.actions.len(), plan.wake_at), (0, Some(at(15))));
    assert_eq!(plan.status.phase.as_deref(), Some("Running"));
    let status = status_of(&plan, 0);
    let waiting = status.state.unwrap().waiting.unwrap();
    assert_eq!(waiting.reason.as_deref(), Some("CrashLoopBackOff"));
    assert_eq!(
        waiting.message.as_deref(),
        Some("back-off 10s restarting failed container=c pod=p_n(u)")
    );
    assert_eq!(status.last_state.unwrap().terminated.unwrap().exit_code, 1);
    assert_eq!(status.restart_count, 1);
    assert_eq!(
        Case::new(one()).with("c", crashed(2, 5)).plan(15).actions,
        [start("c", 2, 2)]
    );
}

#[test]
fn a_long_run_forgets_earlier_crashes() {
    let mut state = ContainerState {
        runs: 6,
        crashes: 5,
        ..ContainerState::default()
    };
    state.end(ended(1, 0, 601));
    assert_eq!(state.crashes, 0);
}

#[test]
fn restart_policies_decide_how_a_pod_ends() {
    for (policy, code, phase, restarts) in [
        ("Never", 0, "Succeeded", false),
        ("Never", 3, "Failed", false),
        ("OnFailure", 0, "Succeeded", false),
        ("OnFailure", 3, "Running", true),
        ("Always", 0, "Running", true),
    ] {
        let spec = json!({"restartPolicy": policy, "containers": [{"name": "c"}]});
        let mut state = ContainerState {
            runs: 1,
            ..ContainerState::default()
        };
        state.end(ended(code, 0, 1));
        let plan = Case::new(spec).with("c", state).plan(1);
        assert_eq!(plan.status.phase.as_deref(), Some(phase), "{policy} {code}");
        let expected = if restarts {
            start("c", 1, 1)
        } else {
            Action::StopSandbox
        };
        assert_eq!(plan.actions, [expected], "{policy} {code}");
    }
}

#[test]
fn readiness_follows_the_containers_and_the_gates() {
    let plan = Case::new(one()).with("c", running()).plan(1);
    assert_eq!(condition(&plan, "Ready").0, "True");
    let unready = ContainerState {
        ready: false,
        ..running()
    };
    let plan = Case::new(one()).with("c", unready).plan(1);
    assert_eq!(
        condition(&plan, "Ready"),
        ("False".to_owned(), Some("ContainersNotReady".to_owned()))
    );
    assert_eq!(
        condition(&plan, "ContainersReady"),
        ("False".to_owned(), Some("ContainersNotReady".to_owned()))
    );
    let gated = json!({"containers": [{"name": "c"}], "readinessGates": [{"conditionType": "g"}]});
    let plan = Case::new(gated).with("c", running()).plan(1);
    assert_eq!(condition(&plan, "ContainersReady").0, "True");
    assert_eq!(
        condition(&plan, "Ready"),
        (
            "False".to_owned(),
            Some("ReadinessGatesNotReady".to_owned())
        )
    );
}

#[test]
fn an_unhealthy_container_is_stopped_with_its_grace() {
    let spec = json!({"terminationGracePeriodSeconds": 7, "containers": [{"name": "c"}]});
    let state = ContainerState {
        unhealthy: Some("why".to_owned()),
        ..running()
    };
    let plan = Case::new(spec).with("c", state).plan(1);
    let grace = Duration::from_secs(7);
    assert_eq!(
        plan.actions,
        [Action::Stop {
            container: "c".to_owned(),
            grace,
            why: "why".to_owned()
        }]
    );
}

#[test]
fn deletion_stops_then_kills_then_finishes() {
    let plan = Case::new(one())
        .with("c", running())
        .deleted(30, 30)
        .plan(0);
    assert!(
        matches!(&plan.actions[..], [Action::Stop { grace, .. }] if *grace == Duration::from_secs(30))
    );
    let stopping = ContainerState {
        phase: Phase::Stopping {
            started_at: at(0),
            kill_at: at(30),
        },
        ..running()
    };
    let plan = Case::new(one())
        .with("c", stopping.clone())
        .deleted(30, 30)
        .plan(10);
    assert_eq!((plan.actions.len(), plan.wake_at), (0, Some(at(30))));
    let kill = [Action::Kill {
        container: "c".to_owned(),
    }];
    assert_eq!(
        Case::new(one())
            .with("c", stopping.clone())
            .deleted(30, 30)
            .plan(30)
            .actions,
        kill
    );
    assert_eq!(
        Case::new(one())
            .with("c", stopping)
            .deleted(10, 0)
            .plan(10)
            .actions,
        kill,
        "no grace left"
    );
    assert_eq!(
        Case::new(one())
            .with("c", crashed(1, 5))
            .deleted(30, 30)
            .plan(6)
            .actions,
        [Action::Finish]
    );
    let mut creating = Case::new(one()).deleted(30, 30);
    creating.sandbox = Sandbox::Creating;
    assert_eq!(
        creating.plan(1).actions,
        [],
        "what is being made is waited for"
    );
}

#[test]
fn a_pod_that_is_over_frees_its_sandbox_however_far_that_had_come() {
    let spec = json!({"activeDeadlineSeconds": 5, "containers": [{"name": "c", "image": "host"}]});
    let waiting = Sandbox::Waiting {
        reason: WaitingReason::ContainerCreating,
        message: "no such volume".to_owned(),
        retry_at: Some(at(20)),
    };
    for sandbox in [Sandbox::Missing, waiting, sandbox()] {
        let mut case = Case::new(spec.clone());
        case.sandbox = sandbox;
        assert_eq!(case.plan(6).actions, [Action::StopSandbox]);
        case.sandbox = Sandbox::Stopped { address: None };
        assert_eq!(case.plan(6).actions, [], "once");
    }
}

#[test]
fn a_sandbox_that_waits_for_an_object_is_not_tried_again_by_the_clock() {
    let mut case = Case::new(json!({"containers": [{"name": "c", "image": "host"}]}));
    let waiting = |retry_at| Sandbox::Waiting {
        reason: WaitingReason::ContainerCreating,
        message: "persistentvolumeclaim \"c\" is not bound".to_owned(),
        retry_at,
    };
    case.sandbox = waiting(None);
    let plan = case.plan(1000);
    assert_eq!((plan.actions, plan.wake_at), (Vec::new(), None));
    case.sandbox = waiting(Some(at(5)));
    assert_eq!(case.plan(4).wake_at, Some(at(5)));
    assert_eq!(case.plan(5).actions, [Action::CreateSandbox]);
}

#[test]
fn a_pod_whose_sandbox_was_lost_is_prepared_again() {
    let spec = json!({"initContainers": [{"name": "i"}], "containers": [{"name": "c"}]});
    let lost = |state: ContainerState| ContainerState {
        lost_runs: state.runs,
        ..state
    };
    let prepared = ContainerState {
        phase: Phase::NotStarted,
        runs: 1,
        previous: Some(ended(0, 0, 1)),
        ..ContainerState::default()
    };
    let case = Case::new(spec)
        .with("i", lost(prepared))
        .with("c", lost(crashed(1, 5)));
    let plan = case.plan(100);
    assert_eq!(plan.actions, [start("i", 1, 0)]);
    assert_eq!(condition(&plan, "Initialized").0, "False");
}

#[test]
fn what_is_being_started_when_the_pod_is_deleted_or_over_is_given_up() {
    let starting = || ContainerState {
        phase: Phase::Starting,
        runs: 1,
        ..ContainerState::default()
    };
    let kill = [Action::Kill {
        container: "c".to_owned(),
    }];
    for grace in [0, 30] {
        let case = Case::new(one()).with("c", starting()).deleted(grace, grace);
        assert_eq!(case.plan(0).actions, kill, "with a grace of {grace} s");
    }
    let spec = json!({"activeDeadlineSeconds": 5, "containers": [{"name": "c"}]});
    assert_eq!(Case::new(spec).with("c", starting()).plan(5).actions, kill);
}

#[test]
fn a_deleted_pod_says_how_it_ended_before_it_goes() {
    let over = |codes: &[i32]| {
        let names = ["a", "b"];
        let containers: Vec<Value> = names.iter().map(|name| json!({"name": name})).collect();
        let mut case = Case::new(json!({"containers": containers})).deleted(30, 30);
        for (name, code) in names.iter().zip(codes) {
            let mut state = running();
            state.end(ended(*code, 0, 1));
            case = case.with(name, state);
        }
        let plan = case.plan(1);
        assert_eq!(plan.actions, [Action::Finish]);
        plan.status
    };
    let well = over(&[0, 0]);
    assert_eq!(well.phase.as_deref(), Some("Succeeded"));
    let badly = over(&[0, 143]);
    assert_eq!(badly.phase.as_deref(), Some("Failed"));
    let states = badly.container_statuses.unwrap();
    let end = states[1].state.as_ref().unwrap().terminated.as_ref();
    assert_eq!(end.unwrap().exit_code, 143);
    assert_eq!(
        over(&[]).phase.as_deref(),
        Some("Failed"),
        "what never ran did not succeed"
    );
    let stopping = Case::new(one())
        .with("c", running())
        .deleted(30, 30)
        .plan(1);
    assert_eq!(stopping.status.phase.as_deref(), Some("Running"));
}

#[test]
fn a_deadline_ends_the_pod_and_says_so() {
    let spec = json!({"activeDeadlineSeconds": 5, "containers": [{"name": "c"}]});
    let plan = Case::new(spec.clone()).with("c", running()).plan(4);
    assert_eq!(plan.wake_at, Some(at(5)));
    let plan = Case::new(spec).with("c", running()).plan(5);
    assert_eq!(
        (plan.status.phase.as_deref(), plan.status.reason.as_deref()),
        (Some("Failed"), Some("DeadlineExceeded"))
    );
    assert!(matches!(&plan.actions[..], [Action::Stop { .. }]));
}

#[test]
fn transition_times_change_only_with_the_condition() {
    let mut case = Case::new(one()).with("c", running());
    case.pod.status = Some(case.plan(1).status);
    let later = case.plan(100);
    assert_eq!(Some(&later.status), case.pod.status.as_ref());
}

/// What the world does to a pod between decisions.
#[derive(Debug, Clone)]
enum WorldEvent {
    Exit(usize, i32),
    Ready(usize, bool),
    Unhealthy(usize),
    Wait(i64),
    Delete(i64),
}

fn world_events() -> impl Strategy<Value = Vec<WorldEvent>> {
    let one = prop_oneof![
        (0..3_usize, 0..3_i32).prop_map(|(index, code)| WorldEvent::Exit(index, code)),
        (0..3_usize, any::<bool>()).prop_map(|(index, ready)| WorldEvent::Ready(index, ready)),
        (0..3_usize).prop_map(WorldEvent::Unhealthy),
        (1..400_i64).prop_map(WorldEvent::Wait),
        (0..60_i64).prop_map(WorldEvent::Delete),
    ];
    proptest::collection::vec(one, 0..60)
}

/// A fake runtime that carries out every action immediately.
struct World {
    case: Case,
    now: i64,
    finished: bool,
}

const NAMES: [&str; 3] = ["i", "a", "b"];

impl World {
    fn settle(&mut self) -> Result<(), TestCaseError> {
        for _ in 0..50 {
            let plan = self.case.plan(self.now);
            self.check(&plan)?;
            let again = self.case.plan(self.now);
            prop_assert_eq!(&plan, &again, "a decision depends on nothing but its input");
            self.case.pod.status = Some(plan.status);
            if plan.actions.is_empty() {
                return Ok(());
            }
            for action in plan.actions {
                self.perform(action)?;
            }
        }
        Err(TestCaseError::fail("the pod never came to rest"))
    }

    fn perform(&mut self, action: Action) -> Result<(), TestCaseError> {
        let now = at(self.now);
        match action {
            Action::CreateSandbox => self.case.sandbox = sandbox(),
            Action::Start { container, run, .. } => {
                let state = self.case.containers.entry(container).or_default();
                prop_assert!(!state.is_live(), "a container was started twice");
                prop_assert_eq!(state.runs, run);
                if let Phase::Ended(end) = &state.phase {
                    state.previous = Some(end.clone());
                }
                state.runs += 1;
                state.phase = Phase::Running { started_at: now };
                (state.started, state.ready) = (true, true);
            }
            Action::Stop { container, .. } | Action::Kill { container } => {
                let state = self
                    .case
                    .containers
                    .get_mut(&container)
                    .expect("only started containers are stopped");
                let Phase::Running { started_at } = state.phase else {
                    return Err(TestCaseError::fail(
                        "a container that does not run was stopped",
                    ));
                };
                state.end(Termination {
                    started_at: Some(started_at),
                    finished_at: now,
                    ..ended(143, 0, 0)
                });
            }
            Action::StopSandbox => {
                prop_assert!(!self.case.containers.values().any(ContainerState::is_live));
                self.case.sandbox = Sandbox::Stopped { address: None };
            }
            Action::Freeze | Action::Thaw => prop_assert!(false, "nothing asks for it"),
            Action::Finish => {
                prop_assert!(self.case.pod.metadata.deletion_timestamp.is_some());
                prop_assert!(!self.case.containers.values().any(ContainerState::is_live));
                self.finished = true;
                self.case.sandbox = Sandbox::Stopping;
            }
        }
        Ok(())
    }

    fn check(&self, plan: &Plan) -> Result<(), TestCaseError> {
        let before = self
            .case
            .pod
            .status
            .as_ref()
            .and_then(|status| status.phase.clone());
        let phase = plan.status.phase.clone();
        if matches!(before.as_deref(), Some("Succeeded" | "Failed")) {
            prop_assert_eq!(before, phase.clone(), "an end stands");
        }
        let ready = condition(plan, "Ready").0 == "True";
        if ready {
            prop_assert_eq!(
                phase.as_deref(),
                Some("Running"),
                "only running pods are ready"
            );
        }
        let live = self.case.containers.values().any(ContainerState::is_live);
        if self.case.pod.metadata.deletion_timestamp.is_some() {
            let starts = plan
                .actions
                .iter()
                .any(|action| matches!(action, Action::Start { .. } | Action::CreateSandbox));
            prop_assert!(!starts, "nothing starts in a pod that is being deleted");
            prop_assert!(live || self.finished || plan.actions.contains(&Action::Finish));
        }
        Ok(())
    }

    fn take(&mut self, event: &WorldEvent) {
        let now = at(self.now);
        match *event {
            WorldEvent::Exit(index, code) => {
                if let Some(state) = self.case.containers.get_mut(NAMES[index])
                    && let Phase::Running { started_at } = state.phase
                {
                    state.end(Termination {
                        started_at: Some(started_at),
                        finished_at: now,
                        ..ended(code, 0, 0)
                    });
                }
            }
            WorldEvent::Ready(index, ready) => {
                if let Some(state) = self.case.containers.get_mut(NAMES[index]) {
                    state.ready = ready && state.is_live();
                }
            }
            WorldEvent::Unhealthy(index) => {
                if let Some(state) = self
                    .case
                    .containers
                    .get_mut(NAMES[index])
                    .filter(|state| state.is_live())
                {
                    state.unhealthy = Some("probe".to_owned());
                }
            }
            WorldEvent::Wait(seconds) => self.now += seconds,
            WorldEvent::Delete(grace) => {
                let metadata = &mut self.case.pod.metadata;
                metadata.deletion_timestamp = Some(
                    k8s_openapi::apimachinery::pkg::apis::meta::v1::Time(at(self.now + grace)),
                );
                metadata.deletion_grace_period_seconds = Some(grace);
            }
        }
    }
}

proptest! {
    #[test]
    fn whatever_happens_a_pod_comes_to_rest_and_a_deleted_one_goes(
        policy in prop_oneof![Just("Always"), Just("OnFailure"), Just("Never")],
        events in world_events(),
    ) {
        let spec = json!({"restartPolicy": policy, "initContainers": [{"name": "i"}], "containers": [{"name": "a"}, {"name": "b"}]});
        let mut case = Case::new(spec);
        case.sandbox = Sandbox::Missing;
        let mut world = World { case, now: 0, finished: false };
        world.settle()?;
        for event in events {
            if world.finished {
                break;
            }
            world.take(&event);
            world.settle()?;
        }
        if !world.finished {
            world.take(&WorldEvent::Delete(0));
            world.settle()?;
        }
        prop_assert!(world.finished, "a deleted pod is removed");
    }
}

/// The largest numbers that the API takes are legal, and mean "never".
#[test]
fn periods_beyond_all_time_saturate() {
    let mut pod = pod(json!({"containers": [{"name": "main"}]}));
    let spec = pod.spec.as_mut().unwrap();
    spec.active_deadline_seconds = Some(i64::MAX);
    spec.termination_grace_period_seconds = Some(i64::MAX);
    for deletion in [
        None,
        Some((at(0), 0)),
        Some((Timestamp::MAX, i64::MAX)),
        Some((Timestamp::MIN, i64::MIN)),
    ] {
        pod.metadata.deletion_timestamp =
            deletion.map(|(when, _)| k8s_openapi::apimachinery::pkg::apis::meta::v1::Time(when));
        pod.metadata.deletion_grace_period_seconds = deletion.map(|(_, grace)| grace);
        for now in [at(0), Timestamp::MIN, Timestamp::MAX] {
            for phase in [
                Phase::NotStarted,
                Phase::Running { started_at: now },
                Phase::Stopping {
                    started_at: now,
                    kill_at: Timestamp::MAX,
                },
                Phase::Refused {
                    reason: WaitingReason::ErrImagePull,
                    message: String::new(),
                    since: now,
                    retry_at: Timestamp::MAX,
                },
                Phase::Ended(Termination::not_started(String::new(), now)),
            ] {
                let state = ContainerState {
                    phase,
                    crashes: 9,
                    runs: 1,
                    unhealthy: Some(String::new()),
                    ..ContainerState::default()
                };
                let containers = BTreeMap::from([("main".to_owned(), state)]);
                let observed = Observed {
                    uid: &uid(),
                    pod: &pod,
                    sandbox: &sandbox(),
                    containers: &containers,
                    verdict: None,
                    accepted_at: now,
                    node_address: String::new(),
                    freezer: &Freezer::Thawed,
                    cannot_freeze: None,
                };
                decide(&observed, now);
            }
        }
    }
}

//! `up` is killed in the middle of many runs and started again. Needs root: it starts containers.

use std::collections::{BTreeMap, BTreeSet};
use std::io::{BufRead, BufReader};
use std::process::{Child, Stdio};
use std::sync::mpsc;
use std::time::{Duration, Instant};

use k8s_openapi::api::core::v1::Pod;
use kube::api::ListParams;
use kube::{Api, ResourceExt};
use rustix::process::Signal;

use crate::machine::{self, Holdings};
use crate::streams::client;
use crate::support::{Up, run, stdout_of};

const RUNS: usize = 50;
/// `up` is killed when so many commands run: others are then being claimed, started, or still to come.
const RUNNING_AT_THE_CRASH: usize = 25;
/// Prepared slots that a node keeps beyond those in use.
const SPARE_PLACES: usize = 4;
const WARM: usize = 2;
/// The agent and the runtime of a sandbox, and no command.
const PROCESSES: usize = 2;
const DEADLINE: Duration = Duration::from_secs(300);

/// What a command in a sandbox leaves there: its number, and when the container's first process was started.
const COMMAND: &str =
    "echo $0 > note; cut -d' ' -f22 /proc/1/stat > boot; echo started; exec sleep 1000";
const RECALL: &str = "cat note boot 2>/dev/null; cut -d' ' -f22 /proc/1/stat";

#[test]
fn a_crash_in_the_middle_of_many_runs_loses_and_leaks_nothing() {
    let mut up = Up::start(&[]);
    let mut runs: Vec<Child> = (0..RUNS).map(|number| start_run(&up, number)).collect();
    let started = await_started(&mut runs);
    let acknowledged = names(&up, "claims");
    up.kill();
    for run in &mut runs {
        run.kill().expect("a run can be killed");
        run.wait().expect("a run can be waited for");
    }
    up.start_again();

    let claims = names(&up, "claims");
    let lost: Vec<_> = acknowledged.difference(&claims).collect();
    assert!(lost.is_empty(), "claims are gone: {lost:?}");
    let mut recalled = BTreeSet::new();
    for claim in &claims {
        let output = recall(&up, claim);
        let lines: Vec<&str> = output.lines().collect();
        // A run that was killed before its command began has written nothing, but its sandbox exists.
        if let [number, before, now] = lines[..] {
            assert_eq!(
                before, now,
                "the container of run {number} was started again"
            );
            recalled.insert(number.parse::<usize>().expect("a number"));
        }
    }
    let forgotten: Vec<_> = started.difference(&recalled).collect();
    assert!(forgotten.is_empty(), "files are gone of runs {forgotten:?}");

    await_settled(&up, claims.len());

    let tag = machine::tag_of(up.home());
    let home = up.home().to_owned();
    up.delete_everything();
    up.signal(Signal::TERM);
    assert_eq!(
        machine::holdings(&home, &tag),
        Holdings::default(),
        "something is left behind"
    );
}

#[test]
fn a_disk_that_fails_ends_up_with_a_reason_and_loses_nothing_acknowledged() {
    let mut up = Up::start_with_writes_that_may_fail();
    let acknowledged = stdout_of(up.command().args(["claim", "-o", "name"]));
    up.fail_writes();
    let refused = run(up.command().arg("claim"));
    assert!(!refused.status.success(), "a write was acknowledged");
    let (code, complaints) = up.outcome();
    assert_eq!(code, Some(1), "{complaints}");
    assert!(
        complaints.contains("error: the API server failed"),
        "{complaints}"
    );

    up.start_again();
    let claims = stdout_of(up.command().args(["list", "claims", "-o", "name"]));
    assert_eq!(claims, acknowledged);
}

fn start_run(up: &Up, number: usize) -> Child {
    let mut command = up.command();
    command
        .args(["run", "--", "sh", "-c", COMMAND, &number.to_string()])
        .stdout(Stdio::piped())
        .stderr(Stdio::null());
    command.spawn().expect("the binary starts")
}

/// Waits until enough commands run, and returns them.
fn await_started(runs: &mut [Child]) -> BTreeSet<usize> {
    let (sender, receiver) = mpsc::channel();
    for (number, run) in runs.iter_mut().enumerate() {
        let output = run.stdout.take().expect("standard output is piped");
        let sender = sender.clone();
        std::thread::spawn(move || {
            let first = BufReader::new(output).lines().next();
            if first.is_some_and(|line| line.is_ok_and(|line| line == "started")) {
                let _ = sender.send(number);
            }
        });
    }
    let deadline = Instant::now() + DEADLINE;
    let mut started = BTreeSet::new();
    while started.len() < RUNNING_AT_THE_CRASH {
        let left = deadline.saturating_duration_since(Instant::now());
        started.insert(receiver.recv_timeout(left).expect("commands start in time"));
    }
    started
}

/// The files that commands left in a claim's sandbox. The panic for an unusable claim contains its state.
fn recall(up: &Up, claim: &str) -> String {
    let output = run(up.command().args(["exec", claim, "--", "sh", "-c", RECALL]));
    if output.status.success() {
        return String::from_utf8(output.stdout).expect("output is text");
    }
    let sandbox = format!("sandbox/{claim}");
    let known = [
        vec!["get", claim],
        vec!["get", &sandbox],
        vec!["status"],
        vec!["list", "sandboxes"],
    ];
    let known = known.map(|question| run(up.command().args(question)).stdout);
    panic!(
        "{claim}: {}\n{}",
        String::from_utf8_lossy(&output.stderr),
        String::from_utf8_lossy(&known.join(&b'\n'))
    );
}

fn names(up: &Up, kind: &str) -> BTreeSet<String> {
    let listed = stdout_of(up.command().args(["list", kind, "-o", "name"]));
    listed.lines().map(str::to_owned).collect()
}

/// The pods of sandboxes that the API knows, by UID, with whether they are ready.
fn pods(up: &Up) -> BTreeMap<String, bool> {
    let runtime = tokio::runtime::Runtime::new().expect("a runtime");
    let pods = runtime.block_on(async {
        let pods: Api<Pod> = Api::default_namespaced(client(up).await);
        let of_sandboxes = ListParams::default().labels(api::labels::SANDBOX_NAME_HASH);
        pods.list(&of_sandboxes).await.expect("pods can be listed")
    });
    let is_ready = |pod: &Pod| {
        let conditions = pod
            .status
            .iter()
            .flat_map(|status| status.conditions.iter().flatten());
        conditions
            .filter(|condition| condition.type_ == "Ready")
            .any(|condition| condition.status == "True")
    };
    let pods = pods.iter();
    pods.map(|pod| (pod.uid().expect("a uid"), is_ready(pod)))
        .collect()
}

/// Waits until the pool is full again and the machine holds what the pods of the API need, and nothing else.
fn await_settled(up: &Up, claims: usize) {
    let tag = machine::tag_of(up.home());
    let deadline = Instant::now() + DEADLINE;
    loop {
        let pods = pods(up);
        let held = machine::holdings(up.home(), &tag);
        let wanted: BTreeSet<String> = pods.keys().cloned().collect();
        let settled = pods.len() == claims + WARM
            && pods.values().all(|ready| *ready)
            && names(up, "sandboxes").len() == claims + WARM
            && held.groups == wanted
            && held.directories == wanted
            && held.places() == wanted.len() + SPARE_PLACES
            && held.links == held.places()
            && held.tables == machine::expected_tables()
            && held.processes.values().all(|of| of.len() == PROCESSES);
        if settled {
            return;
        }
        assert!(
            Instant::now() < deadline,
            "{claims} claims, but pods {pods:?} and {held:?}"
        );
        std::thread::park_timeout(Duration::from_millis(200));
    }
}

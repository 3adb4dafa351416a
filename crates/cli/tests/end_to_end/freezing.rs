//! Suspension by freezing, as a person uses it. Needs root: it starts containers.

use std::io::{Read, Write};
use std::net::TcpStream;
use std::time::{Duration, Instant};

use k8s_openapi::api::core::v1::Pod;
use kube::Api;
use kube::api::{Patch, PatchParams, PostParams};
use rustix::process::Signal;
use serde_json::{Value, json};

use crate::machine::{self, Holdings};
use crate::streams::client;
use crate::support::{Up, stderr_of, stdout_of};

const DEADLINE: Duration = Duration::from_secs(60);
/// Between two looks at something that takes a while.
const PAUSE: Duration = Duration::from_millis(10);

/// Counts in memory from a random number on, and writes every count to a file.
const COUNTER: &str = r#"
import os, time
seed = int.from_bytes(os.urandom(4), "big")
block = os.urandom(1 << 22)
count = 0
while True:
    count += 1
    with open("count.new", "w") as file:
        file.write(f"{seed} {count} {hash(block)}\n")
    os.rename("count.new", "count")
    time.sleep(0.01)
"#;

/// The counter's file: its seed, the count and the hash of its memory.
#[derive(Debug, PartialEq, Eq)]
struct Count {
    identity: (String, String),
    count: u64,
}

fn parse(text: &str) -> Count {
    let words: Vec<&str> = text.split_whitespace().collect();
    let [seed, count, hash] = words[..] else {
        panic!("{text:?}");
    };
    Count {
        identity: (seed.to_owned(), hash.to_owned()),
        count: count.parse().unwrap(),
    }
}

/// The counter's file, from inside.
fn count(up: &Up, claim: &str) -> Count {
    let script = "until test -f count; do sleep 0.01; done; cat count";
    parse(&stdout_of(
        up.command().args(["exec", claim, "--", "sh", "-c", script]),
    ))
}

/// The counter's file as it is on disk, while nothing inside can be asked.
fn count_outside(up: &Up) -> Count {
    let pods = up.home().join("node/pods");
    let found = files_named(&pods, "count");
    let [file] = &found[..] else {
        panic!("{found:?}");
    };
    parse(&std::fs::read_to_string(file).unwrap())
}

fn files_named(directory: &std::path::Path, name: &str) -> Vec<std::path::PathBuf> {
    let mut found = Vec::new();
    for entry in std::fs::read_dir(directory).into_iter().flatten().flatten() {
        let kind = entry.file_type().unwrap();
        if kind.is_dir() {
            found.extend(files_named(&entry.path(), name));
        } else if kind.is_file() && entry.file_name() == name {
            found.push(entry.path());
        }
    }
    found
}

fn start_counter(up: &Up, claim: &str) {
    let script = format!("nohup python3 -c '{COUNTER}' >/dev/null 2>&1 &");
    stdout_of(
        up.command()
            .args(["exec", claim, "--", "sh", "-c", &script]),
    );
}

fn until<T>(what: &str, mut attempt: impl FnMut() -> Option<T>) -> T {
    let deadline = Instant::now() + DEADLINE;
    loop {
        if let Some(found) = attempt() {
            return found;
        }
        assert!(Instant::now() < deadline, "{what}");
        std::thread::sleep(PAUSE);
    }
}

/// Whether nothing of the counter moves for a while, seen from outside.
fn assert_still(up: &Up) -> Count {
    let before = count_outside(up);
    let waited = Instant::now();
    // No event tells that nothing happens: the counter would have counted to thirty.
    while waited.elapsed() < Duration::from_millis(300) {
        std::thread::sleep(PAUSE);
    }
    let after = count_outside(up);
    assert_eq!(before, after);
    after
}

fn json_of(up: &Up, arguments: &[&str]) -> Value {
    let text = stdout_of(up.command().args(arguments).args(["-o", "json"]));
    serde_json::from_str(&text).unwrap()
}

/// Status and reason of a condition.
fn condition(object: &Value, kind: &str) -> (String, String) {
    let conditions = object["status"]["conditions"].as_array().unwrap();
    let found = conditions
        .iter()
        .find(|condition| condition["type"] == kind);
    let found = found.unwrap_or_else(|| panic!("{object}"));
    let text = |field: &str| found[field].as_str().unwrap().to_owned();
    (text("status"), text("reason"))
}

/// The router's whole answer to a request to a claim's sandbox, and how long it took.
fn request(up: &Up, claim: &str) -> (String, Duration) {
    let router = up.ready()["router"].as_str().unwrap();
    let address = router.trim_start_matches("http://");
    let began = Instant::now();
    let mut stream = TcpStream::connect(address).unwrap();
    let head = format!(
        "GET / HTTP/1.1\r\nHost: {address}\r\nX-Sandbox-ID: {claim}\r\nConnection: close\r\n\r\n"
    );
    stream.write_all(head.as_bytes()).unwrap();
    let mut answer = String::new();
    stream.read_to_string(&mut answer).unwrap();
    (answer, began.elapsed())
}

#[test]
fn a_frozen_sandbox_stands_still_and_goes_on_without_loss() {
    let mut up = Up::start(&[]);
    stdout_of(up.command().args(["claim", "mine"]));
    start_counter(&up, "mine");
    let running = count(&up, "mine");

    let said = stdout_of(
        up.command()
            .args(["suspend", "mine", "--strategy", "Freeze"]),
    );
    assert_eq!(said, "mine is frozen\n");
    let frozen = assert_still(&up);
    assert_eq!(frozen.identity, running.identity);
    let sandbox = json_of(&up, &["get", "mine"])["status"]["sandbox"]["name"].clone();
    let sandbox = format!("sandbox/{}", sandbox.as_str().unwrap());
    let suspended = |up: &Up| condition(&json_of(up, &["get", &sandbox]), "Suspended");
    let expected = ("True".to_owned(), "Frozen".to_owned());
    assert_eq!(suspended(&up), expected);
    assert_eq!(
        condition(&json_of(&up, &["get", "mine"]), "Suspended"),
        expected
    );
    for kind in ["claims", "sandboxes"] {
        let listed = stdout_of(up.command().args(["list", kind]));
        assert!(listed.contains("Frozen"), "{listed}");
    }
    let status = stdout_of(up.command().arg("status"));
    assert!(status.contains("1 suspended (1 frozen)"), "{status}");
    assert!(status.contains("Nothing is stuck."), "{status}");

    let (answer, took) = request(&up, "mine");
    assert!(answer.starts_with("HTTP/1.1 503"), "{answer}");
    assert!(
        answer.contains("is suspended") && answer.contains("(frozen)"),
        "{answer}"
    );
    assert!(took < Duration::from_secs(5), "{took:?}");
    let error = stderr_of(up.command().args(["exec", "mine", "--", "true"]));
    assert!(error.contains("suspended"), "{error}");

    for signal in [Signal::TERM, Signal::KILL] {
        up.restart(signal);
        assert_eq!(suspended(&up), expected, "after {signal:?}");
        assert_eq!(assert_still(&up), frozen, "after {signal:?}");
    }

    assert_eq!(
        stdout_of(up.command().args(["resume", "mine"])),
        "mine is running\n"
    );
    let resumed = until("the counter goes on", || {
        let now = count(&up, "mine");
        (now.count > frozen.count).then_some(now)
    });
    assert_eq!(resumed.identity, frozen.identity);

    // Its claim keeps the strategy, and a frozen sandbox goes like any other.
    assert_eq!(
        stdout_of(up.command().args(["suspend", "mine"])),
        "mine is frozen\n"
    );
    stdout_of(up.command().args(["delete", "--wait", "mine"]));
    let (tag, home) = (machine::tag_of(up.home()), up.home().to_owned());
    up.delete_everything();
    up.signal(Signal::TERM);
    let left = machine::holdings(&home, &tag);
    assert_eq!(left, Holdings::default(), "something is left behind");
}

#[test]
fn what_was_asked_for_while_up_was_away_happens_when_it_is_back() {
    let mut up = Up::start(&[]);
    stdout_of(up.command().args(["claim", "mine"]));
    start_counter(&up, "mine");
    count(&up, "mine");
    for command in ["suspend", "resume"] {
        // Killed as soon as the spec is written, or anywhere after.
        let mut changing = up.command();
        changing.args([command, "mine"]);
        if command == "suspend" {
            changing.args(["--strategy", "Freeze"]);
        }
        let mut changing = changing
            .stdout(std::process::Stdio::null())
            .stderr(std::process::Stdio::null())
            .spawn()
            .unwrap();
        let wanted = if command == "suspend" {
            "Suspended"
        } else {
            "Running"
        };
        until("the spec is written", || {
            let sandboxes = json_of(&up, &["list", "sandboxes"]);
            let mut items = sandboxes["items"].as_array().unwrap().iter();
            items
                .any(|one| {
                    one["spec"]["operatingMode"] == wanted
                        && one["spec"]["suspensionStrategy"]["type"] == "Freeze"
                })
                .then_some(())
        });
        up.kill();
        let _ = changing.kill();
        changing.wait().unwrap();
        up.start_again();
        if command == "suspend" {
            until("the sandbox is frozen", || {
                stdout_of(up.command().args(["list", "sandboxes"]))
                    .contains("Frozen")
                    .then_some(())
            });
            assert_still(&up);
        } else {
            let stood = count_outside(&up);
            until("the counter goes on", || {
                (count_outside(&up).count > stood.count).then_some(())
            });
        }
    }
}

#[test]
fn probes_do_not_end_a_frozen_pod_and_its_api_answers_at_once() {
    let up = Up::start(&["--no-quickstart"]);
    let runtime = tokio::runtime::Runtime::new().unwrap();
    let pods: Api<Pod> = Api::default_namespaced(runtime.block_on(client(&up)));
    let probe = json!({
        "exec": {"command": ["true"]}, "periodSeconds": 1, "timeoutSeconds": 1, "failureThreshold": 1,
    });
    let pod = json!({
        "metadata": {"name": "probed"},
        "spec": {"containers": [{
            "name": "main", "image": "host", "command": ["sleep", "1000"],
            "livenessProbe": probe, "readinessProbe": probe,
        }]},
    });
    let pod: Pod = serde_json::from_value(pod).unwrap();
    let parameters = PostParams::default();
    let create = pods.create(&parameters, &pod);
    runtime.block_on(create).unwrap();
    let condition_is = |kind: &str, status: &str| {
        let pod = runtime.block_on(pods.get("probed")).unwrap();
        let conditions = pod.status.as_ref()?.conditions.clone()?;
        let found = conditions
            .iter()
            .find(|condition| condition.type_ == kind)?;
        (found.status == status).then_some(pod)
    };
    until("the pod is ready", || condition_is("Ready", "True"));
    let annotate = |value: Value| {
        let patch = json!({"metadata": {"annotations": {api::labels::FREEZE: value}}});
        let (parameters, patch) = (PatchParams::default(), Patch::Merge(&patch));
        let patched = pods.patch("probed", &parameters, &patch);
        runtime.block_on(patched).unwrap();
    };
    annotate(json!("true"));
    until("the pod is frozen", || condition_is("Frozen", "True"));
    let frozen = until("the pod is not ready", || condition_is("Ready", "False"));
    let began = Instant::now();
    let parameters = kube::api::AttachParams::default();
    let attempt = pods.exec("probed", ["true"], &parameters);
    let refused = runtime
        .block_on(attempt)
        .err()
        .map(|error| error.to_string());
    assert!(refused.is_some(), "a frozen pod ran a command");
    assert!(began.elapsed() < Duration::from_secs(5));
    let forward = async {
        let mut forward = pods.portforward("probed", &[8080]).await?;
        let mut stream = forward.take_stream(8080).unwrap();
        let mut byte = [0];
        let _ = tokio::io::AsyncReadExt::read(&mut stream, &mut byte).await;
        forward.join().await.map_err(anyhow::Error::from)
    };
    let forwarded =
        runtime.block_on(async { tokio::time::timeout(Duration::from_secs(10), forward).await });
    assert!(matches!(forwarded, Ok(Err(_))), "{forwarded:?}");
    // Probes would have failed several times by now.
    while began.elapsed() < Duration::from_secs(4) {
        std::thread::sleep(PAUSE);
    }
    let started = |pod: &Pod| {
        let statuses = pod.status.as_ref().unwrap().container_statuses.clone();
        let status = statuses.unwrap().remove(0);
        (status.restart_count, status.container_id, status.started)
    };
    let later = condition_is("Frozen", "True").expect("the pod stays frozen");
    assert_eq!(started(&later), started(&frozen));
    annotate(Value::Null);
    let thawed = until("the pod is ready again", || condition_is("Ready", "True"));
    assert_eq!(started(&thawed), started(&frozen));
}

#[test]
fn a_strategy_that_is_not_possible_is_refused_and_nothing_less_is_done() {
    let up = Up::start(&[]);
    stdout_of(up.command().args(["claim", "mine"]));
    let error = stderr_of(
        up.command()
            .args(["suspend", "mine", "--strategy", "Hibernate"]),
    );
    assert!(error.contains("HibernateNotSupported"), "{error}");
    let status = stdout_of(up.command().arg("status"));
    assert!(status.contains("HibernateNotSupported"), "{status}");
    stdout_of(up.command().args(["resume", "mine"]));
    let said = stdout_of(up.command().args(["exec", "mine", "--", "echo", "here"]));
    assert_eq!(said, "here\n");
}

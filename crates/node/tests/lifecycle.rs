//! The lifecycle of pods: their state, status and resources from creation to deletion, also over restarts of the node.

#![expect(
    clippy::unwrap_used,
    reason = "a test that cannot go on says so by panicking"
)]

mod support;

use std::time::Duration;

use agent_sandbox_node::Node;
use container_runtime::reclaim::reclaim;
use k8s_openapi::api::core::v1::{ConfigMap, Pod};
use kube::ResourceExt;
use kube::api::{Patch, PatchParams};
use serde_json::{Value, json};
use support::{Machine, container, is_ready};
use testkit::eventually;

fn shell(script: &str) -> Value {
    json!({"name": "c", "image": "host", "command": ["sh", "-c", script]})
}

fn sh(script: &str) -> Value {
    json!({"exec": {"command": ["sh", "-c", script]}})
}

/// The number of lines of a file in the pod.
async fn lines(machine: &Machine, pod: &Pod, file: &str) -> usize {
    let (_, out, _) = machine.exec(pod, &["cat", file]).await;
    out.lines().count()
}

fn condition(pod: &Pod, kind: &str) -> Option<k8s_openapi::api::core::v1::PodCondition> {
    let conditions = pod.status.as_ref()?.conditions.as_ref()?;
    conditions
        .iter()
        .find(|condition| condition.type_ == kind)
        .cloned()
}

fn waits_for(pod: &Pod, reason: &str) -> bool {
    let waiting = container(pod).and_then(|status| status.state?.waiting);
    waiting.is_some_and(|waiting| waiting.reason.as_deref() == Some(reason))
}

/// Simulates a reboot: only the files on disk are left.
async fn reboot(machine: &mut Machine) {
    machine.stop_node().await;
    let data_dir = machine.config.data_dir.canonicalize().unwrap();
    // Retried, because another test that checks whether the node is running holds its lock for a short time.
    eventually("the node to be taken for gone", || async {
        reclaim(&data_dir).await.ok()
    })
    .await;
    // Another test may have claimed its ranges meanwhile.
    let share = std::fs::read_to_string(data_dir.join("share")).unwrap();
    let taken = std::path::Path::new("/run/agent-sandbox/shares").join(share);
    eventually("its share to be free", || async {
        (!taken.exists()).then_some(())
    })
    .await;
    machine.start_node().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn the_status_of_an_ended_pod_is_kept_over_a_restart_of_the_node() {
    let mut machine = Machine::start().await;
    let mut prepare = shell("true");
    prepare["name"] = json!("prepare");
    let spec = json!({"restartPolicy": "Never", "initContainers": [prepare], "containers": [shell("exit 3")]});
    machine.create("ended", spec).await;
    let before = machine.phase("ended", "Failed").await;
    let record = machine.config.data_dir.join("pods");
    let record = record.join(before.uid().unwrap()).join("sandbox.json");
    eventually("its sandbox to be freed", || async {
        let record: Value = serde_json::from_slice(&std::fs::read(&record).ok()?).ok()?;
        record["slot"].is_null().then_some(())
    })
    .await;
    machine.stop_node().await;
    machine.start_node().await;
    // When another pod runs, the node has processed the first.
    machine
        .create("next", json!({"containers": [shell("sleep 1000")]}))
        .await;
    machine.ready("next").await;
    let after = machine.pod("ended").await;
    for kind in ["Initialized", "Ready"] {
        assert_eq!(condition(&after, kind), condition(&before, kind));
    }
    let (after, before) = (after.status.unwrap(), before.status.unwrap());
    assert_eq!(
        after.init_container_statuses,
        before.init_container_statuses
    );
    assert_eq!(after.container_statuses, before.container_statuses);
    machine.finish().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn after_a_reboot_a_pod_is_prepared_again_and_has_its_files() {
    let mut machine = Machine::start().await;
    // Another pod has a slot, which the first must not get.
    machine
        .create("other", json!({"containers": [shell("sleep 1000")]}))
        .await;
    machine.ready("other").await;
    let mounts =
        json!([{"name": "disk", "mountPath": "/disk"}, {"name": "memory", "mountPath": "/memory"}]);
    let mut prepare = shell("echo prepared >> /disk/log; touch /memory/prepared");
    prepare["name"] = json!("prepare");
    prepare["volumeMounts"] = mounts.clone();
    let mut own = shell("sleep 1000");
    own["volumeMounts"] = mounts;
    let spec = json!({"terminationGracePeriodSeconds": 1, "initContainers": [prepare], "containers": [own],
        "volumes": [{"name": "disk", "emptyDir": {}}, {"name": "memory", "emptyDir": {"medium": "Memory"}}]});
    machine.create("p", spec).await;
    let pod = machine.ready("p").await;
    let script = "umask 077; mkdir /disk/own && echo kept > /disk/own/file";
    assert_eq!(machine.exec(&pod, &["sh", "-c", script]).await.0, 0);

    reboot(&mut machine).await;
    let pod = machine
        .pod_with("p", "running again", |pod| {
            is_ready(pod) && container(pod).is_some_and(|status| status.restart_count == 1)
        })
        .await;
    let script = "cat /disk/own/file && echo more > /disk/own/file && cat /disk/log && ls /memory";
    let (code, out, err) = machine.exec(&pod, &["sh", "-c", script]).await;
    assert_eq!(
        (code, out.as_str()),
        (0, "kept\nprepared\nprepared\nprepared\n"),
        "{err}"
    );
    machine.delete("p").await;
    machine.finish().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_node_refuses_another_address_range_while_pods_run() {
    let mut machine = Machine::start().await;
    machine
        .create("p", json!({"containers": [shell("sleep 1000")]}))
        .await;
    let before = machine.ready("p").await;
    machine.stop_node().await;
    let mut config = machine.config.clone();
    config.pod_network = Some("10.61.0.0/24".parse().unwrap());
    let refused = Node::start(
        config,
        machine.client.clone(),
        tokio_util::sync::CancellationToken::new(),
    );
    let error = refused.await.err().unwrap();
    let message = std::error::Error::source(&error).unwrap().to_string();
    assert!(
        message.contains("10.61.0.0/24") && message.contains("--pod-cidr 10."),
        "{message}"
    );
    machine.start_node().await;
    let (code, ..) = machine.exec(&before, &["true"]).await;
    assert_eq!(code, 0, "the pod went on");
    machine.finish().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn outdated_fields_of_a_status_are_removed() {
    let mut machine = Machine::start().await;
    let mut unready = shell("sleep 1000");
    unready["readinessProbe"] =
        json!({"exec": {"command": ["test", "-e", "/tmp/ok"]}, "periodSeconds": 1});
    machine
        .create(
            "p",
            json!({"terminationGracePeriodSeconds": 1, "containers": [unready]}),
        )
        .await;
    let pod = machine
        .pod_with("p", "running and not ready", |pod| {
            let reason = condition(pod, "Ready").and_then(|ready| ready.reason);
            let running = container(pod).and_then(|status| status.state?.running);
            running.is_some() && reason.as_deref() == Some("ContainersNotReady")
        })
        .await;
    let address = pod.status.as_ref().unwrap().pod_ip.clone();
    machine.exec(&pod, &["touch", "/tmp/ok"]).await;
    let pod = machine.ready("p").await;
    for kind in ["Ready", "ContainersReady"] {
        let ready = condition(&pod, kind).unwrap();
        assert_eq!((ready.reason, ready.message), (None, None), "{kind}");
    }

    reboot(&mut machine).await;
    let pod = machine
        .pod_with("p", "running again", |pod| {
            container(pod).is_some_and(|status| {
                status.restart_count == 1
                    && status.state.is_some_and(|state| state.running.is_some())
            })
        })
        .await;
    let status = pod.status.unwrap();
    assert_eq!(status.pod_ip, address, "the pod has the address it had");
    let addresses: Vec<String> = status
        .pod_ips
        .unwrap()
        .into_iter()
        .map(|ip| ip.ip)
        .collect();
    assert_eq!(addresses.first(), status.pod_ip.as_ref());
    let fours = addresses.iter().filter(|ip| ip.contains('.'));
    assert_eq!(fours.count(), 1, "and no other: {addresses:?}");
    machine.delete("p").await;
    machine.finish().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_restart_of_the_node_repeats_neither_hook_nor_startup_probe() {
    let mut machine = Machine::start().await;
    let mut hooked = shell("sleep 1000");
    hooked["lifecycle"] = json!({"postStart": sh("echo ran >> /tmp/hooks")});
    let probe = |script: &str, more: Value| {
        let mut probe = sh(script);
        for (key, value) in more.as_object().unwrap() {
            probe[key] = value.clone();
        }
        probe
    };
    let startup = "echo asked >> /tmp/startup; test $(wc -l < /tmp/startup) -ge 3";
    // A hook or probe that timed out would leave its line and be repeated.
    let patient = json!({"periodSeconds": 1, "timeoutSeconds": 60, "failureThreshold": 30});
    hooked["startupProbe"] = probe(startup, patient.clone());
    let readiness = "test -e /tmp/startup && echo asked >> /tmp/readiness";
    hooked["readinessProbe"] = probe(readiness, patient);
    machine.create("p", json!({"containers": [hooked]})).await;
    let pod = machine.ready("p").await;
    eventually("the hook to have run", || async {
        (lines(&machine, &pod, "/tmp/hooks").await == 1).then_some(())
    })
    .await;
    assert_eq!(lines(&machine, &pod, "/tmp/startup").await, 3);
    machine.stop_node().await;
    machine.start_node().await;
    let before = lines(&machine, &pod, "/tmp/readiness").await;
    eventually("the readiness probe to go on", || async {
        let now = lines(&machine, &pod, "/tmp/readiness").await;
        (now >= before + 2).then_some(())
    })
    .await;
    assert_eq!(lines(&machine, &pod, "/tmp/hooks").await, 1);
    assert_eq!(lines(&machine, &pod, "/tmp/startup").await, 3);
    assert!(is_ready(&machine.pod("p").await));

    // A container whose startup probe fails is restarted, and its readiness probe does not run before.
    let mut stuck = shell("touch /tmp/startup; sleep 1000");
    stuck["startupProbe"] = probe("false", json!({"periodSeconds": 1, "failureThreshold": 1}));
    stuck["readinessProbe"] = probe("true", json!({}));
    machine
        .create(
            "q",
            json!({"terminationGracePeriodSeconds": 0, "containers": [stuck]}),
        )
        .await;
    machine
        .has_event("q", "Killing", "failed startup probe, will be restarted")
        .await;
    assert!(!is_ready(&machine.pod("q").await));
    machine.finish().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_pod_that_is_deleted_while_it_pulls_does_not_wait_for_the_registry() {
    let machine = Machine::start().await;
    // Accepts connections, and never responds.
    let silent = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let image = format!("{}/x:v1", silent.local_addr().unwrap());
    let spec = json!({"containers": [{"name": "c", "image": image}]});
    machine.create("p", spec.clone()).await;
    machine.has_event("p", "Pulling", &image).await;
    let began = std::time::Instant::now();
    let states = machine.delete_and_watch("p").await;
    // The timeout of the registry is 30 seconds.
    assert!(
        began.elapsed() < Duration::from_secs(25),
        "{:?}",
        began.elapsed()
    );
    assert_eq!(states.last().unwrap().phase.as_deref(), Some("Failed"));

    let mut limited = spec;
    limited["activeDeadlineSeconds"] = json!(1);
    machine.create("q", limited).await;
    let pod = machine.phase("q", "Failed").await;
    let uid = pod.uid().unwrap();
    machine.delete("q").await;
    let left = machine.config.data_dir.join("pods").join(uid);
    eventually("what is left of the pod to go", || async {
        (!left.exists()).then_some(())
    })
    .await;
    machine.finish().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_probe_that_takes_too_long_leaves_no_process() {
    let machine = Machine::start().await;
    let mut slow = shell("sleep 1000");
    slow["readinessProbe"] = json!({"exec": {"command": ["sh", "-c", "echo asked >> /tmp/asked; sleep 76543 & wait"]},
        "periodSeconds": 1, "timeoutSeconds": 1});
    machine.create("p", json!({"containers": [slow]})).await;
    let pod = machine
        .pod_with("p", "running", |pod| {
            container(pod)
                .is_some_and(|status| status.state.is_some_and(|state| state.running.is_some()))
        })
        .await;
    eventually("four tries", || async {
        (lines(&machine, &pod, "/tmp/asked").await >= 4).then_some(())
    })
    .await;
    let script = "for file in /proc/[0-9]*/cmdline; do tr '\\0' ' ' < $file 2>/dev/null; echo; done | grep -c '^sleep 76543'";
    // A process that is just being killed may still exist beside the next one.
    eventually("no more than one of four tries to be left", || async {
        let (_, left, _) = machine.exec(&pod, &["sh", "-c", script]).await;
        let left: usize = left.trim().parse().unwrap();
        (left <= 1).then_some(())
    })
    .await;
    machine.finish().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_slot_freed_before_a_crash_is_not_freed_again_after_another_pod_took_it() {
    let mut machine = Machine::start_with(|config| config.ready_namespaces = 0).await;
    // The container ends after the exec that makes it end, so that the exec's exit is reported.
    let ends =
        shell("while ! test -s /tmp/end || test -e /proc/$(cat /tmp/end); do sleep 0.01; done");
    machine
        .create(
            "old",
            json!({"restartPolicy": "Never", "containers": [ends]}),
        )
        .await;
    let old = machine.ready("old").await;
    let directory = machine
        .config
        .data_dir
        .join("pods")
        .join(old.uid().unwrap());
    let record = directory.join("sandbox.json");
    let held = std::fs::read(&record).unwrap();
    machine
        .exec(&old, &["sh", "-c", "echo $$ > /tmp/end"])
        .await;
    machine.phase("old", "Succeeded").await;
    eventually("the pod to give its place back", || async {
        let now: Value = serde_json::from_slice(&std::fs::read(&record).unwrap()).unwrap();
        now["slot"].is_null().then_some(())
    })
    .await;
    machine.stop_node().await;
    // The state after a crash between freeing the slot and recording that.
    std::fs::write(&record, held).unwrap();
    machine.start_node().await;
    let mut serving = json!({"name": "c", "image": "host", "ports": [{"containerPort": 8888}]});
    serving["readinessProbe"] = json!({"httpGet": {"path": "/", "port": 8888}, "periodSeconds": 1});
    machine
        .create("new", json!({"containers": [serving]}))
        .await;
    let new = machine.ready("new").await;
    machine.delete("old").await;
    let address = new.status.as_ref().unwrap().pod_ip.clone().unwrap();
    let address = format!("{address}:8888");
    let connected = tokio::time::timeout(
        Duration::from_secs(60),
        tokio::net::TcpStream::connect(&address),
    );
    connected.await.expect("the other pod is reached").unwrap();
    machine.finish().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_stopped_agent_does_not_delay_the_log_rotation_of_other_containers() {
    let machine = Machine::start_with(|config| config.log_maximum_bytes = 64 << 10).await;
    let ticking = shell("while sleep 0.1; do echo tick; done");
    machine
        .create("stopped", json!({"containers": [ticking]}))
        .await;
    let talking =
        shell("while ! test -e /tmp/go; do sleep 0.01; done; yes | head -c 200000; sleep 1000");
    machine
        .create("talking", json!({"containers": [talking]}))
        .await;
    let stopped = machine.ready("stopped").await;
    let talking = machine.ready("talking").await;
    let directory = |pod: &Pod| {
        let pods = machine.config.data_dir.join("pods");
        pods.join(pod.uid().unwrap()).join("containers/c")
    };
    let state: Value =
        serde_json::from_slice(&std::fs::read(directory(&stopped).join("0/state.json")).unwrap())
            .unwrap();
    let agent = i32::try_from(state["pid"].as_i64().unwrap()).unwrap();
    let agent = rustix::process::Pid::from_raw(agent).unwrap();
    rustix::process::kill_process(agent, rustix::process::Signal::STOP).unwrap();
    let log = std::fs::File::options()
        .append(true)
        .open(directory(&stopped).join("0.log"))
        .unwrap();
    log.set_len(100 << 10).unwrap();
    let next = directory(&stopped).join("0.log.next");
    eventually("the stopped agent to be asked", || async {
        next.exists().then_some(())
    })
    .await;
    machine.exec(&talking, &["touch", "/tmp/go"]).await;
    let rotated = directory(&talking).join("0.log.1");
    eventually("the other's log to be rotated", || async {
        rotated.exists().then_some(())
    })
    .await;
    // No log line of the container with the stopped agent is lost.
    rustix::process::kill_process(agent, rustix::process::Signal::CONT).unwrap();
    eventually("its log to go on in a new file", || async {
        let log = std::fs::read_to_string(directory(&stopped).join("0.log")).ok()?;
        let is_new = directory(&stopped).join("0.log.1").exists() && !next.exists();
        (is_new && log.contains("tick")).then_some(())
    })
    .await;
    machine.finish().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn restart_counts_and_back_off_continue_after_a_restart_of_the_node() {
    let mut machine = Machine::start().await;
    let absent = json!({"name": "c", "image": "host", "command": ["/no/such"]});
    let pods = [("crashes", shell("exit 3"), 3), ("absent", absent, 128)];
    for (name, container, _) in &pods {
        machine
            .create(name, json!({"containers": [container]}))
            .await;
    }
    let backs_off = |pod: &Pod| waits_for(pod, "CrashLoopBackOff");
    let mut crashes = Vec::new();
    for (name, _, _) in &pods {
        crashes.push(machine.pod_with(name, "backing off", backs_off).await);
    }
    machine.stop_node().await;
    for (name, _, _) in &pods {
        // The next run of the node must get the counts from its files.
        let without_status =
            Patch::Merge(json!({"status": {"containerStatuses": null, "phase": "Pending"}}));
        machine
            .pods()
            .patch_status(name, &PatchParams::default(), &without_status)
            .await
            .unwrap();
    }
    machine.start_node().await;
    for ((name, _, code), before) in pods.iter().zip(crashes) {
        let pod = machine.pod_with(name, "backing off again", backs_off).await;
        let (now, before) = (container(&pod).unwrap(), container(&before).unwrap());
        assert!(now.restart_count >= before.restart_count.max(1), "{name}");
        let last = now.last_state.unwrap().terminated.unwrap();
        assert_eq!(last.exit_code, *code, "{name}");
        // On a slow machine it may have run once more meanwhile.
        if now.restart_count == before.restart_count {
            assert_eq!(Some(last), before.last_state.unwrap().terminated, "{name}");
        }
    }
    machine.finish().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn no_pod_is_bound_to_or_accepted_by_a_full_node() {
    let machine = Machine::start_with(|config| config.maximum_pods = 2).await;
    let spec = json!({"terminationGracePeriodSeconds": 0, "containers": [shell("sleep 1000")]});
    for name in ["a", "b"] {
        machine.create(name, spec.clone()).await;
        machine.ready(name).await;
    }
    machine.create("waits", spec.clone()).await;
    machine
        .has_event("waits", "FailedScheduling", "Too many pods")
        .await;
    let waits = machine
        .pod_with("waits", "unschedulable", |pod| {
            condition(pod, "PodScheduled").is_some_and(|scheduled| {
                scheduled.status == "False" && scheduled.reason.as_deref() == Some("Unschedulable")
            })
        })
        .await;
    assert_eq!(waits.spec.unwrap().node_name, None);
    let mut forced = spec;
    forced["nodeName"] = json!("test-node");
    machine.create("forced", forced).await;
    let refused = machine.phase("forced", "Failed").await.status.unwrap();
    assert_eq!(refused.reason.as_deref(), Some("OutOfpods"));
    let message = refused.message.unwrap();
    assert!(
        message.ends_with("requested: 1, used: 2, capacity: 2"),
        "{message}"
    );
    // A pod that has ended does not count, and a deleted one makes room.
    machine.delete("a").await;
    let pod = machine.ready("waits").await;
    assert_eq!(condition(&pod, "PodScheduled").unwrap().status, "True");
    machine.finish().await;
}

/// A minimal HTTP/2 server that responds to the gRPC health check with SERVING.
const HEALTHY: &str = "
import socket, struct
def frame(kind, flags, stream, body):
    return struct.pack('>I', len(body))[1:] + bytes([kind, flags]) + struct.pack('>I', stream) + body
def literal(name, value):
    return bytes([0, len(name)]) + name + bytes([len(value)]) + value
server = socket.create_server(('', 9000))
while True:
    client, _ = server.accept()
    received = client.makefile('rb')
    received.read(24)
    client.sendall(frame(4, 0, 0, b''))
    while len(head := received.read(9)) == 9:
        kind, flags, stream = head[3], head[4], int.from_bytes(head[5:], 'big')
        received.read(int.from_bytes(head[:3], 'big'))
        if kind == 4 and not flags & 1:
            client.sendall(frame(4, 1, 0, b''))
        if kind in (0, 1) and flags & 1:
            client.sendall(frame(1, 4, stream, bytes([0x88]) + literal(b'content-type', b'application/grpc')))
            client.sendall(frame(0, 0, stream, bytes([0, 0, 0, 0, 2, 8, 1])))
            client.sendall(frame(1, 5, stream, literal(b'grpc-status', b'0')))
";

#[tokio::test(flavor = "multi_thread")]
async fn ports_health_services_and_other_hosts_are_probed() {
    let machine = Machine::start().await;
    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let elsewhere = listener.local_addr().unwrap().port();
    let server = json!({"name": "c", "image": "host", "command": ["python3", "-c", HEALTHY]});
    let probes = [
        ("tcp", json!({"tcpSocket": {"port": "health"}}), true),
        ("tcp-silent", json!({"tcpSocket": {"port": 9001}}), false),
        ("grpc", json!({"grpc": {"port": 9000}}), true),
        ("grpc-silent", json!({"grpc": {"port": 9001}}), false),
        // A host is contacted from the pod's network: `localhost` is the pod, not the machine.
        (
            "named",
            json!({"tcpSocket": {"host": "localhost", "port": 9000}}),
            true,
        ),
        (
            "machine",
            json!({"tcpSocket": {"host": "localhost", "port": elsewhere}}),
            false,
        ),
        (
            "nowhere",
            json!({"tcpSocket": {"host": "no.such.invalid", "port": 9000}}),
            false,
        ),
    ];
    for (name, probe, _) in &probes {
        let mut container = server.clone();
        container["ports"] = json!([{"name": "health", "containerPort": 9000}]);
        container["readinessProbe"] = probe.clone();
        machine
            .create(
                name,
                json!({"terminationGracePeriodSeconds": 0, "containers": [container]}),
            )
            .await;
    }
    for (name, _, _) in probes.iter().filter(|(_, _, passes)| *passes) {
        machine.ready(name).await;
    }
    for (name, _, _) in probes.iter().filter(|(_, _, passes)| !*passes) {
        assert!(!is_ready(&machine.pod(name).await), "{name}");
    }
    machine.finish().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn host_names_resolvers_and_capabilities_follow_the_pod_spec() {
    let machine = Machine::start().await;
    let with_capability = |name: &str, add: Value| {
        json!({"name": name, "image": "host", "command": ["sleep", "1000"],
            "securityContext": {"capabilities": {"drop": ["ALL"], "add": add}}})
    };
    let spec = json!({"terminationGracePeriodSeconds": 0,
        "hostAliases": [{"ip": "192.0.2.7", "hostnames": ["first.example", "second.example"]}],
        "dnsPolicy": "None",
        "dnsConfig": {"nameservers": ["192.0.2.53"], "searches": ["a.example"], "options": [{"name": "ndots", "value": "2"}]},
        "containers": [with_capability("c", json!(["CHOWN"])), with_capability("d", json!([]))]});
    machine.create("p", spec).await;
    let pod = machine.ready("p").await;
    let script = "getent hosts second.example; cat /etc/resolv.conf";
    let (_, shown, _) = machine.exec(&pod, &["sh", "-c", script]).await;
    let words: Vec<&str> = shown.split_whitespace().collect();
    assert_eq!(words[0], "192.0.2.7", "{shown}");
    for line in [
        "nameserver 192.0.2.53",
        "search a.example",
        "options ndots:2",
    ] {
        assert!(shown.lines().any(|shown| shown == line), "{line}: {shown}");
    }
    let script = "touch /tmp/x && chown 5 /tmp/x && stat -c %u /tmp/x";
    let (code, owner, _) = machine.exec_in(&pod, "c", &["sh", "-c", script]).await;
    assert_eq!((code, owner.trim()), (0, "5"), "with the capability");
    let (code, _, why) = machine.exec_in(&pod, "d", &["sh", "-c", script]).await;
    assert!(code != 0 && why.contains("not permitted"), "without: {why}");
    machine.finish().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn an_ephemeral_container_uses_objects_and_gets_warnings_like_any_other() {
    let machine = Machine::start().await;
    let map = json!({"metadata": {"name": "m"}, "data": {"k": "from-the-map"}});
    machine.create_object::<ConfigMap>(map).await;
    let mut signalled = json!({"name": "c", "image": "host", "command": ["python3", "-c",
        "import signal, sys, time\nsignal.signal(signal.SIGRTMIN + 3, lambda *_: sys.exit(9))\nopen('/tmp/set', 'w')\ntime.sleep(1000)"]});
    signalled["lifecycle"] = json!({"stopSignal": "SIGRTMIN+3"});
    signalled["readinessProbe"] = json!({"exec": {"command": ["test", "-e", "/tmp/set"]}});
    let spec = json!({"os": {"name": "linux"}, "containers": [signalled]});
    machine.create("p", spec).await;
    machine.ready("p").await;
    let added = json!({"name": "added", "image": "host", "command": ["sh", "-c", "echo -n $V > /dev/termination-log"],
        "env": [{"name": "V", "valueFrom": {"configMapKeyRef": {"name": "m", "key": "k"}}}],
        "securityContext": {"procMount": "Unmasked"}});
    let patch = Patch::Strategic(json!({"spec": {"ephemeralContainers": [added]}}));
    let pods = machine.pods();
    pods.patch_ephemeral_containers("p", &PatchParams::default(), &patch)
        .await
        .unwrap();
    let message = |pod: &Pod| {
        let statuses = pod.status.as_ref()?.ephemeral_container_statuses.clone()?;
        statuses.first()?.state.clone()?.terminated?.message
    };
    machine
        .pod_with("p", "has the config map's value", |pod| {
            message(pod).as_deref() == Some("from-the-map")
        })
        .await;
    machine
        .has_event(
            "p",
            "Unsupported",
            "procMount Unmasked of container \"added\"",
        )
        .await;
    let states = machine.delete_and_watch("p").await;
    let statuses = states.last().unwrap().container_statuses.clone().unwrap();
    let end = statuses[0].state.clone().unwrap().terminated.unwrap();
    assert_eq!(end.exit_code, 9, "the signal that it asked for");
    machine.finish().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_node_reports_its_properties_and_renews_its_lease() {
    use k8s_openapi::api::coordination::v1::Lease;
    use k8s_openapi::api::core::v1::Node;
    let machine = Machine::start_with(|config| config.maximum_pods = 42).await;
    let nodes = kube::Api::<Node>::all(machine.client.clone());
    let node = nodes.get("test-node").await.unwrap();
    for (label, value) in [
        ("kubernetes.io/hostname", "test-node"),
        ("kubernetes.io/os", "linux"),
    ] {
        assert_eq!(node.labels()[label], value);
    }
    assert!(node.labels().contains_key("kubernetes.io/arch"));
    let status = node.status.unwrap();
    let capacity = status.capacity.unwrap();
    let cpus = std::thread::available_parallelism().unwrap();
    assert_eq!(capacity["cpu"].0, cpus.to_string());
    assert_eq!(capacity["pods"].0, "42");
    let memory = std::fs::read_to_string("/proc/meminfo").unwrap();
    let total = memory.split_whitespace().nth(1).unwrap().to_owned();
    assert_eq!(capacity["memory"].0, format!("{total}Ki"));
    assert!(capacity["ephemeral-storage"].0.ends_with("Ki"));
    let leases = kube::Api::<Lease>::namespaced(machine.client.clone(), "kube-node-lease");
    let renewed = || async {
        let lease = leases.get_opt("test-node").await.unwrap()?.spec?;
        assert_eq!(lease.holder_identity.as_deref(), Some("test-node"));
        lease.renew_time
    };
    let first = eventually("a lease", renewed).await;
    eventually("the lease to be renewed", || async {
        renewed().await.filter(|now| *now > first)
    })
    .await;
    machine.finish().await;
}

//! Runtime classes: pods of other runtimes behave like those of the native runtime, and an unavailable class is reported.
//! Built only with the feature `package-tests`.

#![expect(
    clippy::unwrap_used,
    reason = "a test that cannot go on says so by panicking"
)]

mod support;

use container_runtime::agent::Output;
use container_runtime::handlers::Driver;
use container_runtime::{ContainerId, Runtime};
use k8s_openapi::api::core::v1::{ConfigMap, ContainerStateTerminated, Node, Pod};
use k8s_openapi::api::node::v1::RuntimeClass;
use kube::api::PostParams;
use kube::{Api, ResourceExt};
use serde_json::{Value, json};
use support::{Machine, Privilege};
use testkit::eventually;

/// A machine with a class `other` of this driver, which must work.
async fn machine_with(driver: Driver) -> Machine {
    let machine = Machine::start_with(|config| config.runtime_drivers = vec![driver]).await;
    let found = finding(&machine, driver.program()).await;
    assert_eq!(
        found["works"],
        true,
        "these tests need {}, which CI installs: {found}",
        driver.program()
    );
    class(&machine, "other", driver.program()).await;
    machine
}

async fn class(machine: &Machine, name: &str, handler: &str) {
    let class = json!({"metadata": {"name": name}, "handler": handler});
    let class: RuntimeClass = serde_json::from_value(class).unwrap();
    let classes = Api::<RuntimeClass>::all(machine.client.clone());
    classes
        .create(&PostParams::default(), &class)
        .await
        .unwrap();
}

/// The node's report about a handler, after its trial.
async fn finding(machine: &Machine, handler: &str) -> Value {
    let nodes = Api::<Node>::all(machine.client.clone());
    eventually("the handlers to be reported", || async {
        let node = nodes.get("test-node").await.unwrap();
        let text = node
            .annotations()
            .get("node.agents.x-k8s.io/runtime-handlers")?
            .clone();
        let all: Vec<Value> = serde_json::from_str(&text).unwrap();
        all.into_iter()
            .find(|finding| finding["handler"] == handler)
    })
    .await
}

fn pod(class: &str, script: &str) -> Value {
    json!({"runtimeClassName": class, "restartPolicy": "Never", "containers": [
        {"name": "c", "image": "host", "command": ["sh", "-c", script]}]})
}

fn container_id(pod: &Pod) -> ContainerId {
    ContainerId {
        pod: pod.uid().unwrap(),
        container: "c".to_owned(),
        attempt: 0,
    }
}

fn terminated(pod: &Pod) -> ContainerStateTerminated {
    let statuses = pod.status.as_ref().unwrap().container_statuses.as_ref();
    let state = statuses.unwrap()[0].state.clone().unwrap();
    state.terminated.unwrap()
}

/// The lifecycle of pods from creation to deletion, with volumes, users and exec.
async fn lives_like_any_other(driver: Driver) {
    let machine = machine_with(driver).await;
    let map = json!({"metadata": {"name": "m"}, "data": {"a": "1"}});
    machine.create_object::<ConfigMap>(map).await;
    let script = "trap 'exit 0' TERM; echo from-c > /shared/c; while true; do sleep 0.1; done";
    let mounts = json!([{"name": "e", "mountPath": "/shared"}, {"name": "t", "mountPath": "/tmp"},
        {"name": "m", "mountPath": "/config"}]);
    let spec = json!({"runtimeClassName": "other",
        "securityContext": {"runAsUser": 1000, "runAsGroup": 1000, "fsGroup": 2000},
        "containers": [
            {"name": "c", "image": "host", "command": ["sh", "-c", script], "env": [{"name": "A", "value": "b"}],
             "workingDir": "/shared", "securityContext": {"readOnlyRootFilesystem": true}, "volumeMounts": mounts},
            {"name": "d", "image": "host", "command": ["sh", "-c", "trap 'exit 0' TERM; echo from-d > /shared/d; while true; do sleep 0.1; done"],
             "volumeMounts": mounts}],
        "volumes": [{"name": "e", "emptyDir": {}}, {"name": "t", "emptyDir": {}}, {"name": "m", "configMap": {"name": "m"}}]});
    machine.create("p", spec).await;
    let running = machine.ready("p").await;
    let script = "until test -s c && test -s d; do sleep 0.05; done; cat d c /config/a; echo; echo $A; hostname; pwd; id -u; id -g; id -G; \
        touch /x 2> /dev/null || echo sealed; touch mine && find mine -printf '%G\\n'; touch /tmp/mine && echo /tmp/*; \
        grep CapEff /proc/self/status | tr -d '\\t'; echo err >&2; exit 3";
    let (code, out, err) = machine.exec(&running, &["sh", "-c", script]).await;
    let expected = "from-d\nfrom-c\n1\nb\np\n/shared\n1000\n1000\n1000 2000\nsealed\n2000\n/tmp/mine\nCapEff:0000000000000000\n";
    assert_eq!((code, out.as_str(), err.as_str()), (3, expected, "err\n"));
    machine.delete("p").await;

    let script = "echo words; echo why > /dev/termination-log; exit 7";
    machine.create("ends", pod("other", script)).await;
    let ended = machine.phase("ends", "Failed").await;
    let state = terminated(&ended);
    assert_eq!(
        (state.exit_code, state.message.as_deref()),
        (7, Some("why\n"))
    );
    let log = machine.runtime().log_path(&container_id(&ended));
    let log = std::fs::read_to_string(log).unwrap();
    assert!(log.ends_with("stdout F words\n"), "{log}");

    memory_ends_at_the_limit(&machine).await;

    let mut absent = pod("other", "");
    absent["containers"][0]["command"] = json!(["/no/such"]);
    machine.create("absent", absent).await;
    let ended = machine.phase("absent", "Failed").await;
    let state = terminated(&ended);
    assert_eq!(state.exit_code, 128);
    if driver == Driver::Runc {
        // gVisor detects the error only after the container was created.
        assert_eq!(state.reason.as_deref(), Some("StartError"));
        assert!(
            state.message.clone().unwrap().contains("/no/such"),
            "{state:?}"
        );
    }

    // A container that ignores the signal is killed, with all its processes.
    let deaf = "trap '' TERM; while true; do sleep 0.1; done";
    machine.create("deaf", pod("other", deaf)).await;
    machine.ready("deaf").await;
    machine.finish().await;
}

async fn memory_ends_at_the_limit(machine: &Machine) {
    let mut greedy = pod("other", "exec python3 -c 'x = bytearray(1 << 30)'");
    greedy["containers"][0]["resources"] = json!({"limits": {"memory": "128Mi"}});
    machine.create("greedy", greedy).await;
    let ended = machine.phase("greedy", "Failed").await;
    assert_eq!(terminated(&ended).reason.as_deref(), Some("OOMKilled"));
}

/// Network, probes, terminals, and a node that is restarted.
async fn serves_and_survives(driver: Driver) {
    let mut machine = machine_with(driver).await;
    let spec = json!({"runtimeClassName": "other", "containers": [{"name": "c", "image": "host",
        "readinessProbe": {"httpGet": {"path": "/", "port": 8888}, "periodSeconds": 1}}]});
    machine.create("p", spec).await;
    let before = machine.ready("p").await;
    let request = shim_protocol::ExecRequest {
        arguments: ["sh", "-c", "test -t 0 && stty size; echo $B; exit 4"]
            .map(str::to_owned)
            .to_vec(),
        environment: vec![("B".to_owned(), "set".to_owned())],
        terminal: true,
        stdin: true,
        window: Some(shim_protocol::WindowSize {
            rows: 24,
            columns: 80,
        }),
    };
    let id = container_id(&before);
    let mut session = machine.runtime().exec(&id, request).await.unwrap();
    let mut output = String::new();
    let code = loop {
        match session.output.next().await.unwrap() {
            Output::Stdout(data) | Output::Stderr(data) => {
                output.push_str(&String::from_utf8_lossy(&data));
            }
            Output::Exit(exit) => break exit.code,
        }
    };
    assert_eq!((output.as_str(), code), ("24 80\r\nset\r\n", 4));

    machine.stop_node().await;
    machine.start_node().await;
    let after = machine.ready("p").await;
    let status = |pod: &Pod| pod.status.clone().unwrap().container_statuses.unwrap()[0].clone();
    assert_eq!(status(&before).container_id, status(&after).container_id);
    let (code, out, err) = machine
        .exec(&after, &["python3", "-c", "print(6 * 7)"])
        .await;
    assert_eq!((code, out.as_str()), (0, "42\n"), "{err}");
    machine.finish().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_pod_of_runc_lives_like_any_other() {
    Box::pin(lives_like_any_other(Driver::Runc)).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_pod_of_runc_serves_and_survives_the_node() {
    Box::pin(serves_and_survives(Driver::Runc)).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_pod_of_gvisor_lives_like_any_other() {
    Box::pin(lives_like_any_other(Driver::Runsc)).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_pod_of_gvisor_serves_and_survives_the_node() {
    Box::pin(serves_and_survives(Driver::Runsc)).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn each_runtime_confines_its_containers_as_documented() {
    let machine = Machine::start_with(|config| config.runtime_drivers = Driver::ALL.to_vec()).await;
    class(&machine, "runc", "runc").await;
    class(&machine, "gvisor", "runsc").await;
    for tier in ["runc", "gvisor"] {
        finding(&machine, if tier == "runc" { "runc" } else { "runsc" }).await;
        machine.create(tier, pod(tier, "exec sleep 1000")).await;
    }
    let runc = machine.ready("runc").await;
    // It has a seccomp filter and the default capabilities, and its root is an unprivileged user on the host.
    let script = "grep -E '^(Cap...|Seccomp|NoNewPrivs):' /proc/self/status | tr '\\t' ' '; unshare -U true 2> /dev/null || echo no-unshare; \
        test $(awk '{print $2}' /proc/self/uid_map) -gt 65535 && echo mapped; ls /proc/1/root > /dev/null && cat /proc/1/comm";
    let (_, out, err) = machine.exec(&runc, &["sh", "-c", script]).await;
    let expected = |none: &str, own: &str, bounding: &str, no_new_privileges: u8| {
        format!(
            "CapInh: {none}\nCapPrm: {own}\nCapEff: {own}\nCapBnd: {bounding}\nCapAmb: {none}\n\
             NoNewPrivs: {no_new_privileges}\nSeccomp: 2\nno-unshare\nmapped\nsleep\n"
        )
    };
    let (none, usual) = (
        Privilege::None.capabilities(),
        Privilege::Usual.capabilities(),
    );
    assert_eq!(out, expected(none, usual, usual, 0), "{err}");
    let mut user = pod("runc", "exec sleep 1000");
    user["securityContext"] = json!({"runAsUser": 1000});
    machine.create("user", user).await;
    let mut restricted = pod("runc", "exec sleep 1000");
    restricted["containers"][0]["securityContext"] = Privilege::None.security_context();
    machine.create("restricted", restricted).await;
    for (name, own, bounding, no_new_privileges) in
        [("user", none, usual, 0), ("restricted", none, none, 1)]
    {
        let pod = machine.ready(name).await;
        let (_, out, err) = machine.exec(&pod, &["sh", "-c", script]).await;
        let expected = expected(none, own, bounding, no_new_privileges);
        assert_eq!(out, expected, "{name}: {err}");
        machine.delete(name).await;
    }
    // It cannot change kernel limits and time slices either, as with the native runtime.
    let script = r"
import ctypes, errno, os
libc = ctypes.CDLL(None, use_errno=True)
def call(number, *arguments):
    ctypes.set_errno(0)
    return 'ok' if libc.syscall(number, *arguments) >= 0 else errno.errorcode[ctypes.get_errno()]
context, priority, terminals = ctypes.c_ulong(0), ctypes.c_int(0), []
print(call(206, 1, ctypes.byref(context)))
print(call(144, 0, 0x40000000, ctypes.byref(priority)), call(144, 0, 0, ctypes.byref(priority)))
print(call(157, 62, 1, 0, 0, 0))
try:
    while True: terminals.append(os.open('/dev/ptmx', os.O_RDWR))
except OSError as problem: print(errno.errorcode[problem.errno], len(terminals) <= 64)
print('upperdir=/proc/self/fd/' in open('/proc/self/mountinfo').read())
";
    let (_, out, err) = machine.exec(&runc, &["python3", "-c", script]).await;
    assert_eq!(
        out, "ENOSYS\nENOSYS ok\nENOSYS\nENOSPC True\nTrue\n",
        "{err}"
    );
    let gvisor = machine.ready("gvisor").await;
    let script = "touch /tmp/f && chown 1000:1000 /tmp/f && find /tmp/f -printf '%U:%G\\n'";
    for pod in [&runc, &gvisor] {
        let (_, out, err) = machine.exec(pod, &["sh", "-c", script]).await;
        assert_eq!(out, "1000:1000\n", "{err}");
    }
    // It sees gVisor's kernel, not this machine's.
    let (_, out, err) = machine.exec(&gvisor, &["uname", "-r"]).await;
    let own = std::fs::read_to_string("/proc/sys/kernel/osrelease").unwrap();
    assert!(!out.is_empty() && out != own, "{out}{err}");
    machine.finish().await;
}

fn condition(pod: &Pod, kind: &str) -> (String, String) {
    let conditions = pod
        .status
        .as_ref()
        .and_then(|status| status.conditions.clone());
    let conditions = conditions.unwrap_or_default().into_iter();
    let mut found = conditions.filter(|condition| condition.type_ == kind);
    found.next().map_or_else(Default::default, |condition| {
        (
            condition.reason.unwrap_or_default(),
            condition.message.unwrap_or_default(),
        )
    })
}

#[tokio::test(flavor = "multi_thread")]
async fn an_unavailable_runtime_class_is_reported_in_a_condition_and_an_event() {
    let machine = Machine::start().await;
    class(&machine, "strange", "kata").await;
    class(&machine, "absent", "runsc").await;
    for (name, text) in [
        ("nothing", "runtime class \"nothing\" does not exist"),
        (
            "strange",
            "has handler \"kata\", which this node does not know",
        ),
        (
            "absent",
            "needs runsc, which does not work on this node: the node is configured not to look",
        ),
    ] {
        machine.create(name, pod(name, "true")).await;
        let kind = "PodReadyToStartContainers";
        let found = machine
            .pod_with(name, "refused", |pod| {
                condition(pod, kind).0 == "RuntimeClassUnavailable"
            })
            .await;
        let message = condition(&found, kind).1;
        assert!(message.contains(text), "{message}");
        machine
            .has_event(name, "RuntimeClassUnavailable", text)
            .await;
    }
    class(&machine, "own", "agent-sandbox").await;
    machine.create("own", pod("own", "exec sleep 1000")).await;
    machine.ready("own").await;
    machine.finish().await;
}

//! Pods, as their users see them: through the API, from creation to the end.

#![expect(
    clippy::unwrap_used,
    reason = "a test that cannot go on says so by panicking"
)]

mod support;

use k8s_openapi::api::core::v1::{ConfigMap, PodStatus, Secret};
use kube::api::{DeleteParams, PostParams};
use kube::{Api, ResourceExt};
use serde_json::json;
use support::{Machine, is_ready};
use testkit::eventually;
use testkit::rewriting::{rewriting, seventy_seven_is_too_large};
use tokio::io::{AsyncReadExt, AsyncWriteExt};

fn sandboxd() -> serde_json::Value {
    json!({"containers": [{"name": "c", "image": "host", "ports": [{"containerPort": 8888}],
        "readinessProbe": {"httpGet": {"path": "/", "port": 8888}, "periodSeconds": 1}}]})
}

fn shell(script: &str) -> serde_json::Value {
    json!({"name": "c", "image": "host", "command": ["sh", "-c", script]})
}

async fn http_get(address: &str, path: &str) -> String {
    let mut stream = tokio::net::TcpStream::connect(address).await.unwrap();
    let request = format!("GET {path} HTTP/1.1\r\nhost: {address}\r\nconnection: close\r\n\r\n");
    stream.write_all(request.as_bytes()).await.unwrap();
    let mut answer = String::new();
    stream.read_to_string(&mut answer).await.unwrap();
    answer
}

#[tokio::test(flavor = "multi_thread")]
async fn a_pod_of_the_host_image_serves_the_sandbox_api_and_goes_without_a_trace() {
    let machine = Machine::start().await;
    machine.create("p", sandboxd()).await;
    let pod = machine.ready("p").await;
    let status = pod.status.clone().unwrap();
    assert_eq!(status.phase.as_deref(), Some("Running"));
    let container = &status.container_statuses.as_ref().unwrap()[0];
    assert!(container.ready && container.started == Some(true));
    assert!(container.state.as_ref().unwrap().running.is_some());
    assert_eq!(container.restart_count, 0);
    assert!(
        container
            .container_id
            .as_ref()
            .unwrap()
            .starts_with("agent-sandbox://")
    );
    let address = format!("{}:8888", status.pod_ip.unwrap());
    let answer = http_get(&address, "/").await;
    assert!(answer.starts_with("HTTP/1.1 200"), "{answer}");
    let (code, out, err) = machine.exec(&pod, &["python3", "-c", "print(6 * 7)"]).await;
    assert_eq!((code, out.as_str()), (0, "42\n"), "{err}");
    machine.delete("p").await;
    machine.finish().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn ends_are_reported_with_code_reason_message_and_log() {
    let machine = Machine::start().await;
    let script = "echo out; echo err >&2; echo -n 'last words' > /dev/termination-log; exit 7";
    machine
        .create(
            "p",
            json!({"restartPolicy": "Never", "containers": [shell(script)]}),
        )
        .await;
    let pod = machine.phase("p", "Failed").await;
    let state = pod
        .status
        .as_ref()
        .unwrap()
        .container_statuses
        .as_ref()
        .unwrap()[0]
        .state
        .clone()
        .unwrap();
    let terminated = state.terminated.unwrap();
    assert_eq!(
        (terminated.exit_code, terminated.reason.as_deref()),
        (7, Some("Error"))
    );
    assert_eq!(terminated.message.as_deref(), Some("last words"));
    assert!(terminated.started_at.unwrap() <= terminated.finished_at.unwrap());
    let id = container_runtime::ContainerId {
        pod: pod.uid().unwrap(),
        container: "c".into(),
        attempt: 0,
    };
    let (sender, mut receiver) = tokio::sync::mpsc::channel(16);
    let options = container_runtime::logs::LogOptions {
        follow: true,
        ..Default::default()
    };
    container_runtime::logs::stream(machine.runtime(), &id, options, sender)
        .await
        .unwrap();
    let mut lines = Vec::new();
    while let Some(line) = receiver.recv().await {
        lines.push(String::from_utf8(line).unwrap());
    }
    lines.sort();
    assert_eq!(lines, ["err\n", "out\n"]);

    machine
        .create(
            "ok",
            json!({"restartPolicy": "OnFailure", "containers": [shell("exit 0")]}),
        )
        .await;
    let pod = machine.phase("ok", "Succeeded").await;
    let state = pod.status.unwrap().container_statuses.unwrap()[0]
        .state
        .clone()
        .unwrap();
    assert_eq!(
        state.terminated.unwrap().reason.as_deref(),
        Some("Completed")
    );
    machine.finish().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_crashing_container_is_restarted_and_then_backs_off() {
    let machine = Machine::start().await;
    machine
        .create("p", json!({"containers": [shell("exit 3")]}))
        .await;
    let pod = machine
        .pod_with("p", "in a crash loop", |pod| {
            let state = support::container(pod).and_then(|status| status.state);
            let waiting = state.and_then(|state| state.waiting);
            waiting.is_some_and(|waiting| waiting.reason.as_deref() == Some("CrashLoopBackOff"))
        })
        .await;
    let status = &pod.status.unwrap().container_statuses.unwrap()[0];
    assert_eq!(status.restart_count, 1);
    machine
        .has_event("p", "BackOff", "Back-off restarting failed container c")
        .await;
    assert_eq!(
        status
            .last_state
            .as_ref()
            .unwrap()
            .terminated
            .as_ref()
            .unwrap()
            .exit_code,
        3
    );
    machine.finish().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_pod_that_cannot_start_reports_the_reason() {
    let machine = Machine::start().await;
    let reason = |pod: &k8s_openapi::api::core::v1::Pod| {
        let statuses = pod.status.as_ref()?.container_statuses.as_ref()?;
        let state = statuses[0].state.clone()?;
        let waiting = state.waiting.map(|waiting| {
            (
                waiting.reason.unwrap_or_default(),
                waiting.message.unwrap_or_default(),
            )
        });
        waiting.or_else(|| {
            state.terminated.map(|end| {
                (
                    end.reason.unwrap_or_default(),
                    end.message.unwrap_or_default(),
                )
            })
        })
    };
    let cases = [
        (
            "command",
            json!({"restartPolicy": "Never", "containers": [{"name": "c", "image": "host", "command": ["/no/such"]}]}),
            "StartError",
            "/no/such",
        ),
        (
            "image",
            json!({"containers": [{"name": "c", "image": "127.0.0.1:1/no:v1"}]}),
            "ImagePullBackOff",
            "127.0.0.1:1/no:v1",
        ),
        (
            "class",
            json!({"runtimeClassName": "gvisor", "containers": [{"name": "c", "image": "host"}]}),
            "RuntimeClassUnavailable",
            "runtime class \"gvisor\" does not exist",
        ),
        (
            "privileged",
            json!({"containers": [{"name": "c", "image": "host", "securityContext": {"privileged": true}}]}),
            "CreateContainerConfigError",
            "privileged",
        ),
        (
            "configmap",
            json!({"containers": [{"name": "c", "image": "host", "envFrom": [{"configMapRef": {"name": "absent"}}]}]}),
            "CreateContainerConfigError",
            "configmap \"absent\" not found",
        ),
        (
            "secret",
            json!({"containers": [{"name": "c", "image": "host"}], "volumes": [{"name": "v", "secret": {"secretName": "absent"}}]}),
            "ContainerCreating",
            "secret \"absent\" not found",
        ),
        (
            "claim",
            json!({"containers": [{"name": "c", "image": "host"}], "volumes": [{"name": "v", "persistentVolumeClaim": {"claimName": "absent"}}]}),
            "ContainerCreating",
            "persistentvolumeclaim \"absent\" not found",
        ),
        (
            "nonroot",
            json!({"containers": [{"name": "c", "image": "host", "securityContext": {"runAsNonRoot": true}}]}),
            "CreateContainerConfigError",
            "runAsNonRoot",
        ),
    ];
    for (name, spec, _, _) in &cases {
        machine.create(name, spec.clone()).await;
    }
    for (name, _, expected, text) in cases {
        let accepts = |pod: &_| {
            reason(pod)
                .is_some_and(|(reason, message)| reason == expected && message.contains(text))
        };
        machine
            .pod_with(name, &format!("{expected} with {text}"), accepts)
            .await;
    }
    // A missing object that appears later lets the pod start.
    let map = json!({"metadata": {"name": "absent"}, "data": {"K": "v"}});
    machine.create_object::<ConfigMap>(map).await;
    machine.ready("configmap").await;
    machine.finish().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn init_containers_volumes_and_security_contexts_work_together() {
    let machine = Machine::start().await;
    let secret = json!({"metadata": {"name": "s"}, "stringData": {"token": "hush"}});
    machine.create_object::<Secret>(secret).await;
    let map = json!({"metadata": {"name": "m"}, "data": {"a": "1"}});
    machine.create_object::<ConfigMap>(map).await;
    let spec = json!({
        "securityContext": {"runAsUser": 1000, "runAsGroup": 1000, "fsGroup": 2000},
        "initContainers": [{"name": "i", "image": "host", "command": ["sh", "-c", "id -u > /shared/made"],
            "volumeMounts": [{"name": "e", "mountPath": "/shared"}]}],
        "containers": [
            {"name": "c", "image": "host", "command": ["sleep", "1000"], "workingDir": "/tmp",
             "securityContext": {"readOnlyRootFilesystem": true},
             "env": [{"name": "WHO", "valueFrom": {"fieldRef": {"fieldPath": "metadata.name"}}}],
             "volumeMounts": [{"name": "e", "mountPath": "/shared"}, {"name": "s", "mountPath": "/secret", "readOnly": true},
                {"name": "m", "mountPath": "/config/only", "subPath": "a"}, {"name": "mem", "mountPath": "/fast"}]},
            {"name": "d", "image": "host", "command": ["sh", "-c", "while :; do sleep 0.01; echo x > /dev/shm/from-d; done"]}],
        "volumes": [{"name": "e", "emptyDir": {}}, {"name": "s", "secret": {"secretName": "s"}},
            {"name": "m", "configMap": {"name": "m"}}, {"name": "mem", "emptyDir": {"medium": "Memory", "sizeLimit": "1Mi"}}]});
    machine.create("p", spec).await;
    let pod = machine.ready("p").await;
    let script = "cat /shared/made; cat /secret/token; cat /config/only; echo; echo $WHO; pwd; id -u; id -g; id -G; \
        touch /x 2>&1 | grep -o 'Read-only'; stat -fc %T /secret /fast; touch /shared/mine /fast/mine && stat -c %g /shared/mine; \
        touch /secret/y 2>&1 | grep -o 'Read-only'; hostname; until grep x /dev/shm/from-d 2>/dev/null; do :; done";
    let (code, out, err) = machine.exec(&pod, &["sh", "-c", script]).await;
    assert_eq!(code, 0, "{out}{err}");
    let expected = "1000\nhush1\np\n/tmp\n1000\n1000\n1000 2000\nRead-only\ntmpfs\ntmpfs\n2000\nRead-only\np\nx\n";
    assert_eq!(out, expected, "{err}");
    let status = pod.status.unwrap();
    assert_eq!(
        status.init_container_statuses.unwrap()[0]
            .state
            .as_ref()
            .unwrap()
            .terminated
            .as_ref()
            .unwrap()
            .exit_code,
        0
    );
    assert_eq!(status.container_statuses.unwrap().len(), 2);
    machine.finish().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_failing_liveness_probe_restarts_the_container() {
    let machine = Machine::start().await;
    let mut container = shell("sleep 1000");
    // The probe fails on request, and neither before the command has started nor because the machine is busy.
    container["livenessProbe"] = json!({"exec": {"command": ["test", "!", "-e", "/tmp/ill"]},
        "periodSeconds": 1, "failureThreshold": 1, "timeoutSeconds": 60});
    machine
        .create(
            "p",
            json!({"terminationGracePeriodSeconds": 60, "containers": [container]}),
        )
        .await;
    let pod = machine.ready("p").await;
    machine.exec(&pod, &["touch", "/tmp/ill"]).await;
    let pod = machine
        .pod_with("p", "restarted and ready", |pod| {
            is_ready(pod) && support::container(pod).is_some_and(|status| status.restart_count == 1)
        })
        .await;
    let last = pod.status.unwrap().container_statuses.unwrap()[0]
        .last_state
        .clone()
        .unwrap();
    assert_eq!(last.terminated.unwrap().exit_code, 143);
    machine.finish().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn deletion_runs_the_hook_honours_the_grace_and_then_kills() {
    let machine = Machine::start().await;
    // Before the handler is installed, the signal would have its default action.
    let trapped = json!({"exec": {"command": ["test", "-e", "/tmp/trapped"]}});
    let mut polite = shell(
        "trap 'cat /tmp/hook > /dev/termination-log; exit 7' TERM; touch /tmp/trapped; while :; do sleep 0.01; done",
    );
    polite["readinessProbe"] = trapped.clone();
    polite["lifecycle"] =
        json!({"preStop": {"exec": {"command": ["sh", "-c", "echo ran > /tmp/hook"]}}});
    machine
        .create(
            "polite",
            json!({"terminationGracePeriodSeconds": 60, "containers": [polite]}),
        )
        .await;
    let mut stubborn = shell("trap '' TERM; touch /tmp/trapped; while :; do sleep 0.01; done");
    stubborn["readinessProbe"] = trapped;
    machine
        .create(
            "stubborn",
            json!({"terminationGracePeriodSeconds": 1, "containers": [stubborn]}),
        )
        .await;
    machine.ready("polite").await;
    machine.ready("stubborn").await;
    let end = |states: &[PodStatus]| {
        let last = states.last().unwrap();
        let state = last.container_statuses.as_ref().unwrap()[0].state.clone();
        let end = state.unwrap().terminated.unwrap();
        (last.phase.clone().unwrap(), end.exit_code, end.message)
    };
    let states = machine.delete_and_watch("polite").await;
    assert_eq!(
        end(&states),
        ("Failed".to_owned(), 7, Some("ran\n".to_owned())),
        "the hook ran before the signal, and the termination is reported before the pod is deleted"
    );
    assert_eq!(
        states[0].phase.as_deref(),
        Some("Running"),
        "it is not over before it is"
    );
    let began = std::time::Instant::now();
    let states = machine.delete_and_watch("stubborn").await;
    assert_eq!(end(&states), ("Failed".to_owned(), 137, None));
    assert!(
        began.elapsed().as_millis() >= 900,
        "the grace period was cut short"
    );
    machine.finish().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_container_that_exceeds_its_memory_limit_is_reported_as_oom_killed() {
    let machine = Machine::start().await;
    let mut container = shell("exec python3 -c \"x = bytearray(200 << 20)\"");
    container["resources"] = json!({"limits": {"memory": "40Mi"}});
    machine
        .create(
            "p",
            json!({"restartPolicy": "Never", "containers": [container]}),
        )
        .await;
    let pod = machine.phase("p", "Failed").await;
    let end = pod.status.unwrap().container_statuses.unwrap()[0]
        .state
        .clone()
        .unwrap()
        .terminated
        .unwrap();
    assert_eq!(
        (end.reason.as_deref(), end.exit_code),
        (Some("OOMKilled"), 137)
    );
    machine.finish().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn pods_survive_a_restart_of_the_node_and_those_gone_meanwhile_are_removed() {
    let mut machine = Machine::start().await;
    machine.create("stays", sandboxd()).await;
    machine.create("goes", sandboxd()).await;
    machine.create("ends", json!({"restartPolicy": "Never", "containers": [shell("while ! test -e /tmp/end; do sleep 0.01; done; exit 5")]})).await;
    let before = machine.ready("stays").await;
    machine.ready("goes").await;
    let ends = machine.ready("ends").await;
    // The start time from `/proc/<pid>/stat`: the times of the directory are those of its first access.
    let start = ["cut", "-d ", "-f22", "/proc/2/stat"];
    let (_, started, _) = machine.exec(&before, &start).await;
    let (code, _, _) = machine
        .exec(
            &ends,
            &["sh", "-c", "(sleep 0.3; touch /tmp/end) > /dev/null 2>&1 &"],
        )
        .await;
    assert_eq!(code, 0);
    machine.stop_node().await;
    let force = DeleteParams {
        grace_period_seconds: Some(0),
        ..DeleteParams::default()
    };
    let uid = machine.pod("goes").await.uid().unwrap();
    machine.pods().delete("goes", &force).await.unwrap();
    let exit = machine
        .config
        .data_dir
        .join("pods")
        .join(ends.uid().unwrap())
        .join("containers/c/0/exit.json");
    eventually("the container to end without a node", || async {
        std::fs::metadata(&exit)
            .ok()
            .filter(|found| found.len() > 0)
    })
    .await;
    machine.start_node().await;
    let after = machine.ready("stays").await;
    let statuses = |pod: &k8s_openapi::api::core::v1::Pod| {
        pod.status.clone().unwrap().container_statuses.unwrap()[0].clone()
    };
    assert_eq!(
        statuses(&before).container_id,
        statuses(&after).container_id
    );
    assert_eq!(statuses(&after).restart_count, 0);
    assert_eq!(
        machine.exec(&after, &start).await.1,
        started,
        "the process is the same one"
    );
    let ended = machine.phase("ends", "Failed").await;
    assert_eq!(
        statuses(&ended)
            .state
            .unwrap()
            .terminated
            .unwrap()
            .exit_code,
        5
    );
    let directory = machine.config.data_dir.join("pods").join(uid);
    eventually("what is left of the deleted pod to go", || async {
        (!directory.exists()).then_some(())
    })
    .await;
    machine.finish().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_pod_that_was_being_prepared_when_the_node_died_starts_after_all() {
    let mut machine = Machine::start().await;
    let spec = json!({"containers": [{"name": "c", "image": "host", "command": ["sleep", "1000"],
            "volumeMounts": [{"name": "v", "mountPath": "/data"}]}],
        "volumes": [{"name": "v", "emptyDir": {}}]});
    machine.create("p", spec).await;
    let pod = machine.ready("p").await;
    machine.stop_node().await;
    // The node had recorded the pod, but nothing else of it was on disk yet.
    let directory = machine.config.data_dir.join("pods");
    let directory = directory.join(pod.uid().unwrap());
    let started = directory.join("containers/c/0/state.json");
    std::fs::remove_file(&started).unwrap();
    for unfinished in ["etc", "volumes"] {
        std::fs::remove_dir_all(directory.join(unfinished)).unwrap();
    }
    machine.start_node().await;
    eventually("the container to be started", || async {
        started.exists().then_some(())
    })
    .await;
    let pod = machine.ready("p").await;
    let script = "touch /data/note && grep -c localhost /etc/hosts";
    let (code, shown, _) = machine.exec(&pod, &["sh", "-c", script]).await;
    assert_eq!((code, shown.trim()), (0, "2"));
    machine.finish().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn mounted_objects_follow_their_originals() {
    let machine =
        Machine::start_with(|config| config.volume_refresh = std::time::Duration::from_millis(50))
            .await;
    let maps = Api::<ConfigMap>::namespaced(machine.client.clone(), "t");
    let object = |data: serde_json::Value| json!({"metadata": {"name": "m"}, "data": data});
    let map = object(json!({"a": "1", "b": "2"}));
    machine.create_object::<ConfigMap>(map).await;
    let spec = json!({"containers": [{"name": "c", "image": "host", "command": ["sleep", "1000"],
            "volumeMounts": [{"name": "m", "mountPath": "/config"}]}],
        "volumes": [{"name": "m", "configMap": {"name": "m"}}]});
    machine.create("p", spec).await;
    let pod = machine.ready("p").await;
    let shown = || async {
        let script = "cd /config && for f in *; do echo $f=$(cat $f); done";
        machine.exec(&pod, &["sh", "-c", script]).await.1
    };
    assert_eq!(shown().await, "a=1\nb=2\n");
    let map = serde_json::from_value(object(json!({"a": "changed", "c": "new"}))).unwrap();
    maps.replace("m", &PostParams::default(), &map)
        .await
        .unwrap();
    eventually("the volume to follow", || async {
        (shown().await == "a=changed\nc=new\n").then_some(())
    })
    .await;
    machine.finish().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_terminal_knows_its_size_and_an_attached_client_talks_to_the_command() {
    use container_runtime::agent::Output;
    use container_runtime::{ContainerId, Runtime};
    let machine = Machine::start().await;
    let mut container = shell("while read line; do echo got $line; done; echo over");
    container["stdin"] = json!(true);
    container["stdinOnce"] = json!(true);
    machine
        .create(
            "p",
            json!({"restartPolicy": "Never", "containers": [container]}),
        )
        .await;
    let pod = machine.ready("p").await;
    let id = ContainerId {
        pod: pod.uid().unwrap(),
        container: "c".to_owned(),
        attempt: 0,
    };
    let window = |rows: u16, columns: u16| shim_protocol::WindowSize { rows, columns };
    let request = shim_protocol::ExecRequest {
        // Prints its size at the start and after every change.
        arguments: [
            "sh",
            "-c",
            "trap 'stty size; exit 7' WINCH; stty size; while :; do sleep 0.05; done",
        ]
        .map(str::to_owned)
        .to_vec(),
        environment: Vec::new(),
        terminal: true,
        stdin: true,
        window: Some(window(24, 80)),
    };
    let mut session = machine.runtime().exec(&id, request).await.unwrap();
    let mut printed = String::new();
    let mut resized = false;
    let code = loop {
        match session.output.next().await.unwrap() {
            Output::Stdout(data) | Output::Stderr(data) => {
                printed.push_str(&String::from_utf8_lossy(&data));
                if !resized && printed.contains("24 80") {
                    session.input.resize(window(50, 132)).await.unwrap();
                    resized = true;
                }
            }
            Output::Exit(exit) => break exit.code,
        }
    };
    assert_eq!((printed.as_str(), code), ("24 80\r\n50 132\r\n", 7));
    let mut session = machine.runtime().attach(&id, true).await.unwrap();
    session.input.write(b"hello\n").await.unwrap();
    let mut printed = String::new();
    while !printed.contains("got hello\n") {
        match session.output.next().await.unwrap() {
            Output::Stdout(data) => printed.push_str(&String::from_utf8_lossy(&data)),
            other => panic!("unexpected {other:?}"),
        }
    }
    // Its input ends with the client (`stdinOnce`).
    session.input.close().await.unwrap();
    machine.phase("p", "Succeeded").await;
    machine.finish().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn an_https_probe_accepts_an_untrusted_certificate() {
    let machine = Machine::start().await;
    let certified = rcgen::generate_simple_self_signed(["pod.example".to_owned()]).unwrap();
    let (certificate, key) = (certified.cert.pem(), certified.signing_key.serialize_pem());
    let secret = json!({"metadata": {"name": "tls"}, "stringData": {"all.pem": format!("{certificate}{key}")}});
    machine.create_object::<Secret>(secret).await;
    let server = "import http.server, ssl\ns = http.server.HTTPServer(('', 8443), http.server.SimpleHTTPRequestHandler)\nc = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)\nc.load_cert_chain('/tls/all.pem')\ns.socket = c.wrap_socket(s.socket, server_side=True)\ns.serve_forever()";
    let spec = |scheme: &str| {
        json!({"terminationGracePeriodSeconds": 0, "containers": [{"name": "c", "image": "host", "command": ["python3", "-c", server],
            "readinessProbe": {"httpGet": {"path": "/", "port": 8443, "scheme": scheme}, "periodSeconds": 1},
            "volumeMounts": [{"name": "tls", "mountPath": "/tls"}]}],
            "volumes": [{"name": "tls", "secret": {"secretName": "tls"}}]})
    };
    machine.create("secured", spec("HTTPS")).await;
    machine.create("plain", spec("HTTP")).await;
    machine.ready("secured").await;
    assert!(
        !is_ready(&machine.pod("plain").await),
        "a plaintext response does not count"
    );
    machine.finish().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn an_undecodable_pod_does_not_prevent_others_from_running() {
    let seen = |client| rewriting(client, seventy_seven_is_too_large);
    let machine = Machine::start_seen_by(seen, |_| {}).await;
    let with_port =
        |port: u16| json!([{"name": "c", "image": "host", "ports": [{"containerPort": port}]}]);
    machine
        .create("unbound", json!({"containers": with_port(77)}))
        .await;
    machine
        .create(
            "bound",
            json!({"nodeName": "test-node", "containers": with_port(77)}),
        )
        .await;
    machine.create("good", sandboxd()).await;
    machine.ready("good").await;
    let field = "spec.containers[0].ports[0].containerPort";
    machine
        .pod_with("unbound", "reports why it is not bound", |pod| {
            let status = pod.status.as_ref();
            let mut conditions = status
                .into_iter()
                .flat_map(|status| status.conditions.iter().flatten());
            conditions.any(|condition| {
                condition.type_ == "PodScheduled"
                    && condition
                        .message
                        .as_ref()
                        .is_some_and(|message| message.contains(field))
            })
        })
        .await;
    machine
        .pod_with("bound", "reports why it does not run", |pod| {
            pod.status.as_ref().is_some_and(|status| {
                status.reason.as_deref() == Some("InvalidConfiguration")
                    && status
                        .message
                        .as_ref()
                        .is_some_and(|message| message.contains(field))
            })
        })
        .await;
    // It has no processes, so it can be deleted.
    machine.delete("bound").await;
    machine.delete("unbound").await;
    machine.finish().await;
}

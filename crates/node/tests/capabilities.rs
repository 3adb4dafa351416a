//! Capabilities and privilege escalation inside a pod, for root and other users, and for every way in which a process is started. That
//! they have no effect outside of the pod is tested in `confinement.rs`.

#![expect(
    clippy::unwrap_used,
    reason = "a test that cannot go on says so by panicking"
)]

mod support;

use k8s_openapi::api::core::v1::Pod;
use serde_json::{Value, json};
use support::{Machine, Privilege};
use testkit::eventually;

async fn sleeper(machine: &Machine, name: &str, context: Value) -> Pod {
    let spec = json!({"terminationGracePeriodSeconds": 0, "containers": [{"name": "c", "image": "host",
        "command": ["sleep", "1000"], "securityContext": context}]});
    machine.create(name, spec).await;
    machine.ready(name).await
}

async fn shell(machine: &Machine, pod: &Pod, script: &str) -> (i32, String, String) {
    machine.exec(pod, &["sh", "-c", script]).await
}

async fn output_of(machine: &Machine, pod: &Pod, script: &str) -> String {
    let (code, out, err) = shell(machine, pod, script).await;
    assert_eq!(code, 0, "{script}: {out}{err}");
    out.trim().to_owned()
}

#[tokio::test(flavor = "multi_thread")]
async fn everyday_tools_work_as_root() {
    let machine = Machine::start().await;
    let pod = sleeper(&machine, "usual", json!({})).await;
    let listen = "python3 -c 'import socket; s = socket.socket(); s.bind((\"127.0.0.1\", 80)); print(s.getsockname()[1])'";
    for (what, script, expected) in [
        (
            "chown",
            "cd /tmp; touch a; chown 1000:1000 a; stat -c %u:%g a",
            "1000:1000",
        ),
        (
            "tar keeps owners that are not root",
            "cd /tmp; mkdir from to; touch from/f; chown 1234:4321 from/f; tar cf - from | tar xf - -C to; stat -c %u:%g to/from/f",
            "1234:4321",
        ),
        (
            "files that only another user may read",
            "cd /tmp; echo word > b; chown 1000 b; chmod 400 b; cat b",
            "word",
        ),
        (
            "su",
            r#"su "nobody" -s /bin/sh -c 'id -u; id -g'"#,
            "65534\n65534",
        ),
        (
            "setpriv",
            "setpriv --reuid=1000 --regid=1000 --clear-groups id -u",
            "1000",
        ),
        ("a port below 1024", listen, "80"),
        ("chroot", "chroot / echo inside", "inside"),
        (
            "signals to other users",
            "setpriv --reuid=1000 --clear-groups sleep 1000 & until grep -q '^Uid:.*1000' /proc/$!/status; do :; done; kill -9 $! && echo sent",
            "sent",
        ),
    ] {
        assert_eq!(output_of(&machine, &pod, script).await, expected, "{what}");
    }
    let pod = sleeper(
        &machine,
        "dropped",
        json!({"capabilities": {"drop": ["ALL"]}}),
    )
    .await;
    for script in ["touch /tmp/a; chown 1000 /tmp/a", "chroot / true"] {
        let (code, _, err) = shell(&machine, &pod, script).await;
        assert!(
            code != 0 && err.contains("not permitted"),
            "{script}: {err}"
        );
    }
    let one = json!({"capabilities": {"drop": ["ALL"], "add": ["CHOWN"]}});
    let pod = sleeper(&machine, "one", one).await;
    let script = "touch /tmp/a; chown 1000 /tmp/a; stat -c %u /tmp/a";
    assert_eq!(output_of(&machine, &pod, script).await, "1000");
    assert_ne!(shell(&machine, &pod, "chroot / true").await.0, 0);
    machine.finish().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_set_user_id_program_gains_root_in_the_pod_unless_privilege_escalation_is_forbidden() {
    let machine = Machine::start().await;
    for (name, context, user, effective) in [
        ("usual", json!({}), "0", "00000000200405fb"),
        (
            "asked",
            json!({"allowPrivilegeEscalation": true}),
            "0",
            "00000000200405fb",
        ),
        (
            "forbidden",
            json!({"allowPrivilegeEscalation": false}),
            "1000",
            "0000000000000000",
        ),
        (
            "bounded",
            json!({"capabilities": {"drop": ["ALL"], "add": ["SETUID", "SETGID"]}}),
            "0",
            "00000000000000c0",
        ),
    ] {
        let pod = sleeper(&machine, name, context).await;
        let prepare = "cp /usr/bin/id /usr/bin/grep /tmp; chmod 4755 /tmp/id /tmp/grep";
        output_of(&machine, &pod, prepare).await;
        let as_user = "setpriv --reuid=1000 --regid=1000 --clear-groups";
        let found = output_of(&machine, &pod, &format!("{as_user} /tmp/id -u")).await;
        assert_eq!(found, user, "{name}");
        let status = format!("{as_user} /tmp/grep -E '^(CapEff|Seccomp):' /proc/self/status");
        let found = output_of(&machine, &pod, &status).await;
        assert_eq!(
            found,
            format!("CapEff:\t{effective}\nSeccomp:\t2"),
            "{name}"
        );
        machine.delete(name).await;
    }
    machine.finish().await;
}

/// Writes the kernel's status of the process that runs it to a file.
fn note(name: &str) -> String {
    format!("grep -E '^(Cap|NoNewPrivs)' /proc/self/status > /notes/{name}")
}

#[tokio::test(flavor = "multi_thread")]
async fn every_way_to_start_a_process_gives_it_the_same_privileges() {
    let machine = Machine::start().await;
    let none = "0000000000000000";
    for (name, user, privilege) in [
        ("root", 0, Privilege::Usual),
        ("user", 1000, Privilege::Usual),
        ("restricted", 1000, Privilege::None),
    ] {
        let container = |name: &str, script: String| {
            json!({"name": name, "image": "host", "command": ["sh", "-c", script],
                "securityContext": privilege.security_context(), "volumeMounts": [{"name": "notes", "mountPath": "/notes"}]})
        };
        let mut main = container("c", format!("{}; sleep 1000", note("main")));
        let hook = json!({"exec": {"command": ["sh", "-c", note("hook")]}});
        main["lifecycle"] = json!({"postStart": hook});
        let mut sidecar = container("sidecar", format!("{}; sleep 1000", note("sidecar")));
        sidecar["restartPolicy"] = json!("Always");
        let spec = json!({"terminationGracePeriodSeconds": 0, "securityContext": {"runAsUser": user},
            "initContainers": [container("init", note("init")), sidecar], "containers": [main],
            "volumes": [{"name": "notes", "emptyDir": {}}]});
        machine.create(name, spec).await;
        let pod = machine.ready(name).await;
        output_of(&machine, &pod, &note("exec")).await;
        let bounding = privilege.capabilities();
        let own = if user == 0 { bounding } else { none };
        let no_new_privileges = u8::from(privilege == Privilege::None);
        let expected = format!(
            "CapInh:\t{none}\nCapPrm:\t{own}\nCapEff:\t{own}\nCapBnd:\t{bounding}\nCapAmb:\t{none}\nNoNewPrivs:\t{no_new_privileges}"
        );
        for way in ["init", "sidecar", "main", "hook", "exec"] {
            let found = eventually("the note", || async {
                let read = format!("cat /notes/{way}");
                let (code, found, _) = shell(&machine, &pod, &read).await;
                (code == 0 && found.contains("NoNewPrivs")).then_some(found)
            });
            assert_eq!(found.await.trim(), expected, "{name}: {way}");
        }
        machine.delete(name).await;
    }
    machine.finish().await;
}

//! The real binary, as a newcomer uses it. Needs root: it starts containers.

#![expect(clippy::unwrap_used, reason = "a test stops at the first surprise")]

mod bench;
mod crash;
mod data_plane;
mod freezing;
mod interrupts;
mod json_logs;

mod local_users;
mod machine;
mod node_flags;
mod outcomes;
mod parts;
mod rootless;
mod sdk_examples;
mod starts;
mod streams;
mod support;
mod verbs;
mod without_nft;

use std::io::Write;
use std::process::Stdio;

use rustix::process::Signal;
use support::{Up, agent_sandbox, get, get_from_host, run, stderr_of, stdout_of};

#[test]
fn a_command_runs_in_a_claimed_sandbox_and_its_exit_code_is_ours() {
    let up = Up::start(&[]);
    let answer = stdout_of(
        up.command()
            .args(["run", "--", "python3", "-c", "print(6*7)"]),
    );
    assert_eq!(answer, "42\n");

    let output =
        run(up
            .command()
            .args(["run", "--", "sh", "-c", "echo out; echo err >&2; exit 3"]));
    assert_eq!(output.status.code(), Some(3));
    assert_eq!(output.stdout, b"out\n");
    assert_eq!(output.stderr, b"err\n");

    let output = run(up.command().args(["run", "--", "no-such-program"]));
    assert_eq!(output.status.code(), Some(127));
    let complaint = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(complaint.contains("no-such-program"), "{complaint}");
    assert!(complaint.contains("install the program"), "{complaint}");

    let claims = stdout_of(up.command().args(["list", "-o", "name"]));
    assert_eq!(claims, "", "every claim was released");
}

#[test]
fn a_sandbox_of_the_secure_template_runs_commands_without_root_on_a_read_only_root() {
    let up = Up::start(&[]);
    let script = "id -u; id -g; grep -E '^(CapBnd|NoNewPrivs|Seccomp):' /proc/self/status; \
                  touch /usr/x /etc/x /x 2>/dev/null && echo wrote; \
                  echo kept > /app/note && cat /app/note && touch /tmp/note && python3 -c 'print(6*7)'";
    let arguments = ["run", "--template", "secure-runtime-template", "--"];
    let answer = stdout_of(up.command().args(arguments).args(["sh", "-c", script]));
    let expected = "1000\n1000\nCapBnd:\t0000000000000000\nNoNewPrivs:\t1\nSeccomp:\t2\nkept\n42\n";
    assert_eq!(answer, expected);
}

#[test]
fn standard_input_reaches_the_command() {
    let up = Up::start(&[]);
    let mut command = up.command();
    let mut child = command
        .args(["run", "--", "tr", "a-z", "A-Z"])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    child
        .stdin
        .take()
        .unwrap()
        .write_all(b"from outside\n")
        .unwrap();
    let output = child.wait_with_output().unwrap();
    assert!(output.status.success());
    assert_eq!(output.stdout, b"FROM OUTSIDE\n");
}

#[test]
fn a_claimed_sandbox_keeps_its_state_while_up_is_restarted() {
    let mut up = Up::start(&[]);
    let claim = stdout_of(up.command().arg("claim"));
    let claim = claim.trim();
    let exec = |up: &Up, script: &str| {
        stdout_of(up.command().args(["exec", claim, "--", "sh", "-c", script]))
    };
    exec(&up, "echo remembered > note; sleep 1000 & echo $! > pid");
    let boot = exec(&up, "cat /proc/1/stat | cut -d' ' -f22");

    for signal in [Signal::TERM, Signal::KILL] {
        up.restart(signal);
        assert_eq!(exec(&up, "cat note"), "remembered\n", "after {signal:?}");
        assert_eq!(
            exec(&up, "kill -0 $(cat pid) && echo alive"),
            "alive\n",
            "after {signal:?}"
        );
        assert_eq!(
            exec(&up, "cat /proc/1/stat | cut -d' ' -f22"),
            boot,
            "the container was not started again"
        );
    }

    stdout_of(up.command().args(["delete", "--wait", claim]));
    let error = stderr_of(up.command().args(["exec", claim, "--", "true"]));
    assert!(
        error.contains(&format!("no claim named {claim}")),
        "{error}"
    );
}

#[test]
fn without_a_running_system_one_is_started_for_the_call_and_leaves_nothing() {
    support::require_root();
    let home = tempfile::tempdir().unwrap();
    let answer =
        stdout_of(agent_sandbox(home.path()).args(["run", "--", "python3", "-c", "print(6*7)"]));
    assert_eq!(answer, "42\n");
    let left: Vec<_> = std::fs::read_dir(home.path())
        .unwrap()
        .map(|entry| entry.unwrap().path())
        .collect();
    assert!(left.is_empty(), "{left:?}");
    let mounts = std::fs::read_to_string("/proc/mounts").unwrap();
    assert!(!mounts.contains(home.path().to_str().unwrap()), "{mounts}");

    let error = stderr_of(agent_sandbox(home.path()).args(["run", "--keep", "--", "true"]));
    assert!(error.contains("agent-sandbox up"), "{error}");
}

#[test]
fn the_ready_file_says_where_everything_is_and_goes_on_exit() {
    let mut up = Up::start(&[]);
    let ready = up.ready().clone();
    assert_eq!(ready["namespace"], "default");
    assert_eq!(ready["template"], "python-runtime-template");
    assert_eq!(ready["warmPool"], "python-warmpool");
    for address in ["apiServer", "router", "metrics"] {
        assert!(
            ready[address].as_str().unwrap().contains("://127.0.0.1:"),
            "{ready}"
        );
    }
    let metrics = get(ready["metrics"].as_str().unwrap(), "/metrics");
    assert!(metrics.starts_with("HTTP/1.1 200"), "{metrics}");
    assert!(metrics.contains("workqueue_depth{"), "{metrics}");
    // DNS rebinding: a page whose host name resolves to this machine would be same-site with the router.
    let router = ready["router"].as_str().unwrap();
    for (host, expected) in [
        ("localhost", "HTTP/1.1 400"),
        ("evil.example", "HTTP/1.1 421"),
    ] {
        let answer = get_from_host(router, host, "/");
        assert!(answer.starts_with(expected), "{host}: {answer}");
    }
    assert!(std::path::Path::new(ready["kubeconfig"].as_str().unwrap()).is_file());

    let error = stderr_of(
        up.command()
            .args([
                "up",
                "--api-listen=127.0.0.1:0",
                "--router-listen=127.0.0.1:0",
                "--metrics-bind-address=127.0.0.1:0",
                "--ready-file",
            ])
            .arg(up.ready_file()),
    );
    assert!(
        up.ready_file().exists(),
        "one that is refused leaves the other's file alone"
    );
    assert_eq!(error.lines().count(), 1, "{error}");
    assert!(
        error.contains("in use") || error.contains("another"),
        "{error}"
    );

    let taken = ready["router"]
        .as_str()
        .unwrap()
        .trim_start_matches("http://");
    let elsewhere = tempfile::tempdir().unwrap();
    let error = stderr_of(agent_sandbox(elsewhere.path()).args([
        "up",
        "--api-listen=127.0.0.1:0",
        "--router-listen",
        taken,
    ]));
    assert!(
        error.contains(taken) && error.contains("--router-listen"),
        "{error}"
    );

    up.delete_everything();
    up.signal(Signal::TERM);
    assert!(!up.ready_file().exists());
}

#[test]
fn an_error_is_one_line_with_the_remedy() {
    let up = Up::start(&["--no-quickstart"]);
    assert!(up.ready()["template"].is_null());
    let error = stderr_of(
        up.command()
            .args(["run", "--template", "nope", "--", "true"]),
    );
    assert_eq!(error.lines().count(), 1, "{error}");
    assert!(
        error.contains("SandboxTemplate \"nope\" not found"),
        "{error}"
    );

    let nowhere = tempfile::tempdir().unwrap();
    let error = stderr_of(agent_sandbox(nowhere.path()).arg("list"));
    assert!(error.contains("agent-sandbox up"), "{error}");
}

#[test]
fn generate_prints_what_is_in_deploy() {
    let home = tempfile::tempdir().unwrap();
    let deploy = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../../deploy");
    let printed = stdout_of(agent_sandbox(home.path()).args(["generate", "crds"]));
    let mut files: Vec<_> = std::fs::read_dir(deploy.join("crds"))
        .unwrap()
        .map(|entry| entry.unwrap().path())
        .collect();
    files.sort();
    let expected: Vec<String> = files
        .iter()
        .map(|file| std::fs::read_to_string(file).unwrap())
        .collect();
    assert_eq!(printed, expected.join("---\n"));
    for (what, file) in [
        (&["router"][..], "router/router.yaml"),
        (&["gateway-gke"], "router/gateway-gke.yaml"),
        (&["gateway-kind"], "router/gateway-kind.yaml"),
        (&["node"], "node/rbac.yaml"),
        (&["crds", "--kruise"], "kruise/crds.yaml"),
        (&["crds", "--core"], "crds/agents.x-k8s.io_sandboxes.yaml"),
        (&["rbac", "--core"], "rbac.generated.yaml"),
        (&["manifests", "--core"], "controller.yaml"),
    ] {
        let printed = stdout_of(agent_sandbox(home.path()).arg("generate").args(what));
        let expected = std::fs::read_to_string(deploy.join(file)).unwrap();
        assert_eq!(printed, expected, "{what:?}");
    }
}

#[test]
fn the_controller_prints_its_version_without_an_api_server() {
    let home = tempfile::tempdir().unwrap();
    let name = home.path().join("agent-sandbox-controller");
    std::os::unix::fs::symlink(env!("CARGO_BIN_EXE_agent-sandbox"), &name).unwrap();
    let mut as_controller = std::process::Command::new(&name);
    as_controller.args(["--version"]);
    let mut single_dash = std::process::Command::new(&name);
    single_dash.args(["-version"]);
    let mut as_verb = agent_sandbox(home.path());
    as_verb.args(["controller", "--version"]);
    let expected = format!("agent-sandbox-controller {} (", env!("CARGO_PKG_VERSION"));
    for command in [&mut as_controller, &mut single_dash, &mut as_verb] {
        let printed = stdout_of(command.env_remove("KUBECONFIG"));
        assert!(printed.starts_with(&expected), "{printed}");
        assert!(printed.contains(std::env::consts::ARCH), "{printed}");
        assert_eq!(printed.lines().count(), 1, "{printed}");
    }
}

#[test]
fn what_a_killed_system_leaves_is_given_back() {
    let mut up = Up::start(&[]);
    stdout_of(up.command().args(["claim", "mine"]));
    let refused = stderr_of(up.command().arg("reset"));
    assert!(refused.contains("`up` is running"), "{refused}");

    up.kill();
    let tag = machine::tag_of(up.home());
    assert!(!machine::holdings(up.home(), &tag).processes.is_empty());
    let text = stdout_of(up.command().arg("reset"));
    assert!(text.contains("its addresses and UIDs"), "{text}");
    let left = machine::holdings(up.home(), &tag);
    let nothing = machine::Holdings {
        directories: left.directories.clone(),
        ..machine::Holdings::default()
    };
    assert_eq!(left, nothing, "files alone are left");
    let again = stdout_of(up.command().arg("reset"));
    assert!(again.starts_with("nothing of "), "{again}");

    up.start_again();
    let deadline = std::time::Instant::now() + std::time::Duration::from_secs(120);
    loop {
        let output = run(up.command().args(["exec", "mine", "--", "echo", "back"]));
        if output.stdout == b"back\n" {
            break;
        }
        let text = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(
            std::time::Instant::now() < deadline,
            "the sandbox does not start over: {text}"
        );
    }
}

//! Every command on claims, sandboxes, pools and templates, as a person types it. Needs root: it starts containers.

use std::fs;
use std::io::{BufRead, BufReader, Read, Write};
use std::os::fd::OwnedFd;
use std::os::unix::fs::FileTypeExt;
use std::process::{Child, ChildStdout, Stdio};
use std::time::SystemTime;

use api::SandboxTemplate;
use kube::Api;
use kube::api::PostParams;
use router::authorize::scoped_token::TokenKey;
use rustix::pty::{OpenptFlags, grantpt, openpt, ptsname, unlockpt};
use rustix::termios::{Winsize, tcsetwinsize};
use serde_json::Value;

use crate::streams::client;
use crate::support::{Up, agent_sandbox, stderr_of, stdout_of};

impl Up {
    fn says(&self, arguments: &[&str]) -> String {
        stdout_of(self.command().args(arguments))
    }

    fn complains(&self, arguments: &[&str]) -> String {
        stderr_of(self.command().args(arguments))
    }

    fn json(&self, arguments: &[&str]) -> Value {
        serde_json::from_str(&self.says(arguments)).expect("it prints JSON")
    }

    /// Waits for an object that `status` would list as stuck on a busy machine.
    fn await_full_pool(&self) {
        self.says(&["scale", "python-warmpool", "--replicas=2", "--wait"]);
    }
}

/// A command that goes on printing, and its lines. It is killed at the end.
struct Following {
    child: Child,
    output: BufReader<ChildStdout>,
}

impl Following {
    fn start(up: &Up, arguments: &[&str]) -> Self {
        let mut command = up.command();
        let mut child = command
            .args(arguments)
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let output = BufReader::new(child.stdout.take().unwrap());
        Self { child, output }
    }

    fn until(&mut self, wanted: impl Fn(&str) -> bool) -> String {
        let mut lines = self.output.by_ref().split(b'\n').map(Result::unwrap);
        lines
            .find_map(|line| {
                let line = String::from_utf8_lossy(&line).into_owned();
                wanted(&line).then_some(line)
            })
            .expect("such a line is printed")
    }
}

impl Drop for Following {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

#[test]
fn objects_are_listed_shown_and_scaled() {
    let up = Up::start(&[]);
    assert_eq!(
        up.says(&["claim", "mine", "--shutdown-after", "1h"]),
        "mine\n"
    );

    let table = up.says(&["list"]);
    let lines: Vec<&str> = table.lines().collect();
    assert!(
        lines[0].starts_with("NAME ") && !lines[0].contains("NAMESPACE"),
        "{table}"
    );
    assert!(
        lines[1].starts_with("mine ") && lines[1].contains("True"),
        "{table}"
    );
    assert!(up.says(&["ls", "-A"]).starts_with("NAMESPACE "));
    let wide = up.says(&["list", "-o", "wide"]);
    assert!(
        wide.contains("template/python-runtime-template") && wide.contains("in 59m"),
        "{wide}"
    );
    let listed = up.json(&["list", "-o", "json"]);
    assert_eq!(
        (&listed["kind"], &listed["items"][0]["kind"]),
        (&"List".into(), &"SandboxClaim".into())
    );
    assert_eq!(up.says(&["list", "-l", "no=such", "-o", "name"]), "");
    assert!(up.says(&["list", "templates"]).contains("host"));

    let described = up.says(&["get", "mine"]);
    assert!(
        described.contains("Sandbox:") && described.contains("DependenciesReady"),
        "{described}"
    );
    assert_eq!(
        up.json(&["get", "mine", "-o", "json"])["metadata"]["name"],
        "mine"
    );
    assert!(
        up.says(&["get", "pool/python-warmpool", "-o", "yaml"])
            .contains("replicas: 2")
    );
    let sandbox = up.json(&["get", "mine", "-o", "json"])["status"]["sandbox"]["name"].clone();
    let sandbox = up.says(&["get", &format!("sandbox/{}", sandbox.as_str().unwrap())]);
    assert!(sandbox.contains("claim/mine"), "{sandbox}");

    let mut watching = Following::start(&up, &["list", "pools", "--watch"]);
    watching.until(|line| line.starts_with("python-warmpool"));
    let scaled = up.says(&["scale", "python-warmpool", "--replicas", "3", "--wait"]);
    assert_eq!(scaled, "python-warmpool: 2 to 3 warm sandboxes\n");
    let row =
        watching.until(|line| line.split_whitespace().collect::<Vec<_>>()[1..3] == ["3", "3"]);
    assert!(row.starts_with("python-warmpool"), "{row}");

    let overview = up.json(&["status", "-o", "json"]);
    assert_eq!(overview["sandboxes"]["warm"], 3, "{overview}");
    assert_eq!(overview["claims"]["ready"], 1, "{overview}");
    assert_eq!(overview["nodes"][0]["ready"], true, "{overview}");
    assert!(up.says(&["status"]).contains("Nothing is stuck."));

    let mut claims = Following::start(&up, &["list", "--watch"]);
    claims.until(|line| line.starts_with("mine"));
    assert_eq!(up.says(&["delete", "mine", "--wait"]), "mine is deleted\n");
    claims.until(|line| line.starts_with("mine") && line.contains("deleted"));
}

#[test]
fn what_is_not_there_is_answered_with_what_is() {
    let up = Up::start(&[]);
    up.says(&["claim", "mine"]);
    let pools = "no warm pool named nope in namespace default; pools here: python-warmpool";
    assert_eq!(
        up.complains(&["scale", "nope", "--replicas=1"]),
        format!("error: {pools}\n")
    );
    let error = up.complains(&["run", "--pool", "nope", "--", "true"]);
    assert!(
        error.contains("\"nope\" not found") && error.ends_with("pools here: python-warmpool\n"),
        "{error}"
    );
    let error = up.complains(&["claim", "--template", "nope"]);
    assert!(
        error.ends_with("templates here: python-runtime-template, secure-runtime-template\n"),
        "{error}"
    );
    let error = up.complains(&["claim", "mine"]);
    assert!(
        error.starts_with("error: a claim named mine exists already"),
        "{error}"
    );
    for verb in [
        &["exec", "nope", "--", "true"][..],
        &["get", "nope"],
        &["logs", "nope"],
        &["suspend", "nope"],
        &["delete", "nope"],
        &["cp", "nope:x", "."],
    ] {
        let error = up.complains(verb);
        let expected = "error: no claim named nope in namespace default; claims here: mine\n";
        assert_eq!(error, expected, "{verb:?}");
    }
    assert!(up.complains(&["cp", "a", "b"]).contains("NAME:PATH"));
    assert!(up.complains(&["get", "pod/x"]).contains("claim/"));
    up.await_full_pool();
    let overview = up.json(&["status", "-o", "json"]);
    assert_eq!(overview["stuck"].as_array().unwrap().len(), 0, "{overview}");
}

#[test]
fn files_and_directories_are_copied_both_ways() {
    let up = Up::start(&[]);
    up.says(&["claim", "mine"]);
    let here = tempfile::tempdir().unwrap();
    let path = |name: &str| here.path().join(name).to_str().unwrap().to_owned();
    fs::create_dir_all(here.path().join("tree/deep/down")).unwrap();
    fs::create_dir_all(here.path().join("tree/hollow/core")).unwrap();
    fs::write(here.path().join("tree/one"), "1").unwrap();
    fs::write(here.path().join("tree/deep/down/ünï code"), "2").unwrap();
    let large: Vec<u8> = (0..40_000_000_u32)
        .map(|number| number.to_le_bytes()[1])
        .collect();
    fs::write(here.path().join("large"), &large).unwrap();

    let copied = up.complained_only(&["cp", &path("tree"), "mine:"]);
    assert_eq!(copied, "2 files, 2 B\n");
    up.complained_only(&["cp", &path("large"), "mine:tree/renamed"]);
    let seen = up.says(&[
        "exec",
        "mine",
        "--",
        "sh",
        "-c",
        "cat tree/one 'tree/deep/down/ünï code'; wc -c < tree/renamed; test -d tree/hollow/core && echo hollow",
    ]);
    assert_eq!(seen, "1240000000\nhollow\n");

    up.complained_only(&["cp", "mine:tree", &path("back")]);
    assert_eq!(
        fs::read(here.path().join("back/deep/down/ünï code")).unwrap(),
        b"2"
    );
    assert!(
        fs::read(here.path().join("back/renamed")).unwrap() == large,
        "the large file came back"
    );
    assert!(here.path().join("back/hollow/core").is_dir());
    fs::create_dir(here.path().join("into")).unwrap();
    up.complained_only(&["cp", "mine:tree/one", &path("into")]);
    assert_eq!(fs::read(here.path().join("into/one")).unwrap(), b"1");

    let pipe = path("pipe");
    let made = std::process::Command::new("mkfifo")
        .arg(&pipe)
        .status()
        .unwrap();
    assert!(made.success());
    let reading = {
        let pipe = pipe.clone();
        std::thread::spawn(move || fs::read(pipe).unwrap())
    };
    up.complained_only(&["cp", "mine:tree/one", &pipe]);
    assert_eq!(reading.join().unwrap(), b"1");
    assert!(
        fs::metadata(&pipe).unwrap().file_type().is_fifo(),
        "what is no file is written to, not replaced"
    );

    let error = up.complains(&["cp", "mine:missing", &path("x")]);
    assert!(error.contains("404"), "{error}");
    let error = up.complains(&["cp", "mine:../etc/passwd", &path("x")]);
    assert!(error.contains("403"), "{error}");
    assert!(
        !here.path().join("x").exists(),
        "nothing is left of a copy that failed"
    );
}

impl Up {
    /// The standard error of a command that must succeed and print nothing else.
    fn complained_only(&self, arguments: &[&str]) -> String {
        let output = self.command().args(arguments).output().unwrap();
        let error = String::from_utf8(output.stderr).unwrap();
        assert!(
            output.status.success() && output.stdout.is_empty(),
            "{arguments:?}: {error}"
        );
        error
    }
}

#[test]
fn logs_are_followed_and_suspended_sandboxes_come_back() {
    let up = Up::start(&[]);
    let template = serde_json::json!({
        "apiVersion": "extensions.agents.x-k8s.io/v1beta1", "kind": "SandboxTemplate", "metadata": {"name": "talker"},
        "spec": {"podTemplate": {"spec": {"terminationGracePeriodSeconds": 0, "containers": [
            {"name": "main", "image": "host", "command": ["sh", "-c", "echo first; printf '\\377\\n'; while sleep 0.1; do echo again; done"]},
            {"name": "quiet", "image": "host", "command": ["sleep", "1000"]}
        ]}}},
    });
    let runtime = tokio::runtime::Runtime::new().unwrap();
    runtime.block_on(async {
        let templates: Api<SandboxTemplate> = Api::default_namespaced(client(&up).await);
        let template = serde_json::from_value(template).unwrap();
        templates
            .create(&PostParams::default(), &template)
            .await
            .unwrap();
    });
    up.says(&["claim", "talker", "--template", "talker"]);
    let mut following = Following::start(&up, &["logs", "-f", "talker"]);
    assert_eq!(following.until(|_| true), "first");
    assert_eq!(
        following.until(|_| true),
        "\u{fffd}",
        "bytes that are no text pass"
    );
    following.until(|line| line == "again");
    drop(following);
    assert!(
        up.says(&["logs", "talker", "--tail", "1"])
            .ends_with("again\n")
    );
    assert_eq!(up.says(&["logs", "talker", "-c", "quiet"]), "");
    let error = up.complains(&["logs", "talker", "-c", "nope"]);
    assert!(error.contains("containers here: main, quiet"), "{error}");

    assert_eq!(up.says(&["suspend", "talker"]), "talker is suspended\n");
    // The claim's status follows.
    let mut claims = Following::start(&up, &["list", "--watch"]);
    claims.until(|line| line.starts_with("talker") && line.contains("SandboxSuspended"));
    drop(claims);
    assert!(up.says(&["list"]).contains("SandboxSuspended"));
    up.await_full_pool();
    let overview = up.json(&["status", "-o", "json"]);
    assert_eq!(overview["sandboxes"]["suspended"], 1, "{overview}");
    assert_eq!(overview["stuck"].as_array().unwrap().len(), 0, "{overview}");
    assert!(
        up.complains(&["logs", "talker"])
            .contains("agent-sandbox resume")
    );
    let output = up
        .command()
        .args(["resume", "nope", "talker"])
        .output()
        .unwrap();
    assert!(!output.status.success(), "one of them is not there");
    assert_eq!(output.stdout, b"talker is running\n");
    let mut following = Following::start(&up, &["logs", "-f", "talker"]);
    assert_eq!(following.until(|_| true), "first");
    drop(following);
    let output = up.command().args(["logs", "talker"]).output().unwrap();
    assert!(output.status.success());
    assert!(output.stdout.starts_with(b"first\n"));
}

#[test]
fn a_command_runs_on_a_terminal() {
    let up = Up::start(&[]);
    up.says(&["claim", "mine"]);
    let (controller, terminal) = pseudo_terminal();
    let script = "test -t 0 && stty size && read line && echo got:$line && exit 7";
    let mut command = up.command();
    let mut child = command
        .args(["exec", "-it", "mine", "--", "sh", "-c", script])
        .stdin(terminal.try_clone().unwrap())
        .stdout(terminal.try_clone().unwrap())
        .stderr(terminal)
        .spawn()
        .unwrap();
    drop(command);
    let mut writer = fs::File::from(controller.try_clone().unwrap());
    let mut reader = fs::File::from(controller);
    let mut seen = String::new();
    let mut read_until = |wanted: &str| {
        let mut piece = [0; 256];
        while !seen.contains(wanted) {
            let length = reader.read(&mut piece).expect("the terminal is open");
            seen.push_str(&String::from_utf8_lossy(&piece[..length]));
        }
    };
    read_until("33 111");
    writer.write_all(b"hello\n").unwrap();
    read_until("got:hello");
    assert_eq!(child.wait().unwrap().code(), Some(7));
}

pub fn pseudo_terminal() -> (OwnedFd, OwnedFd) {
    let controller = openpt(OpenptFlags::RDWR | OpenptFlags::NOCTTY).unwrap();
    grantpt(&controller).unwrap();
    unlockpt(&controller).unwrap();
    let size = Winsize {
        ws_row: 33,
        ws_col: 111,
        ws_xpixel: 0,
        ws_ypixel: 0,
    };
    tcsetwinsize(&controller, size).unwrap();
    let name = ptsname(&controller, Vec::new()).unwrap();
    let path = name.to_str().unwrap();
    let terminal = fs::File::options()
        .read(true)
        .write(true)
        .open(path)
        .unwrap();
    (controller, terminal.into())
}

#[test]
fn a_minted_token_opens_what_it_says() {
    let home = tempfile::tempdir().unwrap();
    let key = home.path().join("key");
    fs::write(&key, "0123456789abcdef0123456789abcdef").unwrap();
    let mint = |arguments: &[&str]| {
        let mut command = agent_sandbox(home.path());
        command
            .arg("token")
            .arg("--key-file")
            .arg(&key)
            .args(arguments);
        command
    };
    let token = stdout_of(&mut mint(&[
        "box",
        "-n",
        "team",
        "-p",
        "8888",
        "-p",
        "3000",
        "--expires-in",
        "5m",
    ]));
    let scope = TokenKey::parse(&fs::read(&key).unwrap())
        .unwrap()
        .verify(token.trim_end(), SystemTime::now())
        .unwrap();
    assert!(scope.permits("team", "box", 3000) && !scope.permits("team", "box", 22));
    let error = stderr_of(&mut mint(&["not/a/name"]));
    assert!(error.contains("not a name"), "{error}");
    fs::write(&key, "short").unwrap();
    let error = stderr_of(&mut mint(&["box"]));
    assert!(error.contains("32 bytes"), "{error}");
}

#[test]
fn there_are_completions_for_every_shell() {
    let home = tempfile::tempdir().unwrap();
    for shell in ["bash", "zsh", "fish"] {
        let script = stdout_of(agent_sandbox(home.path()).args(["completions", shell]));
        assert!(
            script.contains("agent-sandbox") && script.contains("suspend"),
            "{shell}"
        );
    }
}

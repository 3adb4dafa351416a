//! `make deploy-kind` and `make deploy-minikube`, with programs in place of kind, minikube, kubectl and cargo that write down how they
//! are called. A real cluster of either needs a container engine.

#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

struct Machine {
    directory: tempfile::TempDir,
}

/// Writes down its call. `cargo xtask release` also writes its files, `kind get clusters` finds none, `minikube status` fails.
const PROGRAM: &str = r#"#!/bin/sh
echo "$(basename "$0") $*" >>"$CALLS"
case "$(basename "$0") $1" in
  "minikube status") exit 7 ;;
esac
"#;

impl Machine {
    fn new(programs: &[&str]) -> Self {
        let directory = tempfile::tempdir().unwrap();
        let machine = Self { directory };
        fs::create_dir(machine.path("bin")).unwrap();
        for name in programs {
            let path = machine.path("bin").join(name);
            fs::write(&path, PROGRAM).unwrap();
            fs::set_permissions(&path, fs::Permissions::from_mode(0o755)).unwrap();
        }
        fs::create_dir_all(machine.path("dist/images")).unwrap();
        for image in [
            "agent-sandbox-controller",
            "agent-sandbox-router",
            "sandboxd",
        ] {
            fs::write(machine.path("dist/images").join(format!("{image}.tar")), "").unwrap();
        }
        fs::write(machine.path("dist/IMAGE_TAG"), "0.1.0-test\n").unwrap();
        fs::write(machine.path("dist/IMAGE_PREFIX"), "localhost/\n").unwrap();
        machine
    }

    fn path(&self, name: &str) -> PathBuf {
        self.directory.path().join(name)
    }

    fn make(&self, target: &str, variables: &[(&str, &str)]) -> Output {
        let root = Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap();
        // Nothing but these programs and the system's own: a real cargo or kubectl is not called by accident.
        let path = format!("{}:/usr/bin:/bin", self.path("bin").display());
        Command::new("make")
            .current_dir(root)
            .args(["--silent", target])
            .env("PATH", path)
            .env("CALLS", self.path("calls"))
            .env("DIST", self.path("dist"))
            .env_remove("CLUSTER")
            .envs(variables.iter().copied())
            .output()
            .unwrap()
    }

    /// The calls, with the directories of this test and of the script left out.
    fn calls(&self) -> Vec<String> {
        let text = fs::read_to_string(self.path("calls")).unwrap_or_default();
        let here = format!("{}/", self.directory.path().display());
        text.lines()
            .map(|line| {
                let words: Vec<String> = line
                    .replace(&here, "")
                    .split(' ')
                    .map(|word| match word.rsplit_once('/') {
                        Some((directory, file)) if directory.starts_with("/tmp/tmp.") => {
                            file.to_owned()
                        }
                        _ if word.starts_with("/tmp/tmp.") => "MANIFESTS".to_owned(),
                        _ => word.to_owned(),
                    })
                    .collect();
                words.join(" ")
            })
            .collect()
    }
}

#[test]
fn kind_gets_the_archives_and_then_the_manifests() {
    let machine = Machine::new(&["kind", "kubectl", "cargo"]);
    let output = machine.make(
        "deploy-kind",
        &[
            ("EXTENSIONS", "true"),
            ("CONTROLLER_ARGS", "--zap-log-level=debug"),
        ],
    );
    assert!(output.status.success(), "{output:?}");
    let calls = machine.calls();
    assert!(calls[0].starts_with("cargo xtask release --tag 0.1.0-test --image-prefix localhost/ --controller-args=--zap-log-level=debug"), "{calls:?}");
    assert_eq!(
        calls[1..],
        [
            "kind get clusters",
            "kind create cluster --name agent-sandbox --config deploy/kind/cluster.yaml",
            "kind load image-archive --name agent-sandbox dist/images/agent-sandbox-controller.tar",
            "kind load image-archive --name agent-sandbox dist/images/agent-sandbox-router.tar",
            "kind load image-archive --name agent-sandbox dist/images/sandboxd.tar",
            "kubectl --context kind-agent-sandbox apply --server-side --force-conflicts -f all-in-one.yaml -f router.yaml",
            "kubectl --context kind-agent-sandbox rollout status deployment/agent-sandbox-controller -n agent-sandbox-system --timeout=120s",
        ]
    );
}

#[test]
fn minikube_gets_them_too_and_is_started_with_containerd() {
    let machine = Machine::new(&["minikube", "kubectl", "cargo"]);
    fs::write(machine.path("dist/images/python-runtime.tar"), "").unwrap();
    let output = machine.make("deploy-minikube", &[("CLUSTER", "mine")]);
    assert!(output.status.success(), "{output:?}");
    let calls = machine.calls();
    assert_eq!(
        calls[1..4],
        [
            "minikube status --profile mine",
            "minikube start --profile mine --container-runtime=containerd",
            "minikube image load --profile mine dist/images/agent-sandbox-controller.tar",
        ]
    );
    assert_eq!(
        calls[6],
        "minikube image load --profile mine dist/images/python-runtime.tar"
    );
    assert_eq!(
        calls[7],
        "kubectl --context mine apply --server-side --force-conflicts -f manifest.yaml -f router.yaml"
    );
    let output = machine.make("delete-minikube", &[("CLUSTER", "mine")]);
    assert!(output.status.success());
    assert_eq!(
        machine.calls().last().unwrap(),
        "minikube delete --profile mine"
    );
}

#[test]
fn a_missing_program_is_named_before_anything_is_done() {
    let machine = Machine::new(&["kubectl", "cargo"]);
    let output = machine.make("deploy-kind", &[]);
    assert!(!output.status.success());
    let complaint = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(complaint.contains("deploy-kind needs kind"), "{complaint}");
    assert!(machine.calls().is_empty());
}

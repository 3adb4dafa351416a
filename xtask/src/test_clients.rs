//! Published clients, unmodified, against the real binary: kubectl, and the Python SDKs of PyPI in environments of their own.
//!
//! What each client must be able to do is in `tests/clients`; here is only what they run on.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, bail, ensure};
use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;
use tempfile::TempDir;

/// How long the system may take to come up, or to stop, on a loaded machine.
const DEADLINE: Duration = Duration::from_secs(60);

/// A script of `tests/clients` and the package it tests.
struct Suite {
    script: &'static str,
    /// What pip installs for it; nothing means that the Python of this machine will do.
    package: Option<&'static str>,
}

const SUITES: [Suite; 6] = [
    Suite {
        script: "kubectl_streams",
        package: None,
    },
    Suite {
        script: "kubectl_objects",
        package: None,
    },
    Suite {
        script: "kruise",
        package: None,
    },
    Suite {
        script: "sdk_0_4_6",
        package: Some("k8s-agent-sandbox==0.4.6"),
    },
    Suite {
        script: "sdk_1_0_8",
        package: Some("k8s-agent-sandbox[async]==1.0.8"),
    },
    Suite {
        script: "sdk_1_0_8_async",
        package: Some("k8s-agent-sandbox[async]==1.0.8"),
    },
];

#[derive(Debug, clap::Args)]
pub struct Arguments {
    /// The binary to test [default: it is built]
    #[arg(long, value_name = "FILE")]
    binary: Option<PathBuf>,

    /// Only these scripts of tests/clients, by name without ending
    scripts: Vec<String>,
}

pub fn run(root: &Path, arguments: &Arguments) -> anyhow::Result<()> {
    for name in &arguments.scripts {
        ensure!(
            SUITES.iter().any(|suite| suite.script == name),
            "there is no tests/clients/{name}.py that this task knows"
        );
    }
    let wanted: Vec<&Suite> = SUITES
        .iter()
        .filter(|suite| {
            arguments.scripts.is_empty()
                || arguments.scripts.iter().any(|name| name == suite.script)
        })
        .collect();
    require("kubectl", &["version", "--client"], "install kubectl")?;
    require(
        "python3",
        &["-m", "venv", "--help"],
        "install Python 3 with venv",
    )?;
    ensure!(
        rustix::process::geteuid().is_root(),
        "the system under test starts containers: run this as root"
    );
    let pythons: Vec<PathBuf> = wanted
        .iter()
        .map(|suite| python_for(suite.package))
        .collect::<anyhow::Result<_>>()?;
    let binary = match &arguments.binary {
        Some(binary) => binary.clone(),
        None => build(root)?,
    };
    let up = Up::start(&binary)?;
    let mut failed = Vec::new();
    for (suite, python) in wanted.iter().zip(&pythons) {
        println!("-- {}", suite.script);
        let passed = up
            .script(python, &root.join("tests/clients"), suite.script)?
            .wait()?;
        if !passed.success() {
            failed.push(suite.script);
        }
    }
    up.stop()?;
    ensure!(
        failed.is_empty(),
        "these clients do not work: {}",
        failed.join(", ")
    );
    Ok(())
}

fn require(program: &str, arguments: &[&str], advice: &str) -> anyhow::Result<()> {
    let found = Command::new(program)
        .args(arguments)
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .status();
    match found {
        Ok(status) if status.success() => Ok(()),
        _ => bail!(
            "`{program} {}` does not work, and the clients' tests need it: {advice}",
            arguments.join(" ")
        ),
    }
}

/// A Python with the package, kept outside the checkout so that the next run finds it.
fn python_for(package: Option<&str>) -> anyhow::Result<PathBuf> {
    let Some(package) = package else {
        return Ok(PathBuf::from("python3"));
    };
    let name: String = package
        .chars()
        .map(|c| {
            if c.is_ascii_alphanumeric() || c == '.' {
                c
            } else {
                '-'
            }
        })
        .collect();
    let environment = cache_directory()?.join(name);
    let python = environment.join("bin/python");
    // Written last, so that an installation that was interrupted is not taken for a whole one.
    let complete = environment.join("complete");
    if complete.exists() {
        return Ok(python);
    }
    println!("-- installing {package}");
    fs::create_dir_all(&environment)?;
    run_to_end(
        Command::new("python3")
            .args(["-m", "venv", "--clear"])
            .arg(&environment),
    )?;
    run_to_end(Command::new(&python).args(["-m", "pip", "install", "--quiet", package]))?;
    fs::write(&complete, package)?;
    Ok(python)
}

fn cache_directory() -> anyhow::Result<PathBuf> {
    let base = match std::env::var_os("XDG_CACHE_HOME") {
        Some(cache) => PathBuf::from(cache),
        None => PathBuf::from(std::env::var_os("HOME").context("HOME is not set")?).join(".cache"),
    };
    Ok(base.join("agent-sandbox-ci/clients"))
}

fn run_to_end(command: &mut Command) -> anyhow::Result<()> {
    let status = command
        .status()
        .with_context(|| format!("cannot run {command:?}"))?;
    ensure!(status.success(), "{command:?}: {status}");
    Ok(())
}

/// Builds the binary, and says where it is.
fn build(root: &Path) -> anyhow::Result<PathBuf> {
    let cargo = || {
        let mut cargo = Command::new(env!("CARGO"));
        cargo.current_dir(root);
        cargo
    };
    run_to_end(cargo().args(["build", "--package=agent-sandbox", "--quiet"]))?;
    let metadata = cargo()
        .args(["metadata", "--format-version=1", "--no-deps", "--offline"])
        .output()?;
    let metadata: Value = serde_json::from_slice(&metadata.stdout).context("cargo metadata")?;
    let target = metadata["target_directory"]
        .as_str()
        .context("cargo metadata names no target directory")?;
    Ok(Path::new(target).join("debug/agent-sandbox"))
}

/// A running `agent-sandbox up` with a data directory of its own.
struct Up {
    binary: PathBuf,
    home: TempDir,
    child: Child,
    ready: Value,
}

impl Up {
    fn start(binary: &Path) -> anyhow::Result<Self> {
        let home = tempfile::tempdir()?;
        let ready_file = home.path().join("ready.json");
        let child = Command::new(binary)
            .env("AGENT_SANDBOX_HOME", home.path())
            .args([
                "up",
                "--api-listen=127.0.0.1:0",
                "--router-listen=127.0.0.1:0",
            ])
            .args(["--metrics-bind-address=127.0.0.1:0", "--ready-file"])
            .arg(&ready_file)
            .stdout(Stdio::null())
            .spawn()
            .with_context(|| format!("cannot start {}", binary.display()))?;
        let mut up = Self {
            binary: binary.to_owned(),
            home,
            child,
            ready: Value::Null,
        };
        let deadline = Instant::now() + DEADLINE;
        while up.ready.is_null() {
            if let Ok(text) = fs::read(&ready_file) {
                up.ready = serde_json::from_slice(&text).context("the ready file")?;
            } else if let Some(status) = up.child.try_wait()? {
                bail!("up ended before it was ready: {status}");
            }
            ensure!(Instant::now() < deadline, "up was not ready in time");
            std::thread::sleep(Duration::from_millis(20));
        }
        Ok(up)
    }

    /// Runs a script as a user of this system would.
    fn script(&self, python: &Path, directory: &Path, name: &str) -> anyhow::Result<Child> {
        let setting = |name: &str| self.ready[name].as_str().unwrap_or_default().to_owned();
        Command::new(python)
            .arg(directory.join(format!("{name}.py")))
            .env("KUBECONFIG", setting("kubeconfig"))
            .env("ROUTER_URL", setting("router"))
            .env("AGENT_SANDBOX", &self.binary)
            .env("PYTHONDONTWRITEBYTECODE", "1")
            // Everything is on this machine, whatever proxy there is for the rest.
            .env("NO_PROXY", "*")
            .env("no_proxy", "*")
            .stdin(Stdio::null())
            .spawn()
            .with_context(|| format!("cannot start {}", python.display()))
    }

    /// Sandboxes outlive `up` by design, so they are deleted while it still runs.
    fn delete_sandboxes(&self) -> anyhow::Result<()> {
        run_to_end(
            Command::new(&self.binary)
                .env("AGENT_SANDBOX_HOME", self.home.path())
                .env_remove("KUBECONFIG")
                .args(["delete", "--all", "--all-namespaces", "--wait"]),
        )
    }

    fn stop(mut self) -> anyhow::Result<()> {
        self.delete_sandboxes()?;
        kill_process(Pid::from_child(&self.child), Signal::TERM)?;
        let deadline = Instant::now() + DEADLINE;
        while self.child.try_wait()?.is_none() {
            ensure!(
                Instant::now() < deadline,
                "up did not stop in time after SIGTERM"
            );
            std::thread::sleep(Duration::from_millis(20));
        }
        let mounts = fs::read_to_string("/proc/mounts")?;
        let home = self.home.path().display().to_string();
        ensure!(!mounts.contains(&home), "mounts are left below {home}");
        Ok(())
    }
}

impl Drop for Up {
    fn drop(&mut self) {
        if matches!(self.child.try_wait(), Ok(None)) {
            let _ = self.delete_sandboxes();
            let _ = kill_process(Pid::from_child(&self.child), Signal::TERM);
            let _ = self.child.wait();
        }
    }
}

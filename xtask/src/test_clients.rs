//! Published clients, unmodified, against the real binary: kubectl (the one on the PATH, the oldest that is promised to work and the
//! newest), client-go and controller-runtime, the Go SDKs with their typed clients, the official Python client, and the SDKs of PyPI in
//! environments of their own.
//! And the pages for users, each block of which is run.
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

use crate::documents::{self, Language};
use crate::go_programs::{self, Module};

/// How long the system may take to come up, or to stop, on a loaded machine.
const DEADLINE: Duration = Duration::from_secs(180);

/// Something of `tests/clients` that is run against the system.
struct Suite {
    name: &'static str,
    program: Program,
    order: Order,
}

/// When a suite runs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Order {
    /// After the one before it has ended: it looks at objects that others would disturb.
    Alone,
    /// At the same time as its neighbours that say so too: it keeps to objects of its own.
    Together,
}

/// What a suite runs.
enum Program {
    /// A Python script, with what pip installs for it; nothing means that the Python of this machine will do.
    Script {
        file: &'static str,
        package: Option<&'static str>,
    },
    /// A Python script with a kubectl that is built for it.
    Kubectl { file: &'static str, module: Module },
    /// A script of `tests/kubernetes` for which this system stands for a cluster.
    EndToEnd { file: &'static str },
    /// The tests of a Go module.
    GoTests { module: Module },
    /// The blocks of a page.
    Page { path: &'static str },
    /// The blocks of an example's page, after what the page of all examples says.
    Example { name: &'static str },
}

/// What the blocks of Python on pages import.
const PAGES_PACKAGE: &str = "k8s-agent-sandbox[async]==1.0.8";
/// The block of Rust on pages, as a file that is compiled.
const PAGES_EXAMPLE: &str = "crates/cli/examples/quickstart.rs";

const fn script(name: &'static str, package: Option<&'static str>) -> Suite {
    Suite {
        name,
        program: Program::Script {
            file: name,
            package,
        },
        order: Order::Alone,
    }
}

/// One version of the SDKs that speak v1beta1, by the script that they share.
const fn sdk_v1beta1(name: &'static str, package: &'static str) -> Suite {
    Suite {
        name,
        program: Program::Script {
            file: "sdk_v1beta1",
            package: Some(package),
        },
        order: Order::Together,
    }
}

const fn kubectl(name: &'static str, file: &'static str, module: Module) -> Suite {
    Suite {
        name,
        program: Program::Kubectl { file, module },
        order: Order::Alone,
    }
}

const fn end_to_end(name: &'static str) -> Suite {
    Suite {
        name,
        program: Program::EndToEnd { file: name },
        order: Order::Alone,
    }
}

const fn go_tests(name: &'static str, module: Module) -> Suite {
    Suite {
        name,
        program: Program::GoTests { module },
        order: Order::Alone,
    }
}

const fn page(name: &'static str, path: &'static str) -> Suite {
    Suite {
        name,
        program: Program::Page { path },
        order: Order::Alone,
    }
}

const fn example(name: &'static str) -> Suite {
    Suite {
        name,
        program: Program::Example { name },
        order: Order::Alone,
    }
}

/// The pages come last: at the end of the quickstart everything is deleted.
const SUITES: [Suite; 32] = [
    script("kubectl_streams", None),
    script("kubectl_objects", None),
    script("kruise", None),
    end_to_end("sandboxes"),
    end_to_end("scenarios"),
    kubectl("kubectl_streams_oldest", "kubectl_streams", Module::Oldest),
    kubectl("kubectl_objects_oldest", "kubectl_objects", Module::Oldest),
    kubectl("kubectl_streams_newest", "kubectl_streams", Module::Newest),
    kubectl("kubectl_objects_newest", "kubectl_objects", Module::Newest),
    go_tests("go_clients", Module::Newest),
    go_tests("go_sdk", Module::Sdk),
    go_tests("go_sdk_v1beta1", Module::SdkV1beta1),
    script("python_client", Some("kubernetes==37.0.2")),
    script("sdk_0_4_6", Some("k8s-agent-sandbox==0.4.6")),
    script("sdk_0_4_6_async", Some("k8s-agent-sandbox[async]==0.4.6")),
    sdk_v1beta1("sdk_0_5_0", "k8s-agent-sandbox[async]==0.5.0"),
    sdk_v1beta1("sdk_0_5_6", "k8s-agent-sandbox[async]==0.5.6"),
    sdk_v1beta1("sdk_1_0_0", "k8s-agent-sandbox[async]==1.0.0"),
    sdk_v1beta1("sdk_1_0_8_connections", "k8s-agent-sandbox[async]==1.0.8"),
    script("sdk_1_0_8", Some("k8s-agent-sandbox[async]==1.0.8")),
    script("sdk_1_0_8_async", Some("k8s-agent-sandbox[async]==1.0.8")),
    script("sandboxd_1_0_8", Some("k8s-agent-sandbox[grpc]==1.0.8")),
    example("hello-world"),
    example("code-interpreter"),
    example("rollouts"),
    example("workspace"),
    example("web-app"),
    example("network-policy"),
    example("identity"),
    example("gvisor"),
    page("readme", "README.md"),
    page("quickstart", "docs/quickstart.md"),
];

impl Suite {
    /// Installs or builds what the suite runs, and says how to run it.
    fn prepare(&self, root: &Path) -> anyhow::Result<Command> {
        let scripts = root.join("tests/clients");
        let cache = cache_directory()?;
        match self.program {
            Program::Script { file, package } => {
                let mut command = Command::new(python_for(package)?);
                command.arg(scripts.join(format!("{file}.py")));
                Ok(command)
            }
            Program::Kubectl { file, module } => {
                let mut path = go_programs::kubectl(root, module, &cache)?.into_os_string();
                path.push(":");
                path.push(std::env::var_os("PATH").unwrap_or_default());
                let mut command = Command::new("python3");
                command.arg(scripts.join(format!("{file}.py")));
                command.env("PATH", path);
                Ok(command)
            }
            Program::EndToEnd { file } => {
                let mut command = Command::new("python3");
                command.arg(root.join(format!("tests/kubernetes/{file}.py")));
                command.env("PYTHONPATH", scripts).env("REPOSITORY", root);
                Ok(command)
            }
            Program::GoTests { module } => {
                let mut command = Command::new(go_programs::tests(root, module, &cache)?);
                command.args(["-test.v", "-test.timeout=900s"]);
                Ok(command)
            }
            Program::Page { path } => prepare_pages(root, &[path]),
            Program::Example { name } => {
                let page = format!("examples/{name}/README.md");
                prepare_pages(root, &["examples/README.md", &page])
            }
        }
    }
}

fn prepare_pages(root: &Path, paths: &[&str]) -> anyhow::Result<Command> {
    let mut steps = Vec::new();
    for path in paths {
        let page = fs::read_to_string(root.join(path))?;
        steps.extend(documents::steps(&page).with_context(|| format!("{path} cannot be read"))?);
    }
    let mut bash = Command::new("bash");
    bash.arg("-c").arg(documents::script(&steps));
    if let Some(step) = steps.iter().find(|step| step.language == Language::Rust) {
        ensure!(
            fs::read_to_string(root.join(PAGES_EXAMPLE))?.ends_with(&step.code),
            "the block of Rust at line {} of {} is not what is in {PAGES_EXAMPLE}",
            step.line,
            paths.join(" and ")
        );
        let example = build(root, &["--example=quickstart"], "debug/examples/quickstart")?;
        bash.env("EXAMPLE", example);
    }
    if documents::use_python(&steps) {
        bash.env("PYTHON", python_for(Some(PAGES_PACKAGE))?);
    }
    bash.env("REPOSITORY", root);
    Ok(bash)
}

/// A suite with what it runs installed.
struct Prepared {
    name: &'static str,
    order: Order,
    command: Command,
}

#[derive(Debug, clap::Args)]
pub struct Arguments {
    /// The binary to test [default: it is built]
    #[arg(long, value_name = "FILE")]
    binary: Option<PathBuf>,

    /// Only these suites
    suites: Vec<String>,
}

pub fn run(root: &Path, arguments: &Arguments) -> anyhow::Result<()> {
    for name in &arguments.suites {
        let known: Vec<&str> = SUITES.iter().map(|suite| suite.name).collect();
        ensure!(
            known.contains(&name.as_str()),
            "there is no suite {name}; there are {}",
            known.join(", ")
        );
    }
    let wanted = SUITES.iter().filter(|suite| {
        arguments.suites.is_empty() || arguments.suites.iter().any(|name| name == suite.name)
    });
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
    let mut prepared = wanted
        .map(|suite| {
            Ok(Prepared {
                name: suite.name,
                order: suite.order,
                command: suite.prepare(root)?,
            })
        })
        .collect::<anyhow::Result<Vec<_>>>()?;
    let binary = match &arguments.binary {
        Some(binary) => fs::canonicalize(binary)?,
        None => build_binary(root)?,
    };
    let up = Up::start(&binary)?;
    let mut failed = Vec::new();
    for group in prepared.chunk_by_mut(|one, next| [one.order, next.order] == [Order::Together; 2])
    {
        failed.extend(up.run_group(group)?);
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
pub fn python_for(package: Option<&str>) -> anyhow::Result<PathBuf> {
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

pub fn cache_directory() -> anyhow::Result<PathBuf> {
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

/// Builds the binary, and returns its path.
pub fn build_binary(root: &Path) -> anyhow::Result<PathBuf> {
    build(root, &["--bin=agent-sandbox"], "debug/agent-sandbox")
}

/// Builds the binary, and beside it the one that `agent-sandbox bench` executes. Returns the path of the first.
pub fn build_binary_with_bench(root: &Path) -> anyhow::Result<PathBuf> {
    let bench = "--package=agent-sandbox-bench";
    build(root, &[bench, "--bins"], "debug/agent-sandbox")
}

/// Builds a part of the command line's package, and returns its path.
fn build(root: &Path, what: &[&str], output: &str) -> anyhow::Result<PathBuf> {
    let cargo = || {
        let mut cargo = Command::new(env!("CARGO"));
        cargo.current_dir(root);
        cargo
    };
    run_to_end(
        cargo()
            .args(["build", "--package=agent-sandbox", "--quiet"])
            .args(what),
    )?;
    let metadata = cargo()
        .args(["metadata", "--format-version=1", "--no-deps", "--offline"])
        .output()?;
    let metadata: Value = serde_json::from_slice(&metadata.stdout).context("cargo metadata")?;
    let target = metadata["target_directory"]
        .as_str()
        .context("cargo metadata names no target directory")?;
    Ok(Path::new(target).join(output))
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
                "--host-domain=localhost",
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

    /// Runs suites at the same time, and says which failed. What a suite prints comes in one piece, unless it is the only one.
    fn run_group(&self, group: &mut [Prepared]) -> anyhow::Result<Vec<&'static str>> {
        if let [suite] = group {
            println!("-- {}", suite.name);
            let passed = self.start_client(&mut suite.command)?.wait()?.success();
            return Ok(if passed { vec![] } else { vec![suite.name] });
        }
        let mut running = Vec::new();
        for suite in group {
            let output = self.home.path().join(format!("{}.output", suite.name));
            let file = fs::File::create(&output)?;
            suite.command.stdout(file.try_clone()?).stderr(file);
            running.push((suite.name, self.start_client(&mut suite.command)?, output));
        }
        let mut failed = Vec::new();
        for (name, mut client, output) in running {
            let passed = client.wait()?.success();
            print!("-- {name}\n{}", fs::read_to_string(output)?);
            if !passed {
                failed.push(name);
            }
        }
        Ok(failed)
    }

    /// Starts a program as a user of this system would.
    fn start_client(&self, command: &mut Command) -> anyhow::Result<Child> {
        let setting = |name: &str| self.ready[name].as_str().unwrap_or_default().to_owned();
        command
            .env("KUBECONFIG", setting("kubeconfig"))
            .env("ROUTER_URL", setting("router"))
            .env("METRICS_URL", setting("metrics"))
            .env("AGENT_SANDBOX", &self.binary)
            .env("PYTHONDONTWRITEBYTECODE", "1")
            // What a client remembers of one server must not be taken for another's.
            .env("KUBECACHEDIR", self.home.path().join("kube-cache"))
            // Everything is on this machine, whatever proxy there is for the rest.
            .env("NO_PROXY", "*")
            .env("no_proxy", "*")
            .stdin(Stdio::null())
            .spawn()
            .with_context(|| format!("cannot start {command:?}"))
    }

    /// Sandboxes outlive `up` by design, so they are deleted while it still runs.
    fn delete_sandboxes(&self) -> anyhow::Result<()> {
        run_to_end(
            Command::new(&self.binary)
                .env("AGENT_SANDBOX_HOME", self.home.path())
                .env_remove("KUBECONFIG")
                .args(["delete", "--all", "--pools", "--all-namespaces", "--wait"]),
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
        let _ = Command::new(&self.binary)
            .arg("reset")
            .arg("--data-dir")
            .arg(self.home.path())
            .stdout(Stdio::null())
            .status();
    }
}

//! `cargo xtask test-kubernetes`: the conformance suite, the install paths and the system end to end on a real control plane.
//!
//! What must hold is in `tests/conformance` and in the scripts of `tests/kubernetes`; here is only what they run on.

pub mod certificates;
mod control_plane;
pub mod parts;
pub mod processes;

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::mpsc::{self, RecvTimeoutError};
use std::time::Instant;

use anyhow::{bail, ensure};

use crate::{kube_assets, test_clients};
use control_plane::ControlPlane;
use processes::Interruption;

/// A part of the task, by the name under which it can be asked for alone.
struct Suite {
    name: &'static str,
    run: Run,
}

enum Run {
    /// The recorded exchanges, against this control plane.
    Conformance,
    /// A script of `tests/kubernetes`.
    Script,
    /// A script of `tests/clients` that needs a node but no `up`.
    OnANode,
    /// The way from a release of the other implementation, and back.
    Upgrade { release: &'static str },
}

const SUITES: [Suite; 11] = [
    Suite {
        name: "conformance",
        run: Run::Conformance,
    },
    Suite {
        name: "install",
        run: Run::Script,
    },
    Suite {
        name: "helm",
        run: Run::Script,
    },
    Suite {
        name: "sandboxes",
        run: Run::Script,
    },
    Suite {
        name: "scenarios",
        run: Run::Script,
    },
    Suite {
        name: "examples",
        run: Run::Script,
    },
    Suite {
        name: "kubectl_streams",
        run: Run::OnANode,
    },
    Suite {
        name: "kruise",
        run: Run::Script,
    },
    Suite {
        name: "upgrade",
        run: Run::Upgrade { release: "v0.4.6" },
    },
    Suite {
        name: "upgrade_0_5",
        run: Run::Upgrade { release: "v0.5.0" },
    },
    Suite {
        name: "failures",
        run: Run::Script,
    },
];

#[derive(Debug, clap::Args)]
pub struct Arguments {
    /// The binary to test [default: it is built]
    #[arg(long, value_name = "FILE")]
    binary: Option<PathBuf>,

    /// Write down what the real API server answers, for the embedded one to be compared with
    #[arg(long)]
    record: bool,

    /// Only these: conformance, install, helm, sandboxes, scenarios, examples, kubectl_streams, kruise, upgrade,
    /// upgrade_0_5, failures
    suites: Vec<String>,
}

#[derive(Debug, clap::Args)]
pub struct UpArguments {
    /// Where etcd, kubectl and the programs of the control plane are [default: they are built]
    #[arg(long, value_name = "DIRECTORY")]
    programs: Option<PathBuf>,

    /// Run this with KUBECONFIG set, and stop when it ends [default: run until interrupted]
    #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
    command: Vec<String>,
}

/// Starts a control plane, for a command or for a person.
pub fn up(root: &Path, arguments: &UpArguments) -> anyhow::Result<()> {
    let programs = match &arguments.programs {
        Some(programs) => std::path::absolute(programs)?,
        None => kube_assets::ensure_built(root)?,
    };
    let interruption = Interruption::watch()?;
    let control_plane = ControlPlane::start(&programs, &interruption)?;
    if let Some((program, rest)) = arguments.command.split_first() {
        let mut command = Command::new(program);
        let status =
            interruption.run(environment(&mut command, &control_plane, &programs).args(rest))?;
        ensure!(status.success(), "{program}: {status}");
        return Ok(());
    }
    println!(
        "export KUBECONFIG={}",
        control_plane.kubeconfig("admin").display()
    );
    println!("Press Enter to stop.");
    wait_for_enter(&interruption);
    Ok(())
}

fn wait_for_enter(interruption: &Interruption) {
    let (sender, pressed) = mpsc::channel();
    // Nothing interrupts a read, so that it is another thread's.
    std::thread::spawn(move || sender.send(std::io::stdin().read_line(&mut String::new())));
    while interruption.received().is_none()
        && pressed.recv_timeout(processes::LOOK_AGAIN).err() == Some(RecvTimeoutError::Timeout)
    {
    }
}

pub fn run(root: &Path, arguments: &Arguments) -> anyhow::Result<()> {
    for name in &arguments.suites {
        ensure!(
            SUITES.iter().any(|suite| suite.name == name),
            "there is no suite {name}; there are {}",
            SUITES.map(|suite| suite.name).join(", ")
        );
    }
    ensure!(
        rustix::process::geteuid().is_root(),
        "the node under test starts containers: run this as root"
    );
    let programs = kube_assets::ensure_built(root)?;
    let binary = match &arguments.binary {
        Some(binary) => std::path::absolute(binary)?,
        None => test_clients::build_binary_with_bench(root)?,
    };
    let interruption = Interruption::watch()?;
    let mut failed = Vec::new();
    for suite in SUITES {
        if !arguments.suites.is_empty() && !arguments.suites.iter().any(|name| name == suite.name) {
            continue;
        }
        let begin = Instant::now();
        println!("-- {}", suite.name);
        // Each on a control plane of its own, so that none depends on what another left.
        let control_plane = ControlPlane::start(&programs, &interruption)?;
        let script = |file: &str, release: &str| {
            let path = root.join("tests/kubernetes").join(file);
            script(root, &control_plane, &programs, &binary, &path, release)
        };
        let mut command = match suite.run {
            Run::Conformance => conformance(root, &control_plane, arguments.record),
            Run::Script => script(&format!("{}.py", suite.name), "")?,
            Run::OnANode => script("on_a_node.py", "")?,
            Run::Upgrade { release } => script("upgrade.py", release)?,
        };
        let passed = interruption.run(&mut command)?.success();
        drop(control_plane);
        println!("-- {}: {} s", suite.name, begin.elapsed().as_secs());
        if !passed {
            failed.push(suite.name);
        }
    }
    if failed.is_empty() {
        return Ok(());
    }
    bail!("these do not work on Kubernetes: {}", failed.join(", "));
}

fn conformance(root: &Path, control_plane: &ControlPlane, record: bool) -> Command {
    let mut cargo = Command::new(env!("CARGO"));
    cargo
        .current_dir(root)
        .args(["test", "--quiet", "--package=agent-sandbox-conformance"])
        .env("CONFORMANCE_KUBECONFIG", control_plane.kubeconfig("admin"));
    if record {
        cargo.env("CONFORMANCE_RECORD", "1");
    }
    cargo
}

fn script(
    root: &Path,
    control_plane: &ControlPlane,
    programs: &Path,
    binary: &Path,
    path: &Path,
    release: &str,
) -> anyhow::Result<Command> {
    let mut python = Command::new("python3");
    python
        .env("UPSTREAM", kube_assets::upstream(root)?)
        .env("UPSTREAM_RELEASE", release);
    environment(&mut python, control_plane, programs)
        .arg(path)
        .env("AGENT_SANDBOX", binary)
        .env("XTASK", std::env::current_exe()?)
        .env("REPOSITORY", root)
        // A script that needs a router starts one itself.
        .env("ROUTER_URL", "")
        .env("PYTHONDONTWRITEBYTECODE", "1")
        .env("PYTHONPATH", root.join("tests/clients"))
        .stdin(Stdio::null());
    Ok(python)
}

/// What a program needs to use the control plane.
fn environment<'a>(
    command: &'a mut Command,
    control_plane: &ControlPlane,
    programs: &Path,
) -> &'a mut Command {
    let path = std::env::var_os("PATH").unwrap_or_default();
    let mut directories = vec![programs.to_owned()];
    directories.extend(std::env::split_paths(&path));
    if let Ok(path) = std::env::join_paths(directories) {
        command.env("PATH", path);
    }
    command
        .env("KUBECONFIG", control_plane.kubeconfig("admin"))
        .env("CONTROL_PLANE", control_plane.path())
        // Everything is on this machine, whatever proxy there is for the rest.
        .env("NO_PROXY", "*")
        .env("no_proxy", "*")
}

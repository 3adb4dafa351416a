//! `cargo xtask test-cluster`: the system on a whole Kubernetes, with a kubelet, containerd, CNI, network policies and gVisor.
//!
//! Outside of the cluster's namespaces this process builds what is needed, then runs itself in them as the driver, which starts the cluster and
//! runs the scripts of `tests/cluster`. What must hold is in the scripts; here is only what they run on.

mod configuration;
mod images;
pub mod namespaces;
mod suites;
mod system;

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Instant;

use anyhow::{Context, bail, ensure};
use serde::{Deserialize, Serialize};

use crate::kube_assets::{self, node_programs};
use crate::kubernetes::processes::Interruption;
use crate::test_clients;
use suites::{Prepared, SUITES};
use system::{Sources, System};

#[derive(Debug, clap::Args)]
pub struct Arguments {
    /// The binary to test [default: it is built]
    #[arg(long, value_name = "FILE")]
    binary: Option<PathBuf>,

    /// Use the image archives that `cargo xtask dist` wrote there [default: images are made of the binary]
    #[arg(long, value_name = "DIRECTORY")]
    images: Option<PathBuf>,

    /// Keep logs and state of the cluster there
    #[arg(long, value_name = "DIRECTORY")]
    keep: Option<PathBuf>,

    /// Only these suites
    suites: Vec<String>,
}

#[derive(Debug, clap::Args)]
pub struct UpArguments {
    /// The binary to use [default: it is built]
    #[arg(long, value_name = "FILE")]
    binary: Option<PathBuf>,

    /// Use the image archives that `cargo xtask dist` wrote there [default: images are made of the binary]
    #[arg(long, value_name = "DIRECTORY")]
    images: Option<PathBuf>,

    /// Run this in the cluster's namespaces, and stop the cluster when it ends
    #[arg(trailing_var_arg = true, allow_hyphen_values = true, required = true)]
    command: Vec<String>,
}

/// The subcommand that runs in the namespaces of the cluster.
pub const DRIVER: &str = "cluster-driver";

#[derive(Debug, clap::Args)]
pub struct DriverArguments {
    /// What to run, as the process outside wrote it
    plan: PathBuf,
}

/// What the driver runs, and on what.
#[derive(Serialize, Deserialize)]
struct Plan {
    repository: PathBuf,
    control_plane: PathBuf,
    node: PathBuf,
    images: Vec<PathBuf>,
    directory: PathBuf,
    environment: BTreeMap<String, String>,
    suites: Vec<Prepared>,
}

pub fn run(root: &Path, arguments: &Arguments) -> anyhow::Result<()> {
    for name in &arguments.suites {
        ensure!(
            SUITES.iter().any(|suite| suite.name == name),
            "there is no suite {name}; there are {}",
            SUITES.map(|suite| suite.name).join(", ")
        );
    }
    let wanted = |name: &str| {
        arguments.suites.is_empty() || arguments.suites.iter().any(|wanted| wanted == name)
    };
    let mut prepared = Vec::new();
    for suite in SUITES.iter().filter(|suite| wanted(suite.name)) {
        prepared.push(suite.prepare(root)?);
    }
    outside(
        root,
        arguments.binary.as_deref(),
        arguments.images.as_deref(),
        arguments.keep.as_deref(),
        prepared,
    )
}

/// Starts a cluster for a command.
pub fn up(root: &Path, arguments: &UpArguments) -> anyhow::Result<()> {
    let command = Prepared::new("command", arguments.command.clone());
    outside(
        root,
        arguments.binary.as_deref(),
        arguments.images.as_deref(),
        None,
        vec![command],
    )
}

/// Builds what the cluster is made of, and runs the driver in namespaces of its own.
fn outside(
    root: &Path,
    binary: Option<&Path>,
    images: Option<&Path>,
    keep: Option<&Path>,
    suites: Vec<Prepared>,
) -> anyhow::Result<()> {
    ensure!(
        rustix::process::geteuid().is_root(),
        "the cluster needs namespaces and starts containers: run this as root"
    );
    require_programs(images.is_some())?;
    let control_plane = kube_assets::ensure_built(root)?;
    let node = node_programs::ensure_built(root)?;
    let binary = match binary {
        Some(binary) => std::path::absolute(binary)?,
        None => test_clients::build_binary_with_bench(root)?,
    };
    let interruption = Interruption::watch()?;
    let directory = tempfile::Builder::new()
        .prefix("agent-sandbox-cluster-")
        .tempdir()?;
    let path = directory.path();
    let archives = path.join("images");
    fs::create_dir(&archives)?;
    let mut all = images::of_add_ons(&node, &archives)?;
    let ours = if let Some(images) = images {
        images::of_directory(&std::path::absolute(images)?)?
    } else {
        let sandboxd = binary.with_file_name("sandboxd");
        let cache = test_clients::cache_directory()?.with_file_name("cluster");
        images::of_binaries(&binary, &sandboxd, &cache, &archives)?
    };
    let environment = environment(root, &binary, path, &control_plane, &node, &ours)?;
    all.extend(ours);
    let plan = Plan {
        repository: root.to_owned(),
        control_plane,
        node,
        images: all,
        directory: path.to_owned(),
        environment,
        suites,
    };
    let file = path.join("plan.json");
    fs::write(&file, serde_json::to_vec(&plan)?)?;
    let status = namespaces::run(path, &[DRIVER.into(), file.into()], &interruption)?;
    if let Some(keep) = keep {
        fs::create_dir_all(keep)?;
        for entry in fs::read_dir(path)? {
            let entry = entry?;
            if entry.file_type()?.is_file() {
                fs::copy(entry.path(), keep.join(entry.file_name()))?;
            }
        }
    }
    directory.close().context("removing the cluster's files")?;
    ensure!(interruption.received().is_none(), "interrupted");
    ensure!(status.success(), "the system does not work on this cluster");
    Ok(())
}

/// Fails with the Debian packages to install if a program is missing that is not built.
fn require_programs(has_images: bool) -> anyhow::Result<()> {
    let path = std::env::var_os("PATH").unwrap_or_default();
    let is_missing = |program: &str| {
        !std::env::split_paths(&path).any(|directory| directory.join(program).exists())
    };
    let packages: Vec<&str> = [
        ("unshare", "util-linux"),
        ("ip", "iproute2"),
        ("nft", "nftables"),
        ("iptables", "iptables"),
        ("ipset", "ipset"),
        ("runc", "runc"),
        ("busybox", "busybox-static"),
        ("debootstrap", "debootstrap"),
    ]
    .into_iter()
    .filter(|(program, _)| !(has_images && *program == "debootstrap") && is_missing(program))
    .map(|(_, package)| package)
    .collect();
    ensure!(
        packages.is_empty(),
        "the cluster needs programs of Debian's packages: apt-get install {}",
        packages.join(" ")
    );
    Ok(())
}

/// What the scripts are told.
fn environment(
    root: &Path,
    binary: &Path,
    directory: &Path,
    control_plane: &Path,
    node: &Path,
    images: &[PathBuf],
) -> anyhow::Result<BTreeMap<String, String>> {
    let mut paths = vec![node.to_owned(), control_plane.to_owned()];
    paths.extend(std::env::split_paths(
        &std::env::var_os("PATH").unwrap_or_default(),
    ));
    let text = |path: &Path| path.display().to_string();
    let path = std::env::join_paths(paths)?;
    let mut environment: BTreeMap<String, String> = [
        ("PATH", path.to_string_lossy().into_owned()),
        ("KUBECONFIG", text(&directory.join("admin.kubeconfig"))),
        ("CONTROL_PLANE", text(directory)),
        ("CLUSTER", "kubelet".to_owned()),
        ("AGENT_SANDBOX", text(binary)),
        ("REPOSITORY", text(root)),
        ("UPSTREAM", text(&kube_assets::upstream(root)?)),
        ("UPSTREAM_RELEASE", "v0.4.6".to_owned()),
        ("XTASK", text(&std::env::current_exe()?)),
        ("ROUTER_URL", String::new()),
        ("PYTHONDONTWRITEBYTECODE", "1".to_owned()),
        (
            "PYTHONPATH",
            ["tests/clients", "tests/kubernetes", "tests/cluster"]
                .map(|part| text(&root.join(part)))
                .join(":"),
        ),
        ("KUBECACHEDIR", text(&directory.join("kube-cache"))),
        // Everything is on this machine, whatever proxy there is for the rest.
        ("NO_PROXY", "*".to_owned()),
        ("no_proxy", "*".to_owned()),
    ]
    .map(|(name, value)| (name.to_owned(), value))
    .into();
    for archive in images {
        let name = images::name(archive)?;
        let repository = name.rsplit_once(':').map_or(&*name, |(front, _)| front);
        let last = repository.rsplit('/').next().unwrap_or_default();
        let variable = last.to_uppercase().replace('-', "_");
        environment.insert(format!("ARCHIVE_{variable}"), text(archive));
        environment.insert(format!("IMAGE_{variable}"), name);
    }
    Ok(environment)
}

/// Starts the cluster in the namespaces that this process is in, and runs the suites.
pub fn drive(arguments: &DriverArguments) -> anyhow::Result<()> {
    let plan: Plan = serde_json::from_slice(&fs::read(&arguments.plan)?)?;
    let begin = Instant::now();
    let system = System::start(&Sources {
        repository: &plan.repository,
        control_plane: &plan.control_plane,
        node: &plan.node,
        images: &plan.images,
        directory: &plan.directory,
        path: &plan.environment["PATH"],
    })?;
    println!("-- the cluster is ready: {} s", begin.elapsed().as_secs());
    let mut failed = Vec::new();
    for suite in &plan.suites {
        let begin = Instant::now();
        println!("-- {}", suite.name);
        let mut command = Command::new(&suite.command[0]);
        let status = command
            .args(&suite.command[1..])
            .envs(&plan.environment)
            .envs(&suite.environment)
            .stdin(Stdio::null())
            .status()
            .with_context(|| format!("cannot start {command:?}"))?;
        println!("-- {}: {} s", suite.name, begin.elapsed().as_secs());
        if !status.success() {
            failed.push(suite.name.as_str());
        }
    }
    drop(system);
    if !failed.is_empty() {
        bail!("these do not work on a cluster: {}", failed.join(", "));
    }
    Ok(())
}

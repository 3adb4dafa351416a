//! The namespaces and cgroups of a test cluster, from outside: they are made, the driver runs in them as PID 1's child, and they are removed.
//!
//! `namespaces.sh` does the mounts. Everything that the cluster changes (processes, mounts, links, packet filter rules) belongs to namespaces
//! that the kernel removes with their last process. The cgroups are directories of the machine, so this module removes them.

use std::fs;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitStatus};
use std::time::{Duration, Instant};

use anyhow::{Context, bail, ensure};
use rustix::process::{Pid, Signal, WaitOptions, kill_process, test_kill_process};

use crate::kubernetes::processes::{self, Interruption};

const SCRIPT: &str = include_str!("namespaces.sh");
const CGROUPS: &str = "/sys/fs/cgroup";
/// A cgroup's name starts with this; the process id of the run that made it follows.
const PREFIX: &str = "agent-sandbox-cluster-";
/// How long the kernel may take to empty the cgroups after their processes were killed.
const DEADLINE: Duration = Duration::from_secs(30);

/// The cgroups of one run, in every hierarchy. Dropping them removes them.
struct Cgroups {
    name: String,
}

impl Cgroups {
    fn create() -> anyhow::Result<Self> {
        ensure!(
            Path::new(CGROUPS).join("memory").is_dir(),
            "the cluster needs cgroups version 1 below {CGROUPS}, as this arrangement was only made and tried with them"
        );
        remove_stale()?;
        let cgroups = Self {
            name: format!("{PREFIX}{}", std::process::id()),
        };
        for hierarchy in hierarchies()? {
            let path = hierarchy.join(&cgroups.name);
            fs::create_dir(&path).with_context(|| format!("making {}", path.display()))?;
            // A new cgroup of this controller has no CPUs and no memory nodes, and no process may join it.
            for setting in ["cpuset.cpus", "cpuset.mems"] {
                if let Ok(value) = fs::read(hierarchy.join(setting)) {
                    fs::write(path.join(setting), value)?;
                }
            }
        }
        Ok(cgroups)
    }
}

impl Drop for Cgroups {
    fn drop(&mut self) {
        if let Err(error) = remove_cgroups(&self.name) {
            eprintln!("{error:#}");
        }
    }
}

fn hierarchies() -> anyhow::Result<Vec<PathBuf>> {
    let mut found = Vec::new();
    for entry in fs::read_dir(CGROUPS).with_context(|| format!("reading {CGROUPS}"))? {
        let path = entry?.path();
        if path.join("cgroup.procs").exists() && !path.is_symlink() {
            found.push(path);
        }
    }
    Ok(found)
}

/// Removes the cgroups of runs that were killed before they could.
fn remove_stale() -> anyhow::Result<()> {
    for entry in fs::read_dir(Path::new(CGROUPS).join("memory"))? {
        let name = entry?.file_name().to_string_lossy().into_owned();
        let owner = name
            .strip_prefix(PREFIX)
            .and_then(|id| Pid::from_raw(id.parse().ok()?));
        if owner.is_some_and(|owner| test_kill_process(owner).is_err()) {
            remove_cgroups(&name)?;
        }
    }
    Ok(())
}

fn remove_cgroups(name: &str) -> anyhow::Result<()> {
    let deadline = Instant::now() + DEADLINE;
    for hierarchy in hierarchies()? {
        let path = hierarchy.join(name);
        while path.exists() {
            if remove_tree(&path).is_ok() {
                break;
            }
            ensure!(
                Instant::now() < deadline,
                "the cgroup {} is still in use",
                path.display()
            );
            std::thread::sleep(processes::LOOK_AGAIN);
        }
    }
    Ok(())
}

/// Removes a cgroup after those below it. The files in it go with the directory.
fn remove_tree(path: &Path) -> std::io::Result<()> {
    for entry in fs::read_dir(path)? {
        let entry = entry?;
        if entry.file_type()?.is_dir() {
            remove_tree(&entry.path())?;
        }
    }
    fs::remove_dir(path)
}

/// Runs this program again with the given arguments in new namespaces, and ends all of them with it.
pub fn run(
    directory: &Path,
    arguments: &[std::ffi::OsString],
    interruption: &Interruption,
) -> anyhow::Result<ExitStatus> {
    let cgroups = Cgroups::create()?;
    let script = directory.join("namespaces.sh");
    fs::write(&script, SCRIPT)?;
    let mut command = processes::bound(Path::new("bash"));
    command
        .arg(&script)
        .arg("outside")
        .arg(&cgroups.name)
        .arg(directory)
        .arg(std::env::current_exe()?)
        .arg(INIT)
        .arg("--")
        .args(arguments)
        // Ctrl-C is for this process, which ends the others.
        .process_group(0);
    let mut child = command.spawn().context("cannot start unshare")?;
    loop {
        if let Some(status) = child.try_wait()? {
            return Ok(status);
        }
        if interruption.received().is_some() {
            // The kernel kills PID 1 with it, and with PID 1 every process of the cluster.
            kill_process(Pid::from_child(&child), Signal::KILL)?;
        }
        std::thread::sleep(processes::LOOK_AGAIN);
    }
}

/// The subcommand that is PID 1 of the cluster.
pub const INIT: &str = "cluster-init";

#[derive(Debug, clap::Args)]
pub struct InitArguments {
    #[arg(trailing_var_arg = true, allow_hyphen_values = true, required = true)]
    arguments: Vec<std::ffi::OsString>,
}

/// Runs this program with the arguments, reaps orphans until it ends, and ends with its success.
pub fn init(arguments: &InitArguments) -> anyhow::Result<()> {
    let driver = Command::new("/proc/self/exe")
        .args(&arguments.arguments)
        .spawn()
        .context("cannot start the driver of the cluster")?;
    let driver = Pid::from_child(&driver);
    loop {
        // A container's shim is an orphan by design.
        let Some((ended, status)) = rustix::process::wait(WaitOptions::empty())? else {
            continue;
        };
        if ended == driver {
            if status.exit_status() == Some(0) {
                return Ok(());
            }
            bail!("the driver of the cluster failed");
        }
    }
}

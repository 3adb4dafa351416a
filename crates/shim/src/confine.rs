//! The container's first process, from clone to exec: enters the container's root, drops all privileges, and
//! becomes the agent.
//!
//! The order matters. Mounts need capabilities, so they come first. A process that may gain privileges can install a seccomp
//! filter only with `CAP_SYS_ADMIN`, so the filters are installed before capabilities and the user are dropped; they permit those
//! calls. Descriptors are arranged before the filters, so that none of the launcher's descriptors stays open.

use std::ffi::CString;
use std::fs::File;
use std::io::Write;
use std::os::fd::{AsFd, OwnedFd};
use std::path::{Path, PathBuf};

use rustix::fs::CWD;
use rustix::mount::{OpenTreeFlags, UnmountFlags};
use shim_protocol::{Launch, LaunchAnswer};

use crate::AGENT_NAME;
use crate::agent_guard;
use crate::failure::{During, Failure};
use crate::launch::Files;
use crate::mounts::{self, BuiltRoot};
use crate::syscalls;

/// The inputs of the first process.
#[derive(Debug)]
pub struct Container<'a> {
    pub launch: &'a Launch,
    pub root: BuiltRoot,
    pub files: Files,
    pub status: OwnedFd,
}

/// A descriptor of the agent's binary that no user can write to: `/proc/self/exe` leads through a
/// read-only mount that no path reaches.
pub fn protected_executable(path: &Path) -> Result<OwnedFd, Failure> {
    let flags = OpenTreeFlags::OPEN_TREE_CLONE | OpenTreeFlags::OPEN_TREE_CLOEXEC;
    let tree = rustix::mount::open_tree(CWD, path, flags)
        .during(format_args!("opening {}", path.display()))?;
    let attributes = libc::MOUNT_ATTR_RDONLY | libc::MOUNT_ATTR_NOSUID | libc::MOUNT_ATTR_NODEV;
    syscalls::mount_set_attributes(tree.as_fd(), false, attributes, None)
        .during("protecting the agent's binary")?;
    Ok(tree)
}

/// Confines this process and executes the agent. A failure is reported to the launcher, and ends the process.
pub fn enter(container: Container<'_>) -> ! {
    let report = container.status.try_clone();
    let Err(failure) = confine_and_execute(container);
    if let Ok(report) = report {
        let answer = LaunchAnswer::Failed {
            message: failure.to_string(),
            pid: None,
        };
        let _ = serde_json::to_vec(&answer).map(|text| File::from(report).write_all(&text));
    }
    std::process::exit(1)
}

fn confine_and_execute(container: Container<'_>) -> Result<std::convert::Infallible, Failure> {
    let Container {
        launch,
        root,
        files,
        status,
    } = container;
    rustix::process::setsid().during("starting a session")?;
    match launch.outside {
        None => take_root(launch, &root)?,
        Some(_) => stay_outside()?,
    }
    leave_the_launchers_session(launch)?;
    rustix::process::umask(rustix::fs::Mode::from_raw_mode(0o022));
    let Files {
        null,
        configuration,
        listener,
        log,
        exit,
        agent,
        seccomp,
    } = files;
    syscalls::arrange_descriptors(
        null,
        vec![configuration, listener, log, exit, status, agent],
    )
    .during("arranging descriptors")?;
    let agent = syscalls::inherited(crate::agent::AGENT_DESCRIPTOR);
    if launch.agent_process().no_new_privileges {
        syscalls::forbid_new_privileges().during("forbidding new privileges")?;
    }
    // An agent outside its container is in another PID namespace, where the container cannot address it.
    if launch.outside.is_none() {
        let own = rustix::process::getpid().as_raw_nonzero().get();
        let guard = agent_guard::program(own.unsigned_abs());
        syscalls::install_seccomp(&guard).during("guarding the agent")?;
    }
    for program in &seccomp {
        syscalls::install_seccomp(program).during("installing the seccomp filter")?;
    }
    give_up_privileges(launch)?;
    let name = CString::new(AGENT_NAME).during("naming the agent")?;
    Err(Failure::new(
        "executing the agent",
        syscalls::execute_file(agent.as_fd(), &name),
    ))
}

fn take_root(launch: &Launch, root: &BuiltRoot) -> Result<(), Failure> {
    // The mounts that this namespace copied are locked, but pivot_root needs an unlocked one: a clone of the whole mount tree.
    let flags = OpenTreeFlags::OPEN_TREE_CLONE
        | OpenTreeFlags::OPEN_TREE_CLOEXEC
        | OpenTreeFlags::AT_RECURSIVE;
    let tree = rustix::mount::open_tree(CWD, &root.path, flags).during("cloning the root")?;
    mounts::attach(tree.as_fd(), CWD, &root.path).during("stacking the root")?;
    rustix::process::chdir(&root.path).during("entering the root")?;
    let processes = mounts::plain_file_system("proc").during("making /proc")?;
    mounts::attach(processes.as_fd(), CWD, Path::new("proc")).during("mounting /proc")?;
    // The container's user may write to the agent's `/proc` directory, in particular its OOM score. If containers share a PID
    // namespace, the first process is another one.
    let own = rustix::process::getpid().as_raw_nonzero();
    let mut agents = vec![
        PathBuf::from("/proc/1"),
        PathBuf::from(format!("/proc/{own}")),
    ];
    agents.dedup();
    let read_only = launch.read_only_paths.iter().chain(&agents);
    mounts::mask(&launch.masked_paths, read_only)?;
    syscalls::pivot_root_here().during("changing the root")?;
    rustix::mount::unmount(".", UnmountFlags::DETACH).during("leaving the host's root")?;
    rustix::process::chdir("/").during("entering the new root")
}

/// Keeps the launcher's view of the host, in which another runtime finds the container's root, and its own programs. The process'
/// UID range has no access to host files, and it sees only its own processes.
fn stay_outside() -> Result<(), Failure> {
    let processes = mounts::plain_file_system("proc").during("making /proc")?;
    mounts::attach(processes.as_fd(), CWD, Path::new("/proc")).during("mounting /proc")?;
    rustix::process::chdir("/").during("leaving the stage")
}

fn leave_the_launchers_session(launch: &Launch) -> Result<(), Failure> {
    match syscalls::join_new_session_keyring() {
        // Without the kernel's key service there is no keyring to leave.
        Err(error) if error.raw_os_error() == Some(libc::ENOSYS) => {}
        other => other.during("leaving the session keyring")?,
    }
    for limit in &launch.agent_process().limits {
        syscalls::set_limit(limit.resource, limit.soft, limit.hard)
            .during(format_args!("setting resource limit {}", limit.resource))?;
    }
    Ok(())
}

/// Switches to the container's user. Root keeps the capabilities of the bounding set; other users keep none.
fn give_up_privileges(launch: &Launch) -> Result<(), Failure> {
    let process = launch.agent_process();
    syscalls::bound_capabilities(process.capabilities).during("bounding capabilities")?;
    syscalls::become_user(process.user.uid, process.user.gid, &process.user.groups).during(
        format_args!(
            "becoming user {} and group {}",
            process.user.uid, process.user.gid
        ),
    )?;
    let capabilities = if process.user.uid == 0 {
        process.capabilities
    } else {
        0
    };
    syscalls::set_capabilities(capabilities).during("dropping capabilities")
}

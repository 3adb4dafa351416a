//! Starts one container: joins its cgroups and namespaces, builds its root, and clones its first process.
//!
//! It joins cgroups and namespaces before it knows the container, so that a prepared launcher can wait for its request. Mounts are
//! different: those created for the container after the launcher's start must be visible, so its mount namespace is
//! copied last.
//!
//! The launcher is a separate process because clone and setns act on whole processes, which must be single-threaded.
//! The container's first process becomes a child of the launcher's parent, so that the node can wait for it, and it survives
//! the node.

use std::fs::{self, File};
use std::io::{BufRead, BufReader, Read, Write};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::OpenOptionsExt;
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Duration;

use rustix::fs::{MemfdFlags, Mode, OFlags};
use rustix::mount::{MountPropagationFlags, UnmountFlags};
use rustix::thread::{LinkNameSpaceType, UnshareFlags};
use shim_protocol::{Launch, LaunchAnswer, Preparation};

use crate::confine::{self, Container};
use crate::failure::{During, Failure};
use crate::mounts;
use crate::syscalls::{self, Side};

/// The scheduler's time slice for processes of a container: the kernel's default is some milliseconds.
const TIME_SLICE: Duration = Duration::from_micros(100);

pub fn run() -> ExitCode {
    let answer = match prepare_and_start() {
        Ok(answer) => answer,
        Err(failure) => LaunchAnswer::Failed {
            message: failure.to_string(),
            pid: None,
        },
    };
    // The newline ends the message: the node does not wait for the launcher to exit.
    let written = serde_json::to_vec(&answer)
        .map_err(std::io::Error::from)
        .and_then(|mut text| {
            text.push(b'\n');
            std::io::stdout().write_all(&text)
        });
    match written {
        Ok(()) => ExitCode::SUCCESS,
        Err(_) => ExitCode::FAILURE,
    }
}

/// The preparations that do not depend on the container, done before its request arrives.
struct Prepared {
    user_namespace: OwnedFd,
}

fn prepare_and_start() -> Result<LaunchAnswer, Failure> {
    let mut input = BufReader::new(std::io::stdin().lock());
    let mut line = Vec::new();
    input
        .read_until(b'\n', &mut line)
        .during("reading the preparation")?;
    let preparation = serde_json::from_slice(&line).during("parsing the preparation")?;
    let prepared = prepare(&preparation)?;
    line.clear();
    input
        .read_until(b'\n', &mut line)
        .during("reading the request")?;
    let launch = serde_json::from_slice(&line).during("parsing the request")?;
    start(&launch, prepared)
}

fn prepare(preparation: &Preparation) -> Result<Prepared, Failure> {
    let Preparation {
        pins,
        cgroups,
        out_of_memory_score,
    } = preparation;
    rustix::process::umask(Mode::empty());
    join_cgroups(cgroups, *out_of_memory_score)?;
    // Optional: without it the container runs as well, only other containers wait longer for the CPU.
    let _ = syscalls::set_time_slice(TIME_SLICE);
    let user_namespace = open(&pins.user)?;
    join(&pins.network, LinkNameSpaceType::Network)?;
    join(&pins.ipc, LinkNameSpaceType::InterProcessCommunication)?;
    join(&pins.hostname, LinkNameSpaceType::HostNameAndNISDomainName)?;
    Ok(Prepared { user_namespace })
}

fn start(launch: &Launch, prepared: Prepared) -> Result<LaunchAnswer, Failure> {
    let Prepared { user_namespace } = prepared;
    let files = open_files(launch)?;
    rustix::system::sethostname(launch.hostname.as_bytes()).during("setting the hostname")?;
    let pid_namespace = launch.pid_namespace.as_deref().map(open).transpose()?;

    syscalls::unshare(UnshareFlags::NEWNS).during("making a mount namespace")?;
    rustix::mount::mount_change(
        "/",
        MountPropagationFlags::PRIVATE | MountPropagationFlags::REC,
    )
    .during("making mounts private")?;
    let shared_memory = mounts::open_shared_memory(launch)?;
    // The pins of all other pods are mounts; a container's mount namespace must not keep them alive.
    let _ = rustix::mount::unmount(&launch.hide, UnmountFlags::DETACH);
    let root = mounts::build(launch, user_namespace.as_fd(), shared_memory)?;

    rustix::thread::move_into_link_name_space(
        user_namespace.as_fd(),
        Some(LinkNameSpaceType::User),
    )
    .during("joining the pod's user namespace")?;
    let mut flags = libc::CLONE_NEWNS | libc::CLONE_NEWCGROUP;
    match &pid_namespace {
        Some(namespace) => {
            rustix::thread::move_into_link_name_space(
                namespace.as_fd(),
                Some(LinkNameSpaceType::ProcessID),
            )
            .during("joining the pod's PID namespace")?;
        }
        None => flags |= libc::CLONE_NEWPID,
    }
    let (status_read, status_write) =
        rustix::pipe::pipe_with(rustix::pipe::PipeFlags::CLOEXEC).during("making a pipe")?;
    let flags = u64::try_from(flags).expect("positive flags");
    match syscalls::clone_sibling(flags).during("cloning the container's first process")? {
        Side::Child => {
            drop(status_read);
            confine::enter(Container {
                launch,
                root,
                files,
                status: status_write,
            })
        }
        Side::Parent(pid) => {
            drop(status_write);
            let answer = await_start(status_read, pid.as_raw_nonzero().get());
            // Closing mounts makes the kernel wait; leave that to the end of this process, after the response.
            std::mem::forget((root, files));
            Ok(answer)
        }
    }
}

/// Reads the container's process' report; if the pipe closes without one, the process died.
fn await_start(status: OwnedFd, pid: i32) -> LaunchAnswer {
    let mut text = Vec::new();
    let read = File::from(status).read_to_end(&mut text);
    match serde_json::from_slice(&text) {
        Ok(LaunchAnswer::Started { .. }) => LaunchAnswer::Started { pid },
        Ok(LaunchAnswer::Failed { message, .. }) => LaunchAnswer::Failed {
            message,
            pid: Some(pid),
        },
        Ok(LaunchAnswer::CommandFailed { message, code, .. }) => {
            LaunchAnswer::CommandFailed { message, code, pid }
        }
        Err(_) => LaunchAnswer::Failed {
            message: match read {
                Ok(_) => "the container's first process died before it ran the command".to_owned(),
                Err(error) => format!("waiting for the container's first process: {error}"),
            },
            pid: Some(pid),
        },
    }
}

fn open(path: &Path) -> Result<OwnedFd, Failure> {
    rustix::fs::open(path, OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty())
        .during(format_args!("opening {}", path.display()))
}

pub fn join(pin: &Path, kind: LinkNameSpaceType) -> Result<(), Failure> {
    let namespace = open(pin)?;
    rustix::thread::move_into_link_name_space(namespace.as_fd(), Some(kind))
        .during(format_args!("joining the namespace at {}", pin.display()))
}

fn join_cgroups(groups: &[PathBuf], out_of_memory_score: i32) -> Result<(), Failure> {
    for group in groups {
        fs::write(group.join("cgroup.procs"), "0")
            .during(format_args!("joining cgroup {}", group.display()))?;
    }
    if out_of_memory_score != 0 {
        fs::write("/proc/self/oom_score_adj", out_of_memory_score.to_string())
            .during("setting the out-of-memory score")?;
    }
    Ok(())
}

/// Files that the container's first process keeps across its confinement, opened while the host is visible.
#[derive(Debug)]
pub struct Files {
    pub null: OwnedFd,
    pub configuration: OwnedFd,
    pub listener: OwnedFd,
    pub log: OwnedFd,
    pub exit: OwnedFd,
    pub agent: OwnedFd,
    pub seccomp: Vec<Vec<libc::sock_filter>>,
}

fn open_files(launch: &Launch) -> Result<Files, Failure> {
    let write = |path: &Path, append: bool| {
        let mut options = File::options();
        options.create(true).mode(0o600);
        if append {
            options.append(true)
        } else {
            options.write(true).truncate(true)
        };
        options
            .open(path)
            .during(format_args!("opening {}", path.display()))
            .map(OwnedFd::from)
    };
    let log = write(&launch.files.log, true)?;
    let exit = write(&launch.files.exit, false)?;
    let null = rustix::fs::open("/dev/null", OFlags::RDWR | OFlags::CLOEXEC, Mode::empty())
        .during("opening /dev/null")?;

    // A socket address is limited to 108 bytes, so it is bound relative to its directory.
    rustix::process::chdir(&launch.files.directory).during(format_args!(
        "entering {}",
        launch.files.directory.display()
    ))?;
    let _ = fs::remove_file("agent.sock");
    let listener = UnixListener::bind("agent.sock").during("binding the agent's socket")?;
    rustix::fs::chmod("agent.sock", Mode::from_raw_mode(0o600))
        .during("protecting the agent's socket")?;
    listener
        .set_nonblocking(true)
        .during("preparing the agent's socket")?;

    let configuration = rustix::fs::memfd_create("configuration", MemfdFlags::CLOEXEC)
        .during("making a memory file")?;
    let mut configuration = File::from(configuration);
    serde_json::to_vec(launch.agent_process())
        .map_err(std::io::Error::from)
        .and_then(|text| configuration.write_all(&text))
        .during("writing the agent's configuration")?;

    let mut seccomp = Vec::new();
    for path in &launch.seccomp_programs {
        let bytes = fs::read(path).during(format_args!("reading {}", path.display()))?;
        let program = syscalls::parse_seccomp(&bytes);
        seccomp.push(program.ok_or_else(|| Failure::new(path.display(), "not a seccomp program"))?);
    }
    Ok(Files {
        null,
        configuration: configuration.into(),
        listener: listener.into(),
        log,
        exit,
        agent: confine::protected_executable(&launch.agent)?,
        seccomp,
    })
}

//! Creates a pod's network, IPC, hostname and user namespaces and pins them to files, so that they live as long as the
//! pod rather than as long as a process.
//!
//! Only the last belongs to the container's user namespace: a container's capabilities do not apply to its own network,
//! so it can neither forge addresses nor undo the node's configuration. The network namespace belongs to a
//! user namespace without processes, because the kernel reports the host's devices to every network namespace of the host's user namespace.
//!
//! The user namespaces belong to the first UID of the pod's range, so that the kernel's per-user limits are per-pod limits.

use std::fs::{self, File};
use std::io::{Read, Write};
use std::os::fd::OwnedFd;
use std::path::Path;
use std::process::ExitCode;

use rustix::process::{Pid, WaitOptions, waitpid};
use rustix::thread::{LinkNameSpaceType, UnshareFlags};
use shim_protocol::{NamespacesAnswer, NamespacesRequest, UidRange};

use crate::failure::{During, Failure};
use crate::syscalls::{self, Side};

pub fn run() -> ExitCode {
    let (answer, code) = match read_request().and_then(|request| make(&request)) {
        Ok(()) => (NamespacesAnswer::Pinned, ExitCode::SUCCESS),
        Err(failure) => (
            NamespacesAnswer::Failed(failure.to_string()),
            ExitCode::FAILURE,
        ),
    };
    match serde_json::to_writer(std::io::stdout(), &answer) {
        Ok(()) => code,
        Err(_) => ExitCode::FAILURE,
    }
}

fn read_request() -> Result<NamespacesRequest, Failure> {
    let mut text = Vec::new();
    std::io::stdin()
        .read_to_end(&mut text)
        .during("reading the request")?;
    serde_json::from_slice(&text).during("parsing the request")
}

fn make(request: &NamespacesRequest) -> Result<(), Failure> {
    let flags = UnshareFlags::NEWIPC | UnshareFlags::NEWUTS;
    syscalls::unshare(flags).during("making IPC and hostname namespaces")?;
    pin(Path::new("/proc/self/ns/ipc"), &request.pins.ipc)?;
    pin(Path::new("/proc/self/ns/uts"), &request.pins.hostname)?;
    with_namespaces(request, libc::CLONE_NEWUSER, |pid| {
        map_and_pin(request, pid)
    })?;
    with_namespaces(request, libc::CLONE_NEWUSER | libc::CLONE_NEWNET, |pid| {
        let namespace = format!("/proc/{}/ns/net", pid.as_raw_nonzero());
        let namespace = Path::new(&namespace);
        crate::launch::join(namespace, LinkNameSpaceType::Network)?;
        set_network_defaults(request.uid_range);
        pin(namespace, &request.pins.network)
    })
}

/// Lets a container bind port 80 and send pings without capabilities over its network. On kernels without a setting
/// only that convenience is missing.
fn set_network_defaults(uid_range: UidRange) {
    let last = uid_range.base + uid_range.count - 1;
    let settings = [
        (
            "/proc/sys/net/ipv4/ip_unprivileged_port_start",
            "0".to_owned(),
        ),
        (
            "/proc/sys/net/ipv4/ping_group_range",
            format!("{} {last}", uid_range.base),
        ),
    ];
    for (path, value) in settings {
        let _ = fs::write(path, value);
    }
}

fn pin(namespace: &Path, onto: &Path) -> Result<(), Failure> {
    File::create(onto).during(format_args!("making {}", onto.display()))?;
    rustix::mount::mount_bind(namespace, onto).during(format_args!(
        "pinning {} to {}",
        namespace.display(),
        onto.display()
    ))
}

/// Runs `work` with a process in new namespaces. The namespaces end with the process unless `work` pins them.
fn with_namespaces(
    request: &NamespacesRequest,
    flags: libc::c_int,
    work: impl FnOnce(Pid) -> Result<(), Failure>,
) -> Result<(), Failure> {
    let (wait, release) =
        rustix::pipe::pipe_with(rustix::pipe::PipeFlags::CLOEXEC).during("making a pipe")?;
    let flags = u64::try_from(flags).expect("positive flags");
    let uid_range = request.uid_range;
    let cloned = if uid_range.is_single() {
        syscalls::clone_child(flags)
    } else {
        let cloned = syscalls::clone_child_for(uid_range.base, flags);
        // The kernel clears the parent-death signal when the user changes.
        crate::die_with_node().during("following the node")?;
        cloned
    };
    match cloned.during("making a user namespace")? {
        Side::Child => {
            drop(release);
            if uid_range.is_single() {
                limit_single_user();
            }
            wait_for_end(wait);
            std::process::exit(0)
        }
        Side::Parent(pid) => {
            let done = work(pid);
            drop(release);
            let _ = waitpid(Some(pid), WaitOptions::empty());
            done
        }
    }
}

/// If the node runs without root, all pods count against the user that runs it. Each pod gets a quarter of that user's limit.
fn limit_single_user() {
    let setting = "/proc/sys/user/max_inotify_instances";
    let all = fs::read_to_string("/proc/sys/fs/inotify/max_user_instances").ok();
    if let Some(all) = all.and_then(|all| all.trim().parse::<u32>().ok()) {
        let _ = fs::write(setting, (all / 4).max(1).to_string());
    }
}

fn wait_for_end(pipe: OwnedFd) {
    let mut nothing = [0; 1];
    let _ = File::from(pipe).read(&mut nothing);
}

fn map_and_pin(request: &NamespacesRequest, pid: Pid) -> Result<(), Failure> {
    let pid = pid.as_raw_nonzero();
    let map = format!("0 {} {}\n", request.uid_range.base, request.uid_range.count);
    for file in ["uid_map", "gid_map"] {
        let path = format!("/proc/{pid}/{file}");
        let mut file = File::options().write(true).open(&path).during(&path)?;
        file.write_all(map.as_bytes())
            .during(format_args!("writing the ID mapping {path}"))?;
    }
    pin(
        Path::new(&format!("/proc/{pid}/ns/user")),
        &request.pins.user,
    )
}

//! Makes a pod's network, IPC, hostname and user namespaces and pins them to files, so that they live as long as the
//! pod rather than as long as a process.
//!
//! The first three belong to the host's user namespace: whatever capability a container is given counts for nothing
//! over its own network, so that it can neither forge addresses nor undo what the node configured.

use std::fs::{self, File};
use std::io::{Read, Write};
use std::os::fd::OwnedFd;
use std::path::Path;
use std::process::ExitCode;

use rustix::process::{Pid, WaitOptions, waitpid};
use rustix::thread::UnshareFlags;
use shim_protocol::{IdentityRange, NamespacesAnswer, NamespacesRequest};

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
    let flags = UnshareFlags::NEWNET | UnshareFlags::NEWIPC | UnshareFlags::NEWUTS;
    syscalls::unshare(flags).during("making network, IPC and hostname namespaces")?;
    set_network_defaults(request.identities);
    pin(Path::new("/proc/self/ns/net"), &request.pins.network)?;
    pin(Path::new("/proc/self/ns/ipc"), &request.pins.ipc)?;
    pin(Path::new("/proc/self/ns/uts"), &request.pins.hostname)?;
    make_user_namespace(request)
}

/// Without capabilities over its network a container still binds port 80 and sends pings. Kernels that lack a setting
/// only lack that convenience.
fn set_network_defaults(identities: IdentityRange) {
    let last = identities.base + identities.count - 1;
    let settings = [
        (
            "/proc/sys/net/ipv4/ip_unprivileged_port_start",
            "0".to_owned(),
        ),
        (
            "/proc/sys/net/ipv4/ping_group_range",
            format!("{} {last}", identities.base),
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

fn make_user_namespace(request: &NamespacesRequest) -> Result<(), Failure> {
    let (wait, release) =
        rustix::pipe::pipe_with(rustix::pipe::PipeFlags::CLOEXEC).during("making a pipe")?;
    let namespace = u64::try_from(libc::CLONE_NEWUSER).expect("a positive flag");
    match syscalls::clone_child(namespace).during("making a user namespace")? {
        Side::Child => {
            drop(release);
            wait_for_end(wait);
            std::process::exit(0)
        }
        Side::Parent(pid) => {
            let pinned = map_and_pin(request, pid);
            drop(release);
            let _ = waitpid(Some(pid), WaitOptions::empty());
            pinned
        }
    }
}

fn wait_for_end(pipe: OwnedFd) {
    let mut nothing = [0; 1];
    let _ = File::from(pipe).read(&mut nothing);
}

fn map_and_pin(request: &NamespacesRequest, pid: Pid) -> Result<(), Failure> {
    let pid = pid.as_raw_nonzero();
    let map = format!(
        "0 {} {}\n",
        request.identities.base, request.identities.count
    );
    for file in ["uid_map", "gid_map"] {
        let path = format!("/proc/{pid}/{file}");
        let mut file = File::options().write(true).open(&path).during(&path)?;
        file.write_all(map.as_bytes())
            .during(format_args!("mapping identities in {path}"))?;
    }
    pin(
        Path::new(&format!("/proc/{pid}/ns/user")),
        &request.pins.user,
    )
}

//! Without root: the process starts itself again as root of namespaces of its own.
//!
//! In these namespaces everything works as it does for root, within the user's permissions. They include a network namespace, so the
//! listening sockets are opened before, and inherited by descriptor.

use std::convert::Infallible;
use std::net::SocketAddr;
use std::os::fd::{AsFd, AsRawFd, OwnedFd, RawFd};
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::Command;

use anyhow::{Context, bail};
use container_runtime::privileges::Privileges;
use rustix::io::FdFlags;
use rustix::process::{PidfdFlags, PidfdGetfdFlags};

/// Names flags and the descriptors of the sockets that were opened for them.
const LISTENERS: &str = "AGENT_SANDBOX_LISTENERS";
/// The descriptor of the socket that knows the owners of connections to those, and the user who started this process.
const OUTSIDE: &str = "AGENT_SANDBOX_OUTSIDE";

/// Starts this process again with the privileges that a node needs, unless it has them. The sockets of `listeners` are opened
/// first. `programs` is where the node's programs are kept.
pub fn enter(programs: &Path, listeners: &[(&str, SocketAddr)]) -> anyhow::Result<()> {
    if Privileges::current() != Privileges::None {
        return Ok(());
    }
    match become_root_of_own(programs, listeners)? {}
}

fn become_root_of_own(
    programs: &Path,
    listeners: &[(&str, SocketAddr)],
) -> anyhow::Result<Infallible> {
    let programs = container_runtime::assets::unpack(programs)
        .with_context(|| format!("cannot write to {}", programs.display()))?;
    let mut opened = Vec::new();
    let mut names = Vec::new();
    for (flag, address) in listeners {
        let socket = std::net::TcpListener::bind(address).with_context(|| {
            format!("cannot listen on {address}; choose another address with {flag}")
        })?;
        socket.set_nonblocking(true)?;
        rustix::io::fcntl_setfd(&socket, FdFlags::empty())?;
        names.push(format!("{flag}={}", socket.as_fd().as_raw_fd()));
        opened.push(socket);
    }
    let socket_owners = router::socket_owners::open()?;
    let mut outside = None;
    if !opened.is_empty() {
        rustix::io::fcntl_setfd(&socket_owners, FdFlags::empty())?;
        let user = rustix::process::geteuid().as_raw();
        outside = Some(format!("{},{user}", socket_owners.as_raw_fd()));
    }
    let program = std::env::current_exe().context("cannot find this program")?;
    let error = Command::new(programs.shim)
        .arg("rootless")
        .arg(program)
        .args(std::env::args_os().skip(1))
        .env(LISTENERS, names.join(","))
        .envs(outside.map(|outside| (OUTSIDE, outside)))
        .exec();
    bail!("cannot start again without root: {error}");
}

/// The socket that was opened for a flag before this process had a network of its own.
pub fn listener(flag: &str) -> anyhow::Result<Option<std::net::TcpListener>> {
    let Ok(names) = std::env::var(LISTENERS) else {
        return Ok(None);
    };
    let number = names
        .split(',')
        .filter_map(|entry| entry.split_once('='))
        .find(|(name, _)| *name == flag)
        .and_then(|(_, number)| number.parse().ok());
    let Some(number) = number else {
        return Ok(None);
    };
    let socket = inherited(number).with_context(|| format!("the socket of {flag} is gone"))?;
    Ok(Some(socket.into()))
}

/// Facts about the host's network namespace, in which the listeners were opened.
pub struct Outside {
    /// Opened there by [`router::socket_owners::open`].
    pub socket_owners: OwnedFd,
    /// The host's UID of the user who started this process.
    pub user: u32,
}

/// Absent if the listeners were opened in the present network namespace.
pub fn outside() -> anyhow::Result<Option<Outside>> {
    let Ok(outside) = std::env::var(OUTSIDE) else {
        return Ok(None);
    };
    let (number, user) = outside
        .split_once(',')
        .with_context(|| format!("{OUTSIDE} is not of this program"))?;
    Ok(Some(Outside {
        socket_owners: inherited(number.parse()?).context("the socket for owners is gone")?,
        user: user.parse()?,
    }))
}

/// An inherited descriptor by its number, with `pidfd_getfd` on this process.
fn inherited(number: RawFd) -> anyhow::Result<OwnedFd> {
    let own = rustix::process::pidfd_open(rustix::process::getpid(), PidfdFlags::empty())?;
    let descriptor = rustix::process::pidfd_getfd(&own, number, PidfdGetfdFlags::empty())?;
    rustix::io::fcntl_setfd(&descriptor, FdFlags::CLOEXEC)?;
    Ok(descriptor)
}

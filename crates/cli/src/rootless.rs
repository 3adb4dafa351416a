//! Without root: the process starts itself again as root of namespaces of its own.
//!
//! In those, everything works as it does for root, within what the user may do. They include a network of their own, so
//! sockets that others are to reach are opened before, and found again by number afterwards.

use std::convert::Infallible;
use std::net::SocketAddr;
use std::os::fd::{AsFd, AsRawFd};
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::Command;

use anyhow::{Context, bail};
use node::privileges::Privileges;
use rustix::io::FdFlags;
use rustix::process::{PidfdFlags, PidfdGetfdFlags};

/// Names flags and the descriptors of the sockets that were opened for them.
const LISTENERS: &str = "AGENT_SANDBOX_LISTENERS";

/// Starts this process again with the powers a node needs, unless it has them. The sockets of `listeners` are opened
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
    let programs = node::assets::unpack(programs)
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
    let program = std::env::current_exe().context("cannot find this program")?;
    let error = Command::new(programs.shim)
        .arg("rootless")
        .arg(program)
        .args(std::env::args_os().skip(1))
        .env(LISTENERS, names.join(","))
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
    // The kernel's way to another process's descriptors leads to one's own, too.
    let own = rustix::process::pidfd_open(rustix::process::getpid(), PidfdFlags::empty())?;
    let socket = rustix::process::pidfd_getfd(&own, number, PidfdGetfdFlags::empty())
        .with_context(|| format!("the socket of {flag} is gone"))?;
    rustix::io::fcntl_setfd(&socket, FdFlags::CLOEXEC)?;
    Ok(Some(socket.into()))
}

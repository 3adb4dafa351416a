//! The shim: the one privileged, single-threaded program that makes containers.
//!
//! It has four lives, chosen by its first argument:
//!
//! ```text
//! node ──spawns──► namespaces   make and pin a pod's namespaces, then exit
//!      ──spawns──► launch       build one container's root, clone its first process, then exit
//!                    └─clone──► agent   PID 1 of the container: runs its command, reaps, serves exec
//! cli ──becomes──► rootless     make an unprivileged user root of namespaces of its own, and become the cli again
//! ```
//!
//! It knows nothing of pods, images or Kubernetes: requests arrive ready-made on standard input.

#![cfg_attr(not(test), warn(clippy::arithmetic_side_effects))]

mod agent;
mod agent_guard;
mod confine;
mod failure;
mod launch;
mod mounts;
mod namespaces;
mod rootless;
mod sub_path;
mod syscalls;
mod view;

use std::process::ExitCode;

/// The name under which a container sees its PID 1.
pub const AGENT_NAME: &str = "sandbox-init";

/// Ends with the node that asked: the one that takes its place clears up what is unfinished and makes it anew, under the same names.
/// Only for what the thread that started it waits for, since the kernel tells of the end of that thread. A launcher may wait much
/// longer than it, and sees the end of its input instead.
fn for_the_node(work: impl FnOnce() -> ExitCode) -> ExitCode {
    if let Err(error) = end_with_the_node() {
        eprintln!("cannot be told that the node has died: {error}");
        return ExitCode::FAILURE;
    }
    work()
}

fn end_with_the_node() -> rustix::io::Result<()> {
    rustix::process::set_parent_process_death_signal(Some(rustix::process::Signal::KILL))
}

fn main() -> ExitCode {
    let mut arguments = std::env::args();
    let name = arguments.next().unwrap_or_default();
    if name == AGENT_NAME {
        return agent::run();
    }
    match arguments.next().as_deref() {
        Some("rootless") => rootless::run(std::env::args_os().skip(2)),
        Some("namespaces") => for_the_node(namespaces::run),
        Some("launch") => launch::run(),
        _ => {
            eprintln!(
                "usage: agent-sandbox-shim namespaces|launch < request.json, or rootless PROGRAM [ARGUMENT]…"
            );
            ExitCode::from(2)
        }
    }
}

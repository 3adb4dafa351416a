//! The shim: the only privileged, single-threaded program that creates containers.
//!
//! It has five modes, selected by its first argument:
//!
//! ```text
//! node ──spawns──► namespaces   create and pin a pod's namespaces, then exit
//!      ──spawns──► launch       build one container's root, clone its first process, then exit
//!                    └─clone──► agent   PID 1 of the container: runs its command, reaps, serves exec
//!      ──spawns──► page-out     page the memory of frozen processes out to swap, then exit
//! cli ──becomes──► rootless     make an unprivileged user root of its own namespaces, and execute the cli again
//! ```
//!
//! It contains no knowledge of pods, images or Kubernetes: requests arrive complete on standard input.

#![cfg_attr(not(test), warn(clippy::arithmetic_side_effects))]

mod agent;
mod agent_guard;
mod confine;
mod failure;
mod launch;
mod mounts;
mod namespaces;
mod page_out;
mod rootless;
mod sub_path;
mod syscalls;
mod view;

use std::process::ExitCode;

/// The name under which a container sees its PID 1.
pub const AGENT_NAME: &str = "sandbox-init";

/// Ends when the node process that started it ends (`PR_SET_PDEATHSIG`): the next node process removes unfinished objects and
/// creates them again under the same names. Only for work that the starting thread waits for, since the kernel sends the signal at
/// the end of that thread. A launcher may wait much longer, and detects the end of its input instead.
fn run_for_node(work: impl FnOnce() -> ExitCode) -> ExitCode {
    if let Err(error) = die_with_node() {
        eprintln!("cannot set the signal for the node's death: {error}");
        return ExitCode::FAILURE;
    }
    work()
}

fn die_with_node() -> rustix::io::Result<()> {
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
        Some("namespaces") => run_for_node(namespaces::run),
        Some("launch") => launch::run(),
        Some("page-out") => run_for_node(page_out::run),
        _ => {
            eprintln!(
                "usage: agent-sandbox-shim namespaces|launch|page-out < request.json, or rootless PROGRAM [ARGUMENT]…"
            );
            ExitCode::from(2)
        }
    }
}

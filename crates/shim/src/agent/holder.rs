//! A PID namespace shared by several containers: the process that holds it, and how a container in it ends.

use std::os::fd::BorrowedFd;
use std::process::ExitCode;

use rustix::event::{PollFd, PollFlags, poll};
use rustix::process::{Pid, WaitOptions, wait};

use crate::syscalls;

/// Runs as PID 1 for the life of the pod, and reaps orphans. The namespace and all its processes end with this
/// process.
pub fn hold(signals: BorrowedFd<'_>) -> ExitCode {
    loop {
        let mut set = [PollFd::from_borrowed_fd(signals, PollFlags::IN)];
        if let Err(error) = poll(&mut set, None) {
            super::back_off(error);
        }
        syscalls::pending_signals(signals);
        while let Ok(Some(_)) = wait(WaitOptions::NOHANG) {}
    }
}

/// Kills all processes that a container has left, as the end of its own PID namespace would. A process that is started
/// meanwhile becomes a child of this process when its parent ends, so the next round finds it.
pub fn end_descendants() {
    const MAX_ROUNDS: u32 = 1000;
    for _ in 0..MAX_ROUNDS {
        for child in children() {
            let _ = syscalls::send_signal(child, libc::SIGKILL);
        }
        // Waiting fails when no child is left.
        if wait(WaitOptions::empty()).is_err() {
            return;
        }
        while let Ok(Some(_)) = wait(WaitOptions::NOHANG) {}
    }
}

fn children() -> Vec<i32> {
    let own = rustix::process::getpid();
    let entries = std::fs::read_dir("/proc").into_iter().flatten().flatten();
    entries
        .filter_map(|entry| entry.file_name().to_str()?.parse().ok())
        .filter(|pid| parent_of(*pid) == Some(own))
        .collect()
}

fn parent_of(pid: i32) -> Option<Pid> {
    let text = std::fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    // The state and the parent PID follow the name, which is in parentheses and may contain anything.
    let (_, rest) = text.rsplit_once(')')?;
    rest.split_whitespace()
        .nth(1)?
        .parse()
        .ok()
        .and_then(Pid::from_raw)
}

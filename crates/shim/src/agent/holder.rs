//! A PID namespace that several containers share: the process that holds it, and how a container in it ends.

use std::os::fd::BorrowedFd;
use std::process::ExitCode;

use rustix::event::{PollFd, PollFlags, poll};
use rustix::process::{Pid, WaitOptions, wait};

use crate::syscalls;

/// Is PID 1 for as long as the pod lives: reaps what nobody else does. The namespace, and all in it, ends with this
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

/// Kills what a container has left, which a namespace of its own would have taken with it. Whatever is started meanwhile
/// becomes a child of this process when its parent ends, so it is found in the next round.
pub fn end_descendants() {
    const MOST_ROUNDS: u32 = 1000;
    for _ in 0..MOST_ROUNDS {
        for child in children() {
            let _ = syscalls::send_signal(child, libc::SIGKILL);
        }
        // No child is left when waiting for one fails.
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
    // After the name, which is in parentheses and may hold anything, come the state and the parent.
    let (_, rest) = text.rsplit_once(')')?;
    rest.split_whitespace()
        .nth(1)?
        .parse()
        .ok()
        .and_then(Pid::from_raw)
}

//! Starts child processes and waits for every one of them. As process 1, or as the reaper of orphans, it also
//! collects processes it never started. It knows nothing of what the children do.
//!
//! One mutex is held while a child is started and entered, and while the dead are collected, so a child that ends
//! before it is entered is never taken for an orphan.

use std::collections::HashMap;
use std::io;
use std::process::{Child, Command};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use rustix::io::Errno;
use rustix::process::{Pid, Signal, WaitOptions, WaitStatus};
use tokio::signal::unix::SignalKind;
use tokio::sync::oneshot;
use tokio_util::sync::CancellationToken;

/// Whom to collect.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reaping {
    /// Only the children started here: for a process that has others of its own.
    OwnChildren,
    /// Every child, orphans that were handed to this process included.
    Everyone,
}

/// The children that run.
#[derive(Debug)]
pub struct Reaper {
    reaping: Reaping,
    running: Mutex<HashMap<i32, oneshot::Sender<WaitStatus>>>,
}

/// A child's process group, which has the child's own number.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ProcessGroup(Pid);

impl ProcessGroup {
    pub fn number(self) -> u32 {
        self.0.as_raw_nonzero().get().unsigned_abs()
    }

    /// Signals every process of the group; one that is gone already is no error. Only for a child that has not been
    /// waited for, whose number therefore cannot have passed to another process.
    pub fn signal(self, signal: Signal) -> io::Result<()> {
        let signalled = match rustix::process::kill_process_group(self.0, signal) {
            // A child on a terminal founds its group a moment after its start.
            Err(Errno::SRCH) => rustix::process::kill_process(self.0, signal),
            signalled => signalled,
        };
        match signalled {
            Ok(()) | Err(Errno::SRCH) => Ok(()),
            Err(errno) => Err(errno.into()),
        }
    }
}

impl Reaper {
    /// Starts to collect; ends when `stop` is cancelled.
    pub fn start(reaping: Reaping, stop: CancellationToken) -> io::Result<Arc<Self>> {
        if reaping == Reaping::Everyone {
            // Best effort: process 1 needs no permission, and elsewhere orphans merely go to someone else.
            let _ = rustix::process::set_child_subreaper(Some(rustix::process::getpid()));
        }
        let reaper = Arc::new(Self {
            reaping,
            running: Mutex::default(),
        });
        let mut ended = tokio::signal::unix::signal(SignalKind::child())?;
        let collecting = Arc::clone(&reaper);
        tokio::spawn(async move {
            loop {
                tokio::select! {
                    () = stop.cancelled() => break,
                    signalled = ended.recv() => if signalled.is_none() { break },
                }
                collecting.collect();
            }
        });
        Ok(reaper)
    }

    /// Starts `command`, which must make itself the leader of its process group, and promises its status.
    pub fn spawn(
        &self,
        command: &mut Command,
    ) -> io::Result<(Child, ProcessGroup, oneshot::Receiver<WaitStatus>)> {
        let mut running = self.lock();
        let child = command.spawn()?;
        let number = i32::try_from(child.id()).map_err(io::Error::other)?;
        let pid = Pid::from_raw(number)
            .ok_or_else(|| io::Error::other("the child has no process number"))?;
        let (sender, receiver) = oneshot::channel();
        running.insert(number, sender);
        Ok((child, ProcessGroup(pid), receiver))
    }

    /// The groups of all children that run.
    pub fn groups(&self) -> Vec<ProcessGroup> {
        self.lock()
            .keys()
            .filter_map(|&number| Pid::from_raw(number))
            .map(ProcessGroup)
            .collect()
    }

    fn collect(&self) {
        let mut running = self.lock();
        match self.reaping {
            Reaping::Everyone => {
                while let Ok(Some((pid, status))) = rustix::process::wait(WaitOptions::NOHANG) {
                    if let Some(waiting) = running.remove(&pid.as_raw_nonzero().get()) {
                        let _ = waiting.send(status);
                    }
                }
            }
            Reaping::OwnChildren => {
                let ended: Vec<_> = running
                    .keys()
                    .filter_map(|&number| {
                        rustix::process::waitpid(Pid::from_raw(number), WaitOptions::NOHANG).ok()?
                    })
                    .collect();
                for (pid, status) in ended {
                    if let Some(waiting) = running.remove(&pid.as_raw_nonzero().get()) {
                        let _ = waiting.send(status);
                    }
                }
            }
        }
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<i32, oneshot::Sender<WaitStatus>>> {
        self.running.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

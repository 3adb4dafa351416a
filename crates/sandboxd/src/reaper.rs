//! Starts child processes and reaps every one of them. As PID 1, or as a subreaper, it also reaps processes that it did
//! not start. It does not know what the children do.
//!
//! One mutex is held while a child is started and registered, and while exited processes are reaped, so a child that exits
//! before it is registered is never taken for an orphan.

use std::collections::HashMap;
use std::io;
use std::process::{Child, Command};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use rustix::io::Errno;
use rustix::process::{Pid, Signal, WaitOptions, WaitStatus};
use tokio::signal::unix::SignalKind;
use tokio::sync::oneshot;
use tokio_util::sync::CancellationToken;

/// Which processes to reap.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reaping {
    /// Only the children started here: for a process that has other children.
    OwnChildren,
    /// Every child, including orphans that were reparented to this process.
    Everyone,
}

/// The running children.
#[derive(Debug)]
pub struct Reaper {
    reaping: Reaping,
    running: Mutex<HashMap<i32, oneshot::Sender<WaitStatus>>>,
}

/// A child's process group, whose ID is the child's PID.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ProcessGroup(Pid);

impl ProcessGroup {
    pub fn number(self) -> u32 {
        self.0.as_raw_nonzero().get().unsigned_abs()
    }

    /// Sends a signal to every process of the group; a group that has ended is not an error. Only for a child that has not been
    /// reaped, whose PID therefore cannot have been reused.
    pub fn signal(self, signal: Signal) -> io::Result<()> {
        let signalled = match rustix::process::kill_process_group(self.0, signal) {
            // A child on a terminal creates its process group shortly after its start.
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
    /// Starts reaping; ends when `stop` is cancelled.
    pub fn start(reaping: Reaping, stop: CancellationToken) -> io::Result<Arc<Self>> {
        if reaping == Reaping::Everyone {
            // Best effort: PID 1 needs no permission, and otherwise orphans go to another reaper.
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

    /// Starts `command`, which must make itself the leader of its process group, and returns its future exit status.
    pub fn spawn(
        &self,
        command: &mut Command,
    ) -> io::Result<(Child, ProcessGroup, oneshot::Receiver<WaitStatus>)> {
        let mut running = self.lock();
        let child = command.spawn()?;
        let number = i32::try_from(child.id()).map_err(io::Error::other)?;
        let pid = Pid::from_raw(number).ok_or_else(|| io::Error::other("the child has no PID"))?;
        let (sender, receiver) = oneshot::channel();
        running.insert(number, sender);
        Ok((child, ProcessGroup(pid), receiver))
    }

    /// The process groups of all running children.
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

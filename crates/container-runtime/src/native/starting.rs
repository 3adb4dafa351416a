//! Starts a container: the blocking part, from its directories to the record of its process.

use std::fs;
use std::io;
use std::os::unix::fs::{PermissionsExt, chown};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use jiff::Timestamp;
use shim_protocol::{Launch, LaunchAnswer, NamespacePins, Preparation};
use tokio_util::sync::CancellationToken;

use super::launching::start_ticks;
use super::records::{ContainerRecord, Group, write_whole};
use super::{failure, image_user};
use crate::cgroups::Cgroups;
use crate::handlers;
use crate::launcher::Launcher;
use crate::slots::OUT_OF_MEMORY_SCORE;
use crate::{ContainerSpec, RuntimeError, StartError, Termination};

/// The PID in the record of a container whose command was not executed. No process has it.
const NO_PROCESS: i32 = 0;

/// The blocking start of a container.
pub(super) struct Start {
    pub(super) groups: Cgroups,
    pub(super) shim: PathBuf,
    pub(super) images: Arc<images::Images>,
    /// The image to mark as used, if it comes from the store.
    pub(super) stored: Option<Arc<images::Image>>,
    /// The launcher that waits in the slot, if one does.
    pub(super) waiting: Option<Launcher>,
    pub(super) slot: u32,
    pub(super) pins: NamespacePins,
    pub(super) deadline: Duration,
    pub(super) given_up: CancellationToken,
    pub(super) image_id: String,
    pub(super) launch: Launch,
    pub(super) spec: ContainerSpec,
}

impl Start {
    pub(super) fn carry_out(mut self) -> Result<ContainerRecord, StartError> {
        let (id, user) = (self.spec.id.clone(), image_user(&self.spec.id));
        if let Some(image) = &self.stored {
            self.images.hold(&user, image).map_err(RuntimeError::from)?;
        }
        forget_runs_before(&self.launch.files.log, id.attempt);
        prepare_directories(&self.launch).map_err(failure("a container's directories"))?;
        let waiting = self.waiting.take();
        let waiting = waiting.and_then(|mut waiting| waiting.is_waiting().then_some(waiting));
        let group = match &waiting {
            Some(_) => Group::of_slot(self.slot),
            None => Group::of(&id),
        };
        let launcher = self.launcher(&group, waiting)?;
        let began = Instant::now();
        let answer = launcher.launch(&self.launch, || {
            if self.given_up.is_cancelled() {
                return Some(StartError::GivenUp);
            }
            (began.elapsed() >= self.deadline).then(|| RuntimeError::TooSlow(self.deadline).into())
        });
        let clean_up = || {
            // The container's PID 1 is a child of this process, and nothing else reaps it.
            let left = self.groups.processes(&group.parent, &group.name);
            self.groups.kill(&group.parent, &group.name);
            let _ = self.groups.remove_container(&group.parent, &group.name);
            left.into_iter().for_each(reap);
            self.images.release(&user);
        };
        let answer = answer.inspect_err(|_| clean_up())?;
        let record = |pid| ContainerRecord {
            pid,
            start_ticks: start_ticks(pid).unwrap_or(0),
            started_at: Timestamp::now(),
            image_id: self.image_id.clone(),
            crashes: self.spec.crashes,
            group: group.clone(),
            message_from_log: self.spec.message_from_log,
        };
        settle(answer, &self.launch, record, clean_up)
    }

    /// The waiting launcher, or a new one, in the container's cgroup with its limits.
    fn launcher(&self, group: &Group, waiting: Option<Launcher>) -> Result<Launcher, RuntimeError> {
        let cgroups = self
            .groups
            .create(&group.parent, &group.name, &self.spec.limits)?;
        if let Some(launcher) = waiting {
            return Ok(launcher);
        }
        let preparation = Preparation {
            pins: self.pins.clone(),
            cgroups,
            out_of_memory_score: OUT_OF_MEMORY_SCORE,
        };
        Launcher::start(&self.shim, &preparation)
    }
}

fn prepare_directories(launch: &Launch) -> io::Result<()> {
    let base = launch.uid_range.base;
    for path in [&launch.root.upper, &launch.root.work] {
        // Left by an interrupted start: an overlay refuses a used work directory.
        let _ = directory_tree::remove(path);
        fs::create_dir_all(path)?;
    }
    chown(&launch.root.upper, Some(base), Some(base))?;
    fs::set_permissions(&launch.root.upper, fs::Permissions::from_mode(0o755))?;
    let message = launch.files.directory.join("termination-log");
    fs::write(&message, "")?;
    chown(&message, Some(base), Some(base))?;
    fs::set_permissions(&message, fs::Permissions::from_mode(0o666))
}

/// Writes the record of a started container, or of one whose command failed to execute, and removes the files of the latter.
fn settle(
    answer: LaunchAnswer,
    launch: &Launch,
    record: impl FnOnce(i32) -> ContainerRecord,
    clean_up: impl FnOnce(),
) -> Result<ContainerRecord, StartError> {
    let directory = &launch.files.directory;
    match answer {
        LaunchAnswer::Started { pid } => {
            let record = record(pid);
            write_json(&directory.join("state.json"), &record)?;
            Ok(record)
        }
        LaunchAnswer::CommandFailed { message, code, pid } => {
            reap_first(pid);
            clean_up();
            // Another runtime writes the cause to the container's log.
            let message = if launch.outside.is_some() {
                let log = fs::read_to_string(&launch.files.log).unwrap_or_default();
                handlers::last_words(&log)
                    .unwrap_or_else(|| "the runtime does not say why".to_owned())
            } else {
                message
            };
            for layer in [&launch.root.upper, &launch.root.work] {
                let _ = directory_tree::remove(layer);
            }
            // It counts as a run, also after a restart of the node.
            let ended = Termination::not_started(message.clone(), Timestamp::now());
            write_json(&directory.join("termination.json"), &ended)?;
            write_json(&directory.join("state.json"), &record(NO_PROCESS))?;
            Err(StartError::Command { message, code })
        }
        LaunchAnswer::Failed { message, pid } => {
            pid.into_iter().for_each(reap_first);
            clean_up();
            Err(RuntimeError::Launcher(message).into())
        }
    }
}

fn write_json(path: &Path, record: &impl serde::Serialize) -> Result<(), RuntimeError> {
    let text = serde_json::to_vec(record)
        .map_err(|error| failure("a container's record")(error.into()))?;
    write_whole(path, &text).map_err(failure("a container's record"))
}

/// Reaps the PID 1 of a container that is ending.
fn reap_first(pid: i32) {
    rustix::process::Pid::from_raw(pid)
        .into_iter()
        .for_each(reap);
}

/// Reaps a process that is ending, if it is a child of this process.
fn reap(pid: rustix::process::Pid) {
    let _ = rustix::process::waitpid(Some(pid), rustix::process::WaitOptions::empty());
}

/// Removes the logs and directories of the runs that Kubernetes cannot show any more: when a run starts, only the previous one is
/// kept.
fn forget_runs_before(log: &Path, attempt: u32) {
    let Some(directory) = log.parent() else {
        return;
    };
    for entry in fs::read_dir(directory).into_iter().flatten().flatten() {
        let name = entry.file_name();
        let number = name.to_str().and_then(|name| name.split('.').next());
        let run: Option<u32> = number.and_then(|number| number.parse().ok());
        if run.is_some_and(|run| run + 1 < attempt) {
            let _ = directory_tree::remove(&entry.path());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn when_a_run_starts_only_the_one_before_it_is_kept() {
        let directory = tempfile::tempdir().unwrap();
        let path = |name: &str| directory.path().join(name);
        for run in 0..4 {
            fs::create_dir_all(path(&run.to_string()).join("upper")).unwrap();
            for log in ["log", "log.1"] {
                fs::write(path(&format!("{run}.{log}")), "").unwrap();
            }
        }
        fs::write(path("note"), "").unwrap();
        forget_runs_before(&path("4.log"), 4);
        let entries = fs::read_dir(directory.path()).unwrap();
        let mut left: Vec<_> = entries
            .map(|entry| entry.unwrap().file_name().into_string().unwrap())
            .collect();
        left.sort();
        assert_eq!(left, ["3", "3.log", "3.log.1", "note"]);
    }
}

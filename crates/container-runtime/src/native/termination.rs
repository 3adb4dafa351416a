//! Determines how a container ended, from its files and its cgroup, and removes them.

use std::fs;
use std::io::Read;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use jiff::Timestamp;
use shim_protocol::ContainerExit;

use super::records::{ContainerRecord, Group};
use super::{NativeRuntime, image_user, rotation};
use crate::cgroups::Cgroups;
use crate::{ContainerId, Termination};

/// The limit of the termination message. The container may write more, up to the size of the disk.
const TERMINATION_MESSAGE_BYTES: u64 = 4096;

impl NativeRuntime {
    /// Whether one run of a container has ended or was never started.
    pub fn has_ended(&self, id: &ContainerId) -> bool {
        self.running(id).is_none()
    }

    /// Determines how a container ended and records it, because its cgroup, which has the count of OOM kills, is removed after this.
    pub(super) async fn conclude(
        &self,
        id: &ContainerId,
        record: Option<&ContainerRecord>,
    ) -> Termination {
        let ending = self.ending(id, record);
        match tokio::task::spawn_blocking(move || ending.conclude()).await {
            Ok(termination) => termination,
            Err(failure) => std::panic::resume_unwind(failure.into_panic()),
        }
    }

    pub(super) fn ending(&self, id: &ContainerId, record: Option<&ContainerRecord>) -> Ending {
        Ending {
            directory: self.container_directory(id),
            log: self.log_path(id),
            log_files: self.config.log_maximum_files,
            group: record.map_or_else(|| Group::of(id), |record| record.group.clone()),
            message_from_log: record.is_some_and(|record| record.message_from_log),
            started_at: record.map(|record| record.started_at),
            user: image_user(id),
            cgroups: self.cgroups.clone(),
            images: self.images.clone(),
        }
    }
}

/// The files and the cgroup of a run that has ended.
#[derive(Debug)]
pub(super) struct Ending {
    directory: PathBuf,
    log: PathBuf,
    log_files: u32,
    group: Group,
    message_from_log: bool,
    started_at: Option<Timestamp>,
    user: String,
    cgroups: Cgroups,
    images: Arc<images::Images>,
}

impl Ending {
    /// Blocks: it removes the container's files and waits until its cgroup is empty.
    pub(super) fn conclude(self) -> Termination {
        let Self {
            directory, group, ..
        } = &self;
        let recorded = directory.join("termination.json");
        if let Some(termination) = fs::read(&recorded)
            .ok()
            .and_then(|text| serde_json::from_slice(&text).ok())
        {
            return termination;
        }
        rotation::finish(&self.log, self.log_files);
        let out_of_memory = self.cgroups.was_out_of_memory(&group.parent, &group.name);
        let exit: Option<ContainerExit> = fs::read(directory.join("exit.json"))
            .ok()
            .and_then(|text| serde_json::from_slice(&text).ok());
        let failed = exit.as_ref().is_none_or(|exit| exit.code != 0);
        let from_log = failed && self.message_from_log;
        let message = read_message(directory)
            .or_else(|| from_log.then(|| crate::logs::last_words(&self.log))?);
        let termination = termination_of(
            exit.as_ref(),
            out_of_memory,
            message,
            self.started_at,
            Timestamp::now(),
        );
        let _ = serde_json::to_vec(&termination).map(|text| fs::write(&recorded, text));
        let _ = self.cgroups.remove_container(&group.parent, &group.name);
        // The next run starts from the image again, so the writable layer is removed.
        for name in ["upper", "work"] {
            let _ = directory_tree::remove(&directory.join(name));
        }
        let _ = fs::remove_file(directory.join("agent.sock"));
        self.images.release(&self.user);
        termination
    }
}

fn read_message(directory: &Path) -> Option<String> {
    let file = fs::File::open(directory.join("termination-log")).ok()?;
    let mut bytes = Vec::new();
    file.take(TERMINATION_MESSAGE_BYTES)
        .read_to_end(&mut bytes)
        .ok()?;
    let text = String::from_utf8_lossy(&bytes).into_owned();
    (!text.is_empty()).then_some(text)
}

/// The termination as a kubelet reports it.
fn termination_of(
    exit: Option<&ContainerExit>,
    out_of_memory: bool,
    message: Option<String>,
    started_at: Option<Timestamp>,
    now: Timestamp,
) -> Termination {
    const KILLED: i32 = 137;
    let exit_code = exit.map_or(KILLED, |exit| exit.code);
    let finished_at = exit
        .and_then(|exit| Timestamp::from_nanosecond(i128::from(exit.finished_at_ns)).ok())
        .unwrap_or(now);
    let reason = match (exit_code, out_of_memory) {
        (0, _) => "Completed",
        (_, true) => "OOMKilled",
        _ => "Error",
    };
    Termination {
        exit_code,
        signal: None,
        reason: reason.to_owned(),
        message,
        started_at,
        finished_at,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_huge_termination_message_is_truncated() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("termination-log");
        assert_eq!(read_message(directory.path()), None);
        fs::write(&path, "").unwrap();
        assert_eq!(read_message(directory.path()), None);
        fs::write(&path, "last words").unwrap();
        assert_eq!(
            read_message(directory.path()).as_deref(),
            Some("last words")
        );
        // Larger than any memory, and a hole on the disk.
        let file = fs::File::options().write(true).open(&path).unwrap();
        file.set_len(1 << 42).unwrap();
        assert_eq!(read_message(directory.path()).unwrap().len(), 4096);
    }
}

//! The records of pods and containers on disk, from which a restarted node recovers them.

use std::fs;
use std::io;
use std::path::Path;

use jiff::Timestamp;
use serde::{Deserialize, Serialize};

use super::failure;
use crate::slots;
use crate::{ContainerId, PodSandboxSpec, RuntimeError};

/// The record of a pod sandbox.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(super) struct SandboxRecord {
    /// Absent once the pod has ended and its namespaces are freed.
    pub(super) slot: Option<u32>,
    pub(super) spec: PodSandboxSpec,
    /// Containers that started before this time ran in a sandbox that did not survive.
    #[serde(default)]
    pub(super) made_at: Timestamp,
}

/// The record of a started container.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(super) struct ContainerRecord {
    pub(super) pid: i32,
    /// The start time of the process, in the kernel's ticks: distinguishes it from another process with the same PID.
    pub(super) start_ticks: u64,
    pub(super) started_at: Timestamp,
    pub(super) image_id: String,
    pub(super) crashes: u32,
    pub(super) group: Group,
    pub(super) message_from_log: bool,
}

/// The name of a container's cgroup and of its parent.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Group {
    pub(super) parent: String,
    pub(super) name: String,
}

impl Group {
    /// The cgroup of a container whose launcher was not waiting in a slot.
    pub(super) fn of(id: &ContainerId) -> Self {
        Self {
            parent: id.pod.clone(),
            name: format!("{}.{}", id.container, id.attempt),
        }
    }

    /// The cgroup in which a launcher waits for a pod's first container.
    pub(super) fn of_slot(slot: u32) -> Self {
        Self {
            parent: slots::slot_group(slot),
            name: slots::WAITING_GROUP.to_owned(),
        }
    }
}

pub(super) fn write_record(directory: &Path, record: &SandboxRecord) -> Result<(), RuntimeError> {
    let text =
        serde_json::to_vec(record).map_err(|error| failure("a pod's record")(error.into()))?;
    write_whole(&directory.join("sandbox.json"), &text).map_err(failure("a pod's record"))
}

/// The result of reading a record.
pub(super) enum Recorded<T> {
    Known(T),
    Absent,
    /// The file is empty or malformed: a crash of the machine may leave it so.
    Unreadable,
}

/// Reads a record. An I/O error is returned and never counts as an absent record.
pub(super) fn read_record<T: serde::de::DeserializeOwned>(path: &Path) -> io::Result<Recorded<T>> {
    match fs::read(path) {
        Ok(text) => Ok(serde_json::from_slice(&text).map_or(Recorded::Unreadable, Recorded::Known)),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(Recorded::Absent),
        Err(error) => Err(error),
    }
}

/// Renames an unreadable record, so that an administrator can inspect it, and logs an error.
pub(super) fn set_aside(path: &Path) {
    let mut aside = path.as_os_str().to_owned();
    aside.push(".unreadable");
    let moved = fs::rename(path, &aside);
    tracing::error!(
        record = %path.display(),
        kept = moved.is_ok(),
        "a record cannot be read, as after a crash of the machine; the pod starts over with its volumes"
    );
}

/// Writes a file atomically: a crash of this process never leaves a partial file.
///
/// A crash of the machine may leave an empty file, or its predecessor, because nothing is flushed: an `fsync` takes milliseconds on
/// many disks, and these records are written while a container starts. Nothing is lost: after such a crash none of the recorded
/// processes runs, the slot follows from the owner of the pod's files (`recovery::slot_of_files`), and an unreadable record never
/// makes the node delete a pod's files.
pub(crate) fn write_whole(path: &Path, text: &[u8]) -> io::Result<()> {
    let mut temporary = path.as_os_str().to_owned();
    temporary.push(".new");
    fs::write(&temporary, text)?;
    fs::rename(&temporary, path)
}

/// As [`write_whole`], with an `fsync`: for a file that must survive a crash of the machine, outside of a container's start.
pub(crate) fn write_durably(path: &Path, text: &[u8]) -> io::Result<()> {
    let mut temporary = path.as_os_str().to_owned();
    temporary.push(".new");
    let mut file = fs::File::create(&temporary)?;
    io::Write::write_all(&mut file, text)?;
    file.sync_all()?;
    fs::rename(&temporary, path)?;
    match path.parent() {
        Some(directory) => fs::File::open(directory)?.sync_all(),
        None => Ok(()),
    }
}

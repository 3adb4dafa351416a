//! What is written down of pods and containers, for a node that finds them again.

use std::fs;
use std::io;
use std::path::Path;

use jiff::Timestamp;
use serde::{Deserialize, Serialize};

use super::failure;
use crate::slots;
use crate::{ContainerId, PodSandboxSpec, RuntimeError};

/// What is kept of a sandbox.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(super) struct SandboxRecord {
    /// Absent once the pod has ended and its namespaces are freed.
    pub(super) slot: Option<u32>,
    pub(super) spec: PodSandboxSpec,
    /// Whatever was started before this ran in a sandbox that did not survive.
    #[serde(default)]
    pub(super) made_at: Timestamp,
}

/// What is kept of a started container.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(super) struct ContainerRecord {
    pub(super) pid: i32,
    /// When the process started, in the kernel's ticks: tells it from another with its number.
    pub(super) start_ticks: u64,
    pub(super) started_at: Timestamp,
    pub(super) image_id: String,
    pub(super) crashes: u32,
    pub(super) group: Group,
    pub(super) message_from_log: bool,
}

/// A container's control group: its name, and that of the one it is below.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Group {
    pub(super) parent: String,
    pub(super) name: String,
}

impl Group {
    /// Where a container is that was not started by a launcher that waited for it.
    pub(super) fn of(id: &ContainerId) -> Self {
        Self {
            parent: id.pod.clone(),
            name: format!("{}.{}", id.container, id.attempt),
        }
    }

    /// Where a launcher waits for a pod's first container.
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

/// What is to be read of a record.
pub(super) enum Recorded<T> {
    Known(T),
    Absent,
    /// There is a file, and it says nothing: a crash of the machine may leave one empty.
    Unreadable,
}

/// Reads a record. A disk that fails is an error and no reason to think that there is none.
pub(super) fn read_record<T: serde::de::DeserializeOwned>(path: &Path) -> io::Result<Recorded<T>> {
    match fs::read(path) {
        Ok(text) => Ok(serde_json::from_slice(&text).map_or(Recorded::Unreadable, Recorded::Known)),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(Recorded::Absent),
        Err(error) => Err(error),
    }
}

/// Puts a record that says nothing out of the way, for somebody to look at, and reports it.
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

/// Writes a file where a crash of this process cannot leave half of it.
///
/// A crash of the machine may leave the file empty, or its predecessor, since nothing is flushed: an `fsync` costs milliseconds on
/// many disks, and these records are written while a container starts. Nothing is lost by it. After such a crash no process runs
/// that the records could tell of; the numbers that files belong to are read from the files (`recovery::slot_of_files`); and a
/// record that says nothing never makes the node delete what it was about.
pub(crate) fn write_whole(path: &Path, text: &[u8]) -> io::Result<()> {
    let mut temporary = path.as_os_str().to_owned();
    temporary.push(".new");
    fs::write(&temporary, text)?;
    fs::rename(&temporary, path)
}

/// The same for what must outlast a crash of the machine, where nobody waits for it.
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

//! What is written down of pods and containers, for a node that finds them again.

use std::fs;
use std::io;
use std::path::Path;

use jiff::Timestamp;
use serde::{Deserialize, Serialize};

use super::failure;
use crate::runtime::slots;
use crate::runtime::{ContainerId, PodSandboxSpec, RuntimeError};

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

/// Writes a file where a crash cannot leave half of it.
pub(in crate::runtime) fn write_whole(path: &Path, text: &[u8]) -> io::Result<()> {
    let mut temporary = path.as_os_str().to_owned();
    temporary.push(".new");
    fs::write(&temporary, text)?;
    fs::rename(&temporary, path)
}

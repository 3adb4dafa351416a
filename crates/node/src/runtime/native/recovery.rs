//! Finding pods again after the node was stopped or killed.

use std::collections::BTreeSet;
use std::fs;
use std::io;
use std::path::Path;

use jiff::Timestamp;

use super::process_holder::PROCESS_HOLDER;
use super::records::{ContainerRecord, Group, SandboxRecord};
use super::{NativeRuntime, failure, image_user};
use crate::privileges::Privileges;
use crate::runtime::slots;
use crate::runtime::{
    ContainerId, PodSandbox, RecoveredContainer, RecoveredPod, RuntimeError, StartedContainer,
    Termination,
};

pub(super) fn entries(path: &Path) -> Vec<String> {
    let mut names: Vec<String> = fs::read_dir(path)
        .into_iter()
        .flatten()
        .flatten()
        .filter_map(|entry| entry.file_name().into_string().ok())
        .collect();
    names.sort();
    names
}

fn read<T: serde::de::DeserializeOwned>(path: &Path) -> Option<T> {
    serde_json::from_slice(&fs::read(path).ok()?).ok()
}

/// What is written down of the pod in `directory`; nothing if the node died before it had written that, so that nothing runs in it.
fn record_of(directory: &Path) -> Result<Option<SandboxRecord>, RuntimeError> {
    match fs::read(directory.join("sandbox.json")) {
        Ok(text) => Ok(serde_json::from_slice(&text).ok()),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        // The pod may well run.
        Err(error) => Err(failure("what is known of a pod")(error)),
    }
}

/// The slots that pods below `pods` hold.
pub(super) fn used_slots(pods: &Path) -> Result<BTreeSet<u32>, RuntimeError> {
    let mut used = BTreeSet::new();
    for pod in entries(pods) {
        let record = record_of(&pods.join(pod))?;
        used.extend(record.and_then(|record| record.slot));
    }
    Ok(used)
}

impl NativeRuntime {
    pub(super) fn recover_pods(&self) -> Result<Vec<RecoveredPod>, RuntimeError> {
        let mut pods = Vec::new();
        for uid in entries(&self.pods) {
            let directory = self.pods.join(&uid);
            let Some(record) = record_of(&directory)? else {
                let _ = crate::trees::remove(&directory);
                continue;
            };
            let sandbox = record
                .slot
                .filter(|slot| self.slots.is_intact(*slot))
                .map(|slot| PodSandbox {
                    address: self.slots.network().address(slot),
                    ipv6_address: self.slots.network().ipv6_address(slot),
                    identity_base: self.slots.identities(slot).base,
                });
            // One that was freed was not lost.
            let is_lost = sandbox.is_none() && record.slot.is_some();
            let since = (!is_lost).then_some(record.made_at);
            let containers = self.recover_containers(&uid, since);
            pods.push(RecoveredPod {
                identity: record.spec.identity,
                sandbox,
                containers,
            });
        }
        self.remove_stray_groups(&pods);
        let running: BTreeSet<String> = pods
            .iter()
            .flat_map(|pod| &pod.containers)
            .filter(|container| container.termination.is_none())
            .map(|container| image_user(&container.id))
            .collect();
        self.images.release_unless(|user| running.contains(user));
        Ok(pods)
    }

    /// The containers of a pod whose sandbox was made at a time, or is lost.
    fn recover_containers(&self, pod: &str, since: Option<Timestamp>) -> Vec<RecoveredContainer> {
        let directory = self.pods.join(pod).join("containers");
        let mut recovered = Vec::new();
        for container in entries(&directory) {
            let mut attempts: Vec<u32> = entries(&directory.join(&container))
                .iter()
                .filter_map(|name| name.parse().ok())
                .collect();
            attempts.sort_unstable();
            let mut latest: Option<RecoveredContainer> = None;
            for attempt in attempts {
                let id = ContainerId {
                    pod: pod.to_owned(),
                    container: container.clone(),
                    attempt,
                };
                let previous = latest.as_ref().and_then(|run| run.termination.clone());
                match self.recover_run(&id, previous, since) {
                    Some(run) => latest = Some(run),
                    None => self.discard(&id),
                }
            }
            // It belongs to the sandbox; nobody but this runtime knows of it.
            recovered.extend(latest.filter(|run| run.id.container != PROCESS_HOLDER));
        }
        recovered
    }

    /// One run of a container, unless the node died before it knew that it had started.
    fn recover_run(
        &self,
        id: &ContainerId,
        previous: Option<Termination>,
        since: Option<Timestamp>,
    ) -> Option<RecoveredContainer> {
        let record: ContainerRecord = read(&self.container_directory(id).join("state.json"))?;
        let started = StartedContainer {
            started_at: record.started_at,
            image_id: record.image_id.clone(),
        };
        let crashes = record.crashes;
        let mut alive = super::launching::start_ticks(record.pid) == Some(record.start_ticks);
        if alive && Privileges::current() == Privileges::Rootless {
            // Its namespaces belong to a process that is gone, so nobody can reach into it any more.
            if let Some(pid) = rustix::process::Pid::from_raw(record.pid) {
                let _ = rustix::process::kill_process(pid, rustix::process::Signal::KILL);
            }
            alive = false;
        }
        let termination = if alive && self.remember(id, record.clone()).is_ok() {
            None
        } else {
            Some(self.ending(id, Some(&record)).conclude())
        };
        Some(RecoveredContainer {
            id: id.clone(),
            is_of_lost_sandbox: since.is_none_or(|since| started.started_at < since),
            started,
            crashes,
            termination,
            previous,
        })
    }

    fn discard(&self, id: &ContainerId) {
        let slot = self.sandbox_record(&id.pod).and_then(|record| record.slot);
        // It may have been the pod's first container, and in the group of the launcher that waited for it.
        let waited = slot
            .map(Group::of_slot)
            .filter(|group| !self.is_recorded(&id.pod, group));
        for group in std::iter::once(Group::of(id)).chain(waited) {
            self.control_groups.kill(&group.parent, &group.name);
            let _ = self
                .control_groups
                .remove_container(&group.parent, &group.name);
        }
        let _ = crate::trees::remove(&self.container_directory(id));
    }

    /// Whether a run that the node knew of is, or was, in this group.
    fn is_recorded(&self, pod: &str, group: &Group) -> bool {
        let directory = self.pods.join(pod).join("containers");
        entries(&directory).iter().any(|container| {
            let runs = directory.join(container);
            entries(&runs)
                .iter()
                .filter_map(|run| read::<ContainerRecord>(&runs.join(run).join("state.json")))
                .any(|record| record.group == *group)
        })
    }

    fn remove_stray_groups(&self, pods: &[RecoveredPod]) {
        for group in self.control_groups.pods() {
            let known = match slots::slot_of_group(&group) {
                Some(slot) => self.slots.is_taken(slot),
                None => pods.iter().any(|pod| pod.identity.uid == group),
            };
            if !known {
                let _ = self.control_groups.remove_pod(&group);
            }
        }
    }
}

//! Recovers pods after the node was stopped or killed.

use std::collections::BTreeSet;
use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use jiff::Timestamp;

use super::pid_namespace_holder::PID_NAMESPACE_HOLDER;
use super::records::{
    ContainerRecord, Group, Recorded, SandboxRecord, read_record, set_aside, write_record,
};
use super::{NativeRuntime, blocking, failure, image_user};
use crate::privileges::Privileges;
use crate::{
    ContainerId, PodIdentity, PodSandbox, PodSandboxSpec, RecoveredContainer, RecoveredPod,
    RuntimeError, StartedContainer, Termination, handlers, slots,
};

const SANDBOX: &str = "sandbox.json";

/// Whether the pod has neither containers nor volumes yet.
fn holds_nothing(directory: &Path) -> bool {
    let parts = ["containers", "volumes"];
    parts
        .iter()
        .all(|part| entries(&directory.join(part)).is_empty())
}

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

fn read_sandbox(directory: &Path) -> Result<Recorded<SandboxRecord>, RuntimeError> {
    // An I/O error must not count as an absent record: the pod may be running.
    read_record(&directory.join(SANDBOX)).map_err(failure("what is known of a pod"))
}

/// The slots that pods below `pods` hold.
pub(super) fn used_slots(pods: &Path, node_index: u32) -> Result<BTreeSet<u32>, RuntimeError> {
    let mut used = BTreeSet::new();
    for pod in entries(pods) {
        let directory = pods.join(pod);
        used.extend(match read_sandbox(&directory)? {
            Recorded::Known(record) => record.slot,
            Recorded::Absent | Recorded::Unreadable => slot_of_files(&directory, node_index),
        });
    }
    Ok(used)
}

/// The slot of a pod, from the owner of its files. It replaces a lost record.
fn slot_of_files(directory: &Path, node_index: u32) -> Option<u32> {
    let below = |path: PathBuf| {
        let names = entries(&path).into_iter();
        names.map(move |name| path.join(name)).collect::<Vec<_>>()
    };
    let runs = below(directory.join("containers"))
        .into_iter()
        .flat_map(below);
    let files = runs
        .flat_map(|run| ["upper", "termination-log"].map(|name| run.join(name)))
        .chain(below(directory.join("volumes")));
    files
        .filter_map(|file| fs::symlink_metadata(file).ok())
        .find_map(|file| slots::slot_of_uid(node_index, file.uid()))
}

impl NativeRuntime {
    pub(super) async fn recover_pods(&self) -> Result<Vec<RecoveredPod>, RuntimeError> {
        let mut pods = Vec::new();
        for uid in entries(&self.pods) {
            pods.extend(self.recover_one(&uid).await?);
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

    /// Recovers one pod. `None` if the node was killed before it had prepared anything for it.
    pub(super) async fn recover_one(
        &self,
        uid: &str,
    ) -> Result<Option<RecoveredPod>, RuntimeError> {
        let directory = self.pods.join(uid);
        let record = match read_sandbox(&directory)? {
            Recorded::Known(record) => record,
            Recorded::Absent if holds_nothing(&directory) => {
                let _ = directory_tree::remove(&directory);
                return Ok(None);
            }
            Recorded::Absent => self.replace_record(uid).await?,
            Recorded::Unreadable => {
                set_aside(&directory.join(SANDBOX));
                self.replace_record(uid).await?
            }
        };
        let sandbox = record
            .slot
            .filter(|slot| self.slots.is_intact(*slot))
            .map(|slot| PodSandbox {
                address: self.slots.network().address(slot),
                ipv6_address: self.slots.network().ipv6_address(slot),
                uid_base: self.slots.uid_range(slot).base,
            });
        // A pod that has ended has no slot any more, and has not lost it.
        let is_lost = sandbox.is_none() && record.slot.is_some();
        let since = (!is_lost).then_some(record.made_at);
        let containers = self.recover_containers(uid, since);
        Ok(Some(RecoveredPod {
            identity: record.spec.identity,
            sandbox,
            containers,
            freezer: self.recover_freezer(uid),
        }))
    }

    /// Writes a new record for a pod that has lost its own, and kills its processes: the pod starts over as after a reboot, with its
    /// volumes and in the slot whose UID range owns them.
    async fn replace_record(&self, uid: &str) -> Result<SandboxRecord, RuntimeError> {
        let directory = self.pods.join(uid);
        let slot = slot_of_files(&directory, self.ranges.index());
        let (groups, pod) = (self.cgroups.clone(), uid.to_owned());
        blocking(move || Ok(groups.remove_pod(&pod)?)).await?;
        if let Some(slot) = slot {
            self.slots.tear_down(slot).await?;
        }
        let record = SandboxRecord {
            slot,
            // The specification is written when the sandbox is created again.
            spec: PodSandboxSpec {
                identity: PodIdentity {
                    uid: uid.to_owned(),
                    namespace: String::new(),
                    name: String::new(),
                },
                hostname: String::new(),
                host_aliases: Vec::new(),
                fully_qualified_name: None,
                resolver: String::new(),
                shared_processes: false,
                containers: 0,
                driver: None,
            },
            made_at: Timestamp::now(),
        };
        write_record(&directory, &record)?;
        Ok(record)
    }

    /// The pods that have files or cgroups on this machine. Tears down slots that belong to no pod, with their processes.
    pub(super) async fn sweep_groups(&self) -> Vec<String> {
        let (groups, directory) = (self.cgroups.clone(), self.pods.clone());
        let looked = blocking(move || Ok((groups.pods(), entries(&directory)))).await;
        let (groups, directories) = looked.unwrap_or_default();
        let mut found: BTreeSet<String> = directories.into_iter().collect();
        for group in groups {
            let Some(slot) = slots::slot_of_group(&group) else {
                found.insert(group);
                continue;
            };
            if !self.slots.is_taken(slot)
                && let Err(error) = self.slots.reclaim(slot).await
            {
                tracing::warn!(slot, error = %api::errors::chain(&error), "cannot free a slot that no pod has");
            }
        }
        found.retain(|pod| !handlers::is_trial(pod));
        found.into_iter().collect()
    }

    /// Recovers the containers of a pod. `since` is when its sandbox was created; `None` if the sandbox is lost.
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
            // The holder belongs to the sandbox, and is not one of the pod's containers.
            recovered.extend(latest.filter(|run| run.id.container != PID_NAMESPACE_HOLDER));
        }
        recovered
    }

    /// Recovers one run of a container. `None` if the node was killed before it had recorded the start.
    fn recover_run(
        &self,
        id: &ContainerId,
        previous: Option<Termination>,
        since: Option<Timestamp>,
    ) -> Option<RecoveredContainer> {
        let path = self.container_directory(id).join("state.json");
        let record: ContainerRecord = match read_record(&path) {
            Ok(Recorded::Known(record)) => record,
            Ok(Recorded::Absent) => return None,
            Ok(Recorded::Unreadable) | Err(_) => {
                set_aside(&path);
                return Some(self.unrecorded_run(id, previous));
            }
        };
        let started = StartedContainer {
            started_at: record.started_at,
            image_id: record.image_id.clone(),
        };
        let crashes = record.crashes;
        let mut alive = super::launching::start_ticks(record.pid) == Some(record.start_ticks);
        if alive && Privileges::current() == Privileges::Rootless {
            // A rootless node cannot enter the namespaces that an earlier run created, so the container is lost.
            if let Some(pid) = rustix::process::Pid::from_raw(record.pid) {
                let _ = rustix::process::kill_process(pid, rustix::process::Signal::KILL);
            }
            alive = false;
        }
        let termination = if alive && self.remember(id, record.clone()).is_ok() {
            None
        } else {
            self.forget(id);
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

    /// A run whose record is unreadable. Its processes are killed.
    fn unrecorded_run(
        &self,
        id: &ContainerId,
        previous: Option<Termination>,
    ) -> RecoveredContainer {
        self.end_groups(id);
        self.forget(id);
        RecoveredContainer {
            id: id.clone(),
            started: StartedContainer {
                started_at: Timestamp::now(),
                image_id: String::new(),
            },
            is_of_lost_sandbox: true,
            crashes: 0,
            termination: Some(self.ending(id, None).conclude()),
            previous,
        }
    }

    fn discard(&self, id: &ContainerId) {
        self.end_groups(id);
        let _ = directory_tree::remove(&self.container_directory(id));
    }

    /// Kills all processes in the cgroups that a run without a record may have.
    fn end_groups(&self, id: &ContainerId) {
        let slot = self.sandbox_record(&id.pod).and_then(|record| record.slot);
        // The pod's first container may be in the cgroup of the launcher that waited for it.
        let waited = slot
            .map(Group::of_slot)
            .filter(|group| !self.is_recorded(&id.pod, group));
        for group in std::iter::once(Group::of(id)).chain(waited) {
            self.cgroups.kill(&group.parent, &group.name);
            let _ = self.cgroups.remove_container(&group.parent, &group.name);
        }
    }

    /// Whether the record of another run names this cgroup.
    fn is_recorded(&self, pod: &str, group: &Group) -> bool {
        let directory = self.pods.join(pod).join("containers");
        entries(&directory).iter().any(|container| {
            let runs = directory.join(container);
            entries(&runs)
                .iter()
                .filter_map(|run| read_record(&runs.join(run).join("state.json")).ok())
                .any(|record: Recorded<ContainerRecord>| {
                    matches!(record, Recorded::Known(record) if record.group == *group)
                })
        })
    }

    fn remove_stray_groups(&self, pods: &[RecoveredPod]) {
        for group in self.cgroups.pods() {
            let known = match slots::slot_of_group(&group) {
                Some(slot) => self.slots.is_taken(slot),
                None => pods.iter().any(|pod| pod.identity.uid == group),
            };
            if !known {
                let _ = self.cgroups.remove_pod(&group);
            }
        }
    }
}

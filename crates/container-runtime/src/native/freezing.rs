//! Freezing all containers of a pod, and thawing them.
//!
//! The agent of a container is in the container's cgroup and is frozen with it. Nothing may wait for its answer then, so every request
//! to an agent asks [`NativeRuntime::must_answer`] first.

use std::collections::HashSet;
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use super::records::Group;
use super::{NativeRuntime, blocking};
use crate::cgroups::{Cgroups, GroupState};
use crate::privileges::Privileges;
use crate::{ContainerId, FreezerState, RuntimeError};

/// How long the kernel may take to stop all processes. One that waits for a disk stops only when it has its answer.
const LIMIT: Duration = Duration::from_secs(2);
const LONGEST_PAUSE: Duration = Duration::from_millis(5);

/// The pods that are frozen, or are being frozen or thawed.
#[derive(Debug, Default)]
pub(super) struct FrozenPods(Mutex<HashSet<String>>);

impl FrozenPods {
    fn set(&self, pod: &str, is_frozen: bool) {
        let mut pods = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if is_frozen {
            pods.insert(pod.to_owned());
        } else {
            pods.remove(pod);
        }
    }

    pub(super) fn contains(&self, pod: &str) -> bool {
        let pods = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        pods.contains(pod)
    }
}

impl NativeRuntime {
    pub(super) fn why_not_freeze(&self) -> Option<String> {
        if self.cgroups.can_freeze() {
            return None;
        }
        Some(match Privileges::current() {
            Privileges::Root => "the kernel has no cgroup freezer".to_owned(),
            Privileges::Rootless | Privileges::None => {
                "a node without root has no cgroups, and so no cgroup freezer".to_owned()
            }
        })
    }

    pub(super) async fn freeze_pod(&self, pod: &str) -> Result<(), RuntimeError> {
        if let Some(why) = self.why_not_freeze() {
            return Err(RuntimeError::CannotFreeze(why));
        }
        self.frozen.set(pod, true);
        let (groups, containers) = (self.cgroups.clone(), self.groups_of(pod));
        blocking(move || freeze(&groups, &containers)).await
    }

    pub(super) async fn thaw_pod(&self, pod: &str) -> Result<(), RuntimeError> {
        let (groups, containers) = (self.cgroups.clone(), self.groups_of(pod));
        blocking(move || {
            for (_, Group { parent, name }) in &containers {
                groups.set_frozen(parent, name, false)?;
            }
            Ok(())
        })
        .await?;
        self.frozen.set(pod, false);
        Ok(())
    }

    /// How much of a pod is frozen, by the cgroups of its containers that run. Remembers it.
    pub(super) fn recover_freezer(&self, pod: &str) -> FreezerState {
        let states = self.groups_of(pod).into_iter().filter_map(|(_, group)| {
            let groups = &self.cgroups;
            groups.freezer_state(&group.parent, &group.name)
        });
        let states: Vec<GroupState> = states.collect();
        let is_all = |wanted: GroupState| states.iter().all(|state| *state == wanted);
        let state = if is_all(GroupState::Thawed) {
            FreezerState::Thawed
        } else if is_all(GroupState::Frozen) {
            FreezerState::Frozen
        } else {
            FreezerState::Partly
        };
        self.frozen.set(pod, state != FreezerState::Thawed);
        state
    }

    /// Refuses a request to the agent of a container that is frozen, which would never answer.
    pub(super) fn must_answer(&self, id: &ContainerId) -> Result<(), RuntimeError> {
        if self.frozen.contains(&id.pod) {
            return Err(RuntimeError::Frozen(id.pod.clone()));
        }
        Ok(())
    }

    /// Forgets a pod that is gone.
    pub(super) fn forget_frozen(&self, pod: &str) {
        self.frozen.set(pod, false);
    }
}

/// Freezes containers and waits until no process of theirs runs.
fn freeze(groups: &Cgroups, containers: &[(ContainerId, Group)]) -> Result<(), RuntimeError> {
    for (_, Group { parent, name }) in containers {
        groups.set_frozen(parent, name, true)?;
    }
    let began = Instant::now();
    for (id, Group { parent, name }) in containers {
        let mut pause = Duration::from_micros(20);
        // A container that ends meanwhile has no cgroup any more.
        while groups.freezer_state(parent, name) == Some(GroupState::Freezing) {
            if began.elapsed() > LIMIT {
                return Err(RuntimeError::NotFrozen {
                    container: id.container.clone(),
                    limit: LIMIT,
                });
            }
            std::thread::sleep(pause);
            pause = pause.saturating_mul(2).min(LONGEST_PAUSE);
        }
    }
    Ok(())
}

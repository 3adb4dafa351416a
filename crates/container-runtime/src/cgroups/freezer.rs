//! The cgroup freezer: `cgroup.freeze` of the v2 hierarchy, which needs no controller, or the v1 controller where there is no v2.
//!
//! A frozen process of the v2 freezer can be killed. One of the v1 freezer dies only once it is thawed.

use std::fs;
use std::path::{Path, PathBuf};

use super::{CgroupError, Cgroups, Controller};

/// How far the processes of a cgroup have followed its freezer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum GroupState {
    Thawed,
    /// It is to be frozen, and some of its processes still run.
    Freezing,
    Frozen,
}

/// The two files of a freezer: the one that is written, and the one that tells whether all processes have followed.
#[derive(Debug, Clone, Copy)]
enum Generation {
    Unified,
    Legacy,
}

impl Generation {
    const fn switch(self) -> &'static str {
        match self {
            Self::Unified => "cgroup.freeze",
            Self::Legacy => "freezer.state",
        }
    }

    fn value(self, frozen: bool) -> &'static str {
        match (self, frozen) {
            (Self::Unified, true) => "1",
            (Self::Unified, false) => "0",
            (Self::Legacy, true) => "FROZEN",
            (Self::Legacy, false) => "THAWED",
        }
    }

    fn state(self, group: &Path) -> Option<GroupState> {
        let switch = fs::read_to_string(group.join(self.switch())).ok()?;
        Some(match (self, switch.trim()) {
            (Self::Unified, "0") | (Self::Legacy, "THAWED") => GroupState::Thawed,
            (Self::Unified, _) => {
                let events = fs::read_to_string(group.join("cgroup.events")).ok()?;
                if super::counter(&events, "frozen") == 1 {
                    GroupState::Frozen
                } else {
                    GroupState::Freezing
                }
            }
            (Self::Legacy, "FROZEN") => GroupState::Frozen,
            (Self::Legacy, _) => GroupState::Freezing,
        })
    }
}

impl Cgroups {
    /// Whether this machine has a freezer for the node's cgroups.
    pub fn can_freeze(&self) -> bool {
        self.freezer(Path::new("")).is_some()
    }

    /// Begins to freeze or thaw every process of a container. A container without a cgroup has none.
    pub fn set_frozen(&self, pod: &str, container: &str, frozen: bool) -> Result<(), CgroupError> {
        let Some((generation, group)) = self.freezer(&Path::new(pod).join(container)) else {
            return Ok(());
        };
        let (path, value) = (group.join(generation.switch()), generation.value(frozen));
        fs::write(&path, value).map_err(|source| CgroupError::Set {
            path,
            value: value.to_owned(),
            source,
        })
    }

    /// How far a container is frozen; nothing if it has no cgroup.
    pub fn freezer_state(&self, pod: &str, container: &str) -> Option<GroupState> {
        let (generation, group) = self.freezer(&Path::new(pod).join(container))?;
        generation.state(&group)
    }

    /// Lets a container that is frozen use swap although it has a limit on memory. The v2 hierarchy limits swap on its own; v1 limits
    /// both together, where swap takes the place of memory.
    pub fn allow_swap(&self, pod: &str, container: &str) {
        for hierarchy in &self.hierarchies {
            if hierarchy.unified && hierarchy.controllers.contains(&Controller::Memory) {
                let pod = hierarchy.mount.join(&self.parent).join(pod);
                for group in [pod.join(container), pod] {
                    let _ = fs::write(group.join("memory.swap.max"), "max");
                }
            }
        }
    }

    /// Thaws what is about to be killed, where a frozen process does not die.
    pub(super) fn thaw_to_kill(&self, relative: &Path) {
        if let Some((generation @ Generation::Legacy, group)) = self.freezer(relative) {
            let _ = fs::write(group.join(generation.switch()), generation.value(false));
        }
    }

    /// The freezer of a group below the node's.
    fn freezer(&self, relative: &Path) -> Option<(Generation, PathBuf)> {
        let of_generation = |hierarchy: &super::Hierarchy| {
            let generation = if hierarchy.unified {
                Generation::Unified
            } else if hierarchy.controllers.contains(&Controller::Freezer) {
                Generation::Legacy
            } else {
                return None;
            };
            let group = hierarchy.mount.join(&self.parent).join(relative);
            let has_switch = group.join(generation.switch()).exists();
            has_switch.then_some((generation, group))
        };
        self.hierarchies.iter().find_map(of_generation)
    }
}

#[cfg(test)]
mod tests {
    use super::super::Hierarchy;
    use super::*;

    fn groups(mount: &Path, unified: bool) -> Cgroups {
        let controllers = if unified {
            Vec::new()
        } else {
            vec![Controller::Freezer]
        };
        Cgroups {
            hierarchies: vec![Hierarchy {
                mount: mount.to_owned(),
                unified,
                controllers,
            }],
            parent: "node".to_owned(),
        }
    }

    #[test]
    fn both_generations_of_the_freezer_are_switched_and_read() {
        let directory = tempfile::tempdir().unwrap();
        let group = directory.path().join("node/pod/main");
        fs::create_dir_all(&group).unwrap();
        for (unified, switch, values) in [
            (true, "cgroup.freeze", ["1", "0"]),
            (false, "freezer.state", ["FROZEN", "THAWED"]),
        ] {
            let groups = groups(directory.path(), unified);
            assert_eq!(groups.freezer_state("pod", "main"), None);
            fs::write(group.join(switch), values[1]).unwrap();
            for (frozen, value) in [(true, values[0]), (false, values[1])] {
                groups.set_frozen("pod", "main", frozen).unwrap();
                let written = fs::read_to_string(group.join(switch)).unwrap();
                assert_eq!(written, value);
            }
            assert_eq!(
                groups.freezer_state("pod", "main"),
                Some(GroupState::Thawed)
            );
        }
        let unified = groups(directory.path(), true);
        unified.set_frozen("pod", "main", true).unwrap();
        for (frozen, state) in [(0, GroupState::Freezing), (1, GroupState::Frozen)] {
            let events = format!("populated 1\nfrozen {frozen}\n");
            fs::write(group.join("cgroup.events"), events).unwrap();
            assert_eq!(unified.freezer_state("pod", "main"), Some(state));
        }
        unified.thaw_to_kill(Path::new("pod/main"));
        assert_eq!(
            fs::read_to_string(group.join("cgroup.freeze")).unwrap(),
            "1"
        );
        let legacy = groups(directory.path(), false);
        legacy.set_frozen("pod", "main", true).unwrap();
        legacy.thaw_to_kill(Path::new("pod/main"));
        let state = legacy.freezer_state("pod", "main");
        assert_eq!(state, Some(GroupState::Thawed));
    }
}

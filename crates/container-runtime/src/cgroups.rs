//! Cgroups, on machines with v1 controllers, with the v2 (unified) hierarchy, or with both (hybrid).
//!
//! A pod's cgroup is created in every hierarchy that has a controller we use. It is always created in the v2 hierarchy, because
//! `cgroup.kill` works there even without controllers.

mod cpu;
mod freezer;

use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::time::Duration;

pub use self::freezer::GroupState;
use crate::privileges::Privileges;
use crate::throttling::Periods;

#[derive(Debug, thiserror::Error)]
pub enum CgroupError {
    #[error("reading the mounted cgroup hierarchies")]
    Discover(#[source] io::Error),
    #[error("no cgroup hierarchy is mounted on this machine")]
    NoneMounted,
    #[error("creating cgroup {path}")]
    Create {
        path: PathBuf,
        #[source]
        source: io::Error,
    },
    #[error("setting {path} to {value}")]
    Set {
        path: PathBuf,
        value: String,
        #[source]
        source: io::Error,
    },
    #[error("setting the CPU weight of cgroup {pod}")]
    Weight {
        pod: String,
        #[source]
        source: io::Error,
    },
    #[error("removing cgroup {path}")]
    Remove {
        path: PathBuf,
        #[source]
        source: io::Error,
    },
}

/// The resource limits of a container.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Limits {
    pub memory_bytes: Option<u64>,
    /// The memory limit of all containers of the pod together. Files on a tmpfs outlive the container that wrote them, and count
    /// for the pod from then on.
    pub pod_memory_bytes: Option<u64>,
    pub processes: Option<u64>,
    /// The CPU limit, in thousandths of a CPU.
    pub cpu_milli: Option<u64>,
    /// The CPU request, in thousandths of a CPU: what the container gets under contention.
    pub cpu_request_milli: Option<u64>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Controller {
    Memory,
    Processes,
    Cpu,
    /// Enabled in the v2 hierarchy only, without settings. The kernel then gives every pod an equal weight for disk I/O, gives all
    /// pods together the weight of one sibling of the node's cgroup, and charges writeback to the pod that dirtied the pages.
    Io,
    /// Of the v1 hierarchies, where there is no v2 hierarchy, which freezes by itself.
    Freezer,
}

const CONTROLLERS: [(Controller, &str); 5] = [
    (Controller::Memory, "memory"),
    (Controller::Processes, "pids"),
    (Controller::Cpu, "cpu"),
    (Controller::Io, "io"),
    (Controller::Freezer, "freezer"),
];

#[derive(Debug, Clone, PartialEq, Eq)]
struct Hierarchy {
    mount: PathBuf,
    unified: bool,
    controllers: Vec<Controller>,
}

/// The node's cgroups in all hierarchies.
#[derive(Debug, Clone)]
pub struct Cgroups {
    hierarchies: Vec<Hierarchy>,
    parent: String,
}

impl Cgroups {
    pub fn discover(parent: &str) -> Result<Self, CgroupError> {
        let mut groups = Self::find(parent)?;
        if groups.hierarchies.is_empty() && Privileges::current() == Privileges::Root {
            return Err(CgroupError::NoneMounted);
        }
        match groups.prepare_parent() {
            // Without root there are no limits. All processes of a container still end with its PID 1.
            Err(_) if Privileges::current() == Privileges::Rootless => groups.hierarchies.clear(),
            other => other?,
        }
        Ok(groups)
    }

    /// The cgroups of a node, without creating any.
    pub fn find(parent: &str) -> Result<Self, CgroupError> {
        let mounts = fs::read_to_string("/proc/self/mountinfo").map_err(CgroupError::Discover)?;
        let hierarchies = parse_mounts(&mounts, |mount| {
            fs::read_to_string(mount.join("cgroup.controllers")).unwrap_or_default()
        });
        Ok(Self {
            hierarchies,
            parent: parent.to_owned(),
        })
    }

    /// Which limits this machine cannot enforce, by controller name.
    pub fn missing(&self) -> Vec<&'static str> {
        let has = |wanted| {
            self.hierarchies
                .iter()
                .any(|hierarchy| hierarchy.controllers.contains(&wanted))
        };
        CONTROLLERS
            .iter()
            // No limit depends on these controllers.
            .filter(|(controller, _)| {
                !matches!(controller, Controller::Io | Controller::Freezer) && !has(*controller)
            })
            .map(|(_, name)| *name)
            .collect()
    }

    fn prepare_parent(&self) -> Result<(), CgroupError> {
        for hierarchy in &self.hierarchies {
            let path = hierarchy.mount.join(&self.parent);
            create(&path)?;
            Self::delegate(hierarchy, &hierarchy.mount);
            Self::delegate(hierarchy, &path);
        }
        Ok(())
    }

    /// Limits the number of processes of all pods together.
    pub fn limit_processes(&self, most: u64) -> Result<(), CgroupError> {
        let limits = Limits {
            processes: Some(most),
            ..Limits::default()
        };
        for hierarchy in &self.hierarchies {
            if hierarchy.controllers.contains(&Controller::Processes) {
                let path = hierarchy.mount.join(&self.parent);
                let controller = Controller::Processes;
                apply(&path, settings(controller, hierarchy.unified, &limits))?;
            }
        }
        Ok(())
    }

    /// Enables the controllers for the children of `path` (`cgroup.subtree_control`), which only the v2 hierarchy needs. A failure
    /// is reported when a limit is set, with the name of the missing file.
    fn delegate(hierarchy: &Hierarchy, path: &Path) {
        if hierarchy.unified {
            for (controller, name) in CONTROLLERS {
                if hierarchy.controllers.contains(&controller) {
                    let _ = fs::write(path.join("cgroup.subtree_control"), format!("+{name}"));
                }
            }
        }
    }

    /// Creates the cgroup of one container of a pod. Returns its directories, for the launcher to join.
    pub fn create(
        &self,
        pod: &str,
        container: &str,
        limits: &Limits,
    ) -> Result<Vec<PathBuf>, CgroupError> {
        let mut paths = Vec::new();
        for hierarchy in &self.hierarchies {
            let pod_path = hierarchy.mount.join(&self.parent).join(pod);
            if !pod_path.is_dir() {
                create(&pod_path)?;
                Self::delegate(hierarchy, &pod_path);
            }
            let path = pod_path.join(container);
            create(&path)?;
            for controller in &hierarchy.controllers {
                let unified = hierarchy.unified;
                apply(&pod_path, of_pod(*controller, unified, limits))?;
                apply(&path, settings(*controller, unified, limits))?;
            }
            paths.push(path);
        }
        // Also for a container without a request: the weight may still count a container that has ended.
        self.set_weight(pod).map_err(|source| CgroupError::Weight {
            pod: pod.to_owned(),
            source,
        })?;
        Ok(paths)
    }

    /// Whether the OOM killer ended a process of the container.
    pub fn was_out_of_memory(&self, pod: &str, container: &str) -> bool {
        self.hierarchies
            .iter()
            .filter(|hierarchy| hierarchy.controllers.contains(&Controller::Memory))
            .any(|hierarchy| {
                let path = hierarchy.mount.join(&self.parent).join(pod).join(container);
                let file = if hierarchy.unified {
                    "memory.events"
                } else {
                    "memory.oom_control"
                };
                fs::read_to_string(path.join(file)).is_ok_and(|text| counter(&text, "oom_kill") > 0)
            })
    }

    /// Kills every process of a container: at once with `cgroup.kill`, or one by one on kernels without it.
    pub fn kill(&self, pod: &str, container: &str) {
        self.thaw_to_kill(&Path::new(pod).join(container));
        for hierarchy in &self.hierarchies {
            let path = hierarchy.mount.join(&self.parent).join(pod).join(container);
            if hierarchy.unified && fs::write(path.join("cgroup.kill"), "1").is_ok() {
                return;
            }
        }
        for hierarchy in &self.hierarchies {
            let path = hierarchy.mount.join(&self.parent).join(pod).join(container);
            for pid in processes(&path) {
                let _ = rustix::process::kill_process(pid, rustix::process::Signal::KILL);
            }
        }
    }

    /// The processes of a container.
    pub fn processes(&self, pod: &str, container: &str) -> Vec<rustix::process::Pid> {
        let group = |hierarchy: &Hierarchy| {
            let mount = &hierarchy.mount;
            mount.join(&self.parent).join(pod).join(container)
        };
        let found = self
            .hierarchies
            .iter()
            .map(|found| processes(&group(found)));
        found.max_by_key(Vec::len).unwrap_or_default()
    }

    /// The memory that a container uses now. `None` without the memory controller.
    pub fn memory_bytes(&self, pod: &str, container: &str) -> Option<u64> {
        self.hierarchies
            .iter()
            .filter(|hierarchy| hierarchy.controllers.contains(&Controller::Memory))
            .find_map(|hierarchy| {
                let path = hierarchy.mount.join(&self.parent).join(pod).join(container);
                let file = if hierarchy.unified {
                    "memory.current"
                } else {
                    "memory.usage_in_bytes"
                };
                fs::read_to_string(path.join(file))
                    .ok()?
                    .trim()
                    .parse()
                    .ok()
            })
    }

    /// The CPU time of a container's processes. The v2 hierarchy counts it even without the CPU controller.
    pub fn cpu_time_us(&self, pod: &str, container: &str) -> Option<u64> {
        let unified = self
            .hierarchies
            .iter()
            .find(|hierarchy| hierarchy.unified)?;
        let path = unified.mount.join(&self.parent).join(pod).join(container);
        let text = fs::read_to_string(path.join("cpu.stat")).ok()?;
        Some(counter(&text, "usage_usec"))
    }

    /// In how many periods a container ran, and in how many its CPU limit throttled it. `None` without the CPU controller.
    pub fn cpu_periods(&self, pod: &str, container: &str) -> Option<Periods> {
        let hierarchy = self
            .hierarchies
            .iter()
            .find(|hierarchy| hierarchy.controllers.contains(&Controller::Cpu))?;
        let path = hierarchy.mount.join(&self.parent).join(pod).join(container);
        let text = fs::read_to_string(path.join("cpu.stat")).ok()?;
        Some(Periods {
            all: counter(&text, "nr_periods"),
            throttled: counter(&text, "nr_throttled"),
        })
    }

    pub fn remove_container(&self, pod: &str, container: &str) -> Result<(), CgroupError> {
        self.remove(&Path::new(pod).join(container))
    }

    /// Removes a pod's cgroup and all cgroups below it.
    pub fn remove_pod(&self, pod: &str) -> Result<(), CgroupError> {
        for hierarchy in &self.hierarchies {
            let path = hierarchy.mount.join(&self.parent).join(pod);
            for entry in fs::read_dir(&path).into_iter().flatten().flatten() {
                if entry.file_type().is_ok_and(|kind| kind.is_dir()) {
                    self.remove(&Path::new(pod).join(entry.file_name()))?;
                }
            }
        }
        self.remove(Path::new(pod))
    }

    /// The pods that have cgroups.
    pub fn pods(&self) -> Vec<String> {
        let mut pods: Vec<String> = self
            .hierarchies
            .iter()
            .flat_map(|hierarchy| {
                fs::read_dir(hierarchy.mount.join(&self.parent))
                    .into_iter()
                    .flatten()
                    .flatten()
            })
            .filter(|entry| entry.file_type().is_ok_and(|kind| kind.is_dir()))
            .filter_map(|entry| entry.file_name().into_string().ok())
            .collect();
        pods.sort();
        pods.dedup();
        pods
    }

    fn remove(&self, relative: &Path) -> Result<(), CgroupError> {
        self.thaw_to_kill(relative);
        for hierarchy in &self.hierarchies {
            let path = hierarchy.mount.join(&self.parent).join(relative);
            remove_when_empty(&path).map_err(|source| CgroupError::Remove {
                path: path.clone(),
                source,
            })?;
        }
        Ok(())
    }

    /// Removes the node's own cgroup. All pods must be gone.
    pub fn remove_parent(&self) -> Result<(), CgroupError> {
        self.remove(Path::new(""))
    }
}

fn create(path: &Path) -> Result<(), CgroupError> {
    match fs::create_dir(path) {
        Err(source) if source.kind() != io::ErrorKind::AlreadyExists => Err(CgroupError::Create {
            path: path.to_owned(),
            source,
        }),
        _ => Ok(()),
    }
}

/// Removes a cgroup, with retries: it stays busy for a short time after its last process was killed.
fn remove_when_empty(path: &Path) -> io::Result<()> {
    const ATTEMPTS: u32 = 200;
    const LONGEST_PAUSE: Duration = Duration::from_millis(5);
    let mut pause = Duration::from_micros(200);
    for _ in 0..ATTEMPTS {
        match fs::remove_dir(path) {
            Err(error) if error.kind() == io::ErrorKind::ResourceBusy => {
                for pid in processes(path) {
                    let _ = rustix::process::kill_process(pid, rustix::process::Signal::KILL);
                }
                std::thread::sleep(pause);
                pause = pause.saturating_mul(2).min(LONGEST_PAUSE);
            }
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
            other => return other,
        }
    }
    fs::remove_dir(path)
}

fn processes(path: &Path) -> Vec<rustix::process::Pid> {
    let text = fs::read_to_string(path.join("cgroup.procs")).unwrap_or_default();
    text.lines()
        .filter_map(|line| line.parse().ok().and_then(rustix::process::Pid::from_raw))
        .collect()
}

fn counter(text: &str, name: &str) -> u64 {
    text.lines()
        .filter_map(|line| line.split_once(' '))
        .find(|(key, _)| *key == name)
        .and_then(|(_, value)| value.trim().parse().ok())
        .unwrap_or(0)
}

/// A file of a cgroup, and the value to write to it.
#[derive(Debug, PartialEq, Eq)]
struct Setting {
    file: &'static str,
    value: String,
    /// Whether a kernel without this file also has nothing that the setting limits, such as swap.
    optional: bool,
}

fn set(file: &'static str, value: u64) -> Setting {
    set_text(file, value.to_string())
}

fn set_text(file: &'static str, value: String) -> Setting {
    Setting {
        file,
        value,
        optional: false,
    }
}

fn set_where_it_exists(file: &'static str, value: u64) -> Setting {
    Setting {
        optional: true,
        ..set(file, value)
    }
}

fn apply(path: &Path, settings: Vec<Setting>) -> Result<(), CgroupError> {
    for setting in settings {
        let path = path.join(setting.file);
        if setting.optional && !path.exists() {
            continue;
        }
        fs::write(&path, &setting.value).map_err(|source| CgroupError::Set {
            path,
            value: setting.value,
            source,
        })?;
    }
    Ok(())
}

/// A memory limit without swap. Memory that is swapped out would not count, so the effect of a limit would depend on the machine.
fn memory_bound(unified: bool, bytes: u64) -> [Setting; 2] {
    if unified {
        [
            set("memory.max", bytes),
            set_where_it_exists("memory.swap.max", 0),
        ]
    } else {
        // The second limits memory and swap together, and must not be less than the first.
        [
            set("memory.limit_in_bytes", bytes),
            set_where_it_exists("memory.memsw.limit_in_bytes", bytes),
        ]
    }
}

/// The settings of a pod's cgroup: the limit of all its containers together.
fn of_pod(controller: Controller, unified: bool, limits: &Limits) -> Vec<Setting> {
    match (controller, limits.pod_memory_bytes) {
        (Controller::Memory, Some(bytes)) => memory_bound(unified, bytes).into(),
        _ => Vec::new(),
    }
}

/// The settings of a container's cgroup.
fn settings(controller: Controller, unified: bool, limits: &Limits) -> Vec<Setting> {
    const PERIOD_US: u64 = 100_000;
    let mut settings = Vec::new();
    match controller {
        Controller::Io | Controller::Freezer => {}
        Controller::Memory => {
            if let Some(bytes) = limits.memory_bytes {
                settings.extend(memory_bound(unified, bytes));
            }
            if unified {
                settings.push(set("memory.oom.group", 1));
            }
        }
        Controller::Processes => {
            settings.extend(limits.processes.map(|processes| set("pids.max", processes)));
        }
        Controller::Cpu => {
            let quota = limits
                .cpu_milli
                .map(|milli| (milli * PERIOD_US / 1000).max(1000));
            match (unified, quota) {
                (true, Some(quota)) => {
                    settings.push(set_text("cpu.max", format!("{quota} {PERIOD_US}")));
                }
                (false, Some(quota)) => {
                    settings.push(set("cpu.cfs_period_us", PERIOD_US));
                    settings.push(set("cpu.cfs_quota_us", quota));
                }
                (_, None) => {}
            }
            let shares = (limits.cpu_request_milli.unwrap_or(0) * 1024 / 1000).clamp(2, 262_144);
            if unified {
                // Converts v1 shares to the v2 weight as Kubernetes does.
                settings.push(set("cpu.weight", 1 + (shares - 2) * 9999 / 262_142));
            } else {
                settings.push(set("cpu.shares", shares));
            }
        }
    }
    settings
}

fn parse_mounts(mounts: &str, controllers_of: impl Fn(&Path) -> String) -> Vec<Hierarchy> {
    let mut hierarchies: Vec<Hierarchy> = Vec::new();
    for line in mounts.lines() {
        let Some((left, right)) = line.split_once(" - ") else {
            continue;
        };
        let Some(mount) = left.split(' ').nth(4) else {
            continue;
        };
        let mut right = right.split(' ');
        let (kind, options) = (right.next().unwrap_or(""), right.nth(1).unwrap_or(""));
        let mount = PathBuf::from(mount);
        let (unified, names) = match kind {
            "cgroup2" => (true, controllers_of(&mount).replace([' ', '\n'], ",")),
            "cgroup" => (false, options.to_owned()),
            _ => continue,
        };
        let controllers: Vec<Controller> = CONTROLLERS
            .iter()
            .filter(|(_, name)| names.split(',').any(|option| option == *name))
            .map(|(controller, _)| *controller)
            .collect();
        if (unified || !controllers.is_empty())
            && !hierarchies.iter().any(|known| known.mount == mount)
        {
            hierarchies.push(Hierarchy {
                mount,
                unified,
                controllers,
            });
        }
    }
    if hierarchies.iter().any(|hierarchy| hierarchy.unified) {
        hierarchies.retain(|hierarchy| hierarchy.controllers != [Controller::Freezer]);
    }
    hierarchies
}

#[cfg(test)]
mod tests {
    use super::*;

    const HYBRID: &str = "\
32 31 0:29 / /sys/fs/cgroup/cpu rw,relatime - cgroup cgroup rw,cpu
35 31 0:32 / /sys/fs/cgroup/memory rw,relatime - cgroup cgroup rw,memory
37 31 0:34 / /sys/fs/cgroup/freezer rw,relatime - cgroup cgroup rw,freezer
39 31 0:36 / /sys/fs/cgroup/pids rw,relatime - cgroup cgroup rw,pids
41 31 0:38 / /sys/fs/cgroup/unified rw,relatime - cgroup2 cgroup2 rw
27 1 254:0 / / rw,relatime - ext4 /dev/vda rw
";

    #[test]
    fn v1_v2_and_hybrid_hierarchies_are_found() {
        let hybrid = parse_mounts(HYBRID, |_| "hugetlb\n".to_owned());
        assert_eq!(hybrid.len(), 4);
        assert!(
            hybrid
                .iter()
                .any(|hierarchy| hierarchy.unified && hierarchy.controllers.is_empty())
        );

        let joined = "1 2 0:1 / /sys/fs/cgroup/cpu,cpuacct rw - cgroup cgroup rw,cpu,cpuacct\n";
        assert_eq!(
            parse_mounts(joined, |_| String::new())[0].controllers,
            [Controller::Cpu]
        );

        let legacy: Vec<&str> = HYBRID.lines().take(4).collect();
        let legacy = legacy.join("\n");
        let freezers = parse_mounts(&legacy, |_| String::new());
        assert!(
            freezers
                .iter()
                .any(|hierarchy| hierarchy.controllers == [Controller::Freezer])
        );

        let unified = "1 2 0:1 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw,nsdelegate\n";
        let found = parse_mounts(unified, |_| {
            "cpuset cpu io memory hugetlb pids\n".to_owned()
        });
        assert_eq!(
            found[0].controllers,
            [
                Controller::Memory,
                Controller::Processes,
                Controller::Cpu,
                Controller::Io
            ]
        );
    }

    #[test]
    fn limits_become_settings_of_v1_and_v2() {
        let limits = Limits {
            memory_bytes: Some(1 << 20),
            pod_memory_bytes: Some(3 << 20),
            processes: Some(7),
            cpu_milli: Some(500),
            cpu_request_milli: Some(1000),
        };
        let cases = [
            (
                settings(Controller::Cpu, false, &limits),
                vec![
                    set("cpu.cfs_period_us", 100_000),
                    set("cpu.cfs_quota_us", 50_000),
                    set("cpu.shares", 1024),
                ],
            ),
            (
                settings(Controller::Cpu, true, &limits),
                vec![
                    set_text("cpu.max", "50000 100000".to_owned()),
                    set("cpu.weight", 39),
                ],
            ),
            (
                settings(Controller::Memory, false, &limits),
                vec![
                    set("memory.limit_in_bytes", 1 << 20),
                    set_where_it_exists("memory.memsw.limit_in_bytes", 1 << 20),
                ],
            ),
            (
                settings(Controller::Memory, true, &limits),
                vec![
                    set("memory.max", 1 << 20),
                    set_where_it_exists("memory.swap.max", 0),
                    set("memory.oom.group", 1),
                ],
            ),
            (
                settings(Controller::Processes, true, &limits),
                vec![set("pids.max", 7)],
            ),
            (
                of_pod(Controller::Memory, true, &limits),
                vec![
                    set("memory.max", 3 << 20),
                    set_where_it_exists("memory.swap.max", 0),
                ],
            ),
            (
                of_pod(Controller::Memory, false, &limits),
                vec![
                    set("memory.limit_in_bytes", 3 << 20),
                    set_where_it_exists("memory.memsw.limit_in_bytes", 3 << 20),
                ],
            ),
            (of_pod(Controller::Cpu, true, &limits), vec![]),
            (of_pod(Controller::Memory, true, &Limits::default()), vec![]),
            (
                settings(Controller::Memory, false, &Limits::default()),
                vec![],
            ),
        ];
        for (found, expected) in cases {
            assert_eq!(found, expected);
        }
    }

    #[test]
    fn only_a_required_setting_fails_on_a_kernel_without_its_file() {
        let directory = tempfile::tempdir().unwrap();
        let group = directory.path().join("gone");
        apply(&group, vec![set_where_it_exists("memory.swap.max", 0)]).unwrap();
        let error = apply(&group, vec![set("memory.max", 1)]).unwrap_err();
        assert!(error.to_string().ends_with("memory.max to 1"), "{error}");
    }
}

//! The CPU time, the weight and the scheduling class (`cpu.idle`) of a pod's cgroup.

use std::fs;
use std::io;
use std::path::PathBuf;
use std::time::Duration;

use super::{Cgroups, Controller, Hierarchy, Setting, counter, set};

impl Cgroups {
    /// The CPU time that all containers of a pod have used. `None` without a v2 hierarchy.
    pub fn cpu_time(&self, pod: &str) -> Option<Duration> {
        // The v2 hierarchy counts it even without the CPU controller.
        let hierarchy = self.hierarchies.iter().find(|found| found.unified)?;
        let text = fs::read_to_string(self.pod_path(hierarchy, pod).join("cpu.stat")).ok()?;
        Some(Duration::from_micros(counter(&text, "usage_usec")))
    }

    /// The sum of the CPU requests of a pod's containers, in thousandths of a CPU, read back from their weights.
    pub fn cpu_request_milli(&self, pod: &str) -> u64 {
        let Some(hierarchy) = self.cpu_hierarchy() else {
            return 0;
        };
        let containers = fs::read_dir(self.pod_path(hierarchy, pod));
        let containers = containers.into_iter().flatten().flatten();
        containers
            .filter(|entry| entry.file_type().is_ok_and(|kind| kind.is_dir()))
            .filter_map(|entry| {
                let file = if hierarchy.unified {
                    "cpu.weight"
                } else {
                    "cpu.shares"
                };
                let text = fs::read_to_string(entry.path().join(file)).ok()?;
                Some(request_milli(text.trim().parse().ok()?, hierarchy.unified))
            })
            .sum()
    }

    /// Moves a pod to the scheduling class `SCHED_IDLE`, in which it runs only on idle CPUs, or back to the normal class.
    pub fn set_sched_idle(&self, pod: &str, is_sched_idle: bool) -> io::Result<()> {
        let hierarchy = self.cpu_hierarchy().ok_or(io::ErrorKind::Unsupported)?;
        let file = self.pod_path(hierarchy, pod).join("cpu.idle");
        fs::write(file, if is_sched_idle { "1" } else { "0" })?;
        // The kernel drops the weight of a cgroup in SCHED_IDLE.
        if is_sched_idle {
            Ok(())
        } else {
            self.set_weight(pod)
        }
    }

    /// Sets a pod's CPU weight from the requests of its containers. A pod in `SCHED_IDLE` has no weight (`EINVAL`) and gets it when
    /// it returns to the normal class.
    pub fn set_weight(&self, pod: &str) -> io::Result<()> {
        let Some(hierarchy) = self.cpu_hierarchy() else {
            return Ok(());
        };
        let Setting { file, value, .. } =
            weight_of_pod(self.cpu_request_milli(pod), hierarchy.unified);
        match fs::write(self.pod_path(hierarchy, pod).join(file), value) {
            Err(error) if error.kind() == io::ErrorKind::InvalidInput => Ok(()),
            other => other,
        }
    }

    fn cpu_hierarchy(&self) -> Option<&Hierarchy> {
        let mut hierarchies = self.hierarchies.iter();
        hierarchies.find(|hierarchy| hierarchy.controllers.contains(&Controller::Cpu))
    }

    fn pod_path(&self, hierarchy: &Hierarchy, pod: &str) -> PathBuf {
        hierarchy.mount.join(&self.parent).join(pod)
    }
}

/// The CPU request of a container with this weight. A container without a request has the smallest weight.
fn request_milli(weight: u64, unified: bool) -> u64 {
    const SMALLEST: u64 = 2;
    let shares = if unified {
        SMALLEST + weight.saturating_sub(1) * 262_142 / 9999
    } else {
        weight
    };
    if shares <= SMALLEST {
        0
    } else {
        shares * 1000 / 1024
    }
}

/// The CPU weight of a pod. A pod without requests has the weight of one that requests a tenth of a CPU, which is the kernel's
/// default for a new cgroup.
fn weight_of_pod(request_milli: u64, unified: bool) -> Setting {
    const LEAST_MILLI: u64 = 100;
    let milli = request_milli.max(LEAST_MILLI);
    if unified {
        set("cpu.weight", milli.min(10_000))
    } else {
        set("cpu.shares", (milli * 1024 / LEAST_MILLI).min(262_144))
    }
}

#[cfg(test)]
mod tests {
    use super::super::{Limits, settings};
    use super::*;

    #[test]
    fn a_containers_request_is_read_back_from_its_weight() {
        for unified in [false, true] {
            for (asked, expected) in [
                (None, 0..1),
                (Some(500), 470..531),
                (Some(4000), 3970..4031),
            ] {
                let limits = Limits {
                    cpu_request_milli: asked,
                    ..Limits::default()
                };
                let weight = settings(Controller::Cpu, unified, &limits).pop().unwrap();
                let read = request_milli(weight.value.parse().unwrap(), unified);
                assert!(expected.contains(&read), "{asked:?}, {unified}: {read}");
            }
        }
    }

    #[test]
    fn a_pods_weight_follows_its_requests() {
        for (asked, shares, weight) in [
            (0, 1024, 100),
            (100, 1024, 100),
            (250, 2560, 250),
            (2_000, 20_480, 2_000),
            (64_000, 262_144, 10_000),
        ] {
            assert_eq!(weight_of_pod(asked, false), set("cpu.shares", shares));
            assert_eq!(weight_of_pod(asked, true), set("cpu.weight", weight));
        }
    }
}

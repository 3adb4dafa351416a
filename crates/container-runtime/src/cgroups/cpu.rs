//! What pods use of the processors, and whether they yield to others.

use std::fs;
use std::io;
use std::path::PathBuf;
use std::time::Duration;

use super::{Cgroups, Controller, Hierarchy, Setting, counter, set};

impl Cgroups {
    /// The processor time that all containers of a pod have used, where the kernel counts it.
    pub fn cpu_time(&self, pod: &str) -> Option<Duration> {
        // The v2 hierarchy counts it with and without a controller.
        let hierarchy = self.hierarchies.iter().find(|found| found.unified)?;
        let text = fs::read_to_string(self.pod_path(hierarchy, pod).join("cpu.stat")).ok()?;
        Some(Duration::from_micros(counter(&text, "usage_usec")))
    }

    /// Thousandths of a processor that the containers of a pod have asked for.
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

    /// Lets a pod have the processors only while nobody else wants them, or as much of them as it asked for.
    pub fn set_sched_idle(&self, pod: &str, yields: bool) -> io::Result<()> {
        let hierarchy = self.cpu_hierarchy().ok_or(io::ErrorKind::Unsupported)?;
        let file = self.pod_path(hierarchy, pod).join("cpu.idle");
        fs::write(file, if yields { "1" } else { "0" })?;
        // The kernel forgets the weight of a group that yields.
        if yields { Ok(()) } else { self.weigh(pod) }
    }

    /// Gives a pod the weight of what its containers asked for, beside other pods. One that yields gets it when it no longer does.
    pub fn weigh(&self, pod: &str) -> io::Result<()> {
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

/// What was asked for by a container that was given this weight. One that asked for nothing has the smallest there is.
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

/// What a pod weighs beside others. One that asked for nothing weighs as much as one that asked for a tenth of a processor,
/// which is what the kernel gives a new group.
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
    fn what_a_container_asked_for_is_read_off_its_weight() {
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
    fn pods_weigh_what_they_asked_for() {
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

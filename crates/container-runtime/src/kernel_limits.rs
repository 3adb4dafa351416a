//! Kernel limits that the whole machine shares: process IDs, open files, terminals.
//!
//! A container's own limits keep one pod from exhausting a kernel table. They protect other pods only if the table has room for
//! all of them, and the kernel's defaults are small: 32,768 processes, 4,096 terminals. So the node raises a limit that is too low
//! when it starts, as systemd does, and lowers the containers' limits if it may not. A higher limit costs nothing by itself: the
//! memory of each table entry is charged to the container that uses it (ADR 53).

use std::fs;
use std::path::Path;

const PROCESS_IDENTIFIERS: &str = "kernel/pid_max";
const THREADS: &str = "kernel/threads-max";
const OPEN_FILES: &str = "fs/file-max";
const TERMINALS: &str = "kernel/pty/max";
const RESERVED_TERMINALS: &str = "kernel/pty/reserve";

/// The highest values that the kernel accepts, on 64-bit machines.
const PROCESS_IDENTIFIERS_MAX: u64 = 1 << 22;
const TERMINALS_MAX: u64 = 1 << 20;
/// Process IDs for the machine's own programs, in addition to those of all pods.
const PROCESSES_OF_MACHINE: u64 = 1 << 15;

/// The limits of a container if the kernel's limits allow it, and the least with which programs still work.
const OPEN_FILES_WANTED: u64 = 65_536;
const OPEN_FILES_LEAST: u64 = 1024;
const TERMINALS_WANTED: u64 = 64;
const TERMINALS_LEAST: u64 = 8;

/// The kernel's limits, from `/proc/sys`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct KernelLimits {
    process_identifiers: u64,
    threads: u64,
    open_files: u64,
    terminals: u64,
    /// Terminals that only the host's mount namespace can open.
    reserved_terminals: u64,
}

/// The most that the node's pods may use.
#[derive(Debug, Clone, Copy)]
pub struct Demand {
    pub pods: u32,
    /// The process limit of a container.
    pub processes: u64,
}

/// The limits of containers that follow from the kernel's.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ContainerLimits {
    /// The process limit of all pods of the node together.
    pub all_processes: u64,
    /// The limit of open files of one process (`RLIMIT_NOFILE`).
    pub open_files: u64,
    /// The limit of open terminals of one container.
    pub terminals: u32,
}

impl KernelLimits {
    /// Reads the limits below `/proc/sys`. A file that cannot be read counts as no limit.
    pub fn read() -> Self {
        let root = Path::new("/proc/sys");
        let size = |name| {
            let text = fs::read_to_string(root.join(name)).ok();
            text.and_then(|text| text.trim().parse().ok())
        };
        Self {
            process_identifiers: size(PROCESS_IDENTIFIERS).unwrap_or(u64::MAX),
            threads: size(THREADS).unwrap_or(u64::MAX),
            open_files: size(OPEN_FILES).unwrap_or(u64::MAX),
            terminals: size(TERMINALS).unwrap_or(u64::MAX),
            reserved_terminals: size(RESERVED_TERMINALS).unwrap_or(0),
        }
    }

    /// The settings that are too low for the node's pods, with their new values.
    fn growth(&self, demand: Demand) -> Vec<(&'static str, u64)> {
        let pods = u64::from(demand.pods).max(1);
        let processes = pods.saturating_mul(demand.processes);
        let wanted = [
            (
                PROCESS_IDENTIFIERS,
                self.process_identifiers,
                processes
                    .saturating_add(processes / 3)
                    .saturating_add(PROCESSES_OF_MACHINE)
                    .min(PROCESS_IDENTIFIERS_MAX),
            ),
            (
                OPEN_FILES,
                self.open_files,
                processes.saturating_mul(OPEN_FILES_WANTED * 2),
            ),
            (
                TERMINALS,
                self.terminals,
                pods.saturating_mul(TERMINALS_WANTED * 2)
                    .saturating_add(self.reserved_terminals)
                    .min(TERMINALS_MAX),
            ),
        ];
        wanted
            .into_iter()
            .filter(|(_, size, wanted)| size < wanted)
            .map(|(name, _, wanted)| (name, wanted))
            .collect()
    }

    /// Raises the limits that are too low for the node's pods. A limit that cannot be raised is logged.
    pub fn raise(&self, demand: Demand) {
        for (name, value) in self.growth(demand) {
            match fs::write(Path::new("/proc/sys").join(name), value.to_string()) {
                Ok(()) => tracing::info!(name, value, "raised a kernel table for pods"),
                Err(error) => {
                    tracing::warn!(name, value, %error, "cannot raise a kernel table: containers get less of it");
                }
            }
        }
    }

    /// The limits of containers. `allowed` is the hard `RLIMIT_NOFILE` of the node itself.
    pub fn container_limits(&self, demand: Demand, allowed: Option<u64>) -> ContainerLimits {
        let pods = u64::from(demand.pods).max(1);
        let open_files = (self.open_files / 2 / demand.processes.max(1))
            .clamp(OPEN_FILES_LEAST, OPEN_FILES_WANTED);
        let terminals = (self.terminals.saturating_sub(self.reserved_terminals) / 2 / pods)
            .clamp(TERMINALS_LEAST, TERMINALS_WANTED);
        ContainerLimits {
            all_processes: self.process_identifiers.min(self.threads) / 4 * 3,
            open_files: open_files.min(allowed.unwrap_or(u64::MAX)),
            terminals: u32::try_from(terminals).unwrap_or(u32::MAX),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The defaults of a kernel without systemd on a machine with 24 GB of memory.
    const SMALL: KernelLimits = KernelLimits {
        process_identifiers: 32_768,
        threads: 192_699,
        open_files: 2_465_780,
        terminals: 4096,
        reserved_terminals: 1024,
    };
    const DEMAND: Demand = Demand {
        pods: 1000,
        processes: 1024,
    };

    fn grown(kernel: KernelLimits, demand: Demand) -> KernelLimits {
        let mut grown = kernel;
        for (name, value) in kernel.growth(demand) {
            match name {
                PROCESS_IDENTIFIERS => grown.process_identifiers = value,
                OPEN_FILES => grown.open_files = value,
                TERMINALS => grown.terminals = value,
                other => panic!("{other} is not to be changed"),
            }
        }
        grown
    }

    #[test]
    fn raised_limits_have_room_for_every_pod_and_the_machine() {
        let kernel = grown(SMALL, DEMAND);
        let limits = kernel.container_limits(DEMAND, None);
        assert_eq!((limits.open_files, limits.terminals), (65_536, 64));
        assert!(limits.open_files * 1024 * 1000 <= kernel.open_files / 2);
        assert!(64 * 1000 <= (kernel.terminals - kernel.reserved_terminals) / 2);
        assert!(1000 * 1024 + PROCESSES_OF_MACHINE <= kernel.process_identifiers);
        assert_eq!(kernel.growth(DEMAND), [], "once is enough");
    }

    #[test]
    fn limits_that_are_high_enough_are_not_changed() {
        let large = KernelLimits {
            process_identifiers: PROCESS_IDENTIFIERS_MAX,
            threads: 200_000,
            open_files: u64::MAX >> 1,
            terminals: TERMINALS_MAX,
            reserved_terminals: 1024,
        };
        assert_eq!(large.growth(DEMAND), []);
        assert_eq!(large.container_limits(DEMAND, None).all_processes, 150_000);
    }

    #[test]
    fn limits_that_cannot_be_raised_lower_those_of_containers_and_programs_still_work() {
        let limits = SMALL.container_limits(DEMAND, Some(20_000));
        assert_eq!(
            limits,
            ContainerLimits {
                all_processes: 24_576,
                open_files: 1203,
                terminals: 8,
            }
        );
        let few = Demand {
            pods: 10,
            processes: 64,
        };
        let limits = SMALL.container_limits(few, Some(20_000));
        assert_eq!((limits.open_files, limits.terminals), (19_263, 64));
        let most = Demand {
            pods: u32::MAX,
            processes: u64::MAX,
        };
        assert_eq!(
            SMALL.container_limits(most, None).open_files,
            OPEN_FILES_LEAST
        );
        assert!(!SMALL.growth(most).is_empty(), "no overflow");
    }
}

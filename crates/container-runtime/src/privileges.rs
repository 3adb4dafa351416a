//! The privileges of this process: root, root of its own user namespace (rootless), or none.

/// The privileges of the node.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Privileges {
    /// Root of the machine, or of a user namespace with enough UIDs for pods.
    Root,
    /// An unprivileged user that is root of its own user namespace, which maps only its own UID.
    Rootless,
    /// An unprivileged user.
    None,
}

/// The limitations of a node without root, reported in a condition of the Node and logged at its start.
pub const ROOTLESS_LIMITS: &str = "without root, pods share one UID, have no network beyond this machine and no limits on memory, CPU and processes; images come from `agent-sandbox image pull` and `load`";

impl Privileges {
    /// The privileges of this process.
    pub fn current() -> Self {
        let map = std::fs::read_to_string("/proc/self/uid_map").unwrap_or_default();
        Self::of(rustix::process::geteuid().is_root(), &map)
    }

    fn of(root: bool, uid_map: &str) -> Self {
        let uids: u64 = uid_map
            .lines()
            .filter_map(|line| line.split_whitespace().nth(2)?.parse::<u64>().ok())
            .sum();
        match (root, uids) {
            (false, _) => Self::None,
            (true, 1) => Self::Rootless,
            (true, _) => Self::Root,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn root_of_a_namespace_with_one_uid_is_rootless() {
        for (root, map, expected) in [
            (true, "         0          0 4294967295\n", Privileges::Root),
            (true, "0 1000 1\n1 100000 65536\n", Privileges::Root),
            (
                true,
                "         0      65534          1\n",
                Privileges::Rootless,
            ),
            (
                false,
                "         0          0 4294967295\n",
                Privileges::None,
            ),
        ] {
            assert_eq!(Privileges::of(root, map), expected, "{map}");
        }
    }
}

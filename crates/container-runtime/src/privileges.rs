//! What this process may do to the machine.

/// Whose powers the node has.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Privileges {
    /// Root of the machine, or of a namespace with identities enough for pods.
    Root,
    /// An unprivileged user that is root of namespaces of its own, with no identity but its own in them.
    Rootless,
    /// An unprivileged user.
    None,
}

/// What pods cannot have without root, said on the Node and once when it starts.
pub const ROOTLESS_LIMITS: &str = "without root, pods share one identity, have no network beyond this machine and no limits on memory, CPU and processes; images come from `agent-sandbox image pull` and `load`";

impl Privileges {
    /// Those of this process.
    pub fn current() -> Self {
        let map = std::fs::read_to_string("/proc/self/uid_map").unwrap_or_default();
        Self::of(rustix::process::geteuid().is_root(), &map)
    }

    fn of(root: bool, identity_map: &str) -> Self {
        let identities: u64 = identity_map
            .lines()
            .filter_map(|line| line.split_whitespace().nth(2)?.parse::<u64>().ok())
            .sum();
        match (root, identities) {
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
    fn one_identity_is_not_enough_to_be_root() {
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

//! How many files this process may have open. Every connection, watch, pod and log is one or more.

use anyhow::bail;
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

/// Fewer do not even suffice to start the parts and a handful of pods.
const FEWEST: u64 = 1024;

/// Enough for the connections and pods that a machine takes.
const WANTED: u64 = 65_536;

/// Takes as many open files as the system lets a process have. Most systems let it have few unless it asks, for the sake of programs
/// that cannot count further than 1024; a node with pods and a router with connections need more.
pub fn allow() {
    let limit = getrlimit(Resource::Nofile);
    // Root may have more than was allowed to it, which may be less than it needs.
    let raised = limit.maximum.map(|maximum| maximum.max(WANTED));
    for maximum in [raised, limit.maximum] {
        let wanted = Rlimit {
            current: maximum,
            maximum,
        };
        if setrlimit(Resource::Nofile, wanted).is_ok() {
            return;
        }
    }
}

/// Refuses to start a node that would fail later, in a different way each time.
pub fn require() -> anyhow::Result<()> {
    check(getrlimit(Resource::Nofile).current)
}

fn check(limit: Option<u64>) -> anyhow::Result<()> {
    match limit {
        Some(limit) if limit < FEWEST => bail!(
            "this process may open {limit} files, and needs at least {FEWEST}: raise the hard limit (`ulimit -Hn {WANTED}`, or `LimitNOFILE={WANTED}` of a systemd unit) and start again"
        ),
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn too_few_open_files_are_refused_with_the_remedy() {
        for enough in [None, Some(FEWEST), Some(u64::MAX)] {
            check(enough).unwrap();
        }
        for few in [0, 64, FEWEST - 1] {
            let error = check(Some(few)).unwrap_err().to_string();
            assert!(error.contains(&format!("may open {few} files")), "{error}");
            assert!(error.contains("ulimit -Hn 65536"), "{error}");
        }
    }
}

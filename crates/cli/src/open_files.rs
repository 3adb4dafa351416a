//! How many files this process may have open. Every connection, watch, pod and log is one or more.

use anyhow::bail;
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

/// The least that suffices to start the parts and a few pods.
const FEWEST: u64 = 1024;

/// Enough for all connections and pods of a machine.
const WANTED: u64 = 65_536;

/// Raises the soft limit of open files to the hard limit. The usual soft limit of 1024 exists for programs that use `select`; a node
/// with pods and a router with connections need more.
pub fn allow() {
    let limit = getrlimit(Resource::Nofile);
    // Root may raise the hard limit, if it is too low.
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

/// Refuses to start a node with too few: it would fail later, with varying errors.
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

//! Removes what a node that is not running has left on its machine: processes, cgroups, mounts, links, rules, and its claim on
//! ranges of UIDs and addresses. Everything is found by names that derive from the data directory, which need not exist any more.
//!
//! Files stay: the volumes of claims, images, and the records of pods. A node that is started there again finds its pods as after a
//! reboot of the machine.

use std::os::unix::ffi::OsStringExt;
use std::path::{Path, PathBuf};

use rustix::mount::UnmountFlags;

use crate::cgroups::{CgroupError, Cgroups};
use crate::freeze_swap;
use crate::node_ranges::{self, NodeRanges, NodeRangesError};
use crate::privileges::Privileges;
use api::errors::chain;
use pod_network::names::Names;
use pod_network::{firewall, links};

#[derive(Debug, thiserror::Error)]
pub enum ReclaimError {
    #[error("the node of {} is running; stop it first", .0.display())]
    InUse(PathBuf),
    #[error("what a node leaves on its machine is root's to remove")]
    NotRoot,
    #[error(transparent)]
    NodeRanges(#[from] NodeRangesError),
    #[error(transparent)]
    Cgroup(#[from] CgroupError),
    #[error("reading the table of mounts")]
    Mounts(#[source] std::io::Error),
    #[error(transparent)]
    Network(#[from] links::NetworkError),
    #[error(transparent)]
    Firewall(#[from] firewall::FirewallError),
    #[error(transparent)]
    FreezeSwap(#[from] freeze_swap::SwapError),
    #[error("the task that removes cgroups died")]
    Died,
}

/// What was removed.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Reclaimed {
    /// Cgroups of pods, with their processes.
    pub groups: usize,
    pub mounts: usize,
    pub links: usize,
    /// Whether the node had claimed ranges of UIDs and addresses.
    pub ranges: bool,
}

impl Reclaimed {
    pub fn is_nothing(&self) -> bool {
        *self == Self::default()
    }
}

/// Removes what the node of `data_dir` has left. Idempotent.
pub async fn reclaim(data_dir: &Path) -> Result<Reclaimed, ReclaimError> {
    if Privileges::current() != Privileges::Root {
        return Err(ReclaimError::NotRoot);
    }
    let registry = node_ranges::registry(data_dir);
    if node_ranges::is_running(&registry, data_dir) {
        return Err(ReclaimError::InUse(data_dir.to_owned()));
    }
    // Locked to the end, so that no node starts in this data directory meanwhile.
    let ranges = node_ranges::take_over(&registry, data_dir)?;
    let names = Names::of(data_dir);
    let (group, table) = (names.cgroup.clone(), names.table.clone());
    // Processes first: they keep everything else in use.
    let directory = data_dir.to_owned();
    let groups = tokio::task::spawn_blocking(move || {
        let groups = remove_groups(&group)?;
        freeze_swap::apply(&directory, None)?;
        firewall::remove(Path::new(firewall::PROGRAM), &table)?;
        Ok::<_, ReclaimError>(groups)
    })
    .await
    .map_err(|_| ReclaimError::Died)??;
    // Only where nodes mount: elsewhere below the directory there may be mounts of another node.
    let mounts = unmount_below(&data_dir.join("run"))? + unmount_below(&data_dir.join("memory"))?;
    let index = ranges.as_ref().map(NodeRanges::index);
    let links = links::remove_all(&names, index, &node_ranges::rules_lock(&registry)).await?;
    Ok(Reclaimed {
        groups,
        mounts,
        links,
        ranges: ranges.inspect(NodeRanges::release).is_some(),
    })
}

/// Removes what nodes have left that are not running and whose data directory is gone, so that it does not collide with the next
/// node that claims their ranges.
pub async fn reclaim_abandoned(registry: &Path) {
    for data_dir in node_ranges::stopped(registry) {
        if data_dir.exists() {
            continue;
        }
        match reclaim(&data_dir).await {
            Ok(_) => {
                tracing::info!(data_dir = %data_dir.display(), "gave back what a node had left whose data directory is gone");
            }
            Err(error) => {
                tracing::warn!(data_dir = %data_dir.display(), error = %chain(&error), "cannot give back what a node has left");
            }
        }
    }
}

/// The data directories on this machine whose node has claimed ranges and is not running.
pub fn stopped_nodes() -> Vec<PathBuf> {
    node_ranges::stopped(&node_ranges::registry(Path::new("")))
}

fn remove_groups(parent: &str) -> Result<usize, CgroupError> {
    let groups = Cgroups::find(parent)?;
    let pods = groups.pods();
    for pod in &pods {
        groups.remove_pod(pod)?;
    }
    groups.remove_parent()?;
    Ok(pods.len())
}

fn unmount_below(directory: &Path) -> Result<usize, ReclaimError> {
    let table = std::fs::read("/proc/self/mountinfo").map_err(ReclaimError::Mounts)?;
    let mut points = mount_points_below(&table, directory);
    // The last mount is the topmost.
    points.reverse();
    let unmounted = points
        .iter()
        .filter(|point| rustix::mount::unmount(point.as_path(), UnmountFlags::DETACH).is_ok());
    Ok(unmounted.count())
}

/// The mount points below a directory, or at it, in the order of mounting.
fn mount_points_below(table: &[u8], directory: &Path) -> Vec<PathBuf> {
    table
        .split(|byte| *byte == b'\n')
        .filter_map(|line| line.split(|byte| *byte == b' ').nth(4))
        .map(unescape)
        .filter(|point| point.starts_with(directory))
        .collect()
}

/// The kernel writes spaces and the like as three octal digits.
fn unescape(point: &[u8]) -> PathBuf {
    let mut bytes = Vec::with_capacity(point.len());
    let mut rest = point;
    while let Some((&first, after)) = rest.split_first() {
        let digits = after.first_chunk::<3>().filter(|digits| {
            first == b'\\' && digits.iter().all(|digit| matches!(digit, b'0'..=b'7'))
        });
        if let Some(digits) = digits {
            let value = digits
                .iter()
                .fold(0_u32, |value, digit| value * 8 + u32::from(digit - b'0'));
            bytes.extend(u8::try_from(value));
            rest = &after[3..];
        } else {
            bytes.push(first);
            rest = after;
        }
    }
    std::ffi::OsString::from_vec(bytes).into()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_mounts_of_the_directory_are_found_whatever_their_names_hold() {
        let table = b"27 1 254:0 / / rw - ext4 /dev/vda rw\n\
28 27 254:0 /a /data/one/run rw - ext4 /dev/vda rw\n\
29 28 0:4 net:[1] /data/one/run/slots/0/network rw - nsfs nsfs rw\n\
30 27 254:0 /a /data/one-more/run rw - ext4 /dev/vda rw\n\
31 27 0:9 / /data/one/memory/a\\040b rw - tmpfs tmpfs rw\n";
        assert_eq!(
            mount_points_below(table, Path::new("/data/one")),
            [
                "/data/one/run",
                "/data/one/run/slots/0/network",
                "/data/one/memory/a b"
            ]
            .map(PathBuf::from)
        );
    }
}

//! Pods that use more of the disk than they may, or than there is.
//!
//! The limits are a pod's own: `ephemeral-storage` of its containers and `sizeLimit` of its empty directories. When the disk
//! itself runs out of space or inodes, the pod that holds the most goes first, whatever its limits. What is over a limit is pure; the
//! measuring is not.

use std::collections::{BTreeMap, HashMap};
use std::path::Path;
use std::sync::{Mutex, PoisonError};

use k8s_openapi::api::core::v1::{Pod, ResourceRequirements};
use tokio::sync::mpsc::UnboundedSender;
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;

use crate::config::Config;
use crate::pod_lifecycle::Verdict;
use crate::quantity;
use crate::trees::{self, Usage};

const STORAGE: &str = "ephemeral-storage";

/// What a pod holds on the disk.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct PodUsage {
    /// Writable layers and logs.
    pub containers: BTreeMap<String, Usage>,
    /// Empty directories that are not in memory.
    pub volumes: BTreeMap<String, Usage>,
}

impl PodUsage {
    fn total(&self) -> Usage {
        let mut total = Usage::default();
        for usage in self.containers.values().chain(self.volumes.values()) {
            total.include(*usage);
        }
        total
    }
}

/// What is left of the disk.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Space {
    pub bytes: u64,
    pub bytes_free: u64,
    pub inodes: u64,
    pub inodes_free: u64,
}

/// Under which share of free space or inodes pods are evicted.
const PRESSURE_PERCENT: u64 = 5;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Pressure {
    Bytes,
    Inodes,
}

impl std::fmt::Display for Pressure {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter.write_str(match self {
            Self::Bytes => "ephemeral-storage",
            Self::Inodes => "inodes",
        })
    }
}

impl Space {
    fn of(path: &Path) -> Option<Self> {
        let found = rustix::fs::statvfs(path).ok()?;
        Some(Self {
            bytes: found.f_blocks * found.f_frsize,
            bytes_free: found.f_bavail * found.f_frsize,
            inodes: found.f_files,
            inodes_free: found.f_favail,
        })
    }

    pub fn pressure(&self) -> Option<Pressure> {
        let short = |all: u64, free: u64| all > 0 && free < all / 100 * PRESSURE_PERCENT;
        if short(self.bytes, self.bytes_free) {
            return Some(Pressure::Bytes);
        }
        // Some file systems make inodes as they need them, and say so with a zero.
        short(self.inodes, self.inodes_free).then_some(Pressure::Inodes)
    }
}

fn limit_of(resources: Option<&ResourceRequirements>) -> Option<(u64, String)> {
    let limits = resources?.limits.as_ref()?;
    let text = limits.get(STORAGE)?.0.clone();
    Some((quantity::units(&text)?, text))
}

/// Whether something of the pod has a limit that has to be looked after.
pub fn is_limited(pod: &Pod) -> bool {
    let Some(spec) = &pod.spec else {
        return false;
    };
    let mut containers = spec.containers.iter();
    containers.any(|container| limit_of(container.resources.as_ref()).is_some())
        || disk_volumes(pod).any(|(_, limit)| limit.is_some())
}

/// The pod's empty directories on disk, and their limits.
fn disk_volumes(pod: &Pod) -> impl Iterator<Item = (&str, Option<(u64, String)>)> {
    let volumes = pod
        .spec
        .iter()
        .flat_map(|spec| spec.volumes.iter().flatten());
    volumes.filter_map(|volume| {
        let empty = volume.empty_dir.as_ref()?;
        if empty.medium.as_deref() == Some("Memory") {
            return None;
        }
        let limit = empty.size_limit.as_ref();
        let limit = limit.and_then(|limit| Some((quantity::units(&limit.0)?, limit.0.clone())));
        Some((volume.name.as_str(), limit))
    })
}

/// Why a pod must go for what it holds, if it must; in a kubelet's words. Pure.
pub fn exceeded(pod: &Pod, usage: &PodUsage) -> Option<Verdict> {
    let evicted = |message: String| {
        Some(Verdict {
            reason: "Evicted".to_owned(),
            message,
        })
    };
    let over = |usage: &Usage, limit: u64| usage.bytes > limit || usage.unfathomable;
    for (name, limit) in disk_volumes(pod) {
        let (Some((limit, text)), Some(usage)) = (limit, usage.volumes.get(name)) else {
            continue;
        };
        if over(usage, limit) {
            return evicted(format!(
                "Usage of EmptyDir volume \"{name}\" exceeds the limit \"{text}\". "
            ));
        }
    }
    let mut total_limit = Some(0_u64);
    for container in pod.spec.iter().flat_map(|spec| &spec.containers) {
        let limit = limit_of(container.resources.as_ref());
        total_limit = match (total_limit, &limit) {
            (Some(total), Some((limit, _))) => Some(total.saturating_add(*limit)),
            _ => None,
        };
        let (Some((limit, text)), Some(usage)) = (limit, usage.containers.get(&container.name))
        else {
            continue;
        };
        if over(usage, limit) {
            return evicted(format!(
                "Container {} exceeded its local ephemeral storage limit \"{text}\". ",
                container.name
            ));
        }
    }
    // What all containers may hold together counts for the pod with its volumes, once each of them has a limit.
    let total_limit = total_limit.filter(|limit| *limit > 0)?;
    if over(&usage.total(), total_limit) {
        return evicted(format!(
            "Pod ephemeral local storage usage exceeds the total limit of containers {total_limit}. "
        ));
    }
    None
}

/// Which pod goes when the disk runs out. Pure.
pub fn heaviest(pods: &HashMap<String, PodUsage>, pressure: Pressure) -> Option<&String> {
    let weight = |usage: &PodUsage| match pressure {
        Pressure::Bytes => usage.total().bytes,
        Pressure::Inodes => usage.total().inodes,
    };
    let heaviest = pods.iter().max_by_key(|(uid, usage)| (weight(usage), *uid));
    heaviest.map(|(uid, _)| uid)
}

/// The pods of a node, and how to tell each that it is to go.
#[derive(Debug, Default)]
pub struct Evictions {
    pods: Mutex<HashMap<String, (Pod, UnboundedSender<Verdict>)>>,
    pressure: watch::Sender<Option<Pressure>>,
}

impl Evictions {
    /// What the disk runs out of, as of the last look at it.
    pub fn pressure(&self) -> watch::Receiver<Option<Pressure>> {
        self.pressure.subscribe()
    }

    pub fn watch(&self, uid: &str, pod: &Pod, sender: UnboundedSender<Verdict>) {
        let mut pods = self.pods.lock().unwrap_or_else(PoisonError::into_inner);
        pods.insert(uid.to_owned(), (pod.clone(), sender));
    }

    pub fn forget(&self, uid: &str) {
        let mut pods = self.pods.lock().unwrap_or_else(PoisonError::into_inner);
        pods.remove(uid);
    }

    fn pods(&self) -> HashMap<String, (Pod, UnboundedSender<Verdict>)> {
        self.pods
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .clone()
    }

    /// Looks at the disk now and then, until told to stop.
    pub async fn run(&self, config: &Config, shutdown: CancellationToken) {
        let pods_directory = config.data_dir.join("pods");
        while shutdown
            .run_until_cancelled(tokio::time::sleep(config.storage_check))
            .await
            .is_some()
        {
            let (pods, directory) = (self.pods(), pods_directory.clone());
            let judged = tokio::task::spawn_blocking(move || {
                let pressure = Space::of(&directory).and_then(|space| space.pressure());
                (judge(&pods, &directory, pressure), pressure)
            });
            let (verdicts, pressure) = judged.await.unwrap_or_default();
            self.pressure.send_if_modified(|known| {
                let changed = *known != pressure;
                *known = pressure;
                changed
            });
            for (sender, verdict) in verdicts {
                let _ = sender.send(verdict);
            }
        }
    }
}

fn judge(
    pods: &HashMap<String, (Pod, UnboundedSender<Verdict>)>,
    directory: &Path,
    pressure: Option<Pressure>,
) -> Vec<(UnboundedSender<Verdict>, Verdict)> {
    let mut verdicts = Vec::new();
    for (uid, (pod, sender)) in pods.iter().filter(|(_, (pod, _))| is_limited(pod)) {
        let usage = measure(pod, &directory.join(uid));
        verdicts.extend(exceeded(pod, &usage).map(|verdict| (sender.clone(), verdict)));
    }
    let Some(pressure) = pressure else {
        return verdicts;
    };
    if !verdicts.is_empty() {
        // Those free something; whether it is enough shows next time.
        return verdicts;
    }
    let usages = pods
        .iter()
        .map(|(uid, (pod, _))| (uid.clone(), measure(pod, &directory.join(uid))))
        .collect();
    if let Some((_, sender)) = heaviest(&usages, pressure).and_then(|uid| pods.get(uid)) {
        let message = format!(
            "The node was low on resource: {pressure}. The pod held more of it than any other. "
        );
        let verdict = Verdict {
            reason: "Evicted".to_owned(),
            message,
        };
        verdicts.push((sender.clone(), verdict));
    }
    verdicts
}

/// What a pod holds below its directory. What cannot be read is taken for nothing.
fn measure(pod: &Pod, directory: &Path) -> PodUsage {
    let enough = u64::MAX;
    let mut usage = PodUsage::default();
    for container in pod.spec.iter().flat_map(|spec| &spec.containers) {
        let own = directory.join("containers").join(&container.name);
        let mut total = Usage::default();
        for entry in std::fs::read_dir(&own).into_iter().flatten().flatten() {
            let path = entry.path();
            // A run's directory has a writable layer; the files beside it are logs.
            let counted = if path.is_dir() {
                path.join("upper")
            } else {
                path
            };
            total.include(trees::measure(&counted, enough).unwrap_or_default());
        }
        usage.containers.insert(container.name.clone(), total);
    }
    for (name, limit) in disk_volumes(pod) {
        let enough = limit.map_or(enough, |(limit, _)| limit);
        let path = directory.join("volumes").join(name);
        let held = trees::measure(&path, enough).unwrap_or_default();
        usage.volumes.insert(name.to_owned(), held);
    }
    usage
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn pod(containers: &[Option<&str>], volume: Option<&str>) -> Pod {
        let containers: Vec<_> = containers
            .iter()
            .enumerate()
            .map(|(index, limit)| {
                let mut container = json!({"name": format!("c{index}")});
                if let Some(limit) = limit {
                    container["resources"] = json!({"limits": {"ephemeral-storage": limit}});
                }
                container
            })
            .collect();
        let empty = volume.map_or(json!({}), |limit| json!({"sizeLimit": limit}));
        let spec = json!({"containers": containers, "volumes": [{"name": "v", "emptyDir": empty},
            {"name": "m", "emptyDir": {"medium": "Memory", "sizeLimit": "1"}}]});
        serde_json::from_value(json!({"spec": spec})).unwrap()
    }

    fn usage(containers: &[u64], volume: u64) -> PodUsage {
        let of = |bytes: u64| Usage {
            bytes,
            inodes: 1,
            unfathomable: false,
        };
        PodUsage {
            containers: containers
                .iter()
                .enumerate()
                .map(|(index, bytes)| (format!("c{index}"), of(*bytes)))
                .collect(),
            volumes: BTreeMap::from([("v".to_owned(), of(volume))]),
        }
    }

    #[test]
    fn each_limit_evicts_with_its_own_words() {
        let cases = [
            (pod(&[None], None), usage(&[1 << 40], 1 << 40), None),
            (pod(&[Some("1Ki")], None), usage(&[1024], 0), None),
            (
                pod(&[Some("1Ki")], None),
                usage(&[1025], 0),
                Some("Container c0 exceeded its local ephemeral storage limit \"1Ki\". "),
            ),
            (
                pod(&[None], Some("1Ki")),
                usage(&[0], 1025),
                Some("Usage of EmptyDir volume \"v\" exceeds the limit \"1Ki\". "),
            ),
            (
                pod(&[Some("1Ki"), Some("1Ki")], None),
                usage(&[1000, 1000], 100),
                Some(
                    "Pod ephemeral local storage usage exceeds the total limit of containers 2048. ",
                ),
            ),
            // One without a limit: the pod as a whole has none.
            (
                pod(&[Some("1Ki"), None], None),
                usage(&[1000, 1 << 30], 100),
                None,
            ),
        ];
        for (pod, usage, expected) in cases {
            let found = exceeded(&pod, &usage);
            assert_eq!(
                found.as_ref().map(|verdict| verdict.message.as_str()),
                expected
            );
            assert!(found.is_none_or(|verdict| verdict.reason == "Evicted"));
        }
        let mut hidden = usage(&[0], 0);
        hidden.volumes.get_mut("v").unwrap().unfathomable = true;
        assert!(exceeded(&pod(&[None], Some("1Ki")), &hidden).is_some());
    }

    #[test]
    fn pressure_takes_the_pod_that_holds_the_most_of_what_is_short() {
        let space = Space {
            bytes: 1000,
            bytes_free: 500,
            inodes: 1000,
            inodes_free: 500,
        };
        assert_eq!(space.pressure(), None);
        let full = Space {
            bytes_free: 40,
            ..space
        };
        assert_eq!(full.pressure(), Some(Pressure::Bytes));
        let many = Space {
            inodes_free: 40,
            ..space
        };
        assert_eq!(many.pressure(), Some(Pressure::Inodes));
        let unlimited = Space {
            inodes: 0,
            inodes_free: 0,
            ..space
        };
        assert_eq!(unlimited.pressure(), None);
        let mut crowd = usage(&[1], 1);
        crowd.containers.get_mut("c0").unwrap().inodes = 100;
        let pods = HashMap::from([
            ("large".to_owned(), usage(&[100], 100)),
            ("crowd".to_owned(), crowd),
        ]);
        assert_eq!(heaviest(&pods, Pressure::Bytes).unwrap(), "large");
        assert_eq!(heaviest(&pods, Pressure::Inodes).unwrap(), "crowd");
    }
}

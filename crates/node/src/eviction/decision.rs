//! Decides which pod is evicted for its disk usage, with a kubelet's messages. Pure.
//!
//! A pod's own limits are `ephemeral-storage` of its containers, `sizeLimit` of its emptyDirs, and the capacity of its claims. When the
//! disk runs out of space or inodes, the pod with the largest usage is evicted first, whatever its limits.

use std::collections::{BTreeMap, HashMap};
use std::path::Path;

use k8s_openapi::api::core::v1::Pod;

use super::usage::Claim;
use crate::pod_lifecycle::{FailureReason, Verdict};
use crate::pod_uid::PodUid;
use crate::{pod_resources, quantity};
use directory_tree::Usage;

const STORAGE: &str = "ephemeral-storage";

/// The disk usage of a pod.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct PodUsage {
    /// The files of containers: writable layers, logs and termination messages.
    pub containers: BTreeMap<String, Usage>,
    /// emptyDirs on disk.
    pub volumes: BTreeMap<String, Usage>,
    /// Claims, which outlive the pod and have their own limits.
    pub claims: BTreeMap<String, Usage>,
}

fn sum<'a>(usages: impl Iterator<Item = &'a Usage>) -> Usage {
    let mut total = Usage::default();
    usages.for_each(|usage| total.include(*usage));
    total
}

impl PodUsage {
    /// The space that is freed with the pod.
    fn ephemeral(&self) -> Usage {
        sum(self.containers.values().chain(self.volumes.values()))
    }

    fn total(&self) -> Usage {
        let mut total = self.ephemeral();
        total.include(sum(self.claims.values()));
        total
    }
}

/// The free space and inodes of the disk.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Space {
    pub bytes: u64,
    pub bytes_free: u64,
    pub inodes: u64,
    pub inodes_free: u64,
}

/// The percentage of free space or inodes below which pods are evicted.
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
    pub fn of(path: &Path) -> Option<Self> {
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
        // Some file systems allocate inodes dynamically and report zero.
        short(self.inodes, self.inodes_free).then_some(Pressure::Inodes)
    }
}

/// The limits of the pod's containers, init containers and sidecars. Ephemeral containers cannot have any.
fn container_limits(pod: &Pod) -> impl Iterator<Item = (&str, u64, String)> {
    let containers = pod.spec.iter().flat_map(|spec| {
        let init = spec.init_containers.iter().flatten();
        init.chain(&spec.containers)
    });
    containers.filter_map(|container| {
        let (limit, text) = pod_resources::limit(container.resources.as_ref(), STORAGE)?;
        Some((container.name.as_str(), limit, text))
    })
}

/// Whether the pod has a limit that must be monitored.
pub fn is_limited(pod: &Pod) -> bool {
    container_limits(pod).next().is_some() || disk_volumes(pod).any(|(_, limit)| limit.is_some())
}

/// The pod's emptyDirs on disk, and their limits.
pub fn disk_volumes(pod: &Pod) -> impl Iterator<Item = (&str, Option<(u64, String)>)> {
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

fn evicted(message: String) -> Verdict {
    Verdict {
        reason: FailureReason::Evicted,
        message,
    }
}

/// The reason to evict a pod for its usage, if there is one.
pub fn exceeded(pod: &Pod, usage: &PodUsage) -> Option<Verdict> {
    let over = |usage: &Usage, limit: u64| usage.bytes > limit || usage.unfathomable;
    for (name, limit) in disk_volumes(pod) {
        let (Some((limit, text)), Some(usage)) = (limit, usage.volumes.get(name)) else {
            continue;
        };
        if over(usage, limit) {
            return Some(evicted(format!(
                "Usage of EmptyDir volume \"{name}\" exceeds the limit \"{text}\". "
            )));
        }
    }
    for (name, limit, text) in container_limits(pod) {
        let found = usage.containers.get(name);
        if found.is_some_and(|usage| over(usage, limit)) {
            return Some(evicted(format!(
                "Container {name} exceeded its local ephemeral storage limit \"{text}\". "
            )));
        }
    }
    // If every container has a limit, their sum limits the whole pod with its volumes.
    let total_limit = pod_resources::total_limit(pod.spec.as_ref()?, STORAGE)?;
    over(&usage.ephemeral(), total_limit).then(|| {
        evicted(format!(
            "Pod ephemeral local storage usage exceeds the total limit of containers {total_limit}. "
        ))
    })
}

/// The reason to evict a pod for the size of its claims, if there is one: a claim exceeds its capacity and has grown since the last
/// measurement. A pod that starts with a full claim is not evicted, so that it can free space.
pub fn overgrown(
    claims: &[&Claim],
    usage: &BTreeMap<String, Usage>,
    before: &BTreeMap<String, u64>,
) -> Option<Verdict> {
    claims.iter().find_map(|claim| {
        let (capacity, text) = claim.capacity.as_ref()?;
        let (now, before) = (usage.get(&claim.name)?, before.get(&claim.name)?);
        let grows = now.bytes > *capacity && now.bytes > *before;
        grows.then(|| {
            evicted(format!(
                "Usage of PersistentVolumeClaim \"{}\" exceeds its capacity \"{text}\". ",
                claim.name
            ))
        })
    })
}

/// The pod to evict under disk pressure: the one with the largest usage. A pod without usage would free nothing.
pub fn heaviest(pods: &HashMap<PodUid, PodUsage>, pressure: Pressure) -> Option<&PodUid> {
    let weight = |usage: &PodUsage| match pressure {
        Pressure::Bytes => usage.total().bytes,
        Pressure::Inodes => usage.total().inodes,
    };
    let heaviest = pods.iter().max_by_key(|(uid, usage)| (weight(usage), *uid));
    heaviest
        .filter(|(_, usage)| weight(usage) > 0)
        .map(|(uid, _)| uid)
}

/// The message of an eviction under disk pressure.
pub fn short(pressure: Pressure) -> Verdict {
    evicted(format!(
        "The node was low on resource: {pressure}. The pod held more of it than any other. "
    ))
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    fn container(name: &str, limit: Option<&str>) -> Value {
        let mut container = json!({"name": name});
        if let Some(limit) = limit {
            container["resources"] = json!({"limits": {"ephemeral-storage": limit}});
        }
        container
    }

    fn pod(containers: &[Option<&str>], volume: Option<&str>) -> Pod {
        pod_with_init(&[], containers, volume)
    }

    fn pod_with_init(
        init: &[(Option<&str>, bool)],
        containers: &[Option<&str>],
        volume: Option<&str>,
    ) -> Pod {
        let containers: Vec<_> = containers
            .iter()
            .enumerate()
            .map(|(index, limit)| container(&format!("c{index}"), *limit))
            .collect();
        let init: Vec<_> = init
            .iter()
            .enumerate()
            .map(|(index, (limit, sidecar))| {
                let mut container = container(&format!("i{index}"), *limit);
                if *sidecar {
                    container["restartPolicy"] = json!("Always");
                }
                container
            })
            .collect();
        let empty = volume.map_or(json!({}), |limit| json!({"sizeLimit": limit}));
        let spec = json!({"initContainers": init, "containers": containers, "volumes": [{"name": "v", "emptyDir": empty},
            {"name": "m", "emptyDir": {"medium": "Memory", "sizeLimit": "1"}}]});
        serde_json::from_value(json!({"spec": spec})).unwrap()
    }

    fn of(bytes: u64) -> Usage {
        Usage {
            bytes,
            inodes: 1,
            unfathomable: false,
        }
    }

    fn usage(containers: &[u64], volume: u64) -> PodUsage {
        let containers = containers
            .iter()
            .enumerate()
            .map(|(index, bytes)| (format!("c{index}"), of(*bytes)));
        PodUsage {
            containers: containers.collect(),
            volumes: BTreeMap::from([("v".to_owned(), of(volume))]),
            claims: BTreeMap::new(),
        }
    }

    /// The usage of an init, sidecar or ephemeral container beside the pod's own.
    fn beside(mut usage: PodUsage, name: &str, bytes: u64) -> PodUsage {
        usage.containers.insert(name.to_owned(), of(bytes));
        usage
    }

    #[test]
    fn each_limit_evicts_with_its_own_words() {
        const KIBI: Option<&str> = Some("1Ki");
        let cases = vec![
            (pod(&[None], None), usage(&[1 << 40], 1 << 40), None),
            (pod(&[KIBI], None), usage(&[1024], 0), None),
            (
                pod(&[KIBI], None),
                usage(&[1025], 0),
                Some("Container c0 exceeded its local ephemeral storage limit \"1Ki\". "),
            ),
            (
                pod(&[None], KIBI),
                usage(&[0], 1025),
                Some("Usage of EmptyDir volume \"v\" exceeds the limit \"1Ki\". "),
            ),
            (
                pod(&[KIBI, KIBI], None),
                usage(&[1000, 1000], 100),
                Some(
                    "Pod ephemeral local storage usage exceeds the total limit of containers 2048. ",
                ),
            ),
            // One container without a limit: the pod as a whole has none.
            (pod(&[KIBI, None], None), usage(&[1000, 1 << 30], 100), None),
            // Init containers and sidecars.
            (
                pod_with_init(&[(KIBI, false)], &[None], None),
                beside(usage(&[0], 0), "i0", 1025),
                Some("Container i0 exceeded its local ephemeral storage limit \"1Ki\". "),
            ),
            (
                pod_with_init(&[(KIBI, true)], &[KIBI], None),
                beside(usage(&[1000], 100), "i0", 1000),
                Some(
                    "Pod ephemeral local storage usage exceeds the total limit of containers 2048. ",
                ),
            ),
            // An ephemeral container counts for the pod as a whole.
            (
                pod(&[KIBI], None),
                beside(usage(&[100], 0), "debug", 1000),
                Some(
                    "Pod ephemeral local storage usage exceeds the total limit of containers 1024. ",
                ),
            ),
            // Claims do not count for the pod.
            (
                pod(&[KIBI], None),
                PodUsage {
                    claims: BTreeMap::from([("data".to_owned(), of(1 << 40))]),
                    ..usage(&[1000], 0)
                },
                None,
            ),
        ];
        for (index, (pod, usage, expected)) in cases.into_iter().enumerate() {
            let found = exceeded(&pod, &usage);
            assert_eq!(
                found.as_ref().map(|verdict| verdict.message.as_str()),
                expected,
                "case {index}"
            );
            assert!(found.is_none_or(|verdict| verdict.reason == FailureReason::Evicted));
        }
        let mut hidden = usage(&[0], 0);
        hidden.volumes.get_mut("v").unwrap().unfathomable = true;
        assert!(exceeded(&pod(&[None], KIBI), &hidden).is_some());
    }

    #[test]
    fn whatever_has_a_limit_is_looked_after() {
        let cases = [
            (pod(&[None], None), false),
            (pod(&[Some("1")], None), true),
            (pod(&[None], Some("1")), true),
            (pod_with_init(&[(Some("1"), false)], &[None], None), true),
        ];
        for (pod, expected) in cases {
            assert_eq!(is_limited(&pod), expected, "{pod:?}");
        }
    }

    #[test]
    fn a_pod_whose_claim_grows_past_its_capacity_is_evicted() {
        let claim = Claim {
            name: "data".to_owned(),
            directory: "/nowhere".into(),
            capacity: Some((1024, "1Ki".to_owned())),
        };
        let unbounded = Claim {
            capacity: None,
            ..claim.clone()
        };
        let message = "Usage of PersistentVolumeClaim \"data\" exceeds its capacity \"1Ki\". ";
        let cases = [
            (&claim, 1024, Some(0), None),
            (&claim, 1025, Some(0), Some(message)),
            (&claim, 1025, Some(1024), Some(message)),
            // Not known yet whether this pod wrote it.
            (&claim, 5000, None, None),
            (&claim, 5000, Some(5000), None),
            // It is shrinking.
            (&claim, 4000, Some(5000), None),
            (&unbounded, 5000, Some(0), None),
        ];
        for (claim, now, before, expected) in cases {
            let usage = BTreeMap::from([("data".to_owned(), of(now))]);
            let before = before.map(|before| ("data".to_owned(), before));
            let found = overgrown(&[claim], &usage, &before.into_iter().collect());
            let found = found.as_ref().map(|verdict| verdict.message.as_str());
            assert_eq!(found, expected, "{now}");
        }
    }

    #[test]
    fn pressure_is_a_lack_of_bytes_or_of_inodes() {
        let space = Space {
            bytes: 1000,
            bytes_free: 500,
            inodes: 1000,
            inodes_free: 500,
        };
        let full = Space {
            bytes_free: 40,
            ..space
        };
        let many = Space {
            inodes_free: 40,
            ..space
        };
        let unlimited = Space {
            inodes: 0,
            inodes_free: 0,
            ..space
        };
        for (space, expected) in [
            (space, None),
            (full, Some(Pressure::Bytes)),
            (many, Some(Pressure::Inodes)),
            (unlimited, None),
        ] {
            assert_eq!(space.pressure(), expected, "{space:?}");
        }
    }

    #[test]
    fn pressure_takes_the_pod_that_holds_the_most_of_what_is_short() {
        let mut crowd = usage(&[1], 1);
        crowd.containers.get_mut("c0").unwrap().inodes = 100;
        let large = usage(&[100], 100);
        let with_claim = PodUsage {
            claims: BTreeMap::from([("data".to_owned(), of(1000))]),
            ..usage(&[1], 1)
        };
        let nothing = PodUsage::default();
        let cases = [
            (
                vec![("large", &large), ("crowd", &crowd)],
                Some("large"),
                Some("crowd"),
            ),
            (
                vec![("large", &large), ("claim", &with_claim)],
                Some("claim"),
                Some("claim"),
            ),
            (vec![("nothing", &nothing)], None, None),
            (vec![], None, None),
        ];
        for (pods, of_bytes, of_inodes) in cases {
            let pods: HashMap<PodUid, PodUsage> = pods
                .into_iter()
                .map(|(name, usage)| (PodUid::parse(name).unwrap(), usage.clone()))
                .collect();
            let chosen = |pressure| heaviest(&pods, pressure).map(PodUid::as_str);
            assert_eq!(chosen(Pressure::Bytes), of_bytes);
            assert_eq!(chosen(Pressure::Inodes), of_inodes);
        }
    }
}

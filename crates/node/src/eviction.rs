//! Evicts pods that exceed their disk limits, and pods when the disk is full.
//!
//! ```text
//! every check ──► a pod exceeds its own limit? ──► evict that pod
//!                   │ no
//!                   ▼
//!                 disk pressure? ──► remove unused images ──► still? ──► evict the pod with the largest usage
//! ```
//!
//! [`decision`] decides without I/O; [`usage`] measures directory trees, and [`open_files`] deleted files that are still open. A pod
//! whose processes have not run since the last measurement is not measured again, so idle pods cost nothing.

mod decision;
mod open_files;
mod usage;

use std::collections::{BTreeMap, HashMap};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};

use k8s_openapi::api::core::v1::Pod;
use kube::Client;
use tokio::sync::mpsc::UnboundedSender;
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;

pub use self::decision::Pressure;
use self::decision::{PodUsage, Space};
use self::usage::Claim;
use crate::config::Config;
use crate::pod_lifecycle::Verdict;
use crate::pod_uid::PodUid;
use crate::runtime::Runtime;
use api::errors::chain;
use directory_tree::Usage;

/// Claims may contain very many files, so they are measured only in every n-th check.
const CHECKS_PER_CLAIM: u64 = 6;

/// One pod of the node.
#[derive(Debug, Clone)]
struct Watched {
    pod: Arc<Pod>,
    sender: UnboundedSender<Verdict>,
    /// Absent until all claims are bound.
    claims: Option<Arc<Vec<Claim>>>,
    /// The last measured size of each of its claims.
    held: BTreeMap<String, u64>,
    measured: Option<Measured>,
}

/// The last measured usage of a pod without its claims, and the pod's CPU time then.
#[derive(Debug, Clone)]
struct Measured {
    cpu_time_us: u64,
    usage: PodUsage,
}

/// The pods of a node, each with the channel that requests its eviction.
#[derive(Debug, Default)]
pub struct Evictions {
    pods: Mutex<HashMap<PodUid, Watched>>,
    pressure: watch::Sender<Option<Pressure>>,
}

impl Evictions {
    /// The disk pressure at the last check.
    pub fn pressure(&self) -> watch::Receiver<Option<Pressure>> {
        self.pressure.subscribe()
    }

    /// Starts to monitor a pod, unless it has ended: evicting it would free nothing.
    pub fn watch(&self, uid: &PodUid, pod: &Pod, sender: UnboundedSender<Verdict>) {
        let phase = pod.status.as_ref();
        let phase = phase.and_then(|status| status.phase.as_deref());
        if phase.is_some_and(|phase| phase == "Succeeded" || phase == "Failed") {
            return;
        }
        let watched = Watched {
            pod: Arc::new(pod.clone()),
            sender,
            claims: None,
            held: BTreeMap::new(),
            measured: None,
        };
        self.with_pods(|pods| pods.insert(uid.clone(), watched));
    }

    pub fn forget(&self, uid: &PodUid) {
        self.with_pods(|pods| pods.remove(uid));
    }

    fn with_pods<T>(&self, work: impl FnOnce(&mut HashMap<PodUid, Watched>) -> T) -> T {
        work(&mut self.pods.lock().unwrap_or_else(PoisonError::into_inner))
    }

    fn snapshot(&self) -> HashMap<PodUid, Watched> {
        self.with_pods(|pods| pods.clone())
    }

    /// Checks the disk at an interval, until `shutdown`.
    pub async fn run<R: Runtime>(
        &self,
        config: &Config,
        client: &Client,
        images: &Arc<images::Images>,
        runtime: &Arc<R>,
        shutdown: CancellationToken,
    ) {
        let disk = Disk {
            runtime: runtime.clone(),
            data_dir: config.data_dir.clone(),
            images: images.clone(),
            image_minimum_age: config.image_minimum_age,
        };
        let mut checks = 0_u64;
        while shutdown
            .run_until_cancelled(tokio::time::sleep(config.storage_check))
            .await
            .is_some()
        {
            self.find_claims(client, &config.data_dir).await;
            let (pods, disk) = (self.snapshot(), disk.clone());
            let claims_are_due = checks.is_multiple_of(CHECKS_PER_CLAIM);
            checks += 1;
            let found = tokio::task::spawn_blocking(move || disk.look(&pods, claims_are_due)).await;
            let Ok(found) = found else { continue };
            self.with_pods(|pods| {
                for (uid, held) in found.held {
                    if let Some(watched) = pods.get_mut(&uid) {
                        watched.held = held;
                    }
                }
                for (uid, measured) in found.measured {
                    if let Some(watched) = pods.get_mut(&uid) {
                        watched.measured = Some(measured);
                    }
                }
            });
            self.pressure.send_if_modified(|known| {
                let changed = *known != found.pressure;
                *known = found.pressure;
                changed
            });
            for (sender, verdict) in found.verdicts {
                let _ = sender.send(verdict);
            }
        }
    }

    /// Looks up the directories of pods' claims. A bound claim keeps its volume, so this is done once.
    async fn find_claims(&self, client: &Client, data_dir: &Path) {
        let unknown = self.snapshot().into_iter();
        for (uid, watched) in unknown.filter(|(_, watched)| watched.claims.is_none()) {
            let claims = usage::find_claims(client, &watched.pod, data_dir).await;
            if let Some(claims) = claims {
                self.with_pods(|pods| {
                    if let Some(watched) = pods.get_mut(&uid) {
                        watched.claims = Some(Arc::new(claims));
                    }
                });
            }
        }
    }
}

/// What to measure, and the images to remove before a pod is evicted.
#[derive(Debug)]
struct Disk<R> {
    runtime: Arc<R>,
    data_dir: PathBuf,
    images: Arc<images::Images>,
    image_minimum_age: jiff::SignedDuration,
}

impl<R> Clone for Disk<R> {
    fn clone(&self) -> Self {
        Self {
            runtime: self.runtime.clone(),
            data_dir: self.data_dir.clone(),
            images: self.images.clone(),
            image_minimum_age: self.image_minimum_age,
        }
    }
}

/// The result of a check.
#[derive(Debug, Default)]
struct Found {
    verdicts: Vec<(UnboundedSender<Verdict>, Verdict)>,
    /// The sizes of pods' claims, if they were measured.
    held: HashMap<PodUid, BTreeMap<String, u64>>,
    /// The usage of the pods that were measured.
    measured: HashMap<PodUid, Measured>,
    /// The disk pressure after unused images were removed.
    pressure: Option<Pressure>,
}

impl<R: Runtime> Disk<R> {
    fn pods(&self) -> PathBuf {
        self.data_dir.join("pods")
    }

    fn pressure(&self) -> Option<Pressure> {
        Space::of(&self.pods()).and_then(|space| space.pressure())
    }

    fn look(&self, pods: &HashMap<PodUid, Watched>, claims_are_due: bool) -> Found {
        let mut found = Found::default();
        for (uid, watched) in pods {
            let limited = decision::is_limited(&watched.pod);
            let claims = watched.claims.iter().flat_map(|claims| claims.iter());
            // The first measurement shows what was there before the pod.
            let first = watched.held.is_empty();
            let claims: Vec<&Claim> = claims.filter(|_| claims_are_due || first).collect();
            if !limited && claims.is_empty() {
                continue;
            }
            let mut usage = PodUsage::default();
            if limited || !claims.is_empty() {
                usage = self.measure(uid, watched, &mut found);
            }
            add_claims(&mut usage, usage::measure_claims(&claims));
            let verdict = decision::exceeded(&watched.pod, &usage)
                .or_else(|| decision::overgrown(&claims, &usage.claims, &watched.held));
            found
                .verdicts
                .extend(verdict.map(|verdict| (watched.sender.clone(), verdict)));
            if !claims.is_empty() {
                let held = usage.claims.iter();
                let held = held.map(|(name, usage)| (name.clone(), usage.bytes));
                found.held.insert(uid.clone(), held.collect());
            }
        }
        // These evictions free space; the next check shows whether it is enough.
        if found.verdicts.is_empty() {
            let heaviest = self.relieve(pods, &mut found);
            found.verdicts.extend(heaviest);
        }
        found.pressure = self.pressure();
        found
    }

    /// The usage of a pod without its claims: measured, unless the pod has not run since.
    fn measure(&self, uid: &PodUid, watched: &Watched, found: &mut Found) -> PodUsage {
        // Read first, so that files written during the measurement are measured next time.
        let cpu_time_us = self.runtime.cpu_time_us(uid.as_str());
        let known = [found.measured.get(uid), watched.measured.as_ref()];
        for known in known.into_iter().flatten() {
            if Some(known.cpu_time_us) == cpu_time_us {
                return known.usage.clone();
            }
        }
        let mut usage = usage::measure(&watched.pod, &self.pods().join(uid.as_str()));
        open_files::include(&mut usage, &watched.pod, &self.pods(), || {
            self.runtime.processes(uid.as_str())
        });
        if let Some(cpu_time_us) = cpu_time_us {
            let usage = usage.clone();
            let measured = Measured { cpu_time_us, usage };
            found.measured.insert(uid.clone(), measured);
        }
        usage
    }

    /// The pod to evict under disk pressure, and why.
    fn relieve(
        &self,
        pods: &HashMap<PodUid, Watched>,
        found: &mut Found,
    ) -> Option<(UnboundedSender<Verdict>, Verdict)> {
        self.pressure()?;
        self.remove_unused_images();
        let pressure = self.pressure()?;
        let usages = pods.iter().map(|(uid, watched)| {
            let mut usage = self.measure(uid, watched, found);
            let claims = watched.claims.iter().flat_map(|claims| claims.iter());
            add_claims(
                &mut usage,
                usage::measure_claims(&claims.collect::<Vec<_>>()),
            );
            (uid.clone(), usage)
        });
        let usages = usages.collect();
        let heaviest = decision::heaviest(&usages, pressure)?;
        let sender = pods.get(heaviest)?.sender.clone();
        Some((sender, decision::short(pressure)))
    }

    /// Removes all unused images.
    fn remove_unused_images(&self) {
        let all = images::DiskUse {
            high_percent: 0,
            low_percent: 0,
            minimum_age: self.image_minimum_age,
        };
        match self.images.collect(all) {
            Ok(removed) if removed.images.is_empty() => {}
            Ok(removed) => {
                tracing::info!(images = ?removed.images, bytes = removed.bytes, "removed images, since the disk is nearly full");
            }
            // No image can be removed while one is pulled. Pods are evicted nevertheless.
            Err(images::StoreError::Busy) => {}
            Err(error) => tracing::warn!(error = %chain(&error), "cannot remove images"),
        }
    }
}

/// Adds the sizes of the claims' directories to the pod's usage of them by open files.
fn add_claims(usage: &mut PodUsage, claims: BTreeMap<String, Usage>) {
    for (name, held) in claims {
        usage.claims.entry(name).or_default().include(held);
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn a_pod_that_has_ended_is_no_candidate() {
        let evictions = Evictions::default();
        let uid = |text: &str| PodUid::parse(text).unwrap();
        let pod = |phase: &str| {
            let pod = json!({"status": {"phase": phase}});
            serde_json::from_value::<Pod>(pod).unwrap()
        };
        let (sender, _receiver) = tokio::sync::mpsc::unbounded_channel();
        for phase in ["Pending", "Running", "Succeeded", "Failed"] {
            evictions.watch(&uid(phase), &pod(phase), sender.clone());
        }
        let mut watched: Vec<PodUid> = evictions.snapshot().into_keys().collect();
        watched.sort();
        assert_eq!(watched, [uid("Pending"), uid("Running")]);
        evictions.forget(&uid("Running"));
        assert_eq!(evictions.snapshot().len(), 1);
    }
}

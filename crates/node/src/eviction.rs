//! Pods that use more of the disk than they may, or than there is.
//!
//! ```text
//! every check ──► over a limit of its own? ──► that pod goes
//!                   │ nobody is
//!                   ▼
//!                 the disk is short? ──► images nobody uses go ──► still short? ──► the pod that holds the most goes
//! ```
//!
//! Who is over what is decided in [`decision`], which touches nothing; [`usage`] measures trees, and [`open_files`] what is in none.
//! A pod that has not run since it was measured holds what it held, so that idle pods cost nothing.

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

/// Claims may hold very many files, so they are looked at in one of so many checks only.
const CHECKS_PER_CLAIM: u64 = 6;

/// One pod of the node.
#[derive(Debug, Clone)]
struct Watched {
    pod: Arc<Pod>,
    sender: UnboundedSender<Verdict>,
    /// Absent until all of them are bound.
    claims: Option<Arc<Vec<Claim>>>,
    /// What each of its claims held when they were looked at last.
    held: BTreeMap<String, u64>,
    measured: Option<Measured>,
}

/// What a pod held beside its claims when it had run for this long.
#[derive(Debug, Clone)]
struct Measured {
    cpu_time_us: u64,
    usage: PodUsage,
}

/// The pods of a node, and how to tell each that it is to go.
#[derive(Debug, Default)]
pub struct Evictions {
    pods: Mutex<HashMap<PodUid, Watched>>,
    pressure: watch::Sender<Option<Pressure>>,
}

impl Evictions {
    /// What the disk runs out of, as of the last look at it.
    pub fn pressure(&self) -> watch::Receiver<Option<Pressure>> {
        self.pressure.subscribe()
    }

    /// Looks after a pod from now on, unless it has ended: then nothing is gained by ending it.
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

    /// Looks at the disk now and then, until told to stop.
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

    /// Learns where the data of pods' claims is. A claim that is bound stays with its volume, so once is enough.
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

/// What is looked at, and what can be given up before a pod has to.
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

/// What a look at the disk has shown.
#[derive(Debug, Default)]
struct Found {
    verdicts: Vec<(UnboundedSender<Verdict>, Verdict)>,
    /// What pods' claims hold, where that was looked at.
    held: HashMap<PodUid, BTreeMap<String, u64>>,
    /// What pods hold that were measured anew.
    measured: HashMap<PodUid, Measured>,
    /// What the disk is short of, after whatever could be given up was.
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
            // The first look tells what was there before the pod.
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
        // Those free something; whether it is enough shows next time.
        if found.verdicts.is_empty() {
            let heaviest = self.relieve(pods, &mut found);
            found.verdicts.extend(heaviest);
        }
        found.pressure = self.pressure();
        found
    }

    /// What a pod holds beside its claims, measured unless it is known.
    fn measure(&self, uid: &PodUid, watched: &Watched, found: &mut Found) -> PodUsage {
        // Before the rest, so that what is written meanwhile is measured next time.
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

    /// What has to go when the disk is short of something.
    fn relieve(
        &self,
        pods: &HashMap<PodUid, Watched>,
        found: &mut Found,
    ) -> Option<(UnboundedSender<Verdict>, Verdict)> {
        self.pressure()?;
        self.give_up_images();
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

    /// Removes every image that nobody uses.
    fn give_up_images(&self) {
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
            // While one is pulled none can be removed; pods have to go all the same.
            Err(images::StoreError::Busy) => {}
            Err(error) => tracing::warn!(error = %chain(&error), "cannot remove images"),
        }
    }
}

/// Adds what the trees of claims hold to what the pod holds of them otherwise.
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

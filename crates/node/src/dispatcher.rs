//! Hands every pod that is bound to the node to a worker of its own, and clears away what is left of those that are gone.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;
use std::time::Duration;

use futures::StreamExt;
use k8s_openapi::api::core::v1::Pod;
use kube::api::ListParams;
use kube::runtime::watcher::{self, Event};
use kube::{Api, ResourceExt};
use tokio::sync::watch;
use tokio::task::JoinSet;
use tokio_util::sync::CancellationToken;

use crate::errors::chain;
use crate::kubelet;
use crate::pod_lifecycle::Verdict;
use crate::pod_worker::{self, PodWorker, Shared};
use crate::runtime::{RecoveredContainer, RecoveredPod, Runtime};

/// How long a node that stops still clears away pods that are gone from the API.
const CLEARING_DEADLINE: Duration = Duration::from_secs(30);

fn phase(pod: &Pod) -> Option<&str> {
    pod.status.as_ref()?.phase.as_deref()
}

/// Whether a pod has ended; its worker is needed only to delete it.
fn is_over(pod: &Pod) -> bool {
    matches!(phase(pod), Some("Succeeded" | "Failed"))
}

/// Whether nothing of a pod has run yet.
fn is_new(pod: &Pod) -> bool {
    matches!(phase(pod), None | Some("Pending")) && pod.metadata.deletion_timestamp.is_none()
}

/// The workers of the node's pods.
pub struct Dispatcher<R> {
    shared: Arc<Shared<R>>,
    recovered: HashMap<String, RecoveredPod>,
    workers: HashMap<String, watch::Sender<Option<Pod>>>,
    /// Pods that are gone from the API, and that an earlier run left: they are being removed.
    strays: HashSet<String>,
    /// Tasks of workers, and of those who remove strays; each tells whose it was.
    running: JoinSet<String>,
    /// Pods seen since the last relist began.
    listed: Vec<String>,
}

impl<R: Runtime> Dispatcher<R> {
    pub fn new(shared: Arc<Shared<R>>, recovered: Vec<RecoveredPod>) -> Self {
        let recovered = recovered
            .into_iter()
            .map(|pod| (pod.identity.uid.clone(), pod))
            .collect();
        Self {
            shared,
            recovered,
            workers: HashMap::new(),
            strays: HashSet::new(),
            running: JoinSet::new(),
            listed: Vec::new(),
        }
    }

    pub async fn run(mut self, shutdown: CancellationToken) {
        let pods = Api::<Pod>::all(self.shared.client.clone());
        let own = watcher::Config::default()
            .fields(&format!("spec.nodeName={}", self.shared.config.node_name));
        let mut events = std::pin::pin!(watcher::watcher(pods, own));
        loop {
            tokio::select! {
                () = shutdown.cancelled() => return self.clear_departed().await,
                event = events.next() => match event {
                    None => return,
                    Some(Ok(event)) => self.handle(event),
                    Some(Err(error)) => {
                        tracing::warn!(error = %chain(&error), "the watch of this node's pods failed and is retried");
                        tokio::time::sleep(Duration::from_millis(200)).await;
                    }
                },
                Some(ended) = self.running.join_next() => {
                    if let Ok(uid) = ended {
                        self.workers.remove(&uid);
                        self.strays.remove(&uid);
                    }
                }
            }
        }
    }

    fn handle(&mut self, event: Event<Pod>) {
        match event {
            Event::Init => self.listed.clear(),
            Event::InitApply(pod) => {
                self.listed.extend(pod.metadata.uid.clone());
                self.apply(pod);
            }
            Event::InitDone => {
                let gone: Vec<String> = self
                    .workers
                    .keys()
                    .filter(|uid| !self.listed.contains(uid))
                    .cloned()
                    .collect();
                for uid in gone {
                    self.forget(&uid);
                }
                self.shared.enforcer.all_are_attached();
                self.remove_strays();
            }
            Event::Apply(pod) => self.apply(pod),
            Event::Delete(pod) => self.forget(pod.metadata.uid.as_deref().unwrap_or_default()),
        }
    }

    fn apply(&mut self, pod: Pod) {
        // The field selector is a wish; what is not bound here is not ours.
        let Some(uid) = pod.metadata.uid.clone() else {
            return;
        };
        if pod.spec.as_ref().and_then(|spec| spec.node_name.as_ref())
            != Some(&self.shared.config.node_name)
        {
            return;
        }
        // Stands for something that is not the node's to run or to end.
        if kubelet::is_mirror(&pod) {
            return;
        }
        if let Some(worker) = self.workers.get(&uid) {
            worker.send_replace(Some(pod));
            return;
        }
        let recovered = self.recovered.remove(&uid);
        let refusal = if recovered.is_none() && is_new(&pod) {
            self.refusal()
        } else {
            None
        };
        let worker = PodWorker::new(self.shared.clone(), &pod, recovered, refusal);
        let (sender, receiver) = watch::channel(Some(pod));
        self.workers.insert(uid.clone(), sender);
        self.running.spawn(async move {
            worker.run(receiver).await;
            uid
        });
    }

    /// Why the node takes no other pod, when it has as many as it takes; in a kubelet's words.
    fn refusal(&self) -> Option<Verdict> {
        let capacity = usize::try_from(self.shared.config.maximum_pods).unwrap_or(usize::MAX);
        if self.workers.len() < capacity {
            return None;
        }
        let used = self.workers.values().filter(|pod| {
            let pod = pod.borrow();
            pod.as_ref().is_some_and(|pod| !is_over(pod))
        });
        let used = used.count();
        (used >= capacity).then(|| Verdict {
            reason: "OutOfpods".to_owned(),
            message: format!(
                "Pod was rejected: Node didn't have enough resource: pods, requested: 1, used: {used}, capacity: {capacity}"
            ),
        })
    }

    /// Finishes with pods that the API has forgotten, whether the watch has said so yet or not: after the last of them the node
    /// may be told to give everything back. All others go on without it.
    async fn clear_departed(mut self) {
        let pods = Api::<Pod>::all(self.shared.client.clone());
        let own = ListParams::default()
            .fields(&format!("spec.nodeName={}", self.shared.config.node_name));
        let Ok(listed) = pods.list_metadata(&own).await else {
            return;
        };
        let there: HashSet<String> = listed.iter().filter_map(ResourceExt::uid).collect();
        let mut departed: HashSet<String> = self.workers.keys().cloned().collect();
        departed.retain(|uid| !there.contains(uid));
        for uid in &departed {
            self.forget(uid);
        }
        departed.extend(self.strays.drain());
        let cleared = async {
            while !departed.is_empty()
                && let Some(ended) = self.running.join_next().await
            {
                departed.remove(&ended.unwrap_or_default());
            }
        };
        if tokio::time::timeout(CLEARING_DEADLINE, cleared)
            .await
            .is_err()
        {
            tracing::warn!("pods that are gone from the API are left for the next start to remove");
        }
    }

    fn forget(&mut self, uid: &str) {
        if let Some(worker) = self.workers.get(uid) {
            worker.send_replace(None);
        }
    }

    /// Removes what an earlier run left of pods that are gone from the API.
    fn remove_strays(&mut self) {
        let mut left: HashMap<String, Vec<RecoveredContainer>> = HashMap::new();
        for uid in self.shared.volumes.pods_in_memory() {
            if !self.workers.contains_key(&uid) && !self.strays.contains(&uid) {
                left.insert(uid, Vec::new());
            }
        }
        for (uid, pod) in std::mem::take(&mut self.recovered) {
            left.insert(uid, pod.containers);
        }
        for (uid, containers) in left {
            tracing::info!(
                uid,
                "removing what is left of a pod that is gone from the API"
            );
            self.strays.insert(uid.clone());
            let shared = self.shared.clone();
            self.running.spawn(async move {
                remove_stray(&shared, &uid, containers).await;
                uid
            });
        }
    }
}

async fn remove_stray<R: Runtime>(
    shared: &Shared<R>,
    uid: &str,
    containers: Vec<RecoveredContainer>,
) {
    for container in containers {
        if container.termination.is_none() {
            let _ = shared.runtime.kill(&container.id).await;
            shared.runtime.wait(&container.id).await;
        }
    }
    if let Err(error) = pod_worker::remove(shared, uid).await {
        tracing::warn!(uid, error, "cannot remove a pod that is gone");
    }
}

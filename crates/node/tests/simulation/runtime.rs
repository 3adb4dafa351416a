//! A container runtime without containers. It survives the node: a node that restarts finds here what it had started.

use std::collections::{BTreeMap, BTreeSet};
use std::net::Ipv4Addr;

use agent_sandbox_node::pod_uid::PodUid;
use agent_sandbox_node::runtime::{
    FreezerState, PodIdentity, PodSandbox, RecoveredContainer, RecoveredPod, StartedContainer,
    Termination,
};
use jiff::Timestamp;

/// One run of a container.
#[derive(Debug, Clone)]
pub struct Run {
    pub attempt: u32,
    /// Which of the pod's sandboxes it ran in.
    sandbox: u32,
    started_at: Timestamp,
    crashes: u32,
    pub termination: Option<Termination>,
}

/// What is on the machine of one pod.
#[derive(Debug, Default)]
pub struct PodOnMachine {
    pub sandbox: Option<PodSandbox>,
    sandboxes: u32,
    pub containers: BTreeMap<String, Vec<Run>>,
    pub freezer: FreezerState,
}

impl PodOnMachine {
    pub fn last_run(&self, container: &str) -> Option<&Run> {
        self.containers.get(container)?.last()
    }

    pub fn running(&self) -> impl Iterator<Item = (&String, &Run)> {
        let last = self.containers.iter();
        last.filter_map(|(name, runs)| Some((name, runs.last()?)))
            .filter(|(_, run)| run.termination.is_none())
    }
}

#[derive(Debug, Default)]
pub struct Runtime {
    pub pods: BTreeMap<PodUid, PodOnMachine>,
    /// Every run that was ever started.
    started: BTreeSet<(PodUid, String, u32)>,
    /// How the last run of each container ended, also of pods that were removed.
    pub ends: BTreeMap<(PodUid, String), i32>,
}

impl Runtime {
    pub fn create_sandbox(&mut self, uid: &PodUid) -> PodSandbox {
        let pod = self.pods.entry(uid.clone()).or_default();
        if pod.sandbox.is_none() {
            pod.sandboxes += 1;
        }
        let sandbox = pod.sandbox.get_or_insert(PodSandbox {
            address: Ipv4Addr::new(10, 0, 0, 2),
            ipv6_address: None,
            uid_base: 1 << 20,
        });
        sandbox.clone()
    }

    /// Starts a container. Its command may fail to run, which ends it at once.
    pub fn start(
        &mut self,
        uid: &PodUid,
        container: &str,
        attempt: u32,
        crashes: u32,
        failed: Option<Termination>,
        now: Timestamp,
    ) -> StartedContainer {
        let pod = self.pods.get_mut(uid);
        let pod =
            pod.unwrap_or_else(|| panic!("{uid}/{container} starts in a pod that was removed"));
        assert!(
            pod.sandbox.is_some(),
            "{uid}/{container} starts without a sandbox"
        );
        assert_eq!(
            pod.freezer,
            FreezerState::Thawed,
            "{uid}/{container} starts in a frozen pod"
        );
        let runs = pod.containers.entry(container.to_owned()).or_default();
        let running = runs.iter().find(|run| run.termination.is_none());
        assert!(running.is_none(), "{uid}/{container} is started twice");
        let id = (uid.clone(), container.to_owned(), attempt);
        assert!(
            self.started.insert(id),
            "{uid}/{container}/{attempt} is started again"
        );
        if let Some(termination) = &failed {
            let key = (uid.clone(), container.to_owned());
            self.ends.insert(key, termination.exit_code);
        }
        runs.push(Run {
            attempt,
            sandbox: pod.sandboxes,
            started_at: now,
            crashes,
            termination: failed,
        });
        started(now)
    }

    /// Ends the run of a container, if it runs.
    pub fn end(&mut self, uid: &PodUid, container: &str, attempt: u32, code: i32, now: Timestamp) {
        let Some(pod) = self.pods.get_mut(uid) else {
            return;
        };
        let runs = pod.containers.get_mut(container).into_iter().flatten();
        for run in runs.filter(|run| run.attempt == attempt && run.termination.is_none()) {
            run.termination = Some(Termination {
                exit_code: code,
                signal: None,
                reason: if code == 0 { "Completed" } else { "Error" }.to_owned(),
                message: None,
                started_at: Some(run.started_at),
                finished_at: now,
            });
            self.ends.insert((uid.clone(), container.to_owned()), code);
        }
    }

    pub fn run(&self, uid: &PodUid, container: &str, attempt: u32) -> Option<&Run> {
        let runs = self.pods.get(uid)?.containers.get(container)?;
        runs.iter().find(|run| run.attempt == attempt)
    }

    /// Every container that runs.
    pub fn running(&self) -> Vec<(PodUid, String, u32)> {
        let pods = self.pods.iter();
        pods.flat_map(|(uid, pod)| {
            let running = pod.running();
            running.map(|(name, run)| (uid.clone(), name.clone(), run.attempt))
        })
        .collect()
    }

    /// Whether the processes of a pod do not run.
    pub fn is_frozen(&self, uid: &PodUid) -> bool {
        let pod = self.pods.get(uid);
        pod.is_some_and(|pod| pod.freezer != FreezerState::Thawed)
    }

    pub fn set_freezer(&mut self, uid: &PodUid, freezer: FreezerState) {
        if let Some(pod) = self.pods.get_mut(uid) {
            pod.freezer = freezer;
        }
    }

    pub fn free(&mut self, uid: &PodUid) {
        if let Some(pod) = self.pods.get_mut(uid) {
            assert_eq!(
                pod.running().count(),
                0,
                "{uid} is freed while a container runs"
            );
            pod.sandbox = None;
        }
    }

    pub fn remove(&mut self, uid: &PodUid) {
        self.free(uid);
        self.pods.remove(uid);
    }

    /// The machine restarts: every process and namespace is lost, files stay.
    pub fn reboot(&mut self, now: Timestamp) {
        for (uid, container, attempt) in self.running() {
            self.end(&uid, &container, attempt, 255, now);
        }
        for pod in self.pods.values_mut() {
            pod.sandbox = None;
            pod.freezer = FreezerState::Thawed;
        }
    }

    pub fn recover(&self) -> Vec<RecoveredPod> {
        let pods = self.pods.keys();
        pods.filter_map(|uid| self.recover_pod(uid)).collect()
    }

    pub fn recover_pod(&self, uid: &PodUid) -> Option<RecoveredPod> {
        let pod = self.pods.get(uid)?;
        let containers = pod.containers.iter().filter_map(|(name, runs)| {
            let (last, before) = runs.split_last()?;
            Some(RecoveredContainer {
                id: uid.container(name, last.attempt),
                started: started(last.started_at),
                is_of_lost_sandbox: pod.sandbox.is_none() || last.sandbox < pod.sandboxes,
                crashes: last.crashes,
                termination: last.termination.clone(),
                previous: before.last().and_then(|run| run.termination.clone()),
            })
        });
        Some(RecoveredPod {
            identity: PodIdentity {
                uid: uid.to_string(),
                namespace: "default".to_owned(),
                name: "p".to_owned(),
            },
            sandbox: pod.sandbox.clone(),
            containers: containers.collect(),
            freezer: pod.freezer,
        })
    }
}

fn started(at: Timestamp) -> StartedContainer {
    StartedContainer {
        started_at: at,
        image_id: "image".to_owned(),
    }
}

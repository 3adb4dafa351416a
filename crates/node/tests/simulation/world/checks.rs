//! What must hold, at all times and once everything has come to rest.

use std::collections::BTreeSet;

use ::api::freezing::{FROZEN, is_asked_for};
use agent_sandbox_node::pod_uid::PodUid;
use k8s_openapi::api::core::v1::Pod;

use super::World;
use crate::api::{is_over, uid_of};

impl World {
    /// A container is stopped only if its pod ends, or if a probe of this very run failed.
    pub(super) fn check_stop(&self, uid: &PodUid, container: &str, run: u32) {
        let pod = self.node.workers[uid].machine.pod();
        let spec = pod.spec.as_ref().unwrap();
        let failed = (uid.clone(), container.to_owned(), run);
        assert!(
            pod.metadata.deletion_timestamp.is_some()
                || spec.active_deadline_seconds.is_some()
                || is_over(pod)
                || self.condemned.contains(uid)
                || spec.restart_policy.as_deref() != Some("Always")
                || self.unhealthy.contains(&failed),
            "{uid}/{container}/{run} is stopped for no reason"
        );
    }

    /// No probe of a pod runs while the pod is frozen: it would fail.
    pub(super) fn check_probes_are_paused(&self, uid: &PodUid) {
        if let Some(worker) = self.node.workers.get(uid) {
            assert!(worker.probes.is_empty(), "{uid} is frozen and probed");
        }
    }

    /// When the node deletes a pod's object, the API has the end of every container.
    pub(super) fn check_ends_are_published(&self, uid: &PodUid, pod: &Pod) {
        let status = pod.status.clone().unwrap_or_default();
        let statuses = [
            status.container_statuses,
            status.init_container_statuses,
            status.ephemeral_container_statuses,
        ];
        let statuses: Vec<_> = statuses.into_iter().flatten().flatten().collect();
        for ((_, container), code) in self.runtime.ends.iter().filter(|((of, _), _)| of == uid) {
            let published = statuses.iter().find(|status| status.name == *container);
            let published = published.unwrap_or_else(|| panic!("{uid}/{container} has no status"));
            let both = [&published.state, &published.last_state];
            let codes = both.into_iter().flatten();
            let codes = codes.filter_map(|state| Some(state.terminated.as_ref()?.exit_code));
            let codes: Vec<i32> = codes.collect();
            assert!(
                codes.contains(code),
                "{uid}/{container} ended with {code}, and the API has {codes:?}"
            );
        }
    }

    /// What holds once everything has come to rest.
    pub fn check_settled(&self) {
        for pod in self.api.pods.values() {
            let uid = uid_of(pod);
            assert!(pod.metadata.deletion_timestamp.is_none(), "{uid} stays");
            self.check_pod(&uid, pod);
        }
        let known: BTreeSet<PodUid> = self.api.pods.values().map(|pod| uid_of(pod)).collect();
        for uid in self.runtime.pods.keys() {
            assert!(known.contains(uid), "{uid} is left on the machine");
        }
        for uid in &self.attached {
            assert!(known.contains(uid), "{uid} is left in the network's rules");
        }
        let workers: BTreeSet<PodUid> = self.node.workers.keys().cloned().collect();
        assert_eq!(workers, known, "a worker for every pod");
    }

    /// The API's status of a pod is the runtime's truth, and what should run runs.
    fn check_pod(&self, uid: &PodUid, pod: &Pod) {
        let status = pod.status.clone().unwrap_or_default();
        let spec = pod.spec.as_ref().unwrap();
        let machine = self.runtime.pods.get(uid);
        let is_asked = is_asked_for(pod.metadata.annotations.as_ref());
        let is_frozen = self.runtime.is_frozen(uid);
        let condition = |kind: &str| {
            let mut conditions = status.conditions.iter().flatten();
            conditions.any(|condition| condition.type_ == kind && condition.status == "True")
        };
        assert_eq!(
            is_frozen,
            is_asked && !is_over(pod),
            "{uid} is frozen when asked to, and only then"
        );
        assert_eq!(is_frozen, condition(FROZEN), "{uid} reports its freezer");
        if is_frozen {
            self.check_probes_are_paused(uid);
            assert!(!condition("Ready"), "{uid} is frozen and ready");
            return;
        }
        for published in status.container_statuses.iter().flatten() {
            let container = &published.name;
            let Some(run) = machine.and_then(|pod| pod.last_run(container)) else {
                assert!(is_over(pod), "{uid}/{container} never ran: {status:?}");
                continue;
            };
            let state = published.state.as_ref().unwrap();
            let attempt = u32::try_from(published.restart_count).unwrap();
            assert_eq!(attempt, run.attempt, "{uid}/{container} counts its runs");
            match &run.termination {
                None => assert!(state.running.is_some(), "{uid}/{container} runs: {state:?}"),
                Some(end) => {
                    // The next run of a container whose pod ended meanwhile may have been refused.
                    let last = published.last_state.as_ref().filter(|_| is_over(pod));
                    let state = Some(state).filter(|state| state.waiting.is_none()).or(last);
                    let ended = state.and_then(|state| state.terminated.as_ref());
                    let code = ended.map(|ended| ended.exit_code);
                    assert_eq!(code, Some(end.exit_code), "{uid}/{container}: {state:?}");
                    let restarts = match spec.restart_policy.as_deref() {
                        Some("Never") => false,
                        Some("OnFailure") => end.exit_code != 0,
                        _ => true,
                    };
                    assert!(
                        !restarts || is_over(pod),
                        "{uid}/{container} is not restarted"
                    );
                }
            }
        }
        let running = machine.map_or(0, |pod| pod.running().count());
        if is_over(pod) {
            assert_eq!(running, 0, "{uid} is over and runs");
            let is_freed = machine.is_none_or(|pod| pod.sandbox.is_none());
            assert!(is_freed, "{uid} is over and holds its sandbox");
            assert!(
                !self.attached.contains(uid),
                "{uid} is over and in the rules"
            );
        } else {
            assert!(running > 0, "{uid} does not run: {status:?}");
            assert!(self.attached.contains(uid), "{uid} runs without its rules");
            let is_all_running = running
                == spec.containers.len()
                    + spec
                        .init_containers
                        .iter()
                        .flatten()
                        .filter(|init| init.restart_policy.is_some())
                        .count();
            assert!(
                condition("Ready") || !is_all_running,
                "{uid} is not ready: {status:?}"
            );
        }
    }
}

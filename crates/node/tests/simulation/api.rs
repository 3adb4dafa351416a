//! The API as the node sees it: pods by name, and the events of a watch.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use agent_sandbox_node::pod_lifecycle::status::is_own_condition;
use agent_sandbox_node::pod_uid::PodUid;
use jiff::Timestamp;
use k8s_openapi::api::core::v1::{Pod, PodSpec, PodStatus};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{ObjectMeta, Time};

/// An event of the watch.
#[derive(Debug, Clone)]
pub enum Change {
    Applied(Arc<Pod>),
    Deleted(Arc<Pod>),
}

#[derive(Debug, Default)]
pub struct Api {
    pub pods: BTreeMap<String, Arc<Pod>>,
    /// Everything that a watch reports, in order.
    pub changes: Vec<Change>,
    uids: u32,
}

pub fn uid_of(pod: &Pod) -> PodUid {
    PodUid::of(&pod.metadata).expect("every pod of the API has a UID")
}

pub fn is_over(pod: &Pod) -> bool {
    let phase = pod
        .status
        .as_ref()
        .and_then(|status| status.phase.as_deref());
    matches!(phase, Some("Succeeded" | "Failed"))
}

impl Api {
    pub fn find(&self, uid: &PodUid) -> Option<&Arc<Pod>> {
        self.pods.values().find(|pod| uid_of(pod) == *uid)
    }

    /// Creates a pod, unless there is one of this name.
    pub fn create(&mut self, name: &str, spec: &PodSpec) {
        if self.pods.contains_key(name) {
            return;
        }
        self.uids += 1;
        let pod = Pod {
            metadata: ObjectMeta {
                name: Some(name.to_owned()),
                namespace: Some("default".to_owned()),
                uid: Some(format!("{name}{}", self.uids)),
                ..ObjectMeta::default()
            },
            spec: Some(spec.clone()),
            status: None,
        };
        self.put(pod);
    }

    fn put(&mut self, pod: Pod) {
        let name = pod.metadata.name.clone().unwrap();
        let pod = Arc::new(pod);
        self.pods.insert(name, pod.clone());
        self.changes.push(Change::Applied(pod));
    }

    pub fn edit(&mut self, name: &str, edit: impl FnOnce(&mut Pod)) {
        if let Some(pod) = self.pods.get(name) {
            let mut pod = (**pod).clone();
            edit(&mut pod);
            self.put(pod);
        }
    }

    /// A user's deletion. Without a grace period the pod is gone at once, whatever the node knows.
    pub fn delete(&mut self, name: &str, grace_seconds: i64, now: Timestamp) {
        let Some(pod) = self.pods.get(name) else {
            return;
        };
        if grace_seconds == 0 {
            self.remove(name);
            return;
        }
        let earlier = pod.metadata.deletion_grace_period_seconds;
        if earlier.is_some_and(|earlier| earlier <= grace_seconds) {
            return;
        }
        let end = now + Duration::from_secs(grace_seconds.unsigned_abs());
        self.edit(name, |pod| {
            pod.metadata.deletion_grace_period_seconds = Some(grace_seconds);
            pod.metadata.deletion_timestamp = Some(Time(end));
        });
    }

    pub fn remove(&mut self, name: &str) {
        if let Some(pod) = self.pods.remove(name) {
            self.changes.push(Change::Deleted(pod));
        }
    }

    /// The node's write of a status; false if the API has no such pod.
    pub fn write_status(&mut self, uid: &PodUid, status: &PodStatus) -> bool {
        let Some(pod) = self.find(uid) else {
            return false;
        };
        let mut pod = (**pod).clone();
        let before = pod.status.take().unwrap_or_default();
        let others = before.conditions.into_iter().flatten();
        let others = others.filter(|condition| !is_own_condition(&condition.type_));
        let own = status.conditions.iter().flatten();
        let own = own.filter(|condition| is_own_condition(&condition.type_));
        let conditions = others.chain(own.cloned()).collect();
        pod.status = Some(PodStatus {
            conditions: Some(conditions),
            ..status.clone()
        });
        self.put(pod);
        true
    }
}

//! The queue of pods that wait to be bound: which may be bound now, and when to retry. Pure.
//!
//! ```text
//!  waiting ──► being bound ──► bound ──► gone
//!     ▲             │
//!     └── refused ──┘   after a pause that doubles
//! ```

use std::collections::{BTreeMap, HashMap, HashSet};
use std::time::Duration;

use jiff::Timestamp;
use saturating_time::SaturatingTime;

const FIRST_PAUSE: Duration = Duration::from_millis(100);
const LONGEST_PAUSE: Duration = Duration::from_secs(10);

/// A pod that waits.
#[derive(Debug)]
struct Waiting<P> {
    uid: String,
    pod: P,
    /// The number of consecutive failed bindings.
    failures: u32,
    retry_at: Option<Timestamp>,
    /// Whether the pod's status reports already that the node is full.
    is_reported: bool,
}

/// What to do with the waiting pods.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Plan<P> {
    pub bind: Vec<(String, P)>,
    /// The pods without room, whose status does not report it yet.
    pub refuse: Vec<P>,
    pub wake_at: Option<Timestamp>,
}

/// The pods of a node with a limited capacity.
#[derive(Debug)]
pub struct Queue<P> {
    capacity: usize,
    /// In the order of their arrival.
    waiting: BTreeMap<u64, Waiting<P>>,
    arrivals: u64,
    /// Pods that are being bound, with the number of their failed bindings; true once the API has bound it.
    binding: HashMap<String, (u32, bool)>,
    bound: HashSet<String>,
    /// Whether all pods of the node were listed.
    listed: bool,
}

impl<P: Clone> Queue<P> {
    pub fn new(capacity: usize) -> Self {
        Self {
            capacity,
            waiting: BTreeMap::new(),
            arrivals: 0,
            binding: HashMap::new(),
            bound: HashSet::new(),
            listed: false,
        }
    }

    /// Adds a pod that waits to be bound. Returns whether it is new.
    pub fn wait(&mut self, uid: &str, pod: P) -> bool {
        if self.binding.contains_key(uid) || self.bound.contains(uid) {
            return false;
        }
        if let Some(known) = self.waiting.values_mut().find(|known| known.uid == uid) {
            known.pod = pod;
            return false;
        }
        self.put_back(uid, pod, 0, None);
        true
    }

    fn put_back(&mut self, uid: &str, pod: P, failures: u32, retry_at: Option<Timestamp>) {
        let waiting = Waiting {
            uid: uid.to_owned(),
            pod,
            failures,
            retry_at,
            is_reported: false,
        };
        self.waiting.insert(self.arrivals, waiting);
        self.arrivals += 1;
    }

    /// Removes a pod that was deleted or bound by another scheduler.
    pub fn leave(&mut self, uid: &str) {
        self.waiting.retain(|_, waiting| waiting.uid != uid);
    }

    /// Records that the API has bound a pod, or does not have it.
    pub fn settled(&mut self, uid: &str) {
        if let Some((_, settled)) = self.binding.get_mut(uid) {
            *settled = true;
        }
    }

    /// Records a failed binding.
    pub fn failed(&mut self, uid: &str, pod: P, now: Timestamp) {
        let Some((failures, _)) = self.binding.remove(uid) else {
            return;
        };
        let pause = FIRST_PAUSE
            .saturating_mul(1 << failures.min(16))
            .min(LONGEST_PAUSE);
        self.put_back(uid, pod, failures + 1, Some(now.later_by(pause)));
    }

    /// Records a pod of the node.
    pub fn arrived(&mut self, uid: String) {
        self.binding.remove(&uid);
        self.bound.insert(uid);
    }

    /// Records that a pod of the node was deleted or has ended.
    pub fn departed(&mut self, uid: &str) {
        self.binding.remove(uid);
        self.bound.remove(uid);
    }

    /// Starts a new list of the node's pods.
    pub fn relisting(&mut self) {
        self.bound.clear();
        self.listed = false;
    }

    /// Completes the list of the node's pods: a bound pod that it does not contain was deleted unnoticed.
    pub fn relisted(&mut self) {
        self.binding.retain(|_, (_, settled)| !*settled);
        self.listed = true;
    }

    /// What to do now. Nothing until the node's pods were listed.
    pub fn plan(&mut self, now: Timestamp) -> Plan<P> {
        let mut plan = Plan {
            bind: Vec::new(),
            refuse: Vec::new(),
            wake_at: None,
        };
        if !self.listed {
            return plan;
        }
        let mut room = self
            .capacity
            .saturating_sub(self.bound.len() + self.binding.len());
        let mut leaving = Vec::new();
        for (arrival, waiting) in &mut self.waiting {
            if let Some(at) = waiting.retry_at.filter(|at| *at > now) {
                plan.wake_at = Some(plan.wake_at.map_or(at, |earlier| earlier.min(at)));
            } else if room > 0 {
                room -= 1;
                leaving.push(*arrival);
            } else if !waiting.is_reported {
                waiting.is_reported = true;
                plan.refuse.push(waiting.pod.clone());
            }
        }
        for arrival in leaving {
            if let Some(Waiting {
                uid, pod, failures, ..
            }) = self.waiting.remove(&arrival)
            {
                self.binding.insert(uid.clone(), (failures, false));
                plan.bind.push((uid, pod));
            }
        }
        plan
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(milliseconds: i64) -> Timestamp {
        Timestamp::from_millisecond(1_800_000_000_000 + milliseconds).unwrap()
    }

    fn bound(plan: &Plan<&str>) -> Vec<String> {
        plan.bind.iter().map(|(uid, _)| uid.clone()).collect()
    }

    #[test]
    fn pods_are_bound_up_to_the_capacity_and_the_next_when_one_is_deleted() {
        let mut queue = Queue::new(2);
        queue.arrived("other".to_owned());
        queue.relisted();
        for uid in ["a", "b", "c"] {
            assert!(queue.wait(uid, uid));
            assert!(!queue.wait(uid, uid), "an update is no new pod");
        }
        let plan = queue.plan(at(0));
        assert_eq!(
            (bound(&plan), plan.refuse),
            (vec!["a".to_owned()], vec!["b", "c"])
        );
        assert_eq!(queue.plan(at(0)), Plan::default(), "each is reported once");
        queue.settled("a");
        queue.arrived("a".to_owned());
        assert_eq!(queue.plan(at(0)), Plan::default());
        queue.leave("b");
        queue.departed("other");
        assert_eq!(bound(&queue.plan(at(0))), ["c"]);
    }

    #[test]
    fn a_failed_binding_is_retried_with_exponential_back_off() {
        let mut queue = Queue::new(1);
        queue.relisted();
        queue.wait("a", "a");
        let mut now = 0;
        for pause in [100, 200, 400] {
            assert_eq!(bound(&queue.plan(at(now))), ["a"]);
            queue.failed("a", "a", at(now));
            assert_eq!(queue.plan(at(now)).wake_at, Some(at(now + pause)));
            now += pause;
        }
    }

    #[test]
    fn a_pod_that_was_deleted_unnoticed_makes_room() {
        let mut queue = Queue::new(1);
        queue.wait("a", "a");
        assert!(queue.plan(at(0)).bind.is_empty(), "the node may be full");
        queue.relisted();
        assert_eq!(bound(&queue.plan(at(0))), ["a"]);
        queue.settled("a");
        queue.wait("b", "b");
        assert!(queue.plan(at(0)).bind.is_empty(), "it is on its way");
        queue.relisting();
        assert!(queue.plan(at(0)).bind.is_empty(), "it may be listed yet");
        queue.relisted();
        assert_eq!(bound(&queue.plan(at(0))), ["b"]);
    }
}

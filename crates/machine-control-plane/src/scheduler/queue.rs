//! Which pods wait to be bound, which may be bound now, and when to try again. Pure.
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
    /// Bindings that failed in a row.
    failures: u32,
    retry_at: Option<Timestamp>,
    /// It was told that the node is full.
    told: bool,
}

/// What to do about the pods that wait.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Plan<P> {
    pub bind: Vec<(String, P)>,
    /// Those that there is no room for, and who were not told so before.
    pub refuse: Vec<P>,
    pub wake_at: Option<Timestamp>,
}

/// The pods of a node that takes so many and no more.
#[derive(Debug)]
pub struct Queue<P> {
    capacity: usize,
    /// In the order in which they came.
    waiting: BTreeMap<u64, Waiting<P>>,
    arrivals: u64,
    /// Pods on their way to the node, and how often each was refused; true once the API has bound it.
    binding: HashMap<String, (u32, bool)>,
    bound: HashSet<String>,
    /// Whether all that is on the node is known.
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

    /// Takes in a pod that waits to be bound; true if it is a new one.
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
            told: false,
        };
        self.waiting.insert(self.arrivals, waiting);
        self.arrivals += 1;
    }

    /// A pod no longer waits: it is gone, or somebody has bound it.
    pub fn leave(&mut self, uid: &str) {
        self.waiting.retain(|_, waiting| waiting.uid != uid);
    }

    /// The API has bound a pod, or has never heard of it.
    pub fn settled(&mut self, uid: &str) {
        if let Some((_, settled)) = self.binding.get_mut(uid) {
            *settled = true;
        }
    }

    /// A pod could not be bound.
    pub fn failed(&mut self, uid: &str, pod: P, now: Timestamp) {
        let Some((failures, _)) = self.binding.remove(uid) else {
            return;
        };
        let pause = FIRST_PAUSE
            .saturating_mul(1 << failures.min(16))
            .min(LONGEST_PAUSE);
        self.put_back(uid, pod, failures + 1, Some(now.later_by(pause)));
    }

    /// A pod was seen on the node.
    pub fn arrived(&mut self, uid: String) {
        self.binding.remove(&uid);
        self.bound.insert(uid);
    }

    /// A pod was seen to have gone from the node, or to have ended.
    pub fn departed(&mut self, uid: &str) {
        self.binding.remove(uid);
        self.bound.remove(uid);
    }

    /// What is on the node is about to be listed anew.
    pub fn relisting(&mut self) {
        self.bound.clear();
        self.listed = false;
    }

    /// All that is on the node was listed: what was bound and is not there has gone unseen.
    pub fn relisted(&mut self) {
        self.binding.retain(|_, (_, settled)| !*settled);
        self.listed = true;
    }

    /// What to do now: nothing, until it is known what is on the node.
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
            } else if !waiting.told {
                waiting.told = true;
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
    fn no_more_pods_are_bound_than_the_node_takes_and_the_next_follows_when_one_goes() {
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
        assert_eq!(queue.plan(at(0)), Plan::default(), "each is told once");
        queue.settled("a");
        queue.arrived("a".to_owned());
        assert_eq!(queue.plan(at(0)), Plan::default());
        queue.leave("b");
        queue.departed("other");
        assert_eq!(bound(&queue.plan(at(0))), ["c"]);
    }

    #[test]
    fn a_binding_that_fails_is_tried_again_after_a_pause_that_doubles() {
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
    fn a_pod_that_went_unseen_makes_room() {
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

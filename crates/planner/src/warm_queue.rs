//! The warm queue: which unclaimed sandboxes a claim may try next, and in what order.
//!
//! It is a hint, kept in memory and refilled by the watch after a restart. Whether a claim really gets a sandbox is decided by
//! the optimistic lock of the write that transfers it; the queue only keeps claims from fighting over the same one.
//!
//! Sandboxes are kept per namespace and template hash. Within that, a Ready one comes before one that is coming up, the
//! current revision before an older one, and among equals the one that waited longest.
//!
//! ```text
//!            observe(adoptable)             take()
//!   absent ───────────────────▶ waiting ───────────────▶ taken
//!     ▲                            ▲  │                    │ │
//!     │      observe(withdrawn)    │  │                    │ │ observe(withdrawn): the transfer, or a deletion, was seen
//!     └────────────────────────────┼──┘      release()     │ │
//!     ▲                            └───────────────────────┘ │
//!     └──────────────────────────────────────────────────────┘
//! ```
//!
//! A taken sandbox stays taken, whatever its status in the watch, until it is released or seen to be no longer
//! adoptable: events from before the transfer must not offer it to a second claim.

use std::collections::{HashMap, VecDeque};
use std::sync::Arc;

use api::Sandbox;

/// A sandbox's place in the API.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct SandboxKey {
    pub namespace: String,
    pub name: String,
}

/// A sandbox that may be adopted, as the watch shows it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Candidate {
    pub key: SandboxKey,
    pub uid: String,
    pub template_hash: String,
    pub pool_hash: String,
    /// The hash of the template content it was made from.
    pub revision: String,
    pub ready: bool,
}

/// What a claim asks the queue for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Request {
    pub namespace: String,
    pub template_hash: String,
    /// Only from this pool, if set.
    pub pool_hash: Option<String>,
}

/// A sandbox that was taken from the queue for one claim. Dropping the reservation puts it back.
pub trait Reservation: Send {
    fn sandbox(&self) -> &Arc<Sandbox>;

    /// The sandbox is the claim's now. The queue drops it when the cache shows so.
    fn keep(self);
}

/// How many sandboxes the queue holds, for metrics and tests.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Depth {
    pub waiting: usize,
    pub taken: usize,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct PartitionKey {
    namespace: String,
    template_hash: String,
}

/// Sandboxes with equal keys are handed out first in, first out.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct LaneKey {
    ready: bool,
    revision: String,
    pool_hash: String,
}

#[derive(Debug)]
struct Entry {
    candidate: Candidate,
    state: State,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    /// Waiting under this ticket. A ticket in a lane that is not its entry's is void.
    Waiting(u64),
    Taken,
}

/// First in, first out. Removal leaves a void ticket behind, which is skipped later: constant time, amortised.
#[derive(Debug, Default)]
struct Lane {
    tickets: VecDeque<(u64, SandboxKey)>,
    live: usize,
}

#[derive(Debug, Default)]
struct Partition {
    lanes: HashMap<LaneKey, Lane>,
    current_revision: Option<String>,
}

/// See the module's description.
#[derive(Debug, Default)]
pub struct WarmQueue {
    entries: HashMap<SandboxKey, Entry>,
    partitions: HashMap<PartitionKey, Partition>,
    next_ticket: u64,
}

impl WarmQueue {
    /// Adds or updates an adoptable sandbox from the watch. Idempotent; a change of class moves it to the end of its new
    /// class.
    pub fn observe(&mut self, candidate: Candidate) {
        if let Some(entry) = self.entries.get_mut(&candidate.key) {
            if entry.candidate == candidate {
                return;
            }
            if entry.state == State::Taken && entry.candidate.uid == candidate.uid {
                entry.candidate = candidate;
                return;
            }
            let key = candidate.key.clone();
            self.withdraw(&key);
        }
        self.enqueue(candidate);
    }

    /// Forgets a sandbox that is gone or no longer adoptable.
    pub fn withdraw(&mut self, key: &SandboxKey) {
        if let Some(entry) = self.entries.remove(key)
            && entry.state != State::Taken
        {
            self.void_ticket(&entry.candidate);
        }
    }

    /// The best sandbox for `request`, which is then taken.
    pub fn take(&mut self, request: &Request) -> Option<Candidate> {
        let partition_key = PartitionKey {
            namespace: request.namespace.clone(),
            template_hash: request.template_hash.clone(),
        };
        let partition = self.partitions.get_mut(&partition_key)?;
        let entries = &self.entries;
        let current = partition.current_revision.clone();
        let best = partition
            .lanes
            .iter_mut()
            .filter(|(lane_key, _)| {
                request
                    .pool_hash
                    .as_ref()
                    .is_none_or(|pool| *pool == lane_key.pool_hash)
            })
            .filter_map(|(lane_key, lane)| {
                let ticket = lane.front(entries)?;
                let outdated = current
                    .as_ref()
                    .is_some_and(|revision| *revision != lane_key.revision);
                Some(((!lane_key.ready, outdated, ticket), lane_key.clone()))
            })
            .min_by_key(|(rank, _)| *rank);
        let (_, lane_key) = best?;
        let (_, key) = partition.lanes.get_mut(&lane_key)?.tickets.pop_front()?;
        self.leave_lane(&partition_key, &lane_key);
        let entry = self.entries.get_mut(&key)?;
        entry.state = State::Taken;
        Some(entry.candidate.clone())
    }

    /// Takes this very sandbox, so that no claim gets it. False if it is not waiting.
    pub fn take_exactly(&mut self, key: &SandboxKey) -> bool {
        let Some(entry) = self.entries.get_mut(key) else {
            return false;
        };
        if entry.state == State::Taken {
            return false;
        }
        entry.state = State::Taken;
        let candidate = entry.candidate.clone();
        self.void_ticket(&candidate);
        true
    }

    /// Gives a taken sandbox back, to the end of its class.
    pub fn release(&mut self, key: &SandboxKey) {
        if self.is_taken(key)
            && let Some(entry) = self.entries.remove(key)
        {
            self.enqueue(entry.candidate);
        }
    }

    /// Whether a claim is adopting this sandbox, or a pool is deleting it.
    pub fn is_taken(&self, key: &SandboxKey) -> bool {
        self.entries
            .get(key)
            .is_some_and(|entry| entry.state == State::Taken)
    }

    /// Sets the current revision of a template; sandboxes of other revisions come later.
    pub fn set_current_revision(&mut self, namespace: &str, template_hash: &str, revision: &str) {
        let key = PartitionKey {
            namespace: namespace.to_owned(),
            template_hash: template_hash.to_owned(),
        };
        self.partitions.entry(key).or_default().current_revision = Some(revision.to_owned());
    }

    /// Forgets a template's revision; with its last sandbox the rest goes too.
    pub fn forget_template(&mut self, namespace: &str, template_hash: &str) {
        let key = PartitionKey {
            namespace: namespace.to_owned(),
            template_hash: template_hash.to_owned(),
        };
        if let Some(partition) = self.partitions.get_mut(&key) {
            partition.current_revision = None;
            if partition.lanes.is_empty() {
                self.partitions.remove(&key);
            }
        }
    }

    /// Forgets all sandboxes of a pool that is gone.
    pub fn forget_pool(&mut self, namespace: &str, pool_hash: &str) {
        let keys: Vec<SandboxKey> = self
            .entries
            .values()
            .map(|entry| &entry.candidate)
            .filter(|candidate| {
                candidate.key.namespace == namespace && candidate.pool_hash == pool_hash
            })
            .map(|candidate| candidate.key.clone())
            .collect();
        for key in keys {
            self.withdraw(&key);
        }
    }

    pub fn depth(&self) -> Depth {
        let taken = self
            .entries
            .values()
            .filter(|entry| entry.state == State::Taken)
            .count();
        Depth {
            waiting: self.entries.len() - taken,
            taken,
        }
    }

    /// Whether nothing at all is remembered.
    pub fn is_empty(&self) -> bool {
        self.entries.is_empty() && self.partitions.is_empty()
    }

    fn enqueue(&mut self, candidate: Candidate) {
        let ticket = self.next_ticket;
        self.next_ticket += 1;
        let lane = self
            .partitions
            .entry(partition_of(&candidate))
            .or_default()
            .lanes
            .entry(lane_of(&candidate))
            .or_default();
        lane.tickets.push_back((ticket, candidate.key.clone()));
        lane.live += 1;
        self.entries.insert(
            candidate.key.clone(),
            Entry {
                candidate,
                state: State::Waiting(ticket),
            },
        );
    }

    /// Accounts for a ticket that has become void.
    fn void_ticket(&mut self, candidate: &Candidate) {
        let partition_key = partition_of(candidate);
        let lane_key = lane_of(candidate);
        self.leave_lane(&partition_key, &lane_key);
        let entries = &self.entries;
        if let Some(lane) = self
            .partitions
            .get_mut(&partition_key)
            .and_then(|partition| partition.lanes.get_mut(&lane_key))
        {
            lane.compact(entries);
        }
    }

    fn leave_lane(&mut self, partition_key: &PartitionKey, lane_key: &LaneKey) {
        let Some(partition) = self.partitions.get_mut(partition_key) else {
            return;
        };
        if let Some(lane) = partition.lanes.get_mut(lane_key) {
            lane.live -= 1;
            if lane.live == 0 {
                partition.lanes.remove(lane_key);
            }
        }
        if partition.lanes.is_empty() && partition.current_revision.is_none() {
            self.partitions.remove(partition_key);
        }
    }
}

impl Lane {
    /// The ticket of the first live entry; void ones before it are dropped.
    fn front(&mut self, entries: &HashMap<SandboxKey, Entry>) -> Option<u64> {
        while let Some((ticket, key)) = self.tickets.front() {
            if is_live(entries, *ticket, key) {
                return Some(*ticket);
            }
            self.tickets.pop_front();
        }
        None
    }

    /// Keeps void tickets a bounded fraction of all.
    fn compact(&mut self, entries: &HashMap<SandboxKey, Entry>) {
        const SLACK: usize = 32;
        if self.tickets.len() > 2 * self.live + SLACK {
            self.tickets
                .retain(|(ticket, key)| is_live(entries, *ticket, key));
        }
    }
}

fn is_live(entries: &HashMap<SandboxKey, Entry>, ticket: u64, key: &SandboxKey) -> bool {
    entries
        .get(key)
        .is_some_and(|entry| entry.state == State::Waiting(ticket))
}

fn partition_of(candidate: &Candidate) -> PartitionKey {
    PartitionKey {
        namespace: candidate.key.namespace.clone(),
        template_hash: candidate.template_hash.clone(),
    }
}

fn lane_of(candidate: &Candidate) -> LaneKey {
    LaneKey {
        ready: candidate.ready,
        revision: candidate.revision.clone(),
        pool_hash: candidate.pool_hash.clone(),
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn key(name: &str) -> SandboxKey {
        SandboxKey {
            namespace: "ns".into(),
            name: name.into(),
        }
    }

    fn candidate(name: &str) -> Candidate {
        Candidate {
            key: key(name),
            uid: format!("uid-{name}"),
            template_hash: "t".into(),
            pool_hash: "p".into(),
            revision: "r1".into(),
            ready: true,
        }
    }

    fn any_pool() -> Request {
        Request {
            namespace: "ns".into(),
            template_hash: "t".into(),
            pool_hash: None,
        }
    }

    fn drain(queue: &mut WarmQueue, request: &Request) -> Vec<String> {
        std::iter::from_fn(|| queue.take(request).map(|taken| taken.key.name)).collect()
    }

    #[test]
    fn ready_comes_before_unready_and_current_before_older() {
        let mut queue = WarmQueue::default();
        queue.set_current_revision("ns", "t", "r2");
        for (name, ready, revision) in [
            ("old-unready", false, "r1"),
            ("new-unready", false, "r2"),
            ("old-ready", true, "r1"),
            ("new-ready-1", true, "r2"),
            ("new-ready-2", true, "r2"),
        ] {
            queue.observe(Candidate {
                ready,
                revision: revision.into(),
                ..candidate(name)
            });
        }
        assert_eq!(
            drain(&mut queue, &any_pool()),
            [
                "new-ready-1",
                "new-ready-2",
                "old-ready",
                "new-unready",
                "old-unready"
            ]
        );
    }

    #[test]
    fn equals_are_served_first_in_first_out_across_pools() {
        let mut queue = WarmQueue::default();
        for (name, pool) in [("a", "p"), ("b", "q"), ("c", "p"), ("d", "r")] {
            queue.observe(Candidate {
                pool_hash: pool.into(),
                ..candidate(name)
            });
        }
        assert_eq!(drain(&mut queue, &any_pool()), ["a", "b", "c", "d"]);
    }

    #[test]
    fn a_claim_for_one_pool_leaves_the_others_in_place() {
        let mut queue = WarmQueue::default();
        for (name, pool) in [("a", "p"), ("b", "q"), ("c", "p")] {
            queue.observe(Candidate {
                pool_hash: pool.into(),
                ..candidate(name)
            });
        }
        let only_q = Request {
            pool_hash: Some("q".into()),
            ..any_pool()
        };
        assert_eq!(drain(&mut queue, &only_q), ["b"]);
        assert_eq!(drain(&mut queue, &any_pool()), ["a", "c"]);
    }

    #[test]
    fn namespaces_and_templates_do_not_mix() {
        let mut queue = WarmQueue::default();
        queue.observe(candidate("a"));
        for request in [
            Request {
                namespace: "other".into(),
                ..any_pool()
            },
            Request {
                template_hash: "other".into(),
                ..any_pool()
            },
        ] {
            assert_eq!(queue.take(&request), None);
        }
        assert_eq!(drain(&mut queue, &any_pool()), ["a"]);
    }

    #[test]
    fn seeing_a_sandbox_twice_queues_it_once() {
        let mut queue = WarmQueue::default();
        queue.observe(candidate("a"));
        queue.observe(candidate("a"));
        assert_eq!(drain(&mut queue, &any_pool()), ["a"]);
    }

    #[test]
    fn a_taken_sandbox_is_not_offered_again_however_late_its_events_are() {
        let mut queue = WarmQueue::default();
        queue.observe(candidate("a"));
        assert!(queue.take(&any_pool()).is_some());
        queue.observe(Candidate {
            ready: false,
            ..candidate("a")
        });
        queue.observe(candidate("a"));
        assert_eq!(queue.take(&any_pool()), None);
        assert!(queue.is_taken(&key("a")));

        queue.withdraw(&key("a"));
        assert!(queue.is_empty());
    }

    #[test]
    fn a_released_sandbox_is_offered_again_with_what_was_last_seen_of_it() {
        let mut queue = WarmQueue::default();
        queue.observe(candidate("a"));
        queue.observe(candidate("b"));
        let taken = queue.take(&any_pool()).unwrap();
        queue.observe(Candidate {
            ready: false,
            ..candidate("a")
        });
        queue.release(&taken.key);
        assert_eq!(drain(&mut queue, &any_pool()), ["b", "a"]);
    }

    #[test]
    fn a_deleted_sandbox_leaves_no_ghost() {
        let mut queue = WarmQueue::default();
        queue.observe(candidate("a"));
        queue.observe(candidate("b"));
        queue.withdraw(&key("a"));
        assert_eq!(drain(&mut queue, &any_pool()), ["b"]);
    }

    #[test]
    fn a_namesake_of_a_taken_sandbox_is_a_new_one() {
        let mut queue = WarmQueue::default();
        queue.observe(candidate("a"));
        assert!(queue.take(&any_pool()).is_some());
        queue.observe(Candidate {
            uid: "another".into(),
            ..candidate("a")
        });
        assert_eq!(queue.take(&any_pool()).unwrap().uid, "another");
    }

    #[test]
    fn the_last_pool_takes_its_queue_with_it() {
        let mut queue = WarmQueue::default();
        queue.set_current_revision("ns", "t", "r1");
        queue.observe(candidate("a"));
        queue.observe(candidate("b"));
        queue.forget_pool("ns", "p");
        queue.forget_template("ns", "t");
        assert!(queue.is_empty());
    }

    #[test]
    fn a_sandbox_set_aside_for_deletion_is_not_offered() {
        let mut queue = WarmQueue::default();
        queue.observe(candidate("a"));
        assert!(queue.take_exactly(&key("a")));
        assert!(!queue.take_exactly(&key("a")));
        assert_eq!(queue.take(&any_pool()), None);
        queue.release(&key("a"));
        assert_eq!(drain(&mut queue, &any_pool()), ["a"]);
    }

    #[test]
    fn void_tickets_stay_few_however_often_a_sandbox_changes_class() {
        let mut queue = WarmQueue::default();
        for _ in 0..10_000 {
            for ready in [true, false] {
                queue.observe(Candidate {
                    ready,
                    ..candidate("a")
                });
            }
            queue.observe(candidate("b"));
        }
        let tickets: usize = queue
            .partitions
            .values()
            .flat_map(|partition| partition.lanes.values())
            .map(|lane| lane.tickets.len())
            .sum();
        assert!(tickets < 200, "{tickets}");
    }

    #[derive(Clone, Debug)]
    enum Operation {
        Observe(u8, bool, bool),
        Withdraw(u8),
        Take,
        TakeExactly(u8),
        Release(u8),
    }

    fn operation() -> impl Strategy<Value = Operation> {
        prop_oneof![
            4 => (0..8u8, any::<bool>(), any::<bool>())
                .prop_map(|(name, ready, current)| Operation::Observe(name, ready, current)),
            2 => (0..8u8).prop_map(Operation::Withdraw),
            4 => Just(Operation::Take),
            1 => (0..8u8).prop_map(Operation::TakeExactly),
            2 => (0..8u8).prop_map(Operation::Release),
        ]
    }

    proptest! {
        #[test]
        fn nothing_is_offered_twice_and_nothing_is_left_behind(operations in prop::collection::vec(operation(), 0..200)) {
            let mut queue = WarmQueue::default();
            let mut known = std::collections::BTreeMap::<String, bool>::new();
            for operation in operations {
                match operation {
                    Operation::Observe(name, ready, current) => {
                        let name = name.to_string();
                        let revision = if current { "r1" } else { "r0" };
                        queue.observe(Candidate { ready, revision: revision.into(), ..candidate(&name) });
                        known.entry(name).or_insert(false);
                    }
                    Operation::Withdraw(name) => {
                        queue.withdraw(&key(&name.to_string()));
                        known.remove(&name.to_string());
                    }
                    Operation::Take => match queue.take(&any_pool()) {
                        Some(taken) => {
                            let was_taken = known.insert(taken.key.name.clone(), true);
                            prop_assert_eq!(was_taken, Some(false), "{} was offered twice", taken.key.name);
                        }
                        None => prop_assert!(known.values().all(|taken| *taken)),
                    },
                    Operation::TakeExactly(name) => {
                        let name = name.to_string();
                        let expected = known.get(&name) == Some(&false);
                        prop_assert_eq!(queue.take_exactly(&key(&name)), expected);
                        if expected {
                            known.insert(name, true);
                        }
                    }
                    Operation::Release(name) => {
                        queue.release(&key(&name.to_string()));
                        if let Some(taken) = known.get_mut(&name.to_string()) {
                            *taken = false;
                        }
                    }
                }
                let depth = queue.depth();
                prop_assert_eq!(depth.taken, known.values().filter(|taken| **taken).count());
                prop_assert_eq!(depth.waiting + depth.taken, known.len());
            }
            for name in known.keys() {
                queue.withdraw(&key(name));
            }
            prop_assert!(queue.is_empty());
        }
    }
}

//! The sandboxes that the router knows: a map that requests read without a lock and the watch writes. An event updates
//! one entry, regardless of the size of the map.
//!
//! ```text
//!             addresses            pod ended
//! NotReady ──────────────► Routable ────────► NotReady      and from anywhere: Suspended, Finished, Unclaimed, gone
//! ```
//!
//! Independent of HTTP and Kubernetes; `watch` translates.

use std::collections::HashMap;
use std::net::IpAddr;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use telemetry::TraceContext;
use tokio::sync::Notify;

use crate::claims::{BoundClaim, ClaimOwner, Claims};
use crate::identify::SandboxKey;
use crate::upstream::Upstream;

/// How many addresses of ended pods are remembered for a sandbox. Its status names the address of the last pod, or lags behind by
/// one; a sandbox that is suspended and resumed for years has had thousands.
const MAX_ENDED_ADDRESSES: usize = 8;

/// The state of a sandbox in the Kubernetes API, as far as routing needs it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Observed {
    pub uid: String,
    pub condition: Condition,
    /// The claim that owns the sandbox.
    pub claim: Option<ClaimOwner>,
    /// The trace context in the sandbox's annotation, if traces are exported.
    pub trace: Option<String>,
}

/// A sandbox's state for routing.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Condition {
    /// The sandbox runs, and its pod has these addresses.
    At(Vec<IpAddr>),
    Suspended(Suspended),
    /// The sandbox has no address, for this reason.
    NotReady(String),
    /// The sandbox finished, for this reason.
    Finished(String),
    /// The sandbox waits in a pool for a claim, and is not routable.
    Unclaimed,
}

/// How a sandbox is suspended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Suspended {
    /// Its pod is gone, or going.
    Stopped,
    /// Its pod exists, and all of its processes are frozen.
    Frozen,
}

/// The result of a lookup.
#[derive(Clone, Debug)]
pub enum Lookup {
    Routable(Arc<Upstream>),
    Suspended(Suspended),
    NotReady(String),
    Finished(String),
    Unclaimed,
    Unknown,
}

#[derive(Debug)]
struct Record {
    observed: Observed,
    upstream: Option<Arc<Upstream>>,
    /// Addresses of ended pods, which the sandbox's own status may still contain.
    ended: Vec<IpAddr>,
}

/// All known sandboxes.
#[derive(Debug, Default)]
pub struct Registry {
    records: papaya::HashMap<String, Arc<Record>>,
    claims: Claims,
    /// Serializes updates, which come from two watches and read before they write.
    updating: Mutex<()>,
    waiting: Mutex<HashMap<String, Waiting>>,
    waiting_count: AtomicUsize,
    synced: AtomicBool,
    in_step: AtomicBool,
}

#[derive(Debug, Default)]
struct Waiting {
    notify: Arc<Notify>,
    count: usize,
}

impl Registry {
    /// Adds a sandbox at fixed addresses, for a router that runs without a watch.
    pub fn insert(&self, namespace: &str, name: &str, addresses: Vec<IpAddr>) {
        let observed = Observed {
            uid: String::new(),
            condition: Condition::At(addresses),
            claim: None,
            trace: None,
        };
        self.observe(&SandboxKey::new(namespace, name), observed);
    }

    /// The number of known sandboxes.
    pub fn len(&self) -> usize {
        self.records.len()
    }

    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Whether a complete list has been received, so that a sandbox that is not here does not exist.
    pub fn is_synced(&self) -> bool {
        self.synced.load(Ordering::Acquire)
    }

    /// Whether changes reach the registry: false before the first complete list, and while the watch is broken.
    pub fn is_in_step(&self) -> bool {
        self.in_step.load(Ordering::Acquire)
    }

    /// Records that a complete list has been received.
    pub(crate) fn set_synced(&self) {
        self.synced.store(true, Ordering::Release);
    }

    pub(crate) fn set_in_step(&self, in_step: bool) {
        self.in_step.store(in_step, Ordering::Release);
    }

    pub(crate) fn lookup(&self, key: &SandboxKey) -> Lookup {
        let records = self.records.pin();
        let Some(record) = records.get(key.as_str()) else {
            return Lookup::Unknown;
        };
        match (&record.upstream, &record.observed.condition) {
            (Some(upstream), _) => Lookup::Routable(Arc::clone(upstream)),
            (None, Condition::At(_)) => Lookup::NotReady("Its pod has ended".into()),
            (None, Condition::Suspended(how)) => Lookup::Suspended(*how),
            (None, Condition::NotReady(reason)) => Lookup::NotReady(reason.clone()),
            (None, Condition::Finished(reason)) => Lookup::Finished(reason.clone()),
            (None, Condition::Unclaimed) => Lookup::Unclaimed,
        }
    }

    /// The sandbox that a name refers to: the sandbox of that name, or else the sandbox that the claim of that name is bound to and owns.
    pub(crate) fn named(&self, key: &SandboxKey) -> Option<SandboxKey> {
        let records = self.records.pin();
        if records.contains_key(key.as_str()) {
            return Some(key.clone());
        }
        self.claims.sandbox_of(key, |sandbox| {
            let record = records.get(sandbox.as_str())?;
            record.observed.claim.clone()
        })
    }

    pub(crate) fn knows(&self, key: &SandboxKey) -> bool {
        self.records.pin().contains_key(key.as_str())
    }

    /// Records the sandbox that a claim is bound to, or that it is not bound yet.
    pub(crate) fn observe_claim(&self, key: &SandboxKey, bound: Option<BoundClaim>) {
        if self.claims.set(key.as_str(), bound) {
            self.wake(key.as_str());
        }
    }

    /// Removes every claim that a complete list did not contain.
    pub(crate) fn keep_only_claims(&self, listed: &std::collections::HashSet<String>) {
        self.claims.keep_only(listed);
    }

    /// The trace context that a sandbox carries.
    pub(crate) fn trace_of(&self, key: &SandboxKey) -> Option<TraceContext> {
        let records = self.records.pin();
        TraceContext::from_annotation(records.get(key.as_str())?.observed.trace.as_deref()?)
    }

    pub(crate) fn observe(&self, key: &SandboxKey, observed: Observed) {
        let _updating = lock(&self.updating);
        let previous = self.records.pin().get(key.as_str()).cloned();
        if previous
            .as_ref()
            .is_some_and(|previous| previous.observed == observed)
        {
            return;
        }
        let same_sandbox = previous
            .as_ref()
            .filter(|previous| previous.observed.uid == observed.uid);
        let ended = same_sandbox
            .map(|previous| previous.ended.clone())
            .unwrap_or_default();
        self.store(key, previous.as_deref(), observed, ended);
    }

    /// Records that a sandbox's pod with these addresses ended: the addresses are removed at once, before the status changes.
    pub(crate) fn pod_ended(&self, key: &SandboxKey, addresses: &[IpAddr]) {
        self.with_pod(key, addresses, |ended| {
            ended.retain(|address| !addresses.contains(address));
            ended.extend_from_slice(addresses);
            ended.drain(..ended.len().saturating_sub(MAX_ENDED_ADDRESSES));
        });
    }

    /// Records that a sandbox's pod with these addresses runs; a new pod may have an old address.
    pub(crate) fn pod_runs(&self, key: &SandboxKey, addresses: &[IpAddr]) {
        self.with_pod(key, addresses, |ended| {
            ended.retain(|address| !addresses.contains(address));
        });
    }

    fn with_pod(
        &self,
        key: &SandboxKey,
        addresses: &[IpAddr],
        change: impl FnOnce(&mut Vec<IpAddr>),
    ) {
        let _updating = lock(&self.updating);
        let Some(previous) = self.records.pin().get(key.as_str()).cloned() else {
            return;
        };
        let mut ended = previous.ended.clone();
        change(&mut ended);
        if ended != previous.ended && !addresses.is_empty() {
            self.store(key, Some(&previous), previous.observed.clone(), ended);
        }
    }

    pub(crate) fn forget(&self, key: &str) {
        let _updating = lock(&self.updating);
        if let Some(upstream) = self
            .records
            .pin()
            .remove(key)
            .and_then(|record| record.upstream.clone())
        {
            upstream.retire();
        }
        self.wake(key);
    }

    /// Removes every sandbox that a complete list did not contain.
    pub(crate) fn keep_only(&self, listed: &std::collections::HashSet<String>) {
        let gone: Vec<String> = self
            .records
            .pin()
            .keys()
            .filter(|key| !listed.contains(*key))
            .cloned()
            .collect();
        for key in gone {
            self.forget(&key);
        }
    }

    /// Closes connections that have been idle for too long.
    pub(crate) fn close_idle(&self, now: tokio::time::Instant) {
        for record in self.records.pin().values() {
            if let Some(upstream) = &record.upstream {
                upstream.close_idle(now);
            }
        }
    }

    /// A waiter that is woken when the sandbox changes.
    pub(crate) fn wait_for<'r>(&'r self, key: &'r SandboxKey) -> Waiter<'r> {
        let mut waiting = lock(&self.waiting);
        let entry = waiting.entry(key.as_str().to_owned()).or_default();
        entry.count += 1;
        self.waiting_count.fetch_add(1, Ordering::AcqRel);
        Waiter {
            registry: self,
            key,
            notify: Arc::clone(&entry.notify),
        }
    }

    fn store(
        &self,
        key: &SandboxKey,
        previous: Option<&Record>,
        observed: Observed,
        ended: Vec<IpAddr>,
    ) {
        let old = previous.and_then(|previous| previous.upstream.clone());
        let upstream = match &observed.condition {
            Condition::At(addresses) => {
                let usable: Vec<IpAddr> = addresses
                    .iter()
                    .filter(|address| !ended.contains(address))
                    .copied()
                    .collect();
                let same_sandbox =
                    previous.is_some_and(|previous| previous.observed.uid == observed.uid);
                match &old {
                    _ if usable.is_empty() => None,
                    // Connections to an address are reused only for the sandbox they were opened for.
                    Some(old) if same_sandbox && old.addresses() == usable => Some(Arc::clone(old)),
                    _ => Some(Arc::new(Upstream::new(usable))),
                }
            }
            _ => None,
        };
        if let Some(old) = old
            && upstream
                .as_ref()
                .is_none_or(|upstream| !Arc::ptr_eq(upstream, &old))
        {
            old.retire();
        }
        let record = Record {
            observed,
            upstream,
            ended,
        };
        let claim = record.observed.claim.as_ref();
        let claim = claim.map(|claim| SandboxKey::new(key.namespace(), &claim.name));
        self.records
            .pin()
            .insert(key.as_str().to_owned(), Arc::new(record));
        self.wake(key.as_str());
        if let Some(claim) = claim {
            self.wake(claim.as_str());
        }
    }

    fn wake(&self, key: &str) {
        if self.waiting_count.load(Ordering::Acquire) > 0
            && let Some(waiting) = lock(&self.waiting).get(key)
        {
            waiting.notify.notify_waiters();
        }
    }
}

/// Waits for changes of one sandbox; removed from the registry on drop.
#[derive(Debug)]
pub(crate) struct Waiter<'r> {
    registry: &'r Registry,
    key: &'r SandboxKey,
    notify: Arc<Notify>,
}

impl Waiter<'_> {
    /// Completes at the next change after this call. Look the sandbox up again between this call and awaiting it.
    pub fn changed(&self) -> std::pin::Pin<Box<tokio::sync::futures::Notified<'_>>> {
        let mut notified = Box::pin(self.notify.notified());
        notified.as_mut().enable();
        notified
    }
}

impl Drop for Waiter<'_> {
    fn drop(&mut self) {
        self.registry.waiting_count.fetch_sub(1, Ordering::AcqRel);
        let mut waiting = lock(&self.registry.waiting);
        if let Some(entry) = waiting.get_mut(self.key.as_str()) {
            entry.count -= 1;
            if entry.count == 0 {
                waiting.remove(self.key.as_str());
            }
        }
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn key() -> SandboxKey {
        SandboxKey::new("default", "abc")
    }

    fn at(uid: &str, address: &str) -> Observed {
        Observed {
            uid: uid.into(),
            condition: Condition::At(vec![address.parse().unwrap()]),
            claim: None,
            trace: None,
        }
    }

    fn upstream(registry: &Registry) -> Arc<Upstream> {
        match registry.lookup(&key()) {
            Lookup::Routable(upstream) => upstream,
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn connections_are_reused_only_for_the_same_sandbox_at_the_same_address() {
        let registry = Registry::default();
        registry.observe(&key(), at("1", "10.0.0.1"));
        let first = upstream(&registry);
        registry.observe(&key(), at("1", "10.0.0.1"));
        assert!(Arc::ptr_eq(&first, &upstream(&registry)));
        registry.observe(&key(), at("1", "10.0.0.2"));
        assert!(first.is_retired());
        let second = upstream(&registry);
        registry.observe(&key(), at("2", "10.0.0.2"));
        assert!(second.is_retired(), "another sandbox got the address");
        registry.forget("default/abc");
        assert!(matches!(registry.lookup(&key()), Lookup::Unknown));
    }

    #[test]
    fn a_dead_pods_address_is_dropped_until_a_pod_has_it_again() {
        let registry = Registry::default();
        let address = ["10.0.0.1".parse().unwrap()];
        registry.observe(&key(), at("1", "10.0.0.1"));
        let first = upstream(&registry);
        registry.pod_ended(&key(), &address);
        assert!(first.is_retired());
        assert!(matches!(registry.lookup(&key()), Lookup::NotReady(_)));
        registry.observe(
            &key(),
            Observed {
                uid: "1".into(),
                condition: Condition::NotReady("starting".into()),
                claim: None,
                trace: None,
            },
        );
        registry.observe(&key(), at("1", "10.0.0.1"));
        assert!(
            matches!(registry.lookup(&key()), Lookup::NotReady(_)),
            "the status is older than the pod's end"
        );
        registry.pod_runs(&key(), &address);
        assert!(!upstream(&registry).is_retired());
    }

    #[test]
    fn only_the_last_addresses_of_ended_pods_are_remembered() {
        let registry = Registry::default();
        registry.observe(&key(), at("1", "10.0.0.1"));
        let ended = || {
            registry
                .records
                .pin()
                .get("default/abc")
                .unwrap()
                .ended
                .clone()
        };
        for round in 0..100_u8 {
            registry.pod_ended(&key(), &[[10, 0, 0, round].into()]);
            registry.pod_ended(&key(), &[[10, 0, 0, round].into()]);
        }
        let last: Vec<IpAddr> = (92..100_u8).map(|round| [10, 0, 0, round].into()).collect();
        assert_eq!(ended(), last);
        registry.pod_ended(&key(), &last[..2]);
        assert_eq!(ended().len(), last.len(), "an address is remembered once");
        assert_eq!(
            ended()[6..],
            last[..2],
            "ordered by the end of its last pod"
        );
    }

    #[test]
    fn a_complete_list_removes_the_rest() {
        let registry = Registry::default();
        registry.insert("default", "abc", vec!["10.0.0.1".parse().unwrap()]);
        registry.insert("default", "other", vec!["10.0.0.2".parse().unwrap()]);
        registry.keep_only(&std::collections::HashSet::from([
            "default/other".to_owned()
        ]));
        assert!(matches!(registry.lookup(&key()), Lookup::Unknown));
        assert_eq!(registry.len(), 1);
    }

    #[tokio::test]
    async fn waiters_are_woken_and_leave_no_entry() {
        let registry = Registry::default();
        let sandbox = key();
        let ticket = registry.wait_for(&sandbox);
        let changed = ticket.changed();
        registry.observe(&key(), at("1", "10.0.0.1"));
        changed.await;
        drop(ticket);
        assert!(lock(&registry.waiting).is_empty());
        assert_eq!(registry.waiting_count.load(Ordering::Acquire), 0);
    }
}

//! What the router knows about sandboxes: a map that requests read without a lock, kept by the watch. An event touches
//! one entry, however many there are.
//!
//! ```text
//!             addresses            pod ended
//! NotReady ──────────────► Routable ────────► NotReady      and from anywhere: Suspended, Finished, Unclaimed, gone
//! ```
//!
//! It knows neither HTTP nor Kubernetes; `watch` translates.

use std::collections::HashMap;
use std::net::IpAddr;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use telemetry::TraceContext;
use tokio::sync::Notify;

use crate::claims::{BoundClaim, ClaimOwner, Claims};
use crate::identify::SandboxKey;
use crate::upstream::Upstream;

/// How many addresses of ended pods a sandbox is known by. Its status names the last pod's, or lags behind by one; a sandbox that is
/// suspended and resumed for years has had thousands.
const REMEMBERED_ENDS: usize = 8;

/// What the API says about a sandbox.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Observed {
    pub uid: String,
    pub condition: Condition,
    /// The claim that owns it.
    pub claim: Option<ClaimOwner>,
    /// The annotation by which it carries its trace, while traces are exported.
    pub trace: Option<String>,
}

/// What a sandbox's state means for routing.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Condition {
    /// It runs, and these are its pod's addresses.
    At(Vec<IpAddr>),
    Suspended,
    /// Why it has no address.
    NotReady(String),
    /// Why it ended.
    Finished(String),
    /// It waits in a pool for a claim, and is nobody's to use.
    Unclaimed,
}

/// What a request finds.
#[derive(Clone, Debug)]
pub enum Lookup {
    Routable(Arc<Upstream>),
    Suspended,
    NotReady(String),
    Finished(String),
    Unclaimed,
    Unknown,
}

#[derive(Debug)]
struct Record {
    observed: Observed,
    upstream: Option<Arc<Upstream>>,
    /// Addresses of a pod that ended, which the sandbox's own status may still name.
    ended: Vec<IpAddr>,
}

/// All sandboxes.
#[derive(Debug, Default)]
pub struct Registry {
    records: papaya::HashMap<String, Arc<Record>>,
    claims: Claims,
    /// Updates come from two watches; each is a read and a write of one entry.
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
    /// Makes a sandbox known at fixed addresses, for a router that runs without a watch.
    pub fn insert(&self, namespace: &str, name: &str, addresses: Vec<IpAddr>) {
        let observed = Observed {
            uid: String::new(),
            condition: Condition::At(addresses),
            claim: None,
            trace: None,
        };
        self.observe(&SandboxKey::new(namespace, name), observed);
    }

    /// How many sandboxes are known.
    pub fn len(&self) -> usize {
        self.records.len()
    }

    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Whether a first list has come in, so that what is not here does not exist.
    pub fn is_synced(&self) -> bool {
        self.synced.load(Ordering::Acquire)
    }

    /// Whether changes reach the registry: false until the first list has come in, and while the watch is broken.
    pub fn is_in_step(&self) -> bool {
        self.in_step.load(Ordering::Acquire)
    }

    /// A complete list has come in.
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
            (None, Condition::Suspended) => Lookup::Suspended,
            (None, Condition::NotReady(reason)) => Lookup::NotReady(reason.clone()),
            (None, Condition::Finished(reason)) => Lookup::Finished(reason.clone()),
            (None, Condition::Unclaimed) => Lookup::Unclaimed,
        }
    }

    /// The sandbox that a name stands for: the one of that name, or else the one that the claim of that name is bound to and owns.
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

    /// A claim is bound to a sandbox, or to none yet.
    pub(crate) fn observe_claim(&self, key: &SandboxKey, bound: Option<BoundClaim>) {
        if self.claims.set(key.as_str(), bound) {
            self.wake(key.as_str());
        }
    }

    /// Forgets every claim that a complete list did not have.
    pub(crate) fn keep_only_claims(&self, listed: &std::collections::HashSet<String>) {
        self.claims.keep_only(listed);
    }

    /// The trace that a sandbox carries.
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

    /// A sandbox's pod with these addresses is gone: they are dropped at once, before its status says so.
    pub(crate) fn pod_ended(&self, key: &SandboxKey, addresses: &[IpAddr]) {
        self.with_pod(key, addresses, |ended| {
            ended.retain(|address| !addresses.contains(address));
            ended.extend_from_slice(addresses);
            ended.drain(..ended.len().saturating_sub(REMEMBERED_ENDS));
        });
    }

    /// A sandbox's pod with these addresses runs, perhaps a new one on an old address.
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

    /// Forgets every sandbox that a complete list did not have.
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

    /// Lets go of connections that nobody has used for a while.
    pub(crate) fn close_idle(&self, now: tokio::time::Instant) {
        for record in self.records.pin().values() {
            if let Some(upstream) = &record.upstream {
                upstream.close_idle(now);
            }
        }
    }

    /// A ticket that is called when the sandbox changes.
    pub(crate) fn wait_for<'r>(&'r self, key: &'r SandboxKey) -> Ticket<'r> {
        let mut waiting = lock(&self.waiting);
        let entry = waiting.entry(key.as_str().to_owned()).or_default();
        entry.count += 1;
        self.waiting_count.fetch_add(1, Ordering::AcqRel);
        Ticket {
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
                    // Connections to an address are kept only for the sandbox they were made for.
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

/// A place in the queue of those who wait for a sandbox to change.
#[derive(Debug)]
pub(crate) struct Ticket<'r> {
    registry: &'r Registry,
    key: &'r SandboxKey,
    notify: Arc<Notify>,
}

impl Ticket<'_> {
    /// Completes at the next change after this call. Ask the registry again between calling and waiting.
    pub fn changed(&self) -> std::pin::Pin<Box<tokio::sync::futures::Notified<'_>>> {
        let mut notified = Box::pin(self.notify.notified());
        notified.as_mut().enable();
        notified
    }
}

impl Drop for Ticket<'_> {
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
    fn connections_are_kept_for_the_same_sandbox_at_the_same_address_only() {
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
    fn of_pods_that_ended_only_the_last_are_remembered() {
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
        assert_eq!(ended()[6..], last[..2], "and by when its last pod ended");
    }

    #[test]
    fn a_complete_list_forgets_the_rest() {
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
    async fn those_who_wait_are_called_and_leave_nothing_behind() {
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

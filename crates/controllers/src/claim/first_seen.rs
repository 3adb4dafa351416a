//! When this process first saw each claim that is not bound yet.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};

use api::{SandboxClaim, labels};
use k8s_openapi::jiff::Timestamp;
use kube::ResourceExt;

use crate::cache::Cache;
use crate::clock::Clock;
use crate::key::ObjectKey;

/// When each claim that has no sandbox yet was first seen.
#[derive(Clone, Debug, Default)]
pub(super) struct FirstSeen(Arc<Mutex<HashMap<ObjectKey, Timestamp>>>);

impl FirstSeen {
    /// Notes new claims, and forgets them once they are bound or deleted.
    pub fn follow(&self, claims: &Cache<SandboxClaim>, clock: &Clock) {
        let (seen, clock) = (self.clone(), clock.clone());
        claims.subscribe(move |change| {
            let key = ObjectKey::of(change.latest().as_ref());
            let is_waiting = change.after.is_some_and(|claim| {
                !claim
                    .annotations()
                    .contains_key(labels::CONTROLLER_FIRST_OBSERVED_AT)
            });
            let mut seen = seen.0.lock().unwrap_or_else(PoisonError::into_inner);
            if !is_waiting || change.departed().is_some() {
                seen.remove(&key);
            }
            if is_waiting {
                seen.entry(key).or_insert_with(|| clock.now());
            }
        });
    }

    /// How many claims wait for their sandbox.
    pub fn len(&self) -> usize {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).len()
    }

    pub fn of(&self, key: &ObjectKey, now: Timestamp) -> Timestamp {
        let seen = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        seen.get(key).copied().unwrap_or(now)
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicI64, Ordering};

    use api::SandboxClaimSpec;
    use kube::runtime::watcher::Event;

    use super::*;

    #[test]
    fn a_claim_made_again_under_its_name_is_first_seen_then() {
        let hand = Arc::new(AtomicI64::new(1_000));
        let read = Arc::clone(&hand);
        let clock =
            Clock::new(move || Timestamp::from_second(read.load(Ordering::Relaxed)).unwrap());
        let cache = Cache::<SandboxClaim>::new(None);
        let seen = FirstSeen::default();
        seen.follow(&cache, &clock);
        let claim = |uid: &str, version: &str| {
            let mut claim = SandboxClaim::new("c", SandboxClaimSpec::default());
            claim.metadata.uid = Some(uid.to_owned());
            claim.metadata.resource_version = Some(version.to_owned());
            claim
        };
        let key = ObjectKey::of(&claim("first", "1"));
        let first_seen = || seen.of(&key, Timestamp::UNIX_EPOCH).as_second();
        cache.apply(Event::Apply(claim("first", "1")));
        hand.store(2_000, Ordering::Relaxed);
        cache.apply(Event::Apply(claim("first", "2")));
        assert_eq!(first_seen(), 1_000);
        cache.apply(Event::Apply(claim("second", "4")));
        assert_eq!(first_seen(), 2_000);
        cache.apply(Event::Delete(claim("second", "5")));
        assert_eq!(seen.len(), 0);
    }
}

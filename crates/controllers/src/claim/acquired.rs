//! Sandboxes that this process gave to claims, or may have given, before the cache shows it.
//!
//! The response to a write can be lost, and a cache does not store responses during a relist. If a user removes the claim's binding at
//! that time, neither the claim nor the cache shows which sandbox the claim has. A new process lists all sandboxes first, so these
//! notes need not outlive the process.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use api::SandboxClaim;
use kube::ResourceExt;

use crate::cache::Cache;
use crate::key::ObjectKey;

/// The names of those sandboxes, by the UID of their claim. Clones refer to the same names.
#[derive(Clone, Debug, Default)]
pub(super) struct Acquired(Arc<Mutex<HashMap<String, String>>>);

impl Acquired {
    /// Forgets claims that are gone.
    pub fn follow(&self, claims: &Cache<SandboxClaim>) {
        let acquired = self.clone();
        claims.subscribe(move |change| {
            if let Some(claim) = change.departed() {
                acquired.settle(claim);
            }
        });
    }

    /// Notes that the claim has this sandbox, or may have it. A claim that is gone from the cache is not noted: nothing would
    /// remove the note.
    pub fn note(&self, claims: &Cache<SandboxClaim>, claim: &SandboxClaim, sandbox: &str) {
        let uid = claim.uid().unwrap_or_default();
        self.names().insert(uid, sandbox.to_owned());
        // The cache drops a claim before it calls subscribers, so either this check or the subscriber removes the note.
        let cached = claims.get(&ObjectKey::of(claim));
        if cached.is_none_or(|cached| cached.metadata.uid != claim.metadata.uid) {
            self.settle(claim);
        }
    }

    /// The sandbox that the server must be asked for before the claim gets another.
    pub fn unconfirmed(&self, claim: &SandboxClaim) -> Option<String> {
        self.names().get(claim.metadata.uid.as_ref()?).cloned()
    }

    /// Forgets the sandbox: the cache shows that the claim owns it, or the server has refused the write.
    pub fn settle(&self, claim: &SandboxClaim) {
        if let Some(uid) = &claim.metadata.uid {
            self.names().remove(uid);
        }
    }

    pub fn len(&self) -> usize {
        self.names().len()
    }

    fn names(&self) -> MutexGuard<'_, HashMap<String, String>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use api::SandboxClaimSpec;
    use kube::runtime::watcher::Event;

    use super::*;

    #[test]
    fn a_sandbox_is_remembered_until_it_is_confirmed_or_its_claim_is_gone() {
        let claim = |uid: &str| {
            let mut claim = SandboxClaim::new("c", SandboxClaimSpec::default());
            claim.metadata.uid = Some(uid.to_owned());
            claim.metadata.resource_version = Some("1".to_owned());
            claim
        };
        let cache = Cache::<SandboxClaim>::new(None);
        let acquired = Acquired::default();
        acquired.follow(&cache);
        cache.apply(Event::Apply(claim("a")));
        acquired.note(&cache, &claim("a"), "w");
        assert_eq!(acquired.unconfirmed(&claim("a")).as_deref(), Some("w"));
        assert_eq!(acquired.unconfirmed(&claim("b")), None);
        cache.apply(Event::Delete(claim("a")));
        assert_eq!(acquired.len(), 0);
        acquired.note(&cache, &claim("a"), "w");
        assert_eq!(acquired.len(), 0, "the claim is gone already");
        cache.apply(Event::Apply(claim("b")));
        acquired.note(&cache, &claim("b"), "x");
        acquired.settle(&claim("b"));
        assert_eq!(acquired.len(), 0);
    }
}

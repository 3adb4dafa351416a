//! The claims that have never been Ready, so that the latency of each is measured once.
//!
//! A claim that loses readiness and recovers, or is suspended and resumed, is not measured again, nor is one that was Ready under an
//! earlier process. Nothing is written for that: an unmeasured claim is remembered by its UID, until it is measured or gone.

use std::collections::HashSet;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use api::conditions::{self, ConditionType};
use api::{SandboxClaim, labels};
use k8s_openapi::jiff::{SignedDuration, Timestamp};
use kube::ResourceExt;

use crate::cache::Cache;

/// A claim whose Ready condition has changed later than this after the claim was first seen has been Ready before. Times in
/// conditions are whole seconds.
const FIRST_STATUS_WITHIN: SignedDuration = SignedDuration::from_secs(2);

/// The UIDs of claims that have never been Ready.
#[derive(Clone, Debug, Default)]
pub(super) struct FirstReady(Arc<Mutex<HashSet<String>>>);

impl FirstReady {
    /// Notes new claims, and forgets deleted ones.
    pub fn follow(&self, claims: &Cache<SandboxClaim>) {
        let unmeasured = self.clone();
        claims.subscribe(move |change| {
            if let Some(claim) = change.departed() {
                unmeasured.uids().remove(uid(claim));
            }
            if let Some(claim) = change.arrived().filter(|claim| never_was_ready(claim)) {
                unmeasured.uids().extend(claim.uid());
            }
        });
    }

    /// Whether a Ready claim is Ready for the first time. Only the first call returns true.
    pub fn is_now(&self, claim: &SandboxClaim) -> bool {
        self.uids().remove(uid(claim))
    }

    /// How many claims wait to be measured.
    pub fn len(&self) -> usize {
        self.uids().len()
    }

    fn uids(&self) -> MutexGuard<'_, HashSet<String>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn uid(claim: &SandboxClaim) -> &str {
    claim.metadata.uid.as_deref().unwrap_or_default()
}

fn never_was_ready(claim: &SandboxClaim) -> bool {
    let Some(status) = &claim.status else {
        return true;
    };
    if conditions::is_true(&status.conditions, ConditionType::Ready) {
        return false;
    }
    let Some(ready) = conditions::find(&status.conditions, ConditionType::Ready) else {
        return true;
    };
    let first_seen = claim
        .annotations()
        .get(labels::CONTROLLER_FIRST_OBSERVED_AT)
        .and_then(|moment| moment.parse::<Timestamp>().ok());
    first_seen.is_none_or(|first_seen| {
        ready.last_transition_time.0.duration_since(first_seen) <= FIRST_STATUS_WITHIN
    })
}

#[cfg(test)]
mod tests {
    use api::SandboxClaimSpec;
    use serde_json::json;

    use super::*;

    fn claim(ready: Option<(&str, &str)>) -> SandboxClaim {
        let mut claim = SandboxClaim::new("c", SandboxClaimSpec::default());
        claim.annotations_mut().insert(
            labels::CONTROLLER_FIRST_OBSERVED_AT.to_owned(),
            "2026-11-16T10:00:00.5Z".to_owned(),
        );
        claim.status = ready.map(|(status, since)| {
            let condition = json!({
                "type": "Ready", "status": status, "reason": "SandboxNotReady", "message": "", "lastTransitionTime": since,
            });
            serde_json::from_value(json!({ "conditions": [condition] })).unwrap()
        });
        claim
    }

    #[test]
    fn a_claim_that_was_ready_under_an_earlier_process_is_not_measured_again() {
        for (ready, never) in [
            (None, true),
            (Some(("False", "2026-11-16T10:00:01Z")), true),
            (Some(("True", "2026-11-16T10:00:01Z")), false),
            (Some(("False", "2026-11-16T10:20:00Z")), false),
        ] {
            assert_eq!(never_was_ready(&claim(ready)), never, "{ready:?}");
        }
    }

    #[test]
    fn a_claim_is_new_once_and_forgotten_when_it_goes() {
        use kube::runtime::watcher::Event;
        let cache = Cache::<SandboxClaim>::new(None);
        let first_ready = FirstReady::default();
        first_ready.follow(&cache);
        let named = |name: &str, version: &str| {
            let mut claim = claim(None);
            claim.metadata.name = Some(name.to_owned());
            claim.metadata.uid = Some(format!("uid-{name}"));
            claim.metadata.resource_version = Some(version.to_owned());
            claim
        };
        for name in ["a", "b"] {
            cache.apply(Event::Apply(named(name, "1")));
        }
        assert!(first_ready.is_now(&named("a", "1")));
        assert!(!first_ready.is_now(&named("a", "1")));
        cache.apply(Event::Delete(named("b", "2")));
        assert_eq!(first_ready.len(), 0);
    }

    #[test]
    fn a_claim_made_again_under_its_name_is_measured_and_the_one_before_forgotten() {
        use kube::runtime::watcher::Event;
        let cache = Cache::<SandboxClaim>::new(None);
        let first_ready = FirstReady::default();
        first_ready.follow(&cache);
        let version = |uid: &str, version: &str| {
            let mut claim = claim(None);
            claim.metadata.uid = Some(uid.to_owned());
            claim.metadata.resource_version = Some(version.to_owned());
            claim
        };
        cache.apply(Event::Apply(version("first", "1")));
        cache.apply(Event::Apply(version("second", "3")));
        assert_eq!(first_ready.len(), 1);
        assert!(!first_ready.is_now(&version("first", "1")));
        assert!(first_ready.is_now(&version("second", "3")));
        cache.apply(Event::Apply(version("second", "4")));
        assert!(
            !first_ready.is_now(&version("second", "4")),
            "once is enough"
        );
    }
}

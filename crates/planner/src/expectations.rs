//! The creations and deletions of a pool that its cache does not show yet, so that none is repeated.
//!
//! A cache may lag behind the pool's own writes. Counting only what the cache shows, a pool would make the same sandboxes again
//! on every pass until the cache caught up. So each acknowledged write is remembered until the cache shows it; and if memory
//! and cache disagree (a response was lost, or a sandbox was created and deleted unseen), the pool lists from the API server.

use std::collections::{HashMap, HashSet};
use std::time::Duration;

use k8s_openapi::jiff::Timestamp;

use crate::pacing::elapsed;

/// After this time without the expected event, the API server is asked.
const CONFIRM_AFTER: Duration = Duration::from_secs(10);

#[derive(Clone, Debug)]
struct Expected {
    uid: String,
    since: Timestamp,
}

/// One pool's expectations, by sandbox name.
#[derive(Clone, Debug, Default)]
pub struct Expectations {
    made: HashMap<String, Expected>,
    deleted: HashMap<String, Expected>,
    in_doubt: bool,
}

impl Expectations {
    /// The server has acknowledged the creation of this sandbox.
    pub fn made(&mut self, name: &str, uid: &str, now: Timestamp) {
        self.made.insert(name.to_owned(), expected(uid, now));
    }

    /// The server has acknowledged the deletion of this sandbox.
    pub fn deleted(&mut self, name: &str, uid: &str, now: Timestamp) {
        self.deleted.insert(name.to_owned(), expected(uid, now));
    }

    /// A write may or may not have happened.
    pub fn doubt(&mut self) {
        self.in_doubt = true;
    }

    /// Removes the expectations that the cache now meets. `cached` returns the UID of the sandbox of this name, and whether it is being deleted.
    pub fn settle(&mut self, cached: impl Fn(&str) -> Option<(String, bool)>) {
        self.made.retain(|name, _| cached(name).is_none());
        self.deleted.retain(|name, expected| {
            cached(name).is_some_and(|(uid, going)| uid == expected.uid && !going)
        });
    }

    /// Whether the sandboxes must be counted from the API server.
    pub fn needs_confirmation(&self, now: Timestamp) -> bool {
        self.in_doubt
            || self
                .made
                .values()
                .chain(self.deleted.values())
                .any(|expected| elapsed(expected.since, now) >= CONFIRM_AFTER)
    }

    /// Replaces the expectations by the difference between the API server's list of the pool's sandboxes, as `(name, UID)`, and the cache.
    pub fn confirm(
        &mut self,
        listed: &[(String, String)],
        cached: &[(String, String)],
        now: Timestamp,
    ) {
        let difference = |all: &[(String, String)], known: &[(String, String)]| {
            let known: HashSet<_> = known.iter().collect();
            all.iter()
                .filter(|entry| !known.contains(entry))
                .map(|(name, uid)| (name.clone(), expected(uid, now)))
                .collect()
        };
        self.made = difference(listed, cached);
        self.deleted = difference(cached, listed);
        self.in_doubt = false;
    }

    /// How many sandboxes exist that the cache does not show.
    pub fn unseen(&self) -> usize {
        self.made.len()
    }

    /// Whether this sandbox is known to be going, whatever the cache shows.
    pub fn is_deleted(&self, name: &str, uid: &str) -> bool {
        self.deleted
            .get(name)
            .is_some_and(|expected| expected.uid == uid)
    }

    /// How many writes are remembered.
    pub fn len(&self) -> usize {
        self.made.len() + self.deleted.len()
    }

    /// Whether nothing is remembered.
    pub fn is_empty(&self) -> bool {
        self.made.is_empty() && self.deleted.is_empty() && !self.in_doubt
    }
}

fn expected(uid: &str, since: Timestamp) -> Expected {
    Expected {
        uid: uid.to_owned(),
        since,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(second: i64) -> Timestamp {
        Timestamp::from_second(second).unwrap()
    }

    fn pair(name: &str) -> (String, String) {
        (name.to_owned(), format!("uid-{name}"))
    }

    #[test]
    fn a_creation_counts_until_it_is_seen() {
        let mut expectations = Expectations::default();
        expectations.made("a", "uid-a", at(0));
        expectations.settle(|_| None);
        assert_eq!(expectations.unseen(), 1);
        expectations.settle(|name| (name == "a").then(|| ("uid-a".to_owned(), false)));
        assert!(expectations.is_empty());
    }

    #[test]
    fn a_deletion_counts_until_it_is_seen() {
        let mut expectations = Expectations::default();
        expectations.deleted("a", "uid-a", at(0));
        expectations.settle(|_| Some(("uid-a".to_owned(), false)));
        assert!(expectations.is_deleted("a", "uid-a"));
        assert!(!expectations.is_deleted("a", "uid-of-a-namesake"));
        expectations.settle(|_| Some(("uid-a".to_owned(), true)));
        assert!(expectations.is_empty());
    }

    #[test]
    fn what_stays_unseen_is_confirmed_by_asking() {
        let mut expectations = Expectations::default();
        expectations.made("came-and-went", "uid", at(0));
        assert!(!expectations.needs_confirmation(at(9)));
        assert!(expectations.needs_confirmation(at(10)));
        expectations.confirm(&[pair("a")], &[pair("a")], at(10));
        assert!(expectations.is_empty());
    }

    #[test]
    fn a_doubt_is_resolved_by_what_the_server_lists() {
        let mut expectations = Expectations::default();
        expectations.doubt();
        assert!(expectations.needs_confirmation(at(0)));
        expectations.confirm(&[pair("a"), pair("b")], &[pair("b"), pair("c")], at(0));
        assert!(!expectations.needs_confirmation(at(0)));
        assert_eq!(expectations.unseen(), 1);
        assert!(expectations.is_deleted("c", "uid-c"));
        expectations
            .settle(|name| (name == "a" || name == "b").then(|| (format!("uid-{name}"), false)));
        assert!(expectations.is_empty());
    }
}

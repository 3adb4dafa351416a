//! Claims that wait for a free sandbox of a set, first come, first served. A hint: a claim that is not woken is reconciled again after a delay.

use std::collections::{HashMap, VecDeque};
use std::sync::{Arc, Mutex, PoisonError};

use crate::key::ObjectKey;

/// The waiting claims of all sets, by the set's UID. Clones refer to the same.
#[derive(Clone, Debug, Default)]
pub(super) struct Waiting(Arc<Mutex<HashMap<String, VecDeque<ObjectKey>>>>);

impl Waiting {
    /// Puts a claim at the end of a set's queue, unless it waits there already.
    pub fn join(&self, set: &str, claim: &ObjectKey) {
        let mut lines = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let line = lines.entry(set.to_owned()).or_default();
        if !line.contains(claim) {
            line.push_back(claim.clone());
        }
    }

    /// Takes the first claim from a set's queue.
    pub fn call(&self, set: &str) -> Option<ObjectKey> {
        let mut lines = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let line = lines.get_mut(set)?;
        let first = line.pop_front();
        if line.is_empty() {
            lines.remove(set);
        }
        first
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn claims_are_called_in_the_order_they_came_and_once() {
        let waiting = Waiting::default();
        let claims = ["a", "b"].map(|name| ObjectKey::new("ns", name));
        for claim in claims.iter().chain(&claims) {
            waiting.join("set", claim);
        }
        assert_eq!(waiting.call("another"), None);
        assert_eq!(waiting.call("set").as_ref(), Some(&claims[0]));
        assert_eq!(waiting.call("set").as_ref(), Some(&claims[1]));
        assert_eq!(waiting.call("set"), None);
        assert!(waiting.0.lock().unwrap().is_empty());
    }
}

//! What the controller remembers of each claim between two passes. All of it can be lost without harm.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use k8s_openapi::jiff::Timestamp;

use crate::key::ObjectKey;
use crate::warm_queue::Reservation;

#[derive(Debug, Default)]
struct Note {
    /// Keeps other claims of this process from the sandboxes of the batch.
    reservations: Vec<Reservation>,
    paused_until: Option<Timestamp>,
}

/// The notes on all claims. Clones refer to the same.
#[derive(Clone, Debug, Default)]
pub(super) struct Notes(Arc<Mutex<HashMap<ObjectKey, Note>>>);

impl Notes {
    /// Keeps these reservations in place of those before.
    pub fn keep(&self, key: &ObjectKey, reservations: Vec<Reservation>) {
        let mut notes = self.notes();
        let before = match notes.get_mut(key) {
            Some(note) => std::mem::replace(&mut note.reservations, reservations),
            None if reservations.is_empty() => return,
            None => {
                notes.entry(key.clone()).or_default().reservations = reservations;
                Vec::new()
            }
        };
        // Dropping them locks the queue, which must not wait for this lock.
        drop(notes);
        drop(before);
    }

    pub fn pause(&self, key: &ObjectKey, now: Timestamp, pause: Duration) {
        let until = now.checked_add(pause).unwrap_or(Timestamp::MAX);
        self.notes().entry(key.clone()).or_default().paused_until = Some(until);
    }

    pub fn paused_until(&self, key: &ObjectKey) -> Option<Timestamp> {
        self.notes().get(key)?.paused_until
    }

    pub fn forget(&self, key: &ObjectKey) {
        let note = self.notes().remove(key);
        drop(note);
    }

    fn notes(&self) -> MutexGuard<'_, HashMap<ObjectKey, Note>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

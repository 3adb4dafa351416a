//! The delay of the first status of an object that is starting.
//!
//! An object that is ready within the delay is not first reported as starting: each status that is written leads to reconciles and writes
//! of the controllers that watch it, which would compete with the start. [`planner`] decides which status may be delayed; this module
//! measures the delay.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::time::Instant;

use crate::cache::Cache;
use crate::cached::Cached;
use crate::context::Context;
use crate::key::ObjectKey;

/// How long the first status is delayed.
const DELAY: Duration = Duration::from_millis(200);

/// When the delay of each object of one kind began. Clones share the delays.
#[derive(Clone, Debug)]
pub struct StatusDelay<K> {
    objects: Cache<K>,
    since: Arc<Mutex<HashMap<ObjectKey, Instant>>>,
}

impl<K: Cached> StatusDelay<K> {
    /// The delays of a controller's objects. Those that leave the cache are forgotten.
    pub fn of(objects: &Cache<K>, context: &Context, controller: &'static str) -> Self {
        let delays = Self {
            objects: objects.clone(),
            since: Arc::default(),
        };
        let gone = delays.clone();
        objects.subscribe(move |change| {
            if let Some(object) = change.departed() {
                gone.forget(&ObjectKey::of(object.as_ref()));
            }
        });
        let counted = delays.clone();
        let count = Box::new(move || counted.since().len());
        context
            .instrumentation
            .count_entries("starting", controller, count);
        delays
    }

    /// How long the status of an object is still delayed, or `None` once it is to be published. The delay begins with the first call.
    pub fn left(&self, key: &ObjectKey) -> Option<Duration> {
        let now = Instant::now();
        let since = *self.since().entry(key.clone()).or_insert(now);
        let left = DELAY.saturating_sub(now - since);
        // An object that was deleted before its delay began is not reported as deleted again.
        if left.is_zero() || self.objects.get(key).is_none() {
            self.forget(key);
        }
        (!left.is_zero()).then_some(left)
    }

    /// Ends the delay: a status is published.
    pub fn forget(&self, key: &ObjectKey) {
        self.since().remove(key);
    }

    fn since(&self) -> MutexGuard<'_, HashMap<ObjectKey, Instant>> {
        self.since.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use api::{Sandbox, SandboxSpec};
    use kube::runtime::watcher::Event;

    use super::*;

    fn sandbox(uid: &str, version: &str) -> Sandbox {
        let mut sandbox = Sandbox::new("one", SandboxSpec::default());
        sandbox.metadata.uid = Some(uid.to_owned());
        sandbox.metadata.resource_version = Some(version.to_owned());
        sandbox
    }

    fn status_delay() -> (Cache<Sandbox>, StatusDelay<Sandbox>) {
        let objects = Cache::new(None);
        let since = Arc::default();
        let delays = StatusDelay {
            objects: objects.clone(),
            since,
        };
        (objects, delays)
    }

    #[tokio::test(start_paused = true)]
    async fn the_first_status_is_delayed_once_and_briefly() {
        let (objects, delays) = status_delay();
        objects.apply(Event::Apply(sandbox("a", "1")));
        let key = ObjectKey::of(&sandbox("a", "1"));
        assert_eq!(delays.left(&key), Some(DELAY));
        tokio::time::advance(DELAY / 2).await;
        assert_eq!(delays.left(&key), Some(DELAY / 2));
        tokio::time::advance(DELAY / 2).await;
        assert_eq!(delays.left(&key), None);
        assert_eq!(delays.since().len(), 0);
    }

    #[tokio::test(start_paused = true)]
    async fn a_deleted_object_is_not_remembered() {
        let (_, delays) = status_delay();
        let key = ObjectKey::of(&sandbox("a", "1"));
        assert_eq!(delays.left(&key), Some(DELAY));
        assert_eq!(delays.since().len(), 0, "it was deleted before");
    }
}

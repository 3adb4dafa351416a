//! Objects of which nothing was said yet, because they are only just starting.
//!
//! What is ready within a moment is not said to be starting before: every status that is written is followed by the reconciles and
//! the writes of those who watch it, and all of them would be in its way. Whether a status says no more than that is for
//! [`planner`] to decide; this module knows for how long it may go unsaid.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::time::Instant;

use crate::cache::Cache;
use crate::cached::Cached;
use crate::context::Context;
use crate::key::ObjectKey;

/// For how long a start goes unsaid.
const UNSAID: Duration = Duration::from_millis(200);

/// Since when the objects of one kind are starting that nothing was said of. Clones refer to the same objects.
#[derive(Clone, Debug)]
pub struct Starting<K> {
    objects: Cache<K>,
    since: Arc<Mutex<HashMap<ObjectKey, Instant>>>,
}

impl<K: Cached> Starting<K> {
    /// Remembers objects of a cache until they are gone, on behalf of a controller.
    pub fn of(objects: &Cache<K>, context: &Context, controller: &'static str) -> Self {
        let starting = Self {
            objects: objects.clone(),
            since: Arc::default(),
        };
        let gone = starting.clone();
        objects.subscribe(move |change| {
            if let Some(object) = change.departed() {
                gone.forget(&ObjectKey::of(object.as_ref()));
            }
        });
        let counted = starting.clone();
        let count = Box::new(move || counted.since().len());
        context.instrumentation.keeps("starting", controller, count);
        starting
    }

    /// How long it may still go unsaid that the object is starting; nothing once it is to be said.
    pub fn unsaid_for(&self, key: &ObjectKey) -> Option<Duration> {
        let now = Instant::now();
        let since = *self.since().entry(key.clone()).or_insert(now);
        let left = UNSAID.saturating_sub(now - since);
        // One that went before it was noted here is not reported gone again.
        if left.is_zero() || self.objects.get(key).is_none() {
            self.forget(key);
        }
        (!left.is_zero()).then_some(left)
    }

    /// To be called when something is said of the object.
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

    fn starting() -> (Cache<Sandbox>, Starting<Sandbox>) {
        let objects = Cache::new(None);
        let since = Arc::default();
        let starting = Starting {
            objects: objects.clone(),
            since,
        };
        (objects, starting)
    }

    #[tokio::test(start_paused = true)]
    async fn a_start_goes_unsaid_for_a_moment_and_no_longer() {
        let (objects, starting) = starting();
        objects.apply(Event::Apply(sandbox("a", "1")));
        let key = ObjectKey::of(&sandbox("a", "1"));
        assert_eq!(starting.unsaid_for(&key), Some(UNSAID));
        tokio::time::advance(UNSAID / 2).await;
        assert_eq!(starting.unsaid_for(&key), Some(UNSAID / 2));
        tokio::time::advance(UNSAID / 2).await;
        assert_eq!(starting.unsaid_for(&key), None);
        assert_eq!(starting.since().len(), 0);
    }

    #[tokio::test(start_paused = true)]
    async fn what_is_gone_is_not_remembered() {
        let (_, starting) = starting();
        let key = ObjectKey::of(&sandbox("a", "1"));
        assert_eq!(starting.unsaid_for(&key), Some(UNSAID));
        assert_eq!(starting.since().len(), 0, "it was gone before");
    }
}

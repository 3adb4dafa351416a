//! The objects of one kind from a watch, by UID.

use std::collections::{HashMap, HashSet};
use std::time::Duration;

use api::decoding::Decoded;
use futures::StreamExt;
use kube::runtime::watcher::{self, Event};
use kube::{Api, Client, Resource};
use tokio::time::Instant;

use api::errors::chain;
use api::readable::readable;

/// The known objects of one kind.
#[derive(Debug)]
pub struct Watched<V> {
    pub objects: HashMap<String, V>,
    /// The objects of the list in progress.
    listed: HashSet<String>,
    /// Whether the first list is complete.
    pub complete: bool,
}

impl<V> Default for Watched<V> {
    fn default() -> Self {
        Self {
            objects: HashMap::new(),
            listed: HashSet::new(),
            complete: false,
        }
    }
}

impl<V> Watched<V> {
    /// Handles an event, or a refusal: a kind that the node may not list counts as having no objects. Returns whether anything may
    /// have changed.
    pub fn learn<K: Resource>(
        &mut self,
        news: Result<Event<K>, NotAllowed>,
        facts: impl Fn(K) -> V,
    ) -> bool {
        match news {
            Ok(event) => self.take(event, facts),
            Err(NotAllowed(_)) => !std::mem::replace(&mut self.complete, true),
        }
    }

    /// Handles an event. Returns whether anything may have changed.
    pub fn take<K: Resource>(&mut self, event: Event<K>, facts: impl Fn(K) -> V) -> bool {
        match event {
            Event::Init => {
                self.listed.clear();
                return false;
            }
            Event::InitApply(object) => {
                let key = key(&object);
                self.listed.insert(key.clone());
                self.objects.insert(key, facts(object));
                return false;
            }
            Event::InitDone => {
                let listed = std::mem::take(&mut self.listed);
                self.objects.retain(|key, _| listed.contains(key));
                self.complete = true;
            }
            Event::Apply(object) => {
                self.objects.insert(key(&object), facts(object));
            }
            Event::Delete(object) => {
                self.objects.remove(&key(&object));
            }
        }
        true
    }
}

/// The key of an object: its UID. An object without one is keyed by its name, so that it neither replaces another object nor is ignored:
/// an ignored network policy would leave its pods open.
fn key<K: Resource>(object: &K) -> String {
    let metadata = object.meta();
    let uid = metadata.uid.clone().filter(|uid| !uid.is_empty());
    // No UID contains a slash.
    let part = |part: &Option<String>| part.clone().unwrap_or_default();
    uid.unwrap_or_else(|| format!("{}/{}", part(&metadata.namespace), part(&metadata.name)))
}

/// How long after a failure a watch is tried again: the first time, and at most.
const RETRY: Duration = Duration::from_millis(200);
const LONGEST_RETRY: Duration = Duration::from_secs(5);
/// A watch that has not failed again for so long had recovered.
const RECOVERED: Duration = Duration::from_secs(30);

/// The node's user may not see the objects of a kind. What the API server says of it.
#[derive(Debug)]
pub struct NotAllowed(pub String);

impl NotAllowed {
    fn of(error: &watcher::Error) -> Option<Self> {
        use kube::Error::Api;
        use watcher::Error::{InitialListFailed, WatchError, WatchStartFailed};
        let (InitialListFailed(Api(status)) | WatchStartFailed(Api(status)) | WatchError(status)) =
            error
        else {
            return None;
        };
        status.is_forbidden().then(|| Self(status.message.clone()))
    }
}

/// Follows all objects of a kind for ever, but those that cannot be read.
pub async fn follow<K>(client: &Client, mut take: impl FnMut(Result<Event<K>, NotAllowed>))
where
    K: Resource<DynamicType = ()>
        + Clone
        + Default
        + serde::de::DeserializeOwned
        + std::fmt::Debug
        + Send
        + 'static,
{
    let api = Api::<Decoded<K>>::all(client.clone());
    let mut events = std::pin::pin!(watcher::watcher(api, watcher::Config::default()));
    let mut pause = RETRY;
    let mut told = None;
    let mut failed_at: Option<Instant> = None;
    while let Some(event) = events.next().await {
        match event {
            Ok(event) => {
                if let Some(event) = readable(event) {
                    take(Ok(event));
                }
            }
            Err(error) => {
                // A watch that works again may have nothing to tell for days.
                if failed_at.is_none_or(|at| at.elapsed() > RECOVERED) {
                    (pause, told) = (RETRY, None);
                }
                let reason = Some(chain(&error));
                // Once is enough of what may stay as it is for days.
                if told != reason {
                    let kind = K::kind(&());
                    tracing::warn!(%kind, error = reason, "a watch for the pods' network failed and is retried");
                    told = reason;
                }
                if let Some(not_allowed) = NotAllowed::of(&error) {
                    take(Err(not_allowed));
                }
                tokio::time::sleep(pause).await;
                pause = pause.saturating_mul(2).min(LONGEST_RETRY);
                failed_at = Some(Instant::now());
            }
        }
    }
}

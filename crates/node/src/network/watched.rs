//! Objects of one kind as a watch tells of them, kept by UID.

use std::collections::{HashMap, HashSet};
use std::time::Duration;

use futures::StreamExt;
use kube::runtime::watcher::{self, Event};
use kube::{Api, Client, Resource};

use crate::errors::chain;

/// What is known of the objects of one kind.
#[derive(Debug)]
pub struct Watched<V> {
    pub objects: HashMap<String, V>,
    /// What was listed since the last list began.
    listed: HashSet<String>,
    /// Whether everything there is has been seen.
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
    /// Takes an event in; whether anything may have changed by it.
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

/// What an object is kept under.
pub fn key<K: Resource>(object: &K) -> String {
    object.meta().uid.clone().unwrap_or_default()
}

/// Follows all objects of a kind for ever.
pub async fn follow<K>(client: &Client, mut take: impl FnMut(Event<K>))
where
    K: Resource<DynamicType = ()>
        + Clone
        + serde::de::DeserializeOwned
        + std::fmt::Debug
        + Send
        + 'static,
{
    let api = Api::<K>::all(client.clone());
    let mut events = std::pin::pin!(watcher::watcher(api, watcher::Config::default()));
    while let Some(event) = events.next().await {
        match event {
            Ok(event) => take(event),
            Err(error) => {
                tracing::warn!(kind = %K::kind(&()), error = %chain(&error), "a watch for the pods' network failed and is retried");
                tokio::time::sleep(Duration::from_millis(200)).await;
            }
        }
    }
}

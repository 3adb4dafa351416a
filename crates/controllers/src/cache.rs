//! A cache of every object of one kind, and the changes to it.
//!
//! One watch per kind feeds the cache ([`crate::watch`]); controllers read it and subscribe to its changes. The response to a write is
//! stored at once (read-your-writes), so that the next decision does not rest on a stale object. Storing a response never replaces
//! a later version and never brings back a deleted object:
//!
//! - an object is replaced only by one of a higher `resourceVersion` (comparable numbers since Kubernetes 1.35, and in every
//!   server before);
//! - a deletion is remembered, so that the late response to an earlier write cannot bring the object back;
//! - during a relist, and for writes that began before it, responses are not stored.
//!
//! Of an object that cannot be decoded, only the metadata is kept, apart from the objects. For subscribers, an object that becomes
//! undecodable is deleted.

mod contents;

use std::collections::{BTreeMap, HashMap, HashSet, VecDeque};
use std::fmt;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard};

use api::decoding::{Decoded, Unreadable};
use kube::runtime::watcher::Event;
use planner::owner::controller_of;

use crate::cached::{Cached, resource_version};
use crate::key::ObjectKey;
use crate::pod_specs::PodSpecs;
use crate::trimmed::Trimmed;

use contents::{Contents, Index, Put, key_of, version_of};

/// A change of one object.
#[derive(Debug)]
pub struct Change<'a, K> {
    /// The object before, unless it is new.
    pub before: Option<&'a Arc<K>>,
    /// The object after, unless it is gone.
    pub after: Option<&'a Arc<K>>,
}

impl<K> Change<'_, K> {
    /// The object as it was last seen.
    pub fn latest(&self) -> &Arc<K> {
        self.after
            .or(self.before)
            .expect("a change has an object before or after it")
    }
}

impl<K: Cached> Change<'_, K> {
    /// The object, if it is new. An object that replaced another one of its name is new, too.
    pub fn arrived(&self) -> Option<&Arc<K>> {
        self.after.filter(|_| self.is_of_another())
    }

    /// The object, if it is gone; another one may have its name.
    pub fn departed(&self) -> Option<&Arc<K>> {
        self.before.filter(|_| self.is_of_another())
    }

    /// Whether the objects before and after have different UIDs. A deletion and a creation that a watch has missed are one change.
    fn is_of_another(&self) -> bool {
        match (self.before, self.after) {
            (Some(before), Some(after)) => before.meta().uid != after.meta().uid,
            _ => true,
        }
    }
}

type Subscriber<K> = Box<dyn Fn(&Change<'_, K>) + Send + Sync>;
type UnreadableSubscriber = Box<dyn Fn(&ObjectKey) + Send + Sync>;

struct Inner<K> {
    label: Option<&'static str>,
    contents: RwLock<Contents<K>>,
    subscribers: RwLock<Vec<Subscriber<K>>>,
    unreadable_subscribers: RwLock<Vec<UnreadableSubscriber>>,
    specs: PodSpecs,
    synced: tokio::sync::watch::Sender<bool>,
    followed: AtomicBool,
}

/// A shared, indexed cache of one kind. Clones refer to the same cache.
pub struct Cache<K>(Arc<Inner<K>>);

/// The state of a cache before a write; see [`Cache::learn`].
#[derive(Clone, Copy, Debug)]
pub struct Epoch(u64);

/// The name of the index that every cache has: the UID of an object's controller.
const CONTROLLER: &str = "controller";

impl<K: Cached> Cache<K> {
    /// A cache of the objects that carry a label, whatever its value, or of all.
    pub fn new(label: Option<&'static str>) -> Self {
        let contents = Contents {
            objects: HashMap::new(),
            unreadable: BTreeMap::new(),
            indexes: vec![Index {
                name: CONTROLLER,
                values: |object: &K| {
                    controller_of(object.meta())
                        .map(|owner| owner.uid.clone())
                        .into_iter()
                        .collect()
                },
                keys: HashMap::new(),
            }],
            deleted: HashMap::new(),
            deletion_order: VecDeque::new(),
            epoch: 0,
            listing: None,
        };
        Self(Arc::new(Inner {
            label,
            contents: RwLock::new(contents),
            subscribers: RwLock::new(Vec::new()),
            unreadable_subscribers: RwLock::new(Vec::new()),
            specs: PodSpecs::default(),
            synced: tokio::sync::watch::Sender::new(false),
            followed: AtomicBool::new(false),
        }))
    }

    /// Adds an index over the cache, under a name for [`Cache::indexed`]. Adding the same name again changes nothing.
    pub fn index_by(&self, name: &'static str, values: fn(&K) -> Vec<String>) {
        let mut contents = self.write();
        if contents.indexes.iter().any(|index| index.name == name) {
            return;
        }
        let mut index = Index {
            name,
            values,
            keys: HashMap::new(),
        };
        for (key, object) in &contents.objects {
            index.insert(key, object);
        }
        contents.indexes.push(index);
    }

    pub fn get(&self, key: &ObjectKey) -> Option<Arc<K>> {
        self.read().objects.get(key).cloned()
    }

    /// The metadata of an object that cannot be decoded.
    pub fn unreadable(&self, key: &ObjectKey) -> Option<Arc<Unreadable>> {
        self.read().unreadable.get(key).cloned()
    }

    /// The metadata of the objects of a namespace that cannot be decoded.
    pub fn unreadable_in(&self, namespace: &str) -> Vec<Arc<Unreadable>> {
        let contents = self.read();
        let first = ObjectKey::new(namespace, "");
        contents
            .unreadable
            .range(first..)
            .take_while(|(key, _)| &*key.namespace == namespace)
            .map(|(_, unreadable)| Arc::clone(unreadable))
            .collect()
    }

    /// The objects that an index has under a value, in no order.
    pub fn indexed(&self, name: &'static str, value: &str) -> Vec<Arc<K>> {
        let contents = self.read();
        let Some(index) = contents.indexes.iter().find(|index| index.name == name) else {
            return Vec::new();
        };
        let keys = index.keys.get(value).into_iter().flatten();
        keys.filter_map(|key| contents.objects.get(key).cloned())
            .collect()
    }

    /// The objects whose controller has this UID, in no order.
    pub fn controlled_by(&self, uid: &str) -> Vec<Arc<K>> {
        self.indexed(CONTROLLER, uid)
    }

    /// Every object, in no order. Costs as much as there are objects: not for a reconcile.
    pub fn all(&self) -> Vec<Arc<K>> {
        self.read().objects.values().cloned().collect()
    }

    pub fn len(&self) -> usize {
        self.read().objects.len()
    }

    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Calls `subscriber` on every change from now on.
    ///
    /// # Caveats
    /// It is called on the task that caused the change, perhaps by several tasks at once and out of order, so it must read the current
    /// state from the cache. It must not block.
    pub fn subscribe(&self, subscriber: impl Fn(&Change<'_, K>) + Send + Sync + 'static) {
        self.0
            .subscribers
            .write()
            .unwrap_or_else(PoisonError::into_inner)
            .push(Box::new(subscriber));
    }

    /// Calls `subscriber` with the key of every object that cannot be decoded, under the same caveats.
    pub fn subscribe_unreadable(&self, subscriber: impl Fn(&ObjectKey) + Send + Sync + 'static) {
        self.0
            .unreadable_subscribers
            .write()
            .unwrap_or_else(PoisonError::into_inner)
            .push(Box::new(subscriber));
    }

    /// Resolves once the first listing is complete.
    pub async fn synced(&self) {
        let mut synced = self.0.synced.subscribe();
        // The sender lives in the cache itself, so waiting cannot fail.
        let _ = synced.wait_for(|synced| *synced).await;
    }

    pub fn is_synced(&self) -> bool {
        *self.0.synced.borrow()
    }

    /// To be taken before a write whose response is passed to [`Cache::learn`].
    pub fn epoch(&self) -> Epoch {
        Epoch(self.read().epoch)
    }

    /// Stores the response to one of our writes, and returns the cached object.
    pub fn learn(&self, object: K, before_write: Epoch) -> Arc<K> {
        let (key, object) = self.compact(object);
        let outcome = {
            let mut contents = self.write();
            let stale = contents.epoch != before_write.0
                || contents.listing.is_some()
                || !self.selects(&object)
                || resource_version(object.as_ref()).is_none();
            if stale {
                Put::Known
            } else {
                contents.put(key, Arc::clone(&object))
            }
        };
        if let Put::Changed { before } = outcome {
            self.publish(before.as_ref(), Some(&object));
        }
        object
    }

    /// Stores the response to one of our deletions, if the object still exists with a deletion timestamp.
    pub fn learn_deletion(&self, object: K, before_write: Epoch) {
        if object.meta().deletion_timestamp.is_some() {
            self.learn(object, before_write);
        }
    }

    /// Applies an event of the watch, whose object may be undecodable.
    pub(crate) fn take(&self, event: Event<Decoded<Trimmed<K>>>) {
        use Decoded::{Readable, Unreadable};
        match event {
            Event::Init => self.apply(Event::Init),
            Event::InitDone => self.apply(Event::InitDone),
            Event::Apply(Readable(Trimmed(object))) => self.apply(Event::Apply(object)),
            Event::InitApply(Readable(Trimmed(object))) => self.apply(Event::InitApply(object)),
            Event::Delete(Readable(Trimmed(object))) => self.apply(Event::Delete(object)),
            Event::Apply(Unreadable(left)) | Event::InitApply(Unreadable(left)) => {
                self.apply_unreadable(*left);
            }
            Event::Delete(Unreadable(left)) => {
                self.forget(&key_of(&left), version_of(&left));
            }
        }
    }

    /// Applies an event of the watch.
    pub(crate) fn apply(&self, event: Event<K>) {
        match event {
            Event::Init => {
                let mut contents = self.write();
                contents.epoch += 1;
                contents.listing = Some(HashSet::new());
                contents.deleted.clear();
                contents.deletion_order.clear();
            }
            Event::InitApply(object) | Event::Apply(object) => self.apply_object(object),
            Event::Delete(object) => {
                self.forget(&ObjectKey::of(&object), resource_version(&object));
            }
            Event::InitDone => self.finish_listing(),
        }
    }

    fn apply_object(&self, object: K) {
        let (key, object) = self.compact(object);
        let outcome = {
            let mut contents = self.write();
            if let Some(seen) = &mut contents.listing {
                seen.insert(key.clone());
            }
            contents.put(key, Arc::clone(&object))
        };
        if let Put::Changed { before } = outcome {
            self.publish(before.as_ref(), Some(&object));
        }
    }

    /// An object without the fields that no controller reads.
    fn compact(&self, mut object: K) -> (ObjectKey, Arc<K>) {
        let key = ObjectKey::of(&object);
        object.strip();
        object.share(self.get(&key).as_deref(), &self.0.specs);
        (key, Arc::new(object))
    }

    fn apply_unreadable(&self, left: Unreadable) {
        let key = key_of(&left);
        if key.name.is_empty() {
            return;
        }
        let Put::Changed { before } = self.write().put_unreadable(&key, left) else {
            return;
        };
        if let Some(before) = before {
            self.publish(Some(&before), None);
        }
        let subscribers = self
            .0
            .unreadable_subscribers
            .read()
            .unwrap_or_else(PoisonError::into_inner);
        for subscriber in subscribers.iter() {
            subscriber(&key);
        }
    }

    /// Records that an object was deleted at this version.
    fn forget(&self, key: &ObjectKey, deleted: Option<u64>) {
        let removed = self.write().remove(key, deleted);
        if let Some(before) = removed {
            self.publish(Some(&before), None);
        }
    }

    fn finish_listing(&self) {
        let removed: Vec<Arc<K>> = {
            let mut contents = self.write();
            let seen = contents.listing.take().unwrap_or_default();
            let unseen: Vec<ObjectKey> = contents
                .objects
                .keys()
                .chain(contents.unreadable.keys())
                .filter(|key| !seen.contains(*key))
                .cloned()
                .collect();
            unseen
                .iter()
                .filter_map(|key| contents.remove(key, None))
                .collect()
        };
        for before in &removed {
            self.publish(Some(before), None);
        }
        self.0.synced.send_replace(true);
    }

    fn publish(&self, before: Option<&Arc<K>>, after: Option<&Arc<K>>) {
        let change = Change { before, after };
        let subscribers = self
            .0
            .subscribers
            .read()
            .unwrap_or_else(PoisonError::into_inner);
        for subscriber in subscribers.iter() {
            subscriber(&change);
        }
    }

    /// Whether the caller is the first to request a watch for this cache.
    pub(crate) fn claim_watch(&self) -> bool {
        !self.0.followed.swap(true, Ordering::AcqRel)
    }

    /// The label that objects must carry to be cached. It is also the selector of the watch.
    pub(crate) fn label(&self) -> Option<&'static str> {
        self.0.label
    }

    fn selects(&self, object: &K) -> bool {
        self.0.label.is_none_or(|label| {
            let labels = object.meta().labels.as_ref();
            labels.is_some_and(|labels| labels.contains_key(label))
        })
    }

    fn read(&self) -> RwLockReadGuard<'_, Contents<K>> {
        self.0
            .contents
            .read()
            .unwrap_or_else(PoisonError::into_inner)
    }

    fn write(&self) -> RwLockWriteGuard<'_, Contents<K>> {
        self.0
            .contents
            .write()
            .unwrap_or_else(PoisonError::into_inner)
    }
}

impl<K> Clone for Cache<K> {
    fn clone(&self) -> Self {
        Self(Arc::clone(&self.0))
    }
}

impl<K> fmt::Debug for Cache<K> {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter
            .debug_struct("Cache")
            .field("label", &self.0.label)
            .finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests;

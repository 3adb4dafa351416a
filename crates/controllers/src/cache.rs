//! A cache of every object of one kind, and the changes to it.
//!
//! One watch per kind feeds the cache ([`crate::watch`]); controllers read it and subscribe to its changes. What a controller
//! has just written is learned at once, so that it is not decided upon again while the watch catches up: the watch then finds
//! its event already known. Learning is safe because it never takes an object back in time or back to life:
//!
//! - an object is replaced only by one of a higher `resourceVersion` (comparable numbers since Kubernetes 1.35, and in every
//!   server before);
//! - a deletion is remembered, so that the late answer to an earlier write cannot bring the object back;
//! - while the watch lists anew, and for writes that began before it did, nothing is learned.
//!
//! An object that its type cannot hold is kept apart, as metadata: it is not among the objects, and an object that becomes
//! unreadable departs.
//!
//! The cache does not know what its objects mean, nor who subscribes.

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
use crate::slim::Slim;

/// How many deletions are remembered, to refuse answers to writes that came before them.
const REMEMBERED_DELETIONS: usize = 8_192;

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
    /// The object that is new. One that took another's name is, although there was an object before.
    pub fn arrived(&self) -> Option<&Arc<K>> {
        self.after.filter(|_| self.is_of_another())
    }

    /// The object that is gone, perhaps with another in its place.
    pub fn departed(&self) -> Option<&Arc<K>> {
        self.before.filter(|_| self.is_of_another())
    }

    /// Whether the object before and the one after are not the same. A deletion and a creation that a watch has missed come as one
    /// change.
    fn is_of_another(&self) -> bool {
        match (self.before, self.after) {
            (Some(before), Some(after)) => before.meta().uid != after.meta().uid,
            _ => true,
        }
    }
}

type Subscriber<K> = Box<dyn Fn(&Change<'_, K>) + Send + Sync>;
type UnreadableSubscriber = Box<dyn Fn(&ObjectKey) + Send + Sync>;

struct Index<K> {
    name: &'static str,
    values: fn(&K) -> Vec<String>,
    keys: HashMap<String, HashSet<ObjectKey>>,
}

struct Contents<K> {
    objects: HashMap<ObjectKey, Arc<K>>,
    /// The objects that cannot be read. In order, so that those of a namespace lie together.
    unreadable: BTreeMap<ObjectKey, Arc<Unreadable>>,
    indexes: Vec<Index<K>>,
    deleted: HashMap<ObjectKey, u64>,
    deletion_order: VecDeque<(ObjectKey, u64)>,
    /// Counts the times the watch has listed anew.
    epoch: u64,
    /// The keys seen by the listing that is under way.
    listing: Option<HashSet<ObjectKey>>,
}

/// What storing an object did.
enum Put<K> {
    /// Nothing: as much or more was known.
    Known,
    Changed {
        before: Option<Arc<K>>,
    },
}

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

    /// What is left of an object that cannot be read.
    pub fn unreadable(&self, key: &ObjectKey) -> Option<Arc<Unreadable>> {
        self.read().unreadable.get(key).cloned()
    }

    /// What is left of the objects of a namespace that cannot be read.
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

    /// The objects that an index files under a value, in no order.
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
    /// It is called on the task that caused the change, perhaps by several at once and out of order: what counts is what the
    /// cache says when it is read. It must not block.
    pub fn subscribe(&self, subscriber: impl Fn(&Change<'_, K>) + Send + Sync + 'static) {
        self.0
            .subscribers
            .write()
            .unwrap_or_else(PoisonError::into_inner)
            .push(Box::new(subscriber));
    }

    /// Calls `subscriber` with the key of every object that is found not to be readable, under the same caveats.
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

    /// To be taken before a write whose answer is to be learned.
    pub fn epoch(&self) -> Epoch {
        Epoch(self.read().epoch)
    }

    /// Takes in the answer to a write of our own and returns it as it is cached from now on.
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

    /// Takes in the answer to a deletion of our own, if it shows an object that is still there but on its way out.
    pub fn learn_deletion(&self, object: K, before_write: Epoch) {
        if object.meta().deletion_timestamp.is_some() {
            self.learn(object, before_write);
        }
    }

    /// Takes in an event of the watch, whose object may not be readable.
    pub(crate) fn take(&self, event: Event<Decoded<Slim<K>>>) {
        use Decoded::{Readable, Unreadable};
        match event {
            Event::Init => self.apply(Event::Init),
            Event::InitDone => self.apply(Event::InitDone),
            Event::Apply(Readable(Slim(object))) => self.apply(Event::Apply(object)),
            Event::InitApply(Readable(Slim(object))) => self.apply(Event::InitApply(object)),
            Event::Delete(Readable(Slim(object))) => self.apply(Event::Delete(object)),
            Event::Apply(Unreadable(left)) | Event::InitApply(Unreadable(left)) => {
                self.apply_unreadable(*left);
            }
            Event::Delete(Unreadable(left)) => {
                self.forget(&key_of(&left), version_of(&left));
            }
        }
    }

    /// Takes in an event of the watch.
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

    /// An object as it is to be kept.
    fn compact(&self, mut object: K) -> (ObjectKey, Arc<K>) {
        let key = ObjectKey::of(&object);
        object.slim();
        object.share(self.get(&key).as_deref(), &self.0.specs);
        (key, Arc::new(object))
    }

    fn apply_unreadable(&self, left: Unreadable) {
        let key = key_of(&left);
        if key.name.is_empty() {
            return;
        }
        let Some(before) = self.write().put_unreadable(&key, left) else {
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

    /// Takes in that an object was deleted at this version.
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

    /// Whether the caller is the first to ask for this cache to be fed by a watch.
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

impl<K: Cached> Contents<K> {
    /// Stores an object unless what is known is as new or newer.
    fn put(&mut self, key: ObjectKey, object: Arc<K>) -> Put<K> {
        if self.is_superseded(&key, resource_version(object.as_ref())) {
            return Put::Known;
        }
        self.unreadable.remove(&key);
        let before = self.objects.get(&key).cloned();
        for index in &mut self.indexes {
            if let Some(before) = &before {
                index.remove(&key, before);
            }
            index.insert(&key, &object);
        }
        self.objects.insert(key, object);
        Put::Changed { before }
    }

    /// Stores what is left of an object that cannot be read, unless what is known is as new or newer. Answers with the object that
    /// could be read until now.
    fn put_unreadable(&mut self, key: &ObjectKey, left: Unreadable) -> Option<Option<Arc<K>>> {
        if let Some(seen) = &mut self.listing {
            seen.insert(key.clone());
        }
        if self.is_superseded(key, version_of(&left)) {
            return None;
        }
        let before = self.take_out(key);
        self.unreadable.insert(key.clone(), Arc::new(left));
        Some(before)
    }

    /// Whether as much or more is known of an object as of this version.
    fn is_superseded(&self, key: &ObjectKey, version: Option<u64>) -> bool {
        let Some(version) = version else {
            return false;
        };
        let known = self.known_version(key);
        // A listing says what is true, even if the server was restored from a backup and went back in time.
        if self.listing.is_some() {
            known == Some(version)
        } else {
            known >= Some(version) || self.deleted.get(key).copied() >= Some(version)
        }
    }

    /// Removes an object, unless what is known is newer than the version that was deleted.
    fn remove(&mut self, key: &ObjectKey, deleted: Option<u64>) -> Option<Arc<K>> {
        let known = self.known_version(key);
        if let Some(deleted) = deleted {
            self.remember_deletion(key, deleted);
            if known > Some(deleted) {
                return None;
            }
        }
        self.unreadable.remove(key);
        self.take_out(key)
    }

    fn take_out(&mut self, key: &ObjectKey) -> Option<Arc<K>> {
        let removed = self.objects.remove(key)?;
        for index in &mut self.indexes {
            index.remove(key, &removed);
        }
        Some(removed)
    }

    fn known_version(&self, key: &ObjectKey) -> Option<u64> {
        self.objects
            .get(key)
            .and_then(|known| resource_version(known.as_ref()))
            .or_else(|| version_of(self.unreadable.get(key)?))
    }

    fn remember_deletion(&mut self, key: &ObjectKey, version: u64) {
        self.deleted.insert(key.clone(), version);
        self.deletion_order.push_back((key.clone(), version));
        if self.deletion_order.len() > REMEMBERED_DELETIONS
            && let Some((oldest, version)) = self.deletion_order.pop_front()
            && self.deleted.get(&oldest) == Some(&version)
        {
            self.deleted.remove(&oldest);
        }
    }
}

fn key_of(left: &Unreadable) -> ObjectKey {
    let metadata = &left.metadata;
    ObjectKey::new(
        metadata.namespace.as_deref().unwrap_or_default(),
        metadata.name.as_deref().unwrap_or_default(),
    )
}

fn version_of(left: &Unreadable) -> Option<u64> {
    left.metadata.resource_version.as_deref()?.parse().ok()
}

impl<K> Index<K> {
    fn insert(&mut self, key: &ObjectKey, object: &K) {
        for value in (self.values)(object) {
            self.keys.entry(value).or_default().insert(key.clone());
        }
    }

    fn remove(&mut self, key: &ObjectKey, object: &K) {
        for value in (self.values)(object) {
            if let Some(keys) = self.keys.get_mut(&value) {
                keys.remove(key);
                if keys.is_empty() {
                    self.keys.remove(&value);
                }
            }
        }
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

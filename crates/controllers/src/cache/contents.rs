//! The contents of a cache. Of two versions of an object, the later one is kept.

use std::collections::{BTreeMap, HashMap, HashSet, VecDeque};
use std::sync::Arc;

use api::decoding::Unreadable;

use crate::cached::{Cached, resource_version};
use crate::key::ObjectKey;

/// How many deletions are remembered, to ignore late responses to earlier writes.
const REMEMBERED_DELETIONS: usize = 8_192;

/// An index: the keys of objects, by a value.
pub(super) struct Index<K> {
    pub name: &'static str,
    pub values: fn(&K) -> Vec<String>,
    pub keys: HashMap<String, HashSet<ObjectKey>>,
}

/// The objects of a cache, and the remembered deletions.
pub(super) struct Contents<K> {
    pub objects: HashMap<ObjectKey, Arc<K>>,
    /// The objects that cannot be decoded, in order, so that those of a namespace are adjacent.
    pub unreadable: BTreeMap<ObjectKey, Arc<Unreadable>>,
    pub indexes: Vec<Index<K>>,
    pub deleted: HashMap<ObjectKey, u64>,
    pub deletion_order: VecDeque<(ObjectKey, u64)>,
    /// How often the watch has relisted.
    pub epoch: u64,
    /// The keys seen by the current relist.
    pub listing: Option<HashSet<ObjectKey>>,
}

/// What storing an object did.
pub(super) enum Put<K> {
    /// Nothing: the cache has this version or a later one.
    Known,
    Changed {
        before: Option<Arc<K>>,
    },
}

impl<K: Cached> Contents<K> {
    /// Stores an object unless the cache has this version or a later one.
    pub fn put(&mut self, key: ObjectKey, object: Arc<K>) -> Put<K> {
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

    /// Stores the metadata of an object that cannot be decoded, unless the cache has this version or a later one. Returns the last
    /// version that could be decoded.
    pub fn put_unreadable(&mut self, key: &ObjectKey, left: Unreadable) -> Put<K> {
        if let Some(seen) = &mut self.listing {
            seen.insert(key.clone());
        }
        if self.is_superseded(key, version_of(&left)) {
            return Put::Known;
        }
        let before = self.take_out(key);
        self.unreadable.insert(key.clone(), Arc::new(left));
        Put::Changed { before }
    }

    /// Whether the cache has this version of an object or a later one.
    fn is_superseded(&self, key: &ObjectKey, version: Option<u64>) -> bool {
        let Some(version) = version else {
            return false;
        };
        let known = self.known_version(key);
        // A relist is authoritative, even if the server was restored from a backup and its versions went back.
        if self.listing.is_some() {
            known == Some(version)
        } else {
            known >= Some(version) || self.deleted.get(key).copied() >= Some(version)
        }
    }

    /// Removes an object, unless the cache has a later version than the deleted one.
    pub fn remove(&mut self, key: &ObjectKey, deleted: Option<u64>) -> Option<Arc<K>> {
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

pub(super) fn key_of(left: &Unreadable) -> ObjectKey {
    let metadata = &left.metadata;
    ObjectKey::new(
        metadata.namespace.as_deref().unwrap_or_default(),
        metadata.name.as_deref().unwrap_or_default(),
    )
}

pub(super) fn version_of(left: &Unreadable) -> Option<u64> {
    left.metadata.resource_version.as_deref()?.parse().ok()
}

impl<K> Index<K> {
    pub fn insert(&mut self, key: &ObjectKey, object: &K) {
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

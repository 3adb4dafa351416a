//! The state in memory: the current objects and the recent events of every kind.
//!
//! An event holds the object before and after the write. So a list at any revision in a kind's window can be computed by undoing
//! the later events. The window is bounded by count, by age and, over all kinds together, by the bytes that only the window holds
//! in memory. This file does no I/O.

use std::{
    collections::{BTreeMap, HashMap, VecDeque},
    ops::Bound,
    sync::Arc,
    time::{Duration, Instant},
};

use tokio::sync::watch;

use super::{
    Expired, Key, Object, ResourceId, Revision,
    log::{Contents, Garbage, LogError, RowKind},
};

/// The bounds of the event history.
#[derive(Clone, Copy, Debug)]
pub struct Window {
    /// Maximum number of events of one kind.
    pub events_per_kind: usize,
    /// Maximum bytes of superseded objects over all kinds.
    pub bytes: usize,
    /// Maximum age of an event.
    pub age: Duration,
}

impl Default for Window {
    fn default() -> Self {
        Self {
            events_per_kind: 16_384,
            bytes: 48 << 20,
            age: Duration::from_secs(300),
        }
    }
}

/// The kind of change.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum EventKind {
    /// It was created.
    Added,
    /// It was changed.
    Modified,
    /// It was removed; the event carries its last state.
    Deleted,
}

/// One write, as watchers see it.
#[derive(Clone, Debug)]
pub struct Event {
    /// The kind of change.
    pub kind: EventKind,
    /// The object after the write, or its last state.
    pub object: Arc<Object>,
    /// The object before the write.
    pub previous: Option<Arc<Object>>,
    pub(crate) at: Instant,
}

impl Event {
    /// An event that happens now.
    pub fn new(kind: EventKind, object: Arc<Object>, previous: Option<Arc<Object>>) -> Self {
        Self {
            kind,
            object,
            previous,
            at: Instant::now(),
        }
    }

    /// Revision of the write.
    #[inline]
    pub fn revision(&self) -> Revision {
        self.object.revision
    }

    /// Bytes in memory that only this event references.
    fn cost(&self) -> usize {
        const BOOKKEEPING: usize = 256;
        let previous = self
            .previous
            .as_ref()
            .map_or(0, |object| object.bytes.len());
        let last = if self.kind == EventKind::Deleted {
            self.object.bytes.len()
        } else {
            0
        };
        previous + last + BOOKKEEPING
    }
}

/// The part of a kind that a list covers.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Range {
    /// Only this namespace; empty for all namespaces.
    pub namespace: String,
    /// Only keys after this one, for the next page.
    pub after: Option<Key>,
}

impl Range {
    /// All objects in `namespace`, or in all namespaces if it is empty.
    pub fn namespace(namespace: &str) -> Self {
        Self {
            namespace: namespace.to_owned(),
            after: None,
        }
    }

    fn contains(&self, key: &Key) -> bool {
        (self.namespace.is_empty() || key.namespace() == self.namespace)
            && self.after.as_ref().is_none_or(|after| key > after)
    }
}

/// The objects and the history of one kind.
#[derive(Debug)]
pub struct Table {
    pub(super) objects: BTreeMap<Key, Arc<Object>>,
    pub(super) events: VecDeque<Event>,
    pub(super) floor: Revision,
    pub(super) newest: watch::Sender<Revision>,
    bytes: usize,
}

impl Table {
    fn new(floor: Revision) -> Self {
        Self {
            objects: BTreeMap::new(),
            events: VecDeque::new(),
            floor,
            newest: watch::Sender::new(floor),
            bytes: 0,
        }
    }

    fn select(&self, range: &Range) -> impl Iterator<Item = (&Key, &Arc<Object>)> {
        // '/' separates the parts of a key and '0' is the next character, so these bounds contain exactly one namespace.
        let prefix = Key::from_stored(&format!("{}/", range.namespace));
        let end = Key::from_stored(&format!("{}0", range.namespace));
        let all = range.namespace.is_empty();
        let lower = match &range.after {
            Some(after) => Bound::Excluded(after.clone()),
            None if all => Bound::Unbounded,
            None => Bound::Included(prefix.clone()),
        };
        let lower = match lower {
            Bound::Excluded(after) if !all && after < prefix => Bound::Included(prefix),
            other => other,
        };
        let exhausted = !all && matches!(&lower, Bound::Excluded(after) if *after >= end);
        let upper = if all {
            Bound::Unbounded
        } else {
            Bound::Excluded(end)
        };
        let range = if exhausted {
            None
        } else {
            Some(self.objects.range((lower, upper)))
        };
        range.into_iter().flatten()
    }

    /// The changes to the current objects that yield the kind's objects at `revision`; `None` means absent.
    fn undo_to(&self, revision: Revision) -> BTreeMap<Key, Option<Arc<Object>>> {
        let later = self
            .events
            .partition_point(|event| event.revision() <= revision);
        let mut undone = BTreeMap::new();
        for event in self.events.range(later..) {
            undone
                .entry(event.object.key.clone())
                .or_insert_with(|| event.previous.clone());
        }
        undone
    }

    pub(super) fn check(&self, revision: Revision) -> Result<(), Expired> {
        if revision < self.floor {
            Err(Expired {
                requested: revision,
                oldest: self.floor,
            })
        } else {
            Ok(())
        }
    }
}

/// Everything in memory.
#[derive(Debug)]
pub struct State {
    /// The last applied revision.
    pub revision: Revision,
    tables: HashMap<ResourceId, Table>,
    window: Window,
    bytes: usize,
}

impl State {
    /// Builds the state from the contents of the log.
    pub fn load(contents: Contents, window: Window) -> Result<Self, LogError> {
        let mut state = Self {
            revision: contents.revision,
            tables: HashMap::new(),
            window,
            bytes: 0,
        };
        let floors = contents.floors;
        let mut versions: HashMap<(ResourceId, Key), Arc<Object>> = HashMap::new();
        let now = Instant::now();
        for row in contents.rows {
            let object =
                Object::from_stored(row.key.clone(), row.revision, row.value).map_err(|error| {
                    LogError::Damaged(format!(
                        "revision {} is not an object: {error}",
                        row.revision
                    ))
                })?;
            let object = Arc::new(object);
            let floor = floors.get(&row.resource).copied().unwrap_or_default();
            let table = state
                .tables
                .entry(row.resource.clone())
                .or_insert_with(|| Table::new(floor));
            let previous = match row.kind {
                RowKind::Put => {
                    table.objects.insert(row.key.clone(), object.clone());
                    versions.insert((row.resource, row.key), object.clone())
                }
                RowKind::Delete => {
                    table.objects.remove(&row.key);
                    versions.remove(&(row.resource, row.key))
                }
            };
            if row.revision <= table.floor {
                continue;
            }
            let kind = match row.kind {
                RowKind::Delete => EventKind::Deleted,
                RowKind::Put if row.previous == 0 => EventKind::Added,
                RowKind::Put => EventKind::Modified,
            };
            let event = Event {
                kind,
                object,
                previous,
                at: now,
            };
            table.bytes += event.cost();
            state.bytes += event.cost();
            table.events.push_back(event);
        }
        for table in state.tables.values() {
            let last = table.objects.values().map(|object| object.revision).max();
            table.newest.send_replace(last.unwrap_or(table.floor));
        }
        // A kind without rows may still have a compacted history.
        for (resource, floor) in floors {
            state
                .tables
                .entry(resource)
                .or_insert_with(|| Table::new(floor));
        }
        Ok(state)
    }

    /// The table of a kind, if anything was ever stored in it.
    pub fn table(&self, resource: &ResourceId) -> Option<&Table> {
        self.tables.get(resource)
    }

    /// The table of a kind, created if missing.
    pub fn table_mut(&mut self, resource: &ResourceId) -> &mut Table {
        self.tables
            .entry(resource.clone())
            .or_insert_with(|| Table::new(0))
    }

    /// Every kind that has a table.
    pub fn resources(&self) -> impl Iterator<Item = (&ResourceId, &Table)> {
        self.tables.iter()
    }

    /// One object.
    pub fn get(&self, resource: &ResourceId, key: &str) -> Option<&Arc<Object>> {
        self.tables.get(resource)?.objects.get(key)
    }

    /// The objects in `range` as of `revision`, or as of now.
    pub fn list(
        &self,
        resource: &ResourceId,
        range: &Range,
        revision: Option<Revision>,
    ) -> Result<Vec<Arc<Object>>, Expired> {
        let Some(table) = self.tables.get(resource) else {
            return Ok(Vec::new());
        };
        let revision = revision.unwrap_or(self.revision);
        table.check(revision)?;
        let mut undone = table.undo_to(revision);
        if undone.is_empty() {
            return Ok(table
                .select(range)
                .map(|(_, object)| object.clone())
                .collect());
        }
        undone.retain(|key, _| range.contains(key));
        let mut listed: BTreeMap<Key, Arc<Object>> = table
            .select(range)
            .map(|(key, object)| (key.clone(), object.clone()))
            .collect();
        for (key, version) in undone {
            match version {
                Some(object) => listed.insert(key, object),
                None => listed.remove(&key),
            };
        }
        Ok(listed.into_values().collect())
    }

    /// Makes a committed write visible.
    pub fn apply(&mut self, resource: &ResourceId, event: Event) {
        self.revision = event.revision();
        let cost = event.cost();
        self.bytes += cost;
        let table = self.table_mut(resource);
        table.bytes += cost;
        if event.kind == EventKind::Deleted {
            table.objects.remove(&event.object.key);
        } else {
            table
                .objects
                .insert(event.object.key.clone(), event.object.clone());
        }
        table.events.push_back(event);
    }

    /// Removes events beyond the window and returns the rows that the log no longer needs.
    pub fn trim(&mut self, now: Instant) -> Garbage {
        let mut garbage = Garbage::default();
        let window = self.window;
        let Self { tables, bytes, .. } = self;
        for (resource, table) in tables.iter_mut() {
            while table.events.front().is_some_and(|oldest| {
                table.events.len() > window.events_per_kind
                    || now.saturating_duration_since(oldest.at) > window.age
            }) {
                *bytes -= remove_oldest(resource, table, &mut garbage);
            }
        }
        while *bytes > window.bytes {
            let Some((resource, table)) = tables.iter_mut().max_by_key(|(_, table)| table.bytes)
            else {
                break;
            };
            let target = table.bytes / 8;
            let mut freed = 0;
            while freed <= target && !table.events.is_empty() {
                freed += remove_oldest(resource, table, &mut garbage);
            }
            if freed == 0 {
                break;
            }
            *bytes -= freed;
        }
        garbage
    }
}

fn remove_oldest(resource: &ResourceId, table: &mut Table, garbage: &mut Garbage) -> usize {
    let Some(event) = table.events.pop_front() else {
        return 0;
    };
    let cost = event.cost();
    table.bytes -= cost;
    table.floor = event.revision();
    garbage.floors.insert(resource.clone(), event.revision());
    garbage
        .rows
        .extend(event.previous.as_ref().map(|previous| previous.revision));
    if event.kind == EventKind::Deleted {
        garbage.rows.push(event.revision());
    }
    cost
}

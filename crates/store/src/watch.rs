//! Watching one kind from a revision on.
//!
//! A watch has no queue of its own: it reads the shared event window at its own pace. A watch that falls out of the window gets
//! [`Expired`]. A slow watcher therefore costs no memory.

use std::sync::{Arc, PoisonError};

use tokio::sync::watch;

use super::{Event, Expired, ResourceId, Revision, Shared};

const EVENT_BATCH: usize = 256;

/// A position in the history of one kind.
#[derive(Debug)]
pub struct Watch {
    shared: Arc<Shared>,
    resource: ResourceId,
    cursor: Revision,
    newest: watch::Receiver<Revision>,
}

impl Watch {
    pub(super) fn new(
        shared: Arc<Shared>,
        resource: ResourceId,
        after: Revision,
    ) -> Result<Self, Expired> {
        let newest = {
            let mut state = shared.state.write().unwrap_or_else(PoisonError::into_inner);
            let table = state.table_mut(&resource);
            table.check(after)?;
            table.newest.subscribe()
        };
        Ok(Self {
            shared,
            resource,
            cursor: after,
            newest,
        })
    }

    /// The next events, at least one; waits for them.
    pub async fn next(&mut self) -> Result<Vec<Event>, Expired> {
        loop {
            self.newest.mark_unchanged();
            let events = self.ready()?;
            if !events.is_empty() {
                return Ok(events);
            }
            if self.newest.changed().await.is_err() {
                std::future::pending::<()>().await;
            }
        }
    }

    /// The events that are available now; may be empty.
    pub fn ready(&mut self) -> Result<Vec<Event>, Expired> {
        let state = self
            .shared
            .state
            .read()
            .unwrap_or_else(PoisonError::into_inner);
        let Some(table) = state.table(&self.resource) else {
            return Ok(Vec::new());
        };
        table.check(self.cursor)?;
        let start = table
            .events
            .partition_point(|event| event.revision() <= self.cursor);
        let events: Vec<Event> = table
            .events
            .range(start..)
            .take(EVENT_BATCH)
            .cloned()
            .collect();
        if let Some(last) = events.last() {
            self.cursor = last.revision();
        }
        Ok(events)
    }

    /// The revision up to which this watch has seen everything: the store's revision if no event of this kind is pending.
    pub fn progress(&mut self) -> Revision {
        let state = self
            .shared
            .state
            .read()
            .unwrap_or_else(PoisonError::into_inner);
        let pending = state.table(&self.resource).is_some_and(|table| {
            table.floor > self.cursor
                || table
                    .events
                    .back()
                    .is_some_and(|event| event.revision() > self.cursor)
        });
        if !pending {
            self.cursor = self.cursor.max(state.revision);
        }
        self.cursor
    }
}

//! Following one kind from a revision on.
//!
//! A watch holds no queue of its own: it reads the shared window of events at its own pace, and one that falls out of the window
//! is told so. A slow watcher therefore costs nothing.

use std::sync::{Arc, PoisonError};

use tokio::sync::watch;

use super::{Event, Expired, ResourceId, Revision, Shared};

const EVENTS_AT_ONCE: usize = 256;

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

    /// The events that are there already, possibly none.
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
            .take(EVENTS_AT_ONCE)
            .cloned()
            .collect();
        if let Some(last) = events.last() {
            self.cursor = last.revision();
        }
        Ok(events)
    }

    /// The revision up to which this watch has seen everything: the store's, when nothing of this kind is outstanding.
    pub fn progress(&mut self) -> Revision {
        let state = self
            .shared
            .state
            .read()
            .unwrap_or_else(PoisonError::into_inner);
        let outstanding = state.table(&self.resource).is_some_and(|table| {
            table.floor > self.cursor
                || table
                    .events
                    .back()
                    .is_some_and(|event| event.revision() > self.cursor)
        });
        if !outstanding {
            self.cursor = self.cursor.max(state.revision);
        }
        self.cursor
    }
}

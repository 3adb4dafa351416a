//! The single writer thread. It takes all queued writes as one batch, checks each against the state and the earlier writes of the
//! batch, makes the batch durable with one sync, and only then publishes it to readers and replies to the clients.
//!
//! Only this thread changes the state, so no other write can come between the check of a precondition and its write.

use std::{
    collections::HashMap,
    sync::{Arc, PoisonError, mpsc as std_mpsc},
    time::Instant,
};

use tokio::sync::{mpsc, oneshot};

use super::{
    Change, Event, EventKind, Expectation, Key, Object, ResourceId, Shared, Write, WriteError,
    directory::Directory,
    log::{Checkpointer, Garbage, Log, LogError, Row, RowKind},
};

const BATCH_WRITES: usize = 512;
const CHECKPOINT_BYTES: usize = 4 << 20;
const WAL_BYTES: usize = 64 << 20;

/// The channel for the result of a write.
pub type Reply = oneshot::Sender<Result<Arc<Object>, WriteError>>;

/// A command to the writer thread.
#[derive(Debug)]
pub enum Command {
    /// One write, and the channel for its result.
    Write(Box<Write>, Reply),
    /// Remove events that are older than the window.
    Trim,
    /// Commit the queued writes and close the log.
    Close(oneshot::Sender<()>),
}

/// The writer's own state.
#[derive(Debug)]
pub struct Writer {
    pub(super) shared: Arc<Shared>,
    pub(super) log: Log,
    pub(super) directory: Option<Directory>,
    pub(super) checkpoints: Option<std_mpsc::SyncSender<()>>,
    pub(super) garbage: Garbage,
    pub(super) bytes_since_checkpoint: usize,
    pub(super) wal_bytes: usize,
}

/// Starts the thread that checkpoints in the background. It ends when the sender is dropped.
pub fn spawn_checkpointer(
    checkpointer: Checkpointer,
    shared: Arc<Shared>,
) -> std::io::Result<std_mpsc::SyncSender<()>> {
    let (sender, receiver) = std_mpsc::sync_channel(1);
    std::thread::Builder::new()
        .name("store-checkpoint".into())
        .spawn(move || {
            while receiver.recv().is_ok() {
                if let Err(error) = checkpointer.run() {
                    if error.is_sync_failure() {
                        // A second sync could succeed although the data of the first was lost, and then the WAL would be
                        // discarded.
                        shared.fail(&Arc::new(error));
                        return;
                    }
                    tracing::warn!(
                        error = &error as &dyn std::error::Error,
                        "a background checkpoint failed; it will be retried"
                    );
                }
            }
        })?;
    Ok(sender)
}

struct Decided {
    resource: ResourceId,
    event: Event,
    reply: Reply,
}

impl Writer {
    /// Serves commands until a `Close` command arrives or every sender is dropped.
    pub fn run(mut self, mut commands: mpsc::Receiver<Command>) {
        let mut closing = None;
        let mut batch = Vec::new();
        while closing.is_none() {
            let Some(mut command) = commands.blocking_recv() else {
                break;
            };
            let mut trim = false;
            loop {
                match command {
                    Command::Write(write, reply) => batch.push((*write, reply)),
                    Command::Trim => trim = true,
                    Command::Close(done) => closing = Some(done),
                }
                if batch.len() >= BATCH_WRITES || closing.is_some() {
                    break;
                }
                match commands.try_recv() {
                    Ok(next) => command = next,
                    Err(_) => break,
                }
            }
            self.commit(&mut batch, trim);
        }
        self.checkpoints = None;
        self.log.close();
        drop(self.directory);
        if let Some(done) = closing {
            let _ = done.send(());
        }
    }

    fn commit(&mut self, batch: &mut Vec<(Write, Reply)>, trim: bool) {
        let failure = self.shared.failure.borrow().clone();
        if let Some(error) = failure {
            for (_, reply) in batch.drain(..) {
                let _ = reply.send(Err(WriteError::Storage(error.clone())));
            }
            return;
        }
        let mut decided = Vec::with_capacity(batch.len());
        let mut pending: HashMap<(ResourceId, Key), Option<Arc<Object>>> = HashMap::new();
        let mut revision = self.log.revision();
        let now = Instant::now();
        for (write, reply) in batch.drain(..) {
            match self.decide(write, &pending, revision + 1, now) {
                Ok((resource, event)) => {
                    revision += 1;
                    let after = (event.kind != EventKind::Deleted).then(|| event.object.clone());
                    pending.insert((resource.clone(), event.object.key.clone()), after);
                    decided.push(Decided {
                        resource,
                        event,
                        reply,
                    });
                }
                Err(error) => {
                    let _ = reply.send(Err(error));
                }
            }
        }
        if trim {
            self.trim(now);
        }
        if decided.is_empty() && self.garbage.rows.is_empty() {
            return;
        }
        let rows: Vec<Row> = decided.iter().map(row_of).collect();
        match self.log.append(&rows, &self.garbage) {
            Ok(()) => {
                self.garbage = Garbage::default();
                if let Some(directory) = &self.directory
                    && let Err(error) = directory.acknowledge(revision)
                {
                    tracing::warn!(
                        error = &error as &dyn std::error::Error,
                        "cannot update the record of the acknowledged revision"
                    );
                }
                self.publish(decided, now);
                self.schedule_checkpoint(rows.iter().map(|row| row.value.len() + 512).sum());
            }
            Err(error) => self.refuse(decided, error),
        }
    }

    fn decide(
        &self,
        write: Write,
        pending: &HashMap<(ResourceId, Key), Option<Arc<Object>>>,
        revision: u64,
        now: Instant,
    ) -> Result<(ResourceId, Event), WriteError> {
        let state = self
            .shared
            .state
            .read()
            .unwrap_or_else(PoisonError::into_inner);
        let current = |resource: &ResourceId, key: &Key| match pending
            .get(&(resource.clone(), key.clone()))
        {
            Some(version) => version.clone(),
            None => state.get(resource, key.as_str()).cloned(),
        };
        let lacks = |(resource, key): &&(ResourceId, Key)| {
            current(resource, key).is_none_or(|object| object.is_deleting())
        };
        if let Some((missing, _)) = write.requires.iter().find(lacks) {
            return Err(WriteError::Requirement(missing.clone()));
        }
        let previous = current(&write.resource, &write.key);
        let expected = match (&write.expect, &previous) {
            (Expectation::Absent, None) => true,
            (Expectation::Revision(expected), Some(object)) => *expected == object.revision,
            _ => false,
        };
        if !expected {
            return Err(WriteError::Conflict { current: previous });
        }
        let (kind, draft) = match write.change {
            Change::Put(draft) if previous.is_none() => (EventKind::Added, draft),
            Change::Put(draft) => (EventKind::Modified, draft),
            Change::Delete(draft) => (EventKind::Deleted, draft),
        };
        let object = Arc::new(draft.sequence(write.key, revision));
        Ok((
            write.resource,
            Event {
                kind,
                object,
                previous,
                at: now,
            },
        ))
    }

    fn publish(&mut self, decided: Vec<Decided>, now: Instant) {
        let mut replies = Vec::with_capacity(decided.len());
        {
            let mut state = self
                .shared
                .state
                .write()
                .unwrap_or_else(PoisonError::into_inner);
            let mut feed = self
                .shared
                .feed
                .lock()
                .unwrap_or_else(PoisonError::into_inner);
            let mut touched: HashMap<ResourceId, u64> = HashMap::new();
            for Decided {
                resource,
                event,
                reply,
            } in decided
            {
                if let Some(sender) = feed.as_ref()
                    && sender.send((resource.clone(), event.clone())).is_err()
                {
                    *feed = None;
                }
                touched.insert(resource.clone(), event.revision());
                replies.push((reply, event.object.clone()));
                state.apply(&resource, event);
            }
            for (resource, revision) in touched {
                state.table_mut(&resource).newest.send_replace(revision);
            }
        }
        for (reply, object) in replies {
            let _ = reply.send(Ok(object));
        }
        self.trim(now);
    }

    fn trim(&mut self, now: Instant) {
        let more = self
            .shared
            .state
            .write()
            .unwrap_or_else(PoisonError::into_inner)
            .trim(now);
        self.garbage.rows.extend(more.rows);
        self.garbage.floors.extend(more.floors);
    }

    fn schedule_checkpoint(&mut self, bytes: usize) {
        self.bytes_since_checkpoint += bytes;
        self.wal_bytes += bytes;
        if self.bytes_since_checkpoint > CHECKPOINT_BYTES
            && let Some(checkpoints) = &self.checkpoints
            && checkpoints.try_send(()).is_ok()
        {
            self.bytes_since_checkpoint = 0;
        }
        // Passive checkpoints never catch up with a steady stream of writes, so the WAL is restarted from time to time.
        if self.wal_bytes > WAL_BYTES && self.checkpoints.is_some() {
            self.wal_bytes = 0;
            if let Err(error) = self.log.restart_wal() {
                tracing::warn!(
                    error = &error as &dyn std::error::Error,
                    "cannot restart the write-ahead log; it grows until the next attempt"
                );
            }
        }
    }

    fn refuse(&mut self, decided: Vec<Decided>, error: LogError) {
        let error = Arc::new(self.classify(error));
        if error.is_fatal() {
            self.shared.fail(&error);
        }
        tracing::error!(
            error = &*error as &dyn std::error::Error,
            writes = decided.len(),
            "writes could not be made durable and were rejected"
        );
        for Decided { reply, .. } in decided {
            let _ = reply.send(Err(WriteError::Storage(error.clone())));
        }
    }

    /// Distinguishes a full disk, which recovers, from a failing disk. SQLite reports some of their errors with the same code.
    fn classify(&self, error: LogError) -> LogError {
        /// A disk with less free space counts as full.
        const MINIMUM_FREE_BYTES: u64 = 1 << 20;
        let has_room = self.directory.as_ref().is_none_or(|directory| {
            rustix::fs::statvfs(directory.path())
                .is_ok_and(|disk| disk.f_bavail.saturating_mul(disk.f_frsize) >= MINIMUM_FREE_BYTES)
        });
        match error {
            LogError::Sqlite { source, .. } if !has_room && LogError::is_io(&source) => {
                LogError::DiskFull { source }
            }
            other => other,
        }
    }
}

fn row_of(decided: &Decided) -> Row {
    let event = &decided.event;
    Row {
        revision: event.revision(),
        resource: decided.resource.clone(),
        key: event.object.key.clone(),
        previous: event
            .previous
            .as_ref()
            .map_or(0, |previous| previous.revision),
        kind: if event.kind == EventKind::Deleted {
            RowKind::Delete
        } else {
            RowKind::Put
        },
        value: event.object.bytes.clone(),
    }
}

#![doc = include_str!("../README.md")]
#![cfg_attr(not(test), warn(clippy::arithmetic_side_effects))]

pub mod directory;
pub mod log;
mod object;
mod state;
mod watch;
mod writer;

use std::{
    path::PathBuf,
    sync::{Arc, Mutex, PoisonError, RwLock},
};

use tokio::sync::{mpsc, oneshot, watch as watch_channel};

pub use self::{
    directory::is_in_use,
    object::{Draft, DraftError, Key, Object, ObjectMetadata, Owner, ResourceId, Revision},
    state::{Event, EventKind, Range, Window},
    watch::Watch,
};
use self::{
    directory::{Directory, DirectoryError},
    log::{Checkpointer, Garbage, Log, LogError},
    state::State,
    writer::{Command, Writer},
};

/// Why a store cannot be opened.
#[derive(Debug, thiserror::Error)]
pub enum OpenError {
    /// The data directory cannot be created, opened or locked.
    #[error(transparent)]
    Directory(#[from] DirectoryError),
    /// The log cannot be read.
    #[error("cannot open the store in {path}")]
    Log {
        /// The data directory.
        path: PathBuf,
        /// The cause.
        #[source]
        source: LogError,
    },
    /// Acknowledged writes are missing or unreadable.
    #[error(
        "the data directory {path} is damaged: {detail}. Nothing was changed. Restore the directory from a backup, or move it away to start empty"
    )]
    Damaged {
        /// The data directory.
        path: PathBuf,
        /// The damage that was found.
        detail: String,
    },
    /// The writer's threads could not start.
    #[error("cannot start the store's threads")]
    Threads(#[source] std::io::Error),
}

/// The requested revision is older than the retained event history (HTTP 410 Gone, reason `Expired`).
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("too old resource version: {requested} ({oldest})")]
pub struct Expired {
    /// The revision that the caller asked for.
    pub requested: Revision,
    /// The oldest revision that is still available.
    pub oldest: Revision,
}

/// Why a write did not happen.
#[derive(Clone, Debug, thiserror::Error)]
pub enum WriteError {
    /// The object is not at the revision that the write expects.
    #[error("the object has been modified")]
    Conflict {
        /// The current version of the object, if it exists.
        current: Option<Arc<Object>>,
    },
    /// An object that the write requires is missing or is being deleted.
    #[error("an object of {0:?} that this one requires is gone")]
    Requirement(ResourceId),
    /// The write to disk failed.
    #[error("the write could not be made durable")]
    Storage(#[source] Arc<LogError>),
    /// The store was closed.
    #[error("the store is closed")]
    Closed,
}

/// The precondition of a write (compare-and-swap).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Expectation {
    /// No object under the key.
    Absent,
    /// The object at exactly this revision.
    Revision(Revision),
}

/// The change that a write makes.
#[derive(Clone, Debug)]
pub enum Change {
    /// Creates or replaces.
    Put(Draft),
    /// Removes; the draft is the last state that watchers see.
    Delete(Draft),
}

/// One write.
#[derive(Clone, Debug)]
pub struct Write {
    /// The kind of the object.
    pub resource: ResourceId,
    /// The key of the object.
    pub key: Key,
    /// The precondition on the object itself.
    pub expect: Expectation,
    /// Other objects that must exist and not be terminating, such as the namespace.
    pub requires: Vec<(ResourceId, Key)>,
    /// The change to apply.
    pub change: Change,
}

/// Objects of one kind at one revision.
#[derive(Clone, Debug)]
pub struct Snapshot {
    /// Revision of the snapshot. A watch that starts at this revision misses no event.
    pub revision: Revision,
    /// The objects in key order.
    pub objects: Vec<Arc<Object>>,
}

/// Events of every kind, for the garbage collectors inside the server.
pub type Feed = mpsc::UnboundedReceiver<(ResourceId, Event)>;

#[derive(Debug)]
struct Shared {
    state: RwLock<State>,
    feed: Mutex<Option<mpsc::UnboundedSender<(ResourceId, Event)>>>,
    /// The error after which the store refuses all writes.
    failure: watch_channel::Sender<Option<Arc<LogError>>>,
}

impl Shared {
    /// Refuses all writes from now on. The contents of the disk are unknown until the log is opened and read again.
    fn fail(&self, error: &Arc<LogError>) {
        let is_first = self.failure.send_if_modified(|failure| {
            let is_first = failure.is_none();
            failure.get_or_insert_with(|| error.clone());
            is_first
        });
        if is_first {
            tracing::error!(
                error = &**error as &dyn std::error::Error,
                "the store refuses all writes until it is opened again"
            );
        }
    }
}

/// The store. Cheap to clone.
#[derive(Clone, Debug)]
pub struct Store {
    shared: Arc<Shared>,
    commands: mpsc::Sender<Command>,
}

/// Where a store keeps its data.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Location {
    /// On disk.
    Directory(PathBuf),
    /// In memory only, for tests.
    Memory,
}

impl Store {
    /// Opens the store, and creates it if it does not exist. This reads the whole log and blocks: do not call it on an async
    /// thread.
    pub fn open(location: &Location, window: Window) -> Result<Self, OpenError> {
        let (directory, log, contents) = match location {
            Location::Directory(path) => {
                let directory = Directory::lock(path)?;
                let (log, contents) = Log::open(Some(&directory.database()))
                    .map_err(|error| open_error(path, error))?;
                let acknowledged = directory.acknowledged();
                if acknowledged > contents.revision {
                    let detail = format!(
                        "revision {acknowledged} was acknowledged and the log ends at {}",
                        contents.revision
                    );
                    return Err(OpenError::Damaged {
                        path: path.clone(),
                        detail,
                    });
                }
                (Some(directory), log, contents)
            }
            Location::Memory => {
                let (log, contents) = Log::open(None).map_err(|source| OpenError::Log {
                    path: PathBuf::new(),
                    source,
                })?;
                (None, log, contents)
            }
        };
        let path = directory
            .as_ref()
            .map(|directory| directory.path().to_owned())
            .unwrap_or_default();
        let state = State::load(contents, window).map_err(|error| open_error(&path, error))?;
        let shared = Arc::new(Shared {
            state: RwLock::new(state),
            feed: Mutex::new(None),
            failure: watch_channel::Sender::new(None),
        });
        let checkpoints = match &directory {
            Some(directory) => {
                let checkpointer = Checkpointer::open(&directory.database())
                    .map_err(|error| open_error(&path, error))?;
                let checkpoints = writer::spawn_checkpointer(checkpointer, shared.clone());
                Some(checkpoints.map_err(OpenError::Threads)?)
            }
            None => None,
        };
        let (commands, receiver) = mpsc::channel(4096);
        let writer = Writer {
            shared: shared.clone(),
            log,
            directory,
            checkpoints,
            garbage: Garbage::default(),
            bytes_since_checkpoint: 0,
            wal_bytes: 0,
        };
        std::thread::Builder::new()
            .name("store-writer".into())
            .spawn(move || writer.run(receiver))
            .map_err(OpenError::Threads)?;
        Ok(Self { shared, commands })
    }

    /// The last durable revision.
    #[inline]
    pub fn revision(&self) -> Revision {
        self.read(|state| state.revision)
    }

    /// Gets one object.
    pub fn get(&self, resource: &ResourceId, key: &Key) -> Option<Arc<Object>> {
        self.read(|state| state.get(resource, key.as_str()).cloned())
    }

    /// Revision of the last write to a kind within its retained history. Every write to the kind advances it.
    pub fn newest(&self, resource: &ResourceId) -> Revision {
        self.read(|state| {
            state
                .table(resource)
                .map_or(0, |table| *table.newest.borrow())
        })
    }

    /// Whether a kind has no object in a namespace. An empty namespace means all namespaces.
    pub fn is_empty(&self, resource: &ResourceId, namespace: &str) -> bool {
        self.read(|state| {
            state
                .list(resource, &Range::namespace(namespace), None)
                .is_ok_and(|objects| objects.is_empty())
        })
    }

    /// Lists the objects in `range`, at the current revision or at an older revision that is still in the window.
    pub fn list(
        &self,
        resource: &ResourceId,
        range: &Range,
        revision: Option<Revision>,
    ) -> Result<Snapshot, Expired> {
        self.read(|state| {
            let objects = state.list(resource, range, revision)?;
            Ok(Snapshot {
                revision: revision.unwrap_or(state.revision),
                objects,
            })
        })
    }

    /// Kinds that have objects in a namespace.
    pub fn resources_in(&self, namespace: &str) -> Vec<ResourceId> {
        self.read(|state| {
            let range = Range::namespace(namespace);
            let holds = |resource: &ResourceId| {
                state
                    .list(resource, &range, None)
                    .is_ok_and(|objects| !objects.is_empty())
            };
            state
                .resources()
                .map(|(resource, _)| resource)
                .filter(|resource| holds(resource))
                .cloned()
                .collect()
        })
    }

    /// Writes one object. Returns when the write is durable and visible to readers.
    pub async fn write(&self, write: Write) -> Result<Arc<Object>, WriteError> {
        let (reply, outcome) = oneshot::channel();
        self.commands
            .send(Command::Write(Box::new(write), reply))
            .await
            .map_err(|_| WriteError::Closed)?;
        outcome.await.map_err(|_| WriteError::Closed)?
    }

    /// The error that stopped all writes, if the disk failed. Reads still work. Only a restart (opening the store again) allows
    /// writes again.
    pub fn failure(&self) -> Option<Arc<LogError>> {
        self.shared.failure.borrow().clone()
    }

    /// Waits until the store refuses all writes, and returns the error that caused it.
    pub async fn failed(&self) -> Arc<LogError> {
        let mut failure = self.shared.failure.subscribe();
        let failed = failure.wait_for(Option::is_some).await;
        match failed.ok().and_then(|failure| failure.clone()) {
            Some(error) => error,
            // The sender lives as long as this store does.
            None => std::future::pending().await,
        }
    }

    /// Watches the events of a kind after revision `after`.
    pub fn watch(&self, resource: &ResourceId, after: Revision) -> Result<Watch, Expired> {
        Watch::new(self.shared.clone(), resource.clone(), after)
    }

    /// Returns every object, and a channel with every later event. There is one feed: a second call ends the first.
    pub fn feed(&self) -> (Vec<(ResourceId, Arc<Object>)>, Feed) {
        let (sender, receiver) = mpsc::unbounded_channel();
        let objects = self.read(|state| {
            *self
                .shared
                .feed
                .lock()
                .unwrap_or_else(PoisonError::into_inner) = Some(sender);
            let tables = state.resources();
            tables
                .flat_map(|(resource, table)| {
                    table
                        .objects
                        .values()
                        .map(|object| (resource.clone(), object.clone()))
                })
                .collect()
        });
        (objects, receiver)
    }

    /// Removes events that are older than the window.
    pub async fn compact(&self) {
        let _ = self.commands.send(Command::Trim).await;
    }

    /// Commits the writes that are queued and closes the log.
    pub async fn close(&self) {
        let (done, closed) = oneshot::channel();
        if self.commands.send(Command::Close(done)).await.is_ok() {
            let _ = closed.await;
        }
    }

    fn read<T>(&self, look: impl FnOnce(&State) -> T) -> T {
        look(
            &self
                .shared
                .state
                .read()
                .unwrap_or_else(PoisonError::into_inner),
        )
    }
}

fn open_error(path: &std::path::Path, error: LogError) -> OpenError {
    match error {
        LogError::Damaged(detail) => OpenError::Damaged {
            path: path.to_owned(),
            detail,
        },
        source => OpenError::Log {
            path: path.to_owned(),
            source,
        },
    }
}

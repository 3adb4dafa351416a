//! The revisioned store under the API: a durable log with one global revision, the current objects in memory, and watches.
//!
//! Guarantees: a write that was answered is on disk; reads see only what is on disk; every watcher sees exactly the history of its
//! kind from its revision on, in order, or is told that it fell behind. The store knows keys, revisions and JSON bytes; it does not
//! know what any kind means.

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
    object::{Draft, DraftError, Facts, Key, Object, Owner, ResourceId, Revision},
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
    /// The directory is not ours to use.
    #[error(transparent)]
    Directory(#[from] DirectoryError),
    /// The log cannot be read.
    #[error("cannot open the store in {path}")]
    Log {
        /// The data directory.
        path: PathBuf,
        /// What is wrong.
        #[source]
        source: LogError,
    },
    /// Something acknowledged is not there.
    #[error(
        "the data directory {path} is damaged: {detail}. Nothing was changed. Restore the directory from a backup, or move it away to start empty"
    )]
    Damaged {
        /// The data directory.
        path: PathBuf,
        /// What was found.
        detail: String,
    },
    /// The writer's threads could not start.
    #[error("cannot start the store's threads")]
    Threads(#[source] std::io::Error),
}

/// A revision that the window no longer reaches.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("too old resource version: {requested} ({oldest})")]
pub struct Expired {
    /// What was asked for.
    pub requested: Revision,
    /// The oldest that can be had.
    pub oldest: Revision,
}

/// Why a write did not happen.
#[derive(Clone, Debug, thiserror::Error)]
pub enum WriteError {
    /// The object is not as the writer expected.
    #[error("the object has been modified")]
    Conflict {
        /// How it is now.
        current: Option<Arc<Object>>,
    },
    /// What the write requires is gone or going.
    #[error("an object of {0:?} that this one requires is gone")]
    Requirement(ResourceId),
    /// The disk refused.
    #[error("the write could not be made durable")]
    Storage(#[source] Arc<LogError>),
    /// The store was closed.
    #[error("the store is closed")]
    Closed,
}

/// What a write expects to find.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Expectation {
    /// No object under the key.
    Absent,
    /// The object at exactly this revision.
    Revision(Revision),
}

/// What a write does.
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
    /// Kind of object.
    pub resource: ResourceId,
    /// Which object.
    pub key: Key,
    /// What must be there.
    pub expect: Expectation,
    /// Other objects that must exist and not be on their way out, such as the namespace.
    pub requires: Vec<(ResourceId, Key)>,
    /// What to do.
    pub change: Change,
}

/// Objects of one kind at one revision.
#[derive(Clone, Debug)]
pub struct Snapshot {
    /// Revision of the snapshot; a watch from here on misses nothing.
    pub revision: Revision,
    /// The objects in key order.
    pub objects: Vec<Arc<Object>>,
}

/// Every event of every kind, for the collectors inside the server.
pub type Feed = mpsc::UnboundedReceiver<(ResourceId, Event)>;

#[derive(Debug)]
struct Shared {
    state: RwLock<State>,
    feed: Mutex<Option<mpsc::UnboundedSender<(ResourceId, Event)>>>,
    /// Why nothing can be written any more.
    failure: watch_channel::Sender<Option<Arc<LogError>>>,
}

impl Shared {
    /// Refuses all writes from now on. What is on disk is unknown until the log is opened and read again.
    fn fail(&self, error: &Arc<LogError>) {
        let is_first = self.failure.send_if_modified(|failure| {
            let is_first = failure.is_none();
            failure.get_or_insert_with(|| error.clone());
            is_first
        });
        if is_first {
            tracing::error!(
                error = &**error as &dyn std::error::Error,
                "the store cannot write any more until it is opened again"
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

/// Where a store lies.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Place {
    /// On disk.
    Directory(PathBuf),
    /// In memory only, for tests.
    Memory,
}

impl Store {
    /// Opens the store, creating it when there is none. Reads the whole log: call it off the async threads.
    pub fn open(place: &Place, window: Window) -> Result<Self, OpenError> {
        let (directory, log, contents) = match place {
            Place::Directory(path) => {
                let directory = Directory::claim(path)?;
                let (log, contents) =
                    Log::open(Some(&directory.database())).map_err(|error| refuse(path, error))?;
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
            Place::Memory => {
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
        let state = State::load(contents, window).map_err(|error| refuse(&path, error))?;
        let shared = Arc::new(Shared {
            state: RwLock::new(state),
            feed: Mutex::new(None),
            failure: watch_channel::Sender::new(None),
        });
        let checkpoints = match &directory {
            Some(directory) => {
                let checkpointer = Checkpointer::open(&directory.database())
                    .map_err(|error| refuse(&path, error))?;
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
            unchecked_bytes: 0,
            journal_bytes: 0,
        };
        std::thread::Builder::new()
            .name("store-writer".into())
            .spawn(move || writer.run(receiver))
            .map_err(OpenError::Threads)?;
        Ok(Self { shared, commands })
    }

    /// The last durable revision.
    pub fn revision(&self) -> Revision {
        self.read(|state| state.revision)
    }

    /// One object.
    pub fn get(&self, resource: &ResourceId, key: &Key) -> Option<Arc<Object>> {
        self.read(|state| state.get(resource, key.as_str()).cloned())
    }

    /// Revision of the last write to a kind since its history begins; it moves with every write.
    pub fn newest(&self, resource: &ResourceId) -> Revision {
        self.read(|state| {
            state
                .table(resource)
                .map_or(0, |table| *table.newest.borrow())
        })
    }

    /// Whether a kind has any object in a namespace, or at all when that is empty.
    pub fn is_empty(&self, resource: &ResourceId, namespace: &str) -> bool {
        self.read(|state| {
            state
                .list(resource, &Range::namespace(namespace), None)
                .is_ok_and(|objects| objects.is_empty())
        })
    }

    /// The objects in `range` now, or as of a revision that the window still reaches.
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

    /// Writes, and answers when the write is durable and visible.
    pub async fn write(&self, write: Write) -> Result<Arc<Object>, WriteError> {
        let (reply, outcome) = oneshot::channel();
        self.commands
            .send(Command::Write(Box::new(write), reply))
            .await
            .map_err(|_| WriteError::Closed)?;
        outcome.await.map_err(|_| WriteError::Closed)?
    }

    /// Why nothing can be written any more, if that is so: the disk failed. Reads go on. Only opening the store anew helps.
    pub fn failure(&self) -> Option<Arc<LogError>> {
        self.shared.failure.borrow().clone()
    }

    /// Waits until nothing can be written any more.
    pub async fn failed(&self) -> Arc<LogError> {
        let mut failure = self.shared.failure.subscribe();
        let failed = failure.wait_for(Option::is_some).await;
        match failed.ok().and_then(|failure| failure.clone()) {
            Some(error) => error,
            // The sender lives as long as this store does.
            None => std::future::pending().await,
        }
    }

    /// Follows a kind from after `revision` on.
    pub fn watch(&self, resource: &ResourceId, after: Revision) -> Result<Watch, Expired> {
        Watch::new(self.shared.clone(), resource.clone(), after)
    }

    /// Every object there is, and every event from then on. There is one feed; a second call ends the first.
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

    /// Forgets events that are past their age.
    pub async fn compact(&self) {
        let _ = self.commands.send(Command::Trim).await;
    }

    /// Finishes the writes that wait and closes the log.
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

fn refuse(path: &std::path::Path, error: LogError) -> OpenError {
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

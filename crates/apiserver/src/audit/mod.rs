//! The audit log: one line for each request, who made it, and what became of it. Off unless a path is given.
//!
//! Events are those of `audit.k8s.io/v1` at level `Metadata`: no bodies, so no secrets. A request waits when the writer falls behind,
//! rather than going unrecorded. Files are bounded in size and number.

mod event;
mod file;

use std::{cell::RefCell, collections::BTreeMap, path::PathBuf};

use tokio::sync::{mpsc, oneshot};

pub use self::event::{Origin, Record};
pub use self::file::OpenError;
use self::file::Rotating;

/// Events that may wait to be written.
const WAITING: usize = 4096;

/// What the parts of the server note about a request, by name.
pub type Annotations = BTreeMap<String, String>;

tokio::task_local! {
    static ANNOTATIONS: RefCell<Annotations>;
}

/// Notes something about the request that this task answers, if it is recorded.
pub fn annotate(name: &str, value: &str) {
    let _ = ANNOTATIONS.try_with(|annotations| {
        annotations
            .borrow_mut()
            .insert(name.to_owned(), value.to_owned())
    });
}

/// Answers a request and collects what is noted about it meanwhile.
pub async fn annotated<F: Future>(answering: F) -> (F::Output, Annotations) {
    let collecting = async {
        let answer = answering.await;
        (answer, ANNOTATIONS.with(RefCell::take))
    };
    ANNOTATIONS.scope(RefCell::default(), collecting).await
}

/// Where the log is and how large it may grow.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Options {
    /// The file that is written.
    pub path: PathBuf,
    /// How large it may grow before it is put aside.
    pub max_bytes: u64,
    /// How many files that were put aside are kept.
    pub max_backups: usize,
}

/// What the writing thread is told.
#[derive(Debug)]
enum Message {
    Line(String),
    /// Everything before this is to be in the file.
    Flush(oneshot::Sender<()>),
}

/// A log that is being written.
#[derive(Clone, Debug)]
pub struct Log {
    messages: mpsc::Sender<Message>,
}

impl Log {
    /// Opens the file and starts the thread that writes it; it ends when the last copy of the log is dropped.
    pub fn open(options: Options) -> Result<Self, OpenError> {
        let mut file = Rotating::open(options)?;
        let (messages, mut waiting) = mpsc::channel(WAITING);
        std::thread::spawn(move || {
            while let Some(message) = waiting.blocking_recv() {
                match message {
                    Message::Line(line) => file.write(&line),
                    Message::Flush(done) => {
                        file.flush();
                        let _ = done.send(());
                    }
                }
                if waiting.is_empty() {
                    file.flush();
                }
            }
        });
        Ok(Self { messages })
    }

    /// Writes an event; waits while too many do.
    pub async fn write(&self, line: String) {
        let _ = self.messages.send(Message::Line(line)).await;
    }

    /// Writes an event from where nothing can wait.
    pub fn write_now(&self, line: String) {
        if self.messages.try_send(Message::Line(line)).is_err() {
            tracing::warn!("the audit log falls behind: the end of a watch is not recorded");
        }
    }

    /// Returns when everything written so far is in the file.
    pub async fn flush(&self) {
        let (done, written) = oneshot::channel();
        if self.messages.send(Message::Flush(done)).await.is_ok() {
            let _ = written.await;
        }
    }
}

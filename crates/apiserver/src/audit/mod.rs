//! The audit log: one line for each request with its user and its result. It is off unless a path is configured.
//!
//! Events have the format of `audit.k8s.io/v1` at level `Metadata`: no bodies, so no secrets. If the writer falls behind,
//! requests wait, so that none is missing from the log. Files are bounded in size and number.

mod event;
mod file;

use std::{cell::RefCell, collections::BTreeMap, path::PathBuf};

use tokio::sync::{mpsc, oneshot};

pub use self::event::{Origin, Record};
pub use self::file::OpenError;
use self::file::Rotating;

/// Capacity of the queue of events to be written.
const QUEUE_CAPACITY: usize = 4096;

/// The audit annotations of a request, by name.
pub type Annotations = BTreeMap<String, String>;

tokio::task_local! {
    static ANNOTATIONS: RefCell<Annotations>;
}

/// Adds an audit annotation to the request that this task answers, if requests are audited.
pub fn annotate(name: &str, value: &str) {
    let _ = ANNOTATIONS.try_with(|annotations| {
        annotations
            .borrow_mut()
            .insert(name.to_owned(), value.to_owned())
    });
}

/// Answers a request and collects its audit annotations.
pub async fn annotated<F: Future>(answering: F) -> (F::Output, Annotations) {
    let collecting = async {
        let answer = answering.await;
        (answer, ANNOTATIONS.with(RefCell::take))
    };
    ANNOTATIONS.scope(RefCell::default(), collecting).await
}

/// The location and the size limits of the log.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Options {
    /// The file that is written.
    pub path: PathBuf,
    /// The size at which the file is rotated.
    pub max_bytes: u64,
    /// The number of rotated files that are retained.
    pub max_backups: usize,
}

/// A message to the writer thread.
#[derive(Debug)]
enum Message {
    Line(String),
    /// Flush all earlier lines to the file.
    Flush(oneshot::Sender<()>),
}

/// A handle to the log.
#[derive(Clone, Debug)]
pub struct Log {
    messages: mpsc::Sender<Message>,
}

impl Log {
    /// Opens the file and starts the writer thread. The thread ends when the last handle is dropped.
    pub fn open(options: Options) -> Result<Self, OpenError> {
        let mut file = Rotating::open(options)?;
        let (messages, mut waiting) = mpsc::channel(QUEUE_CAPACITY);
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

    /// Writes an event. Waits while the queue is full.
    pub async fn write(&self, line: String) {
        let _ = self.messages.send(Message::Line(line)).await;
    }

    /// Writes an event from a context that cannot wait.
    pub fn write_now(&self, line: String) {
        if self.messages.try_send(Message::Line(line)).is_err() {
            tracing::warn!("the audit log falls behind: the end of a watch is not recorded");
        }
    }

    /// Returns when all events so far are in the file.
    pub async fn flush(&self) {
        let (done, written) = oneshot::channel();
        if self.messages.send(Message::Flush(done)).await.is_ok() {
            let _ = written.await;
        }
    }
}

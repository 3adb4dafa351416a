//! The audit log: one line for each request, who made it, and what became of it. Off unless a path is given.
//!
//! Events are those of `audit.k8s.io/v1` at level `Metadata`: no bodies, so no secrets. A request waits when the writer falls behind,
//! rather than going unrecorded. Files are bounded in size and number.

mod event;
mod file;

use std::{path::PathBuf, sync::Arc};

use tokio::sync::mpsc;

pub use self::event::{Origin, Record};
pub use self::file::OpenError;
use self::file::Rotating;

/// Events that may wait to be written.
const WAITING: usize = 4096;

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

/// A log that is being written.
#[derive(Clone, Debug)]
pub struct Log {
    lines: mpsc::Sender<Arc<str>>,
}

impl Log {
    /// Opens the file and starts the thread that writes it; it ends when the last copy of the log is dropped.
    pub fn open(options: Options) -> Result<Self, OpenError> {
        let mut file = Rotating::open(options)?;
        let (lines, mut waiting) = mpsc::channel::<Arc<str>>(WAITING);
        std::thread::spawn(move || {
            while let Some(line) = waiting.blocking_recv() {
                file.write(&line);
                if waiting.is_empty() {
                    file.flush();
                }
            }
        });
        Ok(Self { lines })
    }

    /// Writes an event; waits while too many do.
    pub async fn write(&self, line: String) {
        let _ = self.lines.send(line.into()).await;
    }

    /// Writes an event from where nothing can wait.
    pub fn write_now(&self, line: String) {
        if self.lines.try_send(line.into()).is_err() {
            tracing::warn!("the audit log falls behind: the end of a watch is not recorded");
        }
    }
}

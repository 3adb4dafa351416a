//! Log rotation.

use std::fs;
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use super::{NativeRuntime, blocking, failure};
use crate::{ContainerId, RuntimeError, agent};

/// The timeout of an agent's response to the request to change the log file.
const AGENT_TIMEOUT: Duration = Duration::from_secs(1);

impl NativeRuntime {
    /// Makes the agent write to a new log file if the current one has reached the maximum size, and removes the oldest.
    ///
    /// The new file is renamed to the log's name only after the agent has switched to it. A rotation that was interrupted, because
    /// the agent did not respond or the node was killed, is repeated with the same file.
    pub async fn rotate_log(&self, id: &ContainerId) -> Result<(), RuntimeError> {
        if self.must_answer(id).is_err() {
            // A frozen container writes no log.
            return Ok(());
        }
        let path = self.log_path(id);
        let largest = self.config.log_maximum_bytes;
        let has_grown = fs::metadata(&path).is_ok_and(|metadata| metadata.len() >= largest);
        let next = next_file(&path);
        if !has_grown && !next.exists() {
            return Ok(());
        }
        let file = fs::File::options().create(true).append(true).open(&next);
        let file = file.map_err(failure("a new log"))?;
        let directory = self.container_directory(id);
        tokio::time::timeout(AGENT_TIMEOUT, agent::replace_log(&directory, file))
            .await
            .map_err(|_| io::Error::new(io::ErrorKind::TimedOut, "its agent does not answer"))
            .map_err(failure("a new log"))??;
        let files = self.config.log_maximum_files;
        // On a blocking thread: deleting a large file takes the kernel milliseconds.
        blocking(move || shift_files(&path, files)).await
    }

    /// Rotates the logs of all running containers that have reached the maximum size, concurrently: an agent that does not respond,
    /// such as one that its container has stopped, does not delay other logs.
    pub async fn rotate_logs(&self) {
        let running: Vec<ContainerId> = self
            .running
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .keys()
            .cloned()
            .collect();
        let rotations = running.iter().map(|id| async move {
            if let Err(error) = self.rotate_log(id).await {
                tracing::warn!(
                    container = id.container,
                    error = api::errors::chain(&error),
                    "cannot rotate a log"
                );
            }
        });
        futures::future::join_all(rotations).await;
    }
}

/// The next log file, before it is renamed to the log's name.
fn next_file(log: &Path) -> PathBuf {
    log.with_extension("log.next")
}

/// Completes an interrupted rotation of the log of a container that has ended.
pub(super) fn finish(log: &Path, files: u32) {
    let next = next_file(log);
    match fs::metadata(&next) {
        // The agent never wrote to it.
        Ok(found) if found.len() == 0 => drop(fs::remove_file(next)),
        Ok(_) => drop(shift_files(log, files)),
        Err(_) => {}
    }
}

/// Renames the log to `log.1`, earlier files to the next number, and the next file to the log's name. Keeps at most `files` files. A
/// file with the log's name exists at all times, for clients that follow it.
fn shift_files(log: &Path, files: u32) -> Result<(), RuntimeError> {
    // `finish` may run concurrently, when a container ends while its log is rotated.
    static EXCLUSIVE: Mutex<()> = Mutex::new(());
    let _guard = EXCLUSIVE.lock().unwrap_or_else(PoisonError::into_inner);
    if !next_file(log).exists() {
        return Ok(());
    }
    let numbered = |number: u32| log.with_extension(format!("log.{number}"));
    let file = |path: &Path| fs::metadata(path).map(|found| found.ino()).ok();
    let is_numbered = file(log) == file(&numbered(1));
    // If it is numbered, an earlier attempt was interrupted after this step.
    if !is_numbered {
        for number in (1..files.saturating_sub(1)).rev() {
            let _ = fs::rename(numbered(number), numbered(number + 1));
        }
        let _ = fs::remove_file(numbered(1));
        fs::hard_link(log, numbered(1)).map_err(failure("a rotated log"))?;
    }
    fs::rename(next_file(log), log).map_err(failure("a new log"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn files(directory: &Path) -> Vec<(String, String)> {
        let mut files: Vec<(String, String)> = fs::read_dir(directory)
            .unwrap()
            .map(|entry| entry.unwrap().path())
            .map(|path| {
                let name = path.file_name().unwrap().to_str().unwrap().to_owned();
                (name, fs::read_to_string(path).unwrap())
            })
            .collect();
        files.sort();
        files
    }

    #[test]
    fn a_rotation_shifts_the_files_and_removes_the_oldest() {
        let directory = tempfile::tempdir().unwrap();
        let log = directory.path().join("0.log");
        fs::write(&log, "0").unwrap();
        for round in 1..5 {
            fs::write(next_file(&log), round.to_string()).unwrap();
            shift_files(&log, 3).unwrap();
        }
        let expected = [("0.log", "4"), ("0.log.1", "3"), ("0.log.2", "2")];
        let expected = expected.map(|(name, text)| (name.to_owned(), text.to_owned()));
        assert_eq!(files(directory.path()), expected);
    }

    #[test]
    fn an_interrupted_rotation_is_completed_once() {
        let directory = tempfile::tempdir().unwrap();
        let log = directory.path().join("0.log");
        fs::write(&log, "old").unwrap();
        fs::write(log.with_extension("log.1"), "older").unwrap();
        fs::write(next_file(&log), "new").unwrap();
        // All steps but the last.
        fs::rename(log.with_extension("log.1"), log.with_extension("log.2")).unwrap();
        fs::hard_link(&log, log.with_extension("log.1")).unwrap();
        finish(&log, 5);
        finish(&log, 5);
        let expected = [("0.log", "new"), ("0.log.1", "old"), ("0.log.2", "older")];
        let expected = expected.map(|(name, text)| (name.to_owned(), text.to_owned()));
        assert_eq!(files(directory.path()), expected);
    }
}

//! Logs that have grown enough make way for new ones.

use std::fs;
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use super::{NativeRuntime, blocking, failure};
use crate::{ContainerId, RuntimeError, agent};

/// How long an agent may take to change over to another file.
const LIMIT: Duration = Duration::from_secs(1);

impl NativeRuntime {
    /// Makes the agent write to a new log file when the old one has grown enough, and drops the oldest.
    ///
    /// The new file has its name only when the agent has it. A change that was not finished, because the agent did not answer or
    /// the node was killed, is made again with the same file.
    pub async fn rotate_log(&self, id: &ContainerId) -> Result<(), RuntimeError> {
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
        tokio::time::timeout(LIMIT, agent::replace_log(&directory, file))
            .await
            .map_err(|_| io::Error::new(io::ErrorKind::TimedOut, "its agent does not answer"))
            .map_err(failure("a new log"))??;
        let files = self.config.log_maximum_files;
        // The kernel takes milliseconds to give up a large file, in which this thread would serve nobody.
        blocking(move || make_way(&path, files)).await
    }

    /// Rotates the logs of all running containers that have grown enough. An agent that does not answer, as one that a container
    /// has stopped, holds up nobody else's.
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

/// The file that a log goes on in, before it has the log's name.
fn next_file(log: &Path) -> PathBuf {
    log.with_extension("log.next")
}

/// Finishes what was begun for a container that has ended since.
pub(super) fn finish(log: &Path, files: u32) {
    let next = next_file(log);
    match fs::metadata(&next) {
        // Its agent never had it, or had nothing more to say.
        Ok(found) if found.len() == 0 => drop(fs::remove_file(next)),
        Ok(_) => drop(make_way(log, files)),
        Err(_) => {}
    }
}

/// Numbers a log and gives its name to the file that it goes on in; of all its files, so many remain. There is always one of its
/// name, for those who follow it.
fn make_way(log: &Path, files: u32) -> Result<(), RuntimeError> {
    // A container may end while its log is rotated.
    static ONE_AT_A_TIME: Mutex<()> = Mutex::new(());
    let _turn = ONE_AT_A_TIME.lock().unwrap_or_else(PoisonError::into_inner);
    if !next_file(log).exists() {
        return Ok(());
    }
    let numbered = |number: u32| log.with_extension(format!("log.{number}"));
    let file = |path: &Path| fs::metadata(path).map(|found| found.ino()).ok();
    let is_numbered = file(log) == file(&numbered(1));
    // Otherwise an earlier attempt has come this far.
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
    fn a_log_makes_way_for_the_next_and_the_oldest_goes() {
        let directory = tempfile::tempdir().unwrap();
        let log = directory.path().join("0.log");
        fs::write(&log, "0").unwrap();
        for round in 1..5 {
            fs::write(next_file(&log), round.to_string()).unwrap();
            make_way(&log, 3).unwrap();
        }
        let expected = [("0.log", "4"), ("0.log.1", "3"), ("0.log.2", "2")];
        let expected = expected.map(|(name, text)| (name.to_owned(), text.to_owned()));
        assert_eq!(files(directory.path()), expected);
    }

    #[test]
    fn what_a_crash_left_half_done_is_finished_once() {
        let directory = tempfile::tempdir().unwrap();
        let log = directory.path().join("0.log");
        fs::write(&log, "old").unwrap();
        fs::write(log.with_extension("log.1"), "older").unwrap();
        fs::write(next_file(&log), "new").unwrap();
        // As far as it had come: all but the last step.
        fs::rename(log.with_extension("log.1"), log.with_extension("log.2")).unwrap();
        fs::hard_link(&log, log.with_extension("log.1")).unwrap();
        finish(&log, 5);
        finish(&log, 5);
        let expected = [("0.log", "new"), ("0.log.1", "old"), ("0.log.2", "older")];
        let expected = expected.map(|(name, text)| (name.to_owned(), text.to_owned()));
        assert_eq!(files(directory.path()), expected);
    }
}

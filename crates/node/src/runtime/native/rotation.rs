//! Logs that have grown enough make way for new ones.

use std::fs;
use std::path::Path;
use std::sync::PoisonError;
use std::time::Duration;

use super::{NativeRuntime, blocking, failure};
use crate::runtime::{ContainerId, RuntimeError, agent};

/// How long an agent may take to change over to another file.
const LIMIT: Duration = Duration::from_secs(1);

impl NativeRuntime {
    /// Makes the agent write to a new log file when the old one has grown enough, and drops the oldest.
    pub async fn rotate_log(&self, id: &ContainerId) -> Result<(), RuntimeError> {
        let path = self.log_path(id);
        let largest = self.config.log_maximum_bytes;
        let has_grown = fs::metadata(&path).is_ok_and(|metadata| metadata.len() >= largest);
        if !has_grown {
            return Ok(());
        }
        let files = self.config.log_maximum_files;
        // The kernel takes milliseconds to give up a large file, in which this thread would serve nobody.
        let file = blocking(move || put_aside(&path, files)).await?;
        Ok(agent::replace_log(&self.container_directory(id), file).await?)
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
            let problem = match tokio::time::timeout(LIMIT, self.rotate_log(id)).await {
                Ok(Ok(())) => return,
                Ok(Err(error)) => crate::errors::chain(&error),
                Err(_) => "its agent does not answer".to_owned(),
            };
            tracing::warn!(
                container = id.container,
                error = problem,
                "cannot rotate a log"
            );
        });
        futures::future::join_all(rotations).await;
    }
}

/// Numbers a log and makes a new file for it; of all its files, so many remain.
fn put_aside(path: &Path, files: u32) -> Result<fs::File, RuntimeError> {
    let numbered = |number: u32| path.with_extension(format!("log.{number}"));
    for number in (1..files.saturating_sub(1)).rev() {
        let _ = fs::rename(numbered(number), numbered(number + 1));
    }
    fs::rename(path, numbered(1)).map_err(failure("a rotated log"))?;
    fs::File::options()
        .create(true)
        .append(true)
        .open(path)
        .map_err(failure("a new log"))
}

//! The data directory: who may use it, and the highest revision that was ever acknowledged from it.
//!
//! The mark lies outside the database on purpose. SQLite drops a damaged tail of its write-ahead log without a word; a database that
//! ends below the mark has lost acknowledged writes, and is refused. The mark is written after each commit without waiting for the
//! disk, so after a power cut it may be old, never too new.

use std::{
    fs::{File, OpenOptions},
    io::{self, Read, Seek, SeekFrom, Write},
    os::unix::fs::{FileExt, OpenOptionsExt},
    path::{Path, PathBuf},
    time::Duration,
};

use rustix::{
    fs::{FlockOperation, flock},
    io::Errno,
};

use super::Revision;

/// The file whose lock says who has the directory.
const LOCK: &str = "lock";

/// Why a data directory cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum DirectoryError {
    /// It cannot be made or opened.
    #[error("cannot use the data directory {path}")]
    Unusable {
        /// The directory or the file in it.
        path: PathBuf,
        /// What the system said.
        #[source]
        source: io::Error,
    },
    /// Another process has it.
    #[error(
        "the data directory {path} is in use by process {holder}: stop that process, or choose another data directory"
    )]
    InUse {
        /// The directory.
        path: PathBuf,
        /// Process id written by the holder, or a question mark.
        holder: String,
    },
}

/// Exclusive use of a data directory until dropped.
#[derive(Debug)]
pub struct Directory {
    path: PathBuf,
    // Held for its lock alone: the kernel releases it however the process ends.
    _lock: File,
    mark: File,
}

impl Directory {
    /// Makes the directory if needed and locks it.
    pub fn claim(path: &Path) -> Result<Self, DirectoryError> {
        let unusable = |path: &Path| {
            let path = path.to_owned();
            move |source| DirectoryError::Unusable { path, source }
        };
        std::fs::create_dir_all(path).map_err(unusable(path))?;
        let lock_path = path.join(LOCK);
        let mut lock = private_file(&lock_path).map_err(unusable(&lock_path))?;
        if !acquire(&lock) {
            let mut holder = String::new();
            let _ = lock.read_to_string(&mut holder);
            let holder = if holder.trim().is_empty() {
                "?".to_owned()
            } else {
                holder.trim().to_owned()
            };
            return Err(DirectoryError::InUse {
                path: path.to_owned(),
                holder,
            });
        }
        lock.set_len(0)
            .and_then(|()| lock.seek(SeekFrom::Start(0)))
            .and_then(|_| writeln!(lock, "{}", std::process::id()))
            .map_err(unusable(&lock_path))?;
        let mark_path = path.join("acknowledged");
        let mark = private_file(&mark_path).map_err(unusable(&mark_path))?;
        Ok(Self {
            path: path.to_owned(),
            _lock: lock,
            mark,
        })
    }

    /// Where the database lies.
    pub fn database(&self) -> PathBuf {
        self.path.join("store.sqlite3")
    }

    /// The directory itself.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The highest revision known to have been acknowledged; zero when nothing legible says so.
    pub fn acknowledged(&self) -> Revision {
        let mut record = [0; 12];
        if self.mark.read_exact_at(&mut record, 0).is_err() {
            return 0;
        }
        let (number, checksum) = record.split_at(8);
        if crc32fast::hash(number).to_le_bytes() != checksum {
            tracing::warn!(directory = %self.path.display(), "the mark of acknowledged writes is illegible and is made anew");
            return 0;
        }
        number.try_into().map_or(0, Revision::from_le_bytes)
    }

    /// Records that everything up to `revision` has been acknowledged.
    pub fn acknowledge(&self, revision: Revision) -> io::Result<()> {
        let number = revision.to_le_bytes();
        let mut record = [0; 12];
        record[..8].copy_from_slice(&number);
        record[8..].copy_from_slice(&crc32fast::hash(&number).to_le_bytes());
        self.mark.write_all_at(&record, 0)
    }
}

/// Whether a process has this data directory now.
pub fn is_in_use(path: &Path) -> bool {
    let Ok(lock) = File::open(path.join(LOCK)) else {
        return false;
    };
    matches!(
        flock(&lock, FlockOperation::NonBlockingLockShared),
        Err(Errno::WOULDBLOCK)
    )
}

/// Takes the lock. Somebody who only looks whether it is taken holds it for a moment, and so does a process that is just being
/// started by the one that had it; on a busy machine the moment may be long.
fn acquire(lock: &File) -> bool {
    const ATTEMPTS: u32 = 400;
    const PAUSE: Duration = Duration::from_millis(5);
    let attempt = |number| {
        if number > 0 {
            std::thread::sleep(PAUSE);
        }
        flock(lock, FlockOperation::NonBlockingLockExclusive).is_ok()
    };
    (0..ATTEMPTS).any(attempt)
}

fn private_file(path: &Path) -> io::Result<File> {
    OpenOptions::new()
        .read(true)
        .write(true)
        .create(true)
        .truncate(false)
        .mode(0o600)
        .open(path)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_directory_has_one_user_and_says_who() {
        let temporary = tempfile::tempdir().unwrap();
        let held = Directory::claim(temporary.path()).unwrap();
        let refused = Directory::claim(temporary.path()).unwrap_err();
        assert!(
            refused
                .to_string()
                .contains(&format!("in use by process {}", std::process::id())),
            "{refused}"
        );
        assert!(is_in_use(temporary.path()));
        drop(held);
        assert!(!is_in_use(temporary.path()));
        Directory::claim(temporary.path()).unwrap();
    }

    #[test]
    fn the_mark_survives_and_a_damaged_one_reads_as_nothing() {
        let temporary = tempfile::tempdir().unwrap();
        let directory = Directory::claim(temporary.path()).unwrap();
        assert_eq!(directory.acknowledged(), 0);
        directory.acknowledge(77).unwrap();
        assert_eq!(directory.acknowledged(), 77);
        directory.mark.write_all_at(b"x", 3).unwrap();
        assert_eq!(directory.acknowledged(), 0);
    }
}

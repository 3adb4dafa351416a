//! The data directory: who may use it, and the highest revision that was ever acknowledged from it.
//!
//! It holds secrets and the tokens of all accounts, so it is closed to other users, and so is each of its files: a copy or a backup
//! keeps a file's mode, but not its directory's.
//!
//! The mark lies outside the database on purpose. SQLite drops a damaged tail of its write-ahead log without a word; a database that
//! ends below the mark has lost acknowledged writes, and is refused. The mark is written after each commit without waiting for the
//! disk, so after a power cut it may be old, never too new.

use std::{
    fs::{DirBuilder, File, OpenOptions, Permissions},
    io::{self, Read, Seek, SeekFrom, Write},
    os::unix::fs::{DirBuilderExt, FileExt, OpenOptionsExt, PermissionsExt},
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

/// The database.
const DATABASE: &str = "store.sqlite3";

/// Files that SQLite makes beside the database, with the database's mode.
const JOURNALS: [&str; 2] = ["store.sqlite3-wal", "store.sqlite3-shm"];

/// What only a data directory has: of a server, of a server with a node, of a node.
const SIGNS: [&str; 3] = [DATABASE, "node", "pods"];

/// The permission bits of group and others.
const OTHERS: u32 = 0o077;

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
    /// Other users may enter it, and it is not clear that it is a data directory at all.
    #[error(
        "{path} is open to other users (mode {mode:03o}) and holds files of others: run `chmod 700` on it if it is meant as data directory, or choose another"
    )]
    Open {
        /// The directory.
        path: PathBuf,
        /// Its permission bits.
        mode: u32,
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
        make_private(path)?;
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
        // SQLite would make it readable by all.
        let database = path.join(DATABASE);
        private_file(&database).map_err(unusable(&database))?;
        for journal in JOURNALS {
            let journal = path.join(journal);
            close_to_others(&journal).map_err(unusable(&journal))?;
        }
        Ok(Self {
            path: path.to_owned(),
            _lock: lock,
            mark,
        })
    }

    /// Where the database lies.
    pub fn database(&self) -> PathBuf {
        self.path.join(DATABASE)
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

/// Makes a data directory that its owner alone may enter, or closes one that is there to others. A directory that is open to
/// others and holds something else, such as `/tmp`, is refused instead.
pub fn make_private(path: &Path) -> Result<(), DirectoryError> {
    let unusable = |source| DirectoryError::Unusable {
        path: path.to_owned(),
        source,
    };
    DirBuilder::new()
        .recursive(true)
        .mode(0o700)
        .create(path)
        .map_err(unusable)?;
    let mode = std::fs::metadata(path)
        .map_err(unusable)?
        .permissions()
        .mode()
        & 0o777;
    if mode & OTHERS == 0 {
        return Ok(());
    }
    let is_empty = std::fs::read_dir(path).map_err(unusable)?.next().is_none();
    if !is_empty && !SIGNS.iter().any(|sign| path.join(sign).exists()) {
        return Err(DirectoryError::Open {
            path: path.to_owned(),
            mode,
        });
    }
    tracing::warn!(directory = %path.display(), mode = format!("{mode:03o}"), "the data directory was open to other users and is closed to them now");
    close_to_others(path).map_err(unusable)
}

/// Takes the permissions of group and others away, if the path exists.
fn close_to_others(path: &Path) -> io::Result<()> {
    let mode = match std::fs::metadata(path) {
        Ok(found) => found.permissions().mode() & 0o777,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
        Err(error) => return Err(error),
    };
    if mode & OTHERS == 0 {
        return Ok(());
    }
    std::fs::set_permissions(path, Permissions::from_mode(mode & !OTHERS))
}

/// A file that its owner alone may read and write, whatever its mode was.
fn private_file(path: &Path) -> io::Result<File> {
    let file = OpenOptions::new()
        .read(true)
        .write(true)
        .create(true)
        .truncate(false)
        .mode(0o600)
        .open(path)?;
    if file.metadata()?.permissions().mode() & OTHERS != 0 {
        file.set_permissions(Permissions::from_mode(0o600))?;
    }
    Ok(file)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn mode(path: &Path) -> u32 {
        std::fs::metadata(path).unwrap().permissions().mode() & 0o777
    }

    fn open_to_all(path: &Path) {
        std::fs::set_permissions(path, Permissions::from_mode(0o755)).unwrap();
    }

    #[test]
    fn an_existing_data_directory_that_others_may_enter_is_closed_to_them() {
        let temporary = tempfile::tempdir().unwrap();
        let empty = temporary.path().join("empty");
        std::fs::create_dir(&empty).unwrap();
        open_to_all(&empty);
        drop(Directory::claim(&empty).unwrap());
        assert_eq!(mode(&empty), 0o700);
        let used = temporary.path().join("used");
        std::fs::create_dir(&used).unwrap();
        let names = [
            "store.sqlite3",
            "store.sqlite3-wal",
            "store.sqlite3-shm",
            "lock",
            "acknowledged",
        ];
        for name in names {
            std::fs::write(used.join(name), "").unwrap();
            std::fs::set_permissions(used.join(name), Permissions::from_mode(0o644)).unwrap();
        }
        open_to_all(&used);
        drop(Directory::claim(&used).unwrap());
        assert_eq!(mode(&used), 0o700);
        for name in names {
            assert_eq!(mode(&used.join(name)), 0o600, "{name}");
        }
    }

    #[test]
    fn a_directory_of_others_is_refused_and_left_as_it_was() {
        let temporary = tempfile::tempdir().unwrap();
        std::fs::write(temporary.path().join("letter"), "").unwrap();
        open_to_all(temporary.path());
        let refused = Directory::claim(temporary.path()).unwrap_err().to_string();
        assert!(refused.contains("chmod 700"), "{refused}");
        assert_eq!(mode(temporary.path()), 0o755);
    }

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

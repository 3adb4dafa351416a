//! The data directory: its permissions, its lock, and the highest revision that was acknowledged from it.
//!
//! The directory holds secrets and the tokens of all accounts, so it is private to its owner. Each file in it is private too: a
//! copy or a backup preserves the mode of a file, but not the mode of its directory.
//!
//! The acknowledged revision is a high-water mark outside the database on purpose. SQLite silently drops a damaged tail of its
//! write-ahead log. A database that ends below the mark has lost acknowledged writes, and the server refuses to open it. The mark
//! is written after each commit without a sync, so after a power failure it may be too low, but never too high.

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

/// The lock file: the process that holds its lock owns the directory.
const LOCK: &str = "lock";

/// The database.
const DATABASE: &str = "store.sqlite3";

/// Files that SQLite creates beside the database, with the database's mode.
const WAL_FILES: [&str; 2] = ["store.sqlite3-wal", "store.sqlite3-shm"];

/// Entries that identify a data directory: of a server, of a server with a node, of a node.
const MARKER_ENTRIES: [&str; 3] = [DATABASE, "node", "pods"];

/// The permission bits of group and others.
const OTHERS: u32 = 0o077;

/// Why a data directory cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum DirectoryError {
    /// The directory cannot be created or opened.
    #[error("cannot use the data directory {path}")]
    Unusable {
        /// The directory or the file in it.
        path: PathBuf,
        /// The I/O error.
        #[source]
        source: io::Error,
    },
    /// The directory is accessible to other users, and it may not be a data directory at all.
    #[error(
        "{path} is accessible to other users (mode {mode:03o}) and holds files that are not of a data directory: run `chmod 700` on it if it is meant as data directory, or choose another directory"
    )]
    Accessible {
        /// The directory.
        path: PathBuf,
        /// Its permission bits.
        mode: u32,
    },
    /// Another process holds the lock.
    #[error(
        "the data directory {path} is in use by process {holder}: stop that process, or choose another data directory"
    )]
    InUse {
        /// The directory.
        path: PathBuf,
        /// The process id that the holder wrote, or a question mark.
        holder: String,
    },
}

/// Exclusive use of a data directory until dropped.
#[derive(Debug)]
pub struct Directory {
    path: PathBuf,
    // Only its lock is needed. The kernel releases the lock when the process ends, even after a crash.
    _lock: File,
    acknowledged: File,
}

impl Directory {
    /// Creates the directory if needed and locks it.
    pub fn lock(path: &Path) -> Result<Self, DirectoryError> {
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
        let acknowledged_path = path.join("acknowledged");
        let acknowledged =
            private_file(&acknowledged_path).map_err(unusable(&acknowledged_path))?;
        // Creates the file before SQLite does, because SQLite would make it readable by all users.
        let database = path.join(DATABASE);
        private_file(&database).map_err(unusable(&database))?;
        for name in WAL_FILES {
            let file = path.join(name);
            remove_access_of_others(&file).map_err(unusable(&file))?;
        }
        Ok(Self {
            path: path.to_owned(),
            _lock: lock,
            acknowledged,
        })
    }

    /// Path of the database file.
    pub fn database(&self) -> PathBuf {
        self.path.join(DATABASE)
    }

    /// The directory itself.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The highest revision known to have been acknowledged; zero if the record is missing or corrupt.
    pub fn acknowledged(&self) -> Revision {
        let mut record = [0; 12];
        if self.acknowledged.read_exact_at(&mut record, 0).is_err() {
            return 0;
        }
        let (number, checksum) = record.split_at(8);
        if crc32fast::hash(number).to_le_bytes() != checksum {
            tracing::warn!(directory = %self.path.display(), "the record of the acknowledged revision is corrupt; the next write replaces it");
            return 0;
        }
        number.try_into().map_or(0, Revision::from_le_bytes)
    }

    /// Records that every revision up to `revision` has been acknowledged.
    pub fn acknowledge(&self, revision: Revision) -> io::Result<()> {
        let number = revision.to_le_bytes();
        let mut record = [0; 12];
        record[..8].copy_from_slice(&number);
        record[8..].copy_from_slice(&crc32fast::hash(&number).to_le_bytes());
        self.acknowledged.write_all_at(&record, 0)
    }
}

/// Whether a process holds the lock of this data directory now.
pub fn is_in_use(path: &Path) -> bool {
    let Ok(lock) = File::open(path.join(LOCK)) else {
        return false;
    };
    matches!(
        flock(&lock, FlockOperation::NonBlockingLockShared),
        Err(Errno::WOULDBLOCK)
    )
}

/// Takes the lock, with retries. Another process may hold it briefly: one that only checks whether the directory is in use, or
/// one that the previous owner is just starting. On a busy machine this may take long.
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

/// Creates a data directory that only its owner may enter, or makes an existing data directory private. Refuses a directory that
/// is accessible to other users and holds other files, such as `/tmp`.
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
    let is_data_directory = MARKER_ENTRIES.iter().any(|entry| path.join(entry).exists());
    if !is_empty && !is_data_directory {
        return Err(DirectoryError::Accessible {
            path: path.to_owned(),
            mode,
        });
    }
    tracing::warn!(directory = %path.display(), mode = format!("{mode:03o}"), "the data directory was accessible to other users; their access is removed now");
    remove_access_of_others(path).map_err(unusable)
}

/// Removes the permissions of group and others, if the path exists.
fn remove_access_of_others(path: &Path) -> io::Result<()> {
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

/// Opens or creates a file and makes sure that only its owner may read and write it.
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

    fn make_accessible_to_others(path: &Path) {
        std::fs::set_permissions(path, Permissions::from_mode(0o755)).unwrap();
    }

    #[test]
    fn an_existing_data_directory_becomes_private() {
        let temporary = tempfile::tempdir().unwrap();
        let empty = temporary.path().join("empty");
        std::fs::create_dir(&empty).unwrap();
        make_accessible_to_others(&empty);
        drop(Directory::lock(&empty).unwrap());
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
        make_accessible_to_others(&used);
        drop(Directory::lock(&used).unwrap());
        assert_eq!(mode(&used), 0o700);
        for name in names {
            assert_eq!(mode(&used.join(name)), 0o600, "{name}");
        }
    }

    #[test]
    fn an_accessible_directory_with_foreign_files_is_refused_and_unchanged() {
        let temporary = tempfile::tempdir().unwrap();
        std::fs::write(temporary.path().join("letter"), "").unwrap();
        make_accessible_to_others(temporary.path());
        let refused = Directory::lock(temporary.path()).unwrap_err().to_string();
        assert!(refused.contains("chmod 700"), "{refused}");
        assert_eq!(mode(temporary.path()), 0o755);
    }

    #[test]
    fn a_data_directory_is_locked_and_the_error_names_the_holder() {
        let temporary = tempfile::tempdir().unwrap();
        let held = Directory::lock(temporary.path()).unwrap();
        let refused = Directory::lock(temporary.path()).unwrap_err();
        assert!(
            refused
                .to_string()
                .contains(&format!("in use by process {}", std::process::id())),
            "{refused}"
        );
        assert!(is_in_use(temporary.path()));
        drop(held);
        assert!(!is_in_use(temporary.path()));
        Directory::lock(temporary.path()).unwrap();
    }

    #[test]
    fn a_corrupt_record_of_the_acknowledged_revision_reads_as_zero() {
        let temporary = tempfile::tempdir().unwrap();
        let directory = Directory::lock(temporary.path()).unwrap();
        assert_eq!(directory.acknowledged(), 0);
        directory.acknowledge(77).unwrap();
        assert_eq!(directory.acknowledged(), 77);
        directory.acknowledged.write_all_at(b"x", 3).unwrap();
        assert_eq!(directory.acknowledged(), 0);
    }
}

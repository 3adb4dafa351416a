//! The log on disk: one row of an SQLite table for every retained write, in the order of revisions.
//!
//! A superseded row stays until the event window moves past it, so that watches can resume after a restart. Each row has a
//! checksum. A separate row of totals changes in every transaction, so a missing row is detected. Values are opaque bytes here.

use std::{collections::HashMap, path::Path, time::Duration};

use bytes::Bytes;
use rusqlite::{Connection, OptionalExtension, config::DbConfig, params};

use super::{Key, ResourceId, Revision};

const FORMAT: i64 = 1;
const PAGE_BYTES: u32 = 8192;

/// A problem with the database.
#[derive(Debug, thiserror::Error)]
pub enum LogError {
    /// SQLite reported an error.
    #[error("cannot {operation} the database")]
    Sqlite {
        /// The operation that failed, as a verb.
        operation: &'static str,
        /// The SQLite error.
        #[source]
        source: rusqlite::Error,
    },
    /// The disk has no free space.
    #[error("the disk that holds the database is full")]
    DiskFull {
        /// The SQLite error.
        #[source]
        source: rusqlite::Error,
    },
    /// The contents differ from the data that was written.
    #[error("the database is damaged: {0}")]
    Damaged(String),
    /// The database was written by a release with another format.
    #[error(
        "the database has format {found}, this program reads format {FORMAT}: use the release that wrote it"
    )]
    Format {
        /// The format found.
        found: i64,
    },
}

impl LogError {
    fn during(operation: &'static str) -> impl FnOnce(rusqlite::Error) -> Self {
        move |source| {
            let damaged = matches!(
                source.sqlite_error_code(),
                Some(rusqlite::ErrorCode::DatabaseCorrupt | rusqlite::ErrorCode::NotADatabase)
            );
            if damaged {
                Self::Damaged(format!("{operation}: {source}"))
            } else {
                Self::Sqlite { operation, source }
            }
        }
    }

    /// Whether the disk has no free space.
    pub fn is_disk_full(&self) -> bool {
        match self {
            Self::Sqlite { source, .. } => {
                source.sqlite_error_code() == Some(rusqlite::ErrorCode::DiskFull)
            }
            Self::DiskFull { .. } => true,
            _ => false,
        }
    }

    /// Whether a disk read or write failed, other than a sync.
    pub(super) fn is_io(source: &rusqlite::Error) -> bool {
        source.sqlite_error_code() == Some(rusqlite::ErrorCode::SystemIoFailure)
            && !Self::is_sync(source)
    }

    /// Whether the store must refuse writes until the log has been opened and read again.
    pub fn is_fatal(&self) -> bool {
        match self {
            Self::Sqlite { source, .. } => {
                source.sqlite_error_code() == Some(rusqlite::ErrorCode::SystemIoFailure)
            }
            Self::Damaged(_) => true,
            Self::DiskFull { .. } | Self::Format { .. } => false,
        }
    }

    /// Whether a sync (fsync) failed. After that, nothing that the disk reports about the data can be trusted.
    pub fn is_sync_failure(&self) -> bool {
        matches!(self, Self::Sqlite { source, .. } if Self::is_sync(source))
    }

    fn is_sync(source: &rusqlite::Error) -> bool {
        matches!(source, rusqlite::Error::SqliteFailure(error, _)
            if matches!(error.extended_code, rusqlite::ffi::SQLITE_IOERR_FSYNC | rusqlite::ffi::SQLITE_IOERR_DIR_FSYNC))
    }
}

/// The kind of change that a row records.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RowKind {
    /// The object as created or changed.
    Put,
    /// The last state of a deleted object.
    Delete,
}

/// One write as it is stored on disk.
#[derive(Clone, Debug)]
pub struct Row {
    /// Revision of the write.
    pub revision: Revision,
    /// The kind of the object.
    pub resource: ResourceId,
    /// The key of the object.
    pub key: Key,
    /// Revision of the superseded version; zero for a creation.
    pub previous: Revision,
    /// Whether the object was written or deleted.
    pub kind: RowKind,
    /// The object's JSON.
    pub value: Bytes,
}

impl Row {
    fn checksum(&self) -> u32 {
        let mut hasher = crc32fast::Hasher::new();
        hasher.update(&self.revision.to_le_bytes());
        hasher.update(&self.previous.to_le_bytes());
        hasher.update(&[self.kind as u8]);
        hasher.update(self.resource.as_str().as_bytes());
        hasher.update(b"\0");
        hasher.update(self.key.as_str().as_bytes());
        hasher.update(b"\0");
        hasher.update(&self.value);
        hasher.finalize()
    }
}

/// Totals over all rows. The fingerprint does not depend on the order of the rows, so adding or removing a row costs one
/// addition.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Totals {
    /// The last assigned revision.
    pub revision: Revision,
    rows: u64,
    fingerprint: u64,
}

impl Totals {
    fn mix(revision: Revision, checksum: u32) -> u64 {
        let mut word = (revision << 32) ^ (revision >> 32) ^ u64::from(checksum);
        word = (word ^ (word >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        word = (word ^ (word >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        word ^ (word >> 31)
    }

    fn add(&mut self, revision: Revision, checksum: u32) {
        self.rows += 1;
        self.fingerprint = self.fingerprint.wrapping_add(Self::mix(revision, checksum));
    }

    fn remove(&mut self, revision: Revision, checksum: u32) {
        self.rows = self.rows.saturating_sub(1);
        self.fingerprint = self.fingerprint.wrapping_sub(Self::mix(revision, checksum));
    }
}

/// Everything that is read when a log is opened.
#[derive(Debug, Default)]
pub struct Contents {
    /// Rows in the order of revisions.
    pub rows: Vec<Row>,
    /// For each kind, the compacted revision: events up to it have been removed.
    pub floors: HashMap<ResourceId, Revision>,
    /// The last assigned revision.
    pub revision: Revision,
}

/// The rows to remove because the event window has moved past them.
#[derive(Debug, Default)]
pub struct Garbage {
    /// Revisions of rows that are no longer needed.
    pub rows: Vec<Revision>,
    /// For each kind, the new compacted revision.
    pub floors: HashMap<ResourceId, Revision>,
}

/// The connection that appends rows.
#[derive(Debug)]
pub struct Log {
    connection: Connection,
    totals: Totals,
    checksums: HashMap<Revision, u32>,
}

impl Log {
    /// Opens the log at `path`, or a log in memory when there is no path, and reads all of it.
    pub fn open(path: Option<&Path>) -> Result<(Self, Contents), LogError> {
        let connection = match path {
            Some(path) => Connection::open(path),
            None => Connection::open_in_memory(),
        }
        .map_err(LogError::during("open"))?;
        prepare(&connection).map_err(LogError::during("prepare"))?;
        let found: i64 = connection
            .query_row("PRAGMA user_version", [], |row| row.get(0))
            .map_err(LogError::during("read"))?;
        match found {
            0 => create_schema(&connection).map_err(LogError::during("create"))?,
            FORMAT => {}
            found => return Err(LogError::Format { found }),
        }
        let mut log = Self {
            connection,
            totals: Totals::default(),
            checksums: HashMap::new(),
        };
        let contents = log.read()?;
        Ok((log, contents))
    }

    fn read(&mut self) -> Result<Contents, LogError> {
        let recorded = self
            .connection
            .query_row(
                "SELECT revision, rows, fingerprint FROM totals",
                [],
                |row| {
                    Ok(Totals {
                        revision: unsigned(row.get(0)?),
                        rows: unsigned(row.get(1)?),
                        fingerprint: unsigned(row.get(2)?),
                    })
                },
            )
            .optional()
            .map_err(LogError::during("read"))?
            .ok_or_else(|| LogError::Damaged("its totals are missing".into()))?;
        let mut resources: HashMap<String, ResourceId> = HashMap::new();
        let mut rows =
            Vec::with_capacity(usize::try_from(recorded.rows.min(1 << 20)).unwrap_or_default());
        let mut counted = Totals {
            revision: recorded.revision,
            ..Totals::default()
        };
        let mut statement = self
            .connection
            .prepare("SELECT revision, resource, key, previous, deleted, checksum, value FROM log ORDER BY revision")
            .map_err(LogError::during("read"))?;
        let mut cursor = statement.query([]).map_err(LogError::during("read"))?;
        while let Some(found) = cursor.next().map_err(LogError::during("read"))? {
            let (row, checksum) =
                decode(found, &mut resources).map_err(LogError::during("read"))?;
            if row.checksum() != checksum {
                return Err(LogError::Damaged(format!(
                    "the row of revision {} ({} {:?}) fails its checksum",
                    row.revision, row.resource, row.key
                )));
            }
            counted.add(row.revision, checksum);
            self.checksums.insert(row.revision, checksum);
            rows.push(row);
        }
        drop(cursor);
        drop(statement);
        if counted != recorded {
            return Err(LogError::Damaged(format!(
                "{} rows were written and {} are there",
                recorded.rows, counted.rows
            )));
        }
        self.totals = counted;
        let floors = self.read_floors().map_err(LogError::during("read"))?;
        Ok(Contents {
            rows,
            floors,
            revision: recorded.revision,
        })
    }

    fn read_floors(&self) -> rusqlite::Result<HashMap<ResourceId, Revision>> {
        let mut statement = self
            .connection
            .prepare("SELECT resource, floor FROM windows")?;
        let floors = statement
            .query_map([], |row| {
                Ok((
                    ResourceId::from_stored(row.get_ref(0)?.as_str()?),
                    unsigned(row.get(1)?),
                ))
            })?
            .collect::<rusqlite::Result<_>>()?;
        Ok(floors)
    }

    /// The last assigned revision.
    pub fn revision(&self) -> Revision {
        self.totals.revision
    }

    /// Appends rows and removes garbage in one durable transaction. An error leaves the log unchanged.
    pub fn append(&mut self, rows: &[Row], garbage: &Garbage) -> Result<(), LogError> {
        let mut totals = self.totals;
        let mut added = Vec::with_capacity(rows.len());
        let transaction = self
            .connection
            .transaction()
            .map_err(LogError::during("begin a write to"))?;
        {
            let mut insert = transaction
                .prepare_cached("INSERT INTO log (revision, resource, key, previous, deleted, checksum, value) VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7)")
                .map_err(LogError::during("write to"))?;
            for row in rows {
                let checksum = row.checksum();
                insert
                    .execute(params![
                        row.revision.cast_signed(),
                        row.resource.as_str(),
                        row.key.as_str(),
                        row.previous.cast_signed(),
                        row.kind == RowKind::Delete,
                        checksum,
                        row.value.as_ref()
                    ])
                    .map_err(LogError::during("write to"))?;
                totals.add(row.revision, checksum);
                totals.revision = totals.revision.max(row.revision);
                added.push((row.revision, checksum));
            }
            let mut delete = transaction
                .prepare_cached("DELETE FROM log WHERE revision = ?1")
                .map_err(LogError::during("compact"))?;
            for &revision in &garbage.rows {
                if let Some(&checksum) = self.checksums.get(&revision) {
                    delete
                        .execute([revision.cast_signed()])
                        .map_err(LogError::during("compact"))?;
                    totals.remove(revision, checksum);
                }
            }
            let mut window = transaction
                .prepare_cached("INSERT INTO windows (resource, floor) VALUES (?1, ?2) ON CONFLICT (resource) DO UPDATE SET floor = excluded.floor")
                .map_err(LogError::during("compact"))?;
            for (resource, floor) in &garbage.floors {
                window
                    .execute(params![resource.as_str(), floor.cast_signed()])
                    .map_err(LogError::during("compact"))?;
            }
            transaction
                .prepare_cached("UPDATE totals SET revision = ?1, rows = ?2, fingerprint = ?3")
                .and_then(|mut update| {
                    update.execute([
                        totals.revision.cast_signed(),
                        totals.rows.cast_signed(),
                        totals.fingerprint.cast_signed(),
                    ])
                })
                .map_err(LogError::during("write to"))?;
        }
        transaction
            .commit()
            .map_err(LogError::during("commit to"))?;
        self.totals = totals;
        self.checksums.extend(added);
        for revision in &garbage.rows {
            self.checksums.remove(revision);
        }
        Ok(())
    }

    /// Moves the write-ahead log (WAL) into the database and restarts the WAL from its beginning. Waits for the checkpointer.
    pub fn restart_wal(&self) -> Result<(), LogError> {
        checkpoint(&self.connection, "RESTART")
    }

    /// Closes the log and truncates the WAL, so that only the database file is left.
    pub fn close(self) {
        if let Err(error) = checkpoint(&self.connection, "TRUNCATE") {
            tracing::warn!(
                error = &error as &dyn std::error::Error,
                "cannot truncate the write-ahead log; it is read at the next start"
            );
        }
    }
}

/// A second connection that moves the write-ahead log into the database while the first connection appends.
#[derive(Debug)]
pub struct Checkpointer(Connection);

impl Checkpointer {
    /// Connects to the database at `path`.
    pub fn open(path: &Path) -> Result<Self, LogError> {
        let connection = Connection::open(path).map_err(LogError::during("open"))?;
        prepare(&connection).map_err(LogError::during("prepare"))?;
        Ok(Self(connection))
    }

    /// Moves as many pages as possible without blocking the writer.
    pub fn run(&self) -> Result<(), LogError> {
        checkpoint(&self.0, "PASSIVE")
    }
}

fn checkpoint(connection: &Connection, mode: &str) -> Result<(), LogError> {
    connection
        .query_row(&format!("PRAGMA wal_checkpoint({mode})"), [], |_| Ok(()))
        .map_err(LogError::during("checkpoint"))
}

fn prepare(connection: &Connection) -> rusqlite::Result<()> {
    connection.busy_timeout(Duration::from_secs(10))?;
    // Without this option, closing a refused database would checkpoint its WAL and so change it.
    connection.set_db_config(DbConfig::SQLITE_DBCONFIG_NO_CKPT_ON_CLOSE, true)?;
    connection.pragma_update(None, "page_size", PAGE_BYTES)?;
    connection.query_row("PRAGMA journal_mode = WAL", [], |_| Ok(()))?;
    connection.pragma_update(None, "synchronous", "FULL")?;
    connection.pragma_update(None, "cell_size_check", "ON")?;
    connection.pragma_update(None, "cache_size", -4096)?;
    connection.query_row("PRAGMA wal_autocheckpoint = 0", [], |_| Ok(()))
}

fn create_schema(connection: &Connection) -> rusqlite::Result<()> {
    connection.execute_batch(&format!(
        "BEGIN;
         CREATE TABLE log (revision INTEGER PRIMARY KEY, resource TEXT NOT NULL, key TEXT NOT NULL, previous INTEGER NOT NULL,
             deleted INTEGER NOT NULL, checksum INTEGER NOT NULL, value BLOB NOT NULL);
         CREATE TABLE windows (resource TEXT PRIMARY KEY, floor INTEGER NOT NULL);
         CREATE TABLE totals (revision INTEGER NOT NULL, rows INTEGER NOT NULL, fingerprint INTEGER NOT NULL);
         INSERT INTO totals VALUES (0, 0, 0);
         PRAGMA user_version = {FORMAT};
         COMMIT;"
    ))
}

fn decode(
    found: &rusqlite::Row<'_>,
    resources: &mut HashMap<String, ResourceId>,
) -> rusqlite::Result<(Row, u32)> {
    let text = found.get_ref(1)?.as_str()?;
    let resource = match resources.get(text) {
        Some(resource) => resource.clone(),
        None => resources
            .entry(text.to_owned())
            .or_insert_with(|| ResourceId::from_stored(text))
            .clone(),
    };
    let row = Row {
        revision: unsigned(found.get(0)?),
        resource,
        key: Key::from_stored(found.get_ref(2)?.as_str()?),
        previous: unsigned(found.get(3)?),
        kind: if found.get(4)? {
            RowKind::Delete
        } else {
            RowKind::Put
        },
        value: Bytes::copy_from_slice(found.get_ref(6)?.as_blob()?),
    };
    Ok((row, found.get(5)?))
}

fn unsigned(number: i64) -> u64 {
    number.cast_unsigned()
}

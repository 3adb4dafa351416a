//! The files of the audit log: the current file, and rotated files `PATH.1` (the newest), `PATH.2` and so on.

use std::{
    fs::{File, OpenOptions},
    io::{self, BufWriter, Write},
    os::unix::fs::OpenOptionsExt,
    path::{Path, PathBuf},
};

use super::Options;

/// Why the audit log cannot be opened.
#[derive(Debug, thiserror::Error)]
#[error("cannot write the audit log {path}")]
pub struct OpenError {
    /// The path of the file.
    pub path: PathBuf,
    /// The I/O error.
    #[source]
    pub source: io::Error,
}

/// A log file with rotation.
#[derive(Debug)]
pub struct Rotating {
    options: Options,
    file: BufWriter<File>,
    bytes: u64,
    /// Whether the last write failed. A full disk is logged only once.
    failing: bool,
}

fn append_to(path: &Path) -> io::Result<(BufWriter<File>, u64)> {
    let file = OpenOptions::new()
        .append(true)
        .create(true)
        .mode(0o600)
        .open(path)?;
    let bytes = file.metadata()?.len();
    Ok((BufWriter::new(file), bytes))
}

impl Rotating {
    /// Opens the file to append to it.
    pub fn open(options: Options) -> Result<Self, OpenError> {
        let (file, bytes) = append_to(&options.path).map_err(|source| OpenError {
            path: options.path.clone(),
            source,
        })?;
        Ok(Self {
            options,
            file,
            bytes,
            failing: false,
        })
    }

    /// Appends a line. Rotates the file first if it is full.
    pub fn write(&mut self, line: &str) {
        let length = line.len() as u64 + 1;
        let outcome = if self.bytes > 0 && self.bytes + length > self.options.max_bytes {
            self.rotate()
        } else {
            Ok(())
        };
        let outcome = outcome.and_then(|()| writeln!(self.file, "{line}"));
        if outcome.is_ok() {
            self.bytes += length;
        }
        self.report(&outcome);
    }

    /// Flushes the buffer to the operating system.
    pub fn flush(&mut self) {
        let outcome = self.file.flush();
        self.report(&outcome);
    }

    fn report(&mut self, outcome: &io::Result<()>) {
        if let Err(error) = outcome
            && !self.failing
        {
            let path = self.options.path.display().to_string();
            tracing::error!(
                error = error as &dyn std::error::Error,
                path,
                "cannot write the audit log"
            );
        }
        self.failing = outcome.is_err();
    }

    fn backup(&self, number: usize) -> PathBuf {
        let mut name = self.options.path.clone().into_os_string();
        name.push(format!(".{number}"));
        PathBuf::from(name)
    }

    fn rotate(&mut self) -> io::Result<()> {
        self.file.flush()?;
        for number in (1..self.options.max_backups).rev() {
            match std::fs::rename(self.backup(number), self.backup(number + 1)) {
                Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
                _ => {}
            }
        }
        if self.options.max_backups == 0 {
            std::fs::remove_file(&self.options.path)?;
        } else {
            std::fs::rename(&self.options.path, self.backup(1))?;
        }
        (self.file, self.bytes) = append_to(&self.options.path)?;
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn files_are_rotated_by_size_bounded_in_number_and_appended_to() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("audit.log");
        let options = Options {
            path: path.clone(),
            max_bytes: 20,
            max_backups: 2,
        };
        for half in [0..4, 4..9] {
            let mut file = Rotating::open(options.clone()).unwrap();
            for number in half {
                file.write(&format!("line {number}"));
            }
            file.flush();
        }
        let read = |name: &str| std::fs::read_to_string(directory.path().join(name)).unwrap();
        assert_eq!(read("audit.log"), "line 8\n");
        assert_eq!(read("audit.log.1"), "line 6\nline 7\n");
        assert_eq!(read("audit.log.2"), "line 4\nline 5\n");
        assert_eq!(std::fs::read_dir(directory.path()).unwrap().count(), 3);
    }
}

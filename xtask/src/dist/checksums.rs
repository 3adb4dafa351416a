//! `SHA256SUMS`: the checksum of every file, in the form that `sha256sum --check` reads.

use std::fs::{self, File};
use std::io;
use std::path::{Path, PathBuf};

use anyhow::Context;
use sha2::{Digest, Sha256};

pub const FILE: &str = "SHA256SUMS";

/// A file below a directory, and its checksum.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Sum {
    /// Relative to the directory.
    pub path: String,
    pub sha256: String,
}

pub fn write(directory: &Path) -> anyhow::Result<()> {
    let lines: Vec<String> = of_directory(directory)?
        .into_iter()
        .filter(|sum| sum.path != FILE)
        .map(|sum| format!("{}  {}\n", sum.sha256, sum.path))
        .collect();
    fs::write(directory.join(FILE), lines.concat())?;
    Ok(())
}

/// The checksums of all files below the directory, sorted by path.
pub fn of_directory(directory: &Path) -> anyhow::Result<Vec<Sum>> {
    let mut sums = Vec::new();
    let mut waiting = vec![PathBuf::new()];
    while let Some(below) = waiting.pop() {
        let path = directory.join(&below);
        for entry in fs::read_dir(&path).with_context(|| format!("reading {}", path.display()))? {
            let entry = entry?;
            let relative = below.join(entry.file_name());
            if entry.file_type()?.is_dir() {
                waiting.push(relative);
                continue;
            }
            sums.push(Sum {
                sha256: of_file(&entry.path())?,
                path: relative.to_string_lossy().into_owned(),
            });
        }
    }
    sums.sort_by(|one, other| one.path.cmp(&other.path));
    Ok(sums)
}

pub fn of_file(path: &Path) -> anyhow::Result<String> {
    let mut hash = Sha256::new();
    let mut file = File::open(path).with_context(|| format!("opening {}", path.display()))?;
    io::copy(&mut file, &mut hash).with_context(|| format!("reading {}", path.display()))?;
    Ok(format!("{:x}", hash.finalize()))
}

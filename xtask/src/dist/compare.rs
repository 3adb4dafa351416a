//! Compares two runs file by file.

use std::collections::BTreeMap;
use std::path::Path;

use anyhow::bail;

use super::checksums::of_directory;

/// Fails with the names of the files that are not the same in both directories.
pub fn same_bytes(one: &Path, other: &Path) -> anyhow::Result<()> {
    let mut files: BTreeMap<String, [Option<String>; 2]> = BTreeMap::new();
    for (index, directory) in [one, other].into_iter().enumerate() {
        for sum in of_directory(directory)? {
            files.entry(sum.path).or_default()[index] = Some(sum.sha256);
        }
    }
    let different: Vec<String> = files
        .into_iter()
        .filter(|(_, sums)| sums[0] != sums[1])
        .map(|(path, _)| path)
        .collect();
    if different.is_empty() {
        return Ok(());
    }
    bail!("two runs differ in {}", different.join(", "))
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    #[test]
    fn a_different_or_missing_file_is_named() {
        let (one, other) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        for directory in [one.path(), other.path()] {
            fs::create_dir(directory.join("d")).unwrap();
            fs::write(directory.join("d/same"), "x").unwrap();
        }
        same_bytes(one.path(), other.path()).unwrap();
        fs::write(one.path().join("d/more"), "").unwrap();
        fs::write(one.path().join("d/same"), "y").unwrap();
        let error = same_bytes(one.path(), other.path())
            .unwrap_err()
            .to_string();
        assert!(error.ends_with("d/more, d/same"), "{error}");
    }
}

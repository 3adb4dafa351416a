//! The version of what is handed out: that of the workspace, with the date and the commit.

use std::path::Path;
use std::process::Command;

use anyhow::{Context, ensure};

const COMMIT_DIGITS: usize = 12;

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Version {
    /// Of the workspace, as 0.1.0.
    pub number: String,
    pub commit: String,
    /// When it was committed, in seconds since the epoch.
    pub epoch: u64,
    /// The same as RFC 3339, in UTC.
    pub date: String,
    pub is_dirty: bool,
}

impl Version {
    pub fn of(root: &Path) -> anyhow::Result<Self> {
        let commit = git(root, &["rev-parse", "HEAD"])?;
        let epoch: u64 = git(root, &["log", "-1", "--format=%ct"])?
            .parse()
            .context("the commit's time is no number")?;
        let date = jiff::Timestamp::from_second(i64::try_from(epoch)?)?.to_string();
        Ok(Self {
            number: env!("CARGO_PKG_VERSION").to_owned(),
            commit,
            epoch,
            date,
            is_dirty: !git(root, &["status", "--porcelain"])?.is_empty(),
        })
    }

    /// The version of packages and of the chart: `0.1.0+20261118.g0123456789ab`. The part after the plus is build metadata to semantic
    /// versioning, and makes a later build the newer package to Debian.
    pub fn package(&self) -> String {
        let day: String = self
            .date
            .chars()
            .take(10)
            .filter(char::is_ascii_digit)
            .collect();
        let commit = self.commit.get(..COMMIT_DIGITS).unwrap_or(&self.commit);
        let dirty = if self.is_dirty { ".dirty" } else { "" };
        format!("{}+{day}.g{commit}{dirty}", self.number)
    }

    /// The same as a tag of images, which have no plus.
    pub fn image_tag(&self) -> String {
        self.package().replace('+', "-")
    }
}

fn git(root: &Path, arguments: &[&str]) -> anyhow::Result<String> {
    let output = Command::new("git")
        .arg("-C")
        .arg(root)
        .args(arguments)
        .output()
        .context("cannot run git, which names the version")?;
    ensure!(
        output.status.success(),
        "git {}: {}",
        arguments.join(" "),
        String::from_utf8_lossy(&output.stderr)
    );
    Ok(String::from_utf8(output.stdout)?.trim().to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_version_names_day_and_commit_and_fits_a_tag() {
        let mut version = Version {
            number: "0.1.0".to_owned(),
            commit: "0123456789abcdef0123456789abcdef01234567".to_owned(),
            epoch: 1_795_000_000,
            date: "2026-11-18T08:26:40Z".to_owned(),
            is_dirty: false,
        };
        assert_eq!(version.package(), "0.1.0+20261118.g0123456789ab");
        assert_eq!(version.image_tag(), "0.1.0-20261118.g0123456789ab");
        version.is_dirty = true;
        assert!(version.package().ends_with(".g0123456789ab.dirty"));
    }
}

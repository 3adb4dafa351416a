//! The root file system of the image `python-runtime`: Debian's smallest, with Python, from Debian's packages by mmdebstrap.
//!
//! The packages are those that Debian serves at the time; the same packages give the same tree. What depends on the run (logs, caches,
//! identifiers, lists of packages) is left out.

use std::fs;
use std::path::Path;
use std::process::Command;

use anyhow::{Context, ensure};
use images::write::Tree;
use tempfile::TempDir;

use super::{Run, Target};

const SUITE: &str = "trixie";
/// On top of what `minbase` has.
const PACKAGES: &str = "python3,ca-certificates";

/// A root file system for one target.
#[derive(Debug)]
pub struct Root {
    pub target: Target,
    pub tree: Tree,
    pub packages: Vec<Package>,
    /// Holds the files until the image is written.
    _directory: TempDir,
}

/// An installed Debian package.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Package {
    pub name: String,
    pub version: String,
    pub architecture: String,
}

/// A root file system for each target that this machine can install.
pub fn roots(run: &Run<'_>) -> anyhow::Result<Vec<Root>> {
    let mut roots = Vec::new();
    for target in &run.arguments.targets {
        if !target.is_native() {
            // The packages' scripts would have to run under an emulator that the kernel starts, which is a setting of the whole machine.
            println!(
                "-- python-runtime is not built for {}: its packages are installed on such a machine only",
                target.machine()
            );
            continue;
        }
        roots.push(root(run, *target)?);
    }
    Ok(roots)
}

fn root(run: &Run<'_>, target: Target) -> anyhow::Result<Root> {
    ensure!(
        rustix::process::geteuid().is_root(),
        "the root file system of python-runtime is installed by root: run as root, or pass --without-python-runtime"
    );
    let directory = tempfile::tempdir()?;
    let path = directory.path().join("root");
    println!(
        "-- installing Debian {SUITE} with Python for {}",
        target.architecture()
    );
    let output = Command::new("mmdebstrap")
        .args(["--quiet", "--mode=root", "--variant=minbase"])
        .arg(format!("--architectures={}", target.architecture()))
        .arg(format!("--include={PACKAGES}"))
        .args([SUITE])
        .arg(&path)
        .env("SOURCE_DATE_EPOCH", run.version.epoch.to_string())
        .output()
        .context("cannot run mmdebstrap, which installs the root file system of python-runtime: install Debian's package mmdebstrap, or pass --without-python-runtime")?;
    ensure!(
        output.status.success(),
        "mmdebstrap: {}: {}",
        output.status,
        String::from_utf8_lossy(&output.stderr)
    );
    let status = fs::read_to_string(path.join("var/lib/dpkg/status"))?;
    let mut tree = Tree::new(run.version.epoch);
    tree.add_directory(&path, &is_kept)?;
    Ok(Root {
        target,
        tree,
        packages: packages(&status),
        _directory: directory,
    })
}

/// Whether a path belongs into the image. Files that differ between two installations of the same packages do not.
fn is_kept(path: &Path) -> bool {
    const CONTENTS_LEFT_OUT: [&str; 6] = ["dev", "proc", "run", "sys", "var/cache", "var/log"];
    const LEFT_OUT: [&str; 7] = [
        "etc/hostname",
        "etc/machine-id",
        "etc/resolv.conf",
        "var/cache/ldconfig",
        "var/lib/apt/lists",
        "var/lib/dbus/machine-id",
        "var/lib/systemd/random-seed",
    ];
    if LEFT_OUT.iter().any(|left| path.starts_with(left)) {
        return false;
    }
    if CONTENTS_LEFT_OUT
        .iter()
        .any(|left| path != Path::new(left) && path.starts_with(left))
    {
        return false;
    }
    // Earlier versions of files, and compiled Python, which carries the time of its source.
    let name = path.file_name().unwrap_or_default().to_string_lossy();
    let is_backup = path.starts_with("etc") && name.ends_with('-');
    let is_old_state = path.starts_with("var/lib/dpkg") && name.ends_with("-old");
    !is_backup && !is_old_state && name != "__pycache__"
}

/// The installed packages of `/var/lib/dpkg/status`, sorted by name.
fn packages(status: &str) -> Vec<Package> {
    let mut packages: Vec<Package> = status
        .split("\n\n")
        .filter_map(|paragraph| {
            let field = |name: &str| {
                let line = paragraph.lines().find_map(|line| line.strip_prefix(name));
                line.map(|value| value.trim().to_owned())
            };
            field("Status:")
                .filter(|status| status.ends_with(" installed"))
                .and(Some(Package {
                    name: field("Package:")?,
                    version: field("Version:")?,
                    architecture: field("Architecture:")?,
                }))
        })
        .collect();
    packages.sort_by(|one, other| one.name.cmp(&other.name));
    packages
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_differs_between_installations_is_left_out() {
        for path in [
            "etc/machine-id",
            "var/cache/ldconfig/aux-cache",
            "var/log/dpkg.log",
            "var/lib/apt/lists/x",
            "var/lib/dpkg/status-old",
            "etc/passwd-",
            "usr/lib/python3/dist-packages/__pycache__",
            "dev/null",
        ] {
            assert!(!is_kept(Path::new(path)), "{path}");
        }
        for path in [
            "etc/passwd",
            "var/lib/dpkg/status",
            "var/log",
            "dev",
            "usr/bin/python3",
        ] {
            assert!(is_kept(Path::new(path)), "{path}");
        }
    }

    #[test]
    fn packages_are_those_that_are_installed() {
        let status = "Package: b\nStatus: install ok installed\nArchitecture: amd64\nVersion: 1:2-3\n\nPackage: a\nStatus: deinstall ok config-files\nArchitecture: all\nVersion: 1\n";
        let found = packages(status);
        assert_eq!(found.len(), 1);
        assert_eq!(
            (found[0].name.as_str(), found[0].version.as_str()),
            ("b", "1:2-3")
        );
    }
}

//! Resolves the user of a container: numbers, or names from the image's own `/etc/passwd` and `/etc/group`.
//!
//! The files are looked up in the layers as overlayfs would show them, including symlinks and whiteouts, but without a mount.

use std::ffi::OsString;
use std::fs::File;
use std::io::Read;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::ffi::OsStringExt;
use std::path::{Component, Path, PathBuf};

use rustix::fs::{AtFlags, FileType, Mode, OFlags};

use crate::extract::open_directory;

const FILE_BYTES_MAX: u64 = 1 << 20;
const SYMLINKS_MAX: usize = 40;

#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum UserError {
    #[error("user {0:?} of the image is not in its /etc/passwd")]
    User(String),
    #[error("group {0:?} of the image is not in its /etc/group")]
    Group(String),
}

/// A resolved user.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct User {
    pub uid: u32,
    pub gid: u32,
    /// The supplementary groups: those that list the user as a member.
    pub groups: Vec<u32>,
    pub home: Option<String>,
}

/// The content of `/etc/passwd` and `/etc/group` in an image.
#[derive(Debug, Clone, Default)]
pub struct Accounts {
    passwd: String,
    group: String,
}

impl Accounts {
    /// Reads the files from extracted layers, uppermost first. A missing file counts as empty.
    pub fn of(layers: &[PathBuf]) -> Self {
        let view = Layers::open(layers);
        Self {
            passwd: view.read(Path::new("etc/passwd")).unwrap_or_default(),
            group: view.read(Path::new("etc/group")).unwrap_or_default(),
        }
    }

    /// Resolves `user[:group]`, each a name or a number. An empty text means root.
    pub fn resolve(&self, text: &str) -> Result<User, UserError> {
        let (user, group) = text.split_once(':').unwrap_or((text, ""));
        let user = if user.is_empty() { "0" } else { user };
        let lines: Vec<Vec<&str>> = fields(&self.passwd);
        // A user whose name consists of digits takes precedence over the number.
        let entry = lines
            .iter()
            .find(|line| line.first() == Some(&user))
            .or_else(|| lines.iter().find(|line| line.get(2) == Some(&user)));
        let number = |field: Option<&&str>| field.and_then(|text| text.parse::<u32>().ok());
        let uid = match entry {
            Some(line) => number(line.get(2)),
            None => user.parse().ok(),
        };
        let uid = uid.ok_or_else(|| UserError::User(user.to_owned()))?;
        let name = entry.and_then(|line| line.first().copied());
        let groups = fields(&self.group);
        let gid = if group.is_empty() {
            entry.and_then(|line| number(line.get(3))).unwrap_or(0)
        } else {
            groups
                .iter()
                .find(|line| line.first() == Some(&group))
                .and_then(|line| number(line.get(2)))
                .or_else(|| group.parse().ok())
                .ok_or_else(|| UserError::Group(group.to_owned()))?
        };
        let lists_user = |line: &&Vec<&str>| {
            let members = line.get(3).map_or("", |members| members);
            name.is_some_and(|name| members.split(',').any(|member| member == name))
        };
        Ok(User {
            uid,
            gid,
            groups: groups
                .iter()
                .filter(lists_user)
                .filter_map(|line| number(line.get(2)))
                .filter(|member| *member != gid)
                .collect(),
            home: entry
                .and_then(|line| line.get(5))
                .filter(|home| home.starts_with('/'))
                .map(|home| (*home).to_owned()),
        })
    }
}

fn fields(text: &str) -> Vec<Vec<&str>> {
    text.lines()
        .filter(|line| !line.starts_with('#') && line.contains(':'))
        .map(|line| line.split(':').map(str::trim).collect())
        .collect()
}

/// A merged view of the layers, like an overlay mount.
struct Layers {
    roots: Vec<OwnedFd>,
}

enum Step {
    Directory,
    File(File),
    Link(PathBuf),
    Absent,
}

impl Layers {
    fn open(layers: &[PathBuf]) -> Self {
        Self {
            roots: layers
                .iter()
                .filter_map(|path| open_directory(path).ok())
                .collect(),
        }
    }

    fn read(&self, path: &Path) -> Option<String> {
        let mut text = Vec::new();
        self.find(path)?
            .take(FILE_BYTES_MAX)
            .read_to_end(&mut text)
            .ok()?;
        Some(String::from_utf8_lossy(&text).into_owned())
    }

    /// Resolves a path one component at a time, and starts again at the root after every symlink.
    fn find(&self, path: &Path) -> Option<File> {
        let mut wanted = path.to_owned();
        for _ in 0..SYMLINKS_MAX {
            let mut walked = PathBuf::new();
            let mut rest = wanted.components();
            let mut next = None;
            while let Some(part) = rest.next() {
                match part {
                    Component::Normal(name) => walked.push(name),
                    Component::ParentDir => {
                        walked.pop();
                        continue;
                    }
                    _ => continue,
                }
                match self.step(&walked) {
                    Step::Directory => {}
                    Step::File(file) => return rest.next().is_none().then_some(file),
                    Step::Absent => return None,
                    Step::Link(target) => {
                        // `join` starts at the root if the target is absolute.
                        let from = walked.parent().unwrap_or(Path::new(""));
                        next = Some(from.join(target).join(rest.as_path()));
                        break;
                    }
                }
            }
            wanted = next?;
        }
        None
    }

    /// Looks up a path without symlinks in the uppermost layer that determines it.
    fn step(&self, path: &Path) -> Step {
        for root in &self.roots {
            match look_up(root, path) {
                Some(Step::Absent) => return Step::Absent,
                Some(step) => return step,
                None => {}
            }
        }
        Step::Absent
    }
}

/// Looks up a path in one layer. Returns `None` if the lower layers must be searched.
fn look_up(root: &OwnedFd, path: &Path) -> Option<Step> {
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let mut directory = rustix::io::dup(root).ok()?;
    let mut parts = path.components().peekable();
    while let Some(part) = parts.next() {
        let name = part.as_os_str();
        let Ok(found) = rustix::fs::statat(&directory, name, AtFlags::SYMLINK_NOFOLLOW) else {
            // An opaque directory hides the lower layers.
            return is_opaque(&directory).then_some(Step::Absent);
        };
        let kind = FileType::from_raw_mode(found.st_mode);
        if parts.peek().is_none() {
            return Some(match kind {
                FileType::Directory => Step::Directory,
                FileType::RegularFile => {
                    let flags = OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
                    match rustix::fs::openat(&directory, name, flags, Mode::empty()) {
                        Ok(file) => Step::File(file.into()),
                        Err(_) => Step::Absent,
                    }
                }
                FileType::Symlink => match rustix::fs::readlinkat(&directory, name, Vec::new()) {
                    Ok(target) => {
                        Step::Link(PathBuf::from(OsString::from_vec(target.into_bytes())))
                    }
                    Err(_) => Step::Absent,
                },
                _ => Step::Absent,
            });
        }
        if kind != FileType::Directory {
            return Some(Step::Absent);
        }
        directory = rustix::fs::openat(directory.as_fd(), name, flags, Mode::empty()).ok()?;
    }
    None
}

fn is_opaque(directory: &OwnedFd) -> bool {
    ["trusted.overlay.opaque", "user.overlay.opaque"]
        .iter()
        .any(|name| {
            let mut value = [0; 1];
            rustix::fs::fgetxattr(directory, *name, &mut value).is_ok_and(|_| value == *b"y")
        })
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;
    use std::os::unix::fs::symlink;

    fn accounts() -> Accounts {
        Accounts {
            passwd: "# a comment\nroot:x:0:0:root:/root:/bin/sh\napp:x:1000:1001::/srv/app:/bin/sh\n12:x:77:78::/:/bin/sh\n".into(),
            group: "root:x:0:\napp:x:1001:\nvideo:x:44:app,other\n".into(),
        }
    }

    #[test]
    fn users_are_names_or_numbers() {
        let user = |uid, gid, groups: &[u32], home: Option<&str>| {
            Ok(User {
                uid,
                gid,
                groups: groups.to_vec(),
                home: home.map(str::to_owned),
            })
        };
        for (text, expected) in [
            ("", user(0, 0, &[], Some("/root"))),
            ("app", user(1000, 1001, &[44], Some("/srv/app"))),
            ("1000", user(1000, 1001, &[44], Some("/srv/app"))),
            ("app:video", user(1000, 44, &[], Some("/srv/app"))),
            ("app:5", user(1000, 5, &[44], Some("/srv/app"))),
            ("4242", user(4242, 0, &[], None)),
            ("12", user(77, 78, &[], Some("/"))),
            ("nobody", Err(UserError::User("nobody".into()))),
            ("app:nobody", Err(UserError::Group("nobody".into()))),
        ] {
            assert_eq!(accounts().resolve(text), expected, "{text:?}");
        }
    }

    #[test]
    fn files_are_resolved_through_layers_and_symlinks_inside_the_image() {
        let directory = tempfile::tempdir().unwrap();
        let (upper, lower) = (
            directory.path().join("upper"),
            directory.path().join("lower"),
        );
        for path in [&upper, &lower] {
            fs::create_dir_all(path.join("etc")).unwrap();
        }
        fs::create_dir_all(lower.join("usr/etc")).unwrap();
        fs::write(lower.join("usr/etc/passwd"), "app:x:9:9::/:/bin/sh").unwrap();
        symlink("../usr/etc/passwd", upper.join("etc/passwd")).unwrap();
        symlink("/../../../../../../etc/group", lower.join("etc/group")).unwrap();
        let layers = [upper.clone(), lower.clone()];
        let accounts = Accounts::of(&layers);
        assert_eq!(accounts.resolve("app").unwrap().uid, 9);
        // A symlink that leads out of the root resolves inside the image: here to itself.
        assert_eq!(accounts.group, "");
    }
}

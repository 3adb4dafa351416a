//! The entries of a layer or another archive: sorted by path, each with a mode, an owner and a time.

use std::collections::{BTreeMap, HashMap};
use std::fs::{self, File, Metadata};
use std::io::Write;
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use super::WriteError;
use super::tar::{EntryType, Header, TarWriter};

/// Where the bytes of a file come from.
#[derive(Debug, Clone)]
pub enum Content {
    Bytes(Vec<u8>),
    /// Read when the archive is written.
    Path(PathBuf),
}

/// How an archive writes the paths of its entries.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Naming {
    /// `usr/bin`, as in image layers.
    Plain,
    /// `./usr/bin` after an entry `./`, as in Debian packages.
    DotSlash,
}

#[derive(Debug, Clone)]
enum Kind {
    Directory,
    File(Content),
    Symlink(Vec<u8>),
    HardLink(Vec<u8>),
}

#[derive(Debug, Clone)]
struct Node {
    kind: Kind,
    mode: u32,
    uid: u32,
    gid: u32,
    modified: u64,
    attributes: Vec<(String, Vec<u8>)>,
}

/// The entries of an archive. Parent directories that are not added are created with mode 0755, owned by root.
#[derive(Debug, Clone)]
pub struct Tree {
    nodes: BTreeMap<Vec<u8>, Node>,
    /// The time of entries that are added one by one, and the latest time of those from a directory.
    modified: u64,
}

impl Tree {
    /// An empty tree. `modified` is in seconds since the epoch.
    pub fn new(modified: u64) -> Self {
        Self {
            nodes: BTreeMap::new(),
            modified,
        }
    }

    /// Adds a directory that root owns.
    pub fn directory(&mut self, path: &str, mode: u32) -> Result<&mut Self, WriteError> {
        self.insert(path, Kind::Directory, mode)
    }

    /// Adds a file that root owns.
    pub fn file(
        &mut self,
        path: &str,
        mode: u32,
        content: Content,
    ) -> Result<&mut Self, WriteError> {
        self.insert(path, Kind::File(content), mode)
    }

    pub fn symlink(&mut self, path: &str, target: &str) -> Result<&mut Self, WriteError> {
        self.insert(path, Kind::Symlink(target.as_bytes().to_vec()), 0o777)
    }

    /// Sets the owner of an entry that is there.
    pub fn owner(&mut self, path: &str, uid: u32, gid: u32) -> Result<&mut Self, WriteError> {
        let key = relative(path.as_bytes())?;
        let node = self.nodes.get_mut(&key);
        let node = node.ok_or_else(|| WriteError::Path(path.to_owned()))?;
        (node.uid, node.gid) = (uid, gid);
        Ok(self)
    }

    /// Adds everything below a directory with its modes, owners, links and capabilities, except the paths for which `is_wanted`
    /// is false. Later times than the tree's own become that time.
    pub fn add_directory(
        &mut self,
        source: &Path,
        is_wanted: &dyn Fn(&Path) -> bool,
    ) -> Result<&mut Self, WriteError> {
        let mut links = HashMap::new();
        self.add_below(source, Path::new(""), is_wanted, &mut links)?;
        Ok(self)
    }

    fn add_below(
        &mut self,
        source: &Path,
        below: &Path,
        is_wanted: &dyn Fn(&Path) -> bool,
        links: &mut HashMap<(u64, u64), Vec<u8>>,
    ) -> Result<(), WriteError> {
        let directory = source.join(below);
        let shown = directory.display().to_string();
        let mut names = fs::read_dir(&directory)
            .and_then(|entries| {
                entries
                    .map(|entry| entry.map(|entry| entry.file_name()))
                    .collect::<Result<Vec<_>, _>>()
            })
            .map_err(WriteError::read(shown))?;
        // Of several hard links, the first by name is the file.
        names.sort();
        for name in names {
            let path = below.join(name);
            if !is_wanted(&path) {
                continue;
            }
            let full = source.join(&path);
            let shown = full.display().to_string();
            let metadata = fs::symlink_metadata(&full).map_err(WriteError::read(shown.as_str()))?;
            let key = path.as_os_str().as_bytes().to_vec();
            let node = self.node_of(&full, &metadata, &key, links)?;
            let is_directory = matches!(node.kind, Kind::Directory);
            self.nodes.insert(key, node);
            if is_directory {
                self.add_below(source, &path, is_wanted, links)?;
            }
        }
        Ok(())
    }

    fn node_of(
        &self,
        full: &Path,
        metadata: &Metadata,
        key: &[u8],
        links: &mut HashMap<(u64, u64), Vec<u8>>,
    ) -> Result<Node, WriteError> {
        let shown = || full.display().to_string();
        let kind = if metadata.is_dir() {
            Kind::Directory
        } else if metadata.is_symlink() {
            let target = fs::read_link(full).map_err(WriteError::read(shown()))?;
            Kind::Symlink(target.into_os_string().into_vec())
        } else if metadata.is_file() {
            let identity = (metadata.dev(), metadata.ino());
            if let Some(first) = links.get(&identity) {
                Kind::HardLink(first.clone())
            } else {
                if metadata.nlink() > 1 {
                    links.insert(identity, key.to_vec());
                }
                Kind::File(Content::Path(full.to_owned()))
            }
        } else {
            return Err(WriteError::Unsupported(shown()));
        };
        let attributes = match kind {
            Kind::File(_) => capabilities(full),
            _ => Vec::new(),
        };
        Ok(Node {
            kind,
            mode: metadata.mode() & 0o7777,
            uid: metadata.uid(),
            gid: metadata.gid(),
            modified: u64::try_from(metadata.mtime())
                .unwrap_or_default()
                .min(self.modified),
            attributes,
        })
    }

    fn insert(&mut self, path: &str, kind: Kind, mode: u32) -> Result<&mut Self, WriteError> {
        let key = relative(path.as_bytes())?;
        let node = |kind, mode| Node {
            kind,
            mode,
            uid: 0,
            gid: 0,
            modified: self.modified,
            attributes: Vec::new(),
        };
        let added = node(kind, mode);
        let missing = node(Kind::Directory, 0o755);
        for (index, _) in key.iter().enumerate().filter(|(_, byte)| **byte == b'/') {
            let parent = &key[..index];
            match self.nodes.get(parent) {
                None => {
                    self.nodes.insert(parent.to_vec(), missing.clone());
                }
                // A root with a merged /usr has links for some directories.
                Some(node) if matches!(node.kind, Kind::Directory | Kind::Symlink(_)) => {}
                Some(_) => return Err(WriteError::Duplicate(path.to_owned())),
            }
        }
        if let Some(present) = self.nodes.get(&key) {
            let is_directory = |node: &Node| matches!(node.kind, Kind::Directory);
            if is_directory(present) != is_directory(&added) {
                return Err(WriteError::Duplicate(path.to_owned()));
            }
        }
        self.nodes.insert(key, added);
        Ok(self)
    }

    /// The sum of the sizes of all files.
    pub fn content_bytes(&self) -> Result<u64, WriteError> {
        let mut sum = 0_u64;
        for node in self.nodes.values() {
            if let Kind::File(content) = &node.kind {
                sum = sum.saturating_add(content.len()?);
            }
        }
        Ok(sum)
    }

    /// The paths and contents of the files, sorted.
    pub fn files(&self) -> impl Iterator<Item = (String, &Content)> {
        self.nodes
            .iter()
            .filter_map(|(path, node)| match &node.kind {
                Kind::File(content) => Some((String::from_utf8_lossy(path).into_owned(), content)),
                _ => None,
            })
    }

    /// Writes all entries as a tar archive.
    pub fn write<W: Write>(&self, out: W, naming: Naming) -> Result<W, WriteError> {
        let mut tar = TarWriter::new(out);
        if naming == Naming::DotSlash {
            let root = Node {
                kind: Kind::Directory,
                mode: 0o755,
                uid: 0,
                gid: 0,
                modified: self.modified,
                attributes: Vec::new(),
            };
            append(&mut tar, b".", &root)?;
        }
        for (path, node) in &self.nodes {
            match naming {
                Naming::Plain => append(&mut tar, path, node)?,
                Naming::DotSlash => append(&mut tar, &[&b"./"[..], path].concat(), node)?,
            }
        }
        tar.finish().map_err(WriteError::write("the archive"))
    }
}

impl Content {
    fn len(&self) -> Result<u64, WriteError> {
        match self {
            Content::Bytes(bytes) => Ok(bytes.len() as u64),
            Content::Path(path) => fs::metadata(path)
                .map(|metadata| metadata.len())
                .map_err(WriteError::read(path.display().to_string())),
        }
    }

    /// All bytes, in memory.
    pub fn read(&self) -> Result<Vec<u8>, WriteError> {
        match self {
            Content::Bytes(bytes) => Ok(bytes.clone()),
            Content::Path(path) => {
                fs::read(path).map_err(WriteError::read(path.display().to_string()))
            }
        }
    }
}

fn append<W: Write>(tar: &mut TarWriter<W>, path: &[u8], node: &Node) -> Result<(), WriteError> {
    let mut header = Header {
        kind: EntryType::Directory,
        path,
        link: b"",
        mode: node.mode,
        uid: node.uid,
        gid: node.gid,
        size: 0,
        modified: node.modified,
        attributes: &node.attributes,
    };
    let shown = String::from_utf8_lossy(path).into_owned();
    let written = match &node.kind {
        Kind::Directory => {
            let path = [path, &b"/"[..]].concat();
            header.path = &path;
            tar.append(&header, &b""[..])
        }
        Kind::Symlink(target) => {
            header.kind = EntryType::Symlink;
            header.link = target;
            tar.append(&header, &b""[..])
        }
        Kind::HardLink(target) => {
            header.kind = EntryType::HardLink;
            header.link = target;
            tar.append(&header, &b""[..])
        }
        Kind::File(content) => {
            header.kind = EntryType::File;
            header.size = content.len()?;
            match content {
                Content::Bytes(bytes) => tar.append(&header, bytes.as_slice()),
                Content::Path(source) => {
                    let file = File::open(source)
                        .map_err(WriteError::read(source.display().to_string()))?;
                    tar.append(&header, file)
                }
            }
        }
    };
    written.map_err(WriteError::write(shown))
}

/// The path without slashes at its ends. `.` and `..` are refused: another program could resolve them differently.
fn relative(path: &[u8]) -> Result<Vec<u8>, WriteError> {
    let refused = || WriteError::Path(String::from_utf8_lossy(path).into_owned());
    let trimmed = path.strip_suffix(b"/").unwrap_or(path);
    let is_bad = |part: &[u8]| part.is_empty() || part == b"." || part == b"..";
    if trimmed.contains(&0) || trimmed.split(|byte| *byte == b'/').any(is_bad) {
        return Err(refused());
    }
    Ok(trimmed.to_vec())
}

/// The file capabilities, which a program such as `ping` needs. Other attributes belong to the machine that built the files.
fn capabilities(path: &Path) -> Vec<(String, Vec<u8>)> {
    const NAME: &str = "security.capability";
    let mut value = [0; 64];
    match rustix::fs::lgetxattr(path, NAME, &mut value) {
        Ok(length) => vec![(NAME.to_owned(), value[..length].to_vec())],
        Err(_) => Vec::new(),
    }
}

#[cfg(test)]
mod tests {
    use std::io::Read;
    use std::os::unix::fs::{PermissionsExt, symlink};

    use super::*;

    /// Path, link, mode, time and content of each entry.
    fn entries(bytes: &[u8]) -> Vec<(String, String, u32, u64, String)> {
        let mut archive = ::tar::Archive::new(bytes);
        let entries = archive.entries().unwrap();
        entries
            .map(|entry| {
                let mut entry = entry.unwrap();
                let mut content = String::new();
                entry.read_to_string(&mut content).unwrap();
                let link = entry.link_name_bytes().unwrap_or_default();
                (
                    String::from_utf8_lossy(&entry.path_bytes()).into_owned(),
                    String::from_utf8_lossy(&link).into_owned(),
                    entry.header().mode().unwrap(),
                    entry.header().mtime().unwrap(),
                    content,
                )
            })
            .collect()
    }

    #[test]
    fn the_order_of_additions_does_not_matter_and_parents_come_first() {
        let file = |text: &str| Content::Bytes(text.as_bytes().to_vec());
        let mut one = Tree::new(5);
        one.file("usr/bin/b", 0o755, file("b")).unwrap();
        one.symlink("usr/bin/a", "b").unwrap();
        let mut two = Tree::new(5);
        two.symlink("usr/bin/a", "b").unwrap();
        two.file("usr/bin/b", 0o755, file("b")).unwrap();
        let bytes = one.write(Vec::new(), Naming::Plain).unwrap();
        assert_eq!(bytes, two.write(Vec::new(), Naming::Plain).unwrap());
        let paths: Vec<String> = entries(&bytes).into_iter().map(|entry| entry.0).collect();
        assert_eq!(paths, ["usr/", "usr/bin/", "usr/bin/a", "usr/bin/b"]);
        let bytes = one.write(Vec::new(), Naming::DotSlash).unwrap();
        let paths: Vec<String> = entries(&bytes).into_iter().map(|entry| entry.0).collect();
        assert_eq!(
            paths,
            ["./", "./usr/", "./usr/bin/", "./usr/bin/a", "./usr/bin/b"]
        );
    }

    #[test]
    fn a_directory_keeps_modes_and_links_and_its_times_are_clamped() {
        let source = tempfile::tempdir().unwrap();
        let at = |name: &str| source.path().join(name);
        fs::create_dir(at("d")).unwrap();
        fs::write(at("d/file"), "text").unwrap();
        fs::set_permissions(at("d/file"), fs::Permissions::from_mode(0o4711)).unwrap();
        fs::hard_link(at("d/file"), at("d/zlink")).unwrap();
        symlink("nowhere", at("broken")).unwrap();
        fs::write(at("unwanted"), "").unwrap();
        let mut tree = Tree::new(1000);
        tree.add_directory(source.path(), &|path| path != Path::new("unwanted"))
            .unwrap();
        let found = entries(&tree.write(Vec::new(), Naming::Plain).unwrap());
        let short: Vec<(&str, &str, u32, &str)> = found
            .iter()
            .map(|(path, link, mode, _, content)| {
                (path.as_str(), link.as_str(), *mode, content.as_str())
            })
            .collect();
        assert_eq!(short[0].1, "nowhere");
        assert_eq!(short[2], ("d/file", "", 0o4711, "text"));
        assert_eq!((short[3].0, short[3].1), ("d/zlink", "d/file"));
        assert_eq!(short.len(), 4);
        assert!(found.iter().all(|entry| entry.3 == 1000));
    }

    #[test]
    fn paths_outside_the_archive_are_refused() {
        let mut tree = Tree::new(0);
        for path in ["", "/", "/etc", "a/../b", "./a", "a//b", "a\0b"] {
            assert!(tree.directory(path, 0o755).is_err(), "{path:?}");
        }
        tree.file("a", 0o644, Content::Bytes(Vec::new())).unwrap();
        assert!(tree.directory("a", 0o755).is_err());
        assert!(tree.directory("a/b", 0o755).is_err());
    }
}

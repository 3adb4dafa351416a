//! Turns a client's path into a relative path without `..` components. Pure: `directory_tree` decides whether the path
//! exists, and how symbolic links on it resolve.

use std::ffi::{OsStr, OsString};
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::path::{Component, Path, PathBuf};

/// Why a path is not below the base directory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum PathError {
    #[error("the path leaves the base directory")]
    Escapes,
    #[error("the path contains a NUL byte")]
    Nul,
    #[error("the path is too long")]
    TooLong,
}

/// The kernel's limit on a path.
const LONGEST: usize = 4096;

/// A path below the base directory, normalised: no root, no `.`, no `..`. The base directory itself is empty.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BelowBase(PathBuf);

impl BelowBase {
    /// Parses a path as a client sent it. Leading slashes are removed, as published runtimes do; an absolute path that
    /// starts with the base directory names the file there.
    pub fn parse(base: &Path, sent: &[u8]) -> Result<Self, PathError> {
        if sent.contains(&0) {
            return Err(PathError::Nul);
        }
        if sent.len() > LONGEST {
            return Err(PathError::TooLong);
        }
        let sent = Path::new(OsStr::from_bytes(sent));
        let relative = sent.strip_prefix(base).unwrap_or(sent);
        let mut normal: Vec<&OsStr> = Vec::new();
        for component in relative.components() {
            match component {
                Component::Prefix(_) | Component::RootDir | Component::CurDir => {}
                Component::ParentDir => {
                    normal.pop().ok_or(PathError::Escapes)?;
                }
                Component::Normal(name) => normal.push(name),
            }
        }
        Ok(Self(normal.into_iter().collect()))
    }

    /// Parses the rest of a URL path: `%2F` is a slash of the file's path, not of the URL.
    pub fn parse_encoded(base: &Path, encoded: &str) -> Result<Self, PathError> {
        let decoded: Vec<u8> = percent_encoding::percent_decode_str(encoded).collect();
        Self::parse(base, &decoded)
    }

    /// The path for the kernel: `.` means the base directory itself.
    pub fn as_path(&self) -> &Path {
        if self.is_base() {
            Path::new(".")
        } else {
            &self.0
        }
    }

    pub fn is_base(&self) -> bool {
        self.0.as_os_str().is_empty()
    }

    /// The parent directory of this path and the name in it; `None` for the base directory.
    pub fn parent_and_name(&self) -> Option<(BelowBase, OsString)> {
        let name = self.0.file_name()?.to_owned();
        Some((BelowBase(self.0.parent()?.to_owned()), name))
    }

    /// Every directory from just below the base down to this path, inclusive.
    pub fn prefixes(&self) -> impl Iterator<Item = BelowBase> + '_ {
        let components: Vec<_> = self.0.components().collect();
        (1..=components.len()).map(move |length| BelowBase(components[..length].iter().collect()))
    }

    pub fn join(&self, name: &OsStr) -> BelowBase {
        BelowBase(self.0.join(name))
    }
}

/// The decoded text of a URL path segment, for echoing it to the client.
pub fn decode_lossy(encoded: &str) -> String {
    let bytes: Vec<u8> = percent_encoding::percent_decode_str(encoded).collect();
    OsString::from_vec(bytes).to_string_lossy().into_owned()
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn below(sent: &str) -> Result<String, PathError> {
        BelowBase::parse_encoded(Path::new("/app"), sent)
            .map(|path| path.0.to_string_lossy().into_owned())
    }

    #[test]
    fn paths_stay_below_the_base() {
        let table: &[(&str, Result<&str, PathError>)] = &[
            ("", Ok("")),
            (".", Ok("")),
            ("%2F", Ok("")),
            ("a.txt", Ok("a.txt")),
            ("a%2Fb%2Fc.txt", Ok("a/b/c.txt")),
            ("a/b", Ok("a/b")),
            ("a%2F.%2F%2Fb", Ok("a/b")),
            ("a%2F..%2Fb", Ok("b")),
            ("%2Fapp%2Fx", Ok("x")),
            ("%2Fapp", Ok("")),
            ("%2Fapplication%2Fx", Ok("application/x")),
            ("%2Fetc%2Fpasswd", Ok("etc/passwd")),
            ("..", Err(PathError::Escapes)),
            ("%2e%2e%2fetc", Err(PathError::Escapes)),
            ("a%2F..%2F..%2Fetc%2Fpasswd", Err(PathError::Escapes)),
            ("%2Fapp%2F..%2Fetc", Err(PathError::Escapes)),
            ("a%00b", Err(PathError::Nul)),
        ];
        for (sent, expected) in table {
            assert_eq!(below(sent), expected.map(str::to_owned), "{sent}");
        }
        assert_eq!(below(&"a".repeat(5000)), Err(PathError::TooLong));
    }

    #[test]
    fn prefixes_end_with_the_path() {
        let path = BelowBase::parse(Path::new("/app"), b"a/b/c").unwrap();
        let prefixes: Vec<_> = path
            .prefixes()
            .map(|prefix| prefix.as_path().to_owned())
            .collect();
        assert_eq!(
            prefixes,
            [Path::new("a"), Path::new("a/b"), Path::new("a/b/c")]
        );
    }

    proptest! {
        #[test]
        fn no_bytes_produce_a_parent_component(sent in proptest::collection::vec(any::<u8>(), 0..200)) {
            if let Ok(path) = BelowBase::parse(Path::new("/app"), &sent) {
                prop_assert!(path.0.components().all(|component| matches!(component, Component::Normal(_))));
                prop_assert!(path.0.is_relative());
            }
        }

        #[test]
        fn dotted_paths_stay_below(parts in proptest::collection::vec("(\\.|\\.\\.|a|b|/)", 0..20)) {
            if let Ok(path) = BelowBase::parse(Path::new("/app"), parts.join("/").as_bytes()) {
                prop_assert!(path.0.components().all(|component| matches!(component, Component::Normal(_))));
            }
        }
    }
}

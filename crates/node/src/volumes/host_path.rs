//! hostPath volumes, where they are allowed: checks `hostPath.type` before a container starts.

use std::fs;
use std::io;
use std::os::unix::fs::{FileTypeExt, PermissionsExt};
use std::path::Path;

use k8s_openapi::api::core::v1::HostPathVolumeSource;

#[derive(Debug, thiserror::Error)]
pub enum HostPathError {
    #[error("hostPath type check failed: {path} is not {wanted}")]
    Other { path: String, wanted: &'static str },
    #[error("hostPath type {0:?} is not known")]
    Type(String),
    #[error("hostPath {path:?} must be absolute and without \"..\"")]
    Path { path: String },
    #[error("hostPath {path}")]
    Io {
        path: String,
        #[source]
        source: io::Error,
    },
}

/// Creates the file or directory if the type says so, and refuses a path of another type.
pub fn check(source: &HostPathVolumeSource) -> Result<(), HostPathError> {
    let path = Path::new(&source.path);
    let shown = || source.path.clone();
    let climbs = path
        .components()
        .any(|part| part == std::path::Component::ParentDir);
    if !path.is_absolute() || climbs {
        return Err(HostPathError::Path { path: shown() });
    }
    let failed = |source| HostPathError::Io {
        path: shown(),
        source,
    };
    let wanted = source.type_.as_deref().unwrap_or_default();
    match wanted {
        "DirectoryOrCreate" if !path.exists() => {
            fs::create_dir_all(path).map_err(failed)?;
            set_mode(path, 0o755).map_err(failed)?;
        }
        "FileOrCreate" if !path.exists() => {
            fs::File::create_new(path).map_err(failed)?;
            set_mode(path, 0o644).map_err(failed)?;
        }
        _ => {}
    }
    let found = fs::metadata(path).map(|found| found.file_type());
    let is = |right: fn(fs::FileType) -> bool, wanted: &'static str| match &found {
        Ok(found) if right(*found) => Ok(()),
        _ => Err(HostPathError::Other {
            path: shown(),
            wanted,
        }),
    };
    match wanted {
        "" => Ok(()),
        "Directory" | "DirectoryOrCreate" => is(|kind| kind.is_dir(), "a directory"),
        "File" | "FileOrCreate" => is(|kind| kind.is_file(), "a file"),
        "Socket" => is(|kind| kind.is_socket(), "a socket file"),
        "CharDevice" => is(|kind| kind.is_char_device(), "a character device"),
        "BlockDevice" => is(|kind| kind.is_block_device(), "a block device"),
        other => Err(HostPathError::Type(other.to_owned())),
    }
}

fn set_mode(path: &Path, mode: u32) -> io::Result<()> {
    fs::set_permissions(path, fs::Permissions::from_mode(mode))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_type_is_what_it_says_or_refused() {
        let directory = tempfile::tempdir().unwrap();
        let at = |name: &str| directory.path().join(name).display().to_string();
        fs::create_dir(at("directory")).unwrap();
        fs::write(at("file"), "kept").unwrap();
        let _socket = std::os::unix::net::UnixListener::bind(at("socket")).unwrap();
        let cases = [
            (at("nothing"), "", Ok(())),
            (at("directory"), "Directory", Ok(())),
            (at("file"), "File", Ok(())),
            (at("socket"), "Socket", Ok(())),
            ("/dev/null".to_owned(), "CharDevice", Ok(())),
            (at("made/below"), "DirectoryOrCreate", Ok(())),
            (at("made/file"), "FileOrCreate", Ok(())),
            (at("file"), "FileOrCreate", Ok(())),
            (at("nothing"), "Directory", Err("is not a directory")),
            (at("file"), "Directory", Err("is not a directory")),
            (at("file"), "DirectoryOrCreate", Err("is not a directory")),
            (at("directory"), "File", Err("is not a file")),
            (at("directory"), "FileOrCreate", Err("is not a file")),
            (at("file"), "Socket", Err("is not a socket file")),
            (at("file"), "CharDevice", Err("is not a character device")),
            (
                "/dev/null".to_owned(),
                "BlockDevice",
                Err("is not a block device"),
            ),
            (at("no/parent"), "FileOrCreate", Err("no/parent")),
            (at("file"), "Folder", Err("\"Folder\" is not known")),
            (at("../file"), "", Err("without \"..\"")),
            ("file".to_owned(), "", Err("must be absolute")),
        ];
        for (path, type_, expected) in cases {
            let source = HostPathVolumeSource {
                path: path.clone(),
                type_: Some(type_.to_owned()),
            };
            match (check(&source), expected) {
                (Ok(()), Ok(())) => {}
                (Err(error), Err(text)) => {
                    assert!(error.to_string().contains(text), "{path} {type_}: {error}");
                }
                (found, expected) => panic!("{path} {type_}: {found:?}, not {expected:?}"),
            }
        }
        assert_eq!(fs::read(at("file")).unwrap(), b"kept");
        let mode = |name: &str| fs::metadata(at(name)).unwrap().permissions().mode() & 0o7777;
        assert_eq!((mode("made/below"), mode("made/file")), (0o755, 0o644));
    }
}

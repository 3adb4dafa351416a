//! The programs that are embedded in the node's binary, compressed, and their extraction.

use std::fs;
use std::io;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

use flate2::read::GzDecoder;

const SHIM: &[u8] = include_bytes!(env!("SHIM_BINARY"));
const SANDBOXD: &[u8] = include_bytes!(env!("SANDBOXD_BINARY"));

/// The unpacked programs.
#[derive(Debug, Clone)]
pub struct Programs {
    pub shim: PathBuf,
    pub sandboxd: PathBuf,
}

/// Writes the programs to `directory`. Each name contains a checksum, so that a running container keeps the file that it was started
/// with.
pub fn unpack(directory: &Path) -> io::Result<Programs> {
    fs::create_dir_all(directory)?;
    Ok(Programs {
        shim: write(directory, "shim", SHIM)?,
        sandboxd: write(directory, "sandboxd", SANDBOXD)?,
    })
}

fn write(directory: &Path, name: &str, packed: &[u8]) -> io::Result<PathBuf> {
    let path = directory.join(format!("{name}-{}", checksum(packed)));
    // The file was renamed to this name only when it was complete.
    if path.exists() {
        return Ok(path);
    }
    let temporary = directory.join(format!(".{name}.{}", std::process::id()));
    let mut file = fs::File::create(&temporary)?;
    io::copy(&mut GzDecoder::new(packed), &mut file)?;
    file.set_permissions(fs::Permissions::from_mode(0o755))?;
    file.sync_all()?;
    // A file that is open for writing cannot be executed (ETXTBSY).
    drop(file);
    fs::rename(&temporary, &path)?;
    Ok(path)
}

/// The checksum and the length from the trailer of the compressed data: a program that is already extracted need not be decompressed
/// to compare it.
fn checksum(packed: &[u8]) -> String {
    let trailer = packed.last_chunk().copied().unwrap_or_default();
    format!("{:016x}", u64::from_be_bytes(trailer))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn programs_are_unpacked_once_and_can_be_executed() {
        let directory = tempfile::tempdir().unwrap();
        let programs = unpack(directory.path()).unwrap();
        assert_ne!(programs.shim, programs.sandboxd);
        for program in [&programs.shim, &programs.sandboxd] {
            let content = fs::read(program).unwrap();
            assert!(content.starts_with(b"\x7fELF"));
            let mode = fs::metadata(program).unwrap().permissions().mode();
            assert_eq!(mode & 0o777, 0o755);
        }
        let before = fs::metadata(&programs.shim).unwrap().modified().unwrap();
        let again = unpack(directory.path()).unwrap();
        assert_eq!(again.shim, programs.shim);
        let after = fs::metadata(&again.shim).unwrap().modified().unwrap();
        assert_eq!(before, after);
    }
}

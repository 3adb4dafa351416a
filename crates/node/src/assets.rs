//! The programs the node carries inside itself, and where it puts them.

use std::fs;
use std::io;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

use crate::names::short_hash;

const SHIM: &[u8] = include_bytes!(env!("SHIM_BINARY"));
const SANDBOXD: &[u8] = include_bytes!(env!("SANDBOXD_BINARY"));

/// The unpacked programs.
#[derive(Debug, Clone)]
pub struct Programs {
    pub shim: PathBuf,
    pub sandboxd: PathBuf,
}

/// Writes the programs under `directory`, each under a name that holds its hash: a running container keeps the file it
/// was started with.
pub fn unpack(directory: &Path) -> io::Result<Programs> {
    fs::create_dir_all(directory)?;
    Ok(Programs {
        shim: write(directory, "shim", SHIM)?,
        sandboxd: write(directory, "sandboxd", SANDBOXD)?,
    })
}

fn write(directory: &Path, name: &str, content: &[u8]) -> io::Result<PathBuf> {
    let path = directory.join(format!("{name}-{}", short_hash(content, 8)));
    if fs::metadata(&path).is_ok_and(|found| found.len() == content.len() as u64) {
        return Ok(path);
    }
    let temporary = directory.join(format!(".{name}.{}", std::process::id()));
    fs::write(&temporary, content)?;
    fs::set_permissions(&temporary, fs::Permissions::from_mode(0o755))?;
    fs::File::open(&temporary)?.sync_all()?;
    fs::rename(&temporary, &path)?;
    Ok(path)
}

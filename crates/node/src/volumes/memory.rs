//! Volumes in memory: each is a tmpfs with a size limit.

use std::fs;
use std::io;
use std::path::Path;

use rustix::mount::MountFlags;

const PAGE: u64 = 4096;
const FLAGS: MountFlags = MountFlags::NOSUID.union(MountFlags::NODEV);

fn options(limit: Option<u64>) -> io::Result<std::ffi::CString> {
    let text = limit.map_or_else(
        || "mode=0755".to_owned(),
        |bytes| format!("mode=0755,size={}", bytes.max(PAGE)),
    );
    std::ffi::CString::new(text).map_err(io::Error::from)
}

/// Mounts a tmpfs, unless it is mounted already. Without a limit, the kernel's default applies: half of the memory.
pub fn mount(path: &Path, limit: Option<u64>) -> io::Result<()> {
    if crate::runtime::slots::is_memory(path) {
        return Ok(());
    }
    fs::create_dir_all(path)?;
    let options = options(limit)?;
    rustix::mount::mount("tmpfs", path, "tmpfs", FLAGS, options.as_c_str())?;
    Ok(())
}

/// Raises the size limit of a tmpfs to at least this.
pub fn grow(path: &Path, bytes: u64) -> io::Result<()> {
    let held = rustix::fs::statvfs(path)?;
    if held.f_blocks * held.f_frsize >= bytes {
        return Ok(());
    }
    let options = options(Some(bytes))?;
    Ok(rustix::mount::mount_remount(
        path,
        FLAGS,
        options.as_c_str(),
    )?)
}

//! The built-in image `host`: this machine's `/usr`, read-only, on a skeleton of directories and a minimal `/etc`.
//!
//! It contains nothing of the machine's home directories, `/var` or `/run`, and of the configuration only name lookup and
//! certificates. A container writes to its own layer.

use std::fmt::Write;
use std::fs;
use std::io;
use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::{Path, PathBuf};

use shim_protocol::Mount;

use super::native::view;
use pod_network::names::short_hash;

/// The path of sandboxd in the container.
pub const SANDBOXD_PATH: &str = "/opt/agent-sandbox/bin/sandboxd";

const DIRECTORIES: [(&str, u32); 22] = [
    ("usr", 0o755),
    ("proc", 0o555),
    ("sys", 0o555),
    ("dev", 0o755),
    ("tmp", 0o1777),
    ("run", 0o755),
    ("root", 0o700),
    ("home", 0o755),
    ("app", 0o777),
    ("opt", 0o755),
    ("srv", 0o755),
    ("mnt", 0o755),
    ("media", 0o755),
    ("var", 0o755),
    ("var/tmp", 0o1777),
    ("var/log", 0o755),
    ("var/lib", 0o755),
    ("var/cache", 0o755),
    ("etc", 0o755),
    ("etc/pam.d", 0o755),
    ("etc/ssl", 0o755),
    ("etc/ssl/certs", 0o755),
];

/// Directories that are symlinks into `/usr` on most machines. Where they are directories, they are mounted.
const USR_LINKS: [&str; 6] = ["bin", "sbin", "lib", "lib32", "lib64", "libx32"];

const WRITTEN: [(&str, &str); 6] = [
    (
        "etc/passwd",
        "root:x:0:0:root:/root:/bin/bash\nnobody:x:65534:65534:nobody:/nonexistent:/usr/sbin/nologin\nsandbox:x:1000:1000:sandbox:/app:/bin/bash\n",
    ),
    (
        "etc/group",
        "root:x:0:\ntty:x:5:\nsandbox:x:1000:\nnogroup:x:65534:\n",
    ),
    (
        "etc/nsswitch.conf",
        "passwd: files\ngroup: files\nhosts: files dns\nservices: files\nprotocols: files\n",
    ),
    // For `su` and similar programs: root may switch to any user, and no user has a password.
    (
        "etc/pam.d/other",
        "auth sufficient pam_rootok.so\nauth required pam_deny.so\naccount required pam_permit.so\n\
         password required pam_deny.so\nsession required pam_permit.so\n",
    ),
    ("etc/shells", "/bin/sh\n/bin/bash\n"),
    ("etc/profile", "export PS1='\\u@\\h:\\w\\$ '\n"),
];

/// Files of the machine that programs need to run, to resolve names and to verify certificates.
const COPIED: [&str; 12] = [
    "etc/ld.so.cache",
    "etc/ld.so.conf",
    "etc/services",
    "etc/protocols",
    "etc/mime.types",
    "etc/host.conf",
    "etc/gai.conf",
    "etc/ssl/openssl.cnf",
    "etc/ssl/cert.pem",
    "etc/ssl/certs/ca-certificates.crt",
    "etc/pki/tls/certs/ca-bundle.crt",
    "etc/debian_version",
];

/// Directories of symlinks into `/usr` through which commands are found.
const COPIED_DIRECTORIES: [&str; 2] = ["etc/alternatives", "etc/ld.so.conf.d"];

/// The image, ready to be the lowest layer of a container.
#[derive(Debug, Clone)]
pub struct HostImage {
    pub layer: PathBuf,
    pub mounts: Vec<Mount>,
    pub environment: Vec<(String, String)>,
    pub working_directory: String,
    /// A hash of the image's content.
    pub id: String,
}

/// Creates the image's skeleton below `images`. Running containers use the directory, so a changed skeleton gets a new one.
pub fn prepare(images: &Path, sandboxd: &Path) -> io::Result<HostImage> {
    let building = images.join(".host");
    if building.exists() {
        fs::remove_dir_all(&building)?;
    }
    fs::create_dir_all(&building)?;
    let mut description = build(&building)?;
    description.push_str(env!("CARGO_PKG_VERSION"));
    let id = short_hash(description, 16);
    let layer = images.join(format!("host-{id}"));
    if layer.exists() {
        fs::remove_dir_all(&building)?;
    } else {
        fs::rename(&building, &layer)?;
    }
    Ok(HostImage {
        layer,
        mounts: mounts(sandboxd),
        environment: vec![
            ("PATH".to_owned(), "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin:/opt/agent-sandbox/bin".to_owned()),
            ("HOME".to_owned(), "/root".to_owned()),
            ("SANDBOX_BASE_DIR".to_owned(), "/app".to_owned()),
        ],
        working_directory: "/app".to_owned(),
        id,
    })
}

/// Fills `root`. Returns a text that lists its content, for the hash.
fn build(root: &Path) -> io::Result<String> {
    let mut description = String::new();
    for (name, mode) in DIRECTORIES {
        fs::create_dir_all(root.join(name))?;
        fs::set_permissions(root.join(name), fs::Permissions::from_mode(mode))?;
    }
    for name in USR_LINKS {
        let host = Path::new("/").join(name);
        match fs::read_link(&host) {
            Ok(target) => {
                symlink(&target, root.join(name))?;
                let _ = writeln!(description, "{name} -> {}", target.display());
            }
            Err(_) if host.is_dir() => fs::create_dir(root.join(name))?,
            Err(_) => {}
        }
    }
    for (name, content) in WRITTEN {
        fs::write(root.join(name), content)?;
        description.push_str(content);
    }
    for name in COPIED {
        description.push_str(&copy(root, Path::new(name))?);
    }
    for directory in COPIED_DIRECTORIES {
        let host = Path::new("/").join(directory);
        let Ok(entries) = fs::read_dir(&host) else {
            continue;
        };
        fs::create_dir_all(root.join(directory))?;
        let mut names: Vec<_> = entries.flatten().map(|entry| entry.file_name()).collect();
        names.sort();
        for name in names {
            description.push_str(&copy(root, &Path::new(directory).join(name))?);
        }
    }
    symlink("../usr/lib/os-release", root.join("etc/os-release"))?;
    symlink("/proc/self/mounts", root.join("etc/mtab"))?;
    if let Ok(zone) = fs::read_link("/etc/localtime")
        && zone.starts_with("/usr")
    {
        symlink(zone, root.join("etc/localtime"))?;
    }
    Ok(description)
}

/// Copies one file or symlink of the machine, if it exists. Only world-readable files are copied, because every user in the
/// container can read the copy.
fn copy(root: &Path, name: &Path) -> io::Result<String> {
    let (host, target) = (Path::new("/").join(name), root.join(name));
    let Ok(metadata) = fs::symlink_metadata(&host) else {
        return Ok(String::new());
    };
    if let Some(parent) = target.parent() {
        fs::create_dir_all(parent)?;
    }
    if metadata.is_symlink() && name.starts_with("etc/alternatives") {
        let to = fs::read_link(&host)?;
        symlink(&to, &target)?;
        return Ok(format!("{} -> {}\n", name.display(), to.display()));
    }
    let Ok(metadata) = fs::metadata(&host) else {
        return Ok(String::new());
    };
    if !metadata.is_file() || metadata.permissions().mode() & 0o004 == 0 {
        return Ok(String::new());
    }
    let content = fs::read(&host)?;
    fs::write(&target, &content)?;
    Ok(format!("{} {}\n", name.display(), short_hash(&content, 16)))
}

/// The mounts of the machine's programs, through inodes that only the container has. On the machine's inodes a container could watch
/// which programs others run (`inotify`), and hold locks that the machine's package manager waits for (`flock`).
fn mounts(sandboxd: &Path) -> Vec<Mount> {
    let shown = |name: &&str| {
        let host = Path::new("/").join(name);
        !host.is_symlink() && host.is_dir()
    };
    let mut roots = vec![PathBuf::from("/usr")];
    roots.extend(
        USR_LINKS
            .iter()
            .filter(|name| shown(name))
            .map(|name| Path::new("/").join(name)),
    );
    let mounted = fs::read_to_string("/proc/self/mountinfo").unwrap_or_default();
    let below = mount_points_below(&roots, &mounted);
    let views = roots.iter().chain(&below).map(|path| view(path, path));
    views
        .chain([view(sandboxd, Path::new(SANDBOXD_PATH))])
        .collect()
}

/// The mount points below one of `roots`, outermost first: a view does not include submounts.
fn mount_points_below(roots: &[PathBuf], mounted: &str) -> Vec<PathBuf> {
    let mut points: Vec<PathBuf> = mounted
        .lines()
        .filter_map(|line| line.split(' ').nth(4))
        .map(|point| PathBuf::from(unescaped(point)))
        .filter(|point| {
            roots
                .iter()
                .any(|root| point != root && point.starts_with(root))
        })
        .collect();
    points.sort();
    points.dedup();
    points
}

/// Unescapes a path of `mountinfo`, in which spaces and backslashes are octal numbers.
fn unescaped(path: &str) -> String {
    [
        ("\\040", " "),
        ("\\011", "\t"),
        ("\\012", "\n"),
        ("\\134", "\\"),
    ]
    .into_iter()
    .fold(path.to_owned(), |path, (number, character)| {
        path.replace(number, character)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn submounts_of_the_programs_are_included() {
        let mounted = "\
22 1 254:0 / / rw - ext4 /dev/vda rw
30 22 254:1 / /usr rw - ext4 /dev/vdb rw
31 30 254:2 / /usr/local/a\\040b rw - ext4 /dev/vdc rw
32 30 254:3 / /usr/local rw - ext4 /dev/vdd rw
33 22 254:4 / /usrlocal rw - ext4 /dev/vde rw
34 22 254:4 / /home rw - ext4 /dev/vde rw
";
        let found = mount_points_below(&["/usr".into()], mounted);
        assert_eq!(found, ["/usr/local", "/usr/local/a b"].map(PathBuf::from));
    }
}

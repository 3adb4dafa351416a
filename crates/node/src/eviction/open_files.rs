//! Deleted files that a pod's processes hold open or mapped: they use disk space but appear in no directory.
//!
//! They are found in `/proc`, through the processes of the pod's cgroups. Files in memory (`memfd`, tmpfs, `/dev/shm`) count against
//! the memory limit and are ignored here: a file counts if it is on the file system of the pods' directories, or on an overlay, whose
//! upper layer is there. An open file of the image that was deleted counts as well, because the overlay does not distinguish it from a
//! file that the container wrote.
//!
//! One way to hold a file is not seen: a descriptor that is sent through a Unix socket, closed by the sender, and never received.

use std::collections::HashSet;
use std::fs;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use k8s_openapi::api::core::v1::Pod;
use rustix::process::Pid;

use super::decision::PodUsage;
use crate::runtime::ContainerProcesses;
use crate::runtime::slots::is_on;
use directory_tree::Usage;

/// The limit of descriptors per check: more than any legitimate pod opens, and few enough for a fraction of a second.
const MOST_FILES: usize = 1 << 18;

/// How often the processes are listed again, to find those that appeared meanwhile: a process that forks quickly passes its files
/// on to new processes.
const ROUNDS: usize = 4;

const OVERLAY: i64 = 0x794c_7630;
const BLOCK: u64 = 512;

/// The location of a deleted file.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
enum Place {
    Container(String),
    Volume(String),
    Claim(String),
}

/// Adds the deleted, open files of a pod to its usage. `processes` returns the current processes.
pub fn include(
    usage: &mut PodUsage,
    pod: &Pod,
    pods_directory: &Path,
    processes: impl Fn() -> Vec<ContainerProcesses>,
) {
    let Ok(disk) = fs::metadata(pods_directory) else {
        return;
    };
    let mut search = Search {
        disk: disk.dev(),
        looked_at: HashSet::new(),
        counted: HashSet::new(),
        files: 0,
    };
    for _ in 0..ROUNDS {
        let mut is_new = false;
        for of_container in processes() {
            for pid in of_container.processes {
                if !search.looked_at.insert(pid) {
                    continue;
                }
                is_new = true;
                for (path, held) in search.held_by(pid) {
                    let place = place(pod, &of_container.container, &path);
                    usage_at(usage, place).include(held);
                }
            }
        }
        if !is_new {
            break;
        }
    }
    if search.files > MOST_FILES {
        let too_many = Usage {
            unfathomable: true,
            ..Usage::default()
        };
        for held in usage.containers.values_mut() {
            held.include(too_many);
        }
    }
}

fn usage_at(usage: &mut PodUsage, place: Place) -> &mut Usage {
    match place {
        Place::Container(name) => usage.containers.entry(name).or_default(),
        Place::Volume(name) => usage.volumes.entry(name).or_default(),
        Place::Claim(name) => usage.claims.entry(name).or_default(),
    }
}

/// The location of a file by its last path in a container.
fn place(pod: &Pod, container: &str, path: &Path) -> Place {
    let own = || Place::Container(container.to_owned());
    let Some(spec) = &pod.spec else {
        return own();
    };
    let mut containers = spec
        .init_containers
        .iter()
        .flatten()
        .chain(&spec.containers)
        .filter(|known| known.name == container);
    let mounts = containers
        .next()
        .and_then(|known| known.volume_mounts.as_ref());
    let mount = mounts
        .into_iter()
        .flatten()
        .filter(|mount| path.starts_with(&mount.mount_path))
        .max_by_key(|mount| Path::new(&mount.mount_path).components().count());
    let volume = mount.and_then(|mount| {
        let mut volumes = spec.volumes.iter().flatten();
        volumes.find(|volume| volume.name == mount.name)
    });
    match volume {
        Some(volume) if volume.empty_dir.is_some() => Place::Volume(volume.name.clone()),
        Some(volume) => match &volume.persistent_volume_claim {
            Some(claim) => Place::Claim(claim.claim_name.clone()),
            None => own(),
        },
        None => own(),
    }
}

struct Search {
    /// The device of the pods' directories.
    disk: u64,
    looked_at: HashSet<Pid>,
    /// The counted files by device and inode: several processes may hold one.
    counted: HashSet<(u64, u64)>,
    files: usize,
}

impl Search {
    /// The deleted files of one process, and their last paths.
    fn held_by(&mut self, pid: Pid) -> Vec<(PathBuf, Usage)> {
        let process = PathBuf::from(format!("/proc/{}", pid.as_raw_nonzero()));
        let mut held = Vec::new();
        let open = fs::read_dir(process.join("fd")).into_iter().flatten();
        for descriptor in open.flatten() {
            self.files += 1;
            if self.files > MOST_FILES {
                return held;
            }
            held.extend(self.nameless(&descriptor.path()));
        }
        let maps = fs::read(process.join("maps")).unwrap_or_default();
        for range in removed_mappings(&maps) {
            held.extend(self.nameless(&process.join("map_files").join(range)));
        }
        held
    }

    /// The target of a link in `/proc`, if it is a deleted file on disk that was not counted yet.
    fn nameless(&mut self, link: &Path) -> Option<(PathBuf, Usage)> {
        let file = fs::metadata(link).ok()?;
        if !file.is_file() || file.nlink() > 0 {
            return None;
        }
        if file.dev() != self.disk && !is_on(OVERLAY, link) {
            return None;
        }
        if !self.counted.insert((file.dev(), file.ino())) {
            return None;
        }
        let held = Usage {
            bytes: file.blocks().saturating_mul(BLOCK),
            inodes: 1,
            unfathomable: false,
        };
        Some((fs::read_link(link).unwrap_or_default(), held))
    }
}

/// The mappings of deleted files, by their names in `map_files`, from a process's `maps`.
fn removed_mappings(maps: &[u8]) -> impl Iterator<Item = &std::ffi::OsStr> {
    maps.split(|byte| *byte == b'\n')
        .filter(|line| line.ends_with(b" (deleted)"))
        .filter_map(|line| line.split(|byte| *byte == b' ').next())
        .map(std::ffi::OsStr::from_bytes)
}

#[cfg(test)]
mod tests {
    use std::io::Write;

    use serde_json::json;

    use super::*;

    #[test]
    fn a_removed_file_counts_where_it_was() {
        let spec = json!({
            "containers": [{"name": "c", "volumeMounts": [
                {"name": "empty", "mountPath": "/data"},
                {"name": "claim", "mountPath": "/data/kept"},
                {"name": "config", "mountPath": "/etc/config"},
            ]}],
            "volumes": [
                {"name": "empty", "emptyDir": {}},
                {"name": "claim", "persistentVolumeClaim": {"claimName": "files"}},
                {"name": "config", "configMap": {"name": "m"}},
            ],
        });
        let pod: Pod = serde_json::from_value(json!({"spec": spec})).unwrap();
        let container = |name: &str| Place::Container(name.to_owned());
        for (of, path, expected) in [
            ("c", "/tmp/x (deleted)", container("c")),
            ("c", "/data/x (deleted)", Place::Volume("empty".to_owned())),
            ("c", "/database (deleted)", container("c")),
            (
                "c",
                "/data/kept/x (deleted)",
                Place::Claim("files".to_owned()),
            ),
            ("c", "/etc/config/x (deleted)", container("c")),
            ("c", "", container("c")),
            ("debug", "/data/x (deleted)", container("debug")),
        ] {
            assert_eq!(place(&pod, of, Path::new(path)), expected, "{of} {path}");
        }
    }

    #[test]
    fn mappings_of_removed_files_are_found_among_others() {
        let maps = b"7f00-7f01 r--p 00000000 fe:00 12 /usr/lib/a b\n\
7f02-7f03 rw-s 00000000 fe:00 13 /tmp/with space (deleted)\n\
7f04-7f05 rw-p 00000000 00:00 0 [heap]\n";
        assert_eq!(removed_mappings(maps).collect::<Vec<_>>(), ["7f02-7f03"]);
    }

    #[test]
    fn a_removed_file_is_counted_once_and_a_named_one_not_at_all() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("removed");
        let mut removed = fs::File::create(&path).unwrap();
        removed.write_all(&vec![1; 1 << 20]).unwrap();
        let _again = fs::File::open(&path).unwrap();
        fs::remove_file(&path).unwrap();
        let mut named = fs::File::create(directory.path().join("named")).unwrap();
        named.write_all(&vec![1; 1 << 20]).unwrap();
        let own = || {
            vec![ContainerProcesses {
                container: "c".to_owned(),
                processes: vec![rustix::process::getpid()],
            }]
        };
        let pod: Pod = serde_json::from_value(json!({})).unwrap();
        let mut usage = PodUsage::default();
        include(&mut usage, &pod, directory.path(), own);
        // Other tests of this process may hold some, too, but none that large on this file system for long.
        let held = usage.containers["c"];
        assert!((1 << 20..2 << 20).contains(&held.bytes), "{held:?}");
    }
}

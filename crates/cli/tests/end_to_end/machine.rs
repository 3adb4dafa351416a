//! The processes, cgroups, mounts and network devices that one `up` holds, recognized by names that derive from its data directory.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use std::process::Command;

/// The namespaces of each slot: network, IPC, UTS, user.
const NAMESPACES_OF_A_PLACE: usize = 4;

/// The resources of one `up` that could be left behind.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Holdings {
    /// Processes in the cgroup of each pod, over all hierarchies.
    pub processes: BTreeMap<String, BTreeSet<u32>>,
    /// Pods that have cgroups, over all hierarchies.
    pub groups: BTreeSet<String>,
    /// Cgroups of slots without a pod.
    pub waiting: BTreeSet<String>,
    pub links: usize,
    pub namespaces: usize,
    /// Mounts below the data directory that are no namespaces.
    pub mounts: usize,
    pub tables: usize,
    /// Directories of pods in the data directory.
    pub directories: BTreeSet<String>,
}

impl Holdings {
    /// Slots that are prepared or in use.
    pub fn places(&self) -> usize {
        self.namespaces / NAMESPACES_OF_A_PLACE
    }
}

/// What the `up` holds whose cgroups have this tag and whose data directory is at `home`.
pub fn holdings(home: &Path, tag: &str) -> Holdings {
    let group = format!("agent-sandbox-{tag}");
    let mut held = Holdings {
        directories: names(&home.join("node/pods")),
        ..Holdings::default()
    };
    let owners = owners_of_places(&home.join("node/pods"));
    for hierarchy in hierarchies() {
        let root = hierarchy.join(&group);
        for group in directories(&root) {
            let Some(pod) = pod_of(&group, &owners) else {
                held.waiting.insert(group);
                continue;
            };
            held.processes
                .entry(pod.clone())
                .or_default()
                .extend(processes_below(&root.join(&group)));
            held.groups.insert(pod);
        }
    }
    let link = format!("as{}", &tag[..6]);
    let links = names(Path::new("/sys/class/net"));
    held.links = links.iter().filter(|name| name.starts_with(&link)).count();
    let mounts = std::fs::read_to_string("/proc/self/mounts").expect("mounts can be read");
    let below = format!(" {}/", home.display());
    let (namespaces, others): (Vec<&str>, Vec<&str>) = mounts
        .lines()
        .filter(|line| line.contains(&below))
        .partition(|line| line.starts_with("nsfs "));
    (held.namespaces, held.mounts) = (namespaces.len(), others.len());
    held.tables = tables().iter().filter(|table| table.contains(tag)).count();
    held
}

/// The tag in the names of all that belongs to the `up` at `home`.
pub fn tag_of(home: &Path) -> String {
    let node = home
        .join("node")
        .canonicalize()
        .expect("its node has a directory");
    let group = container_runtime::cgroup(&node);
    let tag = group.strip_prefix("agent-sandbox-");
    tag.expect("groups are named after the program").to_owned()
}

/// The slot of each pod, from the node's records.
fn owners_of_places(pods: &Path) -> BTreeMap<u64, String> {
    let known = names(pods).into_iter().filter_map(|pod| {
        let text = std::fs::read(pods.join(&pod).join("sandbox.json")).ok()?;
        let record: serde_json::Value = serde_json::from_slice(&text).ok()?;
        Some((record["slot"].as_u64()?, pod))
    });
    known.collect()
}

/// The pod of a cgroup, which is named after the pod or after its slot. `None` for a slot without a pod.
fn pod_of(group: &str, owners: &BTreeMap<u64, String>) -> Option<String> {
    match group.strip_prefix("slot-") {
        Some(place) => owners.get(&place.parse().ok()?).cloned(),
        None => Some(group.to_owned()),
    }
}

fn hierarchies() -> Vec<std::path::PathBuf> {
    let root = Path::new("/sys/fs/cgroup");
    let mut found: Vec<_> = directories(root)
        .iter()
        .map(|name| root.join(name))
        .collect();
    found.push(root.to_owned());
    found
}

fn processes_below(group: &Path) -> BTreeSet<u32> {
    let own = std::fs::read_to_string(group.join("cgroup.procs")).unwrap_or_default();
    let mut processes: BTreeSet<u32> = own.lines().filter_map(|line| line.parse().ok()).collect();
    for child in directories(group) {
        processes.extend(processes_below(&group.join(child)));
    }
    processes
}

/// One if the machine has `nft`, else none: the node then reports that rules are missing.
pub fn expected_tables() -> usize {
    usize::from(list_tables().is_some())
}

fn tables() -> Vec<String> {
    list_tables().unwrap_or_default()
}

fn list_tables() -> Option<Vec<String>> {
    let listed = Command::new("nft").args(["list", "tables"]).output().ok()?;
    let text = String::from_utf8(listed.stdout).expect("names of tables are text");
    Some(text.lines().map(str::to_owned).collect())
}

fn names(directory: &Path) -> BTreeSet<String> {
    let entries = std::fs::read_dir(directory).into_iter().flatten().flatten();
    entries
        .filter_map(|entry| entry.file_name().into_string().ok())
        .collect()
}

fn directories(directory: &Path) -> BTreeSet<String> {
    let mut found = names(directory);
    found.retain(|name| directory.join(name).is_dir());
    found
}

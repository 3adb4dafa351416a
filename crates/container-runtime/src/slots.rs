//! Slots: a numbered set of the namespaces, the address and the UID range of a pod.
//!
//! A few slots are kept ready, because creating one takes longer than starting a container in it. A launcher waits in each, in the
//! cgroup of the pod's first container. A slot is used by one pod and then torn down: the next pod with its number gets new
//! namespaces.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::fs;
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use rustix::mount::{MountFlags, MountPropagationFlags, UnmountFlags};
use saturating_time::SaturatingTime;
use shim_protocol::{NamespacePins, NamespacesAnswer, NamespacesRequest, Preparation, UidRange};
use tokio::sync::Notify;
use tokio::time::{Instant, timeout_at};
use tokio_util::sync::CancellationToken;

use super::RuntimeError;
use super::cgroups::{Cgroups, Limits};
use super::launcher::{Launcher, Starter};
use super::native::write_whole;
use crate::privileges::Privileges;
use pod_network::links::{Network, Wiring};
use pod_network::pod_cidr::PodNetwork;

/// UIDs and GIDs per pod: 16 bits, as container images expect.
const UIDS_PER_POD: u32 = 1 << 16;
/// Slots per node. The UIDs of all nodes ([`NODES_MAX`](pod_network::names::NODES_MAX)) stay below 2^31, because some programs
/// misread larger ones as negative.
const SLOTS_PER_NODE: u32 = 2048;
const FIRST_RANGE: u32 = 16;
const NAMESPACE_FILE_SYSTEM: i64 = 0x6e73_6673;
/// The `oom_score_adj` of containers: when the machine runs out of memory, they are killed before the node.
pub const OUT_OF_MEMORY_SCORE: i32 = 500;

/// The pause before ready slots are refilled: about as long as a container takes to start.
const REFILL_PAUSE: Duration = Duration::from_millis(40);

/// The file in a slot's directory that records the configuration of its link.
const WIRING: &str = "wiring.json";

/// The file in the directory of a slot that is ready for a pod. Its name changes with the way in which namespaces are created, so
/// that slots of an earlier version are not used.
const READY: &str = "ready-2";

/// The prefix of the cgroup of a slot, which stands beside those of pods.
const GROUP_PREFIX: &str = "slot-";
/// The cgroup below it in which a launcher waits.
pub const WAITING_GROUP: &str = "first";

/// The cgroup that a pod's first container may be in, instead of the pod's own.
pub fn slot_group(slot: u32) -> String {
    format!("{GROUP_PREFIX}{slot}")
}

/// The slot whose UID range contains the owner of a file.
pub fn slot_of_uid(node_index: u32, uid: u32) -> Option<u32> {
    let first = node_index
        .checked_mul(SLOTS_PER_NODE)?
        .checked_add(FIRST_RANGE)?;
    let slot = (uid / UIDS_PER_POD).checked_sub(first)?;
    (slot < SLOTS_PER_NODE).then_some(slot)
}

/// The slot whose cgroup has this name.
pub fn slot_of_group(name: &str) -> Option<u32> {
    name.strip_prefix(GROUP_PREFIX)?.parse().ok()
}

#[derive(Debug, Default)]
struct State {
    next: u32,
    taken: BTreeSet<u32>,
    ready: VecDeque<u32>,
    /// Slots that have a link and are to keep it.
    linked: BTreeSet<u32>,
    launchers: BTreeMap<u32, Launcher>,
}

/// All slots of a node.
#[derive(Debug)]
pub struct Slots {
    directory: PathBuf,
    shim: PathBuf,
    node_index: u32,
    capacity: u32,
    network: Network,
    cgroups: Cgroups,
    starter: Starter,
    state: Mutex<State>,
    refill: Notify,
    keep_ready: usize,
    privileges: Privileges,
}

impl Slots {
    /// Opens the slots below `directory`, a private mount, keeping those in `used` and those that were ready.
    pub async fn open(
        directory: PathBuf,
        shim: PathBuf,
        node_index: u32,
        network: Network,
        cgroups: Cgroups,
        keep_ready: usize,
        used: &BTreeSet<u32>,
    ) -> Result<Self, RuntimeError> {
        fs::create_dir_all(&directory)
            .map_err(|source| io_error("the slots' directory", source))?;
        let capacity = SLOTS_PER_NODE.min(network.range().capacity());
        let slots = Self {
            directory,
            shim,
            node_index,
            capacity,
            network,
            cgroups,
            starter: Starter::new().map_err(|source| io_error("a thread", source))?,
            state: Mutex::default(),
            refill: Notify::new(),
            keep_ready,
            privileges: Privileges::current(),
        };
        // Also slots of which nothing is left: the pod whose record names one will free it again.
        slots.with_state(|state| state.taken.extend(used));
        let wiring = slots.network.wiring();
        for slot in slots.existing() {
            let is_wired = wired(&slots.path(slot)).as_ref() == Some(&wiring);
            if used.contains(&slot) {
                // Also a slot of a version that did not record its wiring, or whose link another program removed.
                let is_linked = is_wired && slots.network.has_link(slot).await;
                if !is_linked && slots.is_pinned(slot) {
                    slots.connect(slot).await?;
                } else if is_linked {
                    slots.with_state(|state| state.linked.insert(slot));
                }
                continue;
            }
            let is_ready = slots.path(slot).join(READY).exists();
            if is_ready && is_wired && slots.is_intact(slot) {
                slots.with_state(|state| {
                    state.taken.insert(slot);
                    state.linked.insert(slot);
                    state.ready.push_back(slot);
                });
            } else {
                slots.tear_down(slot).await?;
            }
        }
        Ok(slots)
    }

    fn with_state<T>(&self, work: impl FnOnce(&mut State) -> T) -> T {
        work(&mut self.state.lock().unwrap_or_else(PoisonError::into_inner))
    }

    fn existing(&self) -> Vec<u32> {
        let entries = fs::read_dir(&self.directory)
            .into_iter()
            .flatten()
            .flatten();
        entries
            .filter_map(|entry| entry.file_name().to_str()?.parse().ok())
            .collect()
    }

    fn path(&self, slot: u32) -> PathBuf {
        self.directory.join(slot.to_string())
    }

    pub fn pins(&self, slot: u32) -> NamespacePins {
        let path = self.path(slot);
        NamespacePins {
            network: path.join("network"),
            ipc: path.join("ipc"),
            hostname: path.join("hostname"),
            user: path.join("user"),
        }
    }

    pub fn uid_range(&self, slot: u32) -> UidRange {
        if self.privileges == Privileges::Rootless {
            return UidRange { base: 0, count: 1 };
        }
        let range = FIRST_RANGE + self.node_index * SLOTS_PER_NODE + slot;
        UidRange {
            base: range * UIDS_PER_POD,
            count: UIDS_PER_POD,
        }
    }

    pub fn shared_memory(&self, slot: u32) -> PathBuf {
        self.path(slot).join("shm")
    }

    pub fn network(&self) -> &Network {
        &self.network
    }

    /// Whether a slot was completed and its namespaces are still pinned; a reboot loses them.
    pub fn is_intact(&self, slot: u32) -> bool {
        self.is_pinned(slot) && wired(&self.path(slot)).is_some()
    }

    fn is_pinned(&self, slot: u32) -> bool {
        let pins = self.pins(slot);
        let mut pins = [&pins.network, &pins.ipc, &pins.hostname, &pins.user].into_iter();
        pins.all(|pin| is_pinned(pin))
    }

    /// A slot for a new pod: a ready one if there is one.
    pub async fn acquire(&self) -> Result<u32, RuntimeError> {
        let ready = self.with_state(|state| state.ready.pop_front());
        self.refill.notify_one();
        match ready {
            Some(slot) => {
                let _ = fs::remove_file(self.path(slot).join(READY));
                Ok(slot)
            }
            None => self.make().await,
        }
    }

    /// Recreates the slot of a pod after a reboot, with the same number: the pod's files on disk belong to the slot's UID range.
    pub async fn restore(&self, slot: u32) -> Result<(), RuntimeError> {
        self.tear_down(slot).await?;
        self.fill(slot).await
    }

    /// The launcher that waits in a slot, if one does.
    pub fn take_launcher(&self, slot: u32) -> Option<Launcher> {
        self.with_state(|state| state.launchers.remove(&slot))
    }

    /// Whether the slot belongs to a pod or is ready for one.
    pub fn is_taken(&self, slot: u32) -> bool {
        self.with_state(|state| state.taken.contains(&slot))
    }

    /// Starts a launcher that waits in a slot.
    async fn post_launcher(&self, slot: u32) -> Result<(), RuntimeError> {
        let (groups, shim, pins) = (self.cgroups.clone(), self.shim.clone(), self.pins(slot));
        let start = move || {
            let cgroups = groups.create(&slot_group(slot), WAITING_GROUP, &Limits::default())?;
            let preparation = Preparation {
                pins,
                cgroups,
                out_of_memory_score: OUT_OF_MEMORY_SCORE,
            };
            Launcher::start(&shim, &preparation)
        };
        let launcher = self.starter.start(start).await?;
        self.with_state(|state| state.launchers.insert(slot, launcher));
        Ok(())
    }

    /// Tears down what is left of a slot that belongs to no pod and is not ready for one.
    pub async fn reclaim(&self, slot: u32) -> Result<(), RuntimeError> {
        // Marked as taken, so that no pod gets it while it is torn down.
        if !self.with_state(|state| state.taken.insert(slot)) {
            return Ok(());
        }
        self.tear_down(slot).await?;
        self.free_number(slot);
        Ok(())
    }

    /// Frees the number of a slot that was torn down, for another pod.
    pub fn free_number(&self, slot: u32) {
        self.with_state(|state| state.taken.remove(&slot));
    }

    /// Mounts a tmpfs that the containers of a pod share.
    pub fn make_shared_memory(&self, slot: u32, bytes: u64) -> io::Result<PathBuf> {
        let path = self.shared_memory(slot);
        if is_memory(&path) {
            return Ok(path);
        }
        fs::create_dir_all(&path)?;
        let base = self.uid_range(slot).base;
        let options =
            std::ffi::CString::new(format!("size={bytes},mode=1777,uid={base},gid={base}"))
                .map_err(io::Error::from)?;
        rustix::mount::mount(
            "tmpfs",
            &path,
            "tmpfs",
            MountFlags::NOSUID | MountFlags::NODEV,
            options.as_c_str(),
        )?;
        Ok(path)
    }

    async fn make(&self) -> Result<u32, RuntimeError> {
        let slot = self.with_state(|state| {
            // Round-robin, so that an address is not reused at once: clients may still use it.
            let slot = (0..self.capacity)
                .map(|offset| (state.next + offset) % self.capacity)
                .find(|slot| !state.taken.contains(slot))?;
            state.taken.insert(slot);
            state.next = (slot + 1) % self.capacity;
            Some(slot)
        });
        let slot = slot.ok_or(RuntimeError::NoFreeSlot)?;
        match self.fill(slot).await {
            Ok(()) => Ok(slot),
            Err(error) => {
                let _ = self.tear_down(slot).await;
                self.free_number(slot);
                Err(error)
            }
        }
    }

    async fn fill(&self, slot: u32) -> Result<(), RuntimeError> {
        let request = NamespacesRequest {
            pins: self.pins(slot),
            uid_range: self.uid_range(slot),
        };
        let (path, shim) = (self.path(slot), self.shim.clone());
        tokio::task::spawn_blocking(move || {
            fs::create_dir_all(&path).map_err(|source| io_error("a slot", source))?;
            match run_shim(&shim, "namespaces", &request)? {
                NamespacesAnswer::Pinned => Ok(()),
                NamespacesAnswer::Failed(message) => Err(RuntimeError::Launcher(message)),
            }
        })
        .await
        .map_err(|error| RuntimeError::Launcher(error.to_string()))??;
        self.connect(slot).await
    }

    /// Creates the link of a slot, which completes the slot.
    async fn connect(&self, slot: u32) -> Result<(), RuntimeError> {
        self.network.connect(slot, &self.pins(slot).network).await?;
        let failed = |source| io_error("a slot", source);
        let wiring = serde_json::to_vec(&self.network.wiring());
        let wiring = wiring.map_err(|error| failed(error.into()))?;
        write_whole(&self.path(slot).join(WIRING), &wiring).map_err(failed)?;
        self.with_state(|state| state.linked.insert(slot));
        Ok(())
    }

    fn is_linked(&self, slot: u32) -> bool {
        self.with_state(|state| state.linked.contains(&slot))
    }

    /// Recreates a slot's link if another program removed it. Returns whether it was missing.
    pub async fn restore_link(&self, slot: u32) -> Result<bool, RuntimeError> {
        if !self.is_linked(slot) || self.network.has_link(slot).await {
            return Ok(false);
        }
        self.network.connect(slot, &self.pins(slot).network).await?;
        // The slot may have been torn down meanwhile.
        if !self.is_linked(slot) {
            self.network.disconnect(slot).await?;
        }
        Ok(true)
    }

    /// Removes a slot's link, cgroup, mounts and directory. Its number stays taken.
    pub async fn tear_down(&self, slot: u32) -> Result<(), RuntimeError> {
        self.with_state(|state| state.linked.remove(&slot));
        self.network.disconnect(slot).await?;
        let (path, groups, launcher) = (
            self.path(slot),
            self.cgroups.clone(),
            self.take_launcher(slot),
        );
        tokio::task::spawn_blocking(move || {
            drop(launcher);
            groups.remove_pod(&slot_group(slot))?;
            for entry in fs::read_dir(&path).into_iter().flatten().flatten() {
                // Fails for a file that is not a mount, which is removed below.
                let _ = rustix::mount::unmount(entry.path(), UnmountFlags::DETACH);
            }
            match fs::remove_dir_all(&path) {
                Err(error) if error.kind() != io::ErrorKind::NotFound => {
                    Err(io_error("to free a slot", error))
                }
                _ => Ok(()),
            }
        })
        .await
        .map_err(|error| RuntimeError::Launcher(error.to_string()))?
    }

    /// Keeps the configured number of slots ready until `shutdown`.
    pub async fn keep_ready(self: Arc<Self>, shutdown: CancellationToken) {
        // Ready slots of an earlier run of the node have lost their launchers.
        for slot in self.with_state(|state| state.ready.clone()) {
            let _ = self.post_launcher(slot).await;
        }
        loop {
            while self.with_state(|state| state.ready.len()) < self.keep_ready
                && !shutdown.is_cancelled()
            {
                match self.make().await {
                    Ok(slot) => {
                        if let Err(error) = self.post_launcher(slot).await {
                            tracing::warn!(error = %api::errors::chain(&error), "a pod's first container will start more slowly");
                        }
                        if fs::write(self.path(slot).join(READY), "").is_ok() {
                            self.with_state(|state| state.ready.push_back(slot));
                        }
                    }
                    Err(error) => {
                        tracing::warn!(error = %api::errors::chain(&error), "cannot make namespaces ahead of pods");
                        break;
                    }
                }
            }
            tokio::select! {
                () = shutdown.cancelled() => return,
                () = self.refill.notified() => self.let_pods_start().await,
            }
        }
    }

    /// Waits before the next slot is created, unless less than half of the slots are ready. A pod that has just taken a slot is
    /// starting its container, which creating a slot would slow down.
    async fn let_pods_start(&self) {
        let until = Instant::now().later_by(REFILL_PAUSE);
        while self.with_state(|state| state.ready.len()) * 2 >= self.keep_ready {
            if timeout_at(until, self.refill.notified()).await.is_err() {
                return;
            }
        }
    }

    /// Tears down the slots that are ready for pods.
    pub async fn drain(&self) -> Result<(), RuntimeError> {
        while let Some(slot) = self.with_state(|state| state.ready.pop_front()) {
            self.tear_down(slot).await?;
            self.free_number(slot);
        }
        Ok(())
    }
}

fn is_pinned(pin: &Path) -> bool {
    is_on(NAMESPACE_FILE_SYSTEM, pin)
}

/// Whether a path is on a file system of a kind.
pub fn is_on(kind: i64, path: &Path) -> bool {
    rustix::fs::statfs(path).is_ok_and(|found| {
        #[expect(
            clippy::unnecessary_cast,
            reason = "the field's type differs between architectures"
        )]
        let of_path = found.f_type as i64;
        of_path == kind
    })
}

/// The recorded wiring of a slot. `None` if the slot was not completed.
fn wired(slot: &Path) -> Option<Wiring> {
    serde_json::from_slice(&fs::read(slot.join(WIRING)).ok()?).ok()
}

/// Refuses a range of addresses other than that of the running pods: their addresses would be computed from the new range, and
/// rules would not match them.
pub fn check_range(
    directory: &Path,
    used: &BTreeSet<u32>,
    range: PodNetwork,
) -> Result<(), RuntimeError> {
    let wanted = range.to_string();
    for slot in used {
        let path = directory.join(slot.to_string());
        if let Some(wiring) = wired(&path)
            && wiring.range != wanted
            && is_pinned(&path.join("network"))
        {
            let had = wiring.range;
            return Err(RuntimeError::OtherRange { had, wanted });
        }
    }
    Ok(())
}

/// Whether a tmpfs is mounted at `path`. After a reboot only the directory is left.
pub fn is_memory(path: &Path) -> bool {
    const MEMORY_FILE_SYSTEM: i64 = 0x0102_1994;
    is_on(MEMORY_FILE_SYSTEM, path)
}

fn io_error(what: &str, source: io::Error) -> RuntimeError {
    RuntimeError::Io {
        what: what.to_owned(),
        source,
    }
}

/// Makes `directory` a private mount, whose submounts do not propagate to other mount namespaces.
pub fn make_private_mount(directory: &Path) -> io::Result<()> {
    fs::create_dir_all(directory)?;
    let mounts = fs::read_to_string("/proc/self/mountinfo")?;
    let canonical = directory.canonicalize()?;
    let mounted = mounts.lines().any(|line| {
        line.split(' ')
            .nth(4)
            .is_some_and(|point| Path::new(point) == canonical)
    });
    if !mounted {
        rustix::mount::mount_bind(&canonical, &canonical)?;
    }
    rustix::mount::mount_change(&canonical, MountPropagationFlags::PRIVATE)?;
    Ok(())
}

/// Runs the shim with one request and reads its answer. Blocks, so it belongs on a blocking thread.
pub fn run_shim<Answer: serde::de::DeserializeOwned>(
    shim: &Path,
    verb: &str,
    request: &impl serde::Serialize,
) -> Result<Answer, RuntimeError> {
    let failed = |source| io_error("the launcher", source);
    let text = serde_json::to_vec(request).map_err(|error| failed(error.into()))?;
    let mut child = Command::new(shim)
        .arg(verb)
        .env_clear()
        .current_dir("/")
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::inherit())
        .spawn()
        .map_err(failed)?;
    if let Some(mut stdin) = child.stdin.take() {
        stdin.write_all(&text).map_err(failed)?;
    }
    let output = child.wait_with_output().map_err(failed)?;
    serde_json::from_slice(&output.stdout)
        .map_err(|_| RuntimeError::Launcher(format!("it ended with {}", output.status)))
}

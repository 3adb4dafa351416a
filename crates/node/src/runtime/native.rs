//! The default tier: containers made by the shim.
//!
//! What a container leaves on disk is enough to find it again after the node was killed:
//!
//! ```text
//! pods/<uid>/sandbox.json                     the slot and what the sandbox was made from
//!           /etc/{hosts,hostname,resolv.conf}
//!           /containers/<name>/<attempt>.log
//!           /containers/<name>/<attempt>/     state.json, exit.json, termination.json, agent.sock, upper, work
//! ```

mod image_root;
mod launching;
mod process_holder;
mod recovery;

use std::collections::{BTreeSet, HashMap};
use std::fs;
use std::io;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};

use jiff::Timestamp;
use rustix::process::{Pid, PidfdFlags, Signal, WaitId, WaitIdOptions};
use serde::{Deserialize, Serialize};
use shim_protocol::{ContainerExit, ExecRequest};
use tokio::io::unix::AsyncFd;
use tokio_util::sync::CancellationToken;

use super::agent::{self, Session};
use super::control_groups::ControlGroups;
use super::host_image::{self, HostImage};
use super::shares::{self, Share};
use super::slots::{self, Slots};
use super::{
    ContainerId, ContainerSpec, PodSandbox, PodSandboxSpec, RecoveredPod, Runtime, RuntimeError,
    StartError, StartedContainer, Termination, seccomp,
};
use crate::assets::Programs;
use crate::config::{Config, PodNetwork};
use crate::names::{Names, short_hash};
use crate::network::firewall;
use crate::network::links::{self, Forwarding, Layout, Network};
use crate::network::namespaces;
use crate::reclaim;
use crate::throttling::Periods;

const SHARED_MEMORY_BYTES: u64 = 64 << 20;
const TERMINATION_MESSAGE_BYTES: usize = 4096;

/// What is kept of a sandbox.
#[derive(Debug, Clone, Serialize, Deserialize)]
struct SandboxRecord {
    /// Absent once the pod has ended and its namespaces are freed.
    slot: Option<u32>,
    spec: PodSandboxSpec,
}

/// What is kept of a started container.
#[derive(Debug, Clone, Serialize, Deserialize)]
struct ContainerRecord {
    pid: i32,
    /// When the process started, in the kernel's ticks: tells it from another with its number.
    start_ticks: u64,
    started_at: Timestamp,
    image_id: String,
    crashes: u32,
    group: Group,
    message_from_log: bool,
}

/// A container's control group: its name, and that of the one it is below.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
struct Group {
    parent: String,
    name: String,
}

impl Group {
    /// Where a container is that was not started by a launcher that waited for it.
    fn of(id: &ContainerId) -> Self {
        Self {
            parent: id.pod.clone(),
            name: format!("{}.{}", id.container, id.attempt),
        }
    }

    /// Where a launcher waits for a pod's first container.
    fn of_slot(slot: u32) -> Self {
        Self {
            parent: slots::slot_group(slot),
            name: slots::WAITING_GROUP.to_owned(),
        }
    }
}

#[derive(Debug, Clone)]
struct Running {
    record: ContainerRecord,
    process: Arc<AsyncFd<OwnedFd>>,
}

/// What the node has to know that its pods cannot have.
#[derive(Debug, Clone, Default)]
pub struct Shortcomings {
    /// Why pods' traffic cannot be judged, when it cannot.
    pub firewall: Option<String>,
    /// Controllers without which limits are not enforced.
    pub controllers: Vec<&'static str>,
}

/// The default tier's runtime.
#[derive(Debug)]
pub struct NativeRuntime {
    config: Config,
    programs: Programs,
    host: HostImage,
    images: Arc<images::Images>,
    control_groups: ControlGroups,
    slots: Arc<Slots>,
    seccomp_programs: Vec<PathBuf>,
    pods: PathBuf,
    run: PathBuf,
    running: Mutex<HashMap<ContainerId, Running>>,
    /// Held while the process is looked for that holds a pod's shared PID namespace, and made if there is none.
    making_holder: tokio::sync::Mutex<()>,
    shortcomings: Shortcomings,
    share: Share,
}

fn failure(what: impl Into<String>) -> impl FnOnce(io::Error) -> RuntimeError {
    let what = what.into();
    move |source| RuntimeError::Io { what, source }
}

impl NativeRuntime {
    pub async fn open(
        config: Config,
        programs: Programs,
        images: Arc<images::Images>,
    ) -> Result<Self, RuntimeError> {
        let data_dir = config.data_dir.clone();
        let names = Names::of(&data_dir);
        let registry = shares::registry(&data_dir);
        reclaim::reclaim_abandoned(&registry).await;
        let share = shares::claim(&registry, &data_dir, names.preferred_share)?;
        let (pods, run) = (data_dir.join("pods"), data_dir.join("run"));
        fs::create_dir_all(&pods).map_err(failure("the pods' directory"))?;
        slots::make_private_mount(&run).map_err(failure("a private mount for namespaces"))?;
        fs::create_dir_all(run.join("stage")).map_err(failure("the stage"))?;
        let host = host_image::prepare(&data_dir.join("images"), &programs.sandboxd)
            .map_err(failure("the image `host`"))?;
        let control_groups = ControlGroups::discover(&names.control_group)?;
        let seccomp_programs = write_seccomp(&data_dir.join("bin"))?;
        let range = config.pod_network.unwrap_or(PodNetwork {
            address: std::net::Ipv4Addr::new(
                10,
                200 + u8::try_from(share.number()).unwrap_or(0),
                0,
                0,
            ),
            prefix_length: 16,
        });
        let layout = Layout::new(names.clone(), range);
        let surroundings = layout.surroundings(config.firewall_program.clone());
        let firewall = blocking(move || Ok(firewall::open(&surroundings)))
            .await?
            .err()
            .map(|error| crate::errors::chain(&error));
        let forwarding = match firewall {
            None => Forwarding::On,
            Some(_) => Forwarding::Off,
        };
        let network = Network::open(layout, forwarding).await?;
        let shortcomings = Shortcomings {
            firewall,
            controllers: control_groups.missing(),
        };
        let used = recovery::used_slots(&pods);
        let slots = Slots::open(
            run.join("slots"),
            programs.shim.clone(),
            share.number(),
            network,
            control_groups.clone(),
            config.ready_namespaces,
            &used,
        )
        .await?;
        Ok(Self {
            config,
            programs,
            host,
            images,
            control_groups,
            slots: Arc::new(slots),
            seccomp_programs,
            pods,
            run,
            running: Mutex::default(),
            making_holder: tokio::sync::Mutex::default(),
            shortcomings,
            share,
        })
    }

    pub fn shortcomings(&self) -> &Shortcomings {
        &self.shortcomings
    }

    pub fn slots(&self) -> &Arc<Slots> {
        &self.slots
    }

    pub fn pod_network(&self) -> PodNetwork {
        self.slots.network().range()
    }

    pub fn network(&self) -> &Network {
        self.slots.network()
    }

    /// The address under which pods see the node.
    pub fn node_address(&self) -> std::net::Ipv4Addr {
        self.slots.network().gateway()
    }

    pub async fn keep_slots_ready(&self, shutdown: CancellationToken) {
        self.slots.clone().keep_ready(shutdown).await;
    }

    /// The process stops to be the node; the pods go on.
    pub fn let_go(&self) {
        self.share.let_go();
    }

    /// Frees everything the node holds of the machine. Every pod must have been removed.
    pub async fn dismantle(&self) -> Result<(), RuntimeError> {
        self.slots.drain().await?;
        self.slots.network().close().await?;
        let program = self.config.firewall_program.clone();
        let table = self.slots.network().layout().names.table.clone();
        blocking(
            move || Ok(firewall::remove(&program, &table).map_err(links::NetworkError::from)?),
        )
        .await?;
        // A container whose pod went while it was being launched may have made its group again.
        for left in self.control_groups.pods() {
            tracing::warn!(group = left, "a control group was left");
            self.control_groups.remove_pod(&left)?;
        }
        self.control_groups.remove_parent()?;
        let _ = rustix::mount::unmount(&self.run, rustix::mount::UnmountFlags::DETACH);
        self.share.give_back();
        Ok(())
    }

    fn pod_directory(&self, pod: &str) -> PathBuf {
        self.pods.join(pod)
    }

    /// The directory of one run of a container.
    pub fn container_directory(&self, id: &ContainerId) -> PathBuf {
        self.pod_directory(&id.pod)
            .join("containers")
            .join(&id.container)
            .join(id.attempt.to_string())
    }

    /// The log of one run of a container.
    pub fn log_path(&self, id: &ContainerId) -> PathBuf {
        self.pod_directory(&id.pod)
            .join("containers")
            .join(&id.container)
            .join(format!("{}.log", id.attempt))
    }

    fn sandbox_record(&self, pod: &str) -> Option<SandboxRecord> {
        let text = fs::read(self.pod_directory(pod).join("sandbox.json")).ok()?;
        serde_json::from_slice(&text).ok()
    }

    /// Opens a connection to a port of the pod's loopback.
    pub async fn connect_to_port(
        &self,
        pod: &str,
        port: u16,
    ) -> Result<io::Result<std::net::TcpStream>, RuntimeError> {
        let slot = self.sandbox_record(pod).and_then(|record| record.slot);
        let slot = slot.ok_or_else(|| RuntimeError::NoSandbox(pod.to_owned()))?;
        Ok(namespaces::connect_inside(&self.slots.pins(slot).network, port).await?)
    }

    pub async fn attach(&self, id: &ContainerId, stdin: bool) -> Result<Session, RuntimeError> {
        Ok(agent::attach(&self.container_directory(id), stdin).await?)
    }

    /// The memory a container's processes use now, its agent included.
    pub fn memory_bytes(&self, id: &ContainerId) -> Option<u64> {
        let group = self.running(id)?.record.group;
        self.control_groups.memory_bytes(&group.parent, &group.name)
    }

    /// Makes the agent write to a new log file when the old one has grown enough, and drops the oldest.
    pub async fn rotate_log(&self, id: &ContainerId) -> Result<(), RuntimeError> {
        let path = self.log_path(id);
        let Ok(metadata) = fs::metadata(&path) else {
            return Ok(());
        };
        if metadata.len() < self.config.log_maximum_bytes {
            return Ok(());
        }
        let numbered = |number: u32| path.with_extension(format!("log.{number}"));
        for number in (1..self.config.log_maximum_files.saturating_sub(1)).rev() {
            let _ = fs::rename(numbered(number), numbered(number + 1));
        }
        fs::rename(&path, numbered(1)).map_err(failure("a rotated log"))?;
        let file = fs::File::options()
            .create(true)
            .append(true)
            .open(&path)
            .map_err(failure("a new log"))?;
        Ok(agent::replace_log(&self.container_directory(id), file).await?)
    }

    /// Rotates the logs of all running containers that have grown enough.
    pub async fn rotate_logs(&self) {
        let running: Vec<ContainerId> = self
            .running
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .keys()
            .cloned()
            .collect();
        for id in running {
            if let Err(error) = self.rotate_log(&id).await {
                tracing::warn!(container = id.container, error = %crate::errors::chain(&error), "cannot rotate a log");
            }
        }
    }

    /// Kills every container at once, for a node whose pods cannot outlive it.
    pub fn kill_everything(&self) {
        let running = self.running.lock().unwrap_or_else(PoisonError::into_inner);
        for container in running.values() {
            let _ = rustix::process::pidfd_send_signal(container.process.get_ref(), Signal::KILL);
        }
    }

    /// Whether one run of a container has ended, or never was.
    pub fn has_ended(&self, id: &ContainerId) -> bool {
        self.running(id).is_none()
    }

    fn remember(&self, id: &ContainerId, record: ContainerRecord) -> Result<(), RuntimeError> {
        let pid = Pid::from_raw(record.pid)
            .ok_or_else(|| RuntimeError::NotRunning(id.container.clone()))?;
        let process = rustix::process::pidfd_open(pid, PidfdFlags::NONBLOCK).map_err(|source| {
            RuntimeError::Io {
                what: "a container's process".to_owned(),
                source: source.into(),
            }
        })?;
        #[expect(
            deprecated,
            reason = "its replacement is unsafe for types that break I/O safety, which OwnedFd does not"
        )]
        let process = AsyncFd::new(process).map_err(failure("a container's process"))?;
        let process = Arc::new(process);
        let running = Running { record, process };
        self.running
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .insert(id.clone(), running);
        Ok(())
    }

    fn running(&self, id: &ContainerId) -> Option<Running> {
        self.running
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .get(id)
            .cloned()
    }

    /// Reads how a container ended, and keeps it: its control group, which knows of memory, is removed after this.
    fn conclude(&self, id: &ContainerId, record: Option<&ContainerRecord>) -> Termination {
        let directory = self.container_directory(id);
        let kept = directory.join("termination.json");
        if let Some(termination) = fs::read(&kept)
            .ok()
            .and_then(|text| serde_json::from_slice(&text).ok())
        {
            return termination;
        }
        let group = record.map_or_else(|| Group::of(id), |record| record.group.clone());
        let out_of_memory = self
            .control_groups
            .was_out_of_memory(&group.parent, &group.name);
        let exit: Option<ContainerExit> = fs::read(directory.join("exit.json"))
            .ok()
            .and_then(|text| serde_json::from_slice(&text).ok());
        let failed = exit.as_ref().is_none_or(|exit| exit.code != 0);
        let from_log = failed && record.is_some_and(|record| record.message_from_log);
        let message = read_message(&directory)
            .or_else(|| from_log.then(|| crate::logs::last_words(&self.log_path(id)))?);
        let termination = termination_of(
            exit.as_ref(),
            out_of_memory,
            message,
            record.map(|record| record.started_at),
            Timestamp::now(),
        );
        let _ = serde_json::to_vec(&termination).map(|text| fs::write(&kept, text));
        let _ = self
            .control_groups
            .remove_container(&group.parent, &group.name);
        // The layer goes with the run, as the next run starts from the image again.
        for name in ["upper", "work"] {
            let _ = crate::trees::remove(&directory.join(name));
        }
        let _ = fs::remove_file(directory.join("agent.sock"));
        self.images.release(&image_user(id));
        termination
    }
}

fn write_record(directory: &Path, record: &SandboxRecord) -> Result<(), RuntimeError> {
    let text =
        serde_json::to_vec(record).map_err(|error| failure("a pod's record")(error.into()))?;
    write_whole(&directory.join("sandbox.json"), &text).map_err(failure("a pod's record"))
}

/// Writes a file where a crash cannot leave half of it.
fn write_whole(path: &Path, text: &[u8]) -> io::Result<()> {
    let mut temporary = path.as_os_str().to_owned();
    temporary.push(".new");
    fs::write(&temporary, text)?;
    fs::rename(&temporary, path)
}

/// Under which name one run of a container uses its image.
fn image_user(id: &ContainerId) -> String {
    format!(
        "pod {} container {} run {}",
        id.pod, id.container, id.attempt
    )
}

fn read_message(directory: &Path) -> Option<String> {
    let bytes = fs::read(directory.join("termination-log")).ok()?;
    let text =
        String::from_utf8_lossy(&bytes[..bytes.len().min(TERMINATION_MESSAGE_BYTES)]).into_owned();
    (!text.is_empty()).then_some(text)
}

/// What a kubelet would say of a container that ended like this.
fn termination_of(
    exit: Option<&ContainerExit>,
    out_of_memory: bool,
    message: Option<String>,
    started_at: Option<Timestamp>,
    now: Timestamp,
) -> Termination {
    const KILLED: i32 = 137;
    let exit_code = exit.map_or(KILLED, |exit| exit.code);
    let finished_at = exit
        .and_then(|exit| Timestamp::from_nanosecond(i128::from(exit.finished_at_ns)).ok())
        .unwrap_or(now);
    let reason = match (exit_code, out_of_memory) {
        (0, _) => "Completed",
        (_, true) => "OOMKilled",
        _ => "Error",
    };
    Termination {
        exit_code,
        signal: None,
        reason: reason.to_owned(),
        message,
        started_at,
        finished_at,
    }
}

fn write_seccomp(directory: &Path) -> Result<Vec<PathBuf>, RuntimeError> {
    let programs = seccomp::default_profile()
        .map_err(|error| RuntimeError::Launcher(crate::errors::chain(&error)))?;
    programs
        .iter()
        .map(|program| {
            let path = directory.join(format!("seccomp-{}", short_hash(program, 8)));
            fs::write(&path, program).map_err(failure("the system call filter"))?;
            Ok(path)
        })
        .collect()
}

async fn blocking<T: Send + 'static>(
    work: impl FnOnce() -> Result<T, RuntimeError> + Send + 'static,
) -> Result<T, RuntimeError> {
    tokio::task::spawn_blocking(work)
        .await
        .map_err(|error| RuntimeError::Launcher(error.to_string()))?
}

impl Runtime for NativeRuntime {
    async fn create_sandbox(&self, spec: &PodSandboxSpec) -> Result<PodSandbox, RuntimeError> {
        let directory = self.pod_directory(&spec.identity.uid);
        let kept = self
            .sandbox_record(&spec.identity.uid)
            .and_then(|record| record.slot);
        let slot = if let Some(slot) = kept.filter(|slot| self.slots.is_intact(*slot)) {
            slot
        } else {
            // What is left of one that did not survive, as after a reboot, is of no use.
            if let Some(lost) = kept {
                self.slots.release(lost).await?;
            }
            let slot = self.slots.acquire().await?;
            fs::create_dir_all(&directory).map_err(failure("a pod's directory"))?;
            write_record(
                &directory,
                &SandboxRecord {
                    slot: Some(slot),
                    spec: spec.clone(),
                },
            )?;
            slot
        };
        let sandbox = PodSandbox {
            address: self.slots.network().address(slot),
            ipv6_address: self.slots.network().ipv6_address(slot),
            identity_base: self.slots.identities(slot).base,
        };
        launching::write_pod_files(&directory, spec, &sandbox.addresses())
            .map_err(failure("a pod's files"))?;
        if spec.containers > 1 {
            self.slots
                .make_shared_memory(slot, SHARED_MEMORY_BYTES)
                .map_err(failure("a pod's shared memory"))?;
        }
        Ok(sandbox)
    }

    async fn start(&self, spec: ContainerSpec) -> Result<StartedContainer, StartError> {
        let id = spec.id.clone();
        let record = self.launch(spec).await?;
        let started = StartedContainer {
            started_at: record.started_at,
            image_id: record.image_id.clone(),
        };
        self.remember(&id, record)?;
        Ok(started)
    }

    async fn wait(&self, id: &ContainerId) -> Termination {
        let Some(running) = self.running(id) else {
            return self.conclude(id, None);
        };
        let _ = running.process.readable().await;
        // Reaps it if it is this process's child; after a restart of the node it is not.
        let _ = rustix::process::waitid(
            WaitId::PidFd(std::os::fd::AsFd::as_fd(running.process.get_ref())),
            WaitIdOptions::EXITED | WaitIdOptions::NOHANG,
        );
        let termination = self.conclude(id, Some(&running.record));
        self.running
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .remove(id);
        termination
    }

    async fn signal(&self, id: &ContainerId, signal: i32) -> Result<(), RuntimeError> {
        if self.running(id).is_none() {
            return Ok(());
        }
        match agent::signal_command(&self.container_directory(id), signal).await {
            // It ended in the meantime, which is what a signal is for.
            Err(agent::AgentError::Connect(_) | agent::AgentError::Gone) => Ok(()),
            other => Ok(other?),
        }
    }

    async fn kill(&self, id: &ContainerId) -> Result<(), RuntimeError> {
        if let Some(running) = self.running(id) {
            let _ = rustix::process::pidfd_send_signal(running.process.get_ref(), Signal::KILL);
            let group = &running.record.group;
            self.control_groups.kill(&group.parent, &group.name);
        }
        Ok(())
    }

    async fn exec(&self, id: &ContainerId, request: ExecRequest) -> Result<Session, RuntimeError> {
        Ok(agent::exec(&self.container_directory(id), &request).await?)
    }

    fn processor_periods(&self, id: &ContainerId) -> Option<Periods> {
        let group = self.running(id)?.record.group;
        self.control_groups
            .processor_periods(&group.parent, &group.name)
    }

    async fn stop_sandbox(&self, pod: &str) -> Result<(), RuntimeError> {
        let Some(mut record) = self.sandbox_record(pod) else {
            return Ok(());
        };
        self.end_process_holder(pod).await;
        let (groups, uid) = (self.control_groups.clone(), pod.to_owned());
        blocking(move || Ok(groups.remove_pod(&uid)?)).await?;
        if let Some(slot) = record.slot.take() {
            self.slots.release(slot).await?;
            write_record(&self.pod_directory(pod), &record)?;
        }
        Ok(())
    }

    async fn remove_sandbox(&self, pod: &str) -> Result<(), RuntimeError> {
        self.stop_sandbox(pod).await?;
        let directory = self.pod_directory(pod);
        blocking(move || match crate::trees::remove(&directory) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => {
                Err(failure("to remove a pod")(error))
            }
            _ => Ok(()),
        })
        .await
    }

    async fn recover(&self) -> Result<Vec<RecoveredPod>, RuntimeError> {
        Ok(self.recover_pods())
    }
}

/// Which slots pods on disk hold.
fn slots_in_use(records: impl Iterator<Item = SandboxRecord>) -> BTreeSet<u32> {
    records.filter_map(|record| record.slot).collect()
}

//! The native runtime: containers that the shim creates.
//!
//! The files of a container are enough to recover it after the node was killed:
//!
//! ```text
//! pods/<uid>/sandbox.json                     the slot and the specification of the pod sandbox
//!           /etc/{hosts,hostname,resolv.conf}
//!           /containers/<name>/<attempt>.log
//!           /containers/<name>/<attempt>/     state.json, exit.json, termination.json, agent.sock, upper, work
//! ```

mod freezing;
mod image_root;
mod launching;
mod network_repair;
mod page_out;
mod pid_namespace_holder;
mod records;
mod recovery;
mod rotation;
mod starting;
mod termination;

use std::collections::HashMap;
use std::fs;
use std::io;
use std::net::SocketAddr;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};

use jiff::Timestamp;
use rustix::process::{Pid, PidfdFlags, Signal, WaitId, WaitIdOptions};
use shim_protocol::ExecRequest;
use tokio::io::unix::AsyncFd;
use tokio_util::sync::CancellationToken;

pub(super) use self::launching::view;
pub use self::network_repair::LostLink;
pub(super) use self::records::write_whole;
use self::records::{ContainerRecord, Group, SandboxRecord, write_durably, write_record};
use super::agent::{self, Session};
use super::cgroups::Cgroups;
use super::host_image::{self, HostImage};
use super::kernel_limits::{ContainerLimits, Demand, KernelLimits};
use super::node_ranges::{self, NodeRanges};
use super::slots::{self, Slots};
use super::{
    ContainerId, ContainerProcesses, ContainerSpec, PodSandbox, PodSandboxSpec, RecoveredPod,
    Runtime, RuntimeError, StartError, StartedContainer, Termination, seccomp,
};
use crate::assets::Programs;
use crate::config::Config;
use crate::freeze_swap;
use crate::privileges::Privileges;
use crate::reclaim;
use crate::throttling::Periods;
use pod_network::firewall;
use pod_network::links::{self, Forwarding, Layout, Network};
use pod_network::names::{Names, short_hash};
use pod_network::namespaces;
use pod_network::pod_cidr::PodNetwork;

const SHARED_MEMORY_BYTES: u64 = 64 << 20;

#[derive(Debug, Clone)]
struct Running {
    record: ContainerRecord,
    process: Arc<AsyncFd<OwnedFd>>,
}

/// What this machine does not support: the node reports it.
#[derive(Debug, Clone, Default)]
pub struct Shortcomings {
    /// Why network policies cannot be enforced. `None` if they are.
    pub firewall: Option<String>,
    /// The missing cgroup controllers, whose limits are not enforced.
    pub controllers: Vec<&'static str>,
}

/// The native runtime.
#[derive(Debug)]
pub struct NativeRuntime {
    config: Config,
    programs: Programs,
    host: HostImage,
    images: Arc<images::Images>,
    cgroups: Cgroups,
    slots: Arc<Slots>,
    seccomp_programs: Vec<PathBuf>,
    /// The limits of containers that follow from the kernel's.
    container_limits: ContainerLimits,
    pods: PathBuf,
    run: PathBuf,
    running: Mutex<HashMap<ContainerId, Running>>,
    /// A token per container that is being started, which cancels the start.
    starting: Mutex<HashMap<ContainerId, CancellationToken>>,
    /// Held while the process that holds a pod's shared PID namespace is looked up or started.
    making_holder: tokio::sync::Mutex<()>,
    /// The pods whose agents do not answer because they are frozen.
    frozen: freezing::FrozenPods,
    shortcomings: Shortcomings,
    ranges: NodeRanges,
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
        let registry = node_ranges::registry(&data_dir);
        reclaim::reclaim_abandoned(&registry).await;
        // The files of pods belong to UIDs that follow from the index that the node had before.
        let index_file = data_dir.join("share");
        let previous = fs::read_to_string(&index_file).ok();
        let previous = previous.and_then(|text| text.trim().parse().ok());
        let ranges = node_ranges::claim(
            &registry,
            &data_dir,
            previous.unwrap_or(names.preferred_index),
        )?;
        write_durably(&index_file, ranges.index().to_string().as_bytes())
            .map_err(failure("the node's index on this machine"))?;
        let (pods, run) = (data_dir.join("pods"), data_dir.join("run"));
        fs::create_dir_all(&pods).map_err(failure("the pods' directory"))?;
        slots::make_private_mount(&run).map_err(failure("a private mount for namespaces"))?;
        fs::create_dir_all(run.join("stage")).map_err(failure("the stage"))?;
        let host = host_image::prepare(&data_dir.join("images"), &programs.sandboxd)
            .map_err(failure("the image `host`"))?;
        let cgroups = Cgroups::discover(&names.cgroup)?;
        let container_limits = raise_kernel_limits(&config);
        cgroups.limit_processes(container_limits.all_processes)?;
        freeze_swap::apply(&data_dir, config.freeze_swap)?;
        let seccomp_programs = write_seccomp(&data_dir.join("bin"))?;
        let range = config.pod_network.unwrap_or(PodNetwork {
            address: std::net::Ipv4Addr::new(
                10,
                200 + u8::try_from(ranges.index()).unwrap_or(0),
                0,
                0,
            ),
            prefix_length: 16,
        });
        let used = recovery::used_slots(&pods, ranges.index())?;
        slots::check_range(&run.join("slots"), &used, range)?;
        let layout = Layout::new(names.clone(), ranges.index(), range);
        let surroundings = layout
            .surroundings(config.firewall_program.clone())
            .reached_by(config.local_users.clone());
        let firewall = blocking(move || Ok(firewall::open(&surroundings)))
            .await?
            .err()
            .map(|error| api::errors::chain(&error));
        let forwarding = match firewall {
            None => Forwarding::On,
            Some(_) => Forwarding::Off,
        };
        let network = Network::open(layout, forwarding, node_ranges::rules_lock(&registry)).await?;
        let shortcomings = Shortcomings {
            firewall,
            controllers: cgroups.missing(),
        };
        let slots = Slots::open(
            run.join("slots"),
            programs.shim.clone(),
            ranges.index(),
            network,
            cgroups.clone(),
            config.ready_namespaces,
            &used,
        )
        .await?;
        Ok(Self {
            config,
            programs,
            host,
            images,
            cgroups,
            slots: Arc::new(slots),
            seccomp_programs,
            container_limits,
            pods,
            run,
            running: Mutex::default(),
            starting: Mutex::default(),
            making_holder: tokio::sync::Mutex::default(),
            frozen: freezing::FrozenPods::default(),
            shortcomings,
            ranges,
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

    /// Unlocks the node's claim: this process is no longer the node. The pods continue.
    pub fn unlock_ranges(&self) {
        self.ranges.unlock();
    }

    /// Removes everything of the node from the machine. Every pod must have been removed.
    pub async fn dismantle(&self) -> Result<(), RuntimeError> {
        self.slots.drain().await?;
        self.slots.network().close().await?;
        let program = self.config.firewall_program.clone();
        let table = self.slots.network().layout().names.table.clone();
        blocking(
            move || Ok(firewall::remove(&program, &table).map_err(links::NetworkError::from)?),
        )
        .await?;
        // A container whose pod was removed during its launch may have created its cgroup again.
        for left in self.cgroups.pods() {
            tracing::warn!(group = left, "removing a leftover cgroup");
            self.cgroups.remove_pod(&left)?;
        }
        self.cgroups.remove_parent()?;
        let data_dir = self.config.data_dir.clone();
        blocking(move || Ok(freeze_swap::apply(&data_dir, None)?)).await?;
        let _ = rustix::mount::unmount(&self.run, rustix::mount::UnmountFlags::DETACH);
        self.ranges.release();
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

    /// Where the pod's network namespace is pinned.
    fn network_of(&self, pod: &str) -> Result<PathBuf, RuntimeError> {
        let slot = self.sandbox_record(pod).and_then(|record| record.slot);
        let slot = slot.ok_or_else(|| RuntimeError::NoSandbox(pod.to_owned()))?;
        Ok(self.slots.pins(slot).network)
    }

    pub fn cgroups(&self) -> &Cgroups {
        &self.cgroups
    }

    /// The memory that a container uses now, including its agent.
    pub fn memory_bytes(&self, id: &ContainerId) -> Option<u64> {
        let group = self.running(id)?.record.group;
        self.cgroups.memory_bytes(&group.parent, &group.name)
    }

    /// The cgroups of a pod's running containers.
    fn groups_of(&self, pod: &str) -> Vec<(ContainerId, Group)> {
        let running = self.running.lock().unwrap_or_else(PoisonError::into_inner);
        let of_pod = running.iter().filter(|(id, _)| id.pod == pod);
        of_pod
            .map(|(id, container)| (id.clone(), container.record.group.clone()))
            .collect()
    }

    /// Kills every container, for a rootless node, whose pods cannot outlive it.
    pub fn kill_everything(&self) {
        let running = self.running.lock().unwrap_or_else(PoisonError::into_inner);
        for container in running.values() {
            let _ = rustix::process::pidfd_send_signal(container.process.get_ref(), Signal::KILL);
        }
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

    fn forget(&self, id: &ContainerId) {
        let mut running = self.running.lock().unwrap_or_else(PoisonError::into_inner);
        running.remove(id);
    }

    fn with_starting<T>(
        &self,
        work: impl FnOnce(&mut HashMap<ContainerId, CancellationToken>) -> T,
    ) -> T {
        work(&mut self.starting.lock().unwrap_or_else(PoisonError::into_inner))
    }

    fn running(&self, id: &ContainerId) -> Option<Running> {
        self.running
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .get(id)
            .cloned()
    }
}

/// The name under which the image store records that one run of a container uses its image.
fn image_user(id: &ContainerId) -> String {
    format!(
        "pod {} container {} run {}",
        id.pod, id.container, id.attempt
    )
}

/// Raises the kernel's limits for the node's pods. Returns the limits of containers that follow from them.
fn raise_kernel_limits(config: &Config) -> ContainerLimits {
    let demand = Demand {
        pods: config.maximum_pods,
        processes: config.default_process_limit,
    };
    if Privileges::current() == Privileges::Root {
        KernelLimits::read().raise(demand);
    }
    // The node may lack the privilege to exceed its own hard limit, so containers get at most that.
    let allowed = rustix::process::getrlimit(rustix::process::Resource::Nofile).maximum;
    KernelLimits::read().container_limits(demand, allowed)
}

fn write_seccomp(directory: &Path) -> Result<Vec<PathBuf>, RuntimeError> {
    let programs = seccomp::default_profile()
        .map_err(|error| RuntimeError::Launcher(api::errors::chain(&error)))?;
    programs
        .iter()
        .map(|program| {
            let path = directory.join(format!("seccomp-{}", short_hash(program, 8)));
            fs::write(&path, program).map_err(failure("the seccomp filter"))?;
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
        let recorded = self
            .sandbox_record(&spec.identity.uid)
            .and_then(|record| record.slot);
        let slot = match recorded {
            Some(slot) if self.slots.is_intact(slot) => slot,
            lost => {
                let slot = match lost {
                    Some(slot) => slot,
                    None => self.slots.acquire().await?,
                };
                let record = SandboxRecord {
                    slot: Some(slot),
                    spec: spec.clone(),
                    made_at: Timestamp::now(),
                };
                let written = fs::create_dir_all(&directory)
                    .map_err(failure("a pod's directory"))
                    .and_then(|()| write_record(&directory, &record));
                if let Err(error) = written {
                    // Without a record, no later run of the node would free the slot.
                    if lost.is_none() && self.slots.tear_down(slot).await.is_ok() {
                        self.slots.free_number(slot);
                    }
                    return Err(error);
                }
                // Only after the record with the new `made_at`: containers that started before it belong to the lost sandbox.
                if lost.is_some() {
                    self.slots.restore(slot).await?;
                }
                slot
            }
        };
        let sandbox = PodSandbox {
            address: self.slots.network().address(slot),
            ipv6_address: self.slots.network().ipv6_address(slot),
            uid_base: self.slots.uid_range(slot).base,
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
        let give_up = CancellationToken::new();
        self.with_starting(|starting| starting.insert(id.clone(), give_up.clone()));
        let launched = self.launch(spec, give_up).await;
        self.with_starting(|starting| starting.remove(&id));
        let record = launched?;
        let started = StartedContainer {
            started_at: record.started_at,
            image_id: record.image_id.clone(),
        };
        self.remember(&id, record)?;
        Ok(started)
    }

    async fn wait(&self, id: &ContainerId) -> Termination {
        let Some(running) = self.running(id) else {
            return self.conclude(id, None).await;
        };
        let _ = running.process.readable().await;
        // Reaps the process if it is a child of this one, which it is not after a restart of the node.
        let _ = rustix::process::waitid(
            WaitId::PidFd(std::os::fd::AsFd::as_fd(running.process.get_ref())),
            WaitIdOptions::EXITED | WaitIdOptions::NOHANG,
        );
        let termination = self.conclude(id, Some(&running.record)).await;
        self.forget(id);
        termination
    }

    async fn signal(&self, id: &ContainerId, signal: i32) -> Result<(), RuntimeError> {
        if self.running(id).is_none() {
            return Ok(());
        }
        self.must_answer(id)?;
        match agent::signal_command(&self.container_directory(id), signal).await {
            // The container ended in the meantime: there is nothing left to signal.
            Err(agent::AgentError::Connect(_) | agent::AgentError::Gone) => Ok(()),
            other => Ok(other?),
        }
    }

    async fn kill(&self, id: &ContainerId) -> Result<(), RuntimeError> {
        if let Some(running) = self.running(id) {
            let _ = rustix::process::pidfd_send_signal(running.process.get_ref(), Signal::KILL);
            let group = &running.record.group;
            self.cgroups.kill(&group.parent, &group.name);
        }
        let starting = self.with_starting(|starting| starting.get(id).cloned());
        starting.iter().for_each(CancellationToken::cancel);
        Ok(())
    }

    async fn exec(&self, id: &ContainerId, request: ExecRequest) -> Result<Session, RuntimeError> {
        self.must_answer(id)?;
        Ok(agent::exec(&self.container_directory(id), &request).await?)
    }

    async fn attach(&self, id: &ContainerId, stdin: bool) -> Result<Session, RuntimeError> {
        self.must_answer(id)?;
        Ok(agent::attach(&self.container_directory(id), stdin).await?)
    }

    fn log_path(&self, id: &ContainerId) -> PathBuf {
        Self::log_path(self, id)
    }

    fn has_ended(&self, id: &ContainerId) -> bool {
        Self::has_ended(self, id)
    }

    async fn connect_to_port(
        &self,
        pod: &str,
        port: u16,
    ) -> Result<io::Result<std::net::TcpStream>, RuntimeError> {
        Ok(namespaces::connect_inside(&self.network_of(pod)?, port).await?)
    }

    async fn connect_from(
        &self,
        pod: &str,
        target: SocketAddr,
    ) -> Result<io::Result<tokio::net::TcpStream>, RuntimeError> {
        Ok(namespaces::connect_from(&self.network_of(pod)?, target).await?)
    }

    fn cpu_periods(&self, id: &ContainerId) -> Option<Periods> {
        let group = self.running(id)?.record.group;
        self.cgroups.cpu_periods(&group.parent, &group.name)
    }

    fn cannot_freeze(&self) -> Option<String> {
        self.why_not_freeze()
    }

    async fn freeze(&self, pod: &str) -> Result<(), RuntimeError> {
        self.freeze_pod(pod).await
    }

    async fn page_out(&self, pod: &str) -> Option<String> {
        self.page_out_pod(pod).await
    }

    async fn thaw(&self, pod: &str) -> Result<(), RuntimeError> {
        self.thaw_pod(pod).await
    }

    fn is_frozen(&self, pod: &str) -> bool {
        self.frozen.contains(pod)
    }

    async fn stop_sandbox(&self, pod: &str) -> Result<(), RuntimeError> {
        self.forget_frozen(pod);
        self.end_pid_namespace_holder(pod).await;
        // Also for a pod without a record.
        let (groups, uid) = (self.cgroups.clone(), pod.to_owned());
        blocking(move || Ok(groups.remove_pod(&uid)?)).await?;
        let Some(mut record) = self.sandbox_record(pod) else {
            return Ok(());
        };
        if let Some(slot) = record.slot.take() {
            // The record is updated before the number is freed: two pods never have the same slot, even after a crash.
            self.slots.tear_down(slot).await?;
            write_record(&self.pod_directory(pod), &record)?;
            self.slots.free_number(slot);
        }
        Ok(())
    }

    async fn remove_sandbox(&self, pod: &str) -> Result<(), RuntimeError> {
        self.stop_sandbox(pod).await?;
        let directory = self.pod_directory(pod);
        blocking(move || match directory_tree::remove(&directory) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => {
                Err(failure("to remove a pod")(error))
            }
            _ => Ok(()),
        })
        .await
    }

    async fn recover(&self) -> Result<Vec<RecoveredPod>, RuntimeError> {
        self.recover_pods().await
    }

    fn processes(&self, pod: &str) -> Vec<ContainerProcesses> {
        let of_group = |(id, group): (ContainerId, Group)| {
            let processes = self.cgroups.processes(&group.parent, &group.name);
            ContainerProcesses {
                container: id.container,
                processes,
            }
        };
        self.groups_of(pod).into_iter().map(of_group).collect()
    }

    fn cpu_time_us(&self, pod: &str) -> Option<u64> {
        let groups = self.groups_of(pod).into_iter();
        groups
            .map(|(_, group)| self.cgroups.cpu_time_us(&group.parent, &group.name))
            .sum()
    }

    async fn recover_pod(&self, pod: &str) -> Result<Option<RecoveredPod>, RuntimeError> {
        self.recover_one(pod).await
    }

    async fn sweep(&self) -> Vec<String> {
        self.sweep_groups().await
    }
}

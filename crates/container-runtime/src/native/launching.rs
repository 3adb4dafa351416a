//! Translates the specification of a container into a request to the shim.

use std::fmt::Write;
use std::fs;
use std::io;
use std::net::IpAddr;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

use shim_protocol::{
    BindSource, ContainerFiles, Launch, Layer, Mount, MountKind, Outside, Process, ResourceLimit,
    RootFilesystem,
};
use tokio_util::sync::CancellationToken;

use super::image_root::{self, ImageRoot};
use super::records::ContainerRecord;
use super::starting::Start;
use super::{NativeRuntime, SHARED_MEMORY_BYTES, failure};
use crate::handlers::Driver;
use crate::{ContainerSpec, ImageSource, PodSandboxSpec, RuntimeError, StartError, oci_spec};

/// Files of `/proc` that show the machine rather than the container.
const MASKED: [&str; 13] = [
    "/proc/acpi",
    "/proc/asound",
    "/proc/interrupts",
    "/proc/kcore",
    "/proc/keys",
    "/proc/key-users",
    "/proc/kmsg",
    "/proc/latency_stats",
    "/proc/sched_debug",
    "/proc/scsi",
    "/proc/slabinfo",
    "/proc/timer_list",
    "/proc/timer_stats",
];
const READ_ONLY: [&str; 5] = [
    "/proc/bus",
    "/proc/fs",
    "/proc/irq",
    "/proc/sys",
    "/proc/sysrq-trigger",
];

/// The visible part of `/sys`: programs read the number of CPUs here.
const SHOWN_OF_SYS: [&str; 1] = ["/sys/devices/system/cpu"];

/// Files of `/etc` that come from the pod and not from its image.
const ETC_FILES: [&str; 3] = ["hosts", "hostname", "resolv.conf"];

/// The directory of the bundles of other runtimes, each in its own mount namespace.
const OUTSIDE_STAGE: &str = "/run/agent-sandbox/stage";

impl NativeRuntime {
    /// Starts a container, until `given_up` is cancelled.
    pub(super) async fn launch(
        &self,
        spec: ContainerSpec,
        given_up: CancellationToken,
    ) -> Result<ContainerRecord, StartError> {
        let pod = &spec.id.pod;
        let sandbox = self
            .sandbox_record(pod)
            .ok_or_else(|| RuntimeError::NoSandbox(pod.clone()))?;
        let root = self.image_root(&spec)?;
        let slot = sandbox
            .slot
            .ok_or_else(|| RuntimeError::NoSandbox(pod.clone()))?;
        let image_id = root.id.clone();
        let mut launch = self.request(&spec, &sandbox.spec, slot, root);
        if let Some(driver) = sandbox.spec.driver {
            launch.outside = Some(outside(&mut launch, &spec, driver)?);
        } else {
            launch.pid_namespace = self
                .pid_namespace(&spec, sandbox.spec.shared_processes)
                .await?;
        }
        let stored = match &spec.image {
            ImageSource::Host | ImageSource::Nothing => None,
            ImageSource::Stored { image, .. } => Some(image.clone()),
        };
        let start = Start {
            groups: self.cgroups.clone(),
            shim: self.programs.shim.clone(),
            images: self.images.clone(),
            stored,
            waiting: self.slots.take_launcher(slot),
            slot,
            pins: self.slots.pins(slot),
            deadline: self.config.launch_deadline,
            given_up,
            image_id,
            launch,
            spec,
        };
        let launched = tokio::task::spawn_blocking(move || start.carry_out()).await;
        launched.map_err(|error| RuntimeError::Launcher(error.to_string()))?
    }

    fn image_root(&self, spec: &ContainerSpec) -> Result<ImageRoot, StartError> {
        match &spec.image {
            ImageSource::Host => image_root::of_host(&self.host, spec),
            ImageSource::Nothing => image_root::of_nothing(&self.config.data_dir, spec),
            ImageSource::Stored { image, name } => {
                image_root::of_image(image, name, &self.programs.sandboxd, spec)
            }
        }
        .map_err(|error| StartError::Configuration(api::errors::chain(&error)))
    }

    fn request(
        &self,
        spec: &ContainerSpec,
        pod: &PodSandboxSpec,
        slot: u32,
        root: ImageRoot,
    ) -> Launch {
        let directory = self.container_directory(&spec.id);
        let mut environment = root.environment;
        environment.push(("HOSTNAME".to_owned(), pod.hostname.clone()));
        for (key, value) in &spec.environment {
            environment.retain(|(existing, _)| existing != key);
            environment.push((key.clone(), value.clone()));
        }
        let shared_memory = Some(self.slots.shared_memory(slot)).filter(|path| path.exists());
        Launch {
            uid_range: self.slots.uid_range(slot),
            hostname: pod.hostname.clone(),
            pid_namespace: None,
            stage: self.run.join("stage"),
            hide: self.run.clone(),
            root: RootFilesystem {
                layers: root.layers.into_iter().map(|path| Layer { path }).collect(),
                upper: directory.join("upper"),
                work: directory.join("work"),
                read_only: spec.read_only_root,
            },
            mounts: self.mounts(spec, root.mounts, &directory),
            shared_memory,
            shared_memory_bytes: SHARED_MEMORY_BYTES,
            terminals: self.container_limits.terminals,
            masked_paths: MASKED.iter().map(PathBuf::from).collect(),
            read_only_paths: READ_ONLY.iter().map(PathBuf::from).collect(),
            seccomp_programs: self.seccomp_programs.clone(),
            agent: self.programs.shim.clone(),
            process: Process {
                arguments: root.arguments,
                environment,
                working_directory: root.working_directory,
                user: root.user,
                capabilities: spec.capabilities,
                no_new_privileges: spec.no_new_privileges,
                limits: limits(self.container_limits.open_files),
                terminal: spec.terminal,
                stdin: spec.stdin,
                stdin_once: spec.stdin_once,
                entrance: None,
            },
            files: ContainerFiles {
                log: self.log_path(&spec.id),
                exit: directory.join("exit.json"),
                directory,
            },
            outside: None,
        }
    }

    fn mounts(&self, spec: &ContainerSpec, of_image: Vec<Mount>, directory: &Path) -> Vec<Mount> {
        let mut mounts = of_image;
        mounts.push(Mount {
            target: "/sys".into(),
            kind: MountKind::Memory {
                size_bytes: 64 << 10,
                mode: 0o555,
            },
            read_only: true,
            no_exec: true,
        });
        for path in SHOWN_OF_SYS.iter().filter(|path| Path::new(path).is_dir()) {
            mounts.push(bind(Path::new(path), Path::new(path), true));
        }
        let etc = self.pod_directory(&spec.id.pod).join("etc");
        for name in ETC_FILES {
            mounts.push(bind(&etc.join(name), &Path::new("/etc").join(name), false));
        }
        mounts.push(bind(
            &directory.join("termination-log"),
            Path::new(&spec.termination_message_path),
            false,
        ));
        // Parents first, in whatever order the pod lists its mounts.
        let mut own = spec.mounts.clone();
        own.sort_by_key(|mount| mount.target.components().count());
        mounts.extend(own);
        mounts
    }
}

/// Changes a request so that another runtime creates the container.
fn outside(
    launch: &mut Launch,
    spec: &ContainerSpec,
    driver: Driver,
) -> Result<Outside, StartError> {
    let program = driver.find().ok_or_else(|| {
        StartError::Configuration(format!("{} is not installed any more", driver.program()))
    })?;
    // Outside of the node's own directories, which the pod's UIDs cannot enter.
    launch.stage = PathBuf::from(OUTSIDE_STAGE);
    fs::create_dir_all(&launch.stage).map_err(failure("the stage of other runtimes"))?;
    for path in launch.stage.ancestors().take(2) {
        fs::set_permissions(path, fs::Permissions::from_mode(0o755))
            .map_err(failure("the stage of other runtimes"))?;
    }
    // The other runtime installs its own filter in the container. It needs more system calls itself than a container may use.
    launch.seccomp_programs.clear();
    let mut volumes: Vec<PathBuf> = ETC_FILES
        .iter()
        .map(|name| Path::new("/etc").join(name))
        .collect();
    volumes.push(spec.termination_message_path.clone().into());
    volumes.extend(spec.mounts.iter().map(|mount| mount.target.clone()));
    let identifier = pod_network::names::short_hash(spec.id.uri(), 8);
    Ok(oci_spec::outside(
        launch, driver, &program, identifier, volumes,
    ))
}

pub(super) fn bind(source: &Path, target: &Path, read_only: bool) -> Mount {
    Mount {
        target: target.to_owned(),
        kind: MountKind::Bind(BindSource {
            path: source.to_owned(),
            sub_path: None,
            create_sub_path: false,
            id_mapped: false,
            recursive: false,
        }),
        read_only,
        no_exec: false,
    }
}

/// A read-only mount whose watches (`inotify`) and locks (`flock`) do not affect other containers or the host.
pub(crate) fn view(source: &Path, target: &Path) -> Mount {
    Mount {
        target: target.to_owned(),
        kind: MountKind::View {
            path: source.to_owned(),
        },
        read_only: true,
        no_exec: false,
    }
}

fn limits(open_files: u64) -> Vec<ResourceLimit> {
    let limit = |resource: u32, value: u64| ResourceLimit {
        resource,
        soft: value,
        hard: value,
    };
    vec![
        limit(libc::RLIMIT_NOFILE, open_files),
        limit(libc::RLIMIT_CORE, 0),
    ]
}

/// The start time of a process, in ticks since boot. `None` if it has ended.
pub(super) fn start_ticks(pid: i32) -> Option<u64> {
    const FIELD_AFTER_NAME: usize = 19;
    let text = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    // The name is in parentheses and may contain any character, so fields are counted after the last parenthesis.
    let (_, rest) = text.rsplit_once(')')?;
    if rest.trim_start().starts_with(['Z', 'X']) {
        return None;
    }
    rest.split_whitespace().nth(FIELD_AFTER_NAME)?.parse().ok()
}

/// Writes the files that Kubernetes manages in a pod's `/etc`.
pub(super) fn write_pod_files(
    directory: &Path,
    spec: &PodSandboxSpec,
    addresses: &[IpAddr],
) -> io::Result<()> {
    let mut hosts = "127.0.0.1\tlocalhost\n::1\tlocalhost ip6-localhost ip6-loopback\n".to_owned();
    let own = spec
        .fully_qualified_name
        .as_ref()
        .map_or_else(String::new, |name| format!("{name}\t"));
    for address in addresses {
        let _ = writeln!(hosts, "{address}\t{own}{}", spec.hostname);
    }
    for (address, names) in &spec.host_aliases {
        let _ = writeln!(hosts, "{address}\t{}", names.join("\t"));
    }
    let etc = directory.join("etc");
    fs::create_dir_all(&etc)?;
    for (name, content) in [
        ("hosts", hosts),
        ("hostname", format!("{}\n", spec.hostname)),
        ("resolv.conf", spec.resolver.clone()),
    ] {
        let path = etc.join(name);
        fs::write(&path, content)?;
        fs::set_permissions(&path, fs::Permissions::from_mode(0o644))?;
    }
    Ok(())
}

//! Starts and stops a node: recovers its pods, registers its Node object, and runs its tasks.

use std::sync::Arc;
use std::time::Duration;

use kube::Client;
use telemetry::panics::restarting;
use tokio::sync::watch;
use tokio::task::{JoinHandle, JoinSet};
use tokio_util::sync::CancellationToken;

use crate::clock::SystemClock;
use crate::config::{Config, image_directory};
use crate::dispatcher::Dispatcher;
use crate::environment::Surroundings;
use crate::eviction::Evictions;
use crate::image_report;
use crate::kubelet;
use crate::network::enforcer::{Enforcer, NotEnforced};
use crate::network::resolver::Resolver;
use crate::pod_images::PodImages;
use crate::pod_worker::Shared;
use crate::registration::{self, Description, Machine};
use crate::runtime::handlers::{self, Finding, Handlers};
use crate::runtime::native::{LostLink, NativeRuntime};
use crate::runtime::{PodIdentity, RecoveredPod, Runtime, RuntimeError};
use crate::volumes::Volumes;
use api::errors::chain;
use container_runtime::assets;
use container_runtime::cpu_fairness;
use container_runtime::privileges::{Privileges, ROOTLESS_LIMITS};
use event_recorder::{EventSink, Severity};

/// The interval of image garbage collection.
const IMAGE_CHECK: Duration = Duration::from_secs(300);

/// The interval at which the sizes of logs are checked.
const LOG_CHECK: Duration = Duration::from_secs(1);

#[derive(Debug, thiserror::Error)]
pub enum StartError {
    #[error("the node needs to run as root: it makes namespaces, mounts and network links")]
    NotRoot,
    #[error("preparing the data directory {path}")]
    DataDirectory {
        path: String,
        #[source]
        source: std::io::Error,
    },
    #[error("opening the image store")]
    Images(#[from] images::OpenError),
    #[error("opening the container runtime")]
    Runtime(#[from] RuntimeError),
    #[error(transparent)]
    Registration(#[from] registration::RegistrationError),
    #[error("serving logs, exec and port-forward")]
    Kubelet(#[from] kubelet::KubeletError),
}

/// A running node.
#[derive(Debug)]
pub struct Node {
    task: JoinHandle<()>,
    failed: CancellationToken,
    runtime: Arc<NativeRuntime>,
    volumes: Volumes,
}

impl Node {
    /// Starts a node. When this returns, the node is registered and serves the pods bound to it, until `shutdown`.
    ///
    /// # Guarantees
    /// Pods that run when the node stops keep running, and are found again by the next start with the same data
    /// directory.
    pub async fn start(
        config: Config,
        client: Client,
        shutdown: CancellationToken,
    ) -> Result<Self, StartError> {
        let privileges = Privileges::current();
        match privileges {
            Privileges::Root => {}
            Privileges::Rootless => tracing::warn!("{ROOTLESS_LIMITS}"),
            Privileges::None => return Err(StartError::NotRoot),
        }
        let mut config = config;
        prepare_data_dir(&mut config).map_err(|source| StartError::DataDirectory {
            path: config.data_dir.display().to_string(),
            source,
        })?;
        let io = |source| StartError::DataDirectory {
            path: config.data_dir.display().to_string(),
            source,
        };
        let machine = Machine::measure(&config);
        // One container must not exhaust the machine's memory.
        config.default_memory_limit = config
            .default_memory_limit
            .or(Some(machine.memory_bytes / 4 * 3));
        let programs = assets::unpack(&config.data_dir.join("bin")).map_err(io)?;
        let images = Arc::new(images::Images::open(images::Settings {
            plain_registries: config.plain_registries.clone(),
            destinations: images::Destinations::Elsewhere {
                allowed: [&config.allowed_registries[..], &config.plain_registries].concat(),
            },
            ..images::Settings::new(image_directory(&config.data_dir))
        })?);
        let runtime =
            Arc::new(NativeRuntime::open(config.runtime(), programs, images.clone()).await?);
        let pods = runtime.network().layout().ranges();
        images.keep_from(move |address| pods.iter().any(|block| block.contains(address)));
        let volumes =
            Volumes::open(&config.data_dir, config.allow_host_path, client.clone()).map_err(io)?;
        let recovered = runtime.recover().await?;
        let resolver = open_resolver(&mut config, &runtime).await;
        let listening = match &config.kubelet {
            Some(endpoint) => Some(kubelet::listen(endpoint).await?),
            None => None,
        };
        let mut description = describe(&config, &runtime, machine);
        if let Some(listening) = &listening {
            description.address = listening.address.ip().to_string();
            description.kubelet_port = listening.address.port();
        }
        let enforcer = Arc::new(enforcer(&config, &runtime));
        let evictions = Evictions::default();
        let health = registration::Health {
            enforcement: enforcer.enforcement(),
            pressure: evictions.pressure(),
        };
        let object = registration::register(&client, &description, &health).await?;
        let events = EventSink::new(client.clone(), "kubelet", &config.node_name);
        let (handlers, probed) = Handlers::unprobed();
        let shared = Arc::new(Shared {
            clock: Arc::new(SystemClock),
            runtime: runtime.clone(),
            handlers,
            images: PodImages {
                images,
                client: client.clone(),
                events: events.clone(),
            },
            client: client.clone(),
            events,
            volumes: volumes.clone(),
            enforcer,
            evictions,
            plain_patches: std::sync::atomic::AtomicBool::new(false),
            surroundings: Surroundings {
                pod_addresses: Vec::new(),
                node_address: runtime.node_address().to_string(),
                allocatable_cpu_milli: machine.cpus * 1000,
                allocatable_memory: machine.memory_bytes,
            },
            config,
        });
        let failed = CancellationToken::new();
        let task = tokio::spawn(serve(
            shared,
            recovered,
            object,
            description,
            Serving {
                health,
                probed,
                listening,
                resolver,
                failed: failed.clone(),
            },
            // A panic in one of the tasks stops the node, but not the process.
            shutdown.child_token(),
        ));
        Ok(Self {
            task,
            failed,
            runtime,
            volumes,
        })
    }

    /// The runtime, for exec, attach, logs and port-forward.
    pub fn runtime(&self) -> &Arc<NativeRuntime> {
        &self.runtime
    }

    /// Completes when a task of the node has panicked, which stops the node.
    pub fn failed(&self) -> impl Future<Output = ()> + Send + use<> {
        self.failed.clone().cancelled_owned()
    }

    /// Waits until the node has stopped. Its pods continue, and another process may become the node.
    pub async fn join(self) {
        if let Err(error) = self.task.await {
            tracing::error!(%error, "the node's task failed");
        }
        self.runtime.unlock_ranges();
    }

    /// Stops the node permanently: after every pod was removed, removes everything of the node from the machine.
    pub async fn dismantle(self) -> Result<(), RuntimeError> {
        let _ = self.task.await;
        self.volumes.dismantle();
        self.runtime.dismantle().await
    }
}

fn prepare_data_dir(config: &mut Config) -> std::io::Result<()> {
    use std::os::unix::fs::PermissionsExt;
    std::fs::create_dir_all(&config.data_dir)?;
    config.data_dir = config.data_dir.canonicalize()?;
    // Volumes of claims may contain set-user-ID files of containers, which no other user of the machine may execute.
    std::fs::set_permissions(&config.data_dir, std::fs::Permissions::from_mode(0o700))
}

fn enforcer(config: &Config, runtime: &NativeRuntime) -> Enforcer {
    let layout = runtime.network().layout();
    let works = match &runtime.shortcomings().firewall {
        None => Ok(0),
        Some(cause) => Err(NotEnforced::Firewall {
            cause: cause.clone(),
        }),
    };
    Enforcer::new(
        config.node_name.clone(),
        layout
            .surroundings(config.firewall_program.clone())
            .reached_by(config.local_users.clone()),
        config.unselected_pods,
        works,
    )
}

fn describe(config: &Config, runtime: &NativeRuntime, machine: Machine) -> Description {
    let shortcomings = runtime.shortcomings();
    let mut problems = Vec::new();
    if let Some(reason) = &shortcomings.firewall {
        problems.push(format!(
            "pods can only respond to the node, because network policies cannot be enforced: {reason}"
        ));
    }
    let without_ipv6 = runtime.network().layout().without_ipv6();
    if let Some(reason) = without_ipv6 {
        tracing::info!(%reason, "pods get no IPv6 addresses");
    }
    if !shortcomings.controllers.is_empty() && Privileges::current() == Privileges::Root {
        problems.push(format!(
            "limits are not enforced for lack of controllers: {}",
            shortcomings.controllers.join(", ")
        ));
    }
    for problem in &problems {
        tracing::warn!("{problem}");
    }
    Description {
        name: config.node_name.clone(),
        labels: config.node_labels.clone(),
        taints: config.node_taints.clone(),
        address: runtime.node_address().to_string(),
        pod_range: runtime.pod_network().to_string(),
        kubelet_port: 0,
        maximum_pods: config.maximum_pods,
        machine,
        problems,
        without_ipv6: without_ipv6.map(|reason| reason.to_string()),
        rootless: Privileges::current() == Privileges::Rootless,
    }
}

/// The node's listeners, and the senders of what it finds out.
struct Serving {
    health: registration::Health,
    probed: watch::Sender<Option<Arc<Vec<Finding>>>>,
    listening: Option<kubelet::Listening>,
    resolver: Option<Resolver>,
    failed: CancellationToken,
}

/// Opens the cluster's DNS for pods, unless another is configured. If that fails, pods use the machine's resolvers.
async fn open_resolver(config: &mut Config, runtime: &NativeRuntime) -> Option<Resolver> {
    if !config.name_servers.is_empty() {
        return None;
    }
    let addresses = runtime.network().layout().node_addresses();
    let file = std::fs::read_to_string(&config.resolver_file).unwrap_or_default();
    match Resolver::bind(&addresses, &config.cluster_domain, &file).await {
        Ok(resolver) => {
            config.name_servers = addresses
                .first()
                .map(ToString::to_string)
                .into_iter()
                .collect();
            Some(resolver)
        }
        Err(error) => {
            tracing::warn!(error = %chain(&error), "pods have no cluster DNS and ask the machine's resolvers");
            None
        }
    }
}

async fn serve(
    shared: Arc<Shared<NativeRuntime>>,
    recovered: Vec<RecoveredPod>,
    object: k8s_openapi::api::core::v1::Node,
    description: Description,
    serving: Serving,
    shutdown: CancellationToken,
) {
    let mut tasks = JoinSet::new();
    let (failed, stop_all) = (serving.failed, shutdown.clone());
    spawn_upkeep(&mut tasks, &shared, &shutdown);
    tasks.spawn(probe_handlers(
        shared.clone(),
        serving.probed,
        shutdown.clone(),
    ));
    tasks.spawn(registration::heartbeat(
        shared.client.clone(),
        object,
        description,
        serving.health,
        shutdown.clone(),
    ));
    // Runs until the last pod is removed: a pod's address is free only when no rule names it.
    let (enforcer, client) = (shared.enforcer.clone(), shared.client.clone());
    let without_pods = CancellationToken::new();
    tasks.spawn(enforcer.run(client, without_pods.clone()));
    let until_all_are_cleared = without_pods.drop_guard();
    if let Some(resolver) = serving.resolver {
        tasks.spawn(resolver.run(shared.client.clone(), shutdown.clone()));
    }
    if let Some(listening) = serving.listening {
        tasks.spawn(listening.serve(
            shared.runtime.clone(),
            shared.client.clone(),
            shared.config.node_name.clone(),
            shutdown.clone(),
        ));
    }
    let runtime = shared.runtime.clone();
    let dispatcher = Dispatcher::new(shared, recovered);
    tasks.spawn(async move {
        dispatcher.run(shutdown).await;
        drop(until_all_are_cleared);
    });
    while let Some(ended) = tasks.join_next().await {
        // Without one of these tasks (heartbeat, dispatcher and others) the node would fail silently, so the node stops.
        if let Err(panicked) = ended
            && panicked.is_panic()
        {
            let panic = panicked.into_panic();
            let panic = telemetry::panics::message(&*panic);
            tracing::error!(
                panic,
                "a part of the node panicked, so the node stops; this is a bug, please report it"
            );
            failed.cancel();
            stop_all.cancel();
        }
    }
    // Without root, the pods' namespaces end with this process.
    if Privileges::current() == Privileges::Rootless {
        runtime.kill_everything();
    }
}

/// What a node does for the machine beside its pods: slots, logs, links, CPU time, disk space and images.
fn spawn_upkeep(
    tasks: &mut JoinSet<()>,
    shared: &Arc<Shared<NativeRuntime>>,
    shutdown: &CancellationToken,
) {
    let runtime = shared.runtime.clone();
    let stop = shutdown.clone();
    tasks.spawn(async move { runtime.keep_slots_ready(stop).await });
    let (runtime, stop) = (shared.runtime.clone(), shutdown.clone());
    tasks.spawn(async move {
        while stop
            .run_until_cancelled(tokio::time::sleep(LOG_CHECK))
            .await
            .is_some()
        {
            restarting("rotating logs", || runtime.rotate_logs()).await;
        }
    });
    tasks.spawn(repair_network(shared.clone(), shutdown.clone()));
    let groups = shared.runtime.cgroups().clone();
    tasks.spawn(cpu_fairness::run(groups, shutdown.clone()));
    let (evicting, stop) = (shared.clone(), shutdown.clone());
    tasks.spawn(async move {
        let Shared {
            evictions,
            config,
            client,
            images,
            runtime,
            ..
        } = &*evicting;
        // It walks directory trees that pods created.
        let look = || evictions.run(config, client, &images.images, runtime, stop.clone());
        restarting("evictions", look).await;
    });
    let (collecting, stop) = (shared.clone(), shutdown.clone());
    tasks.spawn(async move {
        let collect = || collect_images(collecting.clone(), stop.clone());
        restarting("collecting images", collect).await;
    });
    tasks.spawn(image_report::run(
        shared.client.clone(),
        shared.config.node_name.clone(),
        shared.images.images.clone(),
        shutdown.clone(),
    ));
}

/// Repairs links of pods that were lost, and reports each on its pod.
async fn repair_network(shared: Arc<Shared<NativeRuntime>>, shutdown: CancellationToken) {
    let report = |lost: LostLink| {
        let PodIdentity {
            namespace,
            name,
            uid,
        } = &lost.pod;
        let (severity, reason) = (Severity::Warning, lost.reason);
        let events = &shared.events;
        events.tell_of_pod(namespace, name, uid, severity, reason, lost.note);
    };
    shared.runtime.repair_network(report, shutdown).await;
}

/// Tries the other runtimes, and reports in the Node's status which work.
async fn probe_handlers(
    shared: Arc<Shared<NativeRuntime>>,
    probed: watch::Sender<Option<Arc<Vec<Finding>>>>,
    shutdown: CancellationToken,
) {
    if shutdown
        .run_until_cancelled(shared.handlers.due())
        .await
        .is_none()
    {
        return;
    }
    let runtime = &*shared.runtime;
    let drivers = &shared.config.runtime_drivers;
    let findings = handlers::probe(runtime, drivers, &shutdown).await;
    let findings = Arc::new(findings);
    probed.send_replace(Some(findings.clone()));
    let name = &shared.config.node_name;
    if let Err(error) = registration::report_handlers(&shared.client, name, &findings).await {
        tracing::warn!(error = %chain(&error), "cannot report the node's runtime handlers");
    }
}

/// Removes unused images when the disk is too full.
async fn collect_images(shared: Arc<Shared<NativeRuntime>>, shutdown: CancellationToken) {
    let limits = images::DiskUse {
        high_percent: shared.config.image_high_percent,
        low_percent: shared.config.image_low_percent,
        minimum_age: shared.config.image_minimum_age,
    };
    while shutdown
        .run_until_cancelled(tokio::time::sleep(IMAGE_CHECK))
        .await
        .is_some()
    {
        let images = shared.images.images.clone();
        let collected = tokio::task::spawn_blocking(move || images.collect(limits)).await;
        match collected {
            Ok(Ok(removed)) if removed.images.is_empty() => {}
            Ok(Ok(removed)) => {
                tracing::info!(images = ?removed.images, bytes = removed.bytes, "removed images to free disk space");
            }
            // An image is being pulled: tries again later.
            Ok(Err(images::StoreError::Busy)) | Err(_) => {}
            Ok(Err(error)) => {
                tracing::warn!(error = %chain(&error), "cannot remove images");
            }
        }
    }
}

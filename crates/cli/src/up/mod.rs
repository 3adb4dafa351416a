//! `agent-sandbox up`: the whole system in one process.
//!
//! The parts are started in the order in which they need each other, each with an in-process client of the API server, and
//! stopped in the reverse order. Nothing here decides anything about sandboxes.

mod command;
mod first_observed;
mod installation;
mod metrics;
mod operating_mode;
mod parts;
mod quickstart;
mod router_access;
mod router_flags;
mod router_service;
mod runtime_flags;

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use anyhow::Context;
use api::decoding::Decoded;
use controllers::metrics::Metrics;
use k8s_openapi::api::core::v1::Pod;
use k8s_openapi::jiff::Timestamp;
use kube::api::ListParams;
use kube::core::PartialObjectMeta;
use kube::{Api, ResourceExt};
use router::socket_owners::SocketOwners;
use tokio::net::TcpListener;
use tokio::sync::oneshot;
use tokio::task::JoinSet;
use tokio_util::sync::CancellationToken;

use first_observed::StampFirstObserved;
use operating_mode::DefaultOperatingMode;
use quickstart::Enforcement;

pub use command::{Arguments, START_AFTER_STOP, execute};
pub use parts::{Part, PartFlags};
pub use quickstart::{Quickstart, TEMPLATE as QUICKSTART_TEMPLATE};
pub use router_access::token_key;

use crate::build_info::BUILD;
use crate::data_directory::{self, Running};
use crate::node_flags::NodeFlags;
use crate::{open_files, rootless, sandboxes};
use router_access::RouterAccess;
use router_flags::RouterFlags;
use router_service::RouterService;
use runtime_flags::RuntimeFlags;

/// The flags that say where to listen.
const API_LISTEN: &str = "--api-listen";
const ROUTER_LISTEN: &str = "--router-listen";
const ROUTER_HTTPS_LISTEN: &str = "--router-https-listen";
const METRICS_LISTEN: &str = "--metrics-bind-address";

/// The name of the one node.
const NODE_NAME: &str = "agent-sandbox";

/// How long sandboxes may take to stop when the system is to leave nothing running.
const STOP_SANDBOXES_DEADLINE: Duration = Duration::from_secs(30);

/// What `up` runs with. A port of 0 picks a free one.
#[derive(Debug)]
pub struct Options {
    pub data_directory: PathBuf,
    pub api_listen: SocketAddr,
    pub router_listen: SocketAddr,
    pub router_access: RouterAccess,
    pub router: RouterFlags,
    /// The domains below which the router finds sandboxes by host name.
    pub host_domains: Vec<String>,
    pub metrics_listen: SocketAddr,
    pub audit: Option<apiserver::audit::Options>,
    /// Installed where the controllers and the node run: without them its sandboxes would never start.
    pub quickstart: Quickstart,
    pub runtime: RuntimeFlags,
    pub parts: PartFlags,
    pub node: NodeFlags,
    /// Another file that is written once everything serves, beside the one in the data directory.
    pub ready_file: Option<PathBuf>,
}

impl Options {
    /// A system on free ports of this machine, with nothing in it.
    pub fn new(data_directory: impl Into<PathBuf>) -> Self {
        let any_port = SocketAddr::new(Ipv4Addr::LOCALHOST.into(), 0);
        Self {
            data_directory: data_directory.into(),
            api_listen: any_port,
            router_listen: any_port,
            router_access: RouterAccess::default(),
            router: RouterFlags::default(),
            host_domains: Vec::new(),
            metrics_listen: any_port,
            audit: None,
            quickstart: Quickstart::Nothing,
            runtime: RuntimeFlags::default(),
            parts: PartFlags::default(),
            node: NodeFlags::default(),
            ready_file: None,
        }
    }
}

/// A running system.
pub struct Up {
    running: Running,
    /// The files that report the addresses.
    ready_files: Vec<PathBuf>,
    data_directory: PathBuf,
    server: Arc<apiserver::Server>,
    client: kube::Client,
    shutdown: CancellationToken,
    node: Option<node::Node>,
    parts: JoinSet<anyhow::Result<()>>,
}

/// The sockets that the parts serve on. They are bound before a part starts, so that a port in use is an early error.
struct Listeners {
    api: TcpListener,
    router: Option<TcpListener>,
    router_https: Option<TcpListener>,
    metrics: TcpListener,
}

impl Listeners {
    async fn bind(options: &Options) -> anyhow::Result<Self> {
        let has_router = options.parts.runs(Part::Router);
        let api = listen(API_LISTEN, options.api_listen).await?;
        let router = if has_router {
            Some(listen(ROUTER_LISTEN, options.router_listen).await?)
        } else {
            None
        };
        let router_https = if has_router && options.router.has_https() {
            Some(listen(ROUTER_HTTPS_LISTEN, options.router.router_https_listen).await?)
        } else {
            None
        };
        let metrics = listen(METRICS_LISTEN, options.metrics_listen).await?;
        Ok(Self {
            api,
            router,
            router_https,
            metrics,
        })
    }
}

fn address_of(listener: Option<&TcpListener>) -> std::io::Result<Option<SocketAddr>> {
    listener.map(TcpListener::local_addr).transpose()
}

impl Up {
    /// Starts every part and returns when all of them serve. Pools may still be filling.
    pub async fn start(options: Options) -> anyhow::Result<Self> {
        open_files::require()?;
        let data_directory = options.data_directory.clone();
        data_directory::create(&data_directory)?;
        let listeners = Listeners::bind(&options).await?;
        let parts = options.parts;
        let router_address = address_of(listeners.router.as_ref())?;
        let quickstart = if parts.runs(Part::Controllers) && parts.runs(Part::Node) {
            options.quickstart
        } else {
            Quickstart::Nothing
        };
        let running = Running {
            kubeconfig: data_directory.join("kubeconfig"),
            api_server: format!("https://{}", listeners.api.local_addr()?),
            router: router_address.map(|address| format!("http://{address}")),
            router_https: address_of(listeners.router_https.as_ref())?
                .map(|address| format!("https://{address}")),
            metrics: format!("http://{}", listeners.metrics.local_addr()?),
            namespace: quickstart::NAMESPACE.to_owned(),
            template: quickstart.template(),
            warm_pool: quickstart.warm_pool(),
            disabled: parts.disabled(),
            pid: std::process::id(),
        };
        let server = apiserver::Server::open(apiserver::Config {
            admission: vec![
                StampFirstObserved::hook(Timestamp::now),
                DefaultOperatingMode::hook(),
            ],
            audit: options.audit,
            ..apiserver::Config::new(&data_directory)
        })
        .await?;
        server
            .write_kubeconfig(&running.kubeconfig, &running.api_server)
            .context("cannot write the kubeconfig")?;

        let mut up = Self {
            client: server.client(),
            running,
            ready_files: [data_directory::running_file(&data_directory)]
                .into_iter()
                .chain(options.ready_file)
                .collect(),
            data_directory,
            server: Arc::new(server),
            shutdown: CancellationToken::new(),
            node: None,
            parts: JoinSet::new(),
        };
        // A killed process leaves its files behind. They may be removed only now that the directory is locked.
        up.remove_ready_files()?;
        up.serve_api(listeners.api);
        installation::install(&up.client).await?;
        let controllers = if parts.runs(Part::Controllers) {
            Some(up.start_controllers().await?)
        } else {
            None
        };
        let local_users = router_access::local_users()?;
        let authorization = options.router_access.mode(
            &up.data_directory,
            &local_users,
            &options.router.proxy.0,
        )?;
        let router_config = options.router.config(options.host_domains, authorization)?;
        if parts.runs(Part::Node) {
            up.start_node(router_address, options.node, local_users)
                .await?;
        }
        up.start_companions(&parts)?;
        let proxy = match listeners.router {
            Some(listener) => {
                Some(up.start_router(listener, listeners.router_https, router_config)?)
            }
            None => None,
        };
        if let (Some(proxy), Some(address)) = (&proxy, router_address) {
            up.announce_router(proxy, address).await?;
        }
        up.serve_metrics(listeners.metrics, metrics::routes(controllers, proxy));
        let enforcement = match up.unenforced_policies() {
            None => Enforcement::Works,
            Some(_) => Enforcement::Missing,
        };
        quickstart::install(&up.client, quickstart, enforcement, &options.runtime).await?;
        for file in &up.ready_files {
            up.running.write(file)?;
        }
        Ok(up)
    }

    /// Where the parts serve.
    pub fn running(&self) -> &Running {
        &self.running
    }

    /// A client of the API server that needs no socket.
    pub fn client(&self) -> kube::Client {
        self.client.clone()
    }

    /// Why network policies cannot be enforced here, if they cannot. Pods that one selects then do not start.
    pub fn unenforced_policies(&self) -> Option<&str> {
        let shortcomings = self.node.as_ref()?.runtime().shortcomings();
        shortcomings.firewall.as_deref()
    }

    /// Waits until a part fails. Parts run until `shutdown`, so an earlier end of any kind is a failure.
    pub async fn failed(&mut self) -> anyhow::Error {
        match self.parts.join_next().await {
            Some(Ok(Err(error))) => error,
            Some(Ok(Ok(()))) => anyhow::anyhow!("a part stopped by itself"),
            Some(Err(panicked)) => panicked.into(),
            None => anyhow::anyhow!("no part is running"),
        }
    }

    /// Stops every part. Sandboxes keep running, and the next start finds them again; without sandboxes, the node removes
    /// its cgroups, mounts and links.
    pub async fn stop(mut self) -> anyhow::Result<()> {
        let removed = self.remove_ready_files();
        let pods: Api<Decoded<PartialObjectMeta<Pod>>> = Api::all(self.client());
        let idle = pods
            .list(&ListParams::default())
            .await
            .is_ok_and(|pods| pods.items.iter().all(is_mirror));
        let stopped = self.stop_parts().await;
        if let Some(node) = self.node.take() {
            if idle {
                node.dismantle().await?;
            } else {
                node.join().await;
            }
        }
        if let Some(server) = Arc::into_inner(self.server) {
            server.shutdown().await;
        }
        stopped.and(removed)
    }

    /// Deletes every sandbox, then stops every part.
    pub async fn stop_with_sandboxes(self) -> anyhow::Result<()> {
        let deletion = sandboxes::delete_everything(&self.client, None, true);
        let deleted = tokio::time::timeout(STOP_SANDBOXES_DEADLINE, deletion).await;
        self.stop().await?;
        deleted.context("sandboxes are still running after the deadline")??;
        Ok(())
    }

    async fn stop_parts(&mut self) -> anyhow::Result<()> {
        self.shutdown.cancel();
        let mut result = Ok(());
        while let Some(part) = self.parts.join_next().await {
            result = result.and(part.map_err(anyhow::Error::from).flatten());
        }
        result
    }

    fn remove_ready_files(&self) -> anyhow::Result<()> {
        for path in &self.ready_files {
            match std::fs::remove_file(path) {
                Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
                    return Err(error).with_context(|| {
                        format!("cannot remove the ready file {}", path.display())
                    });
                }
                _ => {}
            }
        }
        Ok(())
    }

    fn serve_api(&mut self, listener: TcpListener) {
        let server = Arc::clone(&self.server);
        let shutdown = self.shutdown.clone();
        self.parts.spawn(async move {
            server
                .serve(listener, shutdown)
                .await
                .context("the API server failed")
        });
    }

    async fn start_controllers(&mut self) -> anyhow::Result<Arc<Metrics>> {
        let metrics = Arc::new(Metrics::new("embedded", BUILD));
        let config = controllers_config();
        controllers::check_installed(&self.client, &config).await?;
        let runtime = controllers::assemble(controllers::Parts {
            instrumentation: metrics.clone(),
            ..controllers::Parts::new(self.client(), config)
        });
        let (ready, is_ready) = oneshot::channel();
        let (shutdown, never) = (self.shutdown.clone(), CancellationToken::new());
        self.parts.spawn(async {
            // The receiver is gone if the start was cancelled.
            let synced = || ready.send(()).unwrap_or_default();
            runtime
                .run(shutdown, never, synced, std::future::ready(()))
                .await;
            Ok(())
        });
        tokio::select! {
            _ = is_ready => Ok(metrics),
            failure = self.failed() => Err(failure),
        }
    }

    async fn start_node(
        &mut self,
        router: Option<SocketAddr>,
        flags: NodeFlags,
        local_users: Vec<u32>,
    ) -> anyhow::Result<()> {
        let address = SocketAddr::new(Ipv4Addr::LOCALHOST.into(), 0);
        let certificate = self
            .server
            .issue_node_certificate(NODE_NAME, &[address.ip().to_string()])?;
        let mut config = node::Config {
            node_name: NODE_NAME.to_owned(),
            kubelet: Some(node::kubelet::Endpoint {
                address,
                authority_pem: certificate.authority_pem,
                certificate_pem: certificate.certificate_pem,
                key_pem: certificate.key_pem,
                host_services: router.map(reachable).into_iter().collect(),
            }),
            local_users: Some(local_users),
            ..node::Config::new(self.data_directory.join("node"))
        };
        flags.apply(&mut config);
        let node = node::Node::start(config, self.client(), self.shutdown.clone()).await?;
        let (failed, shutdown) = (node.failed(), self.shutdown.clone());
        self.parts.spawn(async move {
            match shutdown.run_until_cancelled(failed).await {
                Some(()) => Err(anyhow::anyhow!("a part of the node panicked")),
                None => Ok(()),
            }
        });
        self.node = Some(node);
        Ok(())
    }

    /// Starts the scheduler, the endpoints controller and the volume provisioner.
    fn start_companions(&mut self, parts: &PartFlags) -> anyhow::Result<()> {
        let (client, shutdown) = (self.client(), self.shutdown.clone());
        if parts.runs(Part::Scheduler) {
            let schedule = machine_control_plane::scheduler::run(
                client.clone(),
                NODE_NAME.to_owned(),
                shutdown.clone(),
            );
            self.run_part(schedule);
        }
        if parts.runs(Part::Endpoints) {
            self.run_part(machine_control_plane::endpoints::run(
                client.clone(),
                shutdown.clone(),
            ));
        }
        if parts.runs(Part::VolumeProvisioner) {
            // The paths of volumes are kept in the API, so they must not depend on where this process was started.
            let volumes = self.data_directory.join("node").canonicalize()?;
            self.run_part(machine_control_plane::volume_provisioner::run(
                client, volumes, shutdown,
            ));
        }
        Ok(())
    }

    /// Runs a part that ends only on `shutdown`.
    fn run_part(&mut self, part: impl Future<Output = ()> + Send + 'static) {
        self.parts.spawn(async {
            part.await;
            Ok(())
        });
    }

    /// Makes the router known to clients that look for it as they would on a cluster: by a service whose endpoint is a pod of
    /// this machine's node. Without the node there is neither.
    async fn announce_router(
        &mut self,
        proxy: &router::Router,
        address: SocketAddr,
    ) -> anyhow::Result<()> {
        let Some(node) = self.node.as_ref() else {
            return Ok(());
        };
        let node_address = node.runtime().node_address();
        self.serve_router_to_the_bridge(proxy, node_address).await;
        let service = RouterService {
            client: self.client(),
            node_name: NODE_NAME.to_owned(),
            node_address: node_address.to_string(),
            router: reachable(address),
        };
        for namespace in [api::SYSTEM_NAMESPACE, quickstart::NAMESPACE] {
            service.publish(namespace).await?;
        }
        self.run_part(service.run(self.shutdown.clone()));
        Ok(())
    }

    fn start_router(
        &mut self,
        listener: TcpListener,
        https_listener: Option<TcpListener>,
        mut config: router::Config,
    ) -> anyhow::Result<router::Router> {
        // A router that listens on the network cannot know its host names.
        let mut is_local = true;
        for listener in std::iter::once(&listener).chain(&https_listener) {
            is_local &= listener.local_addr()?.ip().is_loopback();
        }
        config.own_names = if is_local {
            router::OwnNames::Local
        } else {
            router::OwnNames::Any
        };
        let router = router::Router::new(config, Some(self.client()))?;
        let shutdown = self.shutdown.clone();
        // A listener that was opened outside of this process's own network has its clients there.
        let serving = match rootless::outside()? {
            Some(outside) => router.with_socket_owners(SocketOwners::over(outside.socket_owners)?),
            None => router.clone(),
        };
        if let Some(listener) = https_listener {
            let (serving, shutdown) = (serving.clone(), shutdown.clone());
            self.parts.spawn(async move {
                let served = serving.serve_tls(listener, shutdown).await;
                served.context("the router cannot serve HTTPS")
            });
        }
        self.parts.spawn(async move {
            serving.serve_on_threads(listener, shutdown).await;
            Ok(())
        });
        Ok(router)
    }

    /// The router's service has an endpoint, as every service does: this machine's address on the bridge, with the service's port.
    /// So the router listens there as well.
    async fn serve_router_to_the_bridge(
        &mut self,
        router: &router::Router,
        node_address: Ipv4Addr,
    ) {
        let address = SocketAddr::new(node_address.into(), router_service::PORT);
        match TcpListener::bind(address).await {
            Ok(listener) => {
                let (router, shutdown) = (router.clone(), self.shutdown.clone());
                self.run_part(async move { router.serve(listener, shutdown).await });
            }
            // Another socket listens on this port of every address: the router's own, or that of another program.
            Err(error) => {
                tracing::warn!(%address, %error, "the endpoint of the router's service is not served by the router");
            }
        }
    }

    fn serve_metrics(&mut self, listener: TcpListener, routes: axum::Router) {
        let shutdown = self.shutdown.clone().cancelled_owned();
        self.parts.spawn(async {
            let serving = axum::serve(listener, routes).with_graceful_shutdown(shutdown);
            serving.await.context("serving metrics failed")
        });
    }
}

/// Whether a pod is a mirror of a part of this process.
fn is_mirror(pod: &Decoded<PartialObjectMeta<Pod>>) -> bool {
    pod.annotations().contains_key(api::labels::MIRROR)
}

/// The address under which a listener is reached on this machine.
fn reachable(listener: SocketAddr) -> SocketAddr {
    if listener.ip().is_unspecified() {
        let loopback = match listener {
            SocketAddr::V4(_) => IpAddr::V4(Ipv4Addr::LOCALHOST),
            SocketAddr::V6(_) => IpAddr::V6(Ipv6Addr::LOCALHOST),
        };
        SocketAddr::new(loopback, listener.port())
    } else {
        listener
    }
}

fn controllers_config() -> controllers::Config {
    controllers::Config {
        extensions: true,
        kruise: true,
        ..controllers::Config::default()
    }
}

async fn listen(flag: &str, address: SocketAddr) -> anyhow::Result<TcpListener> {
    if let Some(opened) = rootless::listener(flag)? {
        return Ok(TcpListener::from_std(opened)?);
    }
    TcpListener::bind(address)
        .await
        .with_context(|| format!("cannot listen on {address}; choose another address with {flag}"))
}

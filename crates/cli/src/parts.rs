//! The commands that run one part alone, as on a cluster: controller, router, node, sandboxd.

use std::net::SocketAddr;
use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::Context;
use clap::Args;
use k8s_openapi::api::core::v1::{Pod, Taint};
use kube::api::ListParams;
use kube::{Api, Client, Config};
use tokio::signal::unix::{SignalKind, signal};
use tokio_util::sync::CancellationToken;

use crate::build_info::BUILD;
use crate::data_directory;
use crate::logging::{self, Audience, LogFlags};
use crate::node_flags::NodeFlags;
use crate::node_identity;
use crate::open_files;
use crate::up::START_AFTER_STOP;

/// Run pods that are bound to this machine's node, for any Kubernetes API
#[derive(Debug, Args)]
pub struct NodeArguments {
    /// Kubeconfig to use; otherwise KUBECONFIG, or the pod's service account
    #[arg(long, value_name = "FILE")]
    kubeconfig: Option<PathBuf>,

    /// Where to keep state [default: that of `up`, in a folder of its own]
    #[arg(long, value_name = "DIRECTORY")]
    data_dir: Option<PathBuf>,

    /// Name of the node [default: the machine's]
    #[arg(long, value_name = "NAME")]
    node_name: Option<String>,

    /// Labels of the Node besides its own, as KEY=VALUE,…; may be repeated
    #[arg(long, value_name = "LABELS", value_delimiter = ',', value_parser = node_identity::label)]
    node_labels: Vec<(String, String)>,

    /// Taints that the Node is created with, as KEY=VALUE:EFFECT,… where VALUE may be empty; may be repeated
    #[arg(long, value_name = "TAINTS", value_delimiter = ',', value_parser = node_identity::taint)]
    register_with_taints: Vec<Taint>,

    /// Also bind pods without a node to this one, where no scheduler does
    #[arg(long)]
    schedule: bool,

    /// Where to serve logs, exec, attach and port-forward to the API server [default: not at all]
    #[arg(long, value_name = "ADDRESS", requires_all = ["client_ca_file", "tls_cert_file", "tls_private_key_file"])]
    listen: Option<SocketAddr>,

    /// The authority of the API server's own client certificate
    #[arg(long, value_name = "FILE", requires = "listen")]
    client_ca_file: Option<PathBuf>,

    /// The certificate that this node serves with
    #[arg(long, value_name = "FILE", requires = "listen")]
    tls_cert_file: Option<PathBuf>,

    /// The key of that certificate
    #[arg(long, value_name = "FILE", requires = "listen")]
    tls_private_key_file: Option<PathBuf>,

    #[command(flatten)]
    flags: NodeFlags,

    #[command(flatten)]
    pub logging: LogFlags,
}

impl NodeArguments {
    /// The address at which the API server reaches this node's kubelet API, if it serves one.
    fn kubelet(&self) -> anyhow::Result<Option<node::kubelet::Endpoint>> {
        let Some(address) = self.listen else {
            return Ok(None);
        };
        let read = |flag: &str, path: Option<&PathBuf>| -> anyhow::Result<String> {
            let path = path.with_context(|| format!("{flag} is needed with --listen"))?;
            std::fs::read_to_string(path)
                .with_context(|| format!("{flag}: cannot read {}", path.display()))
        };
        Ok(Some(node::kubelet::Endpoint {
            address,
            authority_pem: read("--client-ca-file", self.client_ca_file.as_ref())?,
            certificate_pem: read("--tls-cert-file", self.tls_cert_file.as_ref())?,
            key_pem: read("--tls-private-key-file", self.tls_private_key_file.as_ref())?,
            host_services: Vec::new(),
        }))
    }
}

/// The router's flags, and how it logs
#[derive(Debug, Args)]
pub struct RouterArguments {
    #[command(flatten)]
    pub router: router::Args,

    #[command(flatten)]
    pub logging: LogFlags,
}

/// The runtime inside a sandbox; `--help` after `--` lists its flags
#[derive(Debug, Args)]
pub struct SandboxdArguments {
    /// Flags of the runtime
    #[arg(
        trailing_var_arg = true,
        allow_hyphen_values = true,
        value_name = "FLAG"
    )]
    flags: Vec<String>,
}

pub async fn controller(arguments: controllers::manager::Args) -> anyhow::Result<ExitCode> {
    controllers::manager::run(arguments, BUILD).await?;
    Ok(ExitCode::SUCCESS)
}

pub async fn router(arguments: router::Args) -> anyhow::Result<ExitCode> {
    for ignored in arguments.upstream.ignored() {
        tracing::warn!("{ignored}");
    }
    let client = match &arguments.kubeconfig {
        Some(path) if !path.as_os_str().is_empty() => Some(client(Some(path.clone())).await?),
        // Without an API to watch, the router finds sandboxes by DNS.
        _ => match Config::infer().await {
            Ok(config) => Some(Client::try_from(config)?),
            Err(error) => {
                tracing::warn!(%error, "no Kubernetes API is configured; sandboxes are found by DNS");
                None
            }
        },
    };
    let config = arguments.into_config(|name| std::env::var(name).ok())?;
    router::run(config, client, stop_on_signal()?).await?;
    Ok(ExitCode::SUCCESS)
}

pub async fn node(arguments: NodeArguments) -> anyhow::Result<ExitCode> {
    open_files::require()?;
    let kubelet = arguments.kubelet()?;
    let client = client(arguments.kubeconfig).await?;
    let data_directory = match arguments.data_dir {
        Some(directory) => directory,
        None => data_directory::default_path()?.join("node"),
    };
    data_directory::create(&data_directory)?;
    let mut config = node::Config::new(data_directory);
    arguments.flags.apply(&mut config);
    if let Some(name) = arguments.node_name {
        config.node_name = name;
    }
    config.node_labels = arguments.node_labels.into_iter().collect();
    config.node_taints = arguments.register_with_taints;
    config.kubelet = kubelet;
    let name = config.node_name.clone();
    let shutdown = stop_on_signal()?;
    let scheduler = arguments.schedule.then(|| {
        machine_control_plane::scheduler::run(
            client.clone(),
            config.node_name.clone(),
            shutdown.clone(),
        )
    });
    let given_up = async {
        shutdown.cancelled().await;
        tokio::time::sleep(START_AFTER_STOP).await;
    };
    let node = tokio::select! {
        node = node::Node::start(config, client.clone(), shutdown.clone()) => node?,
        () = given_up => return Ok(ExitCode::from(143)),
    };
    let failed = node.failed();
    let until_stopped = async {
        match scheduler {
            Some(scheduler) => scheduler.await,
            None => shutdown.cancelled().await,
        }
    };
    tokio::select! {
        () = until_stopped => {}
        () = failed => {
            node.join().await;
            anyhow::bail!("a part of the node panicked");
        }
    }
    if is_idle(client, &name).await {
        node.dismantle().await?;
    } else {
        node.join().await;
    }
    Ok(ExitCode::SUCCESS)
}

/// Whether no pod is bound to the node. Pods outlive this process; without pods, the node removes its cgroups, mounts and links.
async fn is_idle(client: Client, node: &str) -> bool {
    let bound = ListParams::default().fields(&format!("spec.nodeName={node}"));
    let pods = Api::<Pod>::all(client).list_metadata(&bound).await;
    pods.is_ok_and(|pods| pods.items.is_empty())
}

pub async fn sandboxd(arguments: SandboxdArguments) -> anyhow::Result<ExitCode> {
    match sandboxd::Config::parse(arguments.flags, |name| std::env::var(name).ok())? {
        sandboxd::Invocation::Run(config) => {
            logging::choose(match config.log_format {
                sandboxd::LogFormat::Text => logging::Format::Text,
                sandboxd::LogFormat::Json => logging::Format::Json,
            });
            logging::start(Audience::Operator);
            sandboxd::run(*config).await?;
        }
        sandboxd::Invocation::Help => print!("{}", sandboxd::USAGE),
        sandboxd::Invocation::Version => println!("sandboxd {}", env!("CARGO_PKG_VERSION")),
    }
    Ok(ExitCode::SUCCESS)
}

async fn client(kubeconfig: Option<PathBuf>) -> anyhow::Result<Client> {
    let config = match kubeconfig {
        Some(path) => {
            let kubeconfig = kube::config::Kubeconfig::read_from(&path)
                .with_context(|| format!("cannot read {}", path.display()))?;
            Config::from_custom_kubeconfig(kubeconfig, &kube::config::KubeConfigOptions::default())
                .await?
        }
        None => Config::infer().await?,
    };
    Ok(Client::try_from(config)?)
}

/// A token that is cancelled by the first SIGTERM or SIGINT.
fn stop_on_signal() -> anyhow::Result<CancellationToken> {
    let shutdown = CancellationToken::new();
    let mut terminate = signal(SignalKind::terminate())?;
    let mut interrupt = signal(SignalKind::interrupt())?;
    let stop = shutdown.clone();
    tokio::spawn(async move {
        tokio::select! {
            _ = terminate.recv() => {}
            _ = interrupt.recv() => {}
        }
        stop.cancel();
    });
    Ok(shutdown)
}

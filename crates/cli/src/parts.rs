//! The commands that run one part alone, as on a cluster: controller, router, node, sandboxd.

use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::Context;
use clap::Args;
use kube::{Client, Config};
use tokio::signal::unix::{SignalKind, signal};
use tokio_util::sync::CancellationToken;

use crate::data_directory;

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

    /// Also bind pods without a node to this one, where no scheduler does
    #[arg(long)]
    schedule: bool,

    /// What pods that no network policy selects may do
    #[arg(long, value_name = "WHAT", default_value = "isolated")]
    unselected_pods: UnselectedPods,
}

/// What holds for pods that no network policy selects.
#[derive(Clone, Copy, Debug, clap::ValueEnum)]
pub enum UnselectedPods {
    /// Reach public addresses; be reached by nobody
    Isolated,
    /// Reach and be reached, as on a cluster
    Open,
}

impl From<UnselectedPods> for node::network::policy::Unselected {
    fn from(pods: UnselectedPods) -> Self {
        match pods {
            UnselectedPods::Isolated => Self::Isolated,
            UnselectedPods::Open => Self::Open,
        }
    }
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
    controllers::manager::run(arguments).await?;
    Ok(ExitCode::SUCCESS)
}

pub async fn router(arguments: router::Args) -> anyhow::Result<ExitCode> {
    let config = arguments.into_config(|name| std::env::var(name).ok())?;
    // Without an API to watch, the router finds sandboxes by DNS.
    let client = match Config::infer().await {
        Ok(config) => Some(Client::try_from(config)?),
        Err(error) => {
            tracing::warn!(%error, "no Kubernetes API is configured; sandboxes are found by DNS");
            None
        }
    };
    router::run(config, client, stop_on_signal()?).await?;
    Ok(ExitCode::SUCCESS)
}

pub async fn node(arguments: NodeArguments) -> anyhow::Result<ExitCode> {
    let client = client(arguments.kubeconfig).await?;
    let data_directory = match arguments.data_dir {
        Some(directory) => directory,
        None => data_directory::default_path()?.join("node"),
    };
    let mut config = node::Config::new(data_directory);
    config.unselected_pods = arguments.unselected_pods.into();
    if let Some(name) = arguments.node_name {
        config.node_name = name;
    }
    let shutdown = stop_on_signal()?;
    let scheduler = arguments
        .schedule
        .then(|| node::scheduler::run(client.clone(), config.node_name.clone(), shutdown.clone()));
    let node = node::Node::start(config, client, shutdown).await?;
    if let Some(scheduler) = scheduler {
        tokio::join!(node.join(), scheduler);
    } else {
        node.join().await;
    }
    Ok(ExitCode::SUCCESS)
}

pub async fn sandboxd(arguments: SandboxdArguments) -> anyhow::Result<ExitCode> {
    match sandboxd::Config::parse(arguments.flags, |name| std::env::var(name).ok())? {
        sandboxd::Invocation::Run(config) => sandboxd::run(*config).await?,
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

//! How a command finds its API: flags, then `KUBECONFIG`, then a running `up`. `~/.kube/config` is never used unasked.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, bail};
use api::decoding::Decoded;
use clap::Args;
use kube::config::{KubeConfigOptions, Kubeconfig};
use kube::{Api, Client, Config};

use crate::data_directory::{self, Running};
use crate::logging::CurrentTrace;

/// Which API to talk to
#[derive(Clone, Debug, Default, Args)]
#[group(id = "connection")]
#[command(next_help_heading = "Connection")]
pub struct Arguments {
    /// Kubeconfig file [default: $KUBECONFIG, else that of a running `agent-sandbox up`]
    #[arg(long, value_name = "FILE", global = true)]
    kubeconfig: Option<PathBuf>,

    /// Context of the kubeconfig
    #[arg(long, value_name = "NAME", global = true)]
    context: Option<String>,

    /// Namespace [default: the context's]
    #[arg(short, long, value_name = "NAMESPACE", global = true)]
    namespace: Option<String>,

    /// Where the router is [default: that of a running `up`, else a tunnel through the API]
    #[arg(long, value_name = "URL", global = true)]
    router_url: Option<String>,
}

/// A connection to an API, and the way to its sandboxes.
pub struct Connected {
    pub client: Client,
    pub namespace: String,
    pub router: sdk::Connection,
    /// What to call this API in a message.
    pub described: String,
    /// How long to wait for a sandbox, when not as long as the client does by itself.
    pub ready_timeout: Option<Duration>,
}

impl Connected {
    /// A high-level client of the sandboxes in this connection's namespace.
    pub fn sandboxes(&self) -> anyhow::Result<sdk::Client> {
        let defaults = sdk::Options::default();
        let options = sdk::Options {
            connection: self.router.clone(),
            namespace: self.namespace.clone(),
            sandbox_ready_timeout: self.ready_timeout.unwrap_or(defaults.sandbox_ready_timeout),
            // Copied files are streamed, so their size needs no limit.
            max_upload_size: u64::MAX,
            propagator: Some(Arc::new(CurrentTrace)),
            ..defaults
        };
        Ok(sdk::Client::new(self.client.clone(), options)?)
    }

    /// Replaces "there is no such resource" by an error that names this API.
    pub async fn require_kinds(&self) -> anyhow::Result<()> {
        let claims: Api<Decoded<api::SandboxClaim>> =
            Api::namespaced(self.client.clone(), &self.namespace);
        match claims
            .list(&kube::api::ListParams::default().limit(1))
            .await
        {
            Err(kube::Error::Api(status)) if status.code == 404 => bail!(
                "{} does not serve the agent-sandbox kinds; install them with `agent-sandbox generate crds | kubectl apply -f -`",
                self.described
            ),
            Err(error) => Err(error).with_context(|| format!("cannot reach {}", self.described)),
            Ok(_) => Ok(()),
        }
    }
}

impl Arguments {
    /// Connects to what the flags and the environment name, or to a running `up`; `None` if there is neither.
    pub async fn connect_if_any(&self) -> anyhow::Result<Option<Connected>> {
        let running = Running::find(&data_directory::default_path()?);
        let in_environment = std::env::var_os("KUBECONFIG").is_some_and(|value| !value.is_empty());
        let kubeconfig = if let Some(path) = &self.kubeconfig {
            Kubeconfig::read_from(path)
                .with_context(|| format!("cannot read {}", path.display()))?
        } else if in_environment || self.context.is_some() {
            Kubeconfig::read().context("cannot read the kubeconfig")?
        } else if let Some(running) = &running {
            Kubeconfig::read_from(&running.kubeconfig)
                .with_context(|| format!("cannot read {}", running.kubeconfig.display()))?
        } else {
            return Ok(None);
        };
        self.connect(kubeconfig, running.as_ref()).await.map(Some)
    }

    /// Connects. The error names the remedy.
    pub async fn connect_or_explain(&self) -> anyhow::Result<Connected> {
        self.connect_if_any().await?.context(
            "nothing to connect to: start `agent-sandbox up`, or name a cluster with --kubeconfig or KUBECONFIG",
        )
    }

    /// Connects to a system in this process.
    pub fn connect_within(&self, client: Client, running: &Running) -> Connected {
        Connected {
            client,
            namespace: self
                .namespace
                .clone()
                .unwrap_or_else(|| running.namespace.clone()),
            router: router_of(running),
            described: "the system in this process".to_owned(),
            ready_timeout: None,
        }
    }

    async fn connect(
        &self,
        kubeconfig: Kubeconfig,
        running: Option<&Running>,
    ) -> anyhow::Result<Connected> {
        let context = self
            .context
            .clone()
            .or_else(|| kubeconfig.current_context.clone());
        let options = KubeConfigOptions {
            context: self.context.clone(),
            ..KubeConfigOptions::default()
        };
        let config = Config::from_custom_kubeconfig(kubeconfig, &options)
            .await
            .context("the kubeconfig cannot be used")?;
        // The kubeconfig of a running `up` leads straight to its router.
        let is_running = |running: &&Running| {
            config.cluster_url.to_string().trim_end_matches('/') == running.api_server
        };
        let router = match (&self.router_url, running.filter(is_running)) {
            (Some(url), _) => sdk::Connection::Direct { url: url.clone() },
            (None, Some(running)) => router_of(running),
            (None, None) => sdk::Connection::default(),
        };
        let described = format!(
            "context {:?} ({})",
            context.as_deref().unwrap_or("none"),
            config.cluster_url
        );
        let namespace = self
            .namespace
            .clone()
            .unwrap_or_else(|| config.default_namespace.clone());
        Ok(Connected {
            client: Client::try_from(config)?,
            namespace,
            router,
            described,
            ready_timeout: None,
        })
    }
}

/// How to reach the sandboxes of a running `up`. If its router is disabled, another may be found as on a cluster.
fn router_of(running: &Running) -> sdk::Connection {
    match &running.router {
        Some(url) => sdk::Connection::Direct { url: url.clone() },
        None => sdk::Connection::default(),
    }
}

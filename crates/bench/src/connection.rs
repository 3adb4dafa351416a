//! How `bench load --target=cluster` finds its API server: flags, then `KUBECONFIG`, then a running `agent-sandbox up`, as every command
//! of `agent-sandbox` does. `~/.kube/config` is used only if it is named.

use std::path::PathBuf;

use anyhow::Context;
use clap::Args;
use kube::config::{KubeConfigOptions, Kubeconfig};
use kube::{Client, Config};

use crate::agent_sandbox::Ready;

/// Which API to talk to
// The same flags as those of every command of `agent-sandbox`. A load creates its own namespaces and does not use the router.
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

/// A client, and the name of its API server for messages.
pub struct Connected {
    pub client: Client,
    pub described: String,
}

impl Arguments {
    pub async fn connect(&self) -> anyhow::Result<Connected> {
        let kubeconfig = self.kubeconfig()?.context(
            "nothing to connect to: start `agent-sandbox up`, or name a cluster with --kubeconfig or KUBECONFIG",
        )?;
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
        let described = format!(
            "context {:?} ({})",
            context.as_deref().unwrap_or("none"),
            config.cluster_url
        );
        Ok(Connected {
            client: Client::try_from(config)?,
            described,
        })
    }

    fn kubeconfig(&self) -> anyhow::Result<Option<Kubeconfig>> {
        let read = |path: PathBuf| {
            Kubeconfig::read_from(&path).with_context(|| format!("cannot read {}", path.display()))
        };
        let in_environment = variable("KUBECONFIG").is_some();
        if let Some(path) = &self.kubeconfig {
            read(path.clone()).map(Some)
        } else if in_environment || self.context.is_some() {
            let kubeconfig = Kubeconfig::read().context("cannot read the kubeconfig")?;
            Ok(Some(kubeconfig))
        } else {
            running_up().map(|ready| read(ready.kubeconfig)).transpose()
        }
    }
}

/// The `up` that serves from the default data directory, if one does.
fn running_up() -> Option<Ready> {
    let home = variable("AGENT_SANDBOX_HOME");
    let state = || Some(variable("XDG_STATE_HOME")?.join("agent-sandbox"));
    let default = || Some(variable("HOME")?.join(".local/state/agent-sandbox"));
    let directory = home.or_else(state).or_else(default)?;
    // A killed process leaves its file behind.
    if !apiserver::store::is_in_use(&directory) {
        return None;
    }
    let text = std::fs::read(directory.join("up.json")).ok()?;
    serde_json::from_slice(&text).ok()
}

fn variable(name: &str) -> Option<PathBuf> {
    let value = std::env::var_os(name).filter(|value| !value.is_empty());
    value.map(PathBuf::from)
}

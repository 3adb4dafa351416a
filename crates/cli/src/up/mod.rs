//! `agent-sandbox up`: the whole system in one process.
//!
//! The parts are started in the order in which they need each other, each with an in-process client of the API server, and
//! stopped in the reverse order. Nothing here decides anything about sandboxes.

mod command;
mod installation;
mod quickstart;

use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::Context;
use k8s_openapi::api::core::v1::Pod;
use kube::Api;
use kube::api::{DeleteParams, ListParams};
use tokio::net::TcpListener;
use tokio::task::JoinSet;
use tokio_util::sync::CancellationToken;

pub use command::{Arguments, execute};
pub use quickstart::Quickstart;

use crate::data_directory::{self, Running};

/// The name of the one node.
const NODE_NAME: &str = "agent-sandbox";

/// How long pods may take to stop when the system is to leave nothing running.
const STOP_PODS_DEADLINE: Duration = Duration::from_secs(10);

/// What `up` runs with. A port of 0 picks a free one.
#[derive(Debug)]
pub struct Options {
    pub data_directory: PathBuf,
    pub api_listen: SocketAddr,
    pub router_listen: SocketAddr,
    pub metrics_listen: SocketAddr,
    pub quickstart: Quickstart,
}

/// A running system.
pub struct Up {
    running: Running,
    data_directory: PathBuf,
    server: apiserver::Server,
    client: kube::Client,
    shutdown: CancellationToken,
    parts: JoinSet<anyhow::Result<()>>,
}

impl Up {
    /// Starts every part and returns when all of them serve. Pools may still be filling.
    pub async fn start(options: Options) -> anyhow::Result<Self> {
        let data_directory = options.data_directory.clone();
        data_directory::create(&data_directory)?;
        let api_listener = listen("--api-listen", options.api_listen).await?;
        let router_listener = listen("--router-listen", options.router_listen).await?;
        let metrics_listener = listen("--metrics-bind-address", options.metrics_listen).await?;
        let running = Running {
            kubeconfig: data_directory.join("kubeconfig"),
            api_server: format!("https://{}", api_listener.local_addr()?),
            router: format!("http://{}", router_listener.local_addr()?),
            metrics: format!("http://{}", metrics_listener.local_addr()?),
            namespace: quickstart::NAMESPACE.to_owned(),
            template: options.quickstart.template(),
            warm_pool: options.quickstart.warm_pool(),
            pid: std::process::id(),
        };
        let server = apiserver::Server::open(apiserver::Config::new(&data_directory)).await?;
        server
            .write_kubeconfig(&running.kubeconfig, &running.api_server)
            .context("cannot write the kubeconfig")?;

        let mut up = Self {
            client: server.client(),
            running,
            data_directory,
            server,
            shutdown: CancellationToken::new(),
            parts: JoinSet::new(),
        };
        up.serve_api(api_listener);
        installation::install(&up.client).await?;
        up.start_controllers(metrics_listener);
        up.start_node().await?;
        up.start_router(router_listener);
        quickstart::install(&up.client, options.quickstart).await?;
        up.running.write(&data_directory::running_file(&up.data_directory))?;
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

    /// Waits until a part fails. Parts run until they are told to stop, so an end of any kind is a failure.
    pub async fn failed(&mut self) -> anyhow::Error {
        match self.parts.join_next().await {
            Some(Ok(Err(error))) => error,
            Some(Ok(Ok(()))) => anyhow::anyhow!("a part stopped by itself"),
            Some(Err(panicked)) => panicked.into(),
            None => anyhow::anyhow!("no part is running"),
        }
    }

    /// Stops every part. Pods go on running, for the next start to find them again.
    pub async fn stop(mut self) -> anyhow::Result<()> {
        let _ = std::fs::remove_file(data_directory::running_file(&self.data_directory));
        self.shutdown.cancel();
        let mut result = Ok(());
        while let Some(part) = self.parts.join_next().await {
            result = result.and(part.map_err(anyhow::Error::from).flatten());
        }
        self.server.shutdown().await;
        result
    }

    /// Stops every pod, then every part.
    pub async fn stop_with_pods(self) -> anyhow::Result<()> {
        let stopped = tokio::time::timeout(STOP_PODS_DEADLINE, self.delete_everything()).await;
        let result = self.stop().await;
        stopped.context("pods are still running after the deadline")??;
        result
    }

    async fn delete_everything(&self) -> anyhow::Result<()> {
        let pools: Api<api::SandboxWarmPool> = Api::default_namespaced(self.client());
        let claims: Api<api::SandboxClaim> = Api::default_namespaced(self.client());
        let now = DeleteParams::default().grace_period(0);
        pools.delete_collection(&now, &ListParams::default()).await?;
        claims.delete_collection(&now, &ListParams::default()).await?;
        let sandboxes: Api<api::Sandbox> = Api::default_namespaced(self.client());
        sandboxes.delete_collection(&now, &ListParams::default()).await?;
        let pods: Api<Pod> = Api::all(self.client());
        await_none(&pods).await
    }

    fn serve_api(&mut self, listener: TcpListener) {
        let server = self.server.clone();
        let shutdown = self.shutdown.clone();
        self.parts
            .spawn(async move { server.serve(listener, shutdown).await.context("the API server failed") });
    }
}

//! Starts the listeners, and stops them in order: no new connections, SIGTERM to running commands, a grace
//! period, SIGKILL to the rest.

use std::io;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use rustix::process::Signal;
use tokio::net::TcpListener;
use tokio::signal::unix::{SignalKind, signal};
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use crate::api::SdkApi;
use crate::config::Config;
use crate::directory_tree::Tree;
use crate::exec_http::Limits;
use crate::grpc::{ProcessService, Running};
use crate::http_server::{Protocol, listen, serve};
use crate::initialise::Initialiser;
use crate::reaper::{Reaper, Reaping};
use crate::rest_files::RestApi;
use crate::session::{Launcher, SharedEnvironment};

#[derive(Debug, thiserror::Error)]
pub enum ServerError {
    #[error("cannot use {path} as the base directory")]
    BaseDirectory {
        path: PathBuf,
        #[source]
        source: io::Error,
    },
    #[error("cannot listen on {address}")]
    Listen {
        address: SocketAddr,
        #[source]
        source: io::Error,
    },
    #[error("cannot wait for signals")]
    Signals(#[source] io::Error),
}

/// The addresses of a running server, with the actual port in place of port 0.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Addresses {
    pub sdk: Vec<SocketAddr>,
    pub init: Option<SocketAddr>,
    pub rest: Option<SocketAddr>,
    pub grpc: Option<SocketAddr>,
}

/// A server whose ports are open.
#[derive(Debug)]
pub struct Server {
    config: Config,
    tree: Arc<Tree>,
    sdk: Vec<TcpListener>,
    init: Option<TcpListener>,
    rest: Option<TcpListener>,
    grpc: Option<TcpListener>,
}

impl Server {
    /// Opens the base directory and the ports. Connections wait until [`Server::serve`].
    pub async fn bind(config: Config) -> Result<Self, ServerError> {
        let tree = Tree::open(&config.base_dir).map_err(|source| ServerError::BaseDirectory {
            path: config.base_dir.clone(),
            source,
        })?;
        let mut sdk = Vec::new();
        for &address in &config.listen {
            sdk.push(open(address).await?);
        }
        let rest = open_if_asked(config.rest_listen).await?;
        let grpc = open_if_asked(config.grpc_listen).await?;
        let mut init = None;
        if let Some(address) = config.init_listen {
            match listen(address).await {
                Ok(listener) => init = Some(listener),
                Err(error) => {
                    tracing::warn!(%address, %error, "the initialisation port cannot be used");
                }
            }
        }
        Ok(Self {
            config,
            tree: Arc::new(tree),
            sdk,
            init,
            rest,
            grpc,
        })
    }

    pub fn addresses(&self) -> Addresses {
        let local = |listener: &Option<TcpListener>| {
            listener.as_ref().and_then(|open| open.local_addr().ok())
        };
        Addresses {
            sdk: self
                .sdk
                .iter()
                .filter_map(|open| open.local_addr().ok())
                .collect(),
            init: local(&self.init),
            rest: local(&self.rest),
            grpc: local(&self.grpc),
        }
    }

    /// Serves until `stop` is cancelled, then drains.
    pub async fn serve(self, stop: CancellationToken) -> Result<(), ServerError> {
        let reaping = if self.config.reap_orphans {
            Reaping::Everyone
        } else {
            Reaping::OwnChildren
        };
        let stop_reaping = CancellationToken::new();
        let reaper = Reaper::start(reaping, stop_reaping.clone()).map_err(ServerError::Signals)?;
        let environment = SharedEnvironment::default();
        let launcher = Launcher {
            reaper: Arc::clone(&reaper),
            environment: Arc::clone(&environment),
        };
        let limits = Limits {
            time: self.config.exec_timeout,
            output_bytes: self.config.max_output_bytes,
        };
        let tasks = TaskTracker::new();
        let rest_api = Arc::new(RestApi::new(Arc::clone(&self.tree), std::env::vars()));
        let api = Arc::new(SdkApi {
            tree: Arc::clone(&self.tree),
            launcher: launcher.clone(),
            limits,
            newer_files: Arc::clone(&rest_api),
            tasks: tasks.clone(),
        });
        for listener in self.sdk {
            tokio::spawn(serve(
                listener,
                Protocol::Http1,
                Arc::clone(&api),
                tasks.clone(),
                stop.clone(),
            ));
        }
        if let Some(listener) = self.init {
            let initialiser = Arc::new(Initialiser::new(environment));
            tokio::spawn(serve(
                listener,
                Protocol::Http1,
                initialiser,
                tasks.clone(),
                stop.clone(),
            ));
        }
        if let Some(listener) = self.rest {
            tokio::spawn(serve(
                listener,
                Protocol::Http1,
                rest_api,
                tasks.clone(),
                stop.clone(),
            ));
        }
        if let Some(listener) = self.grpc {
            let service = ProcessService {
                tree: self.tree,
                launcher,
                limits,
                running: Running::default(),
            };
            tokio::spawn(serve(
                listener,
                Protocol::Http2,
                Arc::new(service),
                tasks.clone(),
                stop.clone(),
            ));
        }
        stop.cancelled().await;
        tasks.close();
        drain(&reaper, &tasks, self.config.shutdown_grace).await;
        stop_reaping.cancel();
        Ok(())
    }
}

async fn open_if_asked(address: Option<SocketAddr>) -> Result<Option<TcpListener>, ServerError> {
    match address {
        Some(address) => open(address).await.map(Some),
        None => Ok(None),
    }
}

async fn open(address: SocketAddr) -> Result<TcpListener, ServerError> {
    listen(address)
        .await
        .map_err(|source| ServerError::Listen { address, source })
}

async fn drain(reaper: &Reaper, tasks: &TaskTracker, grace: Duration) {
    signal_all(reaper, Signal::TERM);
    if tokio::time::timeout(grace, tasks.wait()).await.is_err() {
        signal_all(reaper, Signal::KILL);
        // Killed commands end at once; only clients that do not read their responses are left.
        let _ = tokio::time::timeout(Duration::from_secs(1), tasks.wait()).await;
    }
}

fn signal_all(reaper: &Reaper, signal: Signal) {
    for group in reaper.groups() {
        let _ = group.signal(signal);
    }
}

/// Runs the server until SIGTERM or SIGINT; a second signal ends it without a grace period.
pub async fn run(config: Config) -> Result<(), ServerError> {
    let mut terminate = signal(SignalKind::terminate()).map_err(ServerError::Signals)?;
    let mut interrupt = signal(SignalKind::interrupt()).map_err(ServerError::Signals)?;
    let server = Server::bind(config).await?;
    let addresses = server.addresses();
    tracing::info!(sdk = ?addresses.sdk, init = ?addresses.init, rest = ?addresses.rest, grpc = ?addresses.grpc, base = %server.tree.base().display(), "serving");
    let stop = CancellationToken::new();
    let serving = server.serve(stop.clone());
    tokio::pin!(serving);
    tokio::select! {
        outcome = serving.as_mut() => return outcome,
        _ = terminate.recv() => {}
        _ = interrupt.recv() => {}
    }
    tracing::info!("draining");
    stop.cancel();
    tokio::select! {
        outcome = serving => outcome,
        _ = terminate.recv() => Ok(()),
        _ = interrupt.recv() => Ok(()),
    }
}

//! The controllers in this process, with a fake node that marks every pod Ready at once: measurements of the controllers and of the API
//! server need no containers.

use std::sync::Arc;

use controllers::metrics::{BuildInfo, Metrics};
use controllers::{Config, Parts};
use kube::Client;
use testkit::node::mark_pods_ready;
use tokio::task::JoinHandle;
use tokio_util::sync::CancellationToken;

/// The build information of the controllers' metrics. It does not matter to a measurement.
const BUILD: BuildInfo = BuildInfo {
    git_commit: "bench",
    build_date: "bench",
};

/// The metrics of controllers in this process.
pub fn metrics() -> Arc<Metrics> {
    Arc::new(Metrics::new("embedded", BUILD))
}

/// The configuration of controllers with extensions.
pub fn with_extensions() -> Config {
    Config {
        extensions: true,
        ..Config::default()
    }
}

/// Controllers and a fake node, until [`FakeCluster::stop`].
pub struct FakeCluster {
    shutdown: CancellationToken,
    controllers: Option<JoinHandle<()>>,
    node: JoinHandle<()>,
}

impl FakeCluster {
    pub fn start(parts: Parts) -> Self {
        let client = parts.client.clone();
        let runtime = controllers::assemble(parts);
        let shutdown = CancellationToken::new();
        let (never, lead) = (CancellationToken::new(), std::future::ready(()));
        let controllers = tokio::spawn(runtime.run(shutdown.clone(), never, || {}, lead));
        Self {
            shutdown,
            controllers: Some(controllers),
            node: tokio::spawn(mark_pods_ready(client)),
        }
    }

    /// The fake node alone, for controllers in another process.
    pub fn start_node(client: Client) -> Self {
        Self {
            shutdown: CancellationToken::new(),
            controllers: None,
            node: tokio::spawn(mark_pods_ready(client)),
        }
    }

    pub async fn stop(self) -> anyhow::Result<()> {
        self.shutdown.cancel();
        if let Some(controllers) = self.controllers {
            controllers.await?;
        }
        self.node.abort();
        Ok(())
    }
}

//! Measures a node against an API server in memory: `cargo run --release --example bench_node --features bench`.

use agent_sandbox_node::{Config, Node, bench};
use machine_control_plane::scheduler;
use tokio_util::sync::CancellationToken;

#[tokio::main]
async fn main() -> Result<(), Box<dyn std::error::Error>> {
    let directory = tempfile::Builder::new().prefix("node-bench-").tempdir()?;
    let server = apiserver::Server::open(apiserver::Config::in_memory()).await?;
    let shutdown = CancellationToken::new();
    let config = Config::new(directory.path().join("data"));
    let node_name = config.node_name.clone();
    let node = Node::start(config, server.client(), shutdown.clone()).await?;
    tokio::spawn(scheduler::run(server.client(), node_name, shutdown.clone()));
    let (client, runtime) = (server.client(), node.runtime().clone());
    // On a worker, as in the real program: the main thread is slower to be woken.
    let report =
        tokio::spawn(async move { bench::run(client, &runtime, &bench::Options::default()).await })
            .await?;
    shutdown.cancel();
    node.dismantle().await?;
    server.shutdown().await;
    println!("{}", serde_json::to_string_pretty(&report?)?);
    Ok(())
}

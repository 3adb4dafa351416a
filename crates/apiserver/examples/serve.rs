//! Runs only an API server, for load generators and client programs: `serve DATA_DIRECTORY KUBECONFIG [ADDRESS]`. Ctrl-C stops
//! it.

use apiserver::{Config, Server};
use tokio_util::sync::CancellationToken;

#[tokio::main]
async fn main() -> Result<(), Box<dyn std::error::Error>> {
    let mut arguments = std::env::args().skip(1);
    let (data, kubeconfig) = arguments
        .next()
        .zip(arguments.next())
        .ok_or("usage: serve DATA_DIRECTORY KUBECONFIG [ADDRESS]")?;
    let listener =
        tokio::net::TcpListener::bind(arguments.next().unwrap_or("127.0.0.1:0".into())).await?;
    let server = Server::open(Config::new(data)).await?;
    server.write_kubeconfig(
        kubeconfig.as_ref(),
        &format!("https://{}", listener.local_addr()?),
    )?;
    let stop = CancellationToken::new();
    let interrupted = stop.clone();
    tokio::spawn(async move {
        let _ = tokio::signal::ctrl_c().await;
        interrupted.cancel();
    });
    server.serve(listener, stop).await?;
    server.shutdown().await;
    Ok(())
}

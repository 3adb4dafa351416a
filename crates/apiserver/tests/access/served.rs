//! A server over HTTPS.

use std::sync::Arc;

use apiserver::{Config, Server};
use kube::Client;
use tokio::net::TcpListener;
use tokio_util::sync::CancellationToken;

/// A server over HTTPS, and a way to connect with any token.
pub struct Served {
    pub server: Arc<Server>,
    pub url: String,
    stop: CancellationToken,
    task: tokio::task::JoinHandle<()>,
}

impl Served {
    pub async fn start() -> Self {
        Self::start_with(Config::in_memory()).await
    }

    pub async fn start_with(config: Config) -> Self {
        let server = Arc::new(Server::open(config).await.expect("cannot open the server"));
        let listener = TcpListener::bind("127.0.0.1:0")
            .await
            .expect("cannot bind a port");
        let url = format!(
            "https://{}",
            listener.local_addr().expect("no local address")
        );
        let stop = CancellationToken::new();
        let task = tokio::spawn({
            let (server, stop) = (server.clone(), stop.clone());
            async move { server.serve(listener, stop).await.expect("serving failed") }
        });
        Self {
            server,
            url,
            stop,
            task,
        }
    }

    pub fn connect(&self, token: &str) -> Client {
        self.connect_as(token, None)
    }

    pub fn connect_as(&self, token: &str, user: Option<&str>) -> Client {
        let mut config = kube::Config::new(self.url.parse().expect("invalid URL"));
        config.accept_invalid_certs = true;
        config.auth_info.token = Some(token.to_owned().into());
        config.auth_info.impersonate = user.map(ToOwned::to_owned);
        Client::try_from(config).expect("cannot create the client")
    }

    pub async fn end(self) {
        self.stop.cancel();
        self.task.await.expect("serving panicked");
        Arc::into_inner(self.server)
            .expect("the server is still shared")
            .shutdown()
            .await;
    }
}

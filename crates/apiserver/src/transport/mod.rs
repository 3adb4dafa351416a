//! HTTPS: connections, TLS, who is asking, and the bounds on what one server takes on at a time.

mod gzip;
pub mod identity;

use std::{convert::Infallible, sync::Arc, time::Duration};

use apimachinery::status::Status;
use http::{HeaderName, Method, Request, header};
use hyper::{body::Incoming, service::service_fn};
use hyper_util::{
    rt::{TokioExecutor, TokioIo, TokioTimer},
    server::conn::auto,
};
use tokio::{
    net::{TcpListener, TcpStream},
    sync::Semaphore,
    task::JoinSet,
};
use tokio_rustls::TlsAcceptor;
use tokio_util::sync::CancellationToken;

use self::identity::{Identity, IdentityError};
use crate::{
    http::{
        Frontend,
        body::{self, Answer},
        path::Query,
        public,
    },
    server::ServeError,
};

const HANDSHAKE_TIMEOUT: Duration = Duration::from_secs(10);
const REQUEST_TIMEOUT: Duration = Duration::from_secs(60);
const DRAIN: Duration = Duration::from_secs(2);
/// Requests at a time, watches not counted, as kube-apiserver bounds them by default.
const REQUESTS_AT_ONCE: usize = 400;

struct Gate {
    frontend: Arc<Frontend>,
    requests: Semaphore,
}

/// Serves HTTPS until `shutdown`.
pub async fn serve(
    frontend: Arc<Frontend>,
    listener: TcpListener,
    extra_names: &[String],
    shutdown: CancellationToken,
) -> Result<(), ServeError> {
    let address = listener.local_addr().map_err(ServeError::Listener)?;
    let acceptor = acceptor(
        frontend.access.identity(),
        &identity::names_for(address.ip(), extra_names),
    )?;
    let gate = Arc::new(Gate {
        frontend,
        requests: Semaphore::new(REQUESTS_AT_ONCE),
    });
    let mut connections = JoinSet::new();
    loop {
        tokio::select! {
            () = shutdown.cancelled() => break,
            accepted = listener.accept() => match accepted {
                Ok((stream, _)) => drop(connections.spawn(connection(gate.clone(), acceptor.clone(), stream, shutdown.clone()))),
                Err(error) => {
                    // Out of file descriptors, most likely: others may close theirs.
                    tracing::warn!(error = &error as &dyn std::error::Error, "cannot accept a connection");
                    tokio::time::sleep(Duration::from_millis(50)).await;
                }
            },
            Some(_) = connections.join_next(), if !connections.is_empty() => {}
        }
    }
    let drained = tokio::time::timeout(DRAIN, async {
        while connections.join_next().await.is_some() {}
    })
    .await;
    if drained.is_err() {
        connections.shutdown().await;
    }
    Ok(())
}

fn acceptor(identity: &Identity, names: &[String]) -> Result<TlsAcceptor, IdentityError> {
    let (certificate, key) = identity.server_certificate(names)?;
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let mut config = rustls::ServerConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()?
        .with_no_client_auth()
        .with_single_cert(vec![certificate], key)?;
    config.alpn_protocols = vec![b"h2".to_vec(), b"http/1.1".to_vec()];
    Ok(TlsAcceptor::from(Arc::new(config)))
}

async fn connection(
    gate: Arc<Gate>,
    acceptor: TlsAcceptor,
    stream: TcpStream,
    shutdown: CancellationToken,
) {
    let _ = stream.set_nodelay(true);
    let Ok(Ok(stream)) = tokio::time::timeout(HANDSHAKE_TIMEOUT, acceptor.accept(stream)).await
    else {
        return;
    };
    let service = service_fn(move |request| {
        let gate = gate.clone();
        async move { Ok::<_, Infallible>(gate.answer(request).await) }
    });
    let mut builder = auto::Builder::new(TokioExecutor::new());
    builder.http1().timer(TokioTimer::new());
    builder
        .http2()
        .timer(TokioTimer::new())
        .max_concurrent_streams(1000)
        .keep_alive_interval(Duration::from_secs(30));
    let serving = builder.serve_connection_with_upgrades(TokioIo::new(stream), service);
    tokio::pin!(serving);
    tokio::select! {
        outcome = serving.as_mut() => {
            if let Err(error) = outcome {
                tracing::debug!(%error, "a connection ended early");
            }
        }
        () = shutdown.cancelled() => {
            serving.as_mut().graceful_shutdown();
            let _ = serving.await;
        }
    }
}

impl Gate {
    async fn answer(&self, request: Request<Incoming>) -> Answer {
        if request.method() == Method::GET
            && let Some(answer) = public(request.uri().path())
        {
            return answer;
        }
        let user = match self
            .frontend
            .access
            .authenticate(&self.frontend.api, request.headers())
        {
            Ok(user) => user,
            Err(status) => return body::failure(&status),
        };
        let audit_id = HeaderName::from_static("audit-id");
        let compress = gzip::is_accepted(request.headers()) && request.method() == Method::GET;
        let mut answer = if Query::parse(request.uri().query()).flag("watch") {
            self.frontend.handle(&user, request).await
        } else {
            let Ok(_permit) = self.requests.try_acquire() else {
                return body::failure(&Status::too_many_requests(
                    "too many requests, please try again later",
                    1,
                ));
            };
            match tokio::time::timeout(REQUEST_TIMEOUT, self.frontend.handle(&user, request)).await
            {
                Ok(answer) if compress => gzip::compress(answer),
                Ok(answer) => answer,
                Err(_) => body::failure(&Status::timeout(
                    "request did not complete within the allotted timeout",
                    0,
                )),
            }
        };
        if let Ok(value) = uuid::Uuid::new_v4().to_string().parse() {
            answer.headers_mut().insert(audit_id, value);
        }
        answer.headers_mut().insert(
            header::CACHE_CONTROL,
            http::HeaderValue::from_static("no-cache, private"),
        );
        answer
    }
}

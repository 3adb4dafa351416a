//! HTTPS: connections, TLS, who is asking, and the bounds on what one server takes on at a time.

mod certificate;
mod gzip;
pub mod identity;

use std::{convert::Infallible, net::IpAddr, sync::Arc, time::Duration};

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
    audit::Origin,
    auth::User,
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
                Ok((stream, peer)) => drop(connections.spawn(connection(gate.clone(), acceptor.clone(), stream, peer.ip(), shutdown.clone()))),
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
    let mut config = rustls::ServerConfig::builder_with_provider(provider.clone())
        .with_safe_default_protocol_versions()?
        .with_client_cert_verifier(identity.client_verifier(&provider)?)
        .with_single_cert(vec![certificate], key)?;
    config.alpn_protocols = vec![b"h2".to_vec(), b"http/1.1".to_vec()];
    Ok(TlsAcceptor::from(Arc::new(config)))
}

async fn connection(
    gate: Arc<Gate>,
    acceptor: TlsAcceptor,
    stream: TcpStream,
    address: IpAddr,
    shutdown: CancellationToken,
) {
    let _ = stream.set_nodelay(true);
    let Ok(Ok(stream)) = tokio::time::timeout(HANDSHAKE_TIMEOUT, acceptor.accept(stream)).await
    else {
        return;
    };
    let certificates = stream.get_ref().1.peer_certificates();
    let peer = Arc::new(Peer {
        address,
        user: certificates
            .and_then(<[_]>::first)
            .and_then(certificate::user),
    });
    let service = service_fn(move |request| {
        let (gate, peer) = (gate.clone(), peer.clone());
        async move { Ok::<_, Infallible>(gate.answer(&peer, request).await) }
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

/// Who is at the other end of a connection.
struct Peer {
    address: IpAddr,
    /// Whom their certificate is for, if they showed one.
    user: Option<User>,
}

impl Gate {
    async fn answer(&self, peer: &Peer, mut request: Request<Incoming>) -> Answer {
        if request.method() == Method::GET
            && let Some(answer) = public(request.uri().path())
        {
            return answer;
        }
        // From the thread's own generator: the system's costs a call for each request.
        let audit_id = uuid::Builder::from_random_bytes(rand::random())
            .into_uuid()
            .to_string();
        let frontend = &self.frontend;
        let authenticated =
            frontend
                .access
                .authenticate(&frontend.api, peer.user.as_ref(), request.headers());
        let sender = authenticated
            .as_ref()
            .ok()
            .and_then(|(_, sender)| sender.clone());
        request.extensions_mut().insert(Origin {
            audit_id: audit_id.clone(),
            address: Some(peer.address),
            sender,
        });
        let user = match authenticated {
            Ok((user, _)) => user,
            Err(status) => return frontend.refuse(request, &status).await,
        };
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
        if let Ok(value) = audit_id.parse() {
            answer
                .headers_mut()
                .insert(HeaderName::from_static("audit-id"), value);
        }
        // What never changes says so itself.
        answer
            .headers_mut()
            .entry(header::CACHE_CONTROL)
            .or_insert(http::HeaderValue::from_static("no-cache, private"));
        answer
    }
}

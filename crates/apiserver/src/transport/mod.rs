//! HTTPS: connections, TLS, authentication of each request, timeouts and limits.

mod certificate;
mod gzip;

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
    task::JoinSet,
};
use tokio_rustls::TlsAcceptor;
use tokio_util::sync::CancellationToken;

use crate::{
    audit::Origin,
    auth::User,
    body::{self, HttpResponse},
    fair_queue::{FairQueue, Limits},
    http::{Frontend, public},
    identity::{self, Identity, IdentityError},
    request_info::RequestInfo,
};

const HANDSHAKE_TIMEOUT: Duration = Duration::from_secs(10);
const REQUEST_TIMEOUT: Duration = Duration::from_secs(60);
/// The time within which a client must send the request line and the headers.
const HEADER_TIMEOUT: Duration = Duration::from_secs(30);
const DRAIN_TIMEOUT: Duration = Duration::from_secs(2);

/// Why a server cannot serve.
#[derive(Debug, thiserror::Error)]
pub enum ServeError {
    /// The server certificate cannot be issued.
    #[error("cannot set up TLS")]
    Identity(#[from] IdentityError),
    /// The listener has no local address.
    #[error("cannot use the listener")]
    Listener(#[source] std::io::Error),
    /// The disk failed. The store refuses writes until it is opened again.
    #[error("the store refuses all writes: restart the server to open it again")]
    Storage(#[source] Arc<store::log::LogError>),
}

/// Handles the requests of all connections.
struct RequestHandler {
    frontend: Arc<Frontend>,
    queue: Arc<FairQueue>,
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
    let handler = Arc::new(RequestHandler {
        frontend,
        queue: FairQueue::new(Limits::default()),
    });
    let mut connections = JoinSet::new();
    loop {
        tokio::select! {
            () = shutdown.cancelled() => break,
            accepted = listener.accept() => match accepted {
                Ok((stream, peer)) => drop(connections.spawn(connection(handler.clone(), acceptor.clone(), stream, peer.ip(), shutdown.clone()))),
                Err(error) => {
                    // Most likely the process has no free file descriptor; retry when other connections are closed.
                    tracing::warn!(error = &error as &dyn std::error::Error, "cannot accept a connection");
                    tokio::time::sleep(Duration::from_millis(50)).await;
                }
            },
            Some(_) = connections.join_next(), if !connections.is_empty() => {}
        }
    }
    let drained = tokio::time::timeout(DRAIN_TIMEOUT, async {
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
    handler: Arc<RequestHandler>,
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
    let is_http2 = stream.get_ref().1.alpn_protocol() == Some(b"h2");
    let certificates = stream.get_ref().1.peer_certificates();
    let peer = Arc::new(Peer {
        address,
        user: certificates
            .and_then(<[_]>::first)
            .and_then(certificate::user),
    });
    let service = service_fn(move |request| {
        let (handler, peer) = (handler.clone(), peer.clone());
        async move { Ok::<_, Infallible>(handler.answer(&peer, request).await) }
    });
    let builder = auto::Builder::new(TokioExecutor::new());
    // TLS (ALPN) has negotiated the protocol. Detecting it from the first bytes would wait for them without a timeout.
    let mut builder = if is_http2 {
        builder.http2_only()
    } else {
        builder.http1_only()
    };
    builder
        .http1()
        .timer(TokioTimer::new())
        .header_read_timeout(HEADER_TIMEOUT);
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

/// The client of a connection.
struct Peer {
    address: IpAddr,
    /// The user of the client certificate, if there is one.
    user: Option<User>,
}

impl RequestHandler {
    async fn answer(&self, peer: &Peer, mut request: Request<Incoming>) -> HttpResponse {
        if request.method() == Method::GET
            && let Some(response) = public(request.uri().path(), &self.frontend.api.store)
        {
            return response;
        }
        if let Err(status) = check_hosts(&request) {
            return body::failure(&status);
        }
        // Uses the generator of the thread: the one of the operating system costs a syscall for each request.
        let audit_id = uuid::Builder::from_random_bytes(rand::random())
            .into_uuid()
            .to_string();
        let frontend = &self.frontend;
        let info = RequestInfo::of(&request);
        let authenticated = frontend
            .access
            .authenticate(peer.user.as_ref(), request.headers());
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
            Err(status) => return frontend.refuse(&info, request, &status).await,
        };
        let compress = gzip::is_accepted(request.headers())
            && request.method() == Method::GET
            && !info.is_watch();
        let answering = frontend.handle(&user, info, request, Some(&self.queue));
        let mut response = match tokio::time::timeout(REQUEST_TIMEOUT, answering).await {
            Ok(response) if compress => gzip::compress(response),
            Ok(response) => response,
            Err(_) => body::failure(&Status::timeout(
                "request did not complete within the allotted timeout",
                0,
            )),
        };
        if let Ok(value) = audit_id.parse() {
            response
                .headers_mut()
                .insert(HeaderName::from_static("audit-id"), value);
        }
        // Responses that may be cached have set their own header.
        response
            .headers_mut()
            .entry(header::CACHE_CONTROL)
            .or_insert(http::HeaderValue::from_static("no-cache, private"));
        response
    }
}

/// Rejects a request with several Host headers, which two HTTP parsers could interpret differently (request smuggling). The HTTP
/// parser itself rejects conflicting lengths, and closes the connection after a request with both `Transfer-Encoding` and
/// `Content-Length`.
fn check_hosts<B>(request: &Request<B>) -> Result<(), Status> {
    if request.headers().get_all(header::HOST).iter().count() > 1 {
        return Err(Status::bad_request("more than one Host header"));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_request_with_two_host_headers_is_refused() {
        let request = Request::get("/api").header(header::HOST, "a");
        let twice = request.header(header::HOST, "b").body(()).unwrap();
        assert_eq!(check_hosts(&twice).unwrap_err().code, 400);
        let once = Request::get("/api").header(header::HOST, "a").body(());
        assert!(check_hosts(&once.unwrap()).is_ok());
    }
}

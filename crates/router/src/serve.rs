//! Accepts connections, takes each request through identify, authorize, resolve and forward, and drains when told to.

use std::convert::Infallible;
use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use http::{HeaderValue, Method, Request, Response, StatusCode, header};
use hyper::body::Incoming;
use hyper::service::service_fn;
use hyper_util::rt::{TokioExecutor, TokioIo, TokioTimer};
use hyper_util::server::conn::auto;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::{TcpListener, TcpStream};
use tokio_rustls::TlsAcceptor;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;
use tracing::Instrument;

use crate::access::{LoggedRequest, Tracked};
use crate::answer::{Failure, json};
use crate::authorize::{Authorizer, AuthorizerError};
use crate::body::ProxyBody;
use crate::config::{Config, ListenAddress};
use crate::forward::Forwarder;
use crate::headers::Origin;
use crate::identify::{Routing, identify};
use crate::metrics::Metrics;
use crate::registry::Registry;
use crate::resolve::Resolver;
use crate::tls::{TlsError, TlsMaterial};
use crate::tunnel::Tunnels;
use crate::{trace, watch};

/// How often idle connections to sandboxes are looked through.
const IDLE_SWEEP: Duration = Duration::from_secs(10);
/// A client that has not finished its TLS handshake by then is not going to.
const HANDSHAKE_TIMEOUT: Duration = Duration::from_secs(10);

#[derive(Debug, thiserror::Error)]
pub enum RouterError {
    #[error("authorization cannot be set up")]
    Authorizer(#[source] AuthorizerError),
    #[error("TLS cannot be set up")]
    Tls(#[source] TlsError),
    #[error("cannot listen on {address}")]
    Listen {
        address: SocketAddr,
        #[source]
        source: io::Error,
    },
}

/// The router. Clones share everything.
#[derive(Clone, Debug)]
pub struct Router {
    shared: Arc<Shared>,
}

struct Shared {
    config: Config,
    client: Option<kube::Client>,
    authorizer: Authorizer,
    forwarder: Forwarder,
    metrics: Arc<Metrics>,
    started: AtomicBool,
    connections: TaskTracker,
    /// Cancelled when requests in flight have had their time.
    cut: CancellationToken,
}

impl std::fmt::Debug for Shared {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter
            .debug_struct("Router")
            .field("config", &self.config)
            .finish_non_exhaustive()
    }
}

impl Router {
    /// A router that finds sandboxes through `client`, or by DNS and [`Router::registry`] without one.
    pub fn new(config: Config, client: Option<kube::Client>) -> Result<Self, RouterError> {
        let authorizer = Authorizer::new(&config.authorization, client.as_ref())
            .map_err(RouterError::Authorizer)?;
        let metrics = Arc::new(Metrics::default());
        let resolver = Resolver::new(
            Arc::default(),
            config.cluster_domain.clone(),
            config.resolve_wait,
        );
        resolver.set_by_name(client.is_none());
        let connections = TaskTracker::new();
        let cut = CancellationToken::new();
        let tunnels = Tunnels {
            metrics: Arc::clone(&metrics),
            tasks: connections.clone(),
            cut: cut.clone(),
        };
        let forwarder = Forwarder {
            resolver: Arc::new(resolver),
            metrics: Arc::clone(&metrics),
            tunnels,
            proxy_timeout: config.proxy_timeout,
            dial_timeout: config.dial_timeout,
            dial_retries: config.dial_retries,
            max_request_body_bytes: config.max_request_body_bytes,
        };
        let started = AtomicBool::new(false);
        let shared = Shared {
            config,
            client,
            authorizer,
            forwarder,
            metrics,
            started,
            connections,
            cut,
        };
        Ok(Self {
            shared: Arc::new(shared),
        })
    }

    /// The sandboxes the router knows.
    pub fn registry(&self) -> &Arc<Registry> {
        &self.shared.forwarder.resolver.registry
    }

    pub fn metrics(&self) -> &Arc<Metrics> {
        &self.shared.metrics
    }

    /// The metrics in Prometheus' text format.
    pub fn render_metrics(&self) -> String {
        self.shared
            .metrics
            .render(self.registry().len(), self.registry().is_synced())
    }

    /// Whether requests can be routed: the watch is in step, or there is none.
    pub fn is_ready(&self) -> bool {
        self.shared.client.is_none() || self.registry().is_synced()
    }

    /// Serves HTTP/1.1 and HTTP/2 until `shutdown`, then lets requests in flight finish, for as long as the
    /// configuration allows.
    pub async fn serve(&self, listener: TcpListener, shutdown: CancellationToken) {
        self.start(&shutdown);
        self.accept(listener, None, shutdown).await;
        self.drain().await;
    }

    /// The same over TLS.
    pub async fn serve_tls(
        &self,
        listener: TcpListener,
        shutdown: CancellationToken,
    ) -> Result<(), RouterError> {
        self.start(&shutdown);
        if let Some(tls) = self.shared.config.tls.clone() {
            let material = Arc::new(TlsMaterial::load(tls).map_err(RouterError::Tls)?);
            let (fresh, stop) = (Arc::clone(&material), shutdown.clone());
            tokio::spawn(async move { fresh.keep_fresh(stop).await });
            self.accept(listener, Some(material), shutdown).await;
            self.drain().await;
        }
        Ok(())
    }

    /// Serves `/healthz`, `/readyz` and `/metrics`.
    pub async fn serve_admin(&self, listener: TcpListener, shutdown: CancellationToken) {
        let stopping = shutdown.clone();
        loop {
            let stream = tokio::select! {
                () = stopping.cancelled() => return,
                accepted = listener.accept() => match accepted {
                    Ok((stream, _)) => stream,
                    Err(error) => {
                        pause_after(&error).await;
                        continue;
                    }
                },
            };
            let (router, stop) = (self.clone(), shutdown.clone());
            tokio::spawn(async move {
                let service = service_fn(move |request: Request<Incoming>| {
                    let answer = router.administer(request.uri().path());
                    async move { Ok::<_, Infallible>(answer) }
                });
                let connection = hyper::server::conn::http1::Builder::new()
                    .timer(TokioTimer::new())
                    .header_read_timeout(Duration::from_secs(10))
                    .serve_connection(TokioIo::new(stream), service);
                tokio::select! {
                    _ = connection => {}
                    () = stop.cancelled() => {}
                }
            });
        }
    }

    /// Starts what runs beside the listeners, once.
    fn start(&self, shutdown: &CancellationToken) {
        if self.shared.started.swap(true, Ordering::AcqRel) {
            return;
        }
        let resolver = Arc::clone(&self.shared.forwarder.resolver);
        if let Some(client) = self.shared.client.clone() {
            tokio::spawn(watch::run(client, Arc::clone(&resolver), shutdown.clone()));
        }
        let stop = shutdown.clone();
        tokio::spawn(async move {
            let mut ticks = tokio::time::interval(IDLE_SWEEP);
            loop {
                tokio::select! {
                    () = stop.cancelled() => return,
                    now = ticks.tick() => resolver.close_idle(now),
                }
            }
        });
    }

    async fn accept(
        &self,
        listener: TcpListener,
        tls: Option<Arc<TlsMaterial>>,
        shutdown: CancellationToken,
    ) {
        loop {
            let (stream, peer) = tokio::select! {
                () = shutdown.cancelled() => return,
                accepted = listener.accept() => match accepted {
                    Ok(accepted) => accepted,
                    Err(error) => {
                        pause_after(&error).await;
                        continue;
                    }
                },
            };
            let _ = stream.set_nodelay(true);
            let router = self.clone();
            let acceptor = tls
                .as_ref()
                .map(|material| TlsAcceptor::from(material.current()));
            let shutdown = shutdown.clone();
            self.shared.connections.spawn(async move {
                let _counted = Counted::open(&router.shared.metrics);
                let origin = Origin::new(peer.ip(), acceptor.is_some());
                match acceptor {
                    None => router.converse(stream, origin, shutdown).await,
                    Some(acceptor) => {
                        if let Some(stream) = shake_hands(&acceptor, stream).await {
                            router.converse(stream, origin, shutdown).await;
                        }
                    }
                }
            });
        }
    }

    async fn converse<S>(&self, stream: S, origin: Origin, shutdown: CancellationToken)
    where
        S: AsyncRead + AsyncWrite + Unpin + Send + 'static,
    {
        let router = self.clone();
        let service = service_fn(move |request| {
            let (router, origin) = (router.clone(), origin.clone());
            async move { Ok::<_, Infallible>(router.handle(request, &origin).await) }
        });
        let mut builder = auto::Builder::new(TokioExecutor::new());
        builder
            .http1()
            .timer(TokioTimer::new())
            .header_read_timeout(self.shared.config.header_timeout)
            .max_buf_size(128 * 1024);
        builder
            .http2()
            .timer(TokioTimer::new())
            .keep_alive_interval(Some(Duration::from_secs(30)))
            .max_concurrent_streams(256)
            .initial_stream_window_size(1024 * 1024);
        let connection = builder.serve_connection_with_upgrades(TokioIo::new(stream), service);
        let mut connection = std::pin::pin!(connection);
        tokio::select! {
            // How a connection ends is the client's affair.
            _ = connection.as_mut() => return,
            () = self.shared.cut.cancelled() => return,
            () = shutdown.cancelled() => connection.as_mut().graceful_shutdown(),
        }
        tokio::select! {
            _ = connection => {}
            () = self.shared.cut.cancelled() => {}
        }
    }

    async fn drain(&self) {
        self.shared.connections.close();
        if tokio::time::timeout(
            self.shared.config.shutdown_timeout,
            self.shared.connections.wait(),
        )
        .await
        .is_err()
        {
            self.shared.cut.cancel();
            self.shared.connections.wait().await;
        }
    }

    async fn handle(&self, request: Request<Incoming>, origin: &Origin) -> Response<ProxyBody> {
        let mut tracked = Tracked::start(&self.shared.metrics);
        let mut response = match self.route(request, origin, &mut tracked).await {
            Ok(response) => response,
            Err(failure) => failure.into_response(),
        };
        tracked.status = response.status().as_u16();
        response.body_mut().track(tracked);
        response
    }

    async fn route(
        &self,
        request: Request<Incoming>,
        origin: &Origin,
        tracked: &mut Tracked,
    ) -> Result<Response<ProxyBody>, Failure> {
        let config = &self.shared.config;
        if request.method() == Method::CONNECT {
            return Err(Failure::MethodNotAllowed);
        }
        let routing = Routing {
            host_domains: &config.host_domains,
            path_routing: config.path_routing,
        };
        let target = identify(routing, request.uri(), request.headers())?;
        if config.access_log {
            tracked.log(LoggedRequest {
                method: request.method().clone(),
                path: request.uri().path().to_owned(),
                sandbox: target
                    .as_ref()
                    .map(|target| target.sandbox.as_str().to_owned())
                    .unwrap_or_default(),
                client: origin.address,
            });
        }
        let Some(target) = target else {
            // Without a sandbox, a request can only be a question about the router itself.
            return match request.uri().path() {
                "/healthz" | "/readyz" => Ok(self.administer(request.uri().path())),
                _ => Err(Failure::NoSandbox),
            };
        };
        self.shared
            .authorizer
            .check(request.headers(), &target)
            .await?;
        let forward = &self.shared.forwarder;
        if !telemetry::spans::are_exported() {
            return forward.forward(request, &target, origin).await;
        }
        let carried = self.registry().trace_of(&target.sandbox);
        let (method, path) = (request.method(), request.uri().path());
        let span = trace::begin(method, path, request.headers(), &target, carried.as_ref());
        tracked.trace(span.clone());
        let forwarded = forward.forward(request, &target, origin);
        let response = forwarded.instrument(span.clone()).await?;
        trace::answered(&span, &response);
        Ok(response)
    }

    fn administer(&self, path: &str) -> Response<ProxyBody> {
        match path {
            "/healthz" => json(StatusCode::OK, &br#"{"status":"ok"}"#[..]),
            "/readyz" if self.is_ready() => json(StatusCode::OK, &br#"{"status":"ok"}"#[..]),
            "/readyz" => json(
                StatusCode::SERVICE_UNAVAILABLE,
                &br#"{"detail":"Sandboxes are not known yet."}"#[..],
            ),
            "/metrics" => {
                let metrics = self.render_metrics() + &telemetry::process::render();
                let mut response = json(StatusCode::OK, metrics);
                let kind = HeaderValue::from_static("text/plain; version=0.0.4");
                response.headers_mut().insert(header::CONTENT_TYPE, kind);
                response
            }
            _ => json(StatusCode::NOT_FOUND, &br#"{"detail":"Not Found"}"#[..]),
        }
    }
}

async fn shake_hands(
    acceptor: &TlsAcceptor,
    stream: TcpStream,
) -> Option<tokio_rustls::server::TlsStream<TcpStream>> {
    match tokio::time::timeout(HANDSHAKE_TIMEOUT, acceptor.accept(stream)).await {
        Ok(Ok(stream)) => Some(stream),
        Ok(Err(error)) => {
            tracing::debug!(%error, "a TLS handshake failed");
            None
        }
        Err(_elapsed) => None,
    }
}

/// Out of descriptors, most likely: waiting is all there is to do.
async fn pause_after(error: &io::Error) {
    tracing::warn!(%error, "cannot accept a connection; raise the limit of open files if this goes on");
    tokio::time::sleep(Duration::from_millis(50)).await;
}

struct Counted(Arc<Metrics>);

impl Counted {
    fn open(metrics: &Arc<Metrics>) -> Self {
        metrics.open_connections.fetch_add(1, Ordering::Relaxed);
        Self(Arc::clone(metrics))
    }
}

impl Drop for Counted {
    fn drop(&mut self) {
        self.0.open_connections.fetch_sub(1, Ordering::Relaxed);
    }
}

/// Opens every port the configuration names and serves until `shutdown`.
pub async fn run(
    config: Config,
    client: Option<kube::Client>,
    shutdown: CancellationToken,
) -> Result<(), RouterError> {
    let http = listen(config.http_listen).await?;
    let https = if config.tls.is_some() {
        listen(config.https_listen).await?
    } else {
        None
    };
    let metrics = listen(config.metrics_listen).await?;
    let health = listen(config.health_listen).await?;
    let router = Router::new(config, client)?;
    for admin in [metrics, health].into_iter().flatten() {
        let (router, shutdown) = (router.clone(), shutdown.clone());
        tokio::spawn(async move { router.serve_admin(admin, shutdown).await });
    }
    let plain = async {
        if let Some(listener) = http {
            tracing::info!(address = ?listener.local_addr().ok(), "serving HTTP");
            router.serve(listener, shutdown.clone()).await;
        }
    };
    let secure = async {
        match https {
            Some(listener) => {
                tracing::info!(address = ?listener.local_addr().ok(), "serving HTTPS");
                router.serve_tls(listener, shutdown.clone()).await
            }
            None => Ok(()),
        }
    };
    tokio::join!(plain, secure).1
}

async fn listen(address: ListenAddress) -> Result<Option<TcpListener>, RouterError> {
    let address = match address {
        ListenAddress::Off => return Ok(None),
        ListenAddress::At(address) => address,
        ListenAddress::Any(port) => {
            let both = SocketAddr::new(IpAddr::V6(Ipv6Addr::UNSPECIFIED), port);
            if let Ok(listener) = TcpListener::bind(both).await {
                return Ok(Some(listener));
            }
            SocketAddr::new(IpAddr::V4(Ipv4Addr::UNSPECIFIED), port)
        }
    };
    TcpListener::bind(address)
        .await
        .map(Some)
        .map_err(|source| RouterError::Listen { address, source })
}

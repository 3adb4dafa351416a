//! Accepts connections, takes each request through identify, authorize, resolve and forward, and drains on shutdown.

use std::convert::Infallible;
use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use api::proxy_header;
use http::{HeaderMap, HeaderValue, Method, Request, Response, StatusCode, Version, header};
use hyper::body::Incoming;
use hyper::service::service_fn;
use hyper_util::rt::{TokioIo, TokioTimer};
use tokio::io::AsyncReadExt;
use tokio::net::{TcpListener, TcpStream};
use tokio_rustls::TlsAcceptor;
use tokio_rustls::rustls::ServerConfig;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;
use tracing::Instrument;

use crate::access::{LoggedRequest, Tracked};
use crate::authorize::{Authorizer, AuthorizerError};
use crate::body::ProxyBody;
use crate::config::Config;
use crate::connection;
use crate::failure::{Failure, json};
use crate::forward::Forwarder;
use crate::headers::Origin;
use crate::identify::{Target, identify};
use crate::metrics::Metrics;
use crate::registry::Registry;
use crate::resolve::Resolver;
use crate::shutdown::ShutdownSignal;
use crate::socket_owners::{self, SocketOwners};
use crate::tls::{TlsError, TlsMaterial};
use crate::tunnel::Tunnels;
use crate::workers::{Accepted, Workers};
use crate::{sockets, trace, watch};

/// How often idle connections to sandboxes are checked.
const IDLE_SWEEP: Duration = Duration::from_secs(10);

#[derive(Debug, thiserror::Error)]
pub enum RouterError {
    #[error("authorization cannot be set up")]
    Authorizer(#[source] AuthorizerError),
    #[error("the kernel cannot report the owners of sockets (sock_diag)")]
    SocketOwners(#[source] io::Error),
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
    /// Identifies the local user of a client, if authorization needs that.
    owners: Option<Arc<SocketOwners>>,
}

struct Shared {
    config: Config,
    client: Option<kube::Client>,
    authorizer: Authorizer,
    forwarder: Forwarder,
    metrics: Arc<Metrics>,
    started: AtomicBool,
    /// Set when the router is asked to stop.
    leaving: AtomicBool,
    connections: TaskTracker,
    /// Triggered when the time for requests in flight is over.
    abort: ShutdownSignal,
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
    /// A router that finds sandboxes through `client`; without a client, by DNS and [`Router::registry`].
    pub fn new(config: Config, client: Option<kube::Client>) -> Result<Self, RouterError> {
        let authorizer = Authorizer::new(&config.authorization, client.as_ref())
            .map_err(RouterError::Authorizer)?;
        let owners = if authorizer.asks_for_users() {
            let owners = SocketOwners::of_this_network().map_err(RouterError::SocketOwners)?;
            Some(Arc::new(owners))
        } else {
            None
        };
        let metrics = Arc::new(Metrics::default());
        let resolver = Resolver::new(
            Arc::default(),
            config.cluster_domain.clone(),
            config.resolve_wait,
        );
        resolver.set_by_name(client.is_none());
        let connections = TaskTracker::new();
        let abort = ShutdownSignal::default();
        let tunnels = Tunnels {
            metrics: Arc::clone(&metrics),
            tasks: connections.clone(),
            abort: abort.token().clone(),
        };
        let forwarder = Forwarder {
            resolver: Arc::new(resolver),
            metrics: Arc::clone(&metrics),
            tunnels,
            proxy_timeout: config.proxy_timeout,
            dial_timeout: config.dial_timeout,
            response_header_timeout: config.response_header_timeout,
            dial_retries: config.dial_retries,
            dial_retry_delay: config.dial_retry_delay,
            dial_retry_longest_delay: config.dial_retry_longest_delay,
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
            leaving: AtomicBool::new(false),
            connections,
            abort,
        };
        Ok(Self {
            shared: Arc::new(shared),
            owners,
        })
    }

    /// The same router for listeners of another network namespace, whose sockets `owners` can look up.
    #[must_use]
    pub fn with_socket_owners(&self, owners: SocketOwners) -> Self {
        Self {
            shared: Arc::clone(&self.shared),
            owners: self.owners.as_ref().map(|_| Arc::new(owners)),
        }
    }

    /// The sandboxes that the router knows.
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
            .render(self.registry().len(), self.watch_in_step())
    }

    /// Whether the watch on sandboxes works. `None` for a router without a watch.
    fn watch_in_step(&self) -> Option<bool> {
        let registry = self.registry();
        self.shared.client.as_ref().map(|_| registry.is_in_step())
    }

    /// Whether load balancers should send requests here: sandboxes have been listed, or are found by DNS, and the router is not
    /// stopping. A watch that breaks later does not count, because listed sandboxes are still routed.
    pub fn is_ready(&self) -> bool {
        let finds = self.registry().is_synced() || self.shared.forwarder.resolver.is_by_name();
        finds && !self.shared.leaving.load(Ordering::Acquire)
    }

    /// Makes the router not ready while it still serves, so that load balancers send requests to other routers.
    pub fn leave(&self) {
        self.shared.leaving.store(true, Ordering::Release);
    }

    /// Serves HTTP/1.1 and HTTP/2 until `shutdown`, then lets requests in flight finish, for as long as the
    /// configuration allows.
    pub async fn serve(&self, listener: TcpListener, shutdown: CancellationToken) {
        self.start(&shutdown);
        self.accept(listener, None, None, shutdown).await;
        self.drain().await;
    }

    /// As [`Router::serve`], with connections on dedicated threads, one per CPU: other work of this process cannot delay them.
    pub async fn serve_on_threads(&self, listener: TcpListener, shutdown: CancellationToken) {
        self.start(&shutdown);
        let workers = match self.workers() {
            Ok(workers) => Some(workers),
            Err(error) => {
                tracing::warn!(%error, "cannot start threads for connections; they share the process' other threads");
                None
            }
        };
        let workers = self.accept(listener, None, workers, shutdown).await;
        let join = workers.map(Workers::close);
        self.drain().await;
        if let Some(join) = join {
            let _ = tokio::task::spawn_blocking(join).await;
        }
    }

    fn workers(&self) -> io::Result<Workers> {
        let count = std::thread::available_parallelism().map_or(1, std::num::NonZero::get);
        let (router, connections) = (self.clone(), self.shared.connections.clone());
        Workers::start(
            count,
            move |connection| router.spawn_connection(connection),
            move || {
                let connections = connections.clone();
                async move { connections.wait().await }
            },
        )
    }

    /// As [`Router::serve`], over TLS.
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
            self.accept(listener, Some(material), None, shutdown).await;
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
                        pause_after_accept_error(&error).await;
                        continue;
                    }
                },
            };
            let (router, stop) = (self.clone(), shutdown.clone());
            tokio::spawn(async move {
                let service = service_fn(move |request: Request<Incoming>| {
                    let answer = router.admin_response(request.uri().path());
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

    /// Starts the background tasks, once.
    fn start(&self, shutdown: &CancellationToken) {
        if self.shared.started.swap(true, Ordering::AcqRel) {
            return;
        }
        let resolver = Arc::clone(&self.shared.forwarder.resolver);
        if let Some(client) = self.shared.client.clone() {
            let (resolver, shutdown) = (Arc::clone(&resolver), shutdown.clone());
            let namespace = self.shared.config.watch_namespace.clone();
            // If the watch task ended, the router would route by outdated state.
            tokio::spawn(async move {
                let watch = || {
                    let namespace = namespace.clone();
                    watch::run(
                        client.clone(),
                        namespace,
                        Arc::clone(&resolver),
                        shutdown.clone(),
                    )
                };
                telemetry::panics::restarting("the watch of sandboxes", watch).await;
            });
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

    /// Accepts connections until `shutdown`, then closes the worker threads.
    async fn accept(
        &self,
        listener: TcpListener,
        tls: Option<Arc<TlsMaterial>>,
        mut workers: Option<Workers>,
        shutdown: CancellationToken,
    ) -> Option<Workers> {
        let stop = Arc::new(ShutdownSignal::default());
        if let Err(error) = sockets::tune(&listener) {
            tracing::warn!(%error, "cannot set TCP keep-alive; vanished clients will not be detected");
        }
        loop {
            let (stream, peer) = tokio::select! {
                () = shutdown.cancelled() => {
                    stop.trigger();
                    return workers;
                }
                accepted = listener.accept() => match accepted {
                    Ok(accepted) => accepted,
                    Err(error) => {
                        pause_after_accept_error(&error).await;
                        continue;
                    }
                },
            };
            let connection = Accepted {
                stream,
                peer,
                tls: tls.as_ref().map(|material| material.current()),
                stop: Arc::clone(&stop),
            };
            match &mut workers {
                None => self.spawn_connection(connection),
                Some(workers) => {
                    if let Err(error) = workers.dispatch(connection) {
                        tracing::warn!(%error, "an accepted connection was dropped");
                    }
                }
            }
        }
    }

    /// Serves a connection in a task of the current runtime.
    fn spawn_connection(&self, connection: Accepted<TcpStream>) {
        let router = self.clone();
        let Accepted {
            stream,
            peer,
            tls,
            stop,
        } = connection;
        self.shared.connections.spawn(async move {
            let _counted = Counted::open(&router.shared.metrics);
            let client = router.owners.as_ref().and_then(|owners| {
                let local = stream.local_addr().ok()?;
                Some(socket_owners::Client::new(Arc::clone(owners), local, peer))
            });
            let mut stream = stream;
            let mut origin = Origin::new(peer.ip(), tls.is_some(), client);
            if router.shared.config.tunnels {
                let timeout = router.shared.config.header_timeout;
                let reading = tokio::time::timeout(timeout, tunnel_namespace(&mut stream));
                let read = tokio::select! {
                    read = reading => read,
                    () = stop.triggered() => return,
                };
                match read {
                    Ok(Ok(None)) => {}
                    Ok(Ok(Some(namespace))) => origin = origin.through(&namespace),
                    // Without a valid header the namespace is unknown.
                    Ok(Err(_)) | Err(_) => return,
                }
            }
            let service = {
                let router = router.clone();
                service_fn(move |request| {
                    let (router, origin) = (router.clone(), origin.clone());
                    async move { Ok::<_, Infallible>(router.handle(request, &origin).await) }
                })
            };
            let limits = connection::Limits {
                header_timeout: router.shared.config.header_timeout,
                stop: &stop,
                abort: &router.shared.abort,
            };
            match tls {
                None => connection::plain(stream, service, limits).await,
                Some(tls) => {
                    let timeout = limits.header_timeout;
                    if let Some(stream) = accept_tls(tls, stream, timeout).await {
                        connection::either(stream, service, limits).await;
                    }
                }
            }
        });
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
            self.shared.abort.trigger();
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
        if request.version() == Version::HTTP_11
            && request.uri().authority().is_none()
            && !request.headers().contains_key(header::HOST)
        {
            return Err(Failure::InvalidHost);
        }
        let mut target = identify(config, request.uri(), request.headers())?;
        if let Some(target) = &mut target
            && !self.registry().knows(&target.sandbox)
            && let Some(sandbox) = self.registry().named(&target.sandbox)
        {
            target.sandbox = sandbox;
        }
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
        let Some(mut target) = target else {
            // Without a sandbox, a request can only be for the router itself.
            return match request.uri().path() {
                "/healthz" | "/readyz" => Ok(self.admin_response(request.uri().path())),
                _ => Err(Failure::NoSandbox),
            };
        };
        self.shared
            .authorizer
            .check(request.headers(), &target, origin)
            .await?;
        self.wait_for_claim(&mut target, request.headers(), origin)
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

    /// Waits for a name that refers to no sandbox yet: a claim of that name may be about to be bound. Permission to use the claim's
    /// name does not imply permission to use the sandbox, so the caller authorizes again.
    async fn wait_for_claim(
        &self,
        target: &mut Target,
        headers: &HeaderMap,
        origin: &Origin,
    ) -> Result<(), Failure> {
        let resolver = &self.shared.forwarder.resolver;
        if resolver.is_by_name() || self.registry().knows(&target.sandbox) {
            return Ok(());
        }
        let sandbox = resolver.wait_for_name(&target.sandbox).await?;
        if sandbox == target.sandbox {
            return Ok(());
        }
        target.sandbox = sandbox;
        self.shared.authorizer.check(headers, target, origin).await
    }

    fn admin_response(&self, path: &str) -> Response<ProxyBody> {
        match path {
            "/healthz" => json(StatusCode::OK, &br#"{"status":"ok"}"#[..]),
            "/readyz" if self.is_ready() => json(StatusCode::OK, &br#"{"status":"ok"}"#[..]),
            "/readyz" => json(
                StatusCode::SERVICE_UNAVAILABLE,
                &br#"{"detail":"Sandboxes are not known yet, or the router is stopping."}"#[..],
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

/// Reads the PROXY protocol header that names the namespace of a forwarded connection. `None` for a connection without it.
async fn tunnel_namespace(stream: &mut TcpStream) -> std::io::Result<Option<String>> {
    let mut first = [0; proxy_header::SIGNATURE.len()];
    let length = stream.peek(&mut first).await?;
    // The node writes the header in one call, so it arrives in one segment.
    if first[..length] != proxy_header::SIGNATURE[..] {
        return Ok(None);
    }
    let mut fixed = [0; proxy_header::FIXED_LENGTH];
    stream.read_exact(&mut fixed).await?;
    let length = proxy_header::rest_length(&fixed).ok_or(std::io::ErrorKind::InvalidData)?;
    let mut rest = vec![0; length];
    stream.read_exact(&mut rest).await?;
    let namespace = proxy_header::namespace(&rest).ok_or(std::io::ErrorKind::InvalidData)?;
    Ok(Some(namespace.to_owned()))
}

async fn accept_tls(
    tls: Arc<ServerConfig>,
    stream: TcpStream,
    timeout: Duration,
) -> Option<tokio_rustls::server::TlsStream<TcpStream>> {
    let shaking = TlsAcceptor::from(tls).accept(stream);
    match tokio::time::timeout(timeout, shaking).await {
        Ok(Ok(stream)) => Some(stream),
        Ok(Err(error)) => {
            tracing::debug!(%error, "a TLS handshake failed");
            None
        }
        Err(_elapsed) => None,
    }
}

/// Pauses after a failed accept, which most likely means too many open files.
async fn pause_after_accept_error(error: &io::Error) {
    tracing::warn!(%error, "cannot accept a connection; raise the limit of open files if this repeats");
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

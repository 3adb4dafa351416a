//! Accepts connections, takes each request through identify, authorize, resolve and forward, and drains when told to.

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
use crate::answer::{Failure, json};
use crate::authorize::{Authorizer, AuthorizerError};
use crate::body::ProxyBody;
use crate::config::Config;
use crate::conversation;
use crate::forward::Forwarder;
use crate::headers::Origin;
use crate::identify::{Target, identify};
use crate::metrics::Metrics;
use crate::registry::Registry;
use crate::resolve::Resolver;
use crate::socket_owners::{self, SocketOwners};
use crate::stopping::Moment;
use crate::tls::{TlsError, TlsMaterial};
use crate::tunnel::Tunnels;
use crate::workers::{Arrival, Workers};
use crate::{sockets, trace, watch};

/// How often idle connections to sandboxes are looked through.
const IDLE_SWEEP: Duration = Duration::from_secs(10);

#[derive(Debug, thiserror::Error)]
pub enum RouterError {
    #[error("authorization cannot be set up")]
    Authorizer(#[source] AuthorizerError),
    #[error("the kernel cannot be asked whose connections are (sock_diag)")]
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
    /// Tells which user of this machine a client is, if that matters.
    owners: Option<Arc<SocketOwners>>,
}

struct Shared {
    config: Config,
    client: Option<kube::Client>,
    authorizer: Authorizer,
    forwarder: Forwarder,
    metrics: Arc<Metrics>,
    started: AtomicBool,
    /// Set when the router is told to stop.
    leaving: AtomicBool,
    connections: TaskTracker,
    /// Comes when requests in flight have had their time.
    cut: Moment,
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
        let cut = Moment::default();
        let tunnels = Tunnels {
            metrics: Arc::clone(&metrics),
            tasks: connections.clone(),
            cut: cut.token().clone(),
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
            cut,
        };
        Ok(Self {
            shared: Arc::new(shared),
            owners,
        })
    }

    /// The same router for listeners of another network namespace, whose sockets `owners` knows.
    #[must_use]
    pub fn with_socket_owners(&self, owners: SocketOwners) -> Self {
        Self {
            shared: Arc::clone(&self.shared),
            owners: self.owners.as_ref().map(|_| Arc::new(owners)),
        }
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
            .render(self.registry().len(), self.watch_in_step())
    }

    /// Whether the watch on sandboxes brings what changes. `None` for a router that watches nothing.
    fn watch_in_step(&self) -> Option<bool> {
        let registry = self.registry();
        self.shared.client.as_ref().map(|_| registry.is_in_step())
    }

    /// Whether requests should come here: sandboxes have been listed, or are found by their names, and the router is not about to
    /// stop. A watch that breaks later does not count, because what was listed is still routed.
    pub fn is_ready(&self) -> bool {
        let finds = self.registry().is_synced() || self.shared.forwarder.resolver.is_by_name();
        finds && !self.shared.leaving.load(Ordering::Acquire)
    }

    /// From here on the router is not ready, though it serves: whoever spreads requests over several turns to the others.
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

    /// As [`Router::serve`], with connections on threads of their own, as many as there are processors: what else this
    /// process does cannot hold them up.
    pub async fn serve_on_threads(&self, listener: TcpListener, shutdown: CancellationToken) {
        self.start(&shutdown);
        let workers = match self.workers() {
            Ok(workers) => Some(workers),
            Err(error) => {
                tracing::warn!(%error, "no threads for connections; they share those of the rest");
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
            move |arrival| router.welcome(arrival),
            move || {
                let connections = connections.clone();
                async move { connections.wait().await }
            },
        )
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
            let (resolver, shutdown) = (Arc::clone(&resolver), shutdown.clone());
            let namespace = self.shared.config.watch_namespace.clone();
            // Without it the router would go on with what it knew.
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

    /// Accepts connections until `shutdown`, and gives the threads back.
    async fn accept(
        &self,
        listener: TcpListener,
        tls: Option<Arc<TlsMaterial>>,
        mut workers: Option<Workers>,
        shutdown: CancellationToken,
    ) -> Option<Workers> {
        let stop = Arc::new(Moment::default());
        if let Err(error) = sockets::tune(&listener) {
            tracing::warn!(%error, "clients that vanish without a word will not be noticed");
        }
        loop {
            let (stream, peer) = tokio::select! {
                () = shutdown.cancelled() => {
                    stop.set();
                    return workers;
                }
                accepted = listener.accept() => match accepted {
                    Ok(accepted) => accepted,
                    Err(error) => {
                        pause_after(&error).await;
                        continue;
                    }
                },
            };
            let arrival = Arrival {
                stream,
                peer,
                tls: tls.as_ref().map(|material| material.current()),
                stop: Arc::clone(&stop),
            };
            match &mut workers {
                None => self.welcome(arrival),
                Some(workers) => {
                    if let Err(error) = workers.carry(arrival) {
                        tracing::warn!(%error, "a connection is lost");
                    }
                }
            }
        }
    }

    /// Serves a connection in a task of the current runtime.
    fn welcome(&self, arrival: Arrival<TcpStream>) {
        let router = self.clone();
        let Arrival {
            stream,
            peer,
            tls,
            stop,
        } = arrival;
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
                    () = stop.come() => return,
                };
                match read {
                    Ok(Ok(None)) => {}
                    Ok(Ok(Some(namespace))) => origin = origin.through(&namespace),
                    // It is not known which namespace it is for.
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
            let limits = conversation::Limits {
                header_timeout: router.shared.config.header_timeout,
                stop: &stop,
                cut: &router.shared.cut,
            };
            match tls {
                None => conversation::plain(stream, service, limits).await,
                Some(tls) => {
                    let patience = limits.header_timeout;
                    if let Some(stream) = shake_hands(tls, stream, patience).await {
                        conversation::either(stream, service, limits).await;
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
            self.shared.cut.set();
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
            // Without a sandbox, a request can only be a question about the router itself.
            return match request.uri().path() {
                "/healthz" | "/readyz" => Ok(self.administer(request.uri().path())),
                _ => Err(Failure::NoSandbox),
            };
        };
        self.shared
            .authorizer
            .check(request.headers(), &target, origin)
            .await?;
        self.await_name(&mut target, request.headers(), origin)
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

    /// A name that stands for no sandbox yet may be that of a claim which is about to be bound. Whoever may use something of the
    /// claim's name need not be allowed to use the sandbox, so that is judged again.
    async fn await_name(
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

    fn administer(&self, path: &str) -> Response<ProxyBody> {
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

/// The namespace that a connection was forwarded for, taken off its beginning. `None` for one that was not forwarded.
async fn tunnel_namespace(stream: &mut TcpStream) -> std::io::Result<Option<String>> {
    let mut first = [0; proxy_header::SIGNATURE.len()];
    let length = stream.peek(&mut first).await?;
    // The node writes a header at once, so that it arrives as one.
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

async fn shake_hands(
    tls: Arc<ServerConfig>,
    stream: TcpStream,
    patience: Duration,
) -> Option<tokio_rustls::server::TlsStream<TcpStream>> {
    let shaking = TlsAcceptor::from(tls).accept(stream);
    match tokio::time::timeout(patience, shaking).await {
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

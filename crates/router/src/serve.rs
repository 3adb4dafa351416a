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
use hyper_util::rt::{TokioIo, TokioTimer};
use tokio::net::{TcpListener, TcpStream};
use tokio_rustls::TlsAcceptor;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use crate::access::{LoggedRequest, Tracked};
use crate::answer::{Failure, json};
use crate::authorize::{Authorizer, AuthorizerError};
use crate::body::ProxyBody;
use crate::config::{Config, ListenAddress};
use crate::conversation;
use crate::forward::Forwarder;
use crate::headers::Origin;
use crate::identify::{Routing, identify};
use crate::metrics::Metrics;
use crate::registry::Registry;
use crate::resolve::Resolver;
use crate::stopping::Moment;
use crate::tls::{TlsError, TlsMaterial};
use crate::tunnel::Tunnels;
use crate::watch;
use crate::workers::{Arrival, Workers};

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

    /// Accepts connections until `shutdown`, and gives the threads back.
    async fn accept(
        &self,
        listener: TcpListener,
        tls: Option<Arc<TlsMaterial>>,
        mut workers: Option<Workers>,
        shutdown: CancellationToken,
    ) -> Option<Workers> {
        let stop = Arc::new(Moment::default());
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
            let _ = stream.set_nodelay(true);
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
            let origin = Origin::new(peer.ip(), tls.is_some());
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
                    if let Some(stream) = shake_hands(&TlsAcceptor::from(tls), stream).await {
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
        self.shared
            .forwarder
            .forward(request, &target, origin)
            .await
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
                let mut response = json(StatusCode::OK, self.render_metrics());
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
    tracing::warn!(%error, "cannot accept a connection");
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
            router.serve_on_threads(listener, shutdown.clone()).await;
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

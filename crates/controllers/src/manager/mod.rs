//! The controller process: flags, logs, probes, metrics, leader election and graceful shutdown.
//!
//! ```text
//!   flags ─► client ─► watches ─► caches complete: /readyz ─► lease held ─► controllers run
//!                                                              │              │
//!                                     SIGTERM: drain, release ◄┴──────────────┤
//!                                     lease lost: stop at once, exit non-zero ◄┘
//! ```

mod arguments;
pub mod lease;
mod logging;
mod profile;
mod serve;

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use kube::Client;
use kube::config::{KubeConfigOptions, Kubeconfig};
use tokio::net::TcpListener;
use tokio::signal::unix::{SignalKind, signal};
use tokio::task::JoinSet;
use tokio_util::sync::CancellationToken;
use tracing::{info, warn};

use crate::clock::Clock;
use crate::metrics::{BuildInfo, Metrics};
use crate::runtime::{Parts, Runtime};
use crate::{assemble, check_installed};

pub use arguments::{Args, normalize};
use lease::{Candidate, LEASE_NAME, Leadership, Timing};
pub use logging::Format;
use serve::Profiles;

/// The service name in traces.
const SERVICE: &str = "agent-sandbox-controller";
/// Where a pod finds its own namespace.
const OWN_NAMESPACE: &str = "/var/run/secrets/kubernetes.io/serviceaccount/namespace";

/// Why the process failed.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error("cannot read the kubeconfig")]
    Kubeconfig(#[source] Box<kube::config::KubeconfigError>),
    #[error("cannot find a Kubernetes API; set --kubeconfig or KUBECONFIG, or run in a pod")]
    NoApi(#[source] Box<kube::Error>),
    #[error("cannot make a client of the Kubernetes API")]
    Client(#[source] Box<kube::Error>),
    #[error(transparent)]
    Controllers(#[from] crate::Error),
    #[error("cannot listen on {address}")]
    Listen {
        address: String,
        #[source]
        source: io::Error,
    },
    #[error("cannot handle signals")]
    Signals(#[source] io::Error),
    #[error(
        "cannot tell in which namespace to elect a leader: not running in a pod; set --leader-election-namespace or \
         --leader-elect=false"
    )]
    NoNamespace,
    #[error("cannot export traces")]
    Tracing(#[source] telemetry::export::Error),
    #[error("lost the lease")]
    LeaseLost,
}

/// Runs the process until it is asked to stop.
pub async fn run(args: Args, build: BuildInfo) -> Result<(), Error> {
    if args.version {
        print_version(build);
        return Ok(());
    }
    let exporter = if args.enable_tracing {
        let started = telemetry::Exporter::start(SERVICE).await;
        Some(started.map_err(Error::Tracing)?)
    } else {
        None
    };
    logging::start(&args.logging, exporter.as_ref());
    let outcome = run_logged(&args, build).await;
    if let Some(exporter) = exporter {
        exporter.stop().await;
    }
    outcome
}

async fn run_logged(args: &Args, build: BuildInfo) -> Result<(), Error> {
    for warning in args.warnings() {
        warn!("{warning}");
    }
    let config = client_config(args).await?;
    let host = config.cluster_url.authority();
    let metrics = Arc::new(Metrics::new(host.map_or("", |host| host.as_str()), build));
    let client = Client::try_from(config).map_err(|error| Error::Client(Box::new(error)))?;
    let shutdown = stop_on_signals()?;
    serve_and_run(client, metrics, args, shutdown, Timing::default()).await
}

#[expect(clippy::print_stdout, reason = "the version is what was asked for")]
fn print_version(build: BuildInfo) {
    println!(
        "agent-sandbox-controller {} ({} {} {}/{})",
        env!("CARGO_PKG_VERSION"),
        build.git_commit,
        build.build_date,
        std::env::consts::OS,
        std::env::consts::ARCH
    );
}

/// Everything after the flags are read: probes and metrics, election, controllers.
pub async fn serve_and_run(
    client: Client,
    metrics: Arc<Metrics>,
    args: &Args,
    shutdown: CancellationToken,
    timing: Timing,
) -> Result<(), Error> {
    let ready = Arc::new(AtomicBool::new(false));
    let stop_serving = CancellationToken::new();
    let mut servers = JoinSet::new();
    let profiles = match (args.enable_pprof_debug, args.enable_pprof) {
        (true, _) => Profiles::All,
        (false, true) => Profiles::Cpu,
        (false, false) => Profiles::None,
    };
    let routes = [
        (
            &args.health_probe_bind_address,
            serve::probes(Arc::clone(&ready)),
        ),
        (
            &args.metrics_bind_address,
            serve::metrics(Arc::clone(&metrics), profiles),
        ),
    ];
    for (address, routes) in routes {
        if let Some(listener) = listen(address).await? {
            servers.spawn(serve::serve(listener, routes, stop_serving.clone()));
        }
    }
    let config = args.config();
    match shutdown
        .run_until_cancelled(check_installed(&client, &config))
        .await
    {
        // The stop was requested before anything was started.
        None => return Ok(()),
        Some(installed) => installed?,
    }
    let mut parts = Parts::new(client.clone(), args.config());
    parts.instrumentation = Arc::<Metrics>::clone(&metrics);
    parts.instance = Arc::from(identity());
    let candidate = if args.leader_elect {
        let namespace = election_namespace(&args.leader_election_namespace)?;
        info!(lease = LEASE_NAME, namespace, "electing a leader");
        let identity = parts.instance.to_string();
        Some(Candidate::new(
            client,
            &namespace,
            identity,
            Clock::default(),
            timing,
        ))
    } else {
        None
    };
    let outcome = lead(assemble(parts), candidate, shutdown, &ready, &metrics).await;
    stop_serving.cancel();
    servers.join_all().await;
    outcome
}

/// Runs the controllers while this replica leads.
async fn lead(
    runtime: Runtime,
    candidate: Option<Candidate>,
    shutdown: CancellationToken,
    ready: &AtomicBool,
    metrics: &Metrics,
) -> Result<(), Error> {
    let abort = CancellationToken::new();
    let (elected, is_elected) = tokio::sync::oneshot::channel();
    let controllers = runtime.run(
        shutdown.clone(),
        abort.clone(),
        || ready.store(true, Ordering::Release),
        async {
            let _ = is_elected.await;
        },
    );
    let Some(candidate) = candidate else {
        let _ = elected.send(());
        controllers.await;
        return Ok(());
    };
    let mut leadership: Option<Leadership> = None;
    metrics.set_leader(LEASE_NAME, false);
    let election = async {
        let leadership = leadership.insert(candidate.acquire().await);
        metrics.set_leader(LEASE_NAME, true);
        let _ = elected.send(());
        candidate.keep(leadership).await;
    };
    let mut controllers = std::pin::pin!(controllers);
    tokio::select! {
        () = election => {
            // Another replica may start at any time: nothing may be written from here on.
            abort.cancel();
            metrics.set_leader(LEASE_NAME, false);
            controllers.await;
            return Err(Error::LeaseLost);
        }
        () = &mut controllers => {}
    }
    if let Some(leadership) = leadership {
        candidate.release(leadership).await;
        metrics.set_leader(LEASE_NAME, false);
    }
    Ok(())
}

async fn client_config(args: &Args) -> Result<kube::Config, Error> {
    match &args.kubeconfig {
        Some(path) => {
            let kubeconfig =
                Kubeconfig::read_from(path).map_err(|error| Error::Kubeconfig(Box::new(error)))?;
            kube::Config::from_custom_kubeconfig(kubeconfig, &KubeConfigOptions::default())
                .await
                .map_err(|error| Error::Kubeconfig(Box::new(error)))
        }
        None => kube::Config::infer()
            .await
            .map_err(|error| Error::NoApi(Box::new(kube::Error::InferConfig(error)))),
    }
}

async fn listen(address: &str) -> Result<Option<TcpListener>, Error> {
    let listener = serve::bind(address).await.map_err(|source| Error::Listen {
        address: address.to_owned(),
        source,
    })?;
    if let Some(listener) = &listener
        && let Ok(address) = listener.local_addr()
    {
        info!(%address, "listening");
    }
    Ok(listener)
}

fn election_namespace(flag: &str) -> Result<String, Error> {
    if !flag.is_empty() {
        return Ok(flag.to_owned());
    }
    let own = std::fs::read_to_string(OWN_NAMESPACE).map_err(|_| Error::NoNamespace)?;
    Ok(own.trim().to_owned())
}

/// Names this replica: its host, and a suffix, since two replicas may share a host.
fn identity() -> String {
    let host = std::fs::read_to_string("/proc/sys/kernel/hostname").unwrap_or_default();
    format!("{}_{}", host.trim(), uuid::Uuid::new_v4())
}

/// A token that the first SIGTERM or SIGINT cancels. A second one ends the process.
fn stop_on_signals() -> Result<CancellationToken, Error> {
    let mut terminate = signal(SignalKind::terminate()).map_err(Error::Signals)?;
    let mut interrupt = signal(SignalKind::interrupt()).map_err(Error::Signals)?;
    let shutdown = CancellationToken::new();
    let token = shutdown.clone();
    tokio::spawn(async move {
        for attempt in 0.. {
            tokio::select! {
                _ = terminate.recv() => {}
                _ = interrupt.recv() => {}
            }
            if attempt > 0 {
                std::process::exit(1);
            }
            info!("stopping");
            token.cancel();
        }
    });
    Ok(shutdown)
}

//! The command line of `up`, and what it prints.

use std::net::SocketAddr;
use std::path::PathBuf;
use std::pin::pin;
use std::process::ExitCode;
use std::time::Duration;

use clap::Args;
use tokio::signal::unix::{SignalKind, signal};

use super::router_access::RouterAccess;
use super::router_flags::RouterFlags;
use super::runtime_flags::RuntimeFlags;
use super::{
    API_LISTEN, METRICS_LISTEN, Options, Part, PartFlags, Quickstart, ROUTER_HTTPS_LISTEN,
    ROUTER_LISTEN, Up,
};
use crate::data_directory::{self, Running};
use crate::logging::{self, LogFlags};
use crate::node_flags::NodeFlags;
use crate::{private_system, rootless};

/// The timeout of a start that is asked to stop. Without it, a start that never completes could not be stopped.
pub const START_AFTER_STOP: Duration = Duration::from_secs(10);

/// Run the whole system on this machine: API server, controllers, node and router; or parts of it
#[derive(Debug, Args)]
pub struct Arguments {
    /// Where to keep state [default: $AGENT_SANDBOX_HOME, else $XDG_STATE_HOME/agent-sandbox, else
    /// ~/.local/state/agent-sandbox]
    #[arg(long, value_name = "DIRECTORY")]
    data_dir: Option<PathBuf>,

    /// Where the Kubernetes API listens; port 0 picks a free one
    #[arg(long, value_name = "ADDRESS", default_value = "127.0.0.1:6443")]
    api_listen: SocketAddr,

    /// Where the router listens
    #[arg(long, value_name = "ADDRESS", default_value = "127.0.0.1:8080")]
    router_listen: SocketAddr,

    #[command(flatten)]
    router_access: RouterAccess,

    #[command(flatten)]
    router: RouterFlags,

    /// Route <port>-<sandbox>.<domain> to sandboxes, for browsers, and let the router itself be called <domain>; `localhost` needs no DNS. Every page in a browser on
    /// this machine, those of strangers included, can then send requests to sandboxes
    #[arg(long, value_name = "DOMAIN", value_delimiter = ',')]
    host_domain: Vec<String>,

    /// Where metrics are served
    #[arg(long, value_name = "ADDRESS", default_value = "127.0.0.1:9090")]
    metrics_bind_address: SocketAddr,

    /// Record every request to the API in this file: who asked for what, without bodies
    #[arg(long, value_name = "FILE")]
    audit_log_path: Option<PathBuf>,

    /// How many megabytes the audit log may have before it is put aside
    #[arg(long, value_name = "MEGABYTES", default_value_t = 100, value_parser = clap::value_parser!(u64).range(1..))]
    audit_log_maxsize: u64,

    /// How many audit logs that were put aside are kept
    #[arg(long, value_name = "COUNT", default_value_t = 5)]
    audit_log_maxbackup: usize,

    /// Write this file, as JSON, once everything serves; it goes on exit
    #[arg(long, value_name = "FILE")]
    ready_file: Option<PathBuf>,

    /// Export traces by OTLP over gRPC, to where OTEL_EXPORTER_OTLP_ENDPOINT says
    #[arg(long)]
    pub enable_tracing: bool,

    /// Do not create the template and the warm pool of the quickstart
    #[arg(long)]
    no_quickstart: bool,

    #[command(flatten)]
    runtime: RuntimeFlags,

    #[command(flatten)]
    parts: PartFlags,

    #[command(flatten)]
    node: NodeFlags,

    #[command(flatten)]
    pub logging: LogFlags,
}

/// Runs until SIGINT or SIGTERM. A second signal ends the process at once.
pub async fn execute(arguments: Arguments) -> anyhow::Result<ExitCode> {
    let mut interrupt = signal(SignalKind::interrupt())?;
    let mut terminate = signal(SignalKind::terminate())?;
    let data_directory = match arguments.data_dir {
        Some(directory) => directory,
        None => data_directory::default_path()?,
    };
    data_directory::create(&data_directory)?;
    let mut listeners = vec![
        (API_LISTEN, arguments.api_listen),
        (METRICS_LISTEN, arguments.metrics_bind_address),
    ];
    if arguments.parts.runs(Part::Router) {
        listeners.push((ROUTER_LISTEN, arguments.router_listen));
        if arguments.router.has_https() {
            listeners.push((ROUTER_HTTPS_LISTEN, arguments.router.router_https_listen));
        }
    }
    rootless::enter(&data_directory.join("node/bin"), &listeners)?;
    let options = Options {
        data_directory,
        api_listen: arguments.api_listen,
        router_listen: arguments.router_listen,
        router_access: arguments.router_access,
        router: arguments.router,
        host_domains: arguments.host_domain,
        metrics_listen: arguments.metrics_bind_address,
        audit: arguments
            .audit_log_path
            .map(|path| apiserver::audit::Options {
                path,
                max_bytes: arguments.audit_log_maxsize << 20,
                max_backups: arguments.audit_log_maxbackup,
            }),
        quickstart: if arguments.no_quickstart {
            Quickstart::Nothing
        } else {
            Quickstart::TemplateAndPool
        },
        runtime: arguments.runtime,
        parts: arguments.parts,
        node: arguments.node,
        ready_file: arguments.ready_file,
    };
    let mut starting = tokio::spawn(async move {
        private_system::sweep(&options.data_directory).await;
        Up::start(options).await
    });
    let mut is_to_stop = false;
    let mut given_up = pin!(tokio::time::sleep(START_AFTER_STOP));
    // A system that has not started completely cannot be stopped cleanly: the next start cleans up.
    let mut up = loop {
        tokio::select! {
            started = &mut starting => break started??,
            _ = interrupt.recv() => if is_to_stop { return Ok(ExitCode::from(130)) },
            _ = terminate.recv() => if is_to_stop { return Ok(ExitCode::from(143)) },
            () = &mut given_up, if is_to_stop => return Ok(ExitCode::from(143)),
        }
        given_up.set(tokio::time::sleep(START_AFTER_STOP));
        logging::notice("stopping once everything has started; a second signal ends it at once");
        is_to_stop = true;
    };
    let failure = if is_to_stop {
        None
    } else {
        greet(up.running());
        if let Some(reason) = up.unenforced_policies() {
            warn_of_unenforced_policies(reason);
        }
        tokio::select! {
            _ = interrupt.recv() => None,
            _ = terminate.recv() => None,
            failure = up.failed() => Some(failure),
        }
    };
    let stopped = tokio::select! {
        stopped = up.stop() => stopped,
        _ = interrupt.recv() => return Ok(ExitCode::from(130)),
        _ = terminate.recv() => return Ok(ExitCode::from(143)),
    };
    match failure {
        Some(failure) => Err(failure),
        None => stopped.map(|()| ExitCode::SUCCESS),
    }
}

/// Prints what the user can do next.
fn greet(running: &Running) {
    let https = running.router_https.as_ref();
    let https = https.map(|url| format!(" and {url}")).unwrap_or_default();
    match &running.router {
        Some(router) => println!(
            "agent-sandbox is up: API {}, router {router}{https}",
            running.api_server
        ),
        None => println!("agent-sandbox is up: API {}", running.api_server),
    }
    if !running.disabled.is_empty() {
        println!("not running: {}", running.disabled.join(", "));
    }
    println!();
    println!("  export KUBECONFIG={}", running.kubeconfig.display());
    println!();
    println!("Try:");
    if running.template.is_some() {
        println!("  agent-sandbox run -- python3 -c 'print(6*7)'");
    }
    println!("  kubectl get sandboxes");
    println!("  agent-sandbox --help");
}

/// Warns about what does not work, with the remedy.
fn warn_of_unenforced_policies(reason: &str) {
    logging::notice(&format!(
        "warning: no network policy can be enforced ({reason}): sandboxes under one, as those of the quickstart, wait with \
         NetworkPolicyNotEnforced; install nftables and start `up` again"
    ));
}

//! The controllers of agent-sandbox, and the process around them.
//!
//! Every controller has the shape observe, decide, apply, publish status. That pass is [`planner`]'s, as a state machine without I/O; a
//! controller here wires watches to its queue, and answers the requests of the pass from the caches and the API server.
//! The controllers speak to nothing but a Kubernetes API, and cannot tell an embedded one from a cluster's.
//!
//! | module | owns |
//! |---|---|
//! | [`cache`], [`cached`], [`trimmed`], `watch` | one watch and one cache per kind, shared by all controllers |
//! | [`queue`] | which object is worked on next |
//! | [`runtime`], [`context`] | composing them; what a reconciler gets |
//! | `objects` | the driver of every pass: answers the requests of [`planner::pass`] |
//! | [`writes`], [`events`] | requests with preconditions; events on objects |
//! | `unreadable` | objects that cannot be decoded |
//! | `status_delay` | the delay of the first status of an object |
//! | [`throttle`] | a limit on requests |
//! | [`instrumentation`], [`clock`], [`config`] | hooks, time and randomness, settings |
//! | [`sandbox`] | the controller of `Sandbox` |
//! | [`manager`], [`metrics`] | the process around the controllers |
//! | `trace` | reconciles as spans |
//! | [`template`], [`warm_pool`], [`claim`] | the controllers of the extension kinds |
//! | `pool` | what the controllers of both kinds of pool do alike |
//! | [`kruise`], [`initialise`] | the controllers of the OpenKruise dialect; sending sandboxes their environment variables |
//! | [`extensions`], [`warm_queue`] | adding them to a runtime; the warm queue they share |
//! | [`rbac`] | the permissions of all of them |

#![cfg_attr(not(test), warn(clippy::arithmetic_side_effects))]

pub mod cache;
pub mod cached;
pub mod claim;
pub mod clock;
pub mod config;
pub mod context;
pub mod events;
pub mod extensions;
pub mod initialise;
pub mod instrumentation;
pub mod key;
pub mod kruise;
pub mod manager;
pub mod metrics;
mod objects;
pub mod pod_specs;
mod pool;
pub mod queue;
pub mod rbac;
pub mod retained_policy;
pub mod runtime;
pub mod sandbox;
mod status_delay;
pub mod template;
pub mod throttle;
mod trace;
pub mod trimmed;
mod unreadable;
pub mod warm_pool;
pub mod warm_queue;
mod watch;
pub mod writes;

use kube::Client;
use tokio_util::sync::CancellationToken;

pub use config::Config;
pub use context::Context;
pub use key::ObjectKey;
pub use runtime::{Action, Parts, Runtime};

/// Why controllers cannot run.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error(
        "the API server does not serve {group_version}; install the custom resource definitions of agent-sandbox first"
    )]
    NotInstalled { group_version: String },
    #[error("cannot ask the API server whether it serves {group_version}")]
    Discovery {
        group_version: String,
        #[source]
        source: Box<kube::Error>,
    },
}

/// Runs all controllers that `config` asks for until `shutdown` is cancelled, then lets running work end. `ready` is called once
/// the caches are complete. There is no leader election: the caller must ensure that no other instance runs.
pub async fn run(
    client: Client,
    config: Config,
    shutdown: CancellationToken,
    ready: impl FnOnce(),
) -> Result<(), Error> {
    check_installed(&client, &config).await?;
    let runtime = assemble(Parts::new(client, config));
    let never = CancellationToken::new();
    runtime
        .run(shutdown, never, ready, std::future::ready(()))
        .await;
    Ok(())
}

/// A runtime with all controllers that the configuration asks for.
pub fn assemble(mut parts: Parts) -> Runtime {
    if let Some(limit) = parts.config.requests {
        parts.client = throttle::throttled(parts.client, limit);
    }
    let mut runtime = Runtime::new(parts);
    let sandboxes = sandbox::register(&mut runtime);
    if runtime.context.config.extensions {
        let warm_queue = extensions::register(&mut runtime);
        sandboxes.yield_to(move || warm_queue.demand().waiting > 0);
    }
    if runtime.context.config.kruise {
        kruise::register(&mut runtime);
    }
    runtime
}

/// Checks that the API server serves the kinds that the controllers watch: a watch of a missing kind would wait for ever.
pub async fn check_installed(client: &Client, config: &Config) -> Result<(), Error> {
    let groups = [
        (true, api::CORE_GROUP, api::STORAGE_VERSION),
        // Sandbox sets may refer to a SandboxTemplate.
        (
            config.extensions || config.kruise,
            api::EXTENSIONS_GROUP,
            api::STORAGE_VERSION,
        ),
        (config.kruise, api::KRUISE_GROUP, api::DEPRECATED_VERSION),
    ];
    for (_, group, version) in groups.into_iter().filter(|(needed, ..)| *needed) {
        let group_version = format!("{group}/{version}");
        match client.list_api_group_resources(&group_version).await {
            Ok(_) => {}
            Err(kube::Error::Api(status)) if status.is_not_found() || status.code == 404 => {
                return Err(Error::NotInstalled { group_version });
            }
            Err(source) => {
                return Err(Error::Discovery {
                    group_version,
                    source: Box::new(source),
                });
            }
        }
    }
    Ok(())
}

/// The examples of README.md.
#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct ReadmeExamples;

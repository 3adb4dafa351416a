//! The data plane: a request names a sandbox, and the router brings it there.
//!
//! ```text
//! request ─► identify ─► authorize ─► resolve ─► forward ─► sandbox
//!            who is      may they?     where is    bytes, both ways,
//!            meant?                    it now?     upgrades included
//! ```
//!
//! Each step is a module. `identify` and `scoped_token` are pure; `registry` is what the watch knows; only `forward`
//! and `upstream` touch a sandbox's sockets. The router knows nothing of templates or pools, and of claims only
//! which sandbox they own (`claims`): a request may name either. Unclaimed warm sandboxes are not routable.

#![cfg_attr(not(test), warn(clippy::arithmetic_side_effects))]

mod access;
mod activity;
mod answer;
mod args;
pub mod authorize;
#[cfg(feature = "bench")]
#[expect(
    clippy::arithmetic_side_effects,
    reason = "a benchmark that panics says so to whoever runs it"
)]
pub mod bench;
mod body;
mod claim_watch;
mod claims;
mod config;
mod conversation;
mod forward;
mod headers;
mod identify;
mod listen;
mod metrics;
mod registry;
mod resolve;
mod serve;
pub mod socket_owners;
mod sockets;
mod stopping;
mod strict_http1;
mod tls;
mod trace;
mod tunnel;
mod upstream;
mod watch;
mod workers;

pub use args::{Args, ConfigFileError, Ignored, ProxyArgs, with_config_file};
pub use config::{
    AuthorizationMode, Config, ConfigError, ListenAddress, MutualTls, OwnNames, ReviewCache,
    TlsConfig,
};
pub use listen::run;
pub use registry::Registry;
pub use serve::{Router, RouterError};

/// What a router may do on a cluster. Its role is generated from this.
pub const RBAC: &[&[api::rbac::Rule]] = &[watch::RBAC, authorize::RBAC];

/// The examples of README.md.
#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct ReadmeExamples;

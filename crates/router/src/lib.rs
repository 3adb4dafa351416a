//! The data plane: a proxy that forwards each request to the sandbox that it names.
//!
//! ```text
//! request ─► identify ─► authorize ─► resolve ─► forward ─► sandbox
//!            which         may the       where is    bytes, both ways,
//!            sandbox?      client?       it now?     upgrades included
//! ```
//!
//! Each step is a module. `identify` and `scoped_token` are pure; `registry` holds what the watch reported; only `forward`
//! and `upstream` touch a sandbox's sockets. The router does not read templates or pools. Of a claim it reads only
//! which sandbox it owns (`claims`): a request may name either. Unclaimed warm sandboxes are not routable.

#![cfg_attr(not(test), warn(clippy::arithmetic_side_effects))]

mod access;
mod activity;
mod args;
pub mod authorize;
mod body;
mod claim_watch;
mod claims;
mod config;
mod connection;
mod failure;
mod forward;
mod headers;
mod identify;
mod listen;
mod metrics;
mod registry;
mod resolve;
mod serve;
mod shutdown;
pub mod socket_owners;
mod sockets;
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

/// The permissions a router needs on a cluster. Its role is generated from this.
pub const RBAC: &[&[api::rbac::Rule]] = &[watch::RBAC, authorize::RBAC];

/// The examples of README.md.
#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct ReadmeExamples;

//! The high-level client of agent-sandbox: claim a sandbox, run commands in it, move files, talk to processes, suspend it, take
//! it up again from elsewhere, end it.
//!

#![cfg_attr(not(test), warn(clippy::arithmetic_side_effects))]
#![doc = concat!("```no_run\n", include_str!("../examples/first_sandbox.rs"), "```")]
//!
//! The control plane is reached through `kube`, the sandbox through a router (or straight, inside a cluster): see
//! [`Connection`]. Everything is async; [`blocking`] has the same without.
//!
//! | module | owns |
//! |---|---|
//! | `client` | where handles come from, and the registry of those in use |
//! | `sandbox` | one handle and its life; `rollback` takes back what did not come about |
//! | [`commands`], [`files`], [`process`] | the engines |
//! | `connector`, `retry`, `encoding` | requests: headers, attempts, time limits, caps |
//! | `route`, `gateway`, `tunnel`, [`transport`] | ways to the sandbox |
//! | `cluster`, `follow`, `claim`, `readiness`, `waiting`, [`status`] | claims and sandboxes in the Kubernetes API |
//! | [`metrics`] | what a client counts |
//! | [`trace`] | spans, and the trace context that travels along |

pub mod blocking;
pub mod commands;
pub mod files;
pub mod metrics;
pub mod process;
pub mod status;
pub mod trace;
pub mod transport;

mod claim;
mod client;
mod cluster;
mod connector;
mod encoding;
mod error;
mod follow;
mod gateway;
mod options;
mod readiness;
mod retry;
mod rollback;
mod route;
mod sandbox;
mod tunnel;
mod waiting;

pub use claim::{CreateOptions, WarmPool};
pub use client::{AutoCleanup, Client, ListOptions};
pub use commands::{ExecutionResult, RunOptions};
pub use connector::CallOptions;
pub use error::{Error, ErrorKind, Key};
pub use files::{EntryKind, FileEntry, FileStat};
pub use options::{Connection, DEFAULT_SERVER_PORT, InClusterAddress, Options, Scheme};
pub use retry::RetryPolicy;
pub use sandbox::Sandbox;
pub use status::{Phase, Status};
pub use waiting::Waiting;

pub use api::claim::ClaimShutdownPolicy;
pub use api::sandbox::{EmbeddedObjectMetadata, PersistentVolumeClaimTemplate};
pub use k8s_openapi::jiff::Timestamp;

/// The examples of README.md.
#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct ReadmeExamples;

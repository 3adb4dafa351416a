//! The high-level client of agent-sandbox: claim a sandbox, run commands in it, copy files, interact with processes, suspend and
//! resume it, attach to it from another process, and delete it.
//!

#![cfg_attr(not(test), warn(clippy::arithmetic_side_effects))]
#![doc = concat!("```no_run\n", include_str!("../examples/first_sandbox.rs"), "```")]
//!
//! The control plane is reached through `kube`, the sandbox through a router (or directly, inside a cluster): see
//! [`Connection`]. Everything is async; [`blocking`] is the same API without async.
//!
//! | module | owns |
//! |---|---|
//! | `client` | creates handles, and keeps the registry of open ones |
//! | `sandbox` | one handle and its lifecycle; `rollback` deletes the claim of a failed creation |
//! | [`commands`], [`files`], [`process`] | the engines |
//! | `connector`, `retry`, `encoding` | requests: headers, retries, timeouts, size limits |
//! | `route`, `gateway`, `tunnel`, [`transport`] | connections to the sandbox |
//! | `cluster`, `follow`, `claim`, `readiness`, `waiting`, [`status`] | claims and sandboxes in the Kubernetes API |
//! | [`metrics`] | the client's metrics |
//! | [`trace`] | spans, and propagation of the trace context |

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
pub use api::sandbox::{EmbeddedObjectMetadata, PersistentVolumeClaimTemplate, SuspensionType};
pub use k8s_openapi::jiff::Timestamp;

/// The examples of README.md.
#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct ReadmeExamples;

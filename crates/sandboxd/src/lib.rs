//! The runtime inside a sandbox: it runs commands, transfers files and serves terminals to the clients that can reach the pod.
//!
//! It owns its listeners: the SDK API (8888), the initialisation port (49983), and, if configured, the newer runtime API. It
//! deliberately contains no Kubernetes, no authentication and no isolation: the node starts it inside a container, the
//! router authorizes clients, and a command it runs may do whatever the container may do.
//!
//! [`protocol`] defines the wire format of interactive execution and depends on serde alone, so that clients can use it
//! without the server (`default-features = false`).

#![cfg_attr(not(test), warn(clippy::arithmetic_side_effects))]

pub mod protocol;

#[cfg(feature = "server")]
mod api;
#[cfg(feature = "server")]
mod config;
#[cfg(feature = "server")]
mod cross_site;
#[cfg(feature = "server")]
mod directory_tree;
#[cfg(feature = "server")]
mod exec_http;
#[cfg(feature = "server")]
mod exec_websocket;
#[cfg(feature = "server")]
mod files;
#[cfg(feature = "server")]
mod grpc;
#[cfg(feature = "server")]
mod http_server;
#[cfg(feature = "server")]
mod initialise;
#[cfg(feature = "server")]
mod path;
#[cfg(feature = "server")]
mod ranges;
#[cfg(feature = "server")]
mod reaper;
#[cfg(feature = "server")]
mod response;
#[cfg(feature = "server")]
mod rest_files;
#[cfg(feature = "server")]
mod server;
#[cfg(feature = "server")]
mod session;
#[cfg(feature = "server")]
mod shell_words;
#[cfg(feature = "server")]
mod terminal;
#[cfg(feature = "server")]
mod trace;

#[cfg(feature = "server")]
pub use config::{Config, ConfigError, Invocation, LogFormat, USAGE};
#[cfg(feature = "server")]
pub use server::{Addresses, Server, ServerError, run};
#[cfg(feature = "server")]
pub use terminal::run_terminal_helper;

/// The examples of README.md.
#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct ReadmeExamples;

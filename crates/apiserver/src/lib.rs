//! An embedded Kubernetes API server.
//!
//! It behaves like kube-apiserver for everything that it serves: built-in kinds and CustomResourceDefinitions, list and watch,
//! patches, finalizers, owner references and garbage collection, over a durable store in one directory. Other paths get a 404.
//!
//! ```no_run
//! # async fn example() -> Result<(), Box<dyn std::error::Error>> {
//! use apiserver::{Config, Server};
//!
//! let server = Server::open(Config::new("/var/lib/example")).await?;
//! let client: kube::Client = server.client();          // in process: no socket, no TLS, full rights
//!
//! let listener = tokio::net::TcpListener::bind("127.0.0.1:6443").await?;
//! server.write_kubeconfig("/run/example/kubeconfig".as_ref(), "https://127.0.0.1:6443")?;
//! server.serve(listener, tokio_util::sync::CancellationToken::new()).await?;
//! server.shutdown().await;
//! # Ok(()) }
//! ```
//!
//! Tests use [`Config::in_memory`]: such a server opens in a few milliseconds and leaves no files. CustomResourceDefinitions are
//! created through the API like on any cluster; they are `Established` when the create call returns.
//!
//! # Layers
//!
//! From the bottom. A module uses only modules of the rows above its own; `cargo xtask tidy` checks this. Below all of them are the
//! crates [`store`] (the durable, revisioned log), `pod_security` and `apimachinery`.
//!
//! | modules | own |
//! |---|---|
//! | `clock`, `fair_queue`, `identity`, `path`, `protobuf`, `registry` | the time; seats for requests; certificates and the administrator's token; URLs; the protobuf encoding; the served resources |
//! | `body`, `metadata` | the bodies of requests and responses; the metadata of objects |
//! | [`auth`] | users, tokens, RBAC, impersonation, reviews |
//! | [`admission`], `request_info`, `target` | admission hooks; the permission that a request needs; the target and the options of an operation |
//! | [`audit`] | the audit log |
//! | `strategy` | the rules of each kind: defaults, validation, status |
//! | `operations` | create, get, list, watch, update, patch, delete |
//! | `background`, `kubelet` | garbage collection and the other built-in controllers; the proxy to nodes |
//! | `http` | requests and responses |
//! | `local`, `transport` | the in-process client and HTTPS |
//! | `server` | composes all of them |

#![cfg_attr(not(test), warn(clippy::arithmetic_side_effects))]
#![expect(
    clippy::result_large_err,
    reason = "a Status is the response body and is serialized at once; boxing it would only add an allocation"
)]

pub mod admission;
pub mod audit;
pub mod auth;
mod background;
mod body;
mod clock;
mod fair_queue;
mod http;
mod identity;
mod kubelet;
mod local;
mod metadata;
mod operations;
mod path;
mod protobuf;
mod registry;
mod request_info;
mod server;
mod strategy;
mod target;
mod transport;

pub use self::{
    admission::{Admission, AdmissionRequest, GroupVersionResource, Operation},
    auth::User,
    clock::Clock,
    identity::{IdentityError, NodeCertificate},
    server::{Config, KubeconfigError, OpenError, Server},
    transport::ServeError,
};
/// The Kubernetes `Status` with which an admission hook rejects a write.
pub use apimachinery::status::Status;
/// The revisioned store, for programs that open the data directory or set the size of the event window.
pub use store;

/// The examples of README.md.
#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct ReadmeExamples;

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
//! The layers, from the bottom:
//!
//! | module | owns | exceptions: uses of a layer above |
//! |---|---|---|
//! | [`store`] | the durable, revisioned log; knows no kinds | none |
//! | `registry` | the served resources | none |
//! | [`auth`], [`audit`], [`admission`] | users, RBAC, audit log, admission hooks | `operations::Api`, the parsed path in `http`, `transport::identity` |
//! | `strategy` | defaults and validation of each kind | `operations::Api` and the types of its options |
//! | `operations` | create, get, list, watch, update, patch, delete | none |
//! | `http`, `kubelet` | requests and responses; the proxy to nodes | none |
//! | `background` | garbage collection and the other built-in controllers | none |
//! | `local`, `transport` | the in-process client and HTTPS | `server::ServeError` |
//!
//! `fair_queue`, `pod_security` and `protobuf` use no other module of this crate. `server` composes all of them.

#![cfg_attr(not(test), warn(clippy::arithmetic_side_effects))]
#![expect(
    clippy::result_large_err,
    reason = "a Status is the response body and is serialized at once; boxing it would only add an allocation"
)]

pub mod admission;
pub mod audit;
pub mod auth;
mod background;
#[cfg(feature = "bench")]
#[expect(
    clippy::arithmetic_side_effects,
    reason = "a benchmark may panic on overflow: the user sees it"
)]
pub mod bench;
mod fair_queue;
mod http;
mod kubelet;
mod local;
mod operations;
mod protobuf;
mod registry;
mod server;
mod strategy;
mod transport;

pub use self::{
    admission::{Admission, AdmissionRequest, GroupVersionResource, Operation},
    auth::User,
    operations::Clock,
    server::{Config, KubeconfigError, OpenError, ServeError, Server},
    transport::identity::{IdentityError, NodeCertificate},
};
/// The Kubernetes `Status` with which an admission hook rejects a write.
pub use apimachinery::status::Status;
/// The revisioned store, for programs that open the data directory or set the size of the event window.
pub use store;

/// The examples of README.md.
#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct ReadmeExamples;

//! An embedded Kubernetes API server.
//!
//! What it serves behaves as kube-apiserver does: built-in kinds and CustomResourceDefinitions, list and watch, patches, finalizers,
//! owner references and garbage collection, over a durable store in one directory. What it does not serve is a 404.
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
//! Tests use [`Config::in_memory`]: such a server opens in a few milliseconds and leaves nothing behind. Definitions are created
//! through the API like on any cluster; they are `Established` when the create call returns.
//!
//! The layers, from the bottom: [`store`] (durable, revisioned, knows no kinds), `registry` (what is served), `strategy` (the rules of
//! each kind), `operations` (create to watch), `http` (requests and answers), `background` (collectors), and the transports on top.

#![cfg_attr(not(test), warn(clippy::arithmetic_side_effects))]
#![expect(
    clippy::result_large_err,
    reason = "a Status is the answer itself: it is serialised at once, and boxing it would only add an allocation"
)]

pub mod admission;
pub mod audit;
pub mod auth;
mod background;
#[cfg(feature = "bench")]
#[expect(
    clippy::arithmetic_side_effects,
    reason = "a benchmark that panics says so to whoever runs it"
)]
pub mod bench;
mod fair_queue;
mod http;
mod kubelet;
mod local;
mod operations;
mod pod_security;
mod protobuf;
mod registry;
mod server;
pub mod store;
mod strategy;
mod transport;

pub use self::{
    admission::{Admission, AdmissionRequest, GroupVersionResource, Operation},
    auth::User,
    operations::Clock,
    server::{Config, KubeconfigError, OpenError, ServeError, Server},
    transport::identity::{IdentityError, NodeCertificate},
};
/// The Kubernetes `Status` with which an admission hook refuses.
pub use apimachinery::status::Status;

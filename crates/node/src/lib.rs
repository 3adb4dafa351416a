//! The node: runs the pods bound to it as isolated processes, and reports their status through the Kubernetes API.
//!
//! It communicates with the rest of the system only through a [`kube::Client`], to the embedded API server or to that of a cluster.
//! Decisions about a pod are pure ([`pod_lifecycle`]); containers are behind [`container_runtime::Runtime`].

#![cfg_attr(not(test), warn(clippy::arithmetic_side_effects))]

mod api_objects;
mod awaited_objects;
pub mod clock;
pub mod config;
mod container_spec;
mod dispatcher;
mod environment;
mod eviction;
#[doc(hidden)]
pub mod faults;
mod grpc_health;
mod image_report;
pub mod kubelet;
mod node;
mod pod_images;
pub mod pod_lifecycle;
pub mod pod_machine;
pub mod pod_registry;
mod pod_resources;
mod pod_sandbox_spec;
pub mod pod_uid;
mod pod_worker;
mod probes;
mod quantity;
mod registration;
mod runtime_class;
mod trace;
mod unsupported;
mod unverified_tls;
mod volumes;

pub use container_runtime as runtime;
pub use pod_network as network;

pub use config::Config;
pub use node::{Node, StartError};

/// The examples of README.md.
#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct ReadmeExamples;

//! The node: runs the pods bound to it as isolated processes, and reports their status through the Kubernetes API.
//!
//! It speaks to the rest of the system only through a [`kube::Client`], so that the API may be the embedded one or a
//! cluster's. Decisions about a pod are pure ([`pod_lifecycle`]); containers are behind [`runtime::Runtime`].

#![cfg_attr(not(test), warn(clippy::arithmetic_side_effects))]

mod api_objects;
pub mod assets;
mod awaited_objects;
#[cfg(feature = "bench")]
pub mod bench;
pub mod config;
mod container_spec;
mod dispatcher;
pub mod endpoints;
mod environment;
mod errors;
mod events;
mod eviction;
#[doc(hidden)]
pub mod faults;
mod grpc_health;
mod image_report;
pub mod kubelet;
pub mod logs;
mod names;
pub mod network;
mod node;
mod pod_images;
pub mod pod_lifecycle;
mod pod_network;
mod pod_resources;
pub mod pod_uid;
mod pod_worker;
pub mod privileges;
mod probes;
mod quantity;
mod readable;
pub mod reclaim;
mod registration;
pub mod runtime;
pub mod scheduler;
mod signals;
mod throttling;
mod trace;
mod trees;
mod turns;
mod unsupported;
mod unverified_tls;
pub mod volume_provisioner;
mod volumes;

/// The control group below which all of a node's are, by its data directory.
pub fn control_group(data_dir: &std::path::Path) -> String {
    names::Names::of(data_dir).control_group
}

pub use config::Config;
pub use node::{Node, StartError};

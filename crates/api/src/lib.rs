//! The Kubernetes API of agent-sandbox: the kinds of all API groups, the labels and conditions that the components share, and the
//! rules for names and metadata.
//!
//! This crate performs no I/O and uses no client, clock or controller. It defines every name that more than one component uses.
//!
//! | module | owns |
//! |---|---|
//! | [`sandbox`] | `Sandbox`, the core kind: one pod with a stable identity |
//! | [`template`], [`warm_pool`], [`claim`] | the extension kinds that build on it |
//! | [`kruise`] | the OpenKruise API: `SandboxSet` and the batch `SandboxClaim` |
//! | [`labels`] | label and annotation keys |
//! | [`conditions`] | condition types, reasons, and the merge function |
//! | [`freezing`] | how the controller asks a node to freeze a pod, and how the node answers |
//! | [`names`] | name hashes and names that are valid by construction |
//! | [`metadata`] | what a claim may add to a pod's labels and annotations |
//! | [`events`], [`addresses`] | the limits of events; the addresses that a pod can have |
//! | [`decoding`] | decoding objects one by one, and the readable parts of an object that does not fit its type |
//! | [`readable`], [`errors`] | watches that pass over unreadable objects; errors in logs, without the text of a response |
//! | [`volumes`] | which claim a volume belongs to, and where the node stores it |
//! | [`start_problem`] | why a pod does not start, as controllers write and clients parse it |
//! | [`rbac`] | how a controller declares the permissions it needs |

#![cfg_attr(not(test), warn(clippy::arithmetic_side_effects))]
#![expect(
    clippy::duplicated_attributes,
    reason = "a kind repeats `derive` and `printcolumn` inside its `kube` attribute"
)]

pub mod addresses;
pub mod claim;
pub mod conditions;
pub mod decoding;
pub mod errors;
pub mod events;
pub mod freezing;
pub mod kruise;
pub mod labels;
mod lenient;
pub mod metadata;
pub mod names;
pub mod proxy_header;
pub mod rbac;
pub mod readable;
pub mod sandbox;
pub mod start_problem;
pub mod template;
pub mod volumes;
pub mod warm_pool;

pub use claim::{SandboxClaim, SandboxClaimSpec, SandboxClaimStatus};
pub use sandbox::{Sandbox, SandboxSpec, SandboxStatus};
pub use template::{SandboxTemplate, SandboxTemplateSpec};
pub use warm_pool::{SandboxWarmPool, SandboxWarmPoolSpec, SandboxWarmPoolStatus};

/// The group of the core kind, [`Sandbox`].
pub const CORE_GROUP: &str = "agents.x-k8s.io";
/// The group of [`SandboxTemplate`], [`SandboxClaim`] and [`SandboxWarmPool`].
pub const EXTENSIONS_GROUP: &str = "extensions.agents.x-k8s.io";
/// The group of the OpenKruise API.
pub const KRUISE_GROUP: &str = "agents.kruise.io";
/// The version in which objects of the x-k8s.io groups are stored.
pub const STORAGE_VERSION: &str = "v1beta1";
/// The older version that is still served, with the same schema.
pub const DEPRECATED_VERSION: &str = "v1alpha1";
/// The namespace of the system's own objects on a cluster.
pub const SYSTEM_NAMESPACE: &str = "agent-sandbox-system";

/// The examples of README.md.
#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct ReadmeExamples;

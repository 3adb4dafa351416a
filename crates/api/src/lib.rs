//! The Kubernetes API of agent-sandbox: every kind of every dialect, the labels and conditions the parts agree on, and the
//! rules for names and metadata.
//!
//! This crate performs no I/O and knows no client, clock or controller. Whatever two parts must spell alike is spelled here.
//!
//! | module | owns |
//! |---|---|
//! | [`sandbox`] | `Sandbox`, the core kind: one pod with a stable identity |
//! | [`template`], [`warm_pool`], [`claim`] | the extension kinds over it |
//! | [`kruise`] | the OpenKruise dialect: `SandboxSet` and the batch `SandboxClaim` |
//! | [`labels`] | label and annotation keys |
//! | [`conditions`] | condition types, reasons, and the one merge function |
//! | [`names`] | name hashes and names that are valid by construction |
//! | [`metadata`] | what a claim may add to a pod's labels and annotations |
//! | [`events`], [`addresses`] | what fits into an event; which addresses a pod can have |
//! | [`decoding`] | reading objects one by one, and what is left of one that cannot be read |
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
pub mod events;
pub mod kruise;
pub mod labels;
mod lenient;
pub mod metadata;
pub mod names;
pub mod proxy_header;
pub mod rbac;
pub mod sandbox;
pub mod template;
pub mod warm_pool;

pub use claim::{SandboxClaim, SandboxClaimSpec, SandboxClaimStatus};
pub use sandbox::{Sandbox, SandboxSpec, SandboxStatus};
pub use template::{SandboxTemplate, SandboxTemplateSpec};
pub use warm_pool::{SandboxWarmPool, SandboxWarmPoolSpec, SandboxWarmPoolStatus};

/// The group of the core kind, [`Sandbox`].
pub const CORE_GROUP: &str = "agents.x-k8s.io";
/// The group of [`SandboxTemplate`], [`SandboxClaim`] and [`SandboxWarmPool`].
pub const EXTENSIONS_GROUP: &str = "extensions.agents.x-k8s.io";
/// The group of the OpenKruise dialect.
pub const KRUISE_GROUP: &str = "agents.kruise.io";
/// The version objects of the x-k8s.io groups are stored in.
pub const STORAGE_VERSION: &str = "v1beta1";
/// The older version that is still served, with the same schema.
pub const DEPRECATED_VERSION: &str = "v1alpha1";
/// Where the system's own objects live on a cluster.
pub const SYSTEM_NAMESPACE: &str = "agent-sandbox-system";

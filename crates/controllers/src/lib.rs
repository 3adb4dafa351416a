//! The controllers of agent-sandbox, and the process around them.
//!
//! Every controller has the shape observe, decide, apply, publish status: it gathers facts from the caches, lets
//! [`planner`] decide without touching anything, carries the decision out, and writes what it found to the object's status.
//! The controllers speak to nothing but a Kubernetes API, and cannot tell an embedded one from a cluster's.
//!
//! | module | owns |
//! |---|---|
//! | [`cache`], [`cached`], `watch` | one watch and one cache per kind, shared by all controllers |
//! | [`queue`] | which object is worked on next |
//! | [`runtime`], [`context`] | composing them; what a reconciler is given |
//! | [`writes`], [`events`] | requests with preconditions; events on objects |
//! | [`instrumentation`], [`clock`], [`config`] | hooks, time and randomness, settings |
//! | [`sandbox`] | the controller of `Sandbox` |
//! | [`rbac`] | the permissions of all of them |

pub mod cache;
pub mod cached;
pub mod clock;
pub mod config;
pub mod context;
pub mod events;
pub mod instrumentation;
pub mod key;
pub mod queue;
pub mod rbac;
pub mod runtime;
pub mod sandbox;
mod watch;
pub mod writes;

pub use config::Config;
pub use context::Context;
pub use key::ObjectKey;
pub use runtime::{Action, Runtime};

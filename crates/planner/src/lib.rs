//! The decisions of the controllers, without I/O.
//!
//! A decision is a pure, total function: from what was observed and the time to what to do. There is no client, clock, randomness or
//! log. A [`pass`] over an object combines decisions: which objects it looks up, what it does about a conflict or a lost response,
//! which status it publishes and when the object is reconciled again. It performs no I/O; its environment answers its requests. Each kind
//! has a module of its own; decisions of two kinds are shared.
//!
//! | module | owns |
//! |---|---|
//! | [`blueprint`], [`pod_defaults`], [`env_injection`], [`volume_claims`] | how a sandbox is made from a template |
//! | [`claim`] | what a SandboxClaim needs: a sandbox of its own, warm or cold |
//! | [`kruise_claim`], [`sandbox_set`] | what the two kinds of the OpenKruise dialect need |
//! | [`expiry`] | when something expires |
//! | [`pass`] | requests, answers and errors of a pass |
//! | [`owner`] | who controls an object, and references to a controller |
//! | [`version`] | which state of an object a decision was about |
//! | [`patch`] | JSON merge patches that carry only what changes |
//! | [`pool`], [`pool_view`], [`expectations`], [`pacing`] | keeping a number of sandboxes ready for claims |
//! | [`sandbox`] | what a Sandbox needs: pod, volumes, service, status |
//! | [`template`], [`policy_retention`] | the network policy of a SandboxTemplate |
//! | [`warm_pool`] | what a SandboxWarmPool needs |
//! | [`warm_queue`] | which warm sandbox the next claim gets |

#![cfg_attr(not(test), warn(clippy::arithmetic_side_effects))]

pub mod blueprint;
pub mod claim;
pub mod env_injection;
pub mod expectations;
pub mod expiry;
pub mod kruise_claim;
pub mod owner;
pub mod pacing;
pub mod pass;
pub mod patch;
pub mod pod_defaults;
pub mod policy_retention;
pub mod pool;
pub mod pool_view;
pub mod sandbox;
pub mod sandbox_set;
pub mod template;
pub mod version;
pub mod volume_claims;
pub mod warm_pool;
pub mod warm_queue;

/// The examples of README.md.
#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct ReadmeExamples;

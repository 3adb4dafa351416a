//! The decisions of the controllers, apart from everything they touch.
//!
//! A function here is given what was observed and what time it is, and answers with what to do about it. It is pure and total:
//! no client, clock, randomness or log. Each kind has a module of its own; what two kinds decide alike is shared.

pub mod blueprint;
pub mod claim;
pub mod env_injection;
pub mod expectations;
pub mod expiry;
pub mod merge_patch;
pub mod owner;
pub mod pacing;
pub mod pod_defaults;
pub mod pool;
pub mod template;
pub mod version;
pub mod volume_claims;
pub mod warm_pool;
pub mod warm_queue;

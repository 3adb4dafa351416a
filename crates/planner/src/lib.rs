//! The pure decisions of the controllers.
pub mod blueprint;
pub mod env_injection;
pub mod expectations;
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

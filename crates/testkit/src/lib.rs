//! Fixtures that tests of several crates and the benchmarks share. Nothing here is part of the product.
//!
//! | module | owns |
//! |---|---|
//! | [`clock`] | a fake clock |
//! | [`cluster`] | an API server in the test's process, with our CRDs |
//! | [`node`] | fake nodes that mark pods as running |
//! | [`rewriting`] | a client whose responses a test rewrites |
//! | [`tap`] | a client whose requests a test records and makes fail |
//! | [`wait`] | waiting for a condition, with a deadline |
//! | [`writes`] | the writes that an API server has counted |

pub mod clock;
pub mod cluster;
pub mod node;
pub mod rewriting;
pub mod tap;
pub mod wait;
pub mod writes;

pub use clock::FakeClock;
pub use cluster::Cluster;
pub use node::FakeNode;
pub use tap::Tap;
pub use wait::{eventually, eventually_within};

/// The examples of README.md.
#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct ReadmeExamples;

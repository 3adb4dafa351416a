//! Fixtures that tests of several crates share. Nothing here is part of the product.
//!
//! | module | owns |
//! |---|---|
//! | [`clock`] | a clock that a test moves |
//! | [`cluster`] | an API server in the test's own process, with the definitions of our kinds |
//! | [`node`] | something that behaves as if pods ran |
//! | [`rewriting`] | a client to which answers are shown changed |
//! | [`tap`] | a client that counts, delays and breaks requests |
//! | [`wait`] | waiting for a condition, with a deadline |

pub mod clock;
pub mod cluster;
pub mod node;
pub mod rewriting;
pub mod tap;
pub mod wait;

pub use clock::FakeClock;
pub use cluster::Cluster;
pub use node::FakeNode;
pub use tap::Tap;
pub use wait::{eventually, eventually_within};

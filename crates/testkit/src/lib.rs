//! Fixtures that tests of several crates share. Nothing here is part of the product.
//!
//! | module | owns |
//! |---|---|
//! | [`clock`] | a clock that a test moves |
//! | [`wait`] | waiting for a condition, with a deadline |

pub mod clock;
pub mod wait;

pub use clock::FakeClock;
pub use wait::{eventually, eventually_within};

//! What a user sees of the OpenKruise kinds, against the embedded API server.

#![expect(
    clippy::unwrap_used,
    reason = "what a test's helpers cannot do fails the test"
)]

mod claims;
mod contention;
mod fixture;
mod initialisation;
#[path = "../support/running.rs"]
mod running;
mod sets;

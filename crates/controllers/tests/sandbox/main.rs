//! The sandbox controller against a real API server, in one process.

mod adoption;
mod basic;
mod expiry;
mod faults;
mod fixture;
mod load;
#[path = "../support/running.rs"]
mod running;
mod volumes;

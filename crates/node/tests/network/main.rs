//! Who reaches whom, with real traffic: pods, the machine, and an internet beside it.

#![expect(
    clippy::unwrap_used,
    reason = "a test that cannot go on says so by panicking"
)]

mod changes;
mod dns;
mod fixture;
mod forged_sources;
mod peers;
mod ports;
mod secure_default;
#[path = "../support/mod.rs"]
mod support;
mod unenforced;
mod without_table;

//! Decisions about sandboxes, row by row, and what holds for all of them.

mod cluster;
mod expiry;
mod freezing;
mod handover;
mod metadata;
mod operating_mode;
mod pod;
mod properties;
mod service;
mod start_failure;
mod status;
mod volume_claims;
mod world;

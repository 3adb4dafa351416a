//! kube-rs against the in-process client: what controllers rely on.

mod definitions;
mod deletion;
mod objects;
mod patches;
mod pods;
mod reading;
mod requests;
#[path = "../support/mod.rs"]
mod support;

//! kube-rs with the in-process client: the behaviour that controllers rely on.

mod definitions;
mod deletion;
mod objects;
mod patches;
mod pods;
mod reading;
mod requests;
#[path = "../support/mod.rs"]
mod support;

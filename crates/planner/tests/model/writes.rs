//! What a write to a small model of the API comes to.

use agent_sandbox_planner::warm_queue::SandboxKey;
use apimachinery::patch::merge::apply;
use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::Value;

/// The namespace of everything.
pub const NAMESPACE: &str = "ns";

/// A write that did not happen.
#[derive(Debug, PartialEq)]
pub enum Refused {
    Conflict,
    NotFound,
    AlreadyExists,
}

/// The process ended in the middle of something.
#[derive(Debug)]
pub struct Crash;

pub fn patched<K: Serialize + DeserializeOwned>(object: &K, patch: &Value) -> K {
    let mut value = serde_json::to_value(object).unwrap();
    apply(&mut value, patch.clone());
    serde_json::from_value(value).unwrap()
}

/// Counts a write of a process that ends after so many.
pub fn spend(writes_left: &mut usize) -> Result<(), Crash> {
    *writes_left = writes_left.checked_sub(1).ok_or(Crash)?;
    Ok(())
}

pub fn key_of(name: &str) -> SandboxKey {
    SandboxKey {
        namespace: NAMESPACE.into(),
        name: name.into(),
    }
}

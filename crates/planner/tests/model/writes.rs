//! What both models of the API share.

use agent_sandbox_planner::warm_queue::SandboxKey;
use apimachinery::patch::merge::apply;
use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::Value;

/// The namespace of everything.
pub const NAMESPACE: &str = "ns";

/// The process ended in the middle of something.
#[derive(Debug)]
pub struct Crash;

pub fn patched<K: Serialize + DeserializeOwned>(object: &K, patch: &Value) -> K {
    let mut value = serde_json::to_value(object).unwrap();
    apply(&mut value, patch.clone());
    serde_json::from_value(value).unwrap()
}

pub fn key_of(name: &str) -> SandboxKey {
    SandboxKey {
        namespace: NAMESPACE.into(),
        name: name.into(),
    }
}

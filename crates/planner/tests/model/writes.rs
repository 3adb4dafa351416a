//! What both models of the API share.

use std::sync::{Arc, Mutex, PoisonError};

use agent_sandbox_planner::warm_queue::{Reservation, SandboxKey, WarmQueue};
use api::Sandbox;
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

/// A sandbox that was taken from the queue of a process.
pub struct Reserved {
    queue: Arc<Mutex<WarmQueue>>,
    key: Option<SandboxKey>,
    sandbox: Arc<Sandbox>,
}

impl Reserved {
    pub fn new(queue: &Arc<Mutex<WarmQueue>>, key: SandboxKey, sandbox: Sandbox) -> Self {
        Self {
            queue: Arc::clone(queue),
            key: Some(key),
            sandbox: Arc::new(sandbox),
        }
    }
}

impl Reservation for Reserved {
    fn sandbox(&self) -> &Arc<Sandbox> {
        &self.sandbox
    }

    fn keep(mut self) {
        self.key = None;
    }
}

impl Drop for Reserved {
    fn drop(&mut self) {
        if let Some(key) = self.key.take() {
            let mut queue = self.queue.lock().unwrap_or_else(PoisonError::into_inner);
            queue.release(&key);
        }
    }
}

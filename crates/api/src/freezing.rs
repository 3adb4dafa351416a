//! How the controller and the node agree on frozen pods, through the pod object alone.
//!
//! ```text
//!   controller ──annotation node.agents.x-k8s.io/freeze: "true"──► pod ──► node: cgroup freezer
//!   controller ◄──────────── condition Frozen ──────────────────── pod ◄── node
//! ```
//!
//! A node of agent-sandbox reports the condition on the pods of sandboxes from their first status on. A kubelet never does. Whether a
//! pod's node can freeze it is therefore known before the annotation is set.

use std::collections::BTreeMap;

use crate::labels;

/// The type of the pod condition that says whether all processes of the pod are frozen.
pub const FROZEN: &str = "Frozen";

/// The reasons of the condition [`FROZEN`].
pub mod reason {
    /// True: all processes are frozen.
    pub const FROZEN: &str = "Frozen";
    /// False: nothing asks the node to freeze the pod.
    pub const RUNNING: &str = "Running";
    /// False: the pod is starting, or being frozen.
    pub const FREEZING: &str = "Freezing";
    /// False: the processes could not be frozen; the node tries again.
    pub const FAILED: &str = "FreezeFailed";
    /// False: this node has no cgroup freezer.
    pub const NOT_SUPPORTED: &str = "FreezeNotSupported";
}

/// Whether annotations of a pod ask its node to freeze it.
pub fn is_asked_for(annotations: Option<&BTreeMap<String, String>>) -> bool {
    let asked = annotations.and_then(|annotations| annotations.get(labels::FREEZE));
    asked.is_some_and(|asked| asked == "true")
}

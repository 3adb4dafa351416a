//! What a user sees of claims, against the embedded API server.

#![expect(
    clippy::unwrap_used,
    reason = "what a test's helpers cannot do fails the test"
)]

mod adoption;
mod bindings;
mod events;
mod faults;
mod lifecycle;
mod measurements;
mod policies;
mod recreation;
mod refusals;
#[path = "../support/mod.rs"]
mod support;
mod unreadable;

use std::collections::{BTreeMap, BTreeSet};

use api::Sandbox;
use kube::ResourceExt;
use planner::owner::controller_of;
use support::Cluster;

/// Which claim holds which sandbox. Panics if a claim holds two, or a sandbox is held by two.
async fn holders(cluster: &Cluster) -> BTreeMap<String, String> {
    let mut holders = BTreeMap::new();
    for sandbox in cluster.list::<Sandbox>().await {
        if let Some(owner) =
            controller_of(&sandbox.metadata).filter(|owner| owner.kind == "SandboxClaim")
        {
            let before = holders.insert(owner.name.clone(), sandbox.name_any());
            assert_eq!(before, None, "claim {} holds two sandboxes", owner.name);
        }
    }
    let distinct: BTreeSet<_> = holders.values().collect();
    assert_eq!(distinct.len(), holders.len());
    holders
}

//! Watches claims and records in the registry which sandbox each is bound to. If claims cannot be watched, because their kind is
//! not installed or the router's role does not permit it, sandboxes are still routed by their own names.

use std::collections::HashSet;

use api::decoding::Decoded;
use futures::StreamExt;
use kube::Resource;
use kube::api::Api;
use kube::core::Object;
use kube::runtime::watcher::{self, Event};
use serde::Deserialize;

use crate::claims::BoundClaim;
use crate::registry::Registry;
use crate::watch::key_of;

#[derive(Clone, Debug, Default, Deserialize)]
pub struct WatchedClaimSpec {}

#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default)]
pub struct WatchedClaimStatus {
    sandbox: Option<BoundSandbox>,
}

#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default)]
struct BoundSandbox {
    /// Upstream's first releases wrote the field in upper case.
    #[serde(alias = "Name")]
    name: String,
}

pub type WatchedClaim = Object<WatchedClaimSpec, WatchedClaimStatus>;

/// Watches until the future is dropped.
pub async fn run(api: Api<Decoded<WatchedClaim>>, registry: &Registry) {
    let mut is_refused = false;
    let mut listed = HashSet::new();
    let mut events = object_watch::watch(api, watcher::Config::default());
    while let Some(event) = events.next().await {
        match event {
            Ok(event) => {
                if !matches!(event, Event::Init) {
                    is_refused = false;
                }
                take(event, &mut listed, registry);
            }
            Err(failure) if failure.is_refusal() && !is_refused => {
                is_refused = true;
                tracing::info!(
                    "claims cannot be watched; sandboxes are routed only by their own names"
                );
            }
            Err(_) => {}
        }
    }
}

fn take(event: Event<Decoded<WatchedClaim>>, listed: &mut HashSet<String>, registry: &Registry) {
    match event {
        Event::Init => listed.clear(),
        Event::InitApply(claim) => {
            listed.extend(key_of(claim.meta()).map(|key| key.as_str().to_owned()));
            observe(&claim, registry);
        }
        Event::InitDone => registry.keep_only_claims(&std::mem::take(listed)),
        Event::Apply(claim) => observe(&claim, registry),
        Event::Delete(claim) => {
            if let Some(key) = key_of(claim.meta()) {
                registry.observe_claim(&key, None);
            }
        }
    }
}

fn observe(claim: &Decoded<WatchedClaim>, registry: &Registry) {
    if let Some(key) = key_of(claim.meta()) {
        registry.observe_claim(&key, bound(claim));
    }
}

/// The sandbox that a claim is bound to. A claim that cannot be decoded is bound to no sandbox.
fn bound(claim: &Decoded<WatchedClaim>) -> Option<BoundClaim> {
    let status = claim.readable()?.status.as_ref()?;
    let sandbox = status.sandbox.as_ref()?.name.clone();
    let uid = claim.meta().uid.clone()?;
    (!sandbox.is_empty()).then_some(BoundClaim { uid, sandbox })
}

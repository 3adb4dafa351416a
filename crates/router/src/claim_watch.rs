//! Watches claims and records in the registry which sandbox each is bound to. If claims cannot be watched, because their kind is
//! not installed or the router's role does not permit it, sandboxes are still routed by their own names.

use std::collections::HashSet;
use std::time::Duration;

use api::decoding::Decoded;
use api::errors::chain;
use futures::StreamExt;
use kube::Resource;
use kube::api::Api;
use kube::core::Object;
use kube::runtime::watcher::{self, Event, watcher};
use serde::Deserialize;

use crate::claims::BoundClaim;
use crate::registry::Registry;
use crate::watch::{cannot_watch, key_of};

/// The longest pause between two attempts at a watch that fails.
const MAX_BACKOFF: Duration = Duration::from_secs(30);

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
    let mut failures = 0_u32;
    let mut listed = HashSet::new();
    let mut events = std::pin::pin!(watcher(api, watcher::Config::default()));
    while let Some(event) = events.next().await {
        match event {
            Ok(event) => {
                if !matches!(event, Event::Init) {
                    failures = 0;
                }
                take(event, &mut listed, registry);
            }
            Err(error) => {
                if failures == 0 {
                    report(&error);
                }
                failures = failures.saturating_add(1);
                let pause = Duration::from_millis(100 << failures.min(10));
                tokio::time::sleep(pause.min(MAX_BACKOFF)).await;
            }
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

fn report(error: &watcher::Error) {
    if cannot_watch(error) {
        tracing::info!(error = %chain(error), "claims cannot be watched; sandboxes are routed only by their own names");
    } else {
        tracing::warn!(error = %chain(error), "the watch on claims failed and will be retried");
    }
}

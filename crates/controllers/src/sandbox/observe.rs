//! Gathers every fact a decision about a sandbox depends on.
//!
//! Caches hold only objects that carry a sandbox's label, so that what is not cached may still exist. A decision that rests on
//! absence finds out by its write (creating what exists fails), and is then made again from live reads.

use std::collections::BTreeMap;
use std::sync::Arc;

use api::Sandbox;
use k8s_openapi::api::core::v1::PersistentVolumeClaim;
use planner::sandbox::{Observed, ObservedPod, claim_name, pod_name};

use super::FIELD_MANAGER;
use crate::context::Context;
use crate::key::ObjectKey;
use crate::writes::{WriteError, Writer};

/// Where facts come from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Freshness {
    Cached,
    /// From the API server, because the caches turned out to be behind or not to know.
    Live,
}

/// What is there, or `None` if the sandbox is gone.
pub(super) async fn observe(
    context: &Context,
    key: &ObjectKey,
    freshness: Freshness,
) -> Result<Option<Observed>, WriteError> {
    let sandboxes = &context.caches.sandboxes;
    let sandbox = match freshness {
        Freshness::Cached => sandboxes.get(key),
        Freshness::Live => {
            let live = Writer::new(context, sandboxes, FIELD_MANAGER)
                .get(key)
                .await;
            match live {
                // The watch shows the same, and that is reported.
                Err(error) if error.is_unreadable() => None,
                live => live?,
            }
        }
    };
    let Some(sandbox) = sandbox else {
        return Ok(None);
    };
    let service = match freshness {
        Freshness::Cached => context.caches.services.get(key),
        Freshness::Live => {
            Writer::new(context, &context.caches.services, FIELD_MANAGER)
                .get(key)
                .await?
        }
    };
    Ok(Some(Observed {
        pods: pods(context, key, &sandbox, freshness).await?,
        volume_claims: volume_claims(context, key, &sandbox, freshness).await?,
        service,
        sandbox,
    }))
}

/// The pod that the annotation names, the one of the sandbox's name, and those it controls.
async fn pods(
    context: &Context,
    key: &ObjectKey,
    sandbox: &Sandbox,
    freshness: Freshness,
) -> Result<Vec<Arc<ObservedPod>>, WriteError> {
    let cache = &context.caches.pods;
    let writer = Writer::new(context, cache, FIELD_MANAGER);
    let annotated = key.sibling(pod_name(sandbox));
    let mut pods = BTreeMap::new();
    for name in [key, &annotated] {
        let cached = cache.get(name);
        // That the annotated pod is gone must not be concluded from a cache that may never have known it.
        let must_ask = freshness == Freshness::Live || (cached.is_none() && *name != *key);
        let pod = if must_ask {
            writer.get(name).await?
        } else {
            cached
        };
        if let Some(pod) = pod {
            pods.insert(name.name.to_string(), pod);
        }
        if annotated == *key {
            break;
        }
    }
    let uid = sandbox.metadata.uid.as_deref().unwrap_or_default();
    for pod in cache.controlled_by(uid) {
        let name = pod.metadata.name.clone().unwrap_or_default();
        pods.entry(name).or_insert(pod);
    }
    Ok(pods.into_values().collect())
}

async fn volume_claims(
    context: &Context,
    key: &ObjectKey,
    sandbox: &Sandbox,
    freshness: Freshness,
) -> Result<Vec<Arc<PersistentVolumeClaim>>, WriteError> {
    let cache = &context.caches.volume_claims;
    let writer = Writer::new(context, cache, FIELD_MANAGER);
    let mut claims = Vec::new();
    for template in sandbox.spec.volume_claim_templates.iter().flatten() {
        let template = template.metadata.name.as_deref().unwrap_or_default();
        let name = key.sibling(&claim_name(template, &key.name));
        let claim = match freshness {
            Freshness::Cached => cache.get(&name),
            Freshness::Live => writer.get(&name).await?,
        };
        claims.extend(claim);
    }
    Ok(claims)
}

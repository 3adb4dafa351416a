//! Looks up everything that a decision about a sandbox depends on.
//!
//! The caches hold only objects that carry a sandbox's label, so an object that is not cached may still exist. A decision that rests on
//! absence finds out by its write (creating an object that exists fails), and is then made again from live reads.

use std::collections::BTreeMap;
use std::sync::Arc;

use api::Sandbox;
use k8s_openapi::api::core::v1::PersistentVolumeClaim;

use super::super::{ObservedPod, SandboxFacts, claim_name, pod_name};
use super::Environment;
use crate::pass::{Failure, Objects, RequestError};

/// Where facts come from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Freshness {
    Cached,
    /// From the API server, because the caches were outdated.
    Live,
}

/// The sandbox and everything around it, or `None` if it is gone.
pub(super) async fn observe<E: Environment>(
    env: &E,
    name: &str,
    freshness: Freshness,
) -> Result<Option<SandboxFacts>, E::Error> {
    let sandbox = match look_up(&env.sandboxes(), name, freshness).await {
        // The watch shows the same, and its unreadable objects are reported elsewhere.
        Err(error) if matches!(error.failure(), Failure::Unreadable(_)) => None,
        sandbox => sandbox?,
    };
    let Some(sandbox) = sandbox else {
        return Ok(None);
    };
    let service = look_up(&env.services(), name, freshness).await?;
    Ok(Some(SandboxFacts {
        pods: pods(env, name, &sandbox, freshness).await?,
        volume_claims: volume_claims(env, name, &sandbox, freshness).await?,
        service,
        sandbox,
    }))
}

async fn look_up<K, O: Objects<K>>(
    objects: &O,
    name: &str,
    freshness: Freshness,
) -> Result<Option<Arc<K>>, O::Error> {
    match freshness {
        Freshness::Cached => Ok(objects.cached(name)),
        Freshness::Live => objects.get(name).await,
    }
}

/// The pod that the annotation names, the one of the sandbox's name, and those it controls.
async fn pods<E: Environment>(
    env: &E,
    own_name: &str,
    sandbox: &Sandbox,
    freshness: Freshness,
) -> Result<Vec<Arc<ObservedPod>>, E::Error> {
    let cluster = env.pods();
    let annotated = pod_name(sandbox);
    let mut pods = BTreeMap::new();
    for name in [own_name, annotated] {
        let cached = cluster.cached(name);
        // The cache selects pods by label, so the annotated pod may exist although it is not cached.
        let must_ask = freshness == Freshness::Live || (cached.is_none() && name != own_name);
        let pod = if must_ask {
            cluster.get(name).await?
        } else {
            cached
        };
        if let Some(pod) = pod {
            pods.insert(name.to_owned(), pod);
        }
        if annotated == own_name {
            break;
        }
    }
    let uid = sandbox.metadata.uid.as_deref().unwrap_or_default();
    for pod in cluster.controlled_by(uid) {
        let name = pod.metadata.name.clone().unwrap_or_default();
        pods.entry(name).or_insert(pod);
    }
    Ok(pods.into_values().collect())
}

async fn volume_claims<E: Environment>(
    env: &E,
    own_name: &str,
    sandbox: &Sandbox,
    freshness: Freshness,
) -> Result<Vec<Arc<PersistentVolumeClaim>>, E::Error> {
    let cluster = env.volume_claims();
    let mut claims = Vec::new();
    for template in sandbox.spec.volume_claim_templates.iter().flatten() {
        let template = template.metadata.name.as_deref().unwrap_or_default();
        let name = claim_name(template, own_name);
        claims.extend(look_up(&cluster, &name, freshness).await?);
    }
    Ok(claims)
}

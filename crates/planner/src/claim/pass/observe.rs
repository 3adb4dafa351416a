//! Looks up everything that a decision about a claim depends on. Facts that must not rest on a cache are read from the API server.

use std::sync::Arc;

use api::claim::ClaimSource;
use api::decoding::Unreadable;
use api::{Sandbox, SandboxClaim, SandboxTemplate, SandboxWarmPool};
use k8s_openapi::api::networking::v1::NetworkPolicy;
use k8s_openapi::jiff::Timestamp;
use kube::ResourceExt;

use super::super::{
    ClaimFacts, Holding, Lookup, holding, legacy_policy_name, names_to_look_up, template_name,
    warm_request,
};
use super::Environment;
use crate::owner::is_controlled_by;
use crate::pass::Objects;
use crate::warm_queue::{Request, Reservation};

/// The result of a lookup.
#[derive(Debug)]
enum Found<K> {
    NotAsked,
    Object(Arc<K>),
    Missing,
}

impl<K> Found<K> {
    fn of(object: Option<Arc<K>>) -> Self {
        object.map_or(Self::Missing, Self::Object)
    }

    fn lookup(&self) -> Lookup<'_, K> {
        match self {
            Self::NotAsked => Lookup::NotAsked,
            Self::Object(object) => Lookup::Found(object),
            Self::Missing => Lookup::Missing,
        }
    }
}

/// Everything that is known for one decision.
pub(super) struct Facts<E: Environment> {
    claim: Arc<SandboxClaim>,
    sandboxes: Vec<(String, Option<Arc<Sandbox>>)>,
    warm_pool: Found<SandboxWarmPool>,
    template: Found<SandboxTemplate>,
    reservation: Option<E::Reservation>,
    /// Whether the warm queue was asked for a sandbox.
    pub wanted_warm: bool,
    /// The candidate, once it is the claim's.
    adopted: Option<Arc<Sandbox>>,
    legacy_policy: Option<Arc<NetworkPolicy>>,
    first_observed: Timestamp,
    /// A sandbox under one of the claim's names, or controlled by the claim, that cannot be decoded.
    unreadable: Option<Arc<Unreadable>>,
    /// Why not everything could be looked up. What is known suffices for the claim to expire.
    pub unobserved: Option<E::Error>,
}

/// Looks up what the decision about a claim depends on.
pub(super) async fn observe<E: Environment>(env: &E, claim: &Arc<SandboxClaim>) -> Facts<E> {
    let mut facts = Facts::cached(env, claim);
    facts.unobserved = facts.complete(env).await.err();
    facts
}

impl<E: Environment> Facts<E> {
    /// What the caches show.
    fn cached(env: &E, claim: &Arc<SandboxClaim>) -> Self {
        let (sandboxes, names) = (env.sandboxes(), names_to_look_up(claim));
        let uid = claim.metadata.uid.as_deref().unwrap_or_default();
        let unreadable = names
            .iter()
            .find_map(|name| sandboxes.unreadable(name))
            .or_else(|| {
                let unreadable = sandboxes.all_unreadable();
                unreadable
                    .into_iter()
                    .find(|object| is_controlled_by(&object.metadata, uid))
            });
        // A user can remove the binding, so a sandbox that the claim controls counts under any name.
        let mut controlled = sandboxes.controlled_by(uid);
        controlled.sort_by(|one, other| one.metadata.name.cmp(&other.metadata.name));
        let controlled = controlled
            .into_iter()
            .map(|sandbox| (sandbox.name_any(), Some(sandbox)));
        let by_name = names
            .into_iter()
            .map(|name| (name.to_owned(), sandboxes.cached(name)));
        Self {
            claim: Arc::clone(claim),
            sandboxes: by_name.chain(controlled).collect(),
            warm_pool: Found::NotAsked,
            template: Found::NotAsked,
            reservation: None,
            wanted_warm: false,
            adopted: None,
            legacy_policy: env
                .network_policies()
                .cached(&legacy_policy_name(&claim.name_any())),
            first_observed: env.first_observed(),
            unreadable,
            unobserved: None,
        }
    }

    /// Asks the API server where the caches do not suffice, and reserves a warm sandbox.
    async fn complete(&mut self, env: &E) -> Result<(), E::Error> {
        let claim = Arc::clone(&self.claim);
        let is_owned = self.is_owned();
        // It may be the claim's, so the claim must not get another.
        if let (false, Some(unreadable)) = (is_owned, &self.unreadable) {
            return Err(env.sandboxes().unreadable_error(unreadable));
        }
        if let Some(name) = env.acquired(&claim) {
            if !is_owned {
                self.confirm_sandbox(env, &name).await?;
            }
            // The note stays until the cache shows the sandbox as the claim's.
            if is_owned || !self.is_owned() {
                env.forget_acquired(&claim);
            }
        }
        // The claim is bound to another sandbox only if the API server has confirmed that this one is lost.
        if let Holding::Broken { name } = self.holding() {
            let name = name.to_owned();
            self.confirm_sandbox(env, &name).await?;
        }
        if let (false, Ok(ClaimSource::Pool { pool })) = (self.is_owned(), claim.spec.source()) {
            self.warm_pool = look_up(&env.warm_pools(), pool).await?;
        }
        self.template = self.find_template(env).await?;
        if self.template.lookup().found().is_some()
            && let Some(request) = warm_request(&claim, self.warm_pool.lookup(), self.holding())
        {
            self.wanted_warm = true;
            self.reservation = reserve(env, &claim, &request);
        }
        Ok(())
    }

    async fn confirm_sandbox(&mut self, env: &E, name: &str) -> Result<(), E::Error> {
        let live = env.sandboxes().get(name).await?;
        self.sandboxes.retain(|(looked_up, _)| looked_up != name);
        self.sandboxes.push((name.to_owned(), live));
        Ok(())
    }

    async fn find_template(&self, env: &E) -> Result<Found<SandboxTemplate>, E::Error> {
        let (templates, holding) = (env.templates(), self.holding());
        let Some(name) = template_name(&self.claim, holding, self.warm_pool.lookup()) else {
            return Ok(Found::NotAsked);
        };
        match holding {
            // Only metadata depends on it, so the cache suffices.
            Holding::Owned(_) | Holding::Bound(_) => Ok(Found::of(templates.cached(name))),
            Holding::Planned | Holding::Broken { .. } | Holding::Free => {
                look_up(&templates, name).await
            }
        }
    }

    pub fn holding(&self) -> Holding<'_> {
        holding(&self.claim, &self.sandboxes)
    }

    pub fn is_owned(&self) -> bool {
        matches!(self.holding(), Holding::Owned(_))
    }

    /// The candidate is the claim's now, and leaves the warm queue.
    pub fn keep_candidate(&mut self) {
        if let Some(reservation) = self.reservation.take() {
            self.adopted = Some(Arc::clone(reservation.sandbox()));
            reservation.keep();
        }
    }

    /// A sandbox as it was before it became the claim's.
    pub fn before_adoption(&self, sandbox: &Sandbox) -> Option<&Sandbox> {
        let known = self
            .sandboxes
            .iter()
            .filter_map(|(_, known)| known.as_ref());
        self.adopted
            .iter()
            .chain(known)
            .find(|known| known.metadata.uid == sandbox.metadata.uid)
            .map(Arc::as_ref)
    }

    pub fn observed(&self) -> ClaimFacts<'_> {
        let uid = self.claim.metadata.uid.as_deref().unwrap_or_default();
        let namesake = self
            .sandboxes
            .iter()
            .filter_map(|(_, sandbox)| sandbox.as_deref())
            .find(|sandbox| sandbox.metadata.name == self.claim.metadata.name)
            .filter(|sandbox| !is_controlled_by(&sandbox.metadata, uid));
        let candidate = self.reservation.as_ref().map(Reservation::sandbox);
        ClaimFacts {
            claim: &self.claim,
            pool: self.warm_pool.lookup(),
            template: self.template.lookup(),
            holding: self.holding(),
            unreadable: self
                .unreadable
                .as_ref()
                .map(|unreadable| &unreadable.metadata)
                .filter(|metadata| is_controlled_by(metadata, uid)),
            namesake,
            candidate: candidate.map(Arc::as_ref),
            legacy_policy: self.legacy_policy.as_deref(),
            first_observed: self.first_observed,
        }
    }
}

/// Looks up a template or a pool. Clients give up on a claim if it is missing, so the API server is asked if the cache does not have it.
async fn look_up<K, O: Objects<K>>(objects: &O, name: &str) -> Result<Found<K>, O::Error> {
    if let Some(object) = objects.cached(name) {
        return Ok(Found::Object(object));
    }
    Ok(Found::of(objects.get(name).await?))
}

/// The best warm sandbox that no other claim is bound to. A controller that ended between binding and transfer leaves only the binding.
fn reserve<E: Environment>(
    env: &E,
    claim: &SandboxClaim,
    request: &Request,
) -> Option<E::Reservation> {
    let is_bound_to_another = |sandbox: &Sandbox| {
        let bound = env.claims_bound_to(&sandbox.name_any());
        bound.iter().any(|other| other.uid() != claim.uid())
    };
    // The skipped ones stay reserved until one is found, and then go back to the queue.
    let mut skipped = Vec::new();
    loop {
        let reservation = env.reserve(request)?;
        if !is_bound_to_another(reservation.sandbox()) {
            return Some(reservation);
        }
        skipped.push(reservation);
    }
}

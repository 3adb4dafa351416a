//! Gathers every fact that a decision about a claim needs.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};

use api::claim::ClaimSource;
use api::decoding::Unreadable;
use api::{Sandbox, SandboxClaim, SandboxTemplate, SandboxWarmPool, labels};
use k8s_openapi::api::networking::v1::NetworkPolicy;
use k8s_openapi::jiff::Timestamp;
use kube::ResourceExt;
use planner::claim::{
    Holding, Lookup, Observed, holding, legacy_policy_name, names_to_look_up, template_name,
    warm_request,
};
use planner::owner::is_controlled_by;
use planner::warm_queue::Request;

use super::{BY_PROMISE, Claims, FIELD_MANAGER};
use crate::cache::Cache;
use crate::cached::Cached;
use crate::clock::Clock;
use crate::context::Context;
use crate::key::{ObjectKey, within};
use crate::warm_supply::Reservation;
use crate::writes::{WriteError, Writer};

/// Something that was looked for.
#[derive(Debug)]
enum Found<K> {
    NotAsked,
    Object(Arc<K>),
    Missing,
}

impl<K> Found<K> {
    fn lookup(&self) -> Lookup<'_, K> {
        match self {
            Self::NotAsked => Lookup::NotAsked,
            Self::Object(object) => Lookup::Found(object),
            Self::Missing => Lookup::Missing,
        }
    }
}

/// All that is known for one decision.
#[derive(Debug)]
pub(super) struct Facts {
    claim: Arc<SandboxClaim>,
    sandboxes: Vec<(String, Option<Arc<Sandbox>>)>,
    pool: Found<SandboxWarmPool>,
    template: Found<SandboxTemplate>,
    reservation: Option<Reservation>,
    /// Whether the warm queue was asked, whatever it had.
    pub wanted_warm: bool,
    /// The candidate, once it is the claim's.
    taken: Option<Arc<Sandbox>>,
    legacy_policy: Option<Arc<NetworkPolicy>>,
    first_observed: Timestamp,
    /// A sandbox under one of the claim's names that cannot be read.
    unreadable: Option<Arc<Unreadable>>,
    /// Why not everything could be looked up.
    pub trouble: Option<WriteError>,
}

impl Facts {
    pub fn holding(&self) -> Holding<'_> {
        holding(&self.claim, &self.sandboxes)
    }

    pub fn candidate(&self) -> Option<&Arc<Sandbox>> {
        self.reservation
            .as_ref()
            .map(|reservation| &reservation.sandbox)
    }

    pub fn template(&self) -> Option<&SandboxTemplate> {
        self.template.lookup().found()
    }

    /// A sandbox as it was before it became the claim's.
    pub fn source_of(&self, sandbox: &Sandbox) -> Option<&Sandbox> {
        let known = self
            .sandboxes
            .iter()
            .filter_map(|(_, known)| known.as_ref());
        self.taken
            .iter()
            .chain(known)
            .find(|known| known.metadata.uid == sandbox.metadata.uid)
            .map(Arc::as_ref)
    }

    /// The candidate is the claim's now.
    pub fn keep_candidate(&mut self) {
        if let Some(reservation) = self.reservation.take() {
            self.taken = Some(Arc::clone(&reservation.sandbox));
            reservation.keep();
        }
    }

    pub fn observed(&self) -> Observed<'_> {
        let uid = self.claim.metadata.uid.as_deref().unwrap_or_default();
        let namesake = self
            .sandboxes
            .iter()
            .filter_map(|(_, sandbox)| sandbox.as_deref())
            .find(|sandbox| sandbox.metadata.name == self.claim.metadata.name)
            .filter(|sandbox| !is_controlled_by(&sandbox.metadata, uid));
        Observed {
            claim: &self.claim,
            pool: self.pool.lookup(),
            template: self.template.lookup(),
            holding: self.holding(),
            unreadable: self
                .unreadable
                .as_ref()
                .map(|left| &left.metadata)
                .filter(|metadata| is_controlled_by(metadata, uid)),
            namesake,
            candidate: self.candidate().map(Arc::as_ref),
            legacy_policy: self.legacy_policy.as_deref(),
            first_observed: self.first_observed,
        }
    }
}

/// Looks at everything a decision about the claim depends on. What must not be believed of a cache is asked of the server. Where that
/// fails, the facts say so: what is known suffices for the claim to expire.
pub(super) async fn observe(
    context: &Context,
    claims: &Claims,
    key: &ObjectKey,
    claim: &Arc<SandboxClaim>,
) -> Facts {
    let mut facts = known(context, claims, key, claim);
    facts.trouble = facts.complete(context, claims, key).await.err();
    facts
}

/// What the caches know.
fn known(context: &Context, claims: &Claims, key: &ObjectKey, claim: &Arc<SandboxClaim>) -> Facts {
    let caches = &context.caches;
    let names = names_to_look_up(claim);
    let uid = claim.metadata.uid.as_deref().unwrap_or_default();
    let unreadable = names
        .iter()
        .find_map(|name| caches.sandboxes.unreadable(&key.sibling(name)))
        .or_else(|| {
            let left = caches.sandboxes.unreadable_in(&key.namespace);
            left.into_iter()
                .find(|left| is_controlled_by(&left.metadata, uid))
        });
    let by_name = names
        .into_iter()
        .map(|name| (name.to_owned(), caches.sandboxes.get(&key.sibling(name))));
    Facts {
        claim: Arc::clone(claim),
        sandboxes: by_name.chain(controlled(context, key, claim)).collect(),
        pool: Found::NotAsked,
        template: Found::NotAsked,
        reservation: None,
        wanted_warm: false,
        taken: None,
        legacy_policy: caches
            .network_policies
            .get(&key.sibling(&legacy_policy_name(&key.name))),
        first_observed: claims.first_seen.of(key, context.clock.now()),
        unreadable,
        trouble: None,
    }
}

/// The sandboxes that the claim controls, under whatever names: a user can take the binding off the claim.
fn controlled(
    context: &Context,
    key: &ObjectKey,
    claim: &SandboxClaim,
) -> impl Iterator<Item = (String, Option<Arc<Sandbox>>)> {
    let uid = claim.metadata.uid.as_deref().unwrap_or_default();
    let mut controlled = context.caches.sandboxes.controlled_by(uid);
    // An owner reference cannot cross namespaces, so a UID in another one is ignored.
    controlled.retain(|sandbox| sandbox.metadata.namespace.as_deref() == Some(&key.namespace));
    controlled.sort_by(|one, other| one.metadata.name.cmp(&other.metadata.name));
    controlled
        .into_iter()
        .map(|sandbox| (sandbox.name_any(), Some(sandbox)))
}

/// The best warm sandbox but those that other claims are bound to: a controller that ended before it could hand them over leaves
/// only that word of it.
fn reserve(
    context: &Context,
    claims: &Claims,
    claim: &SandboxClaim,
    request: &Request,
) -> Option<Reservation> {
    let is_promised = |sandbox: &Sandbox| {
        let name = within(sandbox, &sandbox.name_any());
        let claims = context.caches.claims.indexed(BY_PROMISE, &name);
        claims.iter().any(|other| other.uid() != claim.uid())
    };
    // Those that are passed over go back when one is found.
    let mut promised = Vec::new();
    loop {
        let reservation = claims.supply.reserve(request)?;
        if !is_promised(&reservation.sandbox) {
            return Some(reservation);
        }
        promised.push(reservation);
    }
}

impl Facts {
    /// Asks the server for what the caches must not be believed of, and reserves a warm sandbox.
    async fn complete(
        &mut self,
        context: &Context,
        claims: &Claims,
        key: &ObjectKey,
    ) -> Result<(), WriteError> {
        let claim = Arc::clone(&self.claim);
        let is_owned = matches!(self.holding(), Holding::Owned(_));
        // Neither gone nor somebody else's, as far as anybody can tell.
        if let (false, Some(left)) = (is_owned, &self.unreadable) {
            let name = left.metadata.name.as_deref().unwrap_or_default();
            return Err(WriteError::unreadable::<Sandbox>(&key.sibling(name), left));
        }
        if let Some(name) = claims.acquired.unconfirmed(&claim) {
            if !is_owned {
                self.confirm_sandbox(context, key, &name).await?;
            }
            // What the server said may not be in the cache yet.
            if is_owned || !matches!(self.holding(), Holding::Owned(_)) {
                claims.acquired.settle(&claim);
            }
        }
        if let Holding::Broken { name } = self.holding() {
            let name = name.to_owned();
            self.confirm_sandbox(context, key, &name).await?;
        }
        let is_owned = matches!(self.holding(), Holding::Owned(_));
        if let (false, Ok(ClaimSource::Pool { pool })) = (is_owned, claim.spec.source()) {
            self.pool = look_up(context, &context.caches.warm_pools, &key.sibling(pool)).await?;
        }
        self.template = self.find_template(context, key).await?;
        if self.template().is_some()
            && let Some(request) = warm_request(&claim, self.pool.lookup(), self.holding())
        {
            self.wanted_warm = true;
            self.reservation = reserve(context, claims, &claim, &request);
        }
        Ok(())
    }

    /// A claim is bound to another sandbox only once the server itself says that this one is lost.
    async fn confirm_sandbox(
        &mut self,
        context: &Context,
        key: &ObjectKey,
        name: &str,
    ) -> Result<(), WriteError> {
        let sandboxes = Writer::new(context, &context.caches.sandboxes, FIELD_MANAGER);
        let live = sandboxes.get(&key.sibling(name)).await?;
        self.sandboxes.retain(|(looked_up, _)| looked_up != name);
        self.sandboxes.push((name.to_owned(), live));
        Ok(())
    }

    async fn find_template(
        &self,
        context: &Context,
        key: &ObjectKey,
    ) -> Result<Found<SandboxTemplate>, WriteError> {
        let templates = &context.caches.templates;
        let holding = self.holding();
        let Some(name) = template_name(&self.claim, holding, self.pool.lookup()) else {
            return Ok(Found::NotAsked);
        };
        let key = key.sibling(name);
        match holding {
            // It only matters for metadata: a cache that does not have it is good enough.
            Holding::Owned(_) | Holding::Promised(_) => {
                Ok(templates.get(&key).map_or(Found::Missing, Found::Object))
            }
            Holding::Planned | Holding::Broken { .. } | Holding::Free => {
                look_up(context, templates, &key).await
            }
        }
    }
}

/// Clients give up on a claim whose template or pool is missing, so a cache that does not have it is not proof enough.
async fn look_up<K: Cached>(
    context: &Context,
    cache: &Cache<K>,
    key: &ObjectKey,
) -> Result<Found<K>, WriteError> {
    if let Some(object) = cache.get(key) {
        return Ok(Found::Object(object));
    }
    let live = Writer::new(context, cache, FIELD_MANAGER).get(key).await?;
    Ok(live.map_or(Found::Missing, Found::Object))
}

/// When each claim that has no sandbox yet was first seen.
#[derive(Clone, Debug, Default)]
pub(super) struct FirstSeen(Arc<Mutex<HashMap<ObjectKey, Timestamp>>>);

impl FirstSeen {
    /// Notes claims as they come, and forgets them once they are bound or gone.
    pub fn follow(&self, claims: &Cache<SandboxClaim>, clock: &Clock) {
        let (seen, clock) = (self.clone(), clock.clone());
        claims.subscribe(move |change| {
            let key = ObjectKey::of(change.latest().as_ref());
            let is_waiting = change.after.is_some_and(|claim| {
                !claim
                    .annotations()
                    .contains_key(labels::CONTROLLER_FIRST_OBSERVED_AT)
            });
            let mut seen = seen.0.lock().unwrap_or_else(PoisonError::into_inner);
            if !is_waiting || change.departed().is_some() {
                seen.remove(&key);
            }
            if is_waiting {
                seen.entry(key).or_insert_with(|| clock.now());
            }
        });
    }

    /// How many claims wait for their sandbox.
    pub fn len(&self) -> usize {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).len()
    }

    fn of(&self, key: &ObjectKey, now: Timestamp) -> Timestamp {
        let seen = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        seen.get(key).copied().unwrap_or(now)
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicI64, Ordering};

    use api::SandboxClaimSpec;
    use kube::runtime::watcher::Event;

    use super::*;

    #[test]
    fn a_claim_made_again_under_its_name_is_first_seen_then() {
        let hand = Arc::new(AtomicI64::new(1_000));
        let read = Arc::clone(&hand);
        let clock =
            Clock::new(move || Timestamp::from_second(read.load(Ordering::Relaxed)).unwrap());
        let cache = Cache::<SandboxClaim>::new(None);
        let seen = FirstSeen::default();
        seen.follow(&cache, &clock);
        let claim = |uid: &str, version: &str| {
            let mut claim = SandboxClaim::new("c", SandboxClaimSpec::default());
            claim.metadata.uid = Some(uid.to_owned());
            claim.metadata.resource_version = Some(version.to_owned());
            claim
        };
        let key = ObjectKey::of(&claim("first", "1"));
        let first_seen = || seen.of(&key, Timestamp::UNIX_EPOCH).as_second();
        cache.apply(Event::Apply(claim("first", "1")));
        hand.store(2_000, Ordering::Relaxed);
        cache.apply(Event::Apply(claim("first", "2")));
        assert_eq!(first_seen(), 1_000);
        cache.apply(Event::Apply(claim("second", "4")));
        assert_eq!(first_seen(), 2_000);
        cache.apply(Event::Delete(claim("second", "5")));
        assert_eq!(seen.len(), 0);
    }
}

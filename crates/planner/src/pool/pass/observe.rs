//! Counts the sandboxes of a pool. The API server is asked where the cache does not suffice.

use std::marker::PhantomData;
use std::sync::Arc;

use api::decoding::Unreadable;
use api::{Sandbox, SandboxTemplate};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;

use super::{Environment, Pool};
use crate::expectations::Expectations;
use crate::owner::is_controlled_by;
use crate::pass::Objects;
use crate::pool_view::Sandboxes;

/// Drops the expectations that the cache meets.
pub(super) fn settle<P: Pool, E: Environment<P>>(env: &E, expectations: &mut Expectations) {
    let sandboxes = env.sandboxes();
    expectations.settle(|name| {
        let seen = |metadata: &ObjectMeta| {
            let is_deleting = metadata.deletion_timestamp.is_some();
            (metadata.uid.clone().unwrap_or_default(), is_deleting)
        };
        match sandboxes.cached(name) {
            Some(sandbox) => Some(seen(&sandbox.metadata)),
            None => sandboxes.unreadable(name).map(|it| seen(&it.metadata)),
        }
    });
}

/// Lists the pool's sandboxes from the API server, where memory and cache cannot tell how many there are.
pub(super) async fn confirm<P: Pool, E: Environment<P>>(
    env: &E,
    pool: &P,
    sandboxes: &[Arc<Sandbox>],
    expectations: &mut Expectations,
) -> Result<(), E::Error> {
    let now = env.now();
    if !expectations.needs_confirmation(now) {
        return Ok(());
    }
    let selector = format!("{}={}", P::LABEL, pool.label());
    let listed = env.sandboxes().list_metadata(&selector).await?;
    let unreadable = unreadable(env, pool);
    let listed = listed.iter().map(name_and_uid);
    let cached = sandboxes
        .iter()
        .map(|sandbox| &sandbox.metadata)
        .chain(unreadable.iter().map(|it| &it.metadata))
        .map(name_and_uid);
    let (listed, cached): (Vec<_>, Vec<_>) = (listed.collect(), cached.collect());
    expectations.confirm(&listed, &cached, now);
    Ok(())
}

fn name_and_uid(metadata: &ObjectMeta) -> (String, String) {
    let name = metadata.name.clone().unwrap_or_default();
    (name, metadata.uid.clone().unwrap_or_default())
}

/// The pool's sandboxes that cannot be decoded. They count, or the pool would create others in their place.
pub(super) fn unreadable<P: Pool, E: Environment<P>>(env: &E, pool: &P) -> Vec<Arc<Unreadable>> {
    let mut unreadable = env.sandboxes().all_unreadable();
    if unreadable.is_empty() {
        return unreadable;
    }
    let (label, uid) = (pool.label(), pool.meta().uid.as_deref().unwrap_or_default());
    unreadable.retain(|sandbox| {
        let metadata = &sandbox.metadata;
        let labels = metadata.labels.as_ref();
        metadata.deletion_timestamp.is_none()
            && is_controlled_by(metadata, uid)
            && labels.and_then(|labels| labels.get(P::LABEL)) == Some(&label)
    });
    unreadable
}

/// The template that a pool names. If the cache does not have it, the API server is asked.
pub(crate) async fn template<P: Pool, O: Objects<SandboxTemplate>>(
    templates: &O,
    pool: &P,
) -> Result<Option<Arc<SandboxTemplate>>, O::Error> {
    let Some(name) = pool.template() else {
        return Ok(None);
    };
    match templates.cached(name) {
        Some(template) => Ok(Some(template)),
        None => templates.get(name).await,
    }
}

/// The sandboxes that claims have reserved.
pub(super) struct Reserved<'a, P, E> {
    env: &'a E,
    kind: PhantomData<fn() -> P>,
}

impl<'a, P, E> Reserved<'a, P, E> {
    pub fn new(env: &'a E) -> Self {
        Self {
            env,
            kind: PhantomData,
        }
    }
}

impl<P: Pool, E: Environment<P>> Sandboxes for Reserved<'_, P, E> {
    fn holds(&self, sandbox: &Sandbox) -> bool {
        self.env.is_reserved(sandbox)
    }
}

/// The sandboxes that were deleted, though the cache may not show it.
pub(super) struct Deleted<'a>(pub &'a Expectations);

impl Sandboxes for Deleted<'_> {
    fn holds(&self, sandbox: &Sandbox) -> bool {
        let metadata = &sandbox.metadata;
        let name = metadata.name.as_deref().unwrap_or_default();
        self.0
            .is_deleted(name, metadata.uid.as_deref().unwrap_or_default())
    }
}

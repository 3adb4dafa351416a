//! Gathers what a pool's plan rests on, asking the API server itself where the caches cannot be believed.

use std::sync::Arc;

use api::decoding::Unreadable;
use api::{Sandbox, SandboxTemplate};
use kube::ResourceExt;
use kube::core::ObjectMeta;
use planner::expectations::Expectations;
use planner::owner::is_controlled_by;
use planner::stock::Sandboxes;

use super::{Keeper, Pool};
use crate::context::Context;
use crate::key::ObjectKey;
use crate::warm_supply::{WarmSupply, sandbox_key};
use crate::writes::{WriteError, Writer, list_metadata};

/// The template that a pool names. That it is missing is only believed of the API server itself.
pub(crate) async fn template<P: Pool>(
    context: &Context,
    key: &ObjectKey,
    pool: &P,
) -> Result<Option<Arc<SandboxTemplate>>, WriteError> {
    let Some(name) = pool.template() else {
        return Ok(None);
    };
    let (name, templates) = (key.sibling(name), &context.caches.templates);
    if let Some(template) = templates.get(&name) {
        return Ok(Some(template));
    }
    let templates = Writer::new(context, templates, P::FIELD_MANAGER);
    templates.get(&name).await
}

impl<P: Pool> Keeper<'_, P> {
    /// Forgets what the cache shows by now.
    pub(super) fn strike_off(&self, expectations: &mut Expectations) {
        let sandboxes = &self.context.caches.sandboxes;
        expectations.settle(|name| {
            let key = self.key.sibling(name);
            let seen = |metadata: &ObjectMeta| {
                let is_going = metadata.deletion_timestamp.is_some();
                (metadata.uid.clone().unwrap_or_default(), is_going)
            };
            match sandboxes.get(&key) {
                Some(sandbox) => Some(seen(&sandbox.metadata)),
                None => sandboxes.unreadable(&key).map(|left| seen(&left.metadata)),
            }
        });
    }

    /// The pool's sandboxes that cannot be read. They count, or the pool would make others in their place.
    pub(super) fn unreadable(&self) -> Vec<Arc<Unreadable>> {
        let sandboxes = &self.context.caches.sandboxes;
        let mut left = sandboxes.unreadable_in(&self.key.namespace);
        if left.is_empty() {
            return left;
        }
        let (label, uid) = (self.pool.label(), self.pool.uid().unwrap_or_default());
        left.retain(|left| {
            let metadata = &left.metadata;
            let labels = metadata.labels.as_ref();
            metadata.deletion_timestamp.is_none()
                && is_controlled_by(metadata, &uid)
                && labels.and_then(|labels| labels.get(P::LABEL)) == Some(&label)
        });
        left
    }

    /// Asks the API server itself how many there are, where it cannot be told otherwise.
    pub(super) async fn confirm(
        &self,
        sandboxes: &[Arc<Sandbox>],
        expectations: &mut Expectations,
    ) -> Result<(), kube::Error> {
        let context = self.context;
        let now = context.clock.now();
        if !expectations.needs_confirmation(now) {
            return Ok(());
        }
        let selector = format!("{}={}", P::LABEL, self.pool.label());
        let listed = list_metadata::<Sandbox>(context, &self.key.namespace, &selector).await?;
        let unreadable = self.unreadable();
        let listed = listed.iter().map(identity);
        let cached = sandboxes
            .iter()
            .map(|sandbox| &sandbox.metadata)
            .chain(unreadable.iter().map(|left| &left.metadata))
            .map(identity);
        let (listed, cached): (Vec<_>, Vec<_>) = (listed.collect(), cached.collect());
        expectations.confirm(&listed, &cached, now);
        Ok(())
    }
}

fn identity(metadata: &ObjectMeta) -> (String, String) {
    let name = metadata.name.clone().unwrap_or_default();
    (name, metadata.uid.clone().unwrap_or_default())
}

/// The sandboxes that somebody is claiming at this moment.
#[derive(Debug)]
pub(super) struct SpokenFor<'a>(pub &'a WarmSupply);

impl Sandboxes for SpokenFor<'_> {
    fn holds(&self, sandbox: &Sandbox) -> bool {
        self.0.is_spoken_for(&sandbox_key(sandbox))
    }
}

/// The sandboxes that were deleted, though the cache may not show it.
#[derive(Debug)]
pub(super) struct Going<'a>(pub &'a Expectations);

impl Sandboxes for Going<'_> {
    fn holds(&self, sandbox: &Sandbox) -> bool {
        let metadata = &sandbox.metadata;
        let name = metadata.name.as_deref().unwrap_or_default();
        self.0
            .is_deleted(name, metadata.uid.as_deref().unwrap_or_default())
    }
}

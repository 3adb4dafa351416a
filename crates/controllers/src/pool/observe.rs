//! Gathers what a pool's plan rests on, asking the API server itself where the caches cannot be believed.

use std::sync::Arc;

use api::{Sandbox, SandboxTemplate};
use kube::api::ListParams;
use kube::core::ObjectMeta;
use kube::{Api, ResourceExt};
use planner::expectations::Expectations;
use planner::stock::Sandboxes;

use super::{Keeper, Pool};
use crate::context::Context;
use crate::key::ObjectKey;
use crate::warm_supply::{WarmSupply, sandbox_key};
use crate::writes::{WriteError, Writer};

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
        expectations.settle(|name| {
            let sandbox = self.context.caches.sandboxes.get(&self.key.sibling(name))?;
            let is_going = sandbox.metadata.deletion_timestamp.is_some();
            Some((sandbox.uid().unwrap_or_default(), is_going))
        });
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
        let api = Api::<Sandbox>::namespaced(context.client.clone(), &self.key.namespace);
        let selector = format!("{}={}", P::LABEL, self.pool.label());
        let listed = api
            .list_metadata(&ListParams::default().labels(&selector))
            .await?;
        let listed = listed.items.iter().map(|item| identity(&item.metadata));
        let cached = sandboxes.iter().map(|sandbox| identity(&sandbox.metadata));
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

//! The controller of `SandboxSet`: keeps a set at its size and revision, as [`planner::sandbox_set`] decides.

use std::sync::Arc;

use api::SandboxTemplate;
use api::kruise::{SandboxSet, SandboxSetStatus};
use api::labels::kruise as keys;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Condition;
use k8s_openapi::jiff::Timestamp;
use kube::ResourceExt;
use planner::pacing::Pacing;
use planner::sandbox_set::{Mould, Observed, Plan, Problem, Source, decide, set_label, source};
use planner::stock::Stock;

use crate::cache::Cache;
use crate::context::Caches;
use crate::pool::{self, Pool};
use crate::runtime::Runtime;
use crate::warm_supply::WarmSupply;

/// Adds the controller to a runtime.
pub(super) fn register(runtime: &mut Runtime, supply: &WarmSupply) {
    pool::register::<SandboxSet>(runtime, supply);
    let supply = supply.clone();
    let sets = &runtime.context.caches.sandbox_sets;
    sets.subscribe(move |change| {
        if let Some(set) = change.departed() {
            let namespace = set.namespace().unwrap_or_default();
            supply.forget(&namespace, &set.uid().unwrap_or_default());
        }
    });
}

impl Pool for SandboxSet {
    const CONTROLLER: &'static str = "sandboxset";
    const FIELD_MANAGER: &'static str = "sandboxset-controller";
    const LABEL: &'static str = keys::SANDBOX_POOL;
    type Mould = Result<Mould, Problem>;

    fn cache(caches: &Caches) -> &Cache<Self> {
        &caches.sandbox_sets
    }

    fn label(&self) -> String {
        set_label(&self.name_any())
    }

    fn template(&self) -> Option<&str> {
        match source(&self.spec) {
            Ok(Source::Template(name)) => Some(name),
            _ => None,
        }
    }

    fn mould(&self, template: Option<Arc<SandboxTemplate>>, supply: &WarmSupply) -> Self::Mould {
        let mould = Mould::new(self, template.as_deref())?;
        let (namespace, uid) = (self.namespace(), self.uid());
        supply.set_current_revision(
            &namespace.unwrap_or_default(),
            &uid.unwrap_or_default(),
            &mould.revision,
        );
        Ok(mould)
    }

    fn decide(
        &self,
        mould: &Self::Mould,
        stock: Stock<'_>,
        pacing: &Pacing,
        now: Timestamp,
    ) -> Plan {
        let set = self;
        decide(&Observed { set, mould, stock }, pacing, now)
    }

    fn conditions(status: &SandboxSetStatus) -> &[Condition] {
        &status.conditions
    }
}

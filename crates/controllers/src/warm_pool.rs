//! The controller of `SandboxWarmPool`: keeps a pool at its size and revision, as [`planner::warm_pool`] decides.

use std::sync::Arc;

use api::conditions::{self, ConditionType, Reason};
use api::rbac::{MANAGE, Rule, SUBRESOURCE};
use api::{SandboxTemplate, SandboxWarmPool, SandboxWarmPoolStatus, labels};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Condition;
use k8s_openapi::jiff::Timestamp;
use planner::pacing::Pacing;
use planner::stock::Stock;
use planner::warm_pool::{Observed, Plan, decide, pool_hash};
use serde_json::{Value, json};

use crate::cache::Cache;
use crate::context::{Caches, Context};
use crate::events::{Occurrence, Severity};
use crate::pool::{self, Pool};
use crate::rbac::{EVENTS, SANDBOXES};
use crate::runtime::Runtime;
use crate::warm_supply::WarmSupply;

/// What the controller needs to be allowed.
pub const RBAC: &[Rule] = &[
    Rule {
        groups: &[api::EXTENSIONS_GROUP],
        resources: &["sandboxwarmpools", "sandboxtemplates"],
        verbs: MANAGE,
    },
    Rule {
        groups: &[api::EXTENSIONS_GROUP],
        resources: &["sandboxwarmpools/finalizers", "sandboxwarmpools/status"],
        verbs: SUBRESOURCE,
    },
    SANDBOXES,
    EVENTS,
];

/// Adds the controller to a runtime.
pub fn register(runtime: &mut Runtime, supply: &WarmSupply) {
    pool::register::<SandboxWarmPool>(runtime, supply);
}

impl Pool for SandboxWarmPool {
    const CONTROLLER: &'static str = "sandboxwarmpool";
    const FIELD_MANAGER: &'static str = "warmpool-controller";
    const LABEL: &'static str = labels::WARM_POOL_SANDBOX;
    type Mould = Option<Arc<SandboxTemplate>>;

    fn cache(caches: &Caches) -> &Cache<Self> {
        &caches.warm_pools
    }

    fn label(&self) -> String {
        pool_hash(self)
    }

    fn template(&self) -> Option<&str> {
        Some(&self.spec.sandbox_template_ref.name)
    }

    fn mould(&self, template: Option<Arc<SandboxTemplate>>, _: &WarmSupply) -> Self::Mould {
        template
    }

    fn decide(
        &self,
        mould: &Self::Mould,
        stock: Stock<'_>,
        pacing: &Pacing,
        now: Timestamp,
    ) -> Plan {
        let observed = Observed {
            pool: self,
            template: mould.as_deref(),
            stock,
        };
        decide(&observed, pacing, now)
    }

    fn conditions(status: &SandboxWarmPoolStatus) -> &[Condition] {
        &status.conditions
    }

    /// Zeros are said, for those who read the object without its schema.
    fn written(status: &SandboxWarmPoolStatus) -> Value {
        json!({
            "replicas": status.replicas,
            "readyReplicas": status.ready_replicas,
            "updatedReplicas": status.updated_replicas,
            "selector": status.selector,
            "observedGeneration": status.observed_generation,
            "conditions": status.conditions,
        })
    }

    /// Tells that the pool has nothing to make sandboxes of, once each time it is so.
    fn tell(&self, published: &SandboxWarmPoolStatus, context: &Context) {
        let is_missing = |status: &SandboxWarmPoolStatus| {
            conditions::find(&status.conditions, ConditionType::Updated)
                .filter(|updated| updated.reason == Reason::TemplateNotFound.as_str())
                .map(|updated| updated.message.clone())
        };
        let Some(note) = is_missing(published) else {
            return;
        };
        if self.status.as_ref().and_then(is_missing).as_ref() == Some(&note) {
            return;
        }
        let occurrence = Occurrence {
            severity: Severity::Warning,
            reason: Reason::TemplateNotFound.as_str(),
            action: "Refill",
            note,
        };
        context.events.record(Self::CONTROLLER, self, occurrence);
    }
}

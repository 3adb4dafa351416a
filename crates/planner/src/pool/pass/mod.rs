//! One pass over a pool of sandboxes, of any kind: count its sandboxes, decide, carry the plan out, publish the status.
//!
//! The kinds differ by their [`Pool`] implementation. Two passes over one pool never run at the same time: they share its [`Memory`].

mod apply;
mod environment;
mod observe;

use std::sync::Arc;

use api::SandboxTemplate;
use api::conditions::Reason;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Condition;
use k8s_openapi::jiff::Timestamp;
use kube::Resource;
use kube::core::object::HasStatus;
use serde::Serialize;
use serde_json::{Value, json};

pub use environment::Environment;
pub(crate) use observe::template;

use self::apply::apply;
use self::observe::{Deleted, Reserved, confirm, settle, unreadable};
use crate::expectations::Expectations;
use crate::pacing::Pacing;
use crate::pass::{
    Action, Error, Event, Failure, Objects, Precondition, RequestError, end_unobserved,
};
use crate::pool_view::{PoolPlan, PoolView};

/// A kind whose objects are pools of sandboxes.
pub trait Pool:
    Resource<DynamicType = ()> + HasStatus<Status: PartialEq + Serialize + Send + Sync> + Send + Sync
{
    /// The label of a pool's sandboxes, by which they are found.
    const LABEL: &'static str;
    /// What the pool's sandboxes are created from, or why there is nothing to create them from.
    type Blueprint: Send + Sync;

    /// The value of [`LABEL`](Self::LABEL) for this pool.
    fn label(&self) -> String;

    /// The template that the pool names, if it names one.
    fn template(&self) -> Option<&str>;

    /// What the pool's sandboxes are created from, given the template that it names, if that exists.
    fn blueprint(&self, template: Option<Arc<SandboxTemplate>>) -> Self::Blueprint;

    /// The current revision, where the template alone does not determine it. The warm queue prefers sandboxes of it.
    fn own_revision(_blueprint: &Self::Blueprint) -> Option<&str> {
        None
    }

    /// Decides what to do about the pool.
    fn decide(
        &self,
        blueprint: &Self::Blueprint,
        view: PoolView<'_>,
        pacing: &Pacing,
        now: Timestamp,
    ) -> PoolPlan<Self::Status>;

    /// The conditions of a status.
    fn conditions(status: &Self::Status) -> &[Condition];

    /// A status as it is written.
    fn written(status: &Self::Status) -> Value {
        json!(status)
    }

    /// The warning event for a published status, unless the status before had the same warning.
    fn warning(&self, _published: &Self::Status) -> Option<(Reason, String)> {
        None
    }
}

/// What is remembered of a pool between two passes. All of it can be lost without harm.
#[derive(Debug)]
pub struct Memory {
    pub expectations: Expectations,
    /// Since when refills are held back, if they are.
    held_back_since: Option<Timestamp>,
    /// Nothing can be created in the namespace any more. Every sandbox that goes would start another futile pass.
    namespace_is_terminating: bool,
}

impl Default for Memory {
    /// A new memory starts in doubt: an earlier leader may have created sandboxes that the cache does not show yet.
    fn default() -> Self {
        let mut expectations = Expectations::default();
        expectations.doubt();
        Self {
            expectations,
            held_back_since: None,
            namespace_is_terminating: false,
        }
    }
}

/// Brings one pool a step closer to its spec.
pub async fn reconcile<P: Pool, E: Environment<P>>(
    env: &E,
    pool: &P,
    memory: &mut Memory,
) -> Result<Action, Error<E::Error>> {
    if pool.meta().deletion_timestamp.is_some() || memory.namespace_is_terminating {
        return Ok(Action::AwaitChange);
    }
    if let Some(rest) = env.rest() {
        return Ok(Action::RequeueAfter(rest));
    }
    let now = env.now();
    // Before the sandboxes are counted: otherwise a sandbox that the cache shows in between would count as neither expected nor seen.
    settle(env, &mut memory.expectations);
    let sandboxes = env.labelled(&pool.label());
    confirm(env, pool, &sandboxes, &mut memory.expectations)
        .await
        .map_err(Error::List)?;
    let template = match template(&env.templates(), pool).await {
        Ok(template) => template,
        Err(error) => {
            let before = pool.status().map_or(&[][..], P::conditions);
            let (pools, emit) = (env.pools_as_reporter(), |event| env.emit(pool, event));
            return end_unobserved(&pools, pool, before, error, now, emit).await;
        }
    };
    let blueprint = pool.blueprint(template);
    if let Some(revision) = P::own_revision(&blueprint) {
        env.set_current_revision(pool, revision);
    }
    let plan = env.measured(|| {
        let view = PoolView {
            sandboxes: &sandboxes,
            is_reserved: &Reserved::new(env),
            going: &Deleted(&memory.expectations),
            unseen: memory.expectations.unseen() + unreadable(env, pool).len(),
            demand: env.demand(),
            held_back_since: memory.held_back_since,
            max_batch: env.max_batch(),
        };
        pool.decide(&blueprint, view, &Pacing::default(), now)
    });
    memory.held_back_since = plan
        .holds_back
        .then(|| memory.held_back_since.unwrap_or(now));
    let failure = apply(env, pool, &plan, memory).await;
    publish(env, pool, &plan.status).await?;
    match (failure, plan.recheck_after) {
        (Some(failure), _) => Err(Error::Apply(failure)),
        (None, Some(delay)) => Ok(Action::RequeueAfter(delay)),
        (None, None) => Ok(Action::AwaitChange),
    }
}

/// Applies the status if it differs from the one that the pool has.
async fn publish<P: Pool, E: Environment<P>>(
    env: &E,
    pool: &P,
    status: &P::Status,
) -> Result<(), Error<E::Error>> {
    if pool.status() == Some(status) {
        return Ok(());
    }
    let (pools, name) = (env.pools(), pool.meta().name.as_deref().unwrap_or_default());
    let count = |status: &P::Status| P::conditions(status).len();
    let loses_condition = pool.status().is_some_and(|it| count(it) > count(status));
    let answer = if loses_condition {
        // An apply would not remove the condition of an unobserved pool, which another field manager wrote.
        let precondition = Precondition::same(pool);
        let status = P::written(status);
        pools.patch_status(name, &precondition, status).await
    } else {
        pools.apply_status(name, P::written(status)).await
    };
    match answer {
        Ok(_) => {
            if let Some((reason, message)) = pool.warning(status) {
                env.emit(pool, Event::warning(reason.as_str(), "Refill", message));
            }
            Ok(())
        }
        Err(error) if *error.failure() == Failure::NotFound => Ok(()),
        Err(error) => Err(Error::Publish(error)),
    }
}

//! Publishes `Ready=False` on an object that could not even be decided upon: because its type cannot hold it, or because what it
//! depends on cannot be looked up. What the object owns goes on as it is.

use api::conditions::{self, ConditionType, Finding, Reason};
use api::decoding::{Decoded, Unreadable};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{Condition, ObjectMeta};
use planner::pass::{RequestError, publish_not_ready};
use tracing::warn;

use crate::cache::Cache;
use crate::cached::Cached;
use crate::context::Context;
use crate::events::{Occurrence, Severity};
use crate::key::ObjectKey;
use crate::objects::NamespacedObjects;
use crate::runtime::Action;
use crate::writes::WriteError;

/// Why an object's owner could not be told.
#[derive(Debug, thiserror::Error)]
#[error("cannot publish that the object is not ready")]
pub(crate) struct Error(#[source] WriteError);

/// An object and who publishes its status.
#[derive(Debug)]
pub(crate) struct Subject<'a, K> {
    pub context: &'a Context,
    pub controller: &'static str,
    pub cache: &'a Cache<K>,
    pub key: &'a ObjectKey,
}

impl<K: Cached> Subject<'_, K> {
    /// Reports that the object cannot be read, once for each version of its spec and each field.
    pub async fn unreadable(&self, left: &Unreadable) -> Result<Action, Error> {
        if left.metadata.deletion_timestamp.is_some() {
            return Ok(Action::AwaitChange);
        }
        let message = format!("The object cannot be read: {}", left.problem);
        let reason = Reason::InvalidConfiguration;
        if K::HAS_CONDITIONS
            && !self
                .publish(&left.metadata, &left.conditions, reason, &message)
                .await?
        {
            return Ok(Action::AwaitChange);
        }
        warn!(field = left.problem.field, "the object cannot be read");
        let regarding = Decoded::<K>::Unreadable(Box::new(left.clone()));
        self.tell(&regarding, reason, message);
        Ok(Action::AwaitChange)
    }

    /// Reports that what the object depends on could not be looked up.
    pub async fn unobserved(
        &self,
        object: &K,
        before: &[Condition],
        failure: &WriteError,
    ) -> Result<(), Error> {
        // A failure that may pass takes no readiness away.
        let is_ready = conditions::is_true(before, ConditionType::Ready);
        if object.meta().deletion_timestamp.is_some() || (is_ready && !failure.failure.is_lasting())
        {
            return Ok(());
        }
        let (reason, message) = (Reason::ReconcilerError, failure.message());
        if self
            .publish(object.meta(), before, reason, &message)
            .await?
        {
            self.tell(object, reason, message);
        }
        Ok(())
    }

    async fn publish(
        &self,
        metadata: &ObjectMeta,
        before: &[Condition],
        reason: Reason,
        message: &str,
    ) -> Result<bool, Error> {
        let objects = NamespacedObjects::new(self.context, self.cache, self.controller, self.key);
        let finding = Finding::new(ConditionType::Ready, false, reason, message);
        let now = self.context.clock.now();
        publish_not_ready(&objects, metadata, before, &finding, now)
            .await
            .map_err(Error)
    }

    fn tell<R: kube::Resource<DynamicType = ()>>(
        &self,
        regarding: &R,
        reason: Reason,
        note: String,
    ) {
        let occurrence = Occurrence {
            severity: Severity::Warning,
            reason: reason.as_str(),
            action: "Reconcile",
            note,
        };
        let events = &self.context.events;
        events.record(self.controller, regarding, occurrence);
    }
}

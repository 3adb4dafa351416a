//! Reports objects that cannot be decoded: `Ready=False` in the status, an event and a log line. The objects that they own stay as they are.

use api::conditions::{ConditionType, Finding, Reason};
use api::decoding::{Decoded, Unreadable};
use planner::pass::publish_not_ready;
use tracing::warn;

use crate::cache::Cache;
use crate::cached::Cached;
use crate::context::Context;
use crate::events::{Occurrence, Severity};
use crate::key::ObjectKey;
use crate::objects::NamespacedObjects;
use crate::runtime::Action;
use crate::writes::WriteError;

/// Why an object could not be reported.
#[derive(Debug, thiserror::Error)]
#[error("cannot publish that the object is not ready")]
pub(crate) struct Error(#[source] WriteError);

/// Reports an object that cannot be decoded, once for each generation of its spec and each field.
pub(crate) async fn report<K: Cached>(
    context: &Context,
    controller: &'static str,
    cache: &Cache<K>,
    key: &ObjectKey,
    object: &Unreadable,
) -> Result<Action, Error> {
    if object.metadata.deletion_timestamp.is_some() {
        return Ok(Action::AwaitChange);
    }
    let message = format!("The object cannot be read: {}", object.problem);
    let reason = Reason::InvalidConfiguration;
    if K::HAS_CONDITIONS {
        let objects = NamespacedObjects::new(context, cache, controller, key);
        let finding = Finding::new(ConditionType::Ready, false, reason, &message);
        let (metadata, before) = (&object.metadata, &object.conditions);
        let now = context.clock.now();
        let is_new = publish_not_ready(&objects, metadata, before, &finding, now)
            .await
            .map_err(Error)?;
        if !is_new {
            return Ok(Action::AwaitChange);
        }
    }
    warn!(field = object.problem.field, "the object cannot be read");
    let regarding = Decoded::<K>::Unreadable(Box::new(object.clone()));
    let occurrence = Occurrence {
        severity: Severity::Warning,
        reason: reason.as_str(),
        action: "Reconcile",
        note: message,
    };
    context.events.record(controller, &regarding, occurrence);
    Ok(Action::AwaitChange)
}

//! Publishes `Ready=False` on an object about which nothing could be decided: it cannot be decoded, or something that it depends on
//! cannot be looked up. The objects that it owns stay as they are.

use api::conditions::{self, ConditionType, Finding, Reason};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{Condition, ObjectMeta, Time};
use k8s_openapi::jiff::Timestamp;
use kube::Resource;
use serde_json::json;

use super::{Action, Error, Event, Failure, Objects, Precondition, RequestError};

/// Writes `Ready=False` with this reason, unless the conditions contain it already. Returns whether it was written.
pub async fn publish_not_ready<K, O: Objects<K>>(
    objects: &O,
    metadata: &ObjectMeta,
    before: &[Condition],
    finding: &Finding,
    now: Timestamp,
) -> Result<bool, O::Error> {
    let mut conditions = before.to_vec();
    let now = Time(Timestamp::from_second(now.as_second()).unwrap_or(now));
    conditions::merge(&mut conditions, finding, metadata.generation, &now);
    if conditions == before {
        return Ok(false);
    }
    let name = metadata.name.as_deref().unwrap_or_default();
    let precondition = Precondition::uid(metadata.uid.clone());
    let status = json!({ "conditions": conditions });
    let Err(error) = objects.patch_status(name, &precondition, status).await else {
        return Ok(true);
    };
    match error.failure() {
        // The write succeeded. The answer is the object, which still cannot be decoded.
        Failure::Unreadable(_) => Ok(true),
        Failure::NotFound | Failure::Conflict => Ok(false),
        _ => Err(error),
    }
}

/// Ends the pass over an object one of whose dependencies could not be looked up. `emit` is called with an event that is new to the
/// owner of the object. A failure that a retry cannot solve waits for a change.
pub(crate) async fn end_unobserved<K: Resource, O: Objects<K>>(
    objects: &O,
    object: &K,
    before: &[Condition],
    error: O::Error,
    now: Timestamp,
    emit: impl FnOnce(Event),
) -> Result<Action, Error<O::Error>> {
    let metadata = object.meta();
    let is_lasting = error.failure().is_lasting();
    // A failure that may pass takes no readiness away.
    let is_ready = conditions::is_true(before, ConditionType::Ready);
    if metadata.deletion_timestamp.is_none() && (is_lasting || !is_ready) {
        let message = error.message();
        let finding = Finding::new(
            ConditionType::Ready,
            false,
            Reason::ReconcilerError,
            &message,
        );
        match publish_not_ready(objects, metadata, before, &finding, now).await {
            Ok(true) => emit(Event::warning(
                Reason::ReconcilerError.as_str(),
                "Reconcile",
                message,
            )),
            Ok(false) => {}
            Err(_) => return Err(Error::Observe(error)),
        }
    }
    if is_lasting {
        return Ok(Action::AwaitChange);
    }
    Err(Error::Observe(error))
}

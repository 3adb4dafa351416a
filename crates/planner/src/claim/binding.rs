//! The binding of a claim: the name of its sandbox, as label and annotation. It is the intent to have that sandbox.

use api::names::LabelValue;
use api::{SandboxClaim, labels};
use kube::ResourceExt;
use serde_json::{Map, Value, json};

use super::{ClaimFacts, Effect, Holding};

/// The sandbox that a claim is bound to and may still have to get: no status was published for the claim yet. A claim never takes a warm
/// sandbox that is the unfinished binding of another one.
pub fn unfinished_binding(claim: &SandboxClaim) -> Option<&str> {
    let name = claim.labels().get(labels::ASSIGNED_SANDBOX_NAME)?;
    claim.status.is_none().then_some(name.as_str())
}

/// Writes the binding again that the claim lost, or that names another sandbox than the one the claim has.
pub(super) fn restore(observed: &ClaimFacts<'_>) -> Option<Effect> {
    let Holding::Owned(sandbox) = observed.holding else {
        return None;
    };
    let (claim, name) = (observed.claim, sandbox.name_any());
    let label = name.parse::<LabelValue>().ok();
    let is_bound = claim.annotations().get(labels::ASSIGNED_SANDBOX_NAME) == Some(&name)
        && claim
            .labels()
            .get(labels::ASSIGNED_SANDBOX_NAME)
            .map(String::as_str)
            == label.as_ref().map(LabelValue::as_str);
    let is_leaving = sandbox.metadata.deletion_timestamp.is_some();
    (!is_bound && !is_leaving).then(|| bind(observed, &name))
}

/// Writes the intent on the claim, with when the controller first saw it.
pub(super) fn bind(observed: &ClaimFacts<'_>, sandbox: &str) -> Effect {
    let claim = observed.claim;
    let mut annotations = Map::new();
    annotations.insert(labels::ASSIGNED_SANDBOX_NAME.into(), json!(sandbox));
    if !claim
        .annotations()
        .contains_key(labels::CONTROLLER_FIRST_OBSERVED_AT)
    {
        let first_observed = observed.first_observed.to_string();
        annotations.insert(
            labels::CONTROLLER_FIRST_OBSERVED_AT.into(),
            json!(first_observed),
        );
    }
    // A name may be longer than a label's value; only the annotation holds it then.
    let label = sandbox
        .parse::<LabelValue>()
        .map_or(Value::Null, |value| json!(value.as_str()));
    Effect::Bind {
        sandbox: sandbox.to_owned(),
        patch: json!({
            "metadata": {
                "labels": { labels::ASSIGNED_SANDBOX_NAME: label },
                "annotations": annotations,
            }
        }),
    }
}

pub(super) fn unbind() -> Effect {
    Effect::Unbind {
        patch: json!({
            "metadata": {
                "labels": { labels::ASSIGNED_SANDBOX_NAME: null },
                "annotations": { labels::ASSIGNED_SANDBOX_NAME: null },
            }
        }),
    }
}

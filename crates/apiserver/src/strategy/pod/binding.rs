//! The assignment of a pod to a node: `pods/x/binding`.

use apimachinery::status::Status;
use serde_json::{Value, json};

use crate::metadata;

/// The pod after its assignment to `node`. A pod that is assigned or being deleted yields a conflict.
pub fn assign(pod: &Value, node: &str, now: &Value) -> Result<Value, Status> {
    let name = metadata::text(pod, "name");
    let conflict = |cause: &str| Status::conflict_because("", "pods/binding", name, cause);
    let current = pod
        .pointer("/spec/nodeName")
        .and_then(Value::as_str)
        .unwrap_or_default();
    if !current.is_empty() {
        return Err(conflict(&format!(
            "pod {name} is already assigned to node \"{current}\""
        )));
    }
    if !metadata::text(pod, "deletionTimestamp").is_empty() {
        return Err(conflict(&format!(
            "pod {name} is being deleted, cannot be assigned to a host"
        )));
    }
    let mut pod = pod.clone();
    pod["spec"]["nodeName"] = Value::from(node);
    let mut conditions = pod
        .pointer("/status/conditions")
        .and_then(Value::as_array)
        .cloned()
        .unwrap_or_default();
    conditions.retain(|condition| condition["type"] != "PodScheduled");
    conditions.push(json!({"type": "PodScheduled", "status": "True", "lastProbeTime": null, "lastTransitionTime": now}));
    pod["status"]["conditions"] = Value::from(conditions);
    Ok(pod)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_pod_is_assigned_once_and_not_while_it_is_deleted() {
        let now = json!("2026-01-01T00:00:00Z");
        let pod = json!({"metadata": {"name": "p"}, "spec": {}, "status": {"conditions": [
            {"type": "PodScheduled", "status": "False"}, {"type": "Ready", "status": "False"}]}});
        let assigned = assign(&pod, "n", &now).unwrap();
        assert_eq!(assigned["spec"]["nodeName"], "n");
        let conditions = assigned["status"]["conditions"].as_array().unwrap();
        assert_eq!(conditions.len(), 2, "the old condition is replaced");
        assert_eq!(conditions[1]["status"], "True");
        let again = assign(&assigned, "m", &now).unwrap_err();
        assert_eq!(again.code, 409);
        assert!(
            again.message.contains("already assigned to node \"n\""),
            "{again:?}"
        );
        let mut deleted = pod;
        deleted["metadata"]["deletionTimestamp"] = now.clone();
        assert_eq!(assign(&deleted, "n", &now).unwrap_err().code, 409);
    }
}

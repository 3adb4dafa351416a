//! The limits of a pod as a whole, from those of its containers. Pure.

use k8s_openapi::api::core::v1::{Container, PodSpec, ResourceRequirements};

use crate::quantity;

/// A limit of one container, as a number and as written.
pub fn limit(resources: Option<&ResourceRequirements>, resource: &str) -> Option<(u64, String)> {
    let text = resources?.limits.as_ref()?.get(resource)?.0.clone();
    Some((quantity::units(&text)?, text))
}

fn is_sidecar(container: &Container) -> bool {
    container.restart_policy.as_deref() == Some("Always")
}

/// The limit of all containers of a pod together. `None` unless every container that runs concurrently has a limit.
pub fn total_limit(spec: &PodSpec, resource: &str) -> Option<u64> {
    let of = |container: &Container| Some(limit(container.resources.as_ref(), resource)?.0);
    total(spec, of)
}

/// Combines a value over the containers: the sum of those that run concurrently, or the largest of the init containers before them.
pub fn total(spec: &PodSpec, of: impl Fn(&Container) -> Option<u64>) -> Option<u64> {
    let init = || spec.init_containers.iter().flatten();
    let sidecars: Option<u64> = init()
        .filter(|container| is_sidecar(container))
        .map(&of)
        .sum();
    let together = spec.containers.iter().map(&of).sum::<Option<u64>>()?;
    let before: Option<Vec<u64>> = init()
        .filter(|container| !is_sidecar(container))
        .map(&of)
        .collect();
    let largest = before?.into_iter().max().unwrap_or(0);
    // An init container runs concurrently with the sidecars.
    Some(sidecars? + together.max(largest)).filter(|_| !spec.containers.is_empty())
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    fn container(limit: Option<&str>, sidecar: bool) -> Value {
        let mut container = json!({"name": "c"});
        if let Some(limit) = limit {
            container["resources"] = json!({"limits": {"memory": limit}});
        }
        if sidecar {
            container["restartPolicy"] = json!("Always");
        }
        container
    }

    #[test]
    fn a_pod_may_use_what_its_containers_may_at_once() {
        let some = |limit: &'static str| container(Some(limit), false);
        let sidecar = |limit: &'static str| container(Some(limit), true);
        let cases = [
            (vec![], vec![some("1")], Some(1)),
            (vec![], vec![some("1"), some("2")], Some(3)),
            (vec![some("9"), some("4")], vec![some("1")], Some(9)),
            (vec![some("9"), sidecar("5")], vec![some("1")], Some(14)),
            (vec![sidecar("5")], vec![some("1"), some("2")], Some(8)),
            (vec![], vec![some("1"), container(None, false)], None),
            (vec![container(None, false)], vec![some("1")], None),
            (vec![container(None, true)], vec![some("1")], None),
            (vec![], vec![], None),
        ];
        for (init, containers, expected) in cases {
            let spec = json!({"initContainers": init, "containers": containers});
            let parsed = serde_json::from_value(spec.clone()).unwrap();
            assert_eq!(total_limit(&parsed, "memory"), expected, "{spec}");
        }
    }
}

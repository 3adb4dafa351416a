//! The decision of PodSecurity admission about a write: an error, warnings, and audit annotations.

use std::collections::BTreeMap;

use apimachinery::field::FieldError;
use serde_json::Value;

use super::{
    checks::{reasons, violations, with_details},
    policy::{Level, LevelVersion, Policy},
};

/// Maximum number of pods that are checked when a namespace gets a stricter level.
const MAXIMUM_PODS: usize = 3000;

/// The decision about a write.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Verdict {
    /// The error, if the write is rejected.
    pub refusal: Option<String>,
    /// Warnings for the client.
    pub warnings: Vec<String>,
    /// Audit annotations, by name.
    pub annotations: BTreeMap<&'static str, String>,
}

/// The kind of object that is checked. A policy is enforced only on pods.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Subject {
    /// A pod.
    Pod,
    /// An object with a pod template. Violations only cause warnings.
    Template,
}

/// Evaluates a pod or a pod template by the policy of its namespace.
pub fn evaluate(namespace: &Value, subject: Subject, metadata: &Value, spec: &Value) -> Verdict {
    let (policy, errors) = Policy::of(namespace);
    let mut verdict = Verdict::default();
    if errors.is_empty() && policy.is_privileged() {
        return verdict;
    }
    if !errors.is_empty() {
        let problems: Vec<String> = errors.iter().map(ToString::to_string).collect();
        let problems = format!("Failed to parse policy: {}", problems.join(", "));
        verdict.annotations.insert("error", problems);
    }
    let found = |level: LevelVersion| {
        let found = violations(level, metadata, spec);
        (!found.is_empty())
            .then(|| format!("violate PodSecurity \"{level}\": {}", with_details(&found)))
    };
    if subject == Subject::Pod {
        let enforced = policy.enforce.to_string();
        verdict.annotations.insert("enforce-policy", enforced);
        verdict.refusal =
            found(policy.enforce).map(|found| found.replacen("violate", "violates", 1));
    }
    if let Some(found) = found(policy.audit) {
        verdict
            .annotations
            .insert("audit-violations", format!("would {found}"));
    }
    if verdict.refusal.is_none()
        && let Some(found) = found(policy.warn)
    {
        verdict.warnings.push(format!("would {found}"));
    }
    verdict
}

/// Whether an update of a pod needs a new evaluation: a container was added or has another image.
pub fn is_significant(spec: &Value, old: &Value) -> bool {
    let list = |spec: &'_ Value, name: &str| spec[name].as_array().cloned().unwrap_or_default();
    let differs = |name: &str| {
        let (now, before) = (list(spec, name), list(old, name));
        now.len() != before.len()
            || now
                .iter()
                .zip(&before)
                .any(|(now, before)| now["image"] != before["image"])
    };
    let before = list(old, "ephemeralContainers");
    let is_new = |container: &Value| {
        let same = before
            .iter()
            .find(|other| other["name"] == container["name"]);
        same.is_none_or(|same| same["image"] != container["image"])
    };
    differs("containers")
        || differs("initContainers")
        || list(spec, "ephemeralContainers").iter().any(is_new)
}

/// Validates the PodSecurity labels of a namespace. Errors that the stored labels have too are allowed (validation ratcheting).
pub fn label_errors(namespace: &Value, old: Option<&Value>) -> Vec<FieldError> {
    let (_, errors) = Policy::of(namespace);
    match old {
        Some(old) if Policy::of(old).1 == errors => Vec::new(),
        _ => errors,
    }
}

/// The level that a change of labels newly enforces on existing pods.
pub fn newly_enforced(namespace: &Value, old: &Value) -> Option<LevelVersion> {
    let (now, before) = (Policy::of(namespace).0.enforce, Policy::of(old).0.enforce);
    let is_relaxed = now.version == before.version && now.level <= before.level;
    (now != before && now.level != Level::Privileged && !is_relaxed).then_some(now)
}

/// Warnings about existing pods that violate the newly enforced level of their namespace.
pub fn warn_of_pods<'a>(
    namespace: &str,
    enforced: LevelVersion,
    pods: impl IntoIterator<Item = &'a Value>,
) -> Vec<String> {
    let pods = one_per_controller_first(pods);
    let mut found: BTreeMap<String, Vec<&str>> = BTreeMap::new();
    for pod in pods.iter().take(MAXIMUM_PODS) {
        let violations = violations(enforced, &pod["metadata"], &pod["spec"]);
        if !violations.is_empty() {
            let name = pod["metadata"]["name"].as_str().unwrap_or_default();
            found.entry(reasons(&violations)).or_default().push(name);
        }
    }
    let mut warnings = Vec::new();
    if pods.len() > MAXIMUM_PODS {
        warnings.push(format!(
            "new PodSecurity enforce level only checked against the first {MAXIMUM_PODS} of {} existing pods",
            pods.len()
        ));
    }
    if !found.is_empty() {
        warnings.push(format!(
            "existing pods in namespace \"{namespace}\" violate the new PodSecurity enforce level \"{enforced}\""
        ));
    }
    let mut by_pod: Vec<String> = found
        .into_iter()
        .map(|(reasons, names)| {
            let first = names.iter().min().copied().unwrap_or_default();
            match names.len() - 1 {
                0 => format!("{first}: {reasons}"),
                1 => format!("{first} (and 1 other pod): {reasons}"),
                others => format!("{first} (and {others} other pods): {reasons}"),
            }
        })
        .collect();
    by_pod.sort();
    warnings.extend(by_pod);
    warnings
}

/// Sorts one pod of each controller to the front, because the pods of one controller are alike.
fn one_per_controller_first<'a>(pods: impl IntoIterator<Item = &'a Value>) -> Vec<&'a Value> {
    let mut seen = std::collections::HashSet::new();
    let (mut first, mut further) = (Vec::new(), Vec::new());
    for pod in pods {
        let owners = pod["metadata"]["ownerReferences"].as_array();
        let controller = owners
            .into_iter()
            .flatten()
            .find(|owner| owner["controller"] == true)
            .and_then(|owner| owner["uid"].as_str());
        match controller {
            Some(uid) if !seen.insert(uid) => further.push(pod),
            _ => first.push(pod),
        }
    }
    first.append(&mut further);
    first
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn namespace(labels: &[(&str, &str)]) -> Value {
        let labels: serde_json::Map<String, Value> = labels
            .iter()
            .map(|(name, value)| {
                let name = format!("pod-security.kubernetes.io/{name}");
                (name, Value::from(*value))
            })
            .collect();
        json!({"metadata": {"name": "n", "labels": labels}})
    }

    fn verdict(labels: &[(&str, &str)], subject: Subject, spec: &Value) -> Verdict {
        evaluate(&namespace(labels), subject, &json!({}), spec)
    }

    #[test]
    fn a_pod_is_rejected_audited_or_warned_about_by_its_namespace() {
        let privileged =
            json!({"containers": [{"name": "c", "securityContext": {"privileged": true}}]});
        let found = "privileged (container \"c\" must not set securityContext.privileged=true)";
        let refused = verdict(&[("enforce", "baseline")], Subject::Pod, &privileged);
        assert_eq!(
            refused.refusal,
            Some(format!("violates PodSecurity \"baseline:latest\": {found}"))
        );
        assert_eq!(refused.warnings, [""; 0]);
        let warned = verdict(
            &[("warn", "baseline"), ("warn-version", "v1.20")],
            Subject::Pod,
            &privileged,
        );
        assert_eq!(warned.refusal, None);
        assert_eq!(
            warned.warnings,
            [format!(
                "would violate PodSecurity \"baseline:v1.20\": {found}"
            )]
        );
        let audited = verdict(&[("audit", "baseline")], Subject::Pod, &privileged);
        assert_eq!((audited.refusal, audited.warnings), (None, Vec::new()));
        assert_eq!(
            audited.annotations["audit-violations"],
            format!("would violate PodSecurity \"baseline:latest\": {found}")
        );
        assert_eq!(audited.annotations["enforce-policy"], "privileged:latest");
        assert_eq!(verdict(&[], Subject::Pod, &privileged), Verdict::default());
        let plain = json!({"containers": [{"name": "c"}]});
        assert_eq!(
            verdict(&[("enforce", "baseline")], Subject::Pod, &plain).refusal,
            None
        );
        let unknown = verdict(&[("enforce", "none")], Subject::Pod, &plain);
        assert!(
            unknown.refusal.is_some(),
            "an invalid level is enforced as restricted"
        );
        assert!(
            unknown.annotations["error"].starts_with("Failed to parse policy: metadata.labels[")
        );
    }

    #[test]
    fn a_pod_template_causes_warnings_and_is_never_rejected() {
        let privileged =
            json!({"containers": [{"name": "c", "securityContext": {"privileged": true}}]});
        let verdict = verdict(&[("enforce", "baseline")], Subject::Template, &privileged);
        assert_eq!(verdict.refusal, None);
        assert_eq!(verdict.warnings.len(), 1);
    }

    #[test]
    fn an_update_is_evaluated_when_an_image_changes_or_a_container_is_added() {
        let spec = |image: &str, ephemeral: Value| json!({"containers": [{"name": "c", "image": image}], "ephemeralContainers": ephemeral});
        let none = json!([]);
        assert!(!is_significant(
            &spec("a", none.clone()),
            &spec("a", none.clone())
        ));
        assert!(is_significant(
            &spec("b", none.clone()),
            &spec("a", none.clone())
        ));
        assert!(is_significant(
            &spec("a", json!([{"name": "d", "image": "x"}])),
            &spec("a", none)
        ));
    }

    #[test]
    fn existing_pods_cause_warnings_when_the_level_becomes_stricter() {
        let (plain, strict) = (namespace(&[]), namespace(&[("enforce", "restricted")]));
        let enforced = newly_enforced(&strict, &plain).unwrap();
        assert_eq!(newly_enforced(&plain, &strict), None);
        assert_eq!(newly_enforced(&strict, &strict), None);
        let pod = |name: &str, privileged: bool| json!({"metadata": {"name": name}, "spec": {"containers": [{"name": "c", "securityContext": {"privileged": privileged}}]}});
        let pods = [
            pod("b", false),
            pod("a", false),
            pod("p", true),
            pod("z", false),
        ];
        let plain = "allowPrivilegeEscalation != false, unrestricted capabilities, runAsNonRoot != true, seccompProfile";
        assert_eq!(
            warn_of_pods("n", enforced, &pods),
            [
                "existing pods in namespace \"n\" violate the new PodSecurity enforce level \"restricted:latest\"".to_owned(),
                format!("a (and 2 other pods): {plain}"),
                format!("p: privileged, {plain}"),
            ]
        );
    }
}

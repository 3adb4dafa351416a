//! What PodSecurity admission answers to a write: a refusal, warnings, and what the audit log is told.

use std::collections::BTreeMap;

use apimachinery::field::FieldError;
use serde_json::Value;

use super::{
    checks::{in_detail, in_short, violations},
    policy::{Level, LevelVersion, Policy},
};

/// The most pods that are looked at when a namespace gets a stricter level.
const MOST_PODS: usize = 3000;

/// What becomes of a write.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Verdict {
    /// Why it is refused, if it is.
    pub refusal: Option<String>,
    /// What its writer is told.
    pub warnings: Vec<String>,
    /// What the audit log is told, by the name of the annotation.
    pub annotations: BTreeMap<&'static str, String>,
}

/// Whether a policy is enforced, or only told of.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Subject {
    /// A pod.
    Pod,
    /// Something that makes pods.
    Template,
}

/// Judges a pod, or the template of one, by the policy of its namespace.
pub fn judge(namespace: &Value, subject: Subject, metadata: &Value, spec: &Value) -> Verdict {
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
    let found = |asked: LevelVersion| {
        let found = violations(asked, metadata, spec);
        (!found.is_empty())
            .then(|| format!("violate PodSecurity \"{asked}\": {}", in_detail(&found)))
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

/// Whether an update of a pod changes what is judged: a container came, or has another image.
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

/// What is wrong with the labels of a namespace. Labels that were wrong before may stay.
pub fn label_errors(namespace: &Value, old: Option<&Value>) -> Vec<FieldError> {
    let (_, errors) = Policy::of(namespace);
    match old {
        Some(old) if Policy::of(old).1 == errors => Vec::new(),
        _ => errors,
    }
}

/// The level that a change of labels begins to enforce on pods that are there already.
pub fn newly_enforced(namespace: &Value, old: &Value) -> Option<LevelVersion> {
    let (now, before) = (Policy::of(namespace).0.enforce, Policy::of(old).0.enforce);
    let is_relaxed = now.version == before.version && now.level <= before.level;
    (now != before && now.level != Level::Privileged && !is_relaxed).then_some(now)
}

/// The warnings about pods that do not meet a level which their namespace begins to enforce.
pub fn warn_of_pods<'a>(
    namespace: &str,
    enforced: LevelVersion,
    pods: impl IntoIterator<Item = &'a Value>,
) -> Vec<String> {
    let pods = one_of_each_controller_first(pods);
    let mut found: BTreeMap<String, Vec<&str>> = BTreeMap::new();
    for pod in pods.iter().take(MOST_PODS) {
        let violations = violations(enforced, &pod["metadata"], &pod["spec"]);
        if !violations.is_empty() {
            let name = pod["metadata"]["name"].as_str().unwrap_or_default();
            found.entry(in_short(&violations)).or_default().push(name);
        }
    }
    let mut warnings = Vec::new();
    if pods.len() > MOST_PODS {
        warnings.push(format!(
            "new PodSecurity enforce level only checked against the first {MOST_PODS} of {} existing pods",
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

/// The pods of one controller are alike, so one of each comes before all the others.
fn one_of_each_controller_first<'a>(pods: impl IntoIterator<Item = &'a Value>) -> Vec<&'a Value> {
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

    fn judged(labels: &[(&str, &str)], subject: Subject, spec: &Value) -> Verdict {
        judge(&namespace(labels), subject, &json!({}), spec)
    }

    #[test]
    fn a_pod_is_refused_noted_or_warned_of_as_its_namespace_says() {
        let privileged =
            json!({"containers": [{"name": "c", "securityContext": {"privileged": true}}]});
        let found = "privileged (container \"c\" must not set securityContext.privileged=true)";
        let refused = judged(&[("enforce", "baseline")], Subject::Pod, &privileged);
        assert_eq!(
            refused.refusal,
            Some(format!("violates PodSecurity \"baseline:latest\": {found}"))
        );
        assert_eq!(refused.warnings, [""; 0]);
        let warned = judged(
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
        let noted = judged(&[("audit", "baseline")], Subject::Pod, &privileged);
        assert_eq!((noted.refusal, noted.warnings), (None, Vec::new()));
        assert_eq!(
            noted.annotations["audit-violations"],
            format!("would violate PodSecurity \"baseline:latest\": {found}")
        );
        assert_eq!(noted.annotations["enforce-policy"], "privileged:latest");
        assert_eq!(judged(&[], Subject::Pod, &privileged), Verdict::default());
        let plain = json!({"containers": [{"name": "c"}]});
        assert_eq!(
            judged(&[("enforce", "baseline")], Subject::Pod, &plain).refusal,
            None
        );
        let unknown = judged(&[("enforce", "none")], Subject::Pod, &plain);
        assert!(
            unknown.refusal.is_some(),
            "a level that is none is enforced as restricted"
        );
        assert!(
            unknown.annotations["error"].starts_with("Failed to parse policy: metadata.labels[")
        );
    }

    #[test]
    fn what_makes_pods_is_warned_of_and_never_refused() {
        let privileged =
            json!({"containers": [{"name": "c", "securityContext": {"privileged": true}}]});
        let verdict = judged(&[("enforce", "baseline")], Subject::Template, &privileged);
        assert_eq!(verdict.refusal, None);
        assert_eq!(verdict.warnings.len(), 1);
    }

    #[test]
    fn an_update_counts_when_an_image_changes_or_a_container_comes() {
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
    fn pods_that_are_there_are_warned_of_when_the_level_rises() {
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

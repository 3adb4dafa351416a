//! The Pod Security Standards, enforced by the labels of a namespace as Kubernetes' PodSecurity admission does (version 1.35).
//!
//! | module | owns |
//! |---|---|
//! | [`policy`] | levels, versions, and what the labels of a namespace ask for |
//! | [`checks`] | which check belongs to which level since which version; judging a pod |
//! | [`baseline`], [`restricted`] | the checks themselves, in Kubernetes' words |
//! | [`admission`] | what a write is answered: a refusal, warnings, audit annotations |
//!
//! All of it is pure: the namespace and its pods come in as JSON. No namespace, user or runtime class is exempt.

pub mod admission;
mod baseline;
mod checks;
pub mod policy;
mod restricted;

use serde_json::Value;

/// Why a pod does not meet a level.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Violation {
    /// What is wrong, in a few words.
    pub reason: &'static str,
    /// Who does it, and what is meant.
    pub detail: String,
}

/// The containers of a pod, of all three kinds.
fn containers(spec: &Value) -> impl Iterator<Item = &Value> {
    ["initContainers", "containers", "ephemeralContainers"]
        .into_iter()
        .flat_map(|list| spec[list].as_array().into_iter().flatten())
}

/// The names of the containers that a rule does not let pass.
fn names_of<'a>(spec: &'a Value, is_bad: impl Fn(&'a Value) -> bool) -> Vec<&'a str> {
    containers(spec)
        .filter(|container| is_bad(container))
        .map(|container| container["name"].as_str().unwrap_or_default())
        .collect()
}

/// `"a", "b"`
fn quoted<Text: AsRef<str>>(items: impl IntoIterator<Item = Text>) -> String {
    let quoted: Vec<String> = items
        .into_iter()
        .map(|item| format!("\"{}\"", item.as_ref()))
        .collect();
    quoted.join(", ")
}

fn plural(count: usize, one: &'static str, several: &'static str) -> &'static str {
    if count == 1 { one } else { several }
}

/// `container "a"`, `containers "a", "b"`
fn named(containers: &[&str]) -> String {
    let noun = plural(containers.len(), "container", "containers");
    format!("{noun} {}", quoted(containers))
}

/// The pod and its containers, as far as they are to blame: `pod and container "a"`.
fn setters(is_pod: bool, containers: &[&str]) -> Option<String> {
    let mut setters = Vec::new();
    if is_pod {
        setters.push("pod".to_owned());
    }
    if !containers.is_empty() {
        setters.push(named(containers));
    }
    (!setters.is_empty()).then(|| setters.join(" and "))
}

/// Whether a pod has a user namespace of its own by its own wish, for which 1.35 relaxes some checks.
fn has_user_namespace(spec: &Value) -> bool {
    spec["hostUsers"] == false
}

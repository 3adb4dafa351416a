#![doc = include_str!("../README.md")]
#![cfg_attr(not(test), warn(clippy::arithmetic_side_effects))]

pub mod admission;
mod baseline;
mod checks;
pub mod policy;
mod restricted;

use serde_json::Value;

/// A reason why a pod does not meet a level.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Violation {
    /// A short reason.
    pub reason: &'static str,
    /// The container or field that violates the level, and how to fix it.
    pub detail: String,
}

/// The containers of a pod: init, regular and ephemeral ones.
fn containers(spec: &Value) -> impl Iterator<Item = &Value> {
    ["initContainers", "containers", "ephemeralContainers"]
        .into_iter()
        .flat_map(|list| spec[list].as_array().into_iter().flatten())
}

/// The names of the containers that violate a check.
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

/// The pod and the containers that set a forbidden value: `pod and container "a"`.
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

/// Whether a pod requests its own user namespace, for which version 1.35 relaxes some checks.
fn has_user_namespace(spec: &Value) -> bool {
    spec["hostUsers"] == false
}

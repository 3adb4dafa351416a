//! The dependency rules of ARCHITECTURE.md and the file-level habits of the code, as checks.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, bail};
use serde_json::Value;

use crate::{adr, attacks, layers, links, named_tests, vocabulary};

/// Which of our crates each crate may use. A crate that is not listed may use none.
const MAY_USE: [(&str, &[&str]); 17] = [
    ("apiserver", &["apimachinery", "pod-security", "store"]),
    (
        "bench",
        &[
            "api",
            "apiserver",
            "container-runtime",
            "controllers",
            "machine-control-plane",
            "node",
            "object-watch",
            "planner",
            "router",
            "sdk",
            "shim-protocol",
            "telemetry",
            "testkit",
        ],
    ),
    (
        "container-runtime",
        &[
            "api",
            "directory-tree",
            "images",
            "pod-network",
            "shim-protocol",
        ],
    ),
    (
        "controllers",
        &["api", "object-watch", "planner", "telemetry"],
    ),
    ("event-recorder", &["api"]),
    (
        "machine-control-plane",
        &[
            "api",
            "apimachinery",
            "directory-tree",
            "event-recorder",
            "object-watch",
        ],
    ),
    (
        "node",
        &[
            "api",
            "apimachinery",
            "container-runtime",
            "directory-tree",
            "event-recorder",
            "images",
            "object-watch",
            "pod-network",
            "shim-protocol",
            "streaming",
            "telemetry",
        ],
    ),
    ("object-watch", &["api"]),
    ("planner", &["api"]),
    ("pod-network", &["api", "event-recorder", "object-watch"]),
    ("pod-security", &["apimachinery"]),
    ("router", &["api", "object-watch", "telemetry"]),
    ("sdk", &["api", "sandboxd"]),
    ("shim", &["shim-protocol"]),
    ("testkit", &["api", "apiserver"]),
    (
        "xtask",
        &["api", "apimachinery", "controllers", "images", "router"],
    ),
    (
        "cli",
        &[
            "api",
            "apiserver",
            "container-runtime",
            "controllers",
            "images",
            "machine-control-plane",
            "node",
            "object-watch",
            "pod-network",
            "router",
            "sandboxd",
            "sdk",
            "telemetry",
        ],
    ),
];

/// What every crate may use.
const FOR_ALL: [&str; 2] = ["error-chain", "saturating-time"];

/// Crates that are no part of the product.
const NOT_PRODUCT: [&str; 2] = ["crates/bench/", "crates/testkit/"];

/// Product code refuses operators on times, which panic on overflow.
const TIME_LINT: &str = "#![cfg_attr(not(test), warn(clippy::arithmetic_side_effects))]";

/// Crates that only decide: no runtime, no network, no client.
const PURE: [&str; 4] = ["api", "apimachinery", "planner", "pod-security"];
const IMPURE_DEPENDENCIES: [&str; 5] = ["tokio", "hyper", "axum", "reqwest", "rusqlite"];

/// Crates that know nothing of Kubernetes objects, and the crates that define these.
const WITHOUT_KUBERNETES: [&str; 3] = ["container-runtime", "directory-tree", "images"];
const KUBERNETES_DEPENDENCIES: [&str; 2] = ["k8s-openapi", "kube"];

/// How a crate's root takes its documentation from its README, which then says what the crate owns.
const README_AS_DOCUMENTATION: &str = "#![doc = include_str!(\"../README.md\")]";

/// The one crate that may hold `unsafe` code, and so cannot inherit the workspace's lints.
const UNSAFE_CRATE: &str = "shim";

/// How long a source file may be without its tests.
const LINES_MAX: usize = 700;

/// Module names that say nothing of what a module owns.
const EMPTY_NAMES: [&str; 4] = ["utils", "util", "helpers", "common"];

/// Text that must not stand in a source file, and what to do instead. Split so that this file does not contain it.
const FORBIDDEN: [(&str, &str); 4] = [
    (concat!("#[all", "ow("), "use #[expect(…, reason = \"…\")]"),
    (concat!("#[igno", "re"), "mend or delete the test"),
    (concat!("FIX", "ME"), "mend it"),
    (concat!("XX", "X"), "say what is meant"),
];

/// Fails with every rule that is broken.
pub fn check(root: &Path) -> anyhow::Result<()> {
    let mut complaints = check_dependencies(root)?;
    let mut sources = Vec::new();
    for directory in ["crates", "xtask", "tests"] {
        collect_sources(&root.join(directory), &mut sources)?;
    }
    let mut texts = Vec::new();
    for source in &sources {
        let shown = source
            .strip_prefix(root)
            .unwrap_or(source)
            .display()
            .to_string();
        let text = fs::read_to_string(source).with_context(|| format!("reading {shown}"))?;
        complaints.extend(check_source(&shown, &text));
        texts.push((shown, text));
    }
    complaints.extend(layers::check(&texts));
    complaints.extend(attacks::check(root, &texts)?);
    let pages = links::texts(root)?;
    complaints.extend(links::check(root, &pages));
    complaints.extend(adr::check(root, &pages)?);
    complaints.extend(named_tests::check(&pages));
    complaints.extend(vocabulary::check(root, &pages)?);
    if complaints.is_empty() {
        return Ok(());
    }
    bail!(
        "{} rules are broken:\n  {}",
        complaints.len(),
        complaints.join("\n  ")
    );
}

fn check_dependencies(root: &Path) -> anyhow::Result<Vec<String>> {
    let output = Command::new(env!("CARGO"))
        .args(["metadata", "--format-version=1", "--no-deps", "--offline"])
        .current_dir(root)
        .output()
        .context("running cargo metadata")?;
    if !output.status.success() {
        bail!(
            "cargo metadata: {}",
            String::from_utf8_lossy(&output.stderr)
        );
    }
    let metadata: Value =
        serde_json::from_slice(&output.stdout).context("reading cargo metadata")?;
    let packages = metadata["packages"]
        .as_array()
        .context("packages is a list")?;
    let mut complaints: Vec<String> = packages.iter().flat_map(check_package).collect();
    for package in packages {
        let name = short_name(package["name"].as_str().unwrap_or_default());
        let manifest = package["manifest_path"]
            .as_str()
            .context("a package has a manifest")?;
        let manifest =
            fs::read_to_string(manifest).with_context(|| format!("reading {manifest}"))?;
        if name != UNSAFE_CRATE && !manifest.contains("[lints]\nworkspace = true") {
            complaints.push(format!("{name}: inherit the workspace's lints"));
        }
    }
    complaints.extend(check_what_runs(&metadata, packages));
    Ok(complaints)
}

/// `cargo run`, with which the README begins, must find one program.
fn check_what_runs(metadata: &Value, packages: &[Value]) -> Option<String> {
    let members = metadata["workspace_default_members"].as_array();
    let is_default = |package: &&Value| {
        members.is_some_and(|members| members.iter().any(|id| *id == package["id"]))
    };
    let targets = packages
        .iter()
        .filter(is_default)
        .flat_map(|package| package["targets"].as_array().into_iter().flatten());
    let programs: Vec<&str> = targets
        .filter(|target| target["kind"][0] == "bin")
        .filter_map(|target| target["name"].as_str())
        .collect();
    (programs != ["agent-sandbox"]).then(|| {
        format!("`cargo run` must mean agent-sandbox, not {programs:?}: see default-members")
    })
}

fn check_package(package: &Value) -> Vec<String> {
    let name = short_name(package["name"].as_str().unwrap_or_default());
    let dependencies: BTreeSet<&str> = package["dependencies"]
        .as_array()
        .into_iter()
        .flatten()
        .filter(|dependency| dependency["kind"].is_null())
        .filter_map(|dependency| dependency["name"].as_str())
        .collect();
    let allowed: BTreeMap<&str, &[&str]> = MAY_USE.into_iter().collect();
    let may_use = allowed.get(name).copied().unwrap_or_default();
    let mut complaints: Vec<String> = dependencies
        .iter()
        .filter(|dependency| {
            let own = short_name(dependency);
            dependency.starts_with("agent-sandbox-")
                && !may_use.contains(&own)
                && !FOR_ALL.contains(&own)
        })
        .map(|dependency| format!("{name} must not use {dependency}: see ARCHITECTURE.md"))
        .collect();
    if PURE.contains(&name) {
        let impure = IMPURE_DEPENDENCIES
            .into_iter()
            .filter(|crate_name| dependencies.contains(crate_name));
        complaints.extend(
            impure.map(|crate_name| format!("{name} only decides and must not use {crate_name}")),
        );
    }
    if WITHOUT_KUBERNETES.contains(&name) {
        let objects = KUBERNETES_DEPENDENCIES
            .into_iter()
            .filter(|crate_name| dependencies.contains(crate_name));
        complaints.extend(objects.map(|crate_name| {
            format!("{name} knows nothing of Kubernetes objects and must not use {crate_name}")
        }));
    }
    complaints
}

pub fn short_name(package: &str) -> &str {
    match package {
        "agent-sandbox" => "cli",
        _ => package.strip_prefix("agent-sandbox-").unwrap_or(package),
    }
}

fn collect_sources(directory: &Path, sources: &mut Vec<PathBuf>) -> anyhow::Result<()> {
    let Ok(entries) = fs::read_dir(directory) else {
        return Ok(());
    };
    for entry in entries {
        let path = entry.context("reading a directory")?.path();
        if path.is_dir() {
            collect_sources(&path, sources)?;
        } else if path.extension().is_some_and(|extension| extension == "rs") {
            sources.push(path);
        }
    }
    sources.sort();
    Ok(())
}

fn check_source(path: &str, text: &str) -> Vec<String> {
    let mut complaints = Vec::new();
    let is_test = path.contains("/tests/") || path.ends_with("tests.rs");
    // The SDK's documentation shows its examples whole, and says what they are for.
    let is_shown = path.starts_with("crates/sdk/examples/");
    let is_documented = text.starts_with("//!") || text.starts_with(README_AS_DOCUMENTATION);
    if !is_documented && !is_test && !is_shown {
        complaints.push(format!(
            "{path}: open with `//!` and say what the file owns"
        ));
    }
    let lines = text
        .lines()
        .take_while(|line| !line.starts_with("#[cfg(test)]"))
        .count();
    if lines > LINES_MAX && !is_test {
        complaints.push(format!(
            "{path}: {lines} lines; split it by idea below {LINES_MAX}"
        ));
    }
    let stem = Path::new(path)
        .file_stem()
        .and_then(|stem| stem.to_str())
        .unwrap_or_default();
    if EMPTY_NAMES.contains(&stem) {
        complaints.push(format!("{path}: name the module for what it owns"));
    }
    let is_root = path.ends_with("/src/lib.rs") || path.ends_with("/src/main.rs");
    let is_product =
        path.starts_with("crates/") && !NOT_PRODUCT.iter().any(|own| path.starts_with(own));
    if is_root && is_product && !text.contains(TIME_LINT) {
        complaints.push(format!("{path}: say `{TIME_LINT}`"));
    }
    for (forbidden, instead) in FORBIDDEN {
        if text.contains(forbidden) {
            complaints.push(format!("{path}: {forbidden:?}: {instead}"));
        }
    }
    complaints
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_crate_may_use_only_what_the_architecture_allows() {
        let package = serde_json::json!({
            "name": "agent-sandbox-planner",
            "dependencies": [
                {"name": "agent-sandbox-api", "kind": null},
                {"name": "agent-sandbox-node", "kind": null},
                {"name": "agent-sandbox-testkit", "kind": "dev"},
                {"name": "tokio", "kind": null},
            ],
        });
        let complaints = check_package(&package);
        assert_eq!(complaints.len(), 2, "{complaints:?}");
        assert!(complaints[0].contains("planner must not use agent-sandbox-node"));
        assert!(complaints[1].contains("must not use tokio"));
    }

    #[test]
    fn the_container_runtime_must_not_use_kubernetes_objects() {
        let package = serde_json::json!({
            "name": "agent-sandbox-container-runtime",
            "dependencies": [
                {"name": "agent-sandbox-pod-network", "kind": null},
                {"name": "k8s-openapi", "kind": null},
            ],
        });
        let complaints = check_package(&package);
        assert_eq!(complaints.len(), 1, "{complaints:?}");
        assert!(complaints[0].contains("must not use k8s-openapi"));
    }

    #[test]
    fn each_habit_is_checked() {
        let root = format!("//! Owns a.\n{TIME_LINT}\n");
        assert!(check_source("crates/a/src/lib.rs", &root).is_empty());
        assert_eq!(
            check_source("crates/a/src/lib.rs", "//! Owns a.\n").len(),
            1
        );
        assert!(check_source("crates/a/src/a.rs", "//! Owns a.\n").is_empty());
        assert_eq!(check_source("crates/a/src/a.rs", "fn f() {}\n").len(), 1);
        assert_eq!(
            check_source("crates/a/src/utils.rs", "//! Owns a.\n").len(),
            1
        );
        let forbidden = format!("//! B.\n{}\n", FORBIDDEN[0].0);
        assert_eq!(check_source("crates/a/src/b.rs", &forbidden).len(), 1);
        let long = format!("//! Long.\n{}", "// line\n".repeat(LINES_MAX));
        assert_eq!(check_source("crates/a/src/b.rs", &long).len(), 1);
        assert!(check_source("crates/a/tests/b.rs", &long).is_empty());
    }
}

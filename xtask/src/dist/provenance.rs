//! `provenance.json`: an in-toto statement with SLSA v1 provenance. It is not signed, and names no time, so that it is reproducible.

use std::fs;
use std::process::Command;

use anyhow::{Context, ensure};
use serde_json::{Value, json};

use super::python_runtime::Root;
use super::toolchain::ZIG_VERSION;
use super::{Run, checksums};

const FILE: &str = "provenance.json";
/// Names this task and its parameters. There is no server behind it.
const BUILD_TYPE: &str = "urn:agent-sandbox:cargo-xtask-dist:v1";

pub fn write(run: &Run<'_>, roots: &[Root]) -> anyhow::Result<()> {
    let subjects: Vec<Value> = checksums::of_directory(&run.out)?
        .into_iter()
        .filter(|sum| sum.path != FILE && sum.path != checksums::FILE)
        .map(|sum| json!({"name": sum.path, "digest": {"sha256": sum.sha256}}))
        .collect();
    let statement = json!({
        "_type": "https://in-toto.io/Statement/v1",
        "subject": subjects,
        "predicateType": "https://slsa.dev/provenance/v1",
        "predicate": {
            "buildDefinition": {
                "buildType": BUILD_TYPE,
                "externalParameters": {
                    "profile": run.arguments.profile,
                    "targets": run.arguments.targets.iter().map(|target| target.triple()).collect::<Vec<_>>(),
                    "imagePrefix": run.arguments.image_prefix,
                },
                "internalParameters": {"SOURCE_DATE_EPOCH": run.version.epoch},
                "resolvedDependencies": materials(run, roots)?,
            },
            "runDetails": {
                "builder": {"id": "urn:agent-sandbox:local-build"},
                "metadata": {"invocationId": run.version.package()},
            },
        },
    });
    let text = serde_json::to_string_pretty(&statement)? + "\n";
    fs::write(run.out.join(FILE), text)?;
    Ok(())
}

/// What the files were made from.
fn materials(run: &Run<'_>, roots: &[Root]) -> anyhow::Result<Vec<Value>> {
    let lock = checksums::of_file(&run.root.join("Cargo.lock"))?;
    let mut materials = vec![
        json!({"name": "source", "digest": {"gitCommit": run.version.commit}, "annotations": {"dirty": run.version.is_dirty}}),
        json!({"name": "Cargo.lock", "digest": {"sha256": lock}}),
        json!({"name": "rustc", "annotations": {"version": rustc_version(run)?}}),
        json!({"uri": format!("pkg:pypi/ziglang@{ZIG_VERSION}")}),
    ];
    for root in roots {
        for package in &root.packages {
            let version = package.version.replace(':', "%3A").replace('+', "%2B");
            materials.push(json!({
                "uri": format!("pkg:deb/debian/{}@{version}?arch={}", package.name.replace('+', "%2B"), package.architecture),
            }));
        }
    }
    Ok(materials)
}

fn rustc_version(run: &Run<'_>) -> anyhow::Result<String> {
    let output = Command::new("rustc")
        .current_dir(run.root)
        .arg("--version")
        .output()
        .context("cannot run rustc")?;
    ensure!(
        output.status.success(),
        "rustc --version: {}",
        output.status
    );
    Ok(String::from_utf8(output.stdout)?.trim().to_owned())
}

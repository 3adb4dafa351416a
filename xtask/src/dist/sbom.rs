//! Software bills of materials, as SPDX 2.3 JSON: the crates in each program, and the Debian packages in `python-runtime`.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::process::Command;

use anyhow::{Context, ensure};
use serde::Deserialize;
use serde_json::{Value, json};

use super::binaries::{MAIN, RUNTIME};
use super::python_runtime::Root;
use super::{Run, Target, checksums};

/// The packages whose code is in a program. The main program carries the two that run inside containers.
const PROGRAMS: [(&str, &[&str]); 2] = [
    (
        MAIN,
        &[
            "agent-sandbox",
            "agent-sandbox-shim",
            "agent-sandbox-sandboxd",
        ],
    ),
    (RUNTIME, &["agent-sandbox-sandboxd"]),
];

/// A crate in a program.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
struct Crate {
    name: String,
    version: String,
    licence: String,
}

pub fn write_programs(run: &Run<'_>) -> anyhow::Result<()> {
    fs::create_dir_all(run.out.join("sbom"))?;
    let checksums = crate_checksums(run)?;
    for target in &run.arguments.targets {
        for (program, packages) in PROGRAMS {
            let crates = crates(run, *target, packages)?;
            let sum = checksums::of_file(&run.programs(*target).join(program))?;
            let described = json!({
                "name": program,
                "SPDXID": "SPDXRef-program",
                "versionInfo": run.version.package(),
                "downloadLocation": "NOASSERTION",
                "filesAnalyzed": false,
                "licenseConcluded": "NOASSERTION",
                "licenseDeclared": "Apache-2.0",
                "copyrightText": "NOASSERTION",
                "checksums": [{"algorithm": "SHA256", "checksumValue": sum}],
            });
            let parts = crates.iter().map(|one| crate_package(one, &checksums));
            let name = format!("{program}-{}", target.machine());
            write(run, &name, described, parts.collect())?;
        }
    }
    Ok(())
}

/// The bill of a root file system of `python-runtime`.
pub fn write_root(run: &Run<'_>, root: &Root) -> anyhow::Result<()> {
    let described = json!({
        "name": "python-runtime",
        "SPDXID": "SPDXRef-program",
        "versionInfo": run.version.package(),
        "downloadLocation": "NOASSERTION",
        "filesAnalyzed": false,
        "licenseConcluded": "NOASSERTION",
        // Each package has its own, in /usr/share/doc/<package>/copyright of the image.
        "licenseDeclared": "NOASSERTION",
        "copyrightText": "NOASSERTION",
    });
    let parts = root.packages.iter().map(|package| {
        let version = package.version.replace(':', "%3A").replace('+', "%2B");
        let name = package.name.replace('+', "%2B");
        package_entry(
            &package.name,
            &package.version,
            "NOASSERTION",
            &format!(
                "pkg:deb/debian/{name}@{version}?arch={}",
                package.architecture
            ),
            None,
        )
    });
    let name = format!("python-runtime-{}", root.target.machine());
    write(run, &name, described, parts.collect())
}

/// The crates that are compiled into the packages for the target, without build scripts and procedural macros.
fn crates(run: &Run<'_>, target: Target, packages: &[&str]) -> anyhow::Result<Vec<Crate>> {
    let mut found = BTreeSet::new();
    for package in packages {
        let output = Command::new("cargo")
            .current_dir(run.root)
            .args(["tree", "--locked", "--package", package])
            .args(["--target", target.triple()])
            .args(["--edges", "normal,no-proc-macro", "--prefix", "none"])
            .args(["--format", "{p}|{l}"])
            .output()
            .context("cannot run cargo")?;
        ensure!(
            output.status.success(),
            "cargo tree: {}",
            String::from_utf8_lossy(&output.stderr)
        );
        found.extend(parse_tree(&String::from_utf8(output.stdout)?)?);
    }
    Ok(found.into_iter().collect())
}

/// Lines as `name v1.2.3 (path)|MIT OR Apache-2.0`, with ` (*)` behind those that were shown before.
fn parse_tree(text: &str) -> anyhow::Result<Vec<Crate>> {
    text.lines()
        .filter(|line| !line.trim().is_empty())
        .map(|line| {
            let (package, licence) = line
                .split_once('|')
                .context("cargo tree without a licence")?;
            let mut words = package.split_whitespace();
            let name = words.next().context("cargo tree without a name")?;
            let version = words.next().and_then(|word| word.strip_prefix('v'));
            let licence = licence.trim_end_matches("(*)").trim();
            Ok(Crate {
                name: name.to_owned(),
                version: version.context("cargo tree without a version")?.to_owned(),
                // How crates wrote "or" before there were expressions.
                licence: match licence {
                    "" => "NOASSERTION".to_owned(),
                    known => known.replace('/', " OR "),
                },
            })
        })
        .collect()
}

/// The checksums of `Cargo.lock`, by name and version.
fn crate_checksums(run: &Run<'_>) -> anyhow::Result<BTreeMap<(String, String), String>> {
    #[derive(Deserialize)]
    struct Lock {
        package: Vec<Locked>,
    }
    #[derive(Deserialize)]
    struct Locked {
        name: String,
        version: String,
        checksum: Option<String>,
    }
    let text = fs::read_to_string(run.root.join("Cargo.lock")).context("reading Cargo.lock")?;
    let lock: Lock = toml::from_str(&text).context("parsing Cargo.lock")?;
    Ok(lock
        .package
        .into_iter()
        .filter_map(|one| Some(((one.name, one.version), one.checksum?)))
        .collect())
}

fn crate_package(one: &Crate, checksums: &BTreeMap<(String, String), String>) -> Value {
    let checksum = checksums.get(&(one.name.clone(), one.version.clone()));
    package_entry(
        &one.name,
        &one.version,
        &one.licence,
        &format!("pkg:cargo/{}@{}", one.name, one.version.replace('+', "%2B")),
        checksum.map(String::as_str),
    )
}

fn package_entry(
    name: &str,
    version: &str,
    licence: &str,
    locator: &str,
    sha256: Option<&str>,
) -> Value {
    let mut entry = json!({
        "name": name,
        "SPDXID": identifier(name, version),
        "versionInfo": version,
        "downloadLocation": "NOASSERTION",
        "filesAnalyzed": false,
        "licenseConcluded": "NOASSERTION",
        "licenseDeclared": licence,
        "copyrightText": "NOASSERTION",
        "externalRefs": [{
            "referenceCategory": "PACKAGE-MANAGER",
            "referenceType": "purl",
            "referenceLocator": locator,
        }],
    });
    if let Some(sha256) = sha256 {
        entry["checksums"] = json!([{"algorithm": "SHA256", "checksumValue": sha256}]);
    }
    entry
}

/// Letters, digits, dots and dashes, as SPDX demands.
fn identifier(name: &str, version: &str) -> String {
    let text: String = format!("{name}-{version}")
        .chars()
        .map(|one| match one {
            'a'..='z' | 'A'..='Z' | '0'..='9' | '.' | '-' => one,
            '_' => '.',
            _ => '-',
        })
        .collect();
    format!("SPDXRef-Package-{text}")
}

fn write(run: &Run<'_>, name: &str, described: Value, parts: Vec<Value>) -> anyhow::Result<()> {
    let mut relationships = vec![json!({
        "spdxElementId": "SPDXRef-DOCUMENT",
        "relationshipType": "DESCRIBES",
        "relatedSpdxElement": "SPDXRef-program",
    })];
    relationships.extend(parts.iter().map(|part| {
        json!({
            "spdxElementId": "SPDXRef-program",
            "relationshipType": "CONTAINS",
            "relatedSpdxElement": part["SPDXID"],
        })
    }));
    let mut packages = vec![described];
    packages.extend(parts);
    let document = json!({
        "spdxVersion": "SPDX-2.3",
        "dataLicense": "CC0-1.0",
        "SPDXID": "SPDXRef-DOCUMENT",
        "name": name,
        "documentNamespace": format!("https://spdx.org/spdxdocs/{name}-{}", run.version.package()),
        "creationInfo": {
            "created": run.version.date,
            "creators": ["Tool: cargo-xtask-dist"],
        },
        "packages": packages,
        "relationships": relationships,
    });
    let path = run.out.join("sbom").join(format!("{name}.spdx.json"));
    let text = serde_json::to_string_pretty(&document)? + "\n";
    fs::write(&path, text).with_context(|| format!("writing {}", path.display()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_tree_of_cargo_is_read_with_paths_and_repetitions() {
        let text = "agent-sandbox v0.1.0 (/source/crates/cli)|Apache-2.0\nlibc v0.2.1|MIT/Apache-2.0 (*)\nold v1.0.0|\n";
        let crates = parse_tree(text).unwrap();
        assert_eq!(crates[0].version, "0.1.0");
        assert_eq!(crates[1].licence, "MIT OR Apache-2.0");
        assert_eq!(crates[2].licence, "NOASSERTION");
        assert!(parse_tree("nonsense").is_err());
    }

    #[test]
    fn identifiers_have_only_the_characters_that_spdx_allows() {
        assert_eq!(
            identifier("proc_macro2", "1.0.0+x"),
            "SPDXRef-Package-proc.macro2-1.0.0-x"
        );
    }
}

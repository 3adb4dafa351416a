//! The Helm chart as a package and a repository's index, as `helm package` and `helm repo index` would write them.

use std::fs;
use std::path::Path;

use anyhow::{Context, ensure};
use images::write::{Content, Naming, Tree, gzip};
use serde_json::{Value, json};
use sha2::{Digest, Sha256};

use super::Run;

const NAME: &str = "agent-sandbox";

pub fn write(run: &Run<'_>) -> anyhow::Result<()> {
    let source = run.root.join("deploy/helm");
    let directory = run.out.join("helm");
    fs::create_dir_all(&directory)?;
    let text = fs::read_to_string(source.join("Chart.yaml")).context("reading Chart.yaml")?;
    let text = with_version(&text, &run.version.package(), &run.version.image_tag())?;
    let package = package(&source, &text, run.version.epoch)?;
    let file = format!("{NAME}-{}.tgz", run.version.package());
    fs::write(directory.join(&file), &package)?;
    let digest = format!("{:x}", Sha256::digest(&package));
    let index = index(&text, &run.version.date, &file, &digest)?;
    fs::write(
        directory.join("index.yaml"),
        serde_yaml_ng::to_string(&index)?,
    )?;
    println!("-- {}", directory.join(file).display());
    Ok(())
}

/// `Chart.yaml` with the version of this release, and the tag of its images as the version of the program.
fn with_version(chart: &str, version: &str, image_tag: &str) -> anyhow::Result<String> {
    let mut lines: Vec<String> = Vec::new();
    let mut found = false;
    for line in chart.lines() {
        if line.starts_with("version:") {
            lines.push(format!("version: {version}"));
            lines.push(format!("appVersion: \"{image_tag}\""));
            found = true;
        } else if !line.starts_with("appVersion:") {
            lines.push(line.to_owned());
        }
    }
    ensure!(found, "deploy/helm/Chart.yaml has no version");
    Ok(lines.join("\n") + "\n")
}

/// The chart's files below a directory of its name, `Chart.yaml` replaced.
fn package(source: &Path, chart: &str, epoch: u64) -> anyhow::Result<Vec<u8>> {
    let mut found = Tree::new(epoch);
    found.add_directory(source, &|_| true)?;
    let mut tree = Tree::new(epoch);
    for (path, content) in found.files() {
        let content = match path.as_str() {
            "Chart.yaml" => Content::Bytes(chart.as_bytes().to_vec()),
            _ => content.clone(),
        };
        tree.file(&format!("{NAME}/{path}"), 0o644, content)?;
    }
    Ok(tree.write(gzip(Vec::new()), Naming::Plain)?.finish()?)
}

fn index(chart: &str, date: &str, file: &str, digest: &str) -> anyhow::Result<Value> {
    let mut entry: Value = serde_yaml_ng::from_str(chart).context("parsing Chart.yaml")?;
    entry["created"] = Value::from(date);
    entry["digest"] = Value::from(digest);
    // Relative to the index: the repository is wherever the directory is served.
    entry["urls"] = json!([file]);
    Ok(json!({
        "apiVersion": "v1",
        "entries": {NAME: [entry]},
        "generated": date,
    }))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_index_names_the_version_the_file_and_its_digest() {
        let chart = with_version(
            "apiVersion: v2\nname: agent-sandbox\nversion: 0.1.0\n",
            "0.1.0+a",
            "0.1.0-a",
        )
        .unwrap();
        assert!(chart.contains("version: 0.1.0+a\nappVersion: \"0.1.0-a\"\n"));
        let index = index(&chart, "2026-01-01T00:00:00Z", "a.tgz", "00ff").unwrap();
        let entry = &index["entries"]["agent-sandbox"][0];
        assert_eq!(entry["version"], "0.1.0+a");
        assert_eq!(entry["digest"], "00ff");
        assert_eq!(entry["urls"], json!(["a.tgz"]));
        assert!(with_version("name: x\n", "1", "1").is_err());
    }
}

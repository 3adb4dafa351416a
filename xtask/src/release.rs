//! `cargo xtask release`: the manifests that a release publishes, ready for `kubectl apply`.
//!
//! | file | what it has |
//! |---|---|
//! | `manifest.yaml` | the core: namespace, definition of Sandbox, role, service, Deployment |
//! | `extensions.yaml` | on top of it: the other definitions, their role, and the Deployment with `--extensions` |
//! | `all-in-one.yaml` | both in one, with one Deployment |
//! | `router.yaml` | the data plane |

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, bail, ensure};
use serde_json::Value;

use crate::artifacts;
use crate::manifests;

const CONTROLLER_IMAGE: &str = "agent-sandbox-controller";
const ROUTER_IMAGE: &str = "agent-sandbox-router";
/// Set by `--extensions` alone, because a role and definitions go with it.
const EXTENSIONS_FLAG: &str = "--extensions";

#[derive(Debug, clap::Args)]
pub struct Arguments {
    /// Tag of the images
    #[arg(long)]
    tag: String,

    /// What stands before the names of the images, as registry.example/team/
    // No default: an image of upstream's would run unnoticed.
    #[arg(long)]
    image_prefix: String,

    /// More flags for the controller, separated by spaces; not --extensions, which extensions.yaml sets
    #[arg(long, default_value = "", allow_hyphen_values = true)]
    controller_args: String,

    /// Where to write the files
    #[arg(long, value_name = "DIRECTORY")]
    output: PathBuf,
}

impl Arguments {
    /// The manifests without more flags for the controller.
    pub fn new(tag: String, image_prefix: String, output: PathBuf) -> Self {
        Self {
            tag,
            image_prefix,
            controller_args: String::new(),
            output,
        }
    }
}

pub fn run(root: &Path, arguments: &Arguments) -> anyhow::Result<()> {
    fs::create_dir_all(&arguments.output)
        .with_context(|| format!("creating {}", arguments.output.display()))?;
    for (file, content) in files(root, arguments)? {
        let path = arguments.output.join(file);
        fs::write(&path, content).with_context(|| format!("writing {}", path.display()))?;
        println!("{}", path.display());
    }
    Ok(())
}

fn files(root: &Path, arguments: &Arguments) -> anyhow::Result<Vec<(&'static str, String)>> {
    ensure!(
        !arguments.tag.is_empty(),
        "--tag: an image needs a tag, the release's for example"
    );
    let flags = flags(&arguments.controller_args)?;
    let manifests = manifests::all();
    let documents = |file: &str| -> anyhow::Result<Vec<Value>> {
        let manifest = manifests
            .iter()
            .find(|manifest| manifest.file == file)
            .with_context(|| format!("there is no manifest {file}"))?;
        let mut documents = manifest.documents.clone();
        for document in &mut documents {
            complete(document, arguments, &flags);
        }
        Ok(documents)
    };
    let is_deployment = |document: &Value| document["kind"] == "Deployment";
    let without_deployment: Vec<Value> = documents("controller.yaml")?
        .into_iter()
        .filter(|document| !is_deployment(document))
        .collect();
    let role = documents("rbac.generated.yaml")?;
    let deployment: Vec<Value> = documents("controller.yaml")?
        .into_iter()
        .filter(is_deployment)
        .collect();
    let extensions = [
        documents("extensions-rbac.generated.yaml")?,
        documents("extensions.yaml")?,
        documents("extensions.controller.yaml")?,
    ]
    .concat();
    let (core_definitions, extension_definitions) = definitions()?;
    let yaml = |definitions: &[String], documents: &[&[Value]]| -> anyhow::Result<String> {
        let mut parts = definitions.to_vec();
        for document in documents.iter().copied().flatten() {
            parts.push(serde_yaml_ng::to_string(document)?);
        }
        Ok(parts.join("---\n"))
    };
    let router = fs::read_to_string(root.join("deploy/router/router.yaml"))
        .context("reading deploy/router/router.yaml")?
        .replace(
            &format!("image: {ROUTER_IMAGE}:latest"),
            &format!("image: {}", image(arguments, ROUTER_IMAGE)),
        );
    let all_definitions = [core_definitions.clone(), extension_definitions.clone()].concat();
    Ok(vec![
        (
            "manifest.yaml",
            yaml(
                &core_definitions,
                &[&without_deployment, &role, &deployment],
            )?,
        ),
        (
            "extensions.yaml",
            yaml(&extension_definitions, &[&extensions])?,
        ),
        (
            "all-in-one.yaml",
            yaml(&all_definitions, &[&without_deployment, &role, &extensions])?,
        ),
        ("router.yaml", router),
    ])
}

/// The definitions of the core and of the extensions, as text.
fn definitions() -> anyhow::Result<(Vec<String>, Vec<String>)> {
    let mut core = Vec::new();
    let mut extensions = Vec::new();
    for (file, content) in artifacts::definitions()? {
        if artifacts::is_of_extensions(&file) {
            extensions.push(content);
        } else {
            core.push(content);
        }
    }
    Ok((core, extensions))
}

fn flags(text: &str) -> anyhow::Result<Vec<String>> {
    let flags: Vec<String> = text.split_whitespace().map(str::to_owned).collect();
    for flag in &flags {
        if flag.starts_with(EXTENSIONS_FLAG) {
            bail!(
                "--controller-args: {flag} needs roles and definitions that go with it; apply extensions.yaml or all-in-one.yaml instead"
            );
        }
        ensure!(
            flag.starts_with('-'),
            "--controller-args: {flag:?} is not a flag; write --name=value"
        );
    }
    Ok(flags)
}

fn image(arguments: &Arguments, name: &str) -> String {
    format!("{}{name}:{}", arguments.image_prefix, arguments.tag)
}

/// Gives the controller of a Deployment its image and flags.
fn complete(document: &mut Value, arguments: &Arguments, flags: &[String]) {
    let Some(container) = document.pointer_mut("/spec/template/spec/containers/0") else {
        return;
    };
    container["image"] = Value::from(image(arguments, CONTROLLER_IMAGE));
    if let Some(args) = container["args"].as_array_mut() {
        args.extend(flags.iter().map(|flag| Value::from(flag.as_str())));
    }
}

#[cfg(test)]
mod tests {
    use serde::Deserialize;

    use super::*;

    fn rendered(controller_args: &str) -> anyhow::Result<Vec<(&'static str, Vec<Value>)>> {
        let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
        let arguments = Arguments {
            tag: "v9.8.7".to_owned(),
            image_prefix: "kind.local/".to_owned(),
            controller_args: controller_args.to_owned(),
            output: PathBuf::new(),
        };
        files(&root, &arguments)?
            .into_iter()
            .map(|(file, text)| {
                let documents = serde_yaml_ng::Deserializer::from_str(&text)
                    .map(Value::deserialize)
                    .collect::<Result<_, _>>()?;
                Ok((file, documents))
            })
            .collect()
    }

    fn names(documents: &[Value]) -> Vec<String> {
        documents
            .iter()
            .map(|document| {
                let (kind, name) = (&document["kind"], &document["metadata"]["name"]);
                format!(
                    "{} {}",
                    kind.as_str().unwrap_or_default(),
                    name.as_str().unwrap_or_default()
                )
            })
            .collect()
    }

    #[test]
    fn a_release_has_the_core_the_extensions_and_both_in_one() {
        let files = rendered("").unwrap();
        let of = |wanted: &str| {
            let (_, documents) = files.iter().find(|(file, _)| *file == wanted).unwrap();
            names(documents)
        };
        assert_eq!(
            of("manifest.yaml"),
            [
                "CustomResourceDefinition sandboxes.agents.x-k8s.io",
                "Namespace agent-sandbox-system",
                "ServiceAccount agent-sandbox-controller",
                "ClusterRoleBinding agent-sandbox-controller",
                "Service agent-sandbox-controller",
                "ClusterRole agent-sandbox-controller",
                "Deployment agent-sandbox-controller",
            ]
        );
        assert_eq!(
            of("extensions.yaml"),
            [
                "CustomResourceDefinition sandboxclaims.extensions.agents.x-k8s.io",
                "CustomResourceDefinition sandboxtemplates.extensions.agents.x-k8s.io",
                "CustomResourceDefinition sandboxwarmpools.extensions.agents.x-k8s.io",
                "ClusterRole agent-sandbox-controller-extensions",
                "ClusterRoleBinding agent-sandbox-controller-extensions",
                "Deployment agent-sandbox-controller",
            ]
        );
        let mut both = [of("manifest.yaml"), of("extensions.yaml")].concat();
        both.sort();
        both.dedup();
        let mut all = of("all-in-one.yaml");
        all.sort();
        assert_eq!(all, both);
    }

    #[test]
    fn images_and_flags_reach_the_deployments() {
        for (file, documents) in rendered("--zap-log-level=debug --enable-pprof").unwrap() {
            for document in documents.iter().filter(|one| one["kind"] == "Deployment") {
                let container = &document["spec"]["template"]["spec"]["containers"][0];
                let image = container["image"].as_str().unwrap();
                assert!(
                    image.starts_with("kind.local/agent-sandbox-"),
                    "{file}: {image}"
                );
                assert!(image.ends_with(":v9.8.7"), "{file}: {image}");
                if file == "extensions.yaml" || file == "all-in-one.yaml" {
                    assert_eq!(
                        container["args"],
                        serde_json::json!([
                            "--leader-elect=true",
                            "--extensions",
                            "--zap-log-level=debug",
                            "--enable-pprof"
                        ])
                    );
                }
            }
        }
    }

    #[test]
    fn extensions_are_not_switched_on_by_a_flag_alone() {
        let refused = rendered("--extensions=true").unwrap_err().to_string();
        assert!(refused.contains("extensions.yaml"), "{refused}");
        assert!(rendered("enable-pprof").is_err());
    }
}

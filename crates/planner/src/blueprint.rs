//! How a sandbox is made from a template: for a pool, for a claim, and how the two are compared.
//!
//! The callers set owners, names and conditions.

use std::collections::BTreeMap;
use std::sync::Arc;

use api::names::name_hash;
use api::sandbox::{
    OperatingMode, PersistentVolumeClaimTemplate, PodMetadata, PodTemplate, SuspensionStrategy,
};
use api::{Sandbox, SandboxSpec, SandboxTemplate, labels};
use k8s_openapi::api::core::v1::PodSpec;
use kube::ResourceExt;
use serde_json::Value;

use crate::pod_defaults;

type Pairs = BTreeMap<String, String>;

/// A template, with what is derived from it computed once.
#[derive(Clone, Debug)]
pub struct Blueprint<'a> {
    pub template: &'a SandboxTemplate,
    /// The hash of the template's name, by which its network policy selects pods.
    pub name_hash: String,
    /// The hash of the template's content. `None` if it could not be computed.
    pub revision: Option<String>,
}

impl<'a> Blueprint<'a> {
    pub fn new(template: &'a SandboxTemplate) -> Self {
        Self {
            template,
            name_hash: name_hash(&template.name_any()),
            revision: revision(template),
        }
    }

    /// For a claim, which does not ask for the template's revision: computing it reads all of the template.
    pub(crate) fn for_claim(template: &'a SandboxTemplate) -> Self {
        Self {
            template,
            name_hash: name_hash(&template.name_any()),
            revision: None,
        }
    }

    /// The pod spec of sandboxes of this template, with the secure defaults.
    pub fn pod_spec(&self) -> PodSpec {
        let mut spec = PodSpec::clone(&self.template.spec.pod_template.spec);
        pod_defaults::apply(&self.template.spec, &mut spec);
        spec
    }

    /// The template's pod metadata, with the label that its network policy selects.
    pub fn pod_metadata(&self, identity: Pairs) -> PodMetadata {
        let mut metadata = self.template.spec.pod_template.metadata.clone();
        let labels = metadata.labels.get_or_insert_default();
        labels.insert(
            labels::SANDBOX_TEMPLATE_REF_HASH.to_owned(),
            self.name_hash.clone(),
        );
        labels.extend(identity);
        metadata
    }

    /// A sandbox of this template, as yet without a name or an owner.
    pub fn sandbox(
        &self,
        pod_spec: PodSpec,
        pod_metadata: PodMetadata,
        volume_claim_templates: Option<Vec<PersistentVolumeClaimTemplate>>,
    ) -> Sandbox {
        let spec = SandboxSpec {
            pod_template: PodTemplate {
                spec: Arc::new(pod_spec),
                metadata: pod_metadata,
            },
            volume_claim_templates,
            suspension_strategy: self.suspension_strategy(),
            service: self.template.spec.service,
            replicas: Some(1),
            operating_mode: Some(OperatingMode::Running),
            ..SandboxSpec::default()
        };
        let mut sandbox = Sandbox::new("", spec);
        sandbox.metadata.name = None;
        sandbox.metadata.namespace = self.template.namespace();
        sandbox.metadata.annotations = Some(Pairs::from([(
            labels::SANDBOX_TEMPLATE_REF.to_owned(),
            self.template.name_any(),
        )]));
        sandbox
    }

    /// How sandboxes of this template are suspended, unless their claim chooses otherwise.
    fn suspension_strategy(&self) -> Option<SuspensionStrategy> {
        let own = self.template.spec.suspension_strategy.as_ref();
        own.map(|own| SuspensionStrategy { kind: own.kind })
    }

    /// Whether this pod spec is what the template would make today. Absent and empty fields are equal, as in Kubernetes.
    pub fn would_make(&self, spec: &PodSpec) -> bool {
        let expected = self.pod_spec();
        *spec == expected || pruned(spec) == pruned(&expected)
    }
}

/// The hash of a template's pod template, which labels the sandboxes made from it.
fn revision(template: &SandboxTemplate) -> Option<String> {
    serde_json::to_string(&template.spec.pod_template)
        .ok()
        .map(|json| name_hash(&json))
}

/// The spec as JSON without nulls, empty lists and empty maps. `None` if it cannot be represented, which equals nothing.
fn pruned(spec: &PodSpec) -> Option<Value> {
    serde_json::to_value(spec).ok().map(prune)
}

/// Removes empty values. An empty volume source (`emptyDir: {}`) has a meaning, and stays.
fn prune(value: Value) -> Value {
    const MEANINGFUL_WHEN_EMPTY: [&str; 2] = ["emptyDir", "ephemeral"];
    match value {
        Value::Object(map) => Value::Object(
            map.into_iter()
                .map(|(key, value)| (key, prune(value)))
                .filter(|(key, value)| {
                    MEANINGFUL_WHEN_EMPTY.contains(&key.as_str()) || !is_empty(value)
                })
                .collect(),
        ),
        Value::Array(items) => Value::Array(items.into_iter().map(prune).collect()),
        other => other,
    }
}

fn is_empty(value: &Value) -> bool {
    match value {
        Value::Null => true,
        Value::Array(items) => items.is_empty(),
        Value::Object(map) => map.is_empty(),
        Value::String(text) => text.is_empty(),
        Value::Bool(_) | Value::Number(_) => false,
    }
}

#[cfg(test)]
mod tests {
    use k8s_openapi::api::core::v1::{Container, EmptyDirVolumeSource, Volume};

    use super::*;

    fn template(image: &str) -> SandboxTemplate {
        let mut template = SandboxTemplate::default();
        template.metadata.name = Some("py".into());
        template.spec.pod_template.spec_mut().containers = vec![Container {
            name: "main".into(),
            image: Some(image.into()),
            ..Container::default()
        }];
        template
    }

    #[test]
    fn what_the_template_made_is_recognised() {
        let template = template("v1");
        let blueprint = Blueprint::new(&template);
        let mut made = blueprint.pod_spec();
        assert!(blueprint.would_make(&made));
        made.containers[0].env = Some(Vec::new());
        made.node_selector = Some(Pairs::new());
        assert!(blueprint.would_make(&made), "absent equals empty");
        made.containers[0].image = Some("evil".into());
        assert!(!blueprint.would_make(&made));
    }

    #[test]
    fn a_volume_source_that_is_empty_still_counts() {
        let mut with = template("v1");
        let volume = Volume {
            name: "scratch".into(),
            ..Volume::default()
        };
        with.spec.pod_template.spec_mut().volumes = Some(vec![Volume {
            empty_dir: Some(EmptyDirVolumeSource::default()),
            ..volume.clone()
        }]);
        let mut other = Blueprint::new(&with).pod_spec();
        other.volumes = Some(vec![volume]);
        assert!(!Blueprint::new(&with).would_make(&other));
    }

    #[test]
    fn the_revision_follows_the_pod_template() {
        let (one, two) = (template("v1"), template("v2"));
        assert_eq!(revision(&one), revision(&template("v1")));
        assert_ne!(revision(&one), revision(&two));
    }

    #[test]
    fn pods_carry_the_label_of_their_network_policy() {
        let template = template("v1");
        let blueprint = Blueprint::new(&template);
        let identity = Pairs::from([("x".to_owned(), "y".to_owned())]);
        let labels = blueprint.pod_metadata(identity).labels.unwrap();
        assert_eq!(labels[labels::SANDBOX_TEMPLATE_REF_HASH], name_hash("py"));
        assert_eq!(labels["x"], "y");
    }
}

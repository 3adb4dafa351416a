//! The resources of a CustomResourceDefinition: its served versions and their schemas.

use std::{cmp::Ordering, sync::Arc};

use apimachinery::{schema::Schema, table::Printer};
use serde_json::Value;
use store::ResourceId;

use super::resource::{Resource, Rules, ScalePaths, Scope, api_version};

/// One version of a custom resource.
#[derive(Debug)]
pub struct CustomVersion {
    /// The compiled schema. Without a schema, unknown fields are preserved.
    pub schema: Option<Schema>,
    /// The schema as JSON text, for OpenAPI. It is read rarely, and a parsed copy would take ten times the memory.
    pub open_api: Option<Box<str>>,
    /// The columns of its tables.
    pub printer: Printer,
    /// The warning to clients of a deprecated version.
    pub deprecation: Option<String>,
    /// Fields that field selectors may use, without the leading dot.
    pub selectable_fields: Vec<String>,
    /// UID and generation of the definition that this was compiled from.
    pub origin: (String, i64),
}

/// Whether a condition of a definition is `True`.
pub fn has_condition(definition: &Value, kind: &str) -> bool {
    let conditions = definition
        .pointer("/status/conditions")
        .and_then(Value::as_array)
        .into_iter()
        .flatten();
    conditions
        .into_iter()
        .any(|condition| condition["type"] == kind && condition["status"] == "True")
}

/// The resources that an established definition serves. `known` returns versions that were compiled before.
pub fn resources_of(
    definition: &Value,
    known: impl Fn(&str, &str, &str) -> Option<Arc<CustomVersion>>,
) -> Vec<Resource> {
    if !has_condition(definition, "Established") {
        return Vec::new();
    }
    let spec = &definition["spec"];
    let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
    let (group, names) = (text(&spec["group"]), &spec["names"]);
    let (plural, kind) = (text(&names["plural"]), text(&names["kind"]));
    let singular = names["singular"]
        .as_str()
        .map_or_else(|| kind.to_lowercase(), ToOwned::to_owned);
    let list_kind = names["listKind"]
        .as_str()
        .map_or_else(|| format!("{kind}List"), ToOwned::to_owned);
    let strings = |value: &Value| {
        value
            .as_array()
            .into_iter()
            .flatten()
            .map(text)
            .collect::<Vec<_>>()
    };
    let versions: Vec<&Value> = spec["versions"].as_array().into_iter().flatten().collect();
    let storage = versions
        .iter()
        .find(|version| version["storage"] == true)
        .map(|version| text(&version["name"]))
        .unwrap_or_default();
    let origin = (
        text(&definition["metadata"]["uid"]),
        definition["metadata"]["generation"]
            .as_i64()
            .unwrap_or_default(),
    );
    let served = versions
        .into_iter()
        .filter(|version| version["served"] == true);
    served
        .map(|version| {
            let name = text(&version["name"]);
            let custom = known(&group, &name, &plural)
                .filter(|known| known.origin == origin)
                .unwrap_or_else(|| {
                    let better = preferred_over(&name, spec);
                    let compiled = compile(version, &group, &kind, better, origin.clone());
                    Arc::new(compiled)
                });
            Resource {
                group: Arc::from(group.as_str()),
                version: Arc::from(name.as_str()),
                api_version: api_version(&group, &name),
                storage_api_version: api_version(&group, &storage),
                plural: Arc::from(plural.as_str()),
                singular: Arc::from(singular.as_str()),
                kind: Arc::from(kind.as_str()),
                list_kind: Arc::from(list_kind.as_str()),
                short_names: strings(&names["shortNames"]),
                categories: strings(&names["categories"]),
                scope: if spec["scope"] == "Namespaced" {
                    Scope::Namespaced
                } else {
                    Scope::Cluster
                },
                has_status: version.pointer("/subresources/status").is_some(),
                has_generation: true,
                unconditional_update: false,
                returns_deleted: false,
                scale: version.pointer("/subresources/scale").map(scale_paths),
                rules: Rules::Custom,
                id: ResourceId::new(&group, &plural),
                custom: Some(custom),
            }
        })
        .collect()
}

/// The version that clients of a deprecated version should use: the most preferred one that is served, not deprecated and newer.
fn preferred_over<'a>(deprecated: &str, spec: &'a Value) -> Option<&'a str> {
    let versions = spec["versions"].as_array().into_iter().flatten();
    versions
        .filter(|version| version["served"] == true && version["deprecated"] != true)
        .filter_map(|version| version["name"].as_str())
        .filter(|name| compare_versions(name, deprecated) == Ordering::Greater)
        .max_by(|left, right| compare_versions(left, right))
}

fn compile(
    version: &Value,
    group: &str,
    kind: &str,
    better: Option<&str>,
    origin: (String, i64),
) -> CustomVersion {
    let open_api = version
        .pointer("/schema/openAPIV3Schema")
        .filter(|schema| schema.is_object());
    // Definitions are validated before they are stored. A schema that does not compile preserves all fields, as it did when it
    // was written.
    let schema = open_api.and_then(|schema| Schema::compile(schema, "openAPIV3Schema").ok());
    let deprecated = version["deprecated"] == true;
    let name = version["name"].as_str().unwrap_or_default();
    let deprecation = deprecated.then(|| {
        let custom_warning = version["deprecationWarning"]
            .as_str()
            .map(ToOwned::to_owned);
        custom_warning.unwrap_or_else(|| match better {
            Some(better) => {
                format!("{group}/{name} {kind} is deprecated; use {group}/{better} {kind}")
            }
            None => format!("{group}/{name} {kind} is deprecated"),
        })
    });
    let selectable = version["selectableFields"].as_array().into_iter().flatten();
    let selectable_fields = selectable
        .filter_map(|field| field["jsonPath"].as_str())
        .map(|path| path.trim_start_matches('.').to_owned())
        .collect();
    let columns = version.get("additionalPrinterColumns");
    // Columns are validated before they are stored. If they do not compile, the table shows name and age.
    let printer = Printer::custom(columns, "additionalPrinterColumns")
        .unwrap_or_else(|_| Printer::builtin(""));
    CustomVersion {
        schema,
        open_api: open_api.map(|schema| schema.to_string().into()),
        printer,
        deprecation,
        selectable_fields,
        origin,
    }
}

fn scale_paths(scale: &Value) -> ScalePaths {
    let path = |field: &str| -> Option<Vec<String>> {
        let text = scale[field].as_str()?;
        Some(
            text.split('.')
                .filter(|segment| !segment.is_empty())
                .map(ToOwned::to_owned)
                .collect(),
        )
    };
    ScalePaths {
        spec_replicas: path("specReplicasPath").unwrap_or_default(),
        status_replicas: path("statusReplicasPath").unwrap_or_default(),
        label_selector: path("labelSelectorPath"),
    }
}

/// Orders versions by Kubernetes' preference: stable over beta over alpha, newer over older, and these over other names.
pub fn compare_versions(left: &str, right: &str) -> Ordering {
    match (rank(left), rank(right)) {
        (Some(left), Some(right)) => left.cmp(&right),
        (Some(_), None) => Ordering::Greater,
        (None, Some(_)) => Ordering::Less,
        (None, None) => right.cmp(left),
    }
}

/// Stability, major and minor number of a version such as `v1` or `v2beta1`.
fn rank(version: &str) -> Option<(u8, u32, u32)> {
    let rest = version.strip_prefix('v')?;
    for (stability, marker) in [(0, "alpha"), (1, "beta")] {
        if let Some((major, minor)) = rest.split_once(marker) {
            return Some((stability, major.parse().ok()?, minor.parse().ok()?));
        }
    }
    Some((2, rest.parse().ok()?, 0))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn versions_are_ordered_by_kubernetes_preference() {
        let mut versions = vec![
            "v1alpha1",
            "foo1",
            "v2",
            "v1",
            "v10beta3",
            "v3beta1",
            "v11alpha2",
            "v12alpha1",
            "foo10",
        ];
        versions.sort_by(|left, right| compare_versions(right, left));
        assert_eq!(
            versions,
            [
                "v2",
                "v1",
                "v10beta3",
                "v3beta1",
                "v12alpha1",
                "v11alpha2",
                "v1alpha1",
                "foo1",
                "foo10"
            ]
        );
    }
}

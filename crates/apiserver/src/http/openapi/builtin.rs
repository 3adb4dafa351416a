//! The schemas of Kubernetes' built-in kinds, written by `cargo xtask generate`. They stay text until a client requests a
//! document: most servers never get such a request, and static text needs no heap memory.

use std::{collections::HashMap, sync::LazyLock};

use serde_json::{Map, Value};

/// The prefix of a reference to a schema.
pub const REFERENCE: &str = "#/components/schemas/";

/// The schema of every object's metadata.
pub const OBJECT_META: &str = "io.k8s.apimachinery.pkg.apis.meta.v1.ObjectMeta";

/// The schema of every list's metadata.
pub const LIST_META: &str = "io.k8s.apimachinery.pkg.apis.meta.v1.ListMeta";

#[derive(Default)]
struct Table {
    /// Maps API version and kind to the name of the schema.
    kinds: HashMap<(&'static str, &'static str), &'static str>,
    /// Maps the name of a schema to its JSON.
    schemas: HashMap<&'static str, &'static str>,
}

static TABLE: LazyLock<Table> = LazyLock::new(|| {
    let mut table = Table::default();
    for line in include_str!("builtin.txt").lines() {
        let mut words = line.splitn(4, ' ');
        match (words.next(), words.next(), words.next(), words.next()) {
            (Some("kind"), Some(api_version), Some(kind), Some(schema)) => {
                table.kinds.insert((api_version, kind), schema);
            }
            _ => {
                if let Some((name, schema)) = line.split_once(' ') {
                    table.schemas.insert(name, schema);
                }
            }
        }
    }
    table
});

/// The name of a kind's schema.
pub fn of_kind(api_version: &str, kind: &str) -> Option<&'static str> {
    // The keys borrow static text, so a lookup by keys with a shorter lifetime does not compile. The list is short: compare them
    // all.
    let mut kinds = TABLE.kinds.iter();
    kinds
        .find(|((known_version, known_kind), _)| {
            *known_version == api_version && *known_kind == kind
        })
        .map(|(_, name)| *name)
}

/// Adds a schema and all schemas that it references, recursively.
pub fn add(schemas: &mut Map<String, Value>, name: &str) {
    let Some(text) = TABLE
        .schemas
        .get(name)
        .filter(|_| !schemas.contains_key(name))
    else {
        return;
    };
    schemas.insert(
        name.to_owned(),
        serde_json::from_str(text).unwrap_or_default(),
    );
    for part in text.split(REFERENCE).skip(1) {
        let referred = part.split('"').next().unwrap_or_default();
        add(schemas, referred);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::registry::resource::built_in;

    #[test]
    fn every_served_kind_has_a_schema_with_all_references() {
        for resource in built_in() {
            for kind in [&resource.kind, &resource.list_kind] {
                let name = of_kind(&resource.api_version, kind)
                    .unwrap_or_else(|| panic!("{} {kind}", resource.api_version));
                let mut schemas = Map::new();
                add(&mut schemas, name);
                assert!(schemas[name]["properties"].is_object(), "{name}");
                let text = Value::from(schemas.clone()).to_string();
                for part in text.split(REFERENCE).skip(1) {
                    let referred = part.split('"').next().unwrap();
                    assert!(
                        schemas.contains_key(referred),
                        "{name} refers to {referred}"
                    );
                }
            }
        }
        assert!(TABLE.schemas.contains_key(OBJECT_META) && TABLE.schemas.contains_key(LIST_META));
    }

    #[test]
    fn lists_have_their_merge_keys_and_strategies() {
        let mut schemas = Map::new();
        add(&mut schemas, "io.k8s.api.core.v1.PodSpec");
        let spec = &schemas["io.k8s.api.core.v1.PodSpec"]["properties"];
        assert_eq!(spec["containers"]["x-kubernetes-patch-merge-key"], "name");
        assert_eq!(spec["containers"]["x-kubernetes-patch-strategy"], "merge");
        assert_eq!(
            spec["volumes"]["x-kubernetes-patch-strategy"],
            "merge,retainKeys"
        );
        let ports = &schemas["io.k8s.api.core.v1.Container"]["properties"]["ports"];
        assert_eq!(
            ports["x-kubernetes-list-map-keys"],
            serde_json::json!(["containerPort", "protocol"])
        );
        assert_eq!(spec["tolerations"]["x-kubernetes-list-type"], "atomic");
        assert_eq!(spec["tolerations"].get("x-kubernetes-patch-strategy"), None);
    }
}

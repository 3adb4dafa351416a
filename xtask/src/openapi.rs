//! The OpenAPI schemas of Kubernetes' own kinds that the embedded server serves, for `kubectl explain` and for clients that merge
//! by schema.
//!
//! Fields and descriptions come from `k8s-openapi`; how lists merge and what is replaced as a whole comes from the table that the
//! server itself merges by, so that what it says and what it does cannot differ.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write;

use anyhow::Context;
use apimachinery::types::{ListKind, PatchList, TypeRef};
use k8s_openapi::{
    ListableResource, api,
    apiextensions_apiserver::pkg::apis::apiextensions::v1::CustomResourceDefinition,
    apimachinery::pkg::apis::meta::v1::{DeleteOptions, ListMeta, Status},
};
use schemars::{JsonSchema, SchemaGenerator, generate::SchemaSettings};
use serde_json::{Map, Value, json};

const REFERENCE: &str = "#/components/schemas/";

/// A kind and the schema that describes it.
struct Kind {
    group: &'static str,
    version: &'static str,
    kind: &'static str,
    schema: String,
}

impl Kind {
    fn api_version(&self) -> String {
        match self.group {
            "" => self.version.to_owned(),
            group => format!("{group}/{}", self.version),
        }
    }

    fn identity(&self) -> Value {
        json!({"group": self.group, "version": self.version, "kind": self.kind})
    }
}

struct Collector {
    generator: SchemaGenerator,
    kinds: Vec<Kind>,
    /// Lists, by the schema of their items.
    lists: Vec<Kind>,
}

impl Collector {
    fn kind<T: JsonSchema + k8s_openapi::Resource>(&mut self) {
        let _ = self.generator.subschema_for::<T>();
        self.kinds.push(Kind {
            group: T::GROUP,
            version: T::VERSION,
            kind: T::KIND,
            schema: T::schema_name().into_owned(),
        });
    }

    fn kind_and_list<T: JsonSchema + ListableResource>(&mut self) {
        self.kind::<T>();
        self.lists.push(Kind {
            group: T::GROUP,
            version: T::VERSION,
            kind: T::LIST_KIND,
            schema: T::schema_name().into_owned(),
        });
    }
}

fn collect() -> Collector {
    let settings = SchemaSettings::draft2020_12().with(|settings| {
        settings.definitions_path = "/components/schemas".into();
    });
    let mut all = Collector {
        generator: settings.into_generator(),
        kinds: Vec::new(),
        lists: Vec::new(),
    };
    all.kind_and_list::<api::core::v1::Namespace>();
    all.kind_and_list::<api::core::v1::Pod>();
    all.kind_and_list::<api::core::v1::Service>();
    all.kind_and_list::<api::core::v1::Endpoints>();
    all.kind_and_list::<api::core::v1::PersistentVolumeClaim>();
    all.kind_and_list::<api::core::v1::PersistentVolume>();
    all.kind_and_list::<api::core::v1::ConfigMap>();
    all.kind_and_list::<api::core::v1::Secret>();
    all.kind_and_list::<api::core::v1::ServiceAccount>();
    all.kind_and_list::<api::core::v1::Event>();
    all.kind_and_list::<api::core::v1::Node>();
    all.kind_and_list::<api::events::v1::Event>();
    all.kind_and_list::<api::coordination::v1::Lease>();
    all.kind_and_list::<api::discovery::v1::EndpointSlice>();
    all.kind_and_list::<api::networking::v1::NetworkPolicy>();
    all.kind_and_list::<api::node::v1::RuntimeClass>();
    all.kind_and_list::<api::storage::v1::StorageClass>();
    all.kind_and_list::<CustomResourceDefinition>();
    all.kind_and_list::<api::rbac::v1::Role>();
    all.kind_and_list::<api::rbac::v1::RoleBinding>();
    all.kind_and_list::<api::rbac::v1::ClusterRole>();
    all.kind_and_list::<api::rbac::v1::ClusterRoleBinding>();
    all.kind::<api::core::v1::Binding>();
    all.kind::<api::policy::v1::Eviction>();
    all.kind::<api::autoscaling::v1::Scale>();
    all.kind::<api::authentication::v1::TokenRequest>();
    all.kind::<api::authentication::v1::TokenReview>();
    all.kind::<api::authentication::v1::SelfSubjectReview>();
    all.kind::<api::authorization::v1::SubjectAccessReview>();
    all.kind::<api::authorization::v1::SelfSubjectAccessReview>();
    all.kind::<api::authorization::v1::LocalSubjectAccessReview>();
    all.kind::<api::authorization::v1::SelfSubjectRulesReview>();
    let _ = all.generator.subschema_for::<DeleteOptions>();
    let _ = all.generator.subschema_for::<Status>();
    let _ = all.generator.subschema_for::<ListMeta>();
    all
}

/// One line for each kind (`kind`, its API version, its name, its schema's name), then one for each schema: its name and itself as JSON.
pub fn render() -> anyhow::Result<String> {
    let mut text = String::new();
    let mut collected = collect();
    let mut schemas: BTreeMap<String, Value> = collected
        .generator
        .take_definitions(true)
        .into_iter()
        .collect();
    let mut visited = BTreeSet::new();
    for kind in &collected.kinds {
        let api_version = kind.api_version();
        let known = TypeRef::builtin(&api_version, kind.kind).unwrap_or(TypeRef::unknown());
        annotate_named(&mut schemas, &kind.schema, known, &mut visited);
        let schema = schemas
            .get_mut(&kind.schema)
            .with_context(|| format!("{} has no schema", kind.schema))?;
        let identity = json!({"group": kind.group, "version": kind.version, "kind": kind.kind});
        schema["x-kubernetes-group-version-kind"] = json!([identity]);
        forget_required(schema, "metadata");
        writeln!(text, "kind {api_version} {} {}", kind.kind, kind.schema)?;
    }
    for list in &collected.lists {
        let name = format!("{}List", list.schema);
        writeln!(text, "kind {} {} {name}", list.api_version(), list.kind)?;
        schemas.insert(name, list_schema(list));
    }
    for (name, schema) in &schemas {
        writeln!(text, "{name} {schema}")?;
    }
    Ok(text)
}

fn list_schema(list: &Kind) -> Value {
    let refers_to = |name: &str| json!({"allOf": [{"$ref": format!("{REFERENCE}{name}")}]});
    json!({
        "description": format!("{} is a list of objects of one kind.", list.kind),
        "type": "object",
        "required": ["items"],
        "properties": {
            "apiVersion": {"type": "string"},
            "kind": {"type": "string"},
            "metadata": refers_to(&ListMeta::schema_name()),
            "items": {"type": "array", "items": refers_to(&list.schema)},
        },
        "x-kubernetes-group-version-kind": [list.identity()],
    })
}

/// Completes a schema, and those it refers to, with what is known of its type.
fn annotate_named(
    schemas: &mut BTreeMap<String, Value>,
    name: &str,
    known: TypeRef<'_>,
    visited: &mut BTreeSet<String>,
) {
    if !visited.insert(name.to_owned()) {
        return;
    }
    let Some(mut schema) = schemas.remove(name) else {
        return;
    };
    let mut referred = Vec::new();
    if let Value::Object(object) = &mut schema {
        annotate(object, known, &mut referred);
    }
    schemas.insert(name.to_owned(), schema);
    for (name, known) in referred {
        annotate_named(schemas, &name, known, visited);
    }
}

fn annotate<'a>(
    schema: &mut Map<String, Value>,
    known: TypeRef<'a>,
    referred: &mut Vec<(String, TypeRef<'a>)>,
) {
    if let Some(Value::String(reference)) = schema.get("$ref") {
        let name = reference.trim_start_matches(REFERENCE).to_owned();
        let reference = json!([{"$ref": reference}]);
        referred.push((name, known));
        // OpenAPI 3.0 knows no siblings of a reference.
        schema.remove("$ref");
        schema.insert("allOf".into(), reference);
        if known.is_atomic_map() && known.is_closed() {
            schema.insert("x-kubernetes-map-type".into(), json!("atomic"));
        }
        return;
    }
    if let Some(Value::Object(items)) = schema.get_mut("items") {
        annotate(items, known.item(), referred);
        describe_list(schema, known);
    }
    if let Some(Value::Object(values)) = schema.get_mut("additionalProperties") {
        annotate(values, known.member(""), referred);
        if known.is_atomic_map() {
            schema.insert("x-kubernetes-map-type".into(), json!("atomic"));
        }
    }
    if let Some(Value::Object(properties)) = schema.get_mut("properties") {
        for (name, property) in properties {
            let Value::Object(property) = property else {
                continue;
            };
            annotate(property, known.member(name), referred);
            if let Some(default) = known.member_default(name) {
                property.insert("default".into(), default);
            }
            if name == "volumes" && known.member("containers").patch_list() != PatchList::Replace {
                // The one list whose items are unions: what a patch does not name of them goes.
                property.insert(
                    "x-kubernetes-patch-strategy".into(),
                    json!("merge,retainKeys"),
                );
            }
        }
    }
}

fn describe_list(schema: &mut Map<String, Value>, known: TypeRef<'_>) {
    let list_type = match known.list() {
        ListKind::Atomic => "atomic",
        ListKind::Set => "set",
        ListKind::Map(keys) => {
            let keys: Vec<&str> = keys.iter().collect();
            schema.insert("x-kubernetes-list-map-keys".into(), json!(keys));
            "map"
        }
    };
    schema.insert("x-kubernetes-list-type".into(), json!(list_type));
    match known.patch_list() {
        PatchList::Replace => return,
        PatchList::MergeScalars => {}
        PatchList::MergeBy(key) => {
            schema.insert("x-kubernetes-patch-merge-key".into(), json!(key));
        }
    }
    schema.insert("x-kubernetes-patch-strategy".into(), json!("merge"));
}

/// Drops a name from what a schema requires: `k8s-openapi` has it so because its types do.
fn forget_required(schema: &mut Value, name: &str) {
    if let Some(Value::Array(required)) = schema.get_mut("required") {
        required.retain(|field| field != name);
        if required.is_empty() {
            schema
                .as_object_mut()
                .map(|object| object.remove("required"));
        }
    }
}

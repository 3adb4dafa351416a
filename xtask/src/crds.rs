//! The CustomResourceDefinitions, built from the types in `crates/api`.
//!
//! Kinds of the x-k8s.io groups are served in two versions with one schema, so that clients of either generation need no
//! conversion webhook.

use kube::CustomResourceExt;
use serde_json::{Value, json};

use crate::schema;

/// A CRD and the file it is written to, below `deploy/`.
pub struct Definition {
    pub file: String,
    pub crd: Value,
}

/// The kinds of the core and extension groups.
pub fn sandbox_kinds() -> Vec<Definition> {
    [
        api::Sandbox::crd(),
        api::SandboxClaim::crd(),
        api::SandboxTemplate::crd(),
        api::SandboxWarmPool::crd(),
    ]
    .iter()
    .map(|crd| {
        let mut crd = to_value(crd);
        serve_deprecated_version(&mut crd);
        Definition {
            file: format!(
                "crds/{}_{}.yaml",
                text(&crd, "/spec/group"),
                text(&crd, "/spec/names/plural")
            ),
            crd,
        }
    })
    .collect()
}

/// The kinds of the OpenKruise dialect, which are installed only where they are asked for.
pub fn kruise_kinds() -> Vec<Value> {
    [
        api::kruise::SandboxClaim::crd(),
        api::kruise::SandboxSet::crd(),
    ]
    .iter()
    .map(to_value)
    .collect()
}

fn to_value(crd: &impl serde::Serialize) -> Value {
    let mut crd = serde_json::to_value(crd).expect("a CRD is plain data");
    let schema = crd
        .pointer_mut("/spec/versions/0/schema/openAPIV3Schema")
        .expect("every kind has a schema");
    schema::finish(schema);
    let names = &mut crd["spec"]["names"];
    // kube writes the empty list; Kubernetes leaves it out.
    if names["categories"] == json!([]) {
        names
            .as_object_mut()
            .expect("names is an object")
            .remove("categories");
    }
    crd["spec"]["conversion"] = json!({"strategy": "None"});
    crd
}

/// Serves the older version beside the stored one, with the same schema and a warning.
fn serve_deprecated_version(crd: &mut Value) {
    let group = text(crd, "/spec/group");
    let kind = text(crd, "/spec/names/kind");
    let versions = crd["spec"]["versions"]
        .as_array_mut()
        .expect("versions is a list");
    let mut deprecated = versions[0].clone();
    deprecated["name"] = json!(api::DEPRECATED_VERSION);
    deprecated["storage"] = json!(false);
    deprecated["deprecated"] = json!(true);
    deprecated["deprecationWarning"] = json!(format!(
        "{group}/{} {kind} is deprecated; use {group}/{} {kind}",
        api::DEPRECATED_VERSION,
        api::STORAGE_VERSION
    ));
    versions.insert(0, deprecated);
}

fn text(value: &Value, pointer: &str) -> String {
    value
        .pointer(pointer)
        .and_then(Value::as_str)
        .unwrap_or_else(|| panic!("a CRD has {pointer}"))
        .to_owned()
}

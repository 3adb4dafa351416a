//! Turns the JSON schema that is derived from the Rust types into one that Kubernetes would have generated.
//!
//! What the derivation leaves out are facts of Kubernetes' own API: which lists merge by which keys, which objects are
//! replaced as a whole, which fields have defaults, what a quantity looks like. They are tables here. Descriptions of
//! Kubernetes' own types are dropped, so that a CRD stays small enough for client-side `kubectl apply`.

use serde_json::{Map, Value, json};

/// Lists of a pod's spec that merge by key. Every other list is replaced as a whole.
const MAP_LISTS: [(&str, &[&str]); 14] = [
    ("containers", &["name"]),
    ("initContainers", &["name"]),
    ("ephemeralContainers", &["name"]),
    ("env", &["name"]),
    ("volumes", &["name"]),
    ("imagePullSecrets", &["name"]),
    ("claims", &["name"]),
    ("resourceClaims", &["name"]),
    ("schedulingGates", &["name"]),
    ("ports", &["containerPort", "protocol"]),
    ("volumeMounts", &["mountPath"]),
    ("volumeDevices", &["devicePath"]),
    ("hostAliases", &["ip"]),
    (
        "topologySpreadConstraints",
        &["topologyKey", "whenUnsatisfiable"],
    ),
];

/// Lists of a pod's spec that merge by value, by the object they are in.
const SET_LISTS: [(&str, &str); 1] = [("exitCodes", "values")];

/// Objects and maps of Kubernetes' own types that are replaced as a whole. References to an object of the same namespace are, too: they
/// are known by the documentation of their name.
const ATOMIC_OBJECTS: [&str; 10] = [
    "labelSelector",
    "namespaceSelector",
    "podSelector",
    "selector",
    "nodeSelector",
    "fileKeyRef",
    "fieldRef",
    "resourceFieldRef",
    "preference",
    "dataSource",
];

/// An object of a node's affinity; a list, which has its own rules, of a pod's.
const NODE_SELECTOR: &str = "requiredDuringSchedulingIgnoredDuringExecution";

/// Lists whose items are replaced as a whole.
const ATOMIC_ITEMS: [&str; 1] = ["nodeSelectorTerms"];

/// Defaults of fields, by the object they are in.
fn field_defaults() -> [(&'static str, &'static str, Value); 10] {
    [
        ("azureDisk", "fsType", json!("ext4")),
        ("azureDisk", "readOnly", json!(false)),
        ("fileKeyRef", "optional", json!(false)),
        ("grpc", "service", json!("")),
        ("iscsi", "iscsiInterface", json!("default")),
        ("rbd", "keyring", json!("/etc/ceph/keyring")),
        ("rbd", "pool", json!("rbd")),
        ("rbd", "user", json!("admin")),
        ("scaleIO", "fsType", json!("xfs")),
        ("scaleIO", "storageMode", json!("ThinProvisioned")),
    ]
}

/// What the fields of a `metav1.Condition` may hold.
fn condition_bounds() -> [(&'static str, Value); 5] {
    [
        (
            "type",
            json!({
                "maxLength": 316,
                "pattern": r"^([a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*/)?(([A-Za-z0-9][-A-Za-z0-9_.]*)?[A-Za-z0-9])$",
            }),
        ),
        ("status", json!({"enum": ["True", "False", "Unknown"]})),
        (
            "reason",
            json!({
                "minLength": 1,
                "maxLength": 1024,
                "pattern": "^[A-Za-z]([A-Za-z0-9_,:]*[A-Za-z0-9_])?$",
            }),
        ),
        ("message", json!({"maxLength": 32768})),
        ("observedGeneration", json!({"minimum": 0})),
    ]
}

/// Fields, or maps of fields, that hold quantities.
const QUANTITIES: [&str; 6] = [
    "sizeLimit",
    "divisor",
    "limits",
    "requests",
    "overhead",
    "allocatedResources",
];

/// What a quantity looks like as a string.
const QUANTITY_PATTERN: &str = r"^(\+|-)?(([0-9]+(\.[0-9]*)?)|(\.[0-9]+))(([KMGTPE]i)|[numkMGTPE]|([eE](\+|-)?(([0-9]+(\.[0-9]*)?)|(\.[0-9]+))))?$";

/// The words by which Kubernetes documents a name that may be empty.
const NAME_MAY_BE_EMPTY: &str = "due to backwards compatibility is allowed to be empty";

/// Completes the schema of a kind.
pub fn finish(root: &mut Value) {
    let object = root.as_object_mut().expect("a kind's schema is an object");
    let properties = properties_of(object).expect("a kind has properties");
    properties.insert("apiVersion".into(), json!({"type": "string"}));
    properties.insert("kind".into(), json!({"type": "string"}));
    properties.insert("metadata".into(), json!({"type": "object"}));
    finish_schema(object, Origin::Ours);
}

/// Whose type a schema describes.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Origin {
    /// A type of `crates/api`, which says of itself what Kubernetes needs to know.
    Ours,
    /// A type of Kubernetes' API, to which the tables above apply.
    Kubernetes,
}

fn finish_schema(schema: &mut Map<String, Value>, origin: Origin) {
    drop_what_kubernetes_does_not_write(schema);
    say_integer_or_string(schema);
    bound_integers(schema);
    if origin == Origin::Kubernetes {
        describe_local_references(schema);
        schema.remove("description");
        default_the_protocol_of_ports(schema);
        merge_or_replace_lists(schema);
    }
    if let Some(Value::Object(items)) = schema.get_mut("items") {
        finish_schema(items, origin);
    }
    if let Some(Value::Object(values)) = schema.get_mut("additionalProperties") {
        finish_schema(values, origin);
    }
    let Some(properties) = properties_of(schema) else {
        return;
    };
    for (name, property) in properties {
        let Value::Object(property) = property else {
            continue;
        };
        let property_origin = if is_kubernetes_type(name, property) {
            Origin::Kubernetes
        } else {
            origin
        };
        let description = property.get("description").cloned();
        if property_origin == Origin::Kubernetes {
            describe_facts(name, property);
        }
        if name == "conditions" {
            bound_conditions(property);
        }
        if name == "observedGeneration" {
            property.insert("minimum".into(), json!(0));
        }
        finish_schema(property, property_origin);
        // The field is ours even where its type is not, so its description stays, on one line.
        if origin == Origin::Ours
            && let Some(description) = description.as_ref().and_then(Value::as_str)
        {
            property.insert("description".into(), json!(description.replace('\n', " ")));
        }
    }
}

/// Where our types give way to Kubernetes' own. Our objects called `spec` have a `podTemplate` or a reference; a pod's has
/// containers, a volume claim's has access modes.
fn is_kubernetes_type(name: &str, schema: &Map<String, Value>) -> bool {
    let has = |property: &str| {
        schema
            .get("properties")
            .is_some_and(|properties| properties.get(property).is_some())
    };
    match name {
        "spec" => has("containers") || has("accessModes"),
        "ingress" | "egress" => true,
        _ => false,
    }
}

fn drop_what_kubernetes_does_not_write(schema: &mut Map<String, Value>) {
    schema.remove("title");
    schema.remove("nullable");
    // The derivation writes Rust's own defaults; ours are never empty.
    if schema
        .get("default")
        .is_some_and(|default| *default == json!({}) || *default == json!(0))
    {
        schema.remove("default");
    }
    if let Some(Value::Array(values)) = schema.get_mut("enum") {
        values.retain(|value| !value.is_null());
    }
    for bound in ["minimum", "maximum"] {
        #[expect(
            clippy::cast_possible_truncation,
            reason = "our bounds are small whole numbers"
        )]
        if let Some(number) = schema.get(bound).and_then(Value::as_f64) {
            schema.insert(bound.into(), json!(number as i64));
        }
    }
    // An object without properties of its own, such as an embedded ObjectMeta, keeps what a user may choose.
    if let Some(properties) = properties_of(schema)
        && properties.contains_key("metadata")
        && properties["metadata"]
            .pointer("/properties/managedFields")
            .is_some()
    {
        let text_map = json!({"type": "object", "additionalProperties": {"type": "string"}});
        properties.insert(
            "metadata".into(),
            json!({"type": "object", "properties": {"labels": text_map, "annotations": text_map}}),
        );
    }
}

/// Gives a 32-bit integer the bounds of its type, so that no stored object holds a number that a typed client cannot read:
/// kube-apiserver does not look at `format: int32`.
///
/// An `int64` gets none. kube-apiserver reads bounds as floats, for which 2^63 - 1 is 2^63, turns that into -2^63 and refuses every
/// value; and it takes no number beyond an `int64` for an integer anyway.
fn bound_integers(schema: &mut Map<String, Value>) {
    let is_int32 = schema.get("type") == Some(&json!("integer"))
        && schema.get("format") == Some(&json!("int32"));
    // A quantity is no integer of Go's.
    let is_int_or_string = schema.get("x-kubernetes-int-or-string") == Some(&json!(true))
        && schema.get("pattern") != Some(&json!(QUANTITY_PATTERN));
    if is_int32 || is_int_or_string {
        for (bound, value) in [("minimum", i32::MIN), ("maximum", i32::MAX)] {
            schema.entry(bound).or_insert_with(|| json!(value));
        }
    }
}

/// Writes `anyOf` beside the extension that means the same, as controller-gen does for every `IntOrString` and quantity.
fn say_integer_or_string(schema: &mut Map<String, Value>) {
    if schema.get("x-kubernetes-int-or-string") == Some(&json!(true)) {
        schema.insert(
            "anyOf".into(),
            json!([{"type": "integer"}, {"type": "string"}]),
        );
    }
}

/// Facts that hang on a field's name: which objects are atomic, which fields have defaults, which values are quantities.
fn describe_facts(name: &str, schema: &mut Map<String, Value>) {
    let is_list = schema.get("type") == Some(&json!("array"));
    if !is_list && (ATOMIC_OBJECTS.contains(&name) || name == NODE_SELECTOR) {
        be_atomic(schema);
    }
    if ATOMIC_ITEMS.contains(&name)
        && let Some(Value::Object(items)) = schema.get_mut("items")
    {
        be_atomic(items);
    }
    if QUANTITIES.contains(&name) {
        let quantity = match schema.get_mut("additionalProperties") {
            Some(Value::Object(values)) => values,
            _ => &mut *schema,
        };
        if quantity.get("x-kubernetes-int-or-string") == Some(&json!(true)) {
            quantity.insert("pattern".into(), json!(QUANTITY_PATTERN));
        }
    }
    let Some(properties) = properties_of(schema) else {
        return;
    };
    for (object, field, default) in field_defaults() {
        if object == name
            && let Some(Value::Object(field)) = properties.get_mut(field)
        {
            field.insert("default".into(), default);
        }
    }
    for (object, list) in SET_LISTS {
        if object == name
            && let Some(Value::Object(list)) = properties.get_mut(list)
        {
            list.insert("x-kubernetes-list-type".into(), json!("set"));
        }
    }
}

fn be_atomic(schema: &mut Map<String, Value>) {
    schema.insert("x-kubernetes-map-type".into(), json!("atomic"));
}

/// Completes a reference to an object of the same namespace (`LocalObjectReference`, alone or embedded): it is replaced as a whole, and its
/// name, which Kubernetes lets be empty, has a default, so that it can also be a list's key.
fn describe_local_references(schema: &mut Map<String, Value>) {
    let Some(properties) = properties_of(schema) else {
        return;
    };
    let Some(Value::Object(name)) = properties.get_mut("name") else {
        return;
    };
    let may_be_empty = name
        .get("description")
        .and_then(Value::as_str)
        .is_some_and(|description| description.contains(NAME_MAY_BE_EMPTY));
    if may_be_empty {
        name.insert("default".into(), json!(""));
        not_required(schema, "name");
        be_atomic(schema);
    }
}

/// Gives the conditions of a status the bounds of their type.
fn bound_conditions(list: &mut Map<String, Value>) {
    let Some(Value::Object(condition)) = list.get_mut("items") else {
        return;
    };
    let Some(properties) = properties_of(condition) else {
        return;
    };
    for (field, bounds) in condition_bounds() {
        if let (Some(Value::Object(field)), Value::Object(bounds)) =
            (properties.get_mut(field), bounds)
        {
            field.extend(bounds);
        }
    }
}

fn default_the_protocol_of_ports(schema: &mut Map<String, Value>) {
    let Some(properties) = properties_of(schema) else {
        return;
    };
    if properties.contains_key("containerPort")
        && let Some(Value::Object(protocol)) = properties.get_mut("protocol")
    {
        protocol.insert("default".into(), json!("TCP"));
    }
}

fn merge_or_replace_lists(schema: &mut Map<String, Value>) {
    let Some(properties) = properties_of(schema) else {
        return;
    };
    for (name, property) in properties {
        let Value::Object(property) = property else {
            continue;
        };
        let is_list = property.get("type") == Some(&json!("array"));
        if !is_list || property.contains_key("x-kubernetes-list-type") {
            continue;
        }
        let keys = MAP_LISTS
            .iter()
            .find(|(list, _)| list == name)
            .map(|(_, keys)| *keys);
        match keys {
            Some(keys) if has_keys(property, keys) => {
                property.insert("x-kubernetes-list-type".into(), json!("map"));
                property.insert("x-kubernetes-list-map-keys".into(), json!(keys));
            }
            _ => {
                property.insert("x-kubernetes-list-type".into(), json!("atomic"));
            }
        }
    }
}

/// Whether a list's items have all these keys: `ports` of a network rule are not `ports` of a container.
fn has_keys(list: &Map<String, Value>, keys: &[&str]) -> bool {
    keys.iter()
        .all(|key| list["items"]["properties"].get(key).is_some())
}

fn not_required(schema: &mut Map<String, Value>, property: &str) {
    if let Some(Value::Array(required)) = schema.get_mut("required") {
        required.retain(|name| name != property);
        if required.is_empty() {
            schema.remove("required");
        }
    }
}

fn properties_of(schema: &mut Map<String, Value>) -> Option<&mut Map<String, Value>> {
    schema.get_mut("properties").and_then(Value::as_object_mut)
}

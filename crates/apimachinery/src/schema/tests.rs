#![expect(
    clippy::needless_pass_by_value,
    reason = "tests read better with json! literals as arguments"
)]

use serde_json::{Value, json};

use super::Schema;

const PATH: &str = "spec.versions[0].schema.openAPIV3Schema";

fn schema(spec: Value) -> Schema {
    let whole = json!({"type": "object", "properties": {"apiVersion": {"type": "string"}, "kind": {"type": "string"},
        "metadata": {"type": "object"}, "spec": spec}});
    Schema::compile(&whole, PATH).unwrap_or_else(|errors| panic!("{errors:?}"))
}

fn compile_errors(whole: &Value) -> Vec<String> {
    match Schema::compile(whole, PATH) {
        Ok(_) => Vec::new(),
        Err(errors) => errors
            .iter()
            .map(|e| e.to_string().replace(PATH, "$"))
            .collect(),
    }
}

fn problems(schema: &Schema, spec: Value) -> Vec<String> {
    let object =
        json!({"apiVersion": "g/v1", "kind": "K", "metadata": {"name": "x"}, "spec": spec});
    schema
        .validate(&object)
        .iter()
        .map(ToString::to_string)
        .collect()
}

#[test]
#[expect(clippy::too_many_lines, reason = "one table, row by row")]
fn validation_messages_are_those_of_kube_apiserver() {
    let schema = schema(json!({
        "type": "object",
        "required": ["name"],
        "properties": {
            "name": {"type": "string", "minLength": 2, "maxLength": 5, "pattern": "^[a-z]+$"},
            "replicas": {"type": "integer", "minimum": 0, "maximum": 1},
            "mode": {"type": "string", "enum": ["A", "B"]},
            "time": {"type": "string", "format": "date-time"},
            "port": {"x-kubernetes-int-or-string": true},
            "ratio": {"type": "number", "exclusiveMaximum": true, "maximum": 1.5},
            "list": {"type": "array", "maxItems": 2, "minItems": 1, "items": {"type": "string"}},
            "labels": {"type": "object", "maxProperties": 1, "additionalProperties": {"type": "string"}},
            "maybe": {"type": "string", "nullable": true},
            "even": {"type": "integer", "multipleOf": 2},
        }
    }));
    let with = |field: &str, value: Value| {
        let mut spec = json!({"name": "abc"});
        spec[field] = value;
        problems(&schema, spec)
    };
    let cases = [
        (
            "replicas",
            json!(2),
            "spec.replicas: Invalid value: 2: spec.replicas in body should be less than or equal to 1",
        ),
        (
            "replicas",
            json!(-1),
            "spec.replicas: Invalid value: -1: spec.replicas in body should be greater than or equal to 0",
        ),
        (
            "replicas",
            json!("x"),
            "spec.replicas: Invalid value: \"string\": spec.replicas in body must be of type integer: \"string\"",
        ),
        (
            "mode",
            json!("x"),
            "spec.mode: Unsupported value: \"x\": supported values: \"A\", \"B\"",
        ),
        (
            "time",
            json!("soon"),
            "spec.time: Invalid value: \"soon\": spec.time in body must be of type date-time: \"soon\"",
        ),
        (
            "port",
            json!(true),
            "spec.port: Invalid value: \"boolean\": spec.port in body must be of type integer,string: \"boolean\"",
        ),
        (
            "ratio",
            json!(1.5),
            "spec.ratio: Invalid value: 1.5: spec.ratio in body should be less than 1.5",
        ),
        (
            "list",
            json!([]),
            "spec.list: Invalid value: 0: spec.list in body should have at least 1 items",
        ),
        (
            "list",
            json!(["a", "b", "c"]),
            "spec.list: Too many: 3: must have at most 2 items",
        ),
        (
            "list",
            json!([1]),
            "spec.list[0]: Invalid value: \"integer\": spec.list[0] in body must be of type string: \"integer\"",
        ),
        (
            "labels",
            json!({"a": 1}),
            "spec.labels.a: Invalid value: \"integer\": spec.labels.a in body must be of type string: \"integer\"",
        ),
        (
            "name",
            json!("a"),
            "spec.name: Invalid value: \"a\": spec.name in body should be at least 2 chars long",
        ),
        (
            "name",
            json!("abcdef"),
            "spec.name: Too long: may not be more than 5 bytes",
        ),
        (
            "name",
            json!("AB"),
            "spec.name: Invalid value: \"AB\": spec.name in body should match '^[a-z]+$'",
        ),
        (
            "even",
            json!(3),
            "spec.even: Invalid value: 3: spec.even in body should be a multiple of 2",
        ),
    ];
    for (field, value, expected) in cases {
        assert_eq!(with(field, value), [expected]);
    }
    assert_eq!(problems(&schema, json!({})), ["spec.name: Required value"]);
    for (field, value) in [
        ("maybe", Value::Null),
        ("port", json!("http")),
        ("port", json!(80)),
        ("replicas", json!(1.0)),
    ] {
        assert_eq!(with(field, value), [""; 0]);
    }
}

#[test]
fn alternatives_are_reported_without_a_field_as_kubernetes_does() {
    let schema = schema(json!({
        "type": "object",
        "properties": {"a": {"type": "string"}, "b": {"type": "string"}},
        "oneOf": [{"required": ["a"]}, {"required": ["b"]}],
        "not": {"required": ["a", "b"]}
    }));
    assert_eq!(problems(&schema, json!({"a": "x"})), [""; 0]);
    assert_eq!(
        problems(&schema, json!({})),
        [
            "<nil>: Invalid value: \"\": \"spec\" must validate one and only one schema (oneOf). Found none valid",
            "spec.a: Required value"
        ]
    );
    assert_eq!(
        problems(&schema, json!({"a": "x", "b": "y"})),
        [
            "<nil>: Invalid value: \"\": \"spec\" must validate one and only one schema (oneOf). Found 2 valid alternatives",
            "<nil>: Invalid value: \"\": \"spec\" must not validate the schema (not)"
        ]
    );
}

#[test]
fn sets_and_maps_refuse_duplicates() {
    let schema = schema(json!({
        "type": "object",
        "properties": {
            "set": {"type": "array", "x-kubernetes-list-type": "set", "items": {"type": "string"}},
            "map": {"type": "array", "x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": ["name"],
                "items": {"type": "object", "required": ["name"], "properties": {"name": {"type": "string"}}}}
        }
    }));
    assert_eq!(
        problems(&schema, json!({"set": ["a", "b", "a", "a"]})),
        ["spec.set[2]: Duplicate value: \"a\""]
    );
    let duplicate = "spec.map[1]: Duplicate value: map[string]interface {}{\"name\":\"x\"}";
    assert_eq!(
        problems(&schema, json!({"map": [{"name": "x"}, {"name": "x"}]})),
        [duplicate]
    );
    assert_eq!(
        problems(
            &schema,
            json!({"map": [{"name": "x"}, {"name": "x"}, {"name": "y"}]})
        ),
        [duplicate]
    );
    assert_eq!(
        problems(&schema, json!({"map": [{"name": "x"}, {"name": "y"}]})),
        [""; 0]
    );
}

#[test]
fn defaults_apply_at_all_levels_and_replace_or_remove_nulls() {
    let schema = schema(json!({
        "type": "object",
        "default": {},
        "properties": {
            "mode": {"type": "string", "default": "A"},
            "nested": {"type": "object", "default": {"x": 1}, "properties": {"x": {"type": "integer"}, "y": {"type": "integer", "default": 2}}},
            "absent": {"type": "object", "properties": {"z": {"type": "integer", "default": 3}}},
            "maybe": {"type": "string", "nullable": true, "default": "d"},
            "plain": {"type": "string"},
            "list": {"type": "array", "items": {"type": "object", "properties": {"p": {"type": "string", "default": "TCP"}}}}
        }
    }));
    let mut object = json!({"metadata": {"name": null}});
    schema.default(&mut object);
    assert_eq!(
        object,
        json!({"metadata": {"name": null}, "spec": {"mode": "A", "nested": {"x": 1, "y": 2}, "maybe": "d"}})
    );
    let mut object = json!({"spec": {"mode": null, "maybe": null, "plain": null, "list": [{}, {"p": null}], "absent": {}}});
    schema.default(&mut object);
    assert_eq!(
        object,
        json!({"spec": {"mode": "A", "nested": {"x": 1, "y": 2}, "maybe": null, "list": [{"p": "TCP"}, {"p": "TCP"}],
            "absent": {"z": 3}}})
    );
}

#[test]
fn unknown_fields_are_pruned_and_named() {
    let schema = schema(json!({
        "type": "object",
        "properties": {
            "known": {"type": "string"},
            "free": {"type": "object", "x-kubernetes-preserve-unknown-fields": true,
                "properties": {"strict": {"type": "object", "properties": {"a": {"type": "string"}}}}},
            "list": {"type": "array", "items": {"type": "object", "properties": {"a": {"type": "string"}}}},
            "map": {"type": "object", "additionalProperties": {"type": "object", "properties": {"a": {"type": "string"}}}},
            "template": {"type": "object", "x-kubernetes-embedded-resource": true, "x-kubernetes-preserve-unknown-fields": true}
        }
    }));
    let mut object = json!({
        "apiVersion": "g/v1", "kind": "K", "metadata": {"anything": 1}, "extra": 1,
        "spec": {
            "known": "x", "unknown": {"deep": 1},
            "free": {"any": {"thing": 1}, "strict": {"a": "x", "b": 1}},
            "list": [{"a": "x"}, {"b": 1}],
            "map": {"k": {"a": "x", "c": 2}},
            "template": {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "p"}, "spec": {"x": 1}}
        }
    });
    let unknown = schema.prune_reporting(&mut object);
    assert_eq!(
        unknown,
        [
            "extra",
            "spec.free.strict.b",
            "spec.list[1].b",
            "spec.map.k.c",
            "spec.unknown"
        ]
    );
    assert_eq!(
        object,
        json!({
            "apiVersion": "g/v1", "kind": "K", "metadata": {"anything": 1},
            "spec": {
                "known": "x", "free": {"any": {"thing": 1}, "strict": {"a": "x"}}, "list": [{"a": "x"}, {}], "map": {"k": {"a": "x"}},
                "template": {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "p"}, "spec": {"x": 1}}
            }
        })
    );
}

#[test]
fn embedded_resources_name_their_kind() {
    let schema = schema(json!({
        "type": "object", "x-kubernetes-embedded-resource": true, "x-kubernetes-preserve-unknown-fields": true
    }));
    assert_eq!(
        problems(&schema, json!({"kind": ""})),
        [
            "spec.apiVersion: Required value: must not be empty",
            "spec.kind: Required value: must not be empty"
        ]
    );
}

#[test]
fn schemas_that_are_not_structural_are_refused_by_field() {
    let cases = [
        (
            json!({"properties": {}}),
            "$.type: Required value: must not be empty at the root",
        ),
        (
            json!({"type": "array", "items": {"type": "string"}}),
            "$.type: Invalid value: \"array\": must be object at the root",
        ),
        (
            json!({"type": "object", "properties": {"a": {}}}),
            "$.properties[a].type: Required value: must not be empty for specified object fields",
        ),
        (
            json!({"type": "object", "properties": {"a": {"type": "array"}}}),
            "$.properties[a].items: Required value: must be specified",
        ),
        (
            json!({"type": "object", "properties": {"a": {"type": "text"}}}),
            "$.properties[a].type: Unsupported value: \"text\": supported values: \"array\", \"boolean\", \"integer\", \"number\", \"object\", \"string\"",
        ),
        (
            json!({"type": "object", "anyOf": [{"type": "object"}]}),
            "$.anyOf[0].type: Forbidden: must be empty to be structural",
        ),
        (
            json!({"type": "object", "anyOf": [{"properties": {"a": {"minimum": 1}}}]}),
            "$.properties[a]: Required value: because it is defined in $.anyOf[0].properties[a]",
        ),
        (
            json!({"type": "object", "properties": {"a": {"type": "string", "pattern": "("}}}),
            "$.properties[a].pattern: Invalid value: \"(\": must be a valid regular expression",
        ),
        (
            json!({"type": "object", "properties": {"metadata": {"type": "object", "properties": {"labels": {"type": "object"}}}}}),
            "$.properties[metadata]: Forbidden: must not specify anything other than name and generateName, but metadata is implicitly specified",
        ),
        (
            json!({"type": "object", "properties": {"a": {"type": "integer", "default": "x"}}}),
            "$.properties[a].default: Invalid value: \"string\": ",
        ),
        (
            json!({"type": "object", "properties": {"a": {"type": "array", "x-kubernetes-list-type": "map", "items": {"type": "object"}}}}),
            "$.properties[a].x-kubernetes-list-map-keys: Required value: must not be empty if x-kubernetes-list-type is map",
        ),
        (
            json!({"type": "object", "$ref": "#/x"}),
            "$.$ref: Forbidden: $ref is not supported",
        ),
    ];
    for (schema, expected) in cases {
        let errors = compile_errors(&schema);
        assert_eq!(errors.len(), 1, "{errors:?}");
        assert!(
            errors[0].starts_with(expected),
            "{} should start with {expected}",
            errors[0]
        );
    }
    let int_or_string = json!({"type": "object", "properties": {"port": {"anyOf": [{"type": "integer"}, {"type": "string"}],
        "x-kubernetes-int-or-string": true}}});
    assert_eq!(compile_errors(&int_or_string), [""; 0]);
}

#[test]
fn validation_ratcheting_ignores_errors_in_unchanged_values() {
    let item = json!({"type": "object", "required": ["name"], "properties": {"name": {"type": "string"}, "size": {"type": "integer", "maximum": 5}},
        "x-kubernetes-validations": [{"rule": "self.size % 2 == 0", "message": "must be even"}]});
    let schema = schema(json!({
        "type": "object",
        "required": ["name"],
        "properties": {
            "name": {"type": "string", "maxLength": 3},
            "mode": {"type": "string", "x-kubernetes-validations": [{"rule": "self == 'A'"}, {"rule": "oldSelf != 'C'", "message": "is stuck"}]},
            "items": {"type": "array", "x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": ["name"], "items": item},
            "set": {"type": "array", "x-kubernetes-list-type": "set", "items": {"type": "string", "maxLength": 2}},
        }
    }));
    let whole = |spec: Value| json!({"apiVersion": "g/v1", "kind": "K", "metadata": {"name": "x"}, "spec": spec});
    let problems = |old: Value, new: Value| {
        let (old, new) = (whole(old), whole(new));
        let mut errors = schema.validate_update(&new, &old);
        errors.extend(schema.validate_rules(&new, Some(&old)));
        errors
            .into_iter()
            .map(|error| error.field)
            .collect::<Vec<_>>()
    };
    let old = json!({"name": "long", "mode": "B", "items": [{"name": "a", "size": 7}, {"name": "b", "size": 2}], "set": ["xyz"]});
    let with = |field: &str, value: Value| {
        let mut new = old.clone();
        new[field] = value;
        new
    };
    let none: [&str; 0] = [];
    assert_eq!(problems(old.clone(), old.clone()), none);
    assert_eq!(problems(old.clone(), with("extra", json!(1))), none);
    assert_eq!(
        problems(old.clone(), with("name", json!("longer"))),
        ["spec.name"]
    );
    assert_eq!(
        problems(old.clone(), with("mode", json!("D"))),
        ["spec.mode"]
    );
    // Items are matched by their key, at any position.
    let moved = json!([{"name": "b", "size": 4}, {"name": "a", "size": 7}]);
    assert_eq!(problems(old.clone(), with("items", moved)), none);
    let worse = json!([{"name": "a", "size": 9}, {"name": "b", "size": 2}]);
    assert_eq!(
        problems(old.clone(), with("items", worse)),
        ["spec.items[0].size", "spec.items[0]"]
    );
    // Items of a set have no old version.
    assert_eq!(
        problems(old.clone(), with("set", json!(["xyz", "a"]))),
        ["spec.set[0]"]
    );
    // Transition rules (those with oldSelf) always apply, and required fields stay required.
    assert_eq!(
        problems(
            json!({"name": "a", "mode": "C"}),
            json!({"name": "b", "mode": "C"})
        ),
        ["spec.mode"]
    );
    assert_eq!(
        problems(json!({"mode": "A"}), json!({"mode": "A", "extra": 1})),
        ["spec.name"]
    );
}

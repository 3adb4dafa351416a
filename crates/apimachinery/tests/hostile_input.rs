//! Property tests with hostile input: no panic, bounded work, and the guarantees that hold for every input.

use agent_sandbox_apimachinery::apply::{Writer, apply, track_update};
use agent_sandbox_apimachinery::jsonpath::JsonPath;
use agent_sandbox_apimachinery::patch::{json::JsonPatch, merge, strategic};
use agent_sandbox_apimachinery::quantity::Quantity;
use agent_sandbox_apimachinery::schema::Schema;
use agent_sandbox_apimachinery::selector::{FieldSelector, LabelSelector};
use agent_sandbox_apimachinery::table::Printer;
use agent_sandbox_apimachinery::types::TypeRef;
use agent_sandbox_apimachinery::{duration, names, strict, time};
use proptest::prelude::*;
use serde_json::{Map, Value, json};

/// Arbitrary JSON, sometimes with keys that have a meaning in one of the modules.
fn any_json() -> impl Strategy<Value = Value> {
    let key = prop_oneof![
        "[a-c]",
        Just("name".to_owned()),
        Just("metadata".to_owned()),
        Just("spec".to_owned()),
        Just("containers".to_owned()),
        Just("image".to_owned()),
        Just("labels".to_owned()),
        Just("finalizers".to_owned()),
        Just("managedFields".to_owned()),
        Just("$patch".to_owned()),
        Just("$retainKeys".to_owned()),
        Just("$setElementOrder/containers".to_owned()),
        Just("$deleteFromPrimitiveList/finalizers".to_owned()),
        Just("ports".to_owned()),
        Just("containerPort".to_owned()),
    ];
    let leaf = prop_oneof![
        Just(Value::Null),
        any::<bool>().prop_map(Value::from),
        any::<i64>().prop_map(Value::from),
        any::<f64>().prop_map(Value::from),
        "[a-c]{0,2}".prop_map(Value::from),
        Just(json!("delete")),
        Just(json!("replace")),
        Just(json!("merge")),
    ];
    leaf.prop_recursive(5, 40, 6, move |inner| {
        prop_oneof![
            prop::collection::vec(inner.clone(), 0..5).prop_map(Value::Array),
            prop::collection::btree_map(key.clone(), inner, 0..6)
                .prop_map(|members| Value::Object(members.into_iter().collect::<Map<_, _>>())),
        ]
    })
}

/// Arbitrary schemas, most of them invalid.
fn any_schema() -> impl Strategy<Value = Value> {
    let kind = prop::sample::select(vec![
        "object", "array", "string", "integer", "number", "boolean", "nonsense",
    ]);
    let leaf = kind.prop_map(|kind| json!({"type": kind}));
    leaf.prop_recursive(4, 32, 4, |inner| {
        (inner.clone(), inner, prop::sample::select(vec!["properties", "items", "additionalProperties", "anyOf", "not", "default", "all"]), any::<bool>(), any::<i64>())
            .prop_map(|(first, second, keyword, flag, number)| match keyword {
                "properties" => json!({"type": "object", "properties": {"a": first, "b": second}, "required": ["a"], "nullable": flag}),
                "items" => json!({"type": "array", "items": first, "maxItems": number, "x-kubernetes-list-type": if flag { "set" } else { "map" }, "x-kubernetes-list-map-keys": ["a"]}),
                "additionalProperties" => json!({"type": "object", "additionalProperties": first, "x-kubernetes-preserve-unknown-fields": flag}),
                "anyOf" => json!({"type": "object", "properties": {"a": first}, "anyOf": [second, {"required": ["a"]}]}),
                "not" => json!({"type": "object", "properties": {"a": first}, "not": second}),
                "default" => json!({"type": "object", "properties": {"a": first}, "default": second}),
                _ => json!({"type": "object", "properties": {"a": first}, "minProperties": number, "x-kubernetes-validations": [{"rule": "has(self.a)"}]}),
            })
    })
}

/// Text that resembles CEL.
fn cel_like() -> impl Strategy<Value = String> {
    let token = prop::sample::select(vec![
        "self",
        "oldSelf",
        ".",
        "a",
        "b",
        "(",
        ")",
        "[",
        "]",
        "{",
        "}",
        ",",
        "?",
        ":",
        "&&",
        "||",
        "!",
        "-",
        "+",
        "*",
        "/",
        "%",
        "==",
        "!=",
        "<",
        ">=",
        "in",
        "1",
        "2.5",
        "0u",
        "'s'",
        "\"t\"",
        "b'x'",
        "null",
        "true",
        "all",
        "exists",
        "map",
        "filter",
        "x",
        "size",
        "has",
        "matches",
        "'(a+)+$'",
        "quantity",
        "ip",
        "url",
        "format",
        "split",
        "join",
        "duration",
        "timestamp",
        "optional",
        ".?",
        "[?",
        "sortBy",
        "transformMap",
        "cel.bind",
        "\\",
        "'",
        "`",
        " ",
        "\n",
        "9223372036854775807",
        "replace",
        "substring",
        "findAll",
        "sum",
        "é",
    ]);
    prop::collection::vec(token, 0..24).prop_map(|tokens| tokens.concat())
}

fn pod_writer(manager: &str) -> Writer<'_> {
    Writer {
        manager,
        api_version: "v1",
        subresource: "",
        types: TypeRef::builtin("v1", "Pod").expect("Pod is a built-in kind"),
        ignored: &[],
        now: "2026-01-01T00:00:00Z".parse().expect("a time"),
    }
}

/// A pod with arbitrary content that is well-formed enough to be applied.
fn any_pod() -> impl Strategy<Value = Value> {
    let container = (
        "[a-d]",
        prop::option::of("[x-z]"),
        prop::option::of(any::<bool>()),
        prop::collection::vec("[a-c]", 0..3),
    )
        .prop_map(|(name, image, tty, args)| {
            let mut container = json!({"name": name});
            if let Some(image) = image {
                container["image"] = json!(image);
            }
            if let Some(tty) = tty {
                container["tty"] = json!(tty);
            }
            if !args.is_empty() {
                container["args"] = json!(args);
            }
            (name, container)
        });
    let labels = prop::collection::btree_map("[a-c]", "[x-z]", 0..3);
    let finalizers = prop::collection::btree_set("[a-c]", 0..3);
    (
        prop::collection::btree_map("[a-d]", container, 0..4),
        labels,
        finalizers,
        prop::option::of("[h-j]"),
    )
        .prop_map(|(containers, labels, finalizers, hostname)| {
            let mut seen = std::collections::BTreeMap::new();
            for (_, (name, container)) in containers {
                seen.insert(name, container);
            }
            let mut pod =
                json!({"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "p"}, "spec": {}});
            if !seen.is_empty() {
                pod["spec"]["containers"] = seen.into_values().collect();
            }
            if !labels.is_empty() {
                pod["metadata"]["labels"] = json!(labels);
            }
            if !finalizers.is_empty() {
                pod["metadata"]["finalizers"] = json!(finalizers);
            }
            if let Some(hostname) = hostname {
                pod["spec"]["hostname"] = json!(hostname);
            }
            pod
        })
}

/// Whether every field of `config` has the same value in `object`. List items are matched by name.
fn holds(config: &Value, object: &Value) -> bool {
    match (config, object) {
        (Value::Object(config), Value::Object(object)) => {
            config.iter().all(|(key, value)| match object.get(key) {
                Some(found) => holds(value, found),
                None => value.as_object().is_some_and(Map::is_empty),
            })
        }
        (Value::Array(config), Value::Array(object))
            if config.iter().all(|item| item.get("name").is_some()) =>
        {
            config.iter().all(|item| {
                object
                    .iter()
                    .any(|other| other["name"] == item["name"] && holds(item, other))
            })
        }
        (Value::Array(config), Value::Array(object)) => {
            config.iter().all(|item| object.contains(item))
        }
        (config, object) => config == object,
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(256))]

    #[test]
    fn text_parsers_never_panic(text in "\\PC{0,40}") {
        let _ = LabelSelector::parse(&text);
        let _ = FieldSelector::parse(&text);
        let _ = text.parse::<Quantity>();
        let _ = duration::parse(&text);
        let _ = time::parse(&text);
        let _ = names::qualified_name(&text);
        let _ = names::dns_1123_subdomain(&text);
        if let Ok(path) = JsonPath::parse(&text) {
            let _ = path.find(&json!({"a": [{"b": 1}]}));
        }
    }

    #[test]
    fn selectors_round_trip_through_their_string_form(text in "(!?[a-c]|[a-c](=|==|!=)[x-z]?|[a-c] (in|notin) \\([x-z](,[x-z]){0,2}\\)|[a-c][<>][0-9])(,[a-c](=|!=)[x-z]){0,2}") {
        let selector = LabelSelector::parse(&text).unwrap();
        let again = LabelSelector::parse(&selector.to_string()).unwrap();
        for labels in [json!({}), json!({"a": "x"}), json!({"a": "y", "b": "x"}), json!({"c": "5"})] {
            prop_assert_eq!(selector.matches(labels.as_object()), again.matches(labels.as_object()));
        }
    }

    #[test]
    fn quantities_round_trip_through_their_canonical_form(number in -999_999_i64..999_999, places in 0_u32..4, suffix in prop::sample::select(vec!["", "m", "k", "M", "Ki", "Mi", "Gi", "e3", "u"])) {
        let divisor = 10_i64.pow(places);
        let width = usize::try_from(places).unwrap();
        let sign = if number < 0 { "-" } else { "" };
        let text = if places == 0 { format!("{number}{suffix}") } else { format!("{sign}{}.{:0width$}{suffix}", number.abs() / divisor, number.abs() % divisor) };
        let quantity: Quantity = text.parse().unwrap();
        let canonical: Quantity = quantity.to_string().parse().unwrap();
        prop_assert_eq!(quantity, canonical);
        prop_assert_eq!(canonical.to_string(), quantity.to_string());
    }

    #[test]
    fn jsonpath_like_text_is_bounded(text in "[.\\[\\]*?()@$a-c'\"0-9:,=<>!\\\\{} -]{0,60}", object in any_json()) {
        if let Ok(path) = JsonPath::parse(&text) {
            let _ = path.find(&object);
        }
    }

    #[test]
    fn bodies_decode_as_serde_decodes_them(value in any_json()) {
        let decoded = strict::decode(value.to_string().as_bytes()).unwrap();
        prop_assert_eq!(decoded.value, serde_json::from_str::<Value>(&value.to_string()).unwrap());
        prop_assert!(decoded.duplicates.is_empty());
    }

    #[test]
    fn merge_patches_leave_no_null_and_are_idempotent(object in any_json(), patch in any_json()) {
        let mut once = object;
        merge::apply(&mut once, patch.clone());
        let mut twice = once.clone();
        merge::apply(&mut twice, patch);
        prop_assert_eq!(once, twice);
    }

    #[test]
    fn json_patches_never_panic(object in any_json(), operation in prop::sample::select(vec!["add", "remove", "replace", "move", "copy", "test", "x"]), path in "(/[a-c0-9~-]{0,3}){0,3}", from in "(/[a-c0-9]{0,2}){0,3}", value in any_json()) {
        let patch = json!([{"op": operation, "path": path, "from": from, "value": value}]);
        if let Ok(patch) = JsonPatch::from_value(patch) {
            let _ = patch.apply(&object);
        }
    }

    #[test]
    fn strategic_patches_never_panic(object in any_json(), patch in any_json()) {
        let types = TypeRef::builtin("v1", "Pod").unwrap();
        let _ = strategic::apply(&object, &patch, types);
    }

    #[test]
    fn a_strategic_patch_sets_all_its_fields(live in any_pod(), patch in any_pod()) {
        let types = TypeRef::builtin("v1", "Pod").unwrap();
        let result = strategic::apply(&live, &patch, types).unwrap();
        prop_assert!(holds(&patch, &result), "{patch} in {result}");
        prop_assert_eq!(strategic::apply(&result, &patch, types).unwrap(), result);
    }

    #[test]
    fn schemas_and_objects_never_panic(schema in any_schema(), object in any_json()) {
        let whole = json!({"type": "object", "properties": {"spec": schema}});
        if let Ok(schema) = Schema::compile(&whole, "schema") {
            let mut object = json!({"spec": object});
            schema.prune(&mut object);
            schema.default(&mut object);
            let _ = schema.validate(&object);
            let _ = schema.validate_rules(&object, None);
            let mut again = object.clone();
            schema.default(&mut again);
            prop_assert!(schema.prune_reporting(&mut again).is_empty());
            prop_assert_eq!(again, object);
        }
    }

    #[test]
    fn rules_never_panic_and_always_end(rule in cel_like(), object in any_json()) {
        let whole = json!({"type": "object", "properties": {"spec": {"type": "object", "x-kubernetes-preserve-unknown-fields": true, "x-kubernetes-validations": [{"rule": rule}]}}});
        if let Ok(schema) = Schema::compile(&whole, "schema") {
            let object = json!({"spec": {"a": object, "b": [1, "s", null]}});
            let _ = schema.validate_rules(&object, Some(&object));
        }
    }

    #[test]
    fn applying_and_tracking_never_panic(live in any_json(), config in any_json()) {
        let mut live = json!({"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "p", "managedFields": live.clone()}, "spec": live});
        let _ = apply(Some(&live), &json!({"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "p"}, "spec": config.clone()}), &pod_writer("a"), true);
        let before = live.clone();
        live["spec"] = config;
        track_update(Some(&before), &mut live, &pod_writer("b"));
    }

    #[test]
    fn apply_sets_all_fields_and_is_idempotent(live in any_pod(), first in any_pod(), second in any_pod()) {
        let mut live = live;
        track_update(None, &mut live, &pod_writer("creator"));
        let once = apply(Some(&live), &first, &pod_writer("a"), true).unwrap();
        prop_assert!(holds(&first, &once), "{first} in {once}");
        prop_assert_eq!(&apply(Some(&once), &first, &pod_writer("a"), false).unwrap(), &once);
        let both = apply(Some(&once), &second, &pod_writer("b"), true).unwrap();
        prop_assert!(holds(&second, &both), "{second} in {both}");
        // A manager that applies an empty configuration gives up all its fields.
        let empty = json!({"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "p"}});
        let given_up = apply(Some(&both), &empty, &pod_writer("b"), false).unwrap();
        let managers = given_up["metadata"]["managedFields"].as_array().cloned().unwrap_or_default();
        prop_assert!(managers.iter().all(|entry| entry["manager"] != "b"));
    }

    #[test]
    fn tables_of_anything_print(object in any_json(), resource in prop::sample::select(vec!["pods", "services", "nodes", "events", "endpoints", "persistentvolumes", "endpointslices", "networkpolicies", "rolebindings", "x"])) {
        let now = "2026-01-01T00:00:00Z".parse().unwrap();
        let printer = Printer::builtin(resource);
        let cells = printer.cells(&json!({"metadata": object.clone(), "spec": object.clone(), "status": object.clone(), "subsets": object.clone(), "endpoints": object}), now);
        prop_assert_eq!(cells.len(), printer.definitions().as_array().unwrap().len());
    }
}

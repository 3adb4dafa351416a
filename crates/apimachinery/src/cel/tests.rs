#![expect(
    clippy::needless_pass_by_value,
    reason = "tests read better with json! literals as arguments"
)]

use serde_json::{Value as Json, json};

use super::eval::{Budget, Error, Scope, eval};
use super::functions::print;
use super::parse::parse;
use super::value::Value;
use crate::schema::Schema;

/// Evaluates an expression with `self` and prints its value, or returns the error.
fn run(source: &str, object: &Json) -> Result<String, String> {
    let expr = parse(source).map_err(|error| error.located(source))?;
    let scope = Scope {
        parent: None,
        name: "self",
        value: Value::from_json(object, None),
    };
    let mut budget = Budget::new(1_000_000);
    eval(&expr, &scope, &mut budget)
        .map(|value| print(&value))
        .map_err(|error| error.to_string())
}

#[test]
#[expect(clippy::too_many_lines, reason = "one table, row by row")]
fn expressions_have_the_value_cel_gives_them() {
    let object = json!({"a": 1, "s": "hello", "l": [1, 2, 3], "m": {"x": "y"}, "names": ["b", "a"], "items": [{"n": "x", "v": 1}, {"n": "y", "v": 2}]});
    let cases = [
        ("1 + 2 * 3", "7"),
        ("-7 / 2", "-3"),
        ("-7 % 3", "-1"),
        ("7u + 1u", "8"),
        ("1.5 * 2.0", "3"),
        ("2 < 3 && 3 <= 3", "true"),
        ("'a' + \"b\"", "ab"),
        ("self.a == 1", "true"),
        ("1 == 1.0", "true"),
        ("self.l[1]", "2"),
        ("2 in self.l", "true"),
        ("'x' in self.m", "true"),
        ("self.m['x']", "y"),
        ("self.m.x", "y"),
        ("has(self.m.z)", "false"),
        ("has(self.a)", "true"),
        ("size(self.s)", "5"),
        ("self.s.size() == 5", "true"),
        ("self.s.startsWith('he')", "true"),
        ("self.s.matches('^h.*o$')", "true"),
        ("self.l.all(x, x > 0)", "true"),
        ("self.l.exists(x, x == 2)", "true"),
        ("self.l.exists_one(x, x > 2)", "true"),
        ("self.l.map(x, x * 2)", "[2, 4, 6]"),
        ("self.l.map(x, x > 1, x * 2)", "[4, 6]"),
        ("self.l.filter(x, x != 2)", "[1, 3]"),
        ("self.m.all(k, k == 'x')", "true"),
        ("self.l.all(i, v, v == i + 1)", "true"),
        ("self.m.transformMap(k, v, v + '!')", "{x: y!}"),
        ("self.a == 1 ? 'one' : 'other'", "one"),
        ("false && (1 / 0 == 1)", "false"),
        ("(1 / 0 == 1) && false", "false"),
        ("true || self.zzz", "true"),
        ("[1, 2] + [3]", "[1, 2, 3]"),
        ("{'a': 1}.a", "1"),
        ("type(1) == int", "true"),
        ("string(1) + string(true)", "1true"),
        ("int('42')", "42"),
        ("duration('1h') > duration('30m')", "true"),
        ("timestamp('2026-01-01T00:00:00Z').getFullYear()", "2026"),
        (
            "timestamp('2026-01-01T00:00:00Z') + duration('24h') == timestamp('2026-01-02T00:00:00Z')",
            "true",
        ),
        ("'a,b'.split(',')", "[a, b]"),
        ("['a', 'b'].join('-')", "a-b"),
        ("'hello'.substring(1, 3)", "el"),
        ("'Abc'.lowerAscii()", "abc"),
        ("'abc'.indexOf('c')", "2"),
        ("'abcabc'.lastIndexOf('b')", "4"),
        ("'a-b'.replace('-', '+')", "a+b"),
        ("' x '.trim()", "x"),
        ("'%s is %d'.format(['x', 2])", "x is 2"),
        ("'abc 123'.find('[0-9]+')", "123"),
        ("'1 2 3'.findAll('[0-9]', 2)", "[1, 2]"),
        ("[3, 1].isSorted()", "false"),
        ("[1, 2].sum()", "3"),
        ("[3, 1].min()", "1"),
        ("[1, 2, 2].lastIndexOf(2)", "2"),
        ("[1, 2, 2].distinct()", "[1, 2]"),
        ("self.items.sortBy(i, -i.v).map(i, i.n)", "[y, x]"),
        ("quantity('1Gi').isGreaterThan(quantity('1G'))", "true"),
        (
            "quantity('50k').add(20).sub(quantity('100k')).asInteger()",
            "-49980",
        ),
        ("isQuantity('1X')", "false"),
        ("quantity('1.5').asApproximateFloat()", "1.5"),
        ("ip('10.0.0.1').family()", "4"),
        ("isIP('::ffff:1.2.3.4')", "false"),
        ("cidr('10.0.0.0/8').containsIP('10.1.2.3')", "true"),
        ("cidr('10.0.0.0/8').containsCIDR('11.0.0.0/16')", "false"),
        ("ip.isCanonical('2001:DB8::1')", "false"),
        ("cidr('10.0.0.1/8').masked()", "10.0.0.0/8"),
        ("url('https://a.b:80/p?q=1&q=2').getHost()", "a.b:80"),
        ("url('https://[::1]:80/').getHostname()", "::1"),
        ("isURL('../x')", "false"),
        ("url('/p?k=a&k=b').getQuery()", "{k: [a, b]}"),
        ("sets.contains([1, 2, 3], [2])", "true"),
        ("sets.equivalent([1, 1, 2], [2, 1])", "true"),
        ("sets.intersects([1], [2])", "false"),
        ("math.greatest([1, 5, 3])", "5"),
        ("math.least(1, 2.5)", "1"),
        ("semver('1.2.3').isLessThan(semver('1.10.0'))", "true"),
        ("isSemver('v1.0')", "false"),
        ("semver('1.0.0-alpha').compareTo(semver('1.0.0'))", "-1"),
        ("format.dns1123Label().validate('Bad').hasValue()", "true"),
        ("format.named('uuid').hasValue()", "true"),
        ("self.?zzz.orValue('d')", "d"),
        ("self.?m.?x.orValue('d')", "y"),
        ("optional.of(1).optMap(x, x + 1).value()", "2"),
        ("self.l[?9].hasValue()", "false"),
        ("[1, ?optional.none()]", "[1]"),
        ("cel.bind(x, 2, x * x)", "4"),
        ("base64.encode(b'hello')", "aGVsbG8="),
        ("string(base64.decode('aGVsbG8='))", "hello"),
        ("r'\\d' + '\\u00e9'", "\\dé"),
        ("'''a\n'b'''", "a\n'b"),
        ("0x10", "16"),
        ("1e3", "1000"),
        ("-9223372036854775808", "-9223372036854775808"),
        ("!true", "false"),
        ("// why\n1", "1"),
    ];
    for (source, expected) in cases {
        assert_eq!(run(source, &object).as_deref(), Ok(expected), "{source}");
    }
}

#[test]
fn errors_have_the_messages_of_cel() {
    let object = json!({"l": [1], "m": {}});
    let cases = [
        ("self.zzz", "no such key: zzz"),
        ("self.l[5]", "index out of bounds: 5"),
        ("1 / 0", "division by zero"),
        ("1 % 0", "modulus by zero"),
        ("9223372036854775807 + 1", "integer overflow"),
        ("1 + 'a'", "no such overload"),
        ("'a' < 1", "no such overload"),
        (
            "quantity('x')",
            "quantities must match the regular expression '^([+-]?[0-9.]+)([eEinumkKMGTP]*[-+]?[0-9]*)$'",
        ),
        ("optional.none().value()", "optional.none() dereference"),
        ("1 +", "ERROR: <input>:1:4: Syntax error: unexpected <EOF>"),
        ("'abc", "ERROR: <input>:1:1: unterminated string"),
        ("a b", "ERROR: <input>:1:3: Syntax error: unexpected 'b'"),
    ];
    for (source, expected) in cases {
        assert_eq!(run(source, &object).unwrap_err(), expected, "{source}");
    }
    assert!(parse(&"(".repeat(10_000)).is_err());
    assert!(parse(&"-".repeat(10_000)).is_err());
    assert!(parse(&format!("1{}", "+1".repeat(10_000))).is_err());
    assert!(parse(&format!("a{}", ".b".repeat(10_000))).is_err());
}

#[test]
fn no_expression_outlasts_its_budget() {
    let items: Vec<Json> = (0..300).map(Json::from).collect();
    let object = json!({"l": items, "s": "x".repeat(10_000)});
    for source in [
        "self.l.all(a, self.l.all(b, self.l.all(c, a + b + c >= 0)))",
        "self.l.map(a, self.l.map(b, self.l.map(c, self.s + self.s)))",
        "self.l.all(a, self.l.all(b, !self.s.matches('(x+x+)+y')))",
        "cel.bind(a, self.l + self.l, cel.bind(b, a + a, cel.bind(c, b + b, c.all(x, c.all(y, !c.exists(z, z == -1))))))",
    ] {
        let expr = parse(source).unwrap();
        let scope = Scope {
            parent: None,
            name: "self",
            value: Value::from_json(&object, None),
        };
        let result = eval(&expr, &scope, &mut Budget::new(1_000_000));
        assert_eq!(result.unwrap_err(), Error::CostExceeded, "{source}");
    }
}

fn schema(spec: Json) -> Result<Schema, Vec<String>> {
    let whole =
        json!({"type": "object", "properties": {"metadata": {"type": "object"}, "spec": spec}});
    Schema::compile(&whole, "$").map_err(|errors| errors.iter().map(ToString::to_string).collect())
}

fn verdict(schema: &Schema, new: Json, old: Option<Json>) -> Vec<String> {
    let wrap = |spec: Json| json!({"metadata": {"name": "n"}, "spec": spec});
    let old = old.map(wrap);
    schema
        .validate_rules(&wrap(new), old.as_ref())
        .iter()
        .map(ToString::to_string)
        .collect()
}

#[test]
fn rules_report_as_kube_apiserver_does() {
    let schema = schema(json!({
        "type": "object",
        "properties": {
            "replicas": {"type": "integer", "x-kubernetes-validations": [{"rule": "self >= 0", "message": "must not be negative"}]},
            "max": {"type": "integer"},
            "name": {"type": "string", "x-kubernetes-validations": [{"rule": "self == oldSelf", "message": "is immutable", "reason": "FieldValueForbidden"}]},
            "a-b": {"type": "string"},
            "labels": {"type": "object", "additionalProperties": {"type": "string", "x-kubernetes-validations": [{"rule": "self != 'bad'"}]}}
        },
        "x-kubernetes-validations": [
            {"rule": "!has(self.max) || self.replicas <= self.max", "messageExpression": "'replicas ' + string(self.replicas) + ' exceed ' + string(self.max)", "fieldPath": ".replicas"},
            {"rule": "!has(self.a__dash__b) || self.a__dash__b.size() < 3", "message": "too long", "reason": "FieldValueRequired"}
        ]
    }))
    .unwrap();
    assert_eq!(
        verdict(&schema, json!({"replicas": 1, "max": 2}), None),
        [""; 0]
    );
    assert_eq!(
        verdict(&schema, json!({"replicas": -1}), None),
        ["spec.replicas: Invalid value: \"integer\": must not be negative"]
    );
    assert_eq!(
        verdict(&schema, json!({"replicas": 3, "max": 2}), None),
        ["spec.replicas: Invalid value: \"object\": replicas 3 exceed 2"]
    );
    assert_eq!(
        verdict(&schema, json!({"a-b": "abcd"}), None),
        ["spec: Required value: too long"]
    );
    assert_eq!(
        verdict(&schema, json!({"labels": {"k": "bad"}}), None),
        ["spec.labels[k]: Invalid value: \"string\": failed rule: self != 'bad'"]
    );
    assert_eq!(verdict(&schema, json!({"name": "x"}), None), [""; 0]);
    assert_eq!(
        verdict(&schema, json!({"name": "x"}), Some(json!({"name": "y"}))),
        ["spec.name: Forbidden: is immutable"]
    );
    assert_eq!(
        verdict(&schema, json!({"name": "x"}), Some(json!({}))),
        [""; 0]
    );
    assert_eq!(
        verdict(&schema, json!({"max": 1}), None),
        [
            "spec: Invalid value: \"object\": no such key: replicas evaluating rule: !has(self.max) || self.replicas <= self.max"
        ]
    );
}

#[test]
fn items_of_map_lists_are_compared_with_the_old_item_of_the_same_key() {
    let schema = schema(json!({
        "type": "object",
        "properties": {
            "list": {"type": "array", "x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": ["name"],
                "items": {"type": "object", "required": ["name"], "properties": {"name": {"type": "string"}, "size": {"type": "integer"}},
                    "x-kubernetes-validations": [{"rule": "self.size >= oldSelf.size", "message": "may only grow"}]}},
            "set": {"type": "array", "x-kubernetes-list-type": "set", "items": {"type": "string"},
                "x-kubernetes-validations": [{"rule": "self == oldSelf", "message": "is immutable"}]},
            "maybe": {"type": "string", "x-kubernetes-validations": [{"rule": "!oldSelf.hasValue() || oldSelf.value() == self", "optionalOldSelf": true, "message": "set once"}]}
        }
    }))
    .unwrap();
    let old = json!({"list": [{"name": "a", "size": 1}, {"name": "b", "size": 5}], "set": ["x", "y"], "maybe": "m"});
    let new = json!({"list": [{"name": "b", "size": 4}, {"name": "a", "size": 2}, {"name": "c", "size": 0}], "set": ["y", "x"], "maybe": "n"});
    assert_eq!(
        verdict(&schema, new, Some(old)),
        [
            "spec.list[0]: Invalid value: \"object\": may only grow",
            "spec.maybe: Invalid value: \"string\": set once"
        ]
    );
    assert_eq!(verdict(&schema, json!({"maybe": "n"}), None), [""; 0]);
}

#[test]
fn rules_that_do_not_compile_are_refused_with_the_schema() {
    let with = |rule: Json| {
        schema(json!({"type": "object", "properties": {"a": {"type": "string"}, "l": {"type": "array", "items": {"type": "object", "properties": {"x": {"type": "string"}}}}},
            "x-kubernetes-validations": [rule]}))
        .err()
        .unwrap_or_default()
    };
    let at = "$.properties[spec].x-kubernetes-validations[0]";
    let cases = [
        (
            json!({"rule": "self.a =="}),
            format!(
                "{at}.rule: Invalid value: \"self.a ==\": compilation failed: ERROR: <input>:1:10: Syntax error: unexpected <EOF>"
            ),
        ),
        (
            json!({"rule": "self.zzz == 'a'"}),
            format!(
                "{at}.rule: Invalid value: \"self.zzz == 'a'\": compilation failed: ERROR: <input>:1:5: undefined field 'zzz'"
            ),
        ),
        (
            json!({"rule": "self.l.all(i, i.y == '')"}),
            format!(
                "{at}.rule: Invalid value: \"self.l.all(i, i.y == '')\": compilation failed: ERROR: <input>:1:16: undefined field 'y'"
            ),
        ),
        (
            json!({"rule": "other == 1"}),
            format!(
                "{at}.rule: Invalid value: \"other == 1\": compilation failed: ERROR: <input>:1:1: undeclared reference to 'other' (in container '')"
            ),
        ),
        (
            json!({"rule": "self.a.frob()"}),
            format!(
                "{at}.rule: Invalid value: \"self.a.frob()\": compilation failed: ERROR: <input>:1:7: undeclared reference to 'frob' (in container '')"
            ),
        ),
        (
            json!({"rule": "true", "fieldPath": ".zzz"}),
            format!(
                "{at}.fieldPath: Invalid value: \".zzz\": fieldPath must be a valid path: does not refer to a valid field"
            ),
        ),
        (
            json!({"rule": "true", "reason": "Why"}),
            format!(
                "{at}.reason: Unsupported value: \"Why\": supported values: \"FieldValueForbidden\", \"FieldValueInvalid\", \"FieldValueRequired\", \"FieldValueDuplicate\""
            ),
        ),
        (
            json!({"rule": ""}),
            format!("{at}.rule: Required value: rule is not specified"),
        ),
    ];
    for (rule, expected) in cases {
        assert_eq!(with(rule), [expected]);
    }
    assert_eq!(
        with(json!({"rule": "self.l.all(i, has(i.x)) && size(self.a) > 0"})),
        [""; 0]
    );
}

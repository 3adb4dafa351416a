//! Decodes objects of built-in kinds like Go's JSON decoder, which refuses values that do not fit the Go type of their field.
//!
//! kube-apiserver decodes every body into Go structs, so no stored object holds an integer beyond `int32`, a string instead of a
//! number, or a malformed time. Typed clients rely on this: a single such object would make their whole list fail.

use std::fmt::Write;

use base64::{
    Engine,
    alphabet::STANDARD,
    engine::{DecodePaddingMode, GeneralPurpose, GeneralPurposeConfig},
};
use serde_json::Value;

use super::{
    Inner, TypeRef,
    builtin::{Scalar, Spec},
};
use crate::rfc3339::{self, Precision};

/// Standard base64 as Go decodes it: the unused bits of the last character may have any value.
const BASE64: GeneralPurpose = GeneralPurpose::new(
    &STANDARD,
    GeneralPurposeConfig::new()
        .with_decode_allow_trailing_bits(true)
        .with_decode_padding_mode(DecodePaddingMode::RequireCanonical),
);

const QUANTITY_FORM: &str =
    "quantities must match the regular expression '^([+-]?[0-9.]+)([eEinumkKMGTP]*[-+]?[0-9]*)$'";

/// A value that does not fit its Go type. The message is that of Go's decoder.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DecodeError {
    problem: Problem,
    /// The innermost struct around the value.
    owner: Option<&'static str>,
    /// The path of fields to the value, innermost first.
    fields: Vec<String>,
}

#[derive(Debug, Clone, PartialEq, Eq)]
enum Problem {
    /// The value has another JSON type, or is a number out of range.
    Type { found: String, wanted: String },
    /// The error message of the field's own decoder.
    Other(String),
}

impl std::fmt::Display for DecodeError {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Problem::Type { found, wanted } = &self.problem else {
            let Problem::Other(message) = &self.problem else {
                return Ok(());
            };
            return formatter.write_str(message);
        };
        write!(formatter, "json: cannot unmarshal {found} into Go ")?;
        match self.owner {
            Some(owner) => {
                write!(formatter, "struct field {owner}")?;
                for field in self.fields.iter().rev() {
                    formatter.write_char('.')?;
                    formatter.write_str(field)?;
                }
            }
            None => formatter.write_str("value")?,
        }
        write!(formatter, " of type {wanted}")
    }
}

impl std::error::Error for DecodeError {}

impl DecodeError {
    fn new(problem: Problem) -> Self {
        Self {
            problem,
            owner: None,
            fields: Vec::new(),
        }
    }
}

/// Checks an object against its Go types, and rewrites times and bytes in the form in which Go encodes them. Null means absent
/// and fits every type.
///
/// Unlike Go's decoder, this one accepts `1.0` for an integer, because a YAML body may contain it, and stores `1`.
pub fn decode(value: &mut Value, types: TypeRef<'_>) -> Result<(), DecodeError> {
    match value {
        Value::Null => Ok(()),
        Value::Object(members) => {
            let owner = types.definition().map(|definition| definition.name);
            if owner.is_none() && !types.takes_maps() {
                return mismatch("object", types);
            }
            for (name, member) in members {
                decode(member, types.member(name)).map_err(|mut error| {
                    if let Some(owner) = owner {
                        error.owner.get_or_insert(owner);
                        error.fields.push(name.clone());
                    }
                    error
                })?;
            }
            Ok(())
        }
        Value::Array(items) => {
            if !types.takes_lists() {
                return mismatch("array", types);
            }
            items
                .iter_mut()
                .try_for_each(|item| decode(item, types.item()))
        }
        _ => decode_scalar(value, types),
    }
}

fn mismatch(found: &str, types: TypeRef<'_>) -> Result<(), DecodeError> {
    let problem = match types.scalar() {
        Some(Scalar::Quantity) => Problem::Other(QUANTITY_FORM.to_owned()),
        _ => Problem::Type {
            found: found.to_owned(),
            wanted: go_type(types),
        },
    };
    Err(DecodeError::new(problem))
}

fn decode_scalar(value: &mut Value, types: TypeRef<'_>) -> Result<(), DecodeError> {
    let Some(scalar) = types.scalar() else {
        let is_known = types.definition().is_some()
            || matches!(types.0, Inner::Spec(Spec::Map { .. } | Spec::List { .. }));
        return if is_known {
            mismatch(json_type(value), types)
        } else {
            Ok(())
        };
    };
    match (scalar, &*value) {
        (Scalar::Int32 | Scalar::IntOrString, Value::Number(_)) => {
            integer(value, i64::from(i32::MIN)..=i64::from(i32::MAX), "int32")
        }
        (Scalar::Int64, Value::Number(_)) => integer(value, i64::MIN..=i64::MAX, "int64"),
        (Scalar::Time, Value::String(text)) => {
            time(text, Precision::Seconds).map(|text| *value = text)
        }
        (Scalar::MicroTime, Value::String(text)) => {
            time(text, Precision::Microseconds).map(|text| *value = text)
        }
        (Scalar::Bytes, Value::String(text)) => bytes(text).map(|text| {
            if let Some(text) = text {
                *value = text;
            }
        }),
        (Scalar::String | Scalar::Quantity | Scalar::IntOrString, Value::String(_))
        | (Scalar::Number | Scalar::Quantity, Value::Number(_))
        | (Scalar::Boolean, Value::Bool(_)) => Ok(()),
        _ => mismatch(json_type(value), types),
    }
}

fn json_type(value: &Value) -> &'static str {
    match value {
        Value::Null => "null",
        Value::Bool(_) => "bool",
        Value::Number(_) => "number",
        Value::String(_) => "string",
        Value::Array(_) => "array",
        Value::Object(_) => "object",
    }
}

fn integer(
    value: &mut Value,
    range: std::ops::RangeInclusive<i64>,
    wanted: &str,
) -> Result<(), DecodeError> {
    if let Some(whole) = crate::whole_number(value)
        && range.contains(&whole)
    {
        if !value.is_i64() {
            *value = Value::from(whole);
        }
        return Ok(());
    }
    let shown = match value.as_f64() {
        Some(float) if value.is_f64() && float.fract() == 0.0 && float.abs() < 1e21 => {
            format!("{float:.0}")
        }
        _ => value.to_string(),
    };
    Err(DecodeError::new(Problem::Type {
        found: format!("number {shown}"),
        wanted: wanted.to_owned(),
    }))
}

fn time(text: &str, precision: Precision) -> Result<Value, DecodeError> {
    rfc3339::canonical(text, precision)
        .map(Value::from)
        .map_err(|message| DecodeError::new(Problem::Other(message)))
}

/// The canonical form of a base64 text, if it differs from the text.
fn bytes(text: &str) -> Result<Option<Value>, DecodeError> {
    let is_broken = text.contains(['\r', '\n']);
    let plain = is_broken.then(|| text.replace(['\r', '\n'], ""));
    let written = plain.as_deref().unwrap_or(text);
    let decoded = BASE64.decode(written).map_err(|error| {
        let at = match error {
            base64::DecodeError::InvalidByte(at, _)
            | base64::DecodeError::InvalidLastSymbol(at, _) => at,
            base64::DecodeError::InvalidLength(_) | base64::DecodeError::InvalidPadding => {
                written.len() / 4 * 4
            }
        };
        DecodeError::new(Problem::Other(format!(
            "illegal base64 data at input byte {at}"
        )))
    })?;
    let canonical = BASE64.encode(decoded);
    Ok((canonical != text).then(|| Value::from(canonical)))
}

/// The name of a type in Go. Named string types are reported as `string`.
fn go_type(types: TypeRef<'_>) -> String {
    if let Some(definition) = types.definition() {
        return format!("v1.{}", definition.name);
    }
    match types.0 {
        Inner::Spec(Spec::Map { .. }) => format!("map[string]{}", go_type(types.member(""))),
        Inner::Spec(Spec::List { .. }) => format!("[]{}", go_type(types.item())),
        Inner::Spec(Spec::Scalar { kind, .. }) => match kind {
            Scalar::String | Scalar::Time | Scalar::MicroTime => "string",
            Scalar::Bytes => "[]uint8",
            Scalar::Int32 | Scalar::IntOrString => "int32",
            Scalar::Int64 => "int64",
            Scalar::Number => "float64",
            Scalar::Boolean => "bool",
            Scalar::Quantity => "resource.Quantity",
        }
        .to_owned(),
        _ => "interface {}".to_owned(),
    }
}

impl TypeRef<'_> {
    fn scalar(self) -> Option<Scalar> {
        match self.0 {
            Inner::Spec(Spec::Scalar { kind, .. }) => Some(*kind),
            _ => None,
        }
    }

    fn takes_maps(self) -> bool {
        !matches!(self.0, Inner::Spec(Spec::Scalar { .. } | Spec::List { .. }))
    }

    fn takes_lists(self) -> bool {
        let is_map = self.definition().is_some() || matches!(self.0, Inner::Spec(Spec::Map { .. }));
        !is_map && !matches!(self.0, Inner::Spec(Spec::Scalar { .. }))
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn error(api_version: &str, kind: &str, mut object: Value) -> String {
        let types = TypeRef::builtin(api_version, kind).unwrap();
        let decoded = decode(&mut object, types);
        decoded
            .err()
            .map_or_else(String::new, |error| error.to_string())
    }

    #[test]
    #[expect(clippy::too_many_lines, reason = "a table of cases")]
    fn a_value_that_does_not_fit_its_go_type_is_refused_with_gos_message() {
        let service = |seconds: Value| json!({"spec": {"sessionAffinityConfig": {"clientIP": {"timeoutSeconds": seconds}}}});
        let policy = |port: Value| json!({"spec": {"egress": [{"ports": [port]}]}});
        let pod = |container: Value| json!({"spec": {"containers": [container]}});
        let cases = [
            (
                error("v1", "Service", service(json!(3_000_000_000_u64))),
                "json: cannot unmarshal number 3000000000 into Go struct field ClientIPConfig.spec.sessionAffinityConfig.clientIP.timeoutSeconds of type int32",
            ),
            (
                error("v1", "Service", service(json!(-3_000_000_000_i64))),
                "json: cannot unmarshal number -3000000000 into Go struct field ClientIPConfig.spec.sessionAffinityConfig.clientIP.timeoutSeconds of type int32",
            ),
            (
                error(
                    "networking.k8s.io/v1",
                    "NetworkPolicy",
                    policy(json!({"endPort": 3_000_000_000_u64})),
                ),
                "json: cannot unmarshal number 3000000000 into Go struct field NetworkPolicyPort.spec.egress.ports.endPort of type int32",
            ),
            (
                error(
                    "networking.k8s.io/v1",
                    "NetworkPolicy",
                    policy(json!({"port": 3_000_000_000_u64})),
                ),
                "json: cannot unmarshal number 3000000000 into Go struct field NetworkPolicyPort.spec.egress.ports.port of type int32",
            ),
            (
                error(
                    "v1",
                    "Pod",
                    pod(json!({"livenessProbe": {"periodSeconds": 3_000_000_000_u64}})),
                ),
                "json: cannot unmarshal number 3000000000 into Go struct field Probe.spec.containers.livenessProbe.periodSeconds of type int32",
            ),
            (
                error(
                    "v1",
                    "Pod",
                    pod(json!({"livenessProbe": {"periodSeconds": 1.5}})),
                ),
                "json: cannot unmarshal number 1.5 into Go struct field Probe.spec.containers.livenessProbe.periodSeconds of type int32",
            ),
            (
                error(
                    "v1",
                    "Pod",
                    serde_json::from_str(
                        r#"{"spec": {"activeDeadlineSeconds": 99999999999999999999}}"#,
                    )
                    .unwrap(),
                ),
                "json: cannot unmarshal number 100000000000000000000 into Go struct field PodSpec.spec.activeDeadlineSeconds of type int64",
            ),
            (
                error(
                    "v1",
                    "Pod",
                    json!({"spec": {"activeDeadlineSeconds": 9_223_372_036_854_775_808_u64}}),
                ),
                "json: cannot unmarshal number 9223372036854775808 into Go struct field PodSpec.spec.activeDeadlineSeconds of type int64",
            ),
            (
                error(
                    "v1",
                    "Pod",
                    pod(json!({"ports": [{"containerPort": "eighty"}]})),
                ),
                "json: cannot unmarshal string into Go struct field ContainerPort.spec.containers.ports.containerPort of type int32",
            ),
            (
                error(
                    "v1",
                    "Pod",
                    pod(json!({"env": [{"name": "A", "value": 1}]})),
                ),
                "json: cannot unmarshal number into Go struct field EnvVar.spec.containers.env.value of type string",
            ),
            (
                error("v1", "Pod", json!({"spec": {"containers": {}}})),
                "json: cannot unmarshal object into Go struct field PodSpec.spec.containers of type []v1.Container",
            ),
            (
                error("v1", "Pod", json!({"metadata": {"labels": {"a": true}}})),
                "json: cannot unmarshal bool into Go struct field ObjectMeta.metadata.labels of type string",
            ),
            (
                error("v1", "Pod", json!({"metadata": {"finalizers": [1]}})),
                "json: cannot unmarshal number into Go struct field ObjectMeta.metadata.finalizers of type string",
            ),
            (
                error("v1", "Event", json!({"firstTimestamp": "soon"})),
                r#"parsing time "soon" as "2006-01-02T15:04:05Z07:00": cannot parse "soon" as "2006""#,
            ),
            (
                error("v1", "ConfigMap", json!({"binaryData": {"a": "%%%%"}})),
                "illegal base64 data at input byte 0",
            ),
        ];
        for (found, expected) in cases {
            assert_eq!(found, expected);
        }
    }

    #[test]
    fn accepted_values_are_rewritten_in_gos_encoding() {
        let mut pod = json!({"metadata": {"creationTimestamp": null}, "spec": {"activeDeadlineSeconds": 3.0, "containers": [
            {"name": "c", "livenessProbe": {"httpGet": {"port": 8080.0}, "terminationGracePeriodSeconds": i64::MAX}}]}});
        decode(&mut pod, TypeRef::builtin("v1", "Pod").unwrap()).unwrap();
        assert_eq!(
            pod,
            json!({"metadata": {"creationTimestamp": null}, "spec": {"activeDeadlineSeconds": 3, "containers": [
                {"name": "c", "livenessProbe": {"httpGet": {"port": 8080}, "terminationGracePeriodSeconds": i64::MAX}}]}})
        );
        let mut map = json!({"binaryData": {"a": "aGVs\nbG9=", "b": "aGVsbG8="}});
        decode(&mut map, TypeRef::builtin("v1", "ConfigMap").unwrap()).unwrap();
        assert_eq!(
            map,
            json!({"binaryData": {"a": "aGVsbG8=", "b": "aGVsbG8="}})
        );
        let mut lease = json!({"spec": {"renewTime": "2026-01-01T01:00:00.000001+01:00"}});
        decode(
            &mut lease,
            TypeRef::builtin("coordination.k8s.io/v1", "Lease").unwrap(),
        )
        .unwrap();
        assert_eq!(
            lease,
            json!({"spec": {"renewTime": "2026-01-01T00:00:00.000001Z"}})
        );
    }
}

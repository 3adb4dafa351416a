//! Decoder for Kubernetes' protobuf encoding, which Go clients send for built-in kinds. There is no encoder: responses are JSON.
//!
//! `messages.txt` holds the field numbers of Kubernetes' published messages: `# name`, then lines of `number field type`. `[]`
//! marks a list and `{}` a map with string keys. Lines with `=` name the message of a kind. A type that ends in `?` is a scalar
//! without a pointer whose Go field is tagged `omitempty`: Go writes its zero value to the wire but omits it from JSON, and so
//! does this decoder.

pub mod wire;

use std::{collections::HashMap, sync::LazyLock};

use apimachinery::{memory_budget::MemoryBudget, status::Status, strict};
use base64::{Engine, engine::general_purpose::STANDARD};
use jiff::{SignedDuration, civil::DateTime};
use serde_json::{Map, Value};

use self::wire::{Reader, WireField, WireValue};

const MAGIC: &[u8] = b"k8s\0";
/// Maximum nesting, deeper than any built-in kind.
const DEPTH: usize = 32;
const TOO_LARGE: &str = "the body holds too many values";

/// Structs whose fields JSON inlines into the parent.
const INLINE: &[&str] = &[
    "volumeSource",
    "persistentVolumeSource",
    "handler",
    "localObjectReference",
    "ephemeralContainerCommon",
];

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Shape {
    One,
    List,
    Map,
}

#[derive(Clone, Copy, Debug)]
struct Field {
    name: &'static str,
    kind: &'static str,
    shape: Shape,
    /// Whether JSON omits the zero value.
    omits_zero: bool,
}

#[derive(Debug, Default)]
struct Messages {
    kinds: HashMap<(&'static str, &'static str), &'static str>,
    fields: HashMap<&'static str, HashMap<u64, Field>>,
}

static MESSAGES: LazyLock<Messages> = LazyLock::new(|| parse(include_str!("messages.txt")));

fn parse(text: &'static str) -> Messages {
    let mut messages = Messages::default();
    let mut current = "";
    for line in text.lines() {
        match line.split(' ').collect::<Vec<_>>().as_slice() {
            ["=", version, kind, message] => {
                messages.kinds.insert((version, kind), message);
            }
            ["#", message] => {
                current = message;
                messages.fields.entry(current).or_default();
            }
            [number, name, kind] => {
                let (shape, kind) = match (kind.strip_prefix("[]"), kind.strip_prefix("{}")) {
                    (Some(kind), _) => (Shape::List, kind),
                    (_, Some(kind)) => (Shape::Map, kind),
                    _ => (Shape::One, *kind),
                };
                let omits_zero = kind.ends_with('?');
                let field = Field {
                    name,
                    kind: kind.trim_end_matches('?'),
                    shape,
                    omits_zero,
                };
                if let Ok(number) = number.parse() {
                    let fields = messages.fields.entry(current).or_default();
                    fields.insert(number, field);
                }
            }
            _ => {}
        }
    }
    messages
}

fn malformed(detail: &str) -> Status {
    Status::bad_request(format!(
        "the object provided is unrecognized (must be of type Protobuf): {detail}"
    ))
}

/// Decodes an object in its envelope.
pub fn decode(bytes: &[u8]) -> Result<Value, Status> {
    let envelope = bytes
        .strip_prefix(MAGIC)
        .ok_or_else(|| malformed("the envelope is missing"))?;
    let (mut version, mut kind, mut raw) = (String::new(), String::new(), &[][..]);
    for part in Reader::new(envelope) {
        let WireField { number, scalar } = part.map_err(malformed)?;
        match (number, scalar) {
            (1, WireValue::Bytes(identity)) => {
                for part in Reader::new(identity) {
                    let part = part.map_err(malformed)?;
                    match (part.number, part.scalar) {
                        (1, WireValue::Bytes(text)) => {
                            version = String::from_utf8_lossy(text).into_owned();
                        }
                        (2, WireValue::Bytes(text)) => {
                            kind = String::from_utf8_lossy(text).into_owned();
                        }
                        _ => {}
                    }
                }
            }
            (2, WireValue::Bytes(content)) => raw = content,
            (3, WireValue::Bytes(encoding)) if !encoding.is_empty() => {
                return Err(malformed("the content is encoded"));
            }
            _ => {}
        }
    }
    let message = MESSAGES
        .kinds
        .get(&(version.as_str(), kind.as_str()))
        .ok_or_else(|| malformed(&format!("no kind \"{kind}\" is registered for version \"{version}\" in this encoding: send JSON")))?;
    let mut object = Map::new();
    object.insert("apiVersion".into(), Value::from(version.as_str()));
    object.insert("kind".into(), Value::from(kind.as_str()));
    let mut budget = MemoryBudget::default();
    object.extend(message_fields(message, raw, 0, &mut budget).map_err(malformed)?);
    Ok(Value::Object(object))
}

fn message_fields(
    message: &str,
    bytes: &[u8],
    depth: usize,
    budget: &mut MemoryBudget,
) -> Result<Map<String, Value>, &'static str> {
    if depth > DEPTH {
        return Err("the object is nested too deeply");
    }
    let fields = MESSAGES.fields.get(message).ok_or("a message is unknown")?;
    let mut object = Map::new();
    for part in Reader::new(bytes) {
        let WireField { number, scalar } = part?;
        let Some(field) = fields.get(&number) else {
            continue;
        };
        budget
            .member(object.len(), field.name.len())
            .map_err(|_| TOO_LARGE)?;
        match field.shape {
            Shape::One => {
                let value = single(field.kind, scalar, depth, budget)?;
                if INLINE.contains(&field.name)
                    && let Value::Object(inner) = value
                {
                    object.extend(inner);
                } else if !(value.is_null() || field.omits_zero && is_zero(&value)) {
                    object.insert(field.name.to_owned(), value);
                }
            }
            Shape::List => {
                let value = single(field.kind, scalar, depth, budget)?;
                if let Value::Array(list) = object
                    .entry(field.name)
                    .or_insert_with(|| Value::Array(Vec::new()))
                {
                    list.push(value);
                }
            }
            Shape::Map => {
                let (key, value) = map_entry(field.kind, scalar, depth, budget)?;
                if let Value::Object(map) = object
                    .entry(field.name)
                    .or_insert_with(|| Value::Object(Map::new()))
                {
                    map.insert(key, value);
                }
            }
        }
    }
    Ok(object)
}

fn is_zero(value: &Value) -> bool {
    match value {
        Value::Bool(value) => !value,
        Value::Number(number) => number.as_f64() == Some(0.0),
        Value::String(text) => text.is_empty(),
        _ => false,
    }
}

fn map_entry(
    kind: &'static str,
    scalar: WireValue<'_>,
    depth: usize,
    budget: &mut MemoryBudget,
) -> Result<(String, Value), &'static str> {
    let WireValue::Bytes(entry) = scalar else {
        return Err("a map entry is not a message");
    };
    let (mut key, mut value) = (String::new(), None);
    for part in Reader::new(entry) {
        let part = part?;
        match (part.number, part.scalar) {
            (1, WireValue::Bytes(text)) => key = String::from_utf8_lossy(text).into_owned(),
            (2, scalar) => value = Some(single(kind, scalar, depth, budget)?),
            _ => {}
        }
    }
    let empty = || {
        if kind == "string" || kind == "bytes" {
            Value::from("")
        } else {
            Value::Null
        }
    };
    Ok((key, value.unwrap_or_else(empty)))
}

fn single(
    kind: &'static str,
    scalar: WireValue<'_>,
    depth: usize,
    budget: &mut MemoryBudget,
) -> Result<Value, &'static str> {
    let text_bytes = match scalar {
        WireValue::Bytes(bytes) if matches!(kind, "string" | "bytes") => bytes.len(),
        _ => 0,
    };
    budget.value(text_bytes).map_err(|_| TOO_LARGE)?;
    Ok(match (kind, scalar) {
        ("string", WireValue::Bytes(bytes)) => {
            Value::from(std::str::from_utf8(bytes).map_err(|_| "a string is not UTF-8")?)
        }
        ("bytes", WireValue::Bytes(bytes)) => Value::from(STANDARD.encode(bytes)),
        ("bool", WireValue::Number(number)) => Value::from(number != 0),
        ("int32", WireValue::Number(number)) => Value::from(int32(number)),
        ("int64", WireValue::Number(number)) => Value::from(number.cast_signed()),
        ("uint32" | "uint64", WireValue::Number(number)) => Value::from(number),
        ("double", WireValue::Fixed(bits)) => Value::from(f64::from_bits(bits)),
        ("time", WireValue::Bytes(bytes)) => time(bytes, "%Y-%m-%dT%H:%M:%SZ")?,
        ("microtime", WireValue::Bytes(bytes)) => time(bytes, "%Y-%m-%dT%H:%M:%S.%6fZ")?,
        ("quantity", WireValue::Bytes(bytes)) => {
            wire::first_text(bytes)?.map_or_else(|| Value::from("0"), Value::from)
        }
        ("raw", WireValue::Bytes(bytes)) => wire::first_bytes(bytes)?
            .and_then(|raw| strict::decode_within(raw, budget).ok())
            .map(|decoded| decoded.value)
            .unwrap_or_default(),
        ("intorstring", WireValue::Bytes(bytes)) => int_or_string(bytes)?,
        (message, WireValue::Bytes(bytes)) if message.ends_with(".ExtraValue") => {
            let mut fields = message_fields(message, bytes, depth + 1, budget)?;
            fields
                .remove("items")
                .unwrap_or_else(|| Value::Array(Vec::new()))
        }
        (message, WireValue::Bytes(bytes)) => {
            Value::Object(message_fields(message, bytes, depth + 1, budget)?)
        }
        _ => return Err("the type of a field does not match its message"),
    })
}

/// The low 32 bits: Go's generated decoders truncate longer numbers in the same way.
#[expect(clippy::cast_possible_truncation, reason = "truncation is intended")]
fn int32(number: u64) -> i32 {
    (number as u32).cast_signed()
}

/// Formats a time in seconds and nanoseconds since 1970. An empty message means no time. A [`jiff::Timestamp`] cannot represent
/// the last hours of the year 9999.
fn time(bytes: &[u8], format: &str) -> Result<Value, &'static str> {
    const EPOCH: DateTime = jiff::civil::date(1970, 1, 1).at(0, 0, 0, 0);
    let (mut seconds, mut nanoseconds) = (0, 0);
    for part in Reader::new(bytes) {
        let part = part?;
        match (part.number, part.scalar) {
            (1, WireValue::Number(number)) => seconds = number.cast_signed(),
            (2, WireValue::Number(number)) => {
                nanoseconds =
                    i32::try_from(number.cast_signed()).map_err(|_| "a time is out of range")?;
            }
            _ => {}
        }
    }
    if (seconds, nanoseconds) == (0, 0) {
        return Ok(Value::Null);
    }
    let time = EPOCH.checked_add(SignedDuration::new(seconds, nanoseconds));
    let time = time.map_err(|_| "a time is out of range")?;
    Ok(Value::from(time.strftime(format).to_string()))
}

fn int_or_string(bytes: &[u8]) -> Result<Value, &'static str> {
    let (mut is_text, mut number, mut text) = (false, 0, String::new());
    for part in Reader::new(bytes) {
        let part = part?;
        match (part.number, part.scalar) {
            (1, WireValue::Number(kind)) => is_text = kind == 1,
            (2, WireValue::Number(value)) => number = int32(value),
            (3, WireValue::Bytes(value)) => text = String::from_utf8_lossy(value).into_owned(),
            _ => {}
        }
    }
    Ok(if is_text {
        Value::from(text)
    } else {
        Value::from(number)
    })
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use serde_json::json;

    use super::*;

    fn field(number: u8, content: &[u8]) -> Vec<u8> {
        let length = u8::try_from(content.len()).unwrap();
        [&[number << 3 | 2, length], content].concat()
    }

    fn enveloped(version: &str, kind: &str, raw: &[u8]) -> Vec<u8> {
        let identity = [field(1, version.as_bytes()), field(2, kind.as_bytes())].concat();
        [
            MAGIC,
            &field(1, &identity),
            &field(2, raw),
            &field(3, b""),
            &field(4, b""),
        ]
        .concat()
    }

    #[test]
    fn a_config_map_decodes_to_its_json() {
        let entry = [field(1, b"key"), field(2, b"value")].concat();
        let metadata = [
            field(1, b"name"),
            field(2, b""),
            field(11, &entry),
            field(8, b""),
        ]
        .concat();
        let raw = [field(1, &metadata), field(2, &entry)].concat();
        let expected = json!({"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "name", "labels": {"key": "value"}}, "data": {"key": "value"}});
        assert_eq!(
            decode(&enveloped("v1", "ConfigMap", &raw)).unwrap(),
            expected
        );
    }

    #[test]
    fn inline_structs_quantities_and_ports_decode_to_their_json() {
        let quantity = field(1, b"1Gi");
        let claim = field(1, b"data");
        let volume = [field(1, b"v"), field(2, &field(10, &claim))].concat();
        let limits = [field(1, b"memory"), field(2, &quantity)].concat();
        let resources = field(1, &limits);
        let probe_port = [&[0x08, 0x01][..], &field(3, b"http")].concat();
        let probe = field(
            1,
            &field(2, &[field(1, b"/"), field(2, &probe_port)].concat()),
        );
        let container = [field(1, b"c"), field(8, &resources), field(10, &probe)].concat();
        let spec = [field(1, &volume), field(2, &container)].concat();
        let pod = decode(&enveloped("v1", "Pod", &field(2, &spec))).unwrap();
        assert_eq!(
            pod["spec"]["volumes"][0],
            json!({"name": "v", "persistentVolumeClaim": {"claimName": "data"}})
        );
        assert_eq!(
            pod["spec"]["containers"][0]["resources"]["limits"]["memory"],
            "1Gi"
        );
        assert_eq!(
            pod["spec"]["containers"][0]["livenessProbe"]["httpGet"],
            json!({"path": "/", "port": "http"})
        );
    }

    fn without_nulls(value: Value) -> Value {
        match value {
            Value::Object(fields) => fields
                .into_iter()
                .filter(|(_, value)| !value.is_null())
                .map(|(name, value)| (name, without_nulls(value)))
                .collect(),
            Value::Array(items) => items.into_iter().map(without_nulls).collect(),
            value => value,
        }
    }

    /// `written_by_go.txt` has two objects of every kind as Go's own codecs encode them, in both encodings: one with every
    /// pointer set to a zero value, one with every field set.
    #[test]
    fn every_kind_decodes_to_the_json_of_gos_codecs() {
        let mut kinds = std::collections::HashSet::new();
        for line in include_str!("written_by_go.txt").lines() {
            let mut parts = line.splitn(4, ' ');
            let mut next = || parts.next().unwrap();
            let (version, kind, encoded, json) = (next(), next(), next(), next());
            let mut expected = without_nulls(serde_json::from_str(json).unwrap());
            expected["apiVersion"] = version.into();
            expected["kind"] = kind.into();
            let decoded = decode(&STANDARD.decode(encoded).unwrap()).unwrap();
            assert_eq!(decoded, expected, "{version} {kind}");
            kinds.insert((version, kind));
        }
        for kind in MESSAGES
            .kinds
            .keys()
            .filter(|(_, kind)| *kind != "DeleteOptions")
        {
            assert!(kinds.contains(kind), "{kind:?} is not compared");
        }
    }

    #[test]
    fn integers_are_truncated_and_times_formatted_as_in_go() {
        // 3,000,000,000 as a varint: an int32 keeps its low 32 bits.
        let number = [0x80, 0xbc, 0xc1, 0x96, 0x0b];
        let probe = [&[0x20][..], &number].concat();
        let container = [field(1, b"c"), field(10, &probe)].concat();
        let pod = decode(&enveloped("v1", "Pod", &field(2, &field(2, &container)))).unwrap();
        let probe = &pod["spec"]["containers"][0]["livenessProbe"];
        assert_eq!(*probe, json!({"periodSeconds": -1_294_967_296}));
        // 9999-12-31T23:59:59Z.
        let seconds = [&[0x08][..], &[0xff, 0x82, 0xd1, 0xff, 0xaf, 0x07]].concat();
        let event = decode(&enveloped("v1", "Event", &field(6, &seconds))).unwrap();
        assert_eq!(event["firstTimestamp"], "9999-12-31T23:59:59Z", "{event}");
    }

    #[test]
    fn the_error_for_an_unknown_kind_says_to_send_json() {
        let refused = decode(&enveloped("example.com/v1", "Gadget", b"")).unwrap_err();
        assert!(
            refused.code == 400 && refused.message.contains("send JSON"),
            "{}",
            refused.message
        );
    }

    proptest! {
        #[test]
        fn hostile_bytes_are_refused_without_a_panic(bytes in proptest::collection::vec(any::<u8>(), 0..400)) {
            let _ = decode(&bytes);
            let _ = decode(&[MAGIC, &bytes].concat());
            for (version, kind) in MESSAGES.kinds.keys() {
                let mut envelope = enveloped(version, kind, b"");
                envelope.truncate(envelope.len() - 6);
                envelope.push(0x12);
                envelope.extend([u8::try_from(bytes.len() % 128).unwrap() | 0x80, u8::try_from(bytes.len() / 128).unwrap()]);
                envelope.extend(&bytes);
                let _ = decode(&envelope);
            }
        }
    }
}

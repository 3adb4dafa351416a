//! The functions of CEL and of the Kubernetes CEL libraries.

mod collections;
mod kubernetes;
mod strings;
mod times;

use regex::Regex;

pub(super) use kubernetes::{NamedFormat, Semver, Url};

use super::eval::{Budget, Error, Result};
use super::value::Value;

/// The functions that are called globally (`f()`). Some are also methods, below.
const GLOBAL: &[&str] = &[
    "size",
    "string",
    "int",
    "uint",
    "double",
    "bool",
    "bytes",
    "type",
    "dyn",
    "timestamp",
    "duration",
    "matches",
    "quantity",
    "isQuantity",
    "ip",
    "isIP",
    "ip.isCanonical",
    "cidr",
    "isCIDR",
    "url",
    "isURL",
    "semver",
    "isSemver",
    "optional.of",
    "optional.none",
    "optional.ofNonZeroValue",
    "sets.contains",
    "sets.equivalent",
    "sets.intersects",
    "math.greatest",
    "math.least",
    "math.abs",
    "math.ceil",
    "math.floor",
    "math.round",
    "math.sign",
    "math.trunc",
    "math.isNaN",
    "math.isInf",
    "math.isFinite",
    "base64.encode",
    "base64.decode",
    "strings.quote",
    "format.named",
    "format.dns1123Label",
    "format.dns1123Subdomain",
    "format.dns1035Label",
    "format.qualifiedName",
    "format.dns1123LabelPrefix",
    "format.dns1123SubdomainPrefix",
    "format.dns1035LabelPrefix",
    "format.labelValue",
    "format.uri",
    "format.uuid",
    "format.byte",
    "format.date",
    "format.datetime",
];
const METHODS: &[&str] = &[
    "size",
    "contains",
    "startsWith",
    "endsWith",
    "matches",
    "charAt",
    "indexOf",
    "lastIndexOf",
    "lowerAscii",
    "upperAscii",
    "replace",
    "split",
    "join",
    "substring",
    "trim",
    "reverse",
    "format",
    "find",
    "findAll",
    "isSorted",
    "sum",
    "min",
    "max",
    "flatten",
    "slice",
    "distinct",
    "sort",
    "first",
    "last",
    "hasValue",
    "value",
    "orValue",
    "or",
    "getFullYear",
    "getMonth",
    "getDate",
    "getDayOfMonth",
    "getDayOfWeek",
    "getDayOfYear",
    "getHours",
    "getMinutes",
    "getSeconds",
    "getMilliseconds",
    "isInteger",
    "asInteger",
    "asApproximateFloat",
    "sign",
    "add",
    "sub",
    "isLessThan",
    "isGreaterThan",
    "compareTo",
    "family",
    "isUnspecified",
    "isLoopback",
    "isLinkLocalMulticast",
    "isLinkLocalUnicast",
    "isGlobalUnicast",
    "containsIP",
    "containsCIDR",
    "ip",
    "masked",
    "prefixLength",
    "getScheme",
    "getHost",
    "getHostname",
    "getPort",
    "getEscapedPath",
    "getQuery",
    "major",
    "minor",
    "patch",
    "validate",
];

pub(super) fn is_known(name: &str, has_target: bool) -> bool {
    if has_target {
        METHODS.contains(&name)
    } else {
        GLOBAL.contains(&name)
    }
}

pub(super) fn call<'a>(
    name: &str,
    target: Option<Value<'a>>,
    mut arguments: Vec<Value<'a>>,
    regex: Option<&Regex>,
    budget: &mut Budget,
) -> Result<Value<'a>> {
    let Some(target) = target else {
        return global(name, arguments, regex, budget);
    };
    match (&target, name) {
        (Value::Optional(inner), _) => optional(inner.as_deref(), name, arguments),
        (_, "size") => collections::size(&target, budget),
        (Value::String(_), _) => strings::method(&target, name, &arguments, regex, budget),
        (Value::List(list), _) => collections::method(list, name, &arguments, budget),
        (Value::Timestamp(_) | Value::Duration(_), _) => times::method(&target, name, &arguments),
        (Value::Format(format), "validate") => match arguments.pop() {
            Some(Value::String(text)) => {
                budget.charge(text.len() as u64 / 10)?;
                let problems: Vec<Value<'a>> = format
                    .problems(&text)
                    .into_iter()
                    .map(Value::text)
                    .collect();
                Ok(if problems.is_empty() {
                    Value::Optional(None)
                } else {
                    Value::some(Value::list(problems))
                })
            }
            _ => Err(Error::NoSuchOverload),
        },
        _ => kubernetes::method(&target, name, &arguments),
    }
}

fn optional<'a>(
    inner: Option<&Value<'a>>,
    name: &str,
    mut arguments: Vec<Value<'a>>,
) -> Result<Value<'a>> {
    match (name, inner) {
        ("hasValue", inner) => Ok(Value::Bool(inner.is_some())),
        ("value" | "orValue", Some(value)) => Ok(value.clone()),
        ("value", None) => Err(Error::Other("optional.none() dereference".to_owned())),
        ("or", Some(value)) => Ok(Value::some(value.clone())),
        ("orValue" | "or", None) => arguments.pop().ok_or(Error::NoSuchOverload),
        _ => Err(Error::NoSuchOverload),
    }
}

fn global<'a>(
    name: &str,
    mut arguments: Vec<Value<'a>>,
    regex: Option<&Regex>,
    budget: &mut Budget,
) -> Result<Value<'a>> {
    if let Some(function) = name.strip_prefix("math.") {
        return collections::math(function, &arguments, budget);
    }
    if let Some(function) = name.strip_prefix("sets.") {
        return collections::sets(function, &arguments, budget);
    }
    if let Some(format) = name.strip_prefix("format.") {
        return kubernetes::format(format, &arguments);
    }
    match (name, &arguments[..]) {
        ("optional.none", []) => Ok(Value::Optional(None)),
        ("matches", [text, pattern]) => strings::method(
            text,
            "matches",
            std::slice::from_ref(pattern),
            regex,
            budget,
        ),
        ("semver" | "isSemver", [Value::String(text), rest @ ..]) => {
            let normalize = matches!(rest, [Value::Bool(true)]);
            let parsed = Semver::parse(text, normalize);
            match (name, parsed) {
                ("isSemver", parsed) => Ok(Value::Bool(parsed.is_some())),
                (_, Some(version)) => Ok(Value::Semver(version.into())),
                _ => Err(Error::Other("invalid semantic version".to_owned())),
            }
        }
        (_, [_]) => {
            let argument = arguments.remove(0);
            unary(name, argument, budget)
        }
        _ => Err(Error::NoSuchOverload),
    }
}

fn unary<'a>(name: &str, argument: Value<'a>, budget: &mut Budget) -> Result<Value<'a>> {
    if let Value::String(text) = &argument {
        budget.charge(text.len() as u64 / 10)?;
    }
    match (name, &argument) {
        ("size", _) => collections::size(&argument, budget),
        ("dyn", _) => Ok(argument),
        ("type", _) => Ok(Value::Type(argument.type_name())),
        ("optional.ofNonZeroValue", _) if argument.is_zero() => Ok(Value::Optional(None)),
        ("optional.of" | "optional.ofNonZeroValue", _) => Ok(Value::some(argument)),
        ("string" | "int" | "uint" | "double" | "bool" | "bytes", _) => convert(name, &argument),
        ("timestamp" | "duration", _) => times::parse(name, &argument),
        ("strings.quote", Value::String(text)) => Ok(Value::text(crate::go::quote(text))),
        ("base64.encode", Value::Bytes(bytes)) => Ok(Value::text(encode_base64(bytes))),
        ("base64.decode", Value::String(text)) => decode_base64(text)
            .map(|bytes| Value::Bytes(bytes.into()))
            .ok_or_else(|| Error::Other("illegal base64 data".to_owned())),
        (_, Value::String(text)) => kubernetes::parse(name, text),
        _ => Err(Error::NoSuchOverload),
    }
}

#[expect(
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    clippy::cast_precision_loss,
    reason = "conversions truncate as CEL's do, after the range was checked"
)]
fn convert<'a>(to: &str, value: &Value<'a>) -> Result<Value<'a>> {
    let failed =
        |what: &str| Error::Other(format!("type conversion error from '{what}' to '{to}'"));
    match (to, value) {
        ("string", Value::String(_))
        | ("int", Value::Int(_))
        | ("uint", Value::Uint(_))
        | ("double", Value::Double(_))
        | ("bool", Value::Bool(_))
        | ("bytes", Value::Bytes(_)) => Ok(value.clone()),
        ("string", Value::Bytes(bytes)) => match std::str::from_utf8(bytes) {
            Ok(text) => Ok(Value::text(text.to_owned())),
            Err(_) => Err(Error::Other(
                "invalid UTF-8 in bytes, cannot convert to string".to_owned(),
            )),
        },
        ("string", other)
            if !matches!(
                other,
                Value::List(_) | Value::Map(_) | Value::Optional(_) | Value::Null
            ) =>
        {
            Ok(Value::text(print(other)))
        }
        ("bytes", Value::String(text)) => Ok(Value::Bytes(text.as_bytes().into())),
        ("bool", Value::String(text)) => match text.as_ref() {
            "1" | "t" | "T" | "true" | "TRUE" | "True" => Ok(Value::Bool(true)),
            "0" | "f" | "F" | "false" | "FALSE" | "False" => Ok(Value::Bool(false)),
            _ => Err(failed("string")),
        },
        ("int", Value::String(text)) => text.parse().map(Value::Int).map_err(|_| failed("string")),
        ("int", Value::Uint(number)) => i64::try_from(*number)
            .map(Value::Int)
            .map_err(|_| Error::Overflow),
        ("int", Value::Double(number)) if number.abs() < 9.2e18 => Ok(Value::Int(*number as i64)),
        ("int", Value::Timestamp(time)) => Ok(Value::Int(time.as_second())),
        ("int", Value::Duration(nanos)) => Ok(Value::Int(*nanos)),
        ("uint", Value::String(text)) => {
            text.parse().map(Value::Uint).map_err(|_| failed("string"))
        }
        ("uint", Value::Int(number)) => u64::try_from(*number)
            .map(Value::Uint)
            .map_err(|_| Error::Overflow),
        ("uint", Value::Double(number)) if (0.0..1.8e19).contains(number) => {
            Ok(Value::Uint(*number as u64))
        }
        ("double", Value::String(text)) => text
            .parse()
            .map(Value::Double)
            .map_err(|_| failed("string")),
        ("double", Value::Int(number)) => Ok(Value::Double(*number as f64)),
        ("double", Value::Uint(number)) => Ok(Value::Double(*number as f64)),
        ("int" | "uint", Value::Double(_)) => Err(Error::Overflow),
        _ => Err(Error::NoSuchOverload),
    }
}

/// Formats a scalar as `string()` does, and a compound value as in error messages.
pub(super) fn print(value: &Value<'_>) -> String {
    match value {
        Value::Null => "null".to_owned(),
        Value::Bool(boolean) => boolean.to_string(),
        Value::Int(number) => number.to_string(),
        Value::Uint(number) => number.to_string(),
        Value::Double(number) => crate::go::float(*number),
        Value::String(text) => text.to_string(),
        Value::Bytes(bytes) => String::from_utf8_lossy(bytes).into_owned(),
        Value::Timestamp(time) => time.to_string(),
        Value::Duration(nanos) => {
            let seconds = nanos / 1_000_000_000;
            let fraction = nanos.unsigned_abs() % 1_000_000_000;
            if fraction == 0 {
                return format!("{seconds}s");
            }
            let sign = if *nanos < 0 && seconds == 0 { "-" } else { "" };
            let digits = format!("{fraction:09}");
            format!("{sign}{seconds}.{}s", digits.trim_end_matches('0'))
        }
        Value::Type(name) => (*name).to_owned(),
        Value::Quantity(quantity) => quantity.to_string(),
        Value::Ip(address) => address.to_string(),
        Value::Cidr(address, width) => format!("{address}/{width}"),
        Value::Url(url) => url.text.clone(),
        Value::Semver(version) => version.to_string(),
        Value::Format(format) => format.name().to_owned(),
        Value::List(list) => {
            let items: Vec<String> = list.iter().map(|item| print(&item)).collect();
            format!("[{}]", items.join(", "))
        }
        Value::Map(map) => {
            let mut entries: Vec<String> = map
                .entries()
                .iter()
                .map(|(key, value)| format!("{}: {}", print(key), print(value)))
                .collect();
            entries.sort_unstable();
            format!("{{{}}}", entries.join(", "))
        }
        Value::Optional(None) => "optional.none()".to_owned(),
        Value::Optional(Some(value)) => format!("optional({})", print(value)),
    }
}

const ALPHABET: &[u8; 64] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";

fn encode_base64(bytes: &[u8]) -> String {
    let mut text = String::with_capacity(bytes.len().div_ceil(3) * 4);
    for chunk in bytes.chunks(3) {
        let group = u32::from(chunk[0]) << 16
            | u32::from(chunk.get(1).copied().unwrap_or(0)) << 8
            | u32::from(chunk.get(2).copied().unwrap_or(0));
        for place in 0..4 {
            if place <= chunk.len() {
                text.push(char::from(
                    ALPHABET[(group >> (18 - 6 * place) & 63) as usize],
                ));
            } else {
                text.push('=');
            }
        }
    }
    text
}

pub(super) fn decode_base64(text: &str) -> Option<Vec<u8>> {
    let body = text.trim_end_matches('=');
    if text.len() - body.len() > 2 || body.len() % 4 == 1 {
        return None;
    }
    let mut bytes = Vec::with_capacity(body.len() * 3 / 4);
    for chunk in body.as_bytes().chunks(4) {
        let mut group = 0;
        for byte in chunk {
            let digit = ALPHABET.iter().position(|known| known == byte)?;
            group = group << 6 | u32::try_from(digit).ok()?;
        }
        group <<= 6 * (4 - chunk.len());
        bytes.extend_from_slice(&group.to_be_bytes()[1..chunk.len()]);
    }
    Some(bytes)
}

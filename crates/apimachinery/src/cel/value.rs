//! Values during evaluation. Values from the object are borrowed and interpreted through their schema; only values that an
//! expression creates are owned.

use std::borrow::Cow;
use std::cmp::Ordering;
use std::net::IpAddr;
use std::rc::Rc;

use jiff::Timestamp;
use serde_json::{Map as JsonMap, Value as Json};

use super::eval::{Budget, Error};
use super::functions::{NamedFormat, Semver, Url};
use crate::quantity::Quantity;
use crate::schema::{ListType, Node, Type};

#[derive(Debug, Clone)]
pub(super) enum Value<'a> {
    Null,
    Bool(bool),
    Int(i64),
    Uint(u64),
    Double(f64),
    String(Cow<'a, str>),
    Bytes(Rc<[u8]>),
    List(List<'a>),
    Map(Map<'a>),
    Timestamp(Timestamp),
    /// A duration in nanoseconds.
    Duration(i64),
    Type(&'static str),
    Optional(Option<Rc<Value<'a>>>),
    Quantity(Quantity),
    Ip(IpAddr),
    Cidr(IpAddr, u8),
    Url(Rc<Url>),
    Semver(Rc<Semver>),
    Format(NamedFormat),
}

#[derive(Debug, Clone)]
pub(super) enum List<'a> {
    Json(&'a [Json], Option<&'a Node>),
    Owned(Rc<Vec<Value<'a>>>),
}

#[derive(Debug, Clone)]
pub(super) enum Map<'a> {
    Json(&'a JsonMap<String, Json>, Option<&'a Node>),
    Owned(Rc<Vec<(Value<'a>, Value<'a>)>>),
}

impl<'a> Value<'a> {
    pub fn from_json(json: &'a Json, node: Option<&'a Node>) -> Self {
        match json {
            Json::Null => Value::Null,
            Json::Bool(boolean) => Value::Bool(*boolean),
            Json::Number(number) => {
                let wants_double = node.is_some_and(|node| node.kind == Some(Type::Number));
                match (number.as_i64(), number.as_f64()) {
                    (Some(integer), _) if !wants_double => Value::Int(integer),
                    (_, Some(float)) => {
                        let wants_int = node.is_some_and(|node| node.kind == Some(Type::Integer));
                        #[expect(
                            clippy::cast_possible_truncation,
                            reason = "an integral float in an integer field"
                        )]
                        if wants_int && float.fract() == 0.0 {
                            Value::Int(float as i64)
                        } else {
                            Value::Double(float)
                        }
                    }
                    _ => Value::Null,
                }
            }
            Json::String(text) => string_of(text, node),
            Json::Array(items) => Value::List(List::Json(items, node)),
            Json::Object(members) => Value::Map(Map::Json(members, node)),
        }
    }

    pub fn list(items: Vec<Value<'a>>) -> Self {
        Value::List(List::Owned(Rc::new(items)))
    }

    pub fn text(text: impl Into<Cow<'a, str>>) -> Self {
        Value::String(text.into())
    }

    pub fn some(value: Value<'a>) -> Self {
        Value::Optional(Some(Rc::new(value)))
    }

    /// The type name that `type()` returns and that messages use.
    pub fn type_name(&self) -> &'static str {
        match self {
            Value::Null => "null_type",
            Value::Bool(_) => "bool",
            Value::Int(_) => "int",
            Value::Uint(_) => "uint",
            Value::Double(_) => "double",
            Value::String(_) => "string",
            Value::Bytes(_) => "bytes",
            Value::List(_) => "list",
            Value::Map(_) => "map",
            Value::Timestamp(_) => "google.protobuf.Timestamp",
            Value::Duration(_) => "google.protobuf.Duration",
            Value::Type(_) => "type",
            Value::Optional(_) => "optional_type",
            Value::Quantity(_) => "kubernetes.Quantity",
            Value::Ip(_) => "net.IP",
            Value::Cidr(..) => "net.CIDR",
            Value::Url(_) => "kubernetes.URL",
            Value::Semver(_) => "kubernetes.Semver",
            Value::Format(_) => "kubernetes.NamedFormat",
        }
    }

    /// Whether this is a zero value for `optional.ofNonZeroValue`.
    pub fn is_zero(&self) -> bool {
        match self {
            Value::Null => true,
            Value::Bool(boolean) => !boolean,
            Value::Int(number) => *number == 0,
            Value::Uint(number) => *number == 0,
            Value::Double(number) => *number == 0.0,
            Value::String(text) => text.is_empty(),
            Value::Bytes(bytes) => bytes.is_empty(),
            Value::List(list) => list.len() == 0,
            Value::Map(map) => map.len() == 0,
            Value::Duration(nanos) => *nanos == 0,
            Value::Optional(value) => value.is_none(),
            _ => false,
        }
    }
}

fn string_of<'a>(text: &'a str, node: Option<&'a Node>) -> Value<'a> {
    let format = node
        .and_then(|node| node.checks.as_ref())
        .and_then(|checks| checks.format.as_ref());
    let Some(format) = format else {
        return Value::String(Cow::Borrowed(text));
    };
    let typed = match format.name.as_str() {
        "date-time" | "datetime" => text.parse().ok().map(Value::Timestamp),
        "date" => text
            .parse::<jiff::civil::Date>()
            .ok()
            .and_then(|date| date.to_zoned(jiff::tz::TimeZone::UTC).ok())
            .map(|zoned| Value::Timestamp(zoned.timestamp())),
        "duration" => crate::duration::parse(text)
            .ok()
            .map(|duration| Value::Duration(duration.0)),
        "byte" => super::functions::decode_base64(text).map(|bytes| Value::Bytes(bytes.into())),
        _ => None,
    };
    typed.unwrap_or(Value::String(Cow::Borrowed(text)))
}

impl<'a> List<'a> {
    pub fn len(&self) -> usize {
        match self {
            List::Json(items, _) => items.len(),
            List::Owned(items) => items.len(),
        }
    }

    pub fn get(&self, index: usize) -> Option<Value<'a>> {
        match self {
            List::Json(items, node) => {
                let schema = node.and_then(|node| node.items.as_deref());
                items.get(index).map(|item| Value::from_json(item, schema))
            }
            List::Owned(items) => items.get(index).cloned(),
        }
    }

    pub fn iter(&self) -> impl Iterator<Item = Value<'a>> + '_ {
        (0..self.len()).filter_map(|index| self.get(index))
    }

    fn schema(&self) -> Option<&'a Node> {
        match self {
            List::Json(_, node) => *node,
            List::Owned(_) => None,
        }
    }

    /// The list type, and the keys of a map list.
    fn list_type(&self) -> (ListType, &'a [String]) {
        match self.schema() {
            Some(node) => (node.list_type.unwrap_or_default(), &node.map_keys),
            None => (ListType::Atomic, &[]),
        }
    }

    /// The operator `+`: a set adds new items, a map list replaces items by key, other lists append.
    pub fn concat(&self, other: &List<'a>, budget: &mut Budget) -> Result<Value<'a>, Error> {
        budget.charge((self.len() + other.len()) as u64)?;
        let mut items: Vec<Value<'a>> = self.iter().collect();
        let (list_type, keys) = self.list_type();
        for candidate in other.iter() {
            let mut same = None;
            if list_type != ListType::Atomic {
                for (position, item) in items.iter().enumerate() {
                    let is_same = match list_type {
                        ListType::Map => same_keys(item, &candidate, keys, budget)?,
                        _ => equal(item, &candidate, budget)?,
                    };
                    if is_same {
                        same = Some(position);
                        break;
                    }
                }
            }
            match same {
                Some(position) => items[position] = candidate,
                None => items.push(candidate),
            }
        }
        Ok(Value::list(items))
    }
}

impl<'a> Map<'a> {
    pub fn len(&self) -> usize {
        match self {
            Map::Json(members, _) => members.len(),
            Map::Owned(entries) => entries.len(),
        }
    }

    /// Looks up a field: by `property` in objects with properties, by `written` in maps.
    pub fn field(&self, written: &str, property: &str) -> Option<Value<'a>> {
        match self {
            Map::Json(members, Some(node)) if !node.properties.is_empty() => {
                let value = members.get(property)?;
                Some(Value::from_json(value, node.properties.get(property)))
            }
            Map::Json(members, node) => {
                let schema = node.and_then(|node| node.additional_schema());
                members
                    .get(written)
                    .map(|value| Value::from_json(value, schema))
            }
            Map::Owned(entries) => entries
                .iter()
                .find(|(key, _)| matches!(key, Value::String(key) if key == written))
                .map(|(_, value)| value.clone()),
        }
    }

    pub fn get(&self, key: &Value<'a>, budget: &mut Budget) -> Result<Option<Value<'a>>, Error> {
        if let Value::String(text) = key {
            if let Map::Owned(entries) = self {
                budget.charge(1 + entries.len() as u64 / 8)?;
            }
            return Ok(self.field(text, text));
        }
        if let Map::Owned(entries) = self {
            for (candidate, value) in entries.iter() {
                if equal(candidate, key, budget)? {
                    return Ok(Some(value.clone()));
                }
            }
        }
        Ok(None)
    }

    pub fn entries(&self) -> Vec<(Value<'a>, Value<'a>)> {
        match self {
            Map::Json(members, node) => members
                .iter()
                .map(|(key, value)| {
                    let schema = node.and_then(|node| node.member(key));
                    (Value::text(key.as_str()), Value::from_json(value, schema))
                })
                .collect(),
            Map::Owned(entries) => entries.to_vec(),
        }
    }
}

fn same_keys<'a>(
    left: &Value<'a>,
    right: &Value<'a>,
    keys: &[String],
    budget: &mut Budget,
) -> Result<bool, Error> {
    let (Value::Map(left), Value::Map(right)) = (left, right) else {
        return Ok(false);
    };
    for key in keys {
        let same = match (left.field(key, key), right.field(key, key)) {
            (None, None) => true,
            (Some(left), Some(right)) => equal(&left, &right, budget)?,
            _ => false,
        };
        if !same {
            return Ok(false);
        }
    }
    Ok(true)
}

/// CEL equality: numbers are compared across types, and the order of sets and map lists is ignored.
pub(super) fn equal<'a>(
    left: &Value<'a>,
    right: &Value<'a>,
    budget: &mut Budget,
) -> Result<bool, Error> {
    budget.charge(1)?;
    Ok(match (left, right) {
        (Value::Null, Value::Null) | (Value::Optional(None), Value::Optional(None)) => true,
        (Value::Bool(left), Value::Bool(right)) => left == right,
        (Value::String(left), Value::String(right)) => {
            budget.charge(left.len().min(right.len()) as u64 / 10)?;
            left == right
        }
        (Value::Bytes(left), Value::Bytes(right)) => left == right,
        (Value::List(left), Value::List(right)) => return equal_lists(left, right, budget),
        (Value::Map(left), Value::Map(right)) => return equal_maps(left, right, budget),
        (Value::Timestamp(left), Value::Timestamp(right)) => left == right,
        (Value::Duration(left), Value::Duration(right)) => left == right,
        (Value::Type(left), Value::Type(right)) => left == right,
        (Value::Optional(Some(left)), Value::Optional(Some(right))) => {
            return equal(left, right, budget);
        }
        (Value::Quantity(left), Value::Quantity(right)) => left == right,
        (Value::Ip(left), Value::Ip(right)) => left == right,
        (Value::Cidr(left, width), Value::Cidr(right, other)) => left == right && width == other,
        (Value::Url(left), Value::Url(right)) => left == right,
        (Value::Semver(left), Value::Semver(right)) => left.cmp(right) == Ordering::Equal,
        (Value::Format(left), Value::Format(right)) => left == right,
        _ => numeric(left, right) == Some(Ordering::Equal),
    })
}

fn equal_lists<'a>(left: &List<'a>, right: &List<'a>, budget: &mut Budget) -> Result<bool, Error> {
    if left.len() != right.len() {
        return Ok(false);
    }
    let (list_type, keys) = match left.list_type() {
        (ListType::Atomic, _) => right.list_type(),
        typed => typed,
    };
    if list_type == ListType::Atomic {
        for (left, right) in left.iter().zip(right.iter()) {
            if !equal(&left, &right, budget)? {
                return Ok(false);
            }
        }
        return Ok(true);
    }
    for wanted in left.iter() {
        let mut found = false;
        for candidate in right.iter() {
            let matches = match list_type {
                ListType::Map => same_keys(&wanted, &candidate, keys, budget)?,
                _ => true,
            };
            if matches && equal(&wanted, &candidate, budget)? {
                found = true;
                break;
            }
        }
        if !found {
            return Ok(false);
        }
    }
    Ok(true)
}

fn equal_maps<'a>(left: &Map<'a>, right: &Map<'a>, budget: &mut Budget) -> Result<bool, Error> {
    if left.len() != right.len() {
        return Ok(false);
    }
    for (key, value) in left.entries() {
        let other = match (&key, right) {
            (Value::String(name), Map::Json(members, node)) => members
                .get(name.as_ref())
                .map(|other| Value::from_json(other, node.and_then(|node| node.member(name)))),
            _ => right.get(&key, budget)?,
        };
        match other {
            Some(other) if equal(&value, &other, budget)? => {}
            _ => return Ok(false),
        }
    }
    Ok(true)
}

/// The order of two numbers of any types.
#[expect(
    clippy::cast_precision_loss,
    reason = "integers are compared with floats as floats"
)]
fn numeric(left: &Value<'_>, right: &Value<'_>) -> Option<Ordering> {
    let signed = |value: &Value<'_>| match value {
        Value::Int(number) => Some(i128::from(*number)),
        Value::Uint(number) => Some(i128::from(*number)),
        _ => None,
    };
    let float = |value: &Value<'_>| match value {
        Value::Double(number) => Some(*number),
        other => signed(other).map(|number| number as f64),
    };
    match (signed(left), signed(right)) {
        (Some(left), Some(right)) => Some(left.cmp(&right)),
        _ => float(left)?.partial_cmp(&float(right)?),
    }
}

/// The order of two values of the same ordered type.
pub(super) fn compare<'a>(left: &Value<'a>, right: &Value<'a>) -> Option<Ordering> {
    match (left, right) {
        (Value::Bool(left), Value::Bool(right)) => Some(left.cmp(right)),
        (Value::String(left), Value::String(right)) => Some(left.cmp(right)),
        (Value::Bytes(left), Value::Bytes(right)) => Some(left.cmp(right)),
        (Value::Timestamp(left), Value::Timestamp(right)) => Some(left.cmp(right)),
        (Value::Duration(left), Value::Duration(right)) => Some(left.cmp(right)),
        (Value::Quantity(left), Value::Quantity(right)) => Some(left.cmp(right)),
        _ => numeric(left, right),
    }
}

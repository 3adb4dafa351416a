//! The built-in types: their fields, how their lists merge, and which parts are atomic.
//!
//! The data in `builtin.txt` comes from the published OpenAPI document of Kubernetes. A line is a kind (`kind v1 Pod Pod`) or a
//! type with its fields (`Toleration effect:s tolerationSeconds:i`). A field is
//!
//! - a scalar: `s` string, `i` an `int32`, `l` an `int64`, `n` number, `b` boolean, `q` quantity, `x` integer or string, `t`
//!   time, `u` time with microseconds, `y` bytes in base64, `o` anything; `s=TCP` has a default;
//! - a type by its name, with `!` in front if it is atomic;
//! - `{}` and the type of the map's values, with `!` in front if it is atomic;
//! - `[` list type `|` patch key `]` and the type of the items: list type `s` is a set, `m=a,b` a map by those keys, empty is
//!   atomic. A strategic merge patch merges the list if it has a patch key (which may be empty, for scalars).

use std::collections::{BTreeMap, HashMap};
use std::sync::LazyLock;

/// A built-in type.
#[derive(Debug)]
pub(super) struct Struct {
    pub name: &'static str,
    pub atomic: bool,
    pub fields: BTreeMap<&'static str, Spec>,
}

/// The type of a field.
#[derive(Debug)]
pub(super) enum Spec {
    Scalar {
        kind: Scalar,
        default: Option<&'static str>,
    },
    Free,
    Struct {
        name: &'static str,
        atomic: bool,
    },
    Map {
        atomic: bool,
        value: Box<Spec>,
    },
    List {
        set: bool,
        keys: Vec<&'static str>,
        /// The merge key of a strategic merge patch; empty for scalars, `None` if the list is replaced.
        patch: Option<&'static str>,
        item: Box<Spec>,
    },
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Scalar {
    String,
    Int32,
    Int64,
    Number,
    Boolean,
    Quantity,
    IntOrString,
    Time,
    MicroTime,
    Bytes,
}

#[derive(Debug, Default)]
struct Table {
    kinds: HashMap<(&'static str, &'static str), &'static str>,
    types: HashMap<&'static str, Struct>,
}

static TABLE: LazyLock<Table> = LazyLock::new(|| {
    let mut table = Table::default();
    for line in include_str!("builtin.txt").lines() {
        let mut words = line.split(' ');
        let first = words.next().unwrap_or_default();
        if first == "kind" {
            if let (Some(version), Some(kind), Some(name)) =
                (words.next(), words.next(), words.next())
            {
                table.kinds.insert((version, kind), name);
            }
            continue;
        }
        let (atomic, name) = match first.strip_prefix('!') {
            Some(name) => (true, name),
            None => (false, first),
        };
        let fields = words
            .filter_map(|word| word.split_once(':'))
            .map(|(field, spec)| (field, parse(spec)))
            .collect();
        table.types.insert(
            name,
            Struct {
                name,
                atomic,
                fields,
            },
        );
    }
    table
});

fn parse(text: &'static str) -> Spec {
    if let Some(rest) = text.strip_prefix('[') {
        let (header, item) = rest.split_once(']').unwrap_or((rest, "o"));
        let (list_type, patch) = match header.split_once('|') {
            Some((list_type, patch)) => (list_type, Some(patch)),
            None => (header, None),
        };
        return Spec::List {
            set: list_type == "s",
            keys: list_type
                .strip_prefix("m=")
                .map(|keys| keys.split(',').collect())
                .unwrap_or_default(),
            patch,
            item: Box::new(parse(item)),
        };
    }
    let (atomic, rest) = match text.strip_prefix('!') {
        Some(rest) => (true, rest),
        None => (false, text),
    };
    if let Some(value) = rest.strip_prefix("{}") {
        return Spec::Map {
            atomic,
            value: Box::new(parse(value)),
        };
    }
    let (scalar, default) = match rest.split_once('=') {
        Some((scalar, default)) => (scalar, Some(default)),
        None => (rest, None),
    };
    let kind = match scalar {
        "s" => Scalar::String,
        "t" => Scalar::Time,
        "u" => Scalar::MicroTime,
        "y" => Scalar::Bytes,
        "i" => Scalar::Int32,
        "l" => Scalar::Int64,
        "n" => Scalar::Number,
        "b" => Scalar::Boolean,
        "q" => Scalar::Quantity,
        "x" => Scalar::IntOrString,
        "o" => return Spec::Free,
        name => {
            return Spec::Struct { name, atomic };
        }
    };
    Spec::Scalar { kind, default }
}

/// Looks up a type by its name in the table.
pub(super) fn by_name(name: &str) -> Option<&'static Struct> {
    TABLE.types.get(name)
}

/// Looks up the type of a kind.
pub(super) fn by_kind(api_version: &str, kind: &str) -> Option<&'static Struct> {
    // Any key with equal text finds the entry, although the table borrows from static text.
    let table = &*TABLE;
    let name = table
        .kinds
        .iter()
        .find(|((version, name), _)| *version == api_version && *name == kind)
        .map(|(_, name)| *name)?;
    table.types.get(name)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_referenced_type_is_defined() {
        fn check(spec: &Spec, at: &str) {
            match spec {
                Spec::Struct { name, .. } => {
                    assert!(by_name(name).is_some(), "{at} refers to {name}");
                }
                Spec::Map { value, .. } => check(value, at),
                Spec::List { item, .. } => check(item, at),
                _ => {}
            }
        }
        for (name, definition) in &TABLE.types {
            for (field, spec) in &definition.fields {
                check(spec, &format!("{name}.{field}"));
            }
        }
        for name in TABLE.kinds.values() {
            assert!(by_name(name).is_some(), "{name}");
        }
    }

    #[test]
    fn ports_are_keyed_by_number_and_protocol() {
        let Some(Spec::List { keys, patch, .. }) =
            by_name("Container").unwrap().fields.get("ports")
        else {
            panic!("ports is a list");
        };
        assert_eq!(*keys, ["containerPort", "protocol"]);
        assert_eq!(*patch, Some("containerPort"));
        assert!(by_kind("v1", "Pod").is_some());
        assert!(by_kind("v2", "Pod").is_none());
    }
}

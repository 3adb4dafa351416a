//! Type information of an object: how lists and maps merge, for each field.
//!
//! A common view of two sources, the schema of a CRD and the table of built-in types, so that server-side apply and strategic
//! merge patch work the same on both.

mod builtin;
mod decode;
mod unknown;

use serde_json::Value;

use crate::schema::{ListType, Node, Schema};
use builtin::{Spec, Struct};

pub use decode::{DecodeError, decode};
pub use unknown::unknown_fields;

/// The type of a value, borrowed from its schema or from the table of built-in types.
#[derive(Debug, Clone, Copy)]
pub struct TypeRef<'a>(Inner<'a>);

#[derive(Debug, Clone, Copy)]
enum Inner<'a> {
    /// The root of a custom resource, whose metadata every schema describes implicitly.
    Resource(&'a Node),
    Schema(&'a Node),
    Struct(&'static Struct),
    Spec(&'static Spec),
    /// An unknown type: maps merge by key, lists are atomic.
    Unknown,
}

/// How a list is owned and merged.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ListKind<'a> {
    Atomic,
    Set,
    /// Items are identified by these fields.
    Map(Keys<'a>),
}

/// The key fields of a map list.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Keys<'a> {
    Owned(&'a [String]),
    Static(&'a [&'static str]),
}

impl<'a> Keys<'a> {
    pub fn iter(self) -> impl Iterator<Item = &'a str> {
        let (owned, fixed): (&'a [String], &'a [&'static str]) = match self {
            Keys::Owned(keys) => (keys, &[]),
            Keys::Static(keys) => (&[], keys),
        };
        owned
            .iter()
            .map(String::as_str)
            .chain(fixed.iter().copied())
    }
}

/// How a strategic merge patch treats a list.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PatchList {
    Replace,
    /// Merges scalars as a set.
    MergeScalars,
    /// Merges items by this key.
    MergeBy(&'static str),
}

impl<'a> TypeRef<'a> {
    /// The type of a custom resource.
    pub fn custom(schema: &'a Schema) -> Self {
        Self(Inner::Resource(schema.root()))
    }

    /// The type of a built-in kind: `("apps/v1", "Deployment")`.
    pub fn builtin(api_version: &str, kind: &str) -> Option<TypeRef<'static>> {
        builtin::by_kind(api_version, kind).map(|definition| TypeRef(Inner::Struct(definition)))
    }

    /// The unknown type.
    pub const fn unknown() -> TypeRef<'static> {
        TypeRef(Inner::Unknown)
    }

    /// The type of every object's metadata.
    pub fn object_meta() -> Self {
        builtin::by_name("ObjectMeta")
            .map_or(Self(Inner::Unknown), |meta| Self(Inner::Struct(meta)))
    }

    fn of_spec(spec: &'static Spec) -> Self {
        match spec {
            Spec::Struct {
                name,
                atomic: false,
                ..
            } => match builtin::by_name(name) {
                Some(definition) => Self(Inner::Struct(definition)),
                None => Self(Inner::Unknown),
            },
            other => Self(Inner::Spec(other)),
        }
    }

    /// The struct of this type, if it is a built-in one.
    fn definition(self) -> Option<&'static Struct> {
        match self.0 {
            Inner::Struct(definition) => Some(definition),
            Inner::Spec(Spec::Struct { name, .. }) => builtin::by_name(name),
            _ => None,
        }
    }

    /// The type of a member of a map or struct.
    #[must_use]
    pub fn member(self, name: &str) -> TypeRef<'a> {
        match self.0 {
            Inner::Resource(node) => match name {
                "metadata" => Self::object_meta(),
                _ => node
                    .member(name)
                    .map_or(Self(Inner::Unknown), |child| Self(Inner::Schema(child))),
            },
            Inner::Schema(node) if node.embedded_resource && name == "metadata" => {
                Self::object_meta()
            }
            Inner::Schema(node) => node
                .member(name)
                .map_or(Self(Inner::Unknown), |child| Self(Inner::Schema(child))),
            Inner::Spec(Spec::Map { value, .. }) => Self::of_spec(value),
            _ => match self
                .definition()
                .and_then(|definition| definition.fields.get(name))
            {
                Some(spec) => Self::of_spec(spec),
                None => Self(Inner::Unknown),
            },
        }
    }

    /// Whether `name` is a field of a struct and not a key of a map.
    pub fn is_named_field(self, name: &str) -> bool {
        match self.0 {
            Inner::Resource(node) => {
                matches!(name, "apiVersion" | "kind" | "metadata")
                    || node.properties.contains_key(name)
            }
            Inner::Schema(node) => {
                let implicit =
                    node.embedded_resource && matches!(name, "apiVersion" | "kind" | "metadata");
                implicit || node.properties.contains_key(name)
            }
            _ => self
                .definition()
                .is_some_and(|definition| definition.fields.contains_key(name)),
        }
    }

    /// Whether the type describes all its members, so that any other member is an error.
    pub fn is_closed(self) -> bool {
        match self.0 {
            Inner::Resource(node) | Inner::Schema(node) => {
                !node.preserve_unknown && !node.properties.is_empty() && node.additional.is_none()
            }
            _ => self.definition().is_some(),
        }
    }

    /// The type of a list's items.
    #[must_use]
    pub fn item(self) -> TypeRef<'a> {
        match self.0 {
            Inner::Schema(node) => node
                .items
                .as_deref()
                .map_or(Self(Inner::Unknown), |child| Self(Inner::Schema(child))),
            Inner::Spec(Spec::List { item, .. }) => Self::of_spec(item),
            _ => Self(Inner::Unknown),
        }
    }

    /// How a list of this type is owned.
    pub fn list(self) -> ListKind<'a> {
        match self.0 {
            Inner::Schema(node) => match node.list_type {
                Some(ListType::Set) => ListKind::Set,
                Some(ListType::Map) => ListKind::Map(Keys::Owned(&node.map_keys)),
                _ => ListKind::Atomic,
            },
            Inner::Spec(Spec::List { set: true, .. }) => ListKind::Set,
            Inner::Spec(Spec::List { keys, .. }) if !keys.is_empty() => {
                ListKind::Map(Keys::Static(keys))
            }
            _ => ListKind::Atomic,
        }
    }

    /// Whether a map or struct of this type is atomic (owned as a whole).
    pub fn is_atomic_map(self) -> bool {
        match self.0 {
            Inner::Schema(node) => node.is_atomic_map(),
            Inner::Struct(definition) => definition.atomic,
            Inner::Spec(Spec::Map { atomic, .. }) => *atomic,
            Inner::Spec(Spec::Struct { name, atomic, .. }) => {
                *atomic || builtin::by_name(name).is_some_and(|definition| definition.atomic)
            }
            Inner::Spec(Spec::Scalar { .. }) => true,
            _ => false,
        }
    }

    /// The default of a member that is a list key.
    pub fn member_default(self, name: &str) -> Option<Value> {
        match self.0 {
            Inner::Schema(node) => node.property(name)?.default.clone(),
            _ => match self.definition()?.fields.get(name)? {
                Spec::Scalar { default, .. } => default.map(Value::from),
                _ => None,
            },
        }
    }

    /// How a strategic merge patch treats a list of this type.
    pub fn patch_list(self) -> PatchList {
        match self.0 {
            Inner::Spec(Spec::List {
                patch: Some(""), ..
            }) => PatchList::MergeScalars,
            Inner::Spec(Spec::List {
                patch: Some(key), ..
            }) => PatchList::MergeBy(key),
            _ => PatchList::Replace,
        }
    }
}

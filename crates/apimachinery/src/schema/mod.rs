//! Structural schemas: the `openAPIV3Schema` of a CRD, compiled once and applied to every object that is written.
//!
//! A server applies it in this order: [`Schema::prune`], [`Schema::default`], [`Schema::validate`]. These schemas do not describe
//! object metadata, and none of the steps changes it.

mod completeness;
mod default;
mod formats;
mod list_type;
mod parse;
mod prune;
mod structural;
mod validate;

use std::collections::BTreeMap;

use regex::Regex;
use serde_json::Value;

use crate::cel::RuleTree;
use crate::field::FieldError;

/// The compiled schema of one version of a kind.
#[derive(Debug, Clone)]
pub struct Schema {
    pub(crate) root: Node,
    rules: Option<RuleTree>,
}

/// A JSON type in a schema.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Type {
    Object,
    Array,
    String,
    Integer,
    Number,
    Boolean,
}

impl Type {
    pub const fn name(self) -> &'static str {
        match self {
            Self::Object => "object",
            Self::Array => "array",
            Self::String => "string",
            Self::Integer => "integer",
            Self::Number => "number",
            Self::Boolean => "boolean",
        }
    }

    pub(crate) fn from_name(name: &str) -> Option<Self> {
        Some(match name {
            "object" => Self::Object,
            "array" => Self::Array,
            "string" => Self::String,
            "integer" => Self::Integer,
            "number" => Self::Number,
            "boolean" => Self::Boolean,
            _ => return None,
        })
    }
}

/// `x-kubernetes-list-type`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum ListType {
    #[default]
    Atomic,
    Set,
    Map,
}

/// One level of a schema. Nested value validations (such as `allOf`) are nodes too, but define no structure.
#[derive(Debug, Clone, Default)]
#[expect(
    clippy::struct_excessive_bools,
    reason = "the schema language defines these flags"
)]
pub struct Node {
    pub(crate) kind: Option<Type>,
    pub(crate) int_or_string: bool,
    pub(crate) nullable: bool,
    pub(crate) preserve_unknown: bool,
    pub(crate) embedded_resource: bool,
    pub(crate) map_atomic: bool,
    pub(crate) list_type: Option<ListType>,
    pub(crate) map_keys: Vec<String>,
    pub(crate) properties: BTreeMap<String, Node>,
    pub(crate) additional: Option<Additional>,
    pub(crate) items: Option<Box<Node>>,
    pub(crate) default: Option<Value>,
    /// The properties with a default, so that defaulting can skip the others.
    pub(crate) defaulted: Vec<String>,
    pub(crate) checks: Option<Box<Checks>>,
    pub(crate) rules: Vec<RuleSource>,
}

/// `additionalProperties`: allowed or forbidden, optionally with a schema.
#[derive(Debug, Clone)]
pub(crate) enum Additional {
    Any(bool),
    Schema(Box<Node>),
}

/// The value validations of a node. Most nodes have none.
#[derive(Debug, Clone, Default)]
pub(crate) struct Checks {
    pub required: Vec<String>,
    pub one_of_values: Option<Vec<Value>>,
    pub minimum: Option<Bound>,
    pub maximum: Option<Bound>,
    pub multiple_of: Option<f64>,
    pub min_length: Option<u64>,
    pub max_length: Option<u64>,
    pub pattern: Option<Regex>,
    pub format: Option<formats::Format>,
    pub min_items: Option<u64>,
    pub max_items: Option<u64>,
    pub min_properties: Option<u64>,
    pub max_properties: Option<u64>,
    pub all_of: Vec<Node>,
    pub any_of: Vec<Node>,
    pub one_of: Vec<Node>,
    pub not: Option<Node>,
}

#[derive(Debug, Clone, Copy)]
pub(crate) struct Bound {
    pub value: f64,
    pub exclusive: bool,
}

/// An entry of `x-kubernetes-validations`, as written in the schema.
#[derive(Debug, Clone, Default, PartialEq, Eq, serde::Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct RuleSource {
    pub rule: String,
    pub message: String,
    pub message_expression: String,
    pub reason: Option<String>,
    pub field_path: String,
    pub optional_old_self: Option<bool>,
}

impl Schema {
    /// Compiles `openAPIV3Schema`. `path` is the prefix of field paths in errors, such as
    /// `spec.versions[0].schema.openAPIV3Schema`.
    pub fn compile(open_api: &Value, path: &str) -> Result<Self, Vec<FieldError>> {
        let mut errors = Vec::new();
        let root = parse::parse(open_api, path, &mut errors);
        structural::check(open_api, path, &mut errors);
        completeness::check(open_api, path, &mut errors);
        errors.sort_by_cached_key(ToString::to_string);
        errors.dedup();
        if !errors.is_empty() {
            return Err(errors);
        }
        errors = validate::check_defaults(&root, path);
        let rules = RuleTree::compile(&root, path, true, &mut errors);
        if errors.is_empty() {
            Ok(Self { root, rules })
        } else {
            Err(errors)
        }
    }

    /// Sets defaults at all levels and removes nulls where null is not allowed.
    pub fn default(&self, object: &mut Value) {
        default::apply(object, &self.root);
    }

    /// Removes fields that the schema does not describe.
    pub fn prune(&self, object: &mut Value) {
        prune::prune(object, &self.root, None);
    }

    /// Removes fields that the schema does not describe and returns their sorted paths: `spec.containers[0].imagee`.
    pub fn prune_reporting(&self, object: &mut Value) -> Vec<String> {
        let mut unknown = Vec::new();
        prune::prune(object, &self.root, Some(&mut unknown));
        unknown.sort_unstable();
        unknown
    }

    /// Validates the values of an object, without `x-kubernetes-validations`. Returns all errors.
    pub fn validate(&self, object: &Value) -> Vec<FieldError> {
        let mut errors = Vec::new();
        validate::validate_resource(object, None, &self.root, &mut errors);
        errors
    }

    /// Validates an update with validation ratcheting: reports only errors in values that the update changes. Unchanged values
    /// that an older schema accepted stay valid.
    pub fn validate_update(&self, new: &Value, old: &Value) -> Vec<FieldError> {
        let mut errors = Vec::new();
        validate::validate_resource(new, Some(old), &self.root, &mut errors);
        errors
    }

    /// Evaluates `x-kubernetes-validations` for the change from `old` (`None` on creation) to `new`, which must have passed
    /// [`Schema::validate`].
    pub fn validate_rules(&self, new: &Value, old: Option<&Value>) -> Vec<FieldError> {
        match &self.rules {
            Some(rules) => rules.validate(&self.root, new, old),
            None => Vec::new(),
        }
    }

    /// The root of the compiled schema, for code that derives other data from it.
    pub fn root(&self) -> &Node {
        &self.root
    }
}

impl Node {
    pub fn kind(&self) -> Option<Type> {
        self.kind
    }

    /// `x-kubernetes-map-type: atomic`: the object is owned and replaced as a whole.
    pub fn is_atomic_map(&self) -> bool {
        self.map_atomic
    }

    pub fn property(&self, name: &str) -> Option<&Node> {
        self.properties.get(name)
    }

    pub(crate) fn additional_schema(&self) -> Option<&Node> {
        match &self.additional {
            Some(Additional::Schema(node)) => Some(node),
            _ => None,
        }
    }

    /// The old version of an item in a map list: the old item with the same keys. `None` for items of other list types.
    pub(crate) fn old_item<'a>(
        &self,
        item: &Value,
        position: usize,
        old: &'a Value,
    ) -> Option<&'a Value> {
        /// In longer lists, the old item is looked up only at the same position, to limit the cost.
        const SEARCH_LIMIT: usize = 512;
        if self.list_type != Some(ListType::Map) {
            return None;
        }
        let is_same = |before: &&Value| {
            let mut keys = self.map_keys.iter();
            keys.all(|key| before.get(key) == item.get(key))
        };
        let old = old.as_array()?;
        let there = old.get(position).filter(is_same);
        there.or_else(|| old.iter().take(SEARCH_LIMIT).find(is_same))
    }

    /// The schema of a member: its own, or that of `additionalProperties`.
    pub(crate) fn member(&self, name: &str) -> Option<&Node> {
        self.properties
            .get(name)
            .or_else(|| self.additional_schema())
    }
}

/// Whether a text matches a named string format. Unknown formats accept any text.
pub(crate) fn accepts_format(name: &str, text: &str) -> bool {
    formats::Format::from_name(name).is_none_or(|format| format.accepts(text))
}

#[cfg(test)]
mod tests;

//! Structural schemas: a CRD's `openAPIV3Schema`, compiled once and then applied to every object that is written.
//!
//! The order in which a server applies one is [`Schema::prune`], [`Schema::default`], [`Schema::validate`]. Object
//! metadata is not described by these schemas and is left alone by all of them.

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

/// A compiled schema of one version of one kind.
#[derive(Debug, Clone)]
pub struct Schema {
    pub(crate) root: Node,
    rules: Option<RuleTree>,
}

/// The JSON type a schema asks for.
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

/// One level of a schema. Nested value validations (`allOf` and its kin) are nodes too, without structure of their own.
#[derive(Debug, Clone, Default)]
#[expect(
    clippy::struct_excessive_bools,
    reason = "the vocabulary of the schema language is flags"
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
    /// The properties that have a default, so that defaulting need not visit the others.
    pub(crate) defaulted: Vec<String>,
    pub(crate) checks: Option<Box<Checks>>,
    pub(crate) rules: Vec<RuleSource>,
}

/// `additionalProperties`: allowed or forbidden, perhaps with a schema.
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

/// One entry of `x-kubernetes-validations`, as written.
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
    /// Compiles `openAPIV3Schema`. `path` names the schema in the errors, such as
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

    /// Fills in defaults, deeply, and drops nulls where null is not allowed.
    pub fn default(&self, object: &mut Value) {
        default::apply(object, &self.root);
    }

    /// Removes what the schema does not describe.
    pub fn prune(&self, object: &mut Value) {
        prune::prune(object, &self.root, None);
    }

    /// Removes what the schema does not describe and names it, sorted: `spec.containers[0].imagee`.
    pub fn prune_reporting(&self, object: &mut Value) -> Vec<String> {
        let mut unknown = Vec::new();
        prune::prune(object, &self.root, Some(&mut unknown));
        unknown.sort_unstable();
        unknown
    }

    /// Everything that is wrong with the object's values, without `x-kubernetes-validations`.
    pub fn validate(&self, object: &Value) -> Vec<FieldError> {
        let mut errors = Vec::new();
        validate::validate_resource(object, None, &self.root, &mut errors);
        errors
    }

    /// Everything that is wrong with the values that the change from `old` to `new` touches: what an older schema let in may stay.
    pub fn validate_update(&self, new: &Value, old: &Value) -> Vec<FieldError> {
        let mut errors = Vec::new();
        validate::validate_resource(new, Some(old), &self.root, &mut errors);
        errors
    }

    /// Runs the schema's `x-kubernetes-validations` on the change from `old` (absent on creation) to `new`, which must
    /// have passed [`Schema::validate`].
    pub fn validate_rules(&self, new: &Value, old: Option<&Value>) -> Vec<FieldError> {
        match &self.rules {
            Some(rules) => rules.validate(&self.root, new, old),
            None => Vec::new(),
        }
    }

    /// The root of the compiled tree, for those who derive other things from it.
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

    /// What an item of a map list was before: the old item with the same keys. Items of other lists have no past.
    pub(crate) fn item_before<'a>(
        &self,
        item: &Value,
        position: usize,
        old: &'a Value,
    ) -> Option<&'a Value> {
        /// Beyond this, an item is looked for only where it was, so that long lists stay cheap.
        const SEARCHED: usize = 512;
        if self.list_type != Some(ListType::Map) {
            return None;
        }
        let is_same = |before: &&Value| {
            let mut keys = self.map_keys.iter();
            keys.all(|key| before.get(key) == item.get(key))
        };
        let old = old.as_array()?;
        let there = old.get(position).filter(is_same);
        there.or_else(|| old.iter().take(SEARCHED).find(is_same))
    }

    /// The schema of a member: its own, or that of all the unnamed ones.
    pub(crate) fn member(&self, name: &str) -> Option<&Node> {
        self.properties
            .get(name)
            .or_else(|| self.additional_schema())
    }
}

/// Whether text has a named string format; an unknown format takes anything.
pub(crate) fn accepts_format(name: &str, text: &str) -> bool {
    formats::Format::from_name(name).is_none_or(|format| format.accepts(text))
}

#[cfg(test)]
mod tests;

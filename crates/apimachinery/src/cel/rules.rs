//! Compiles the CEL rules of a schema and evaluates them for an object and its old version.

use std::collections::BTreeMap;

use serde_json::Value as Json;

use super::ast::Expr;
use super::check;
use super::eval::{Budget, Error, Scope, eval};
use super::parse;
use super::value::Value;
use crate::field::{ErrorKind, FieldError, Path};
use crate::schema::{Node, RuleSource};

/// kube-apiserver's cost limit for one evaluation: about 0.1 seconds.
const RULE_LIMIT: u64 = 1_000_000;
/// kube-apiserver's cost limit for all rules of an object: about one second.
const OBJECT_LIMIT: u64 = 10_000_000;
const MAX_MESSAGE: usize = 5 * 1024;

/// The rules of a schema. It contains only the branches that have rules.
#[derive(Debug, Clone, Default)]
pub(crate) struct RuleTree {
    rules: Vec<Rule>,
    properties: BTreeMap<String, RuleTree>,
    additional: Option<Box<RuleTree>>,
    items: Option<Box<RuleTree>>,
}

#[derive(Debug, Clone)]
struct Rule {
    program: Expr,
    message_program: Option<Expr>,
    /// Whether this is a transition rule, which compares with the old value and is skipped without one.
    uses_old_self: bool,
    optional_old_self: bool,
    reason: ErrorKind,
    message: String,
    /// The name of the rule in errors: its message, or its source if it has none.
    name: String,
    field_path: Vec<String>,
}

impl RuleTree {
    /// Compiles the rules of a schema. Returns `None` if it has none.
    pub fn compile(
        node: &Node,
        path: &str,
        is_root: bool,
        errors: &mut Vec<FieldError>,
    ) -> Option<Self> {
        let mut tree = Self::default();
        for (position, source) in node.rules.iter().enumerate() {
            let at = format!("{path}.x-kubernetes-validations[{position}]");
            if let Some(rule) = compile_rule(source, node, is_root, &at, errors) {
                tree.rules.push(rule);
            }
        }
        for (name, property) in &node.properties {
            let child = Self::compile(
                property,
                &format!("{path}.properties[{name}]"),
                false,
                errors,
            );
            if let Some(child) = child {
                tree.properties.insert(name.clone(), child);
            }
        }
        let boxed = |child: Option<&Node>, name: &str, errors: &mut Vec<FieldError>| {
            child
                .and_then(|child| Self::compile(child, &format!("{path}.{name}"), false, errors))
                .map(Box::new)
        };
        tree.additional = boxed(node.additional_schema(), "additionalProperties", errors);
        tree.items = boxed(node.items.as_deref(), "items", errors);
        let is_empty = tree.rules.is_empty()
            && tree.properties.is_empty()
            && tree.additional.is_none()
            && tree.items.is_none();
        (!is_empty).then_some(tree)
    }

    /// Evaluates all rules that apply to the change from `old` (`None` on creation) to `new`.
    pub fn validate(&self, node: &Node, new: &Json, old: Option<&Json>) -> Vec<FieldError> {
        let mut run = Run {
            budget: OBJECT_LIMIT,
            errors: Vec::new(),
        };
        // An exhausted budget ends the walk. The error about it is already recorded.
        let _ = run.visit(
            self,
            node,
            Change {
                new,
                old,
                around: None,
            },
            &Path::ROOT,
        );
        run.errors
    }
}

fn compile_rule(
    source: &RuleSource,
    node: &Node,
    is_root: bool,
    at: &str,
    errors: &mut Vec<FieldError>,
) -> Option<Rule> {
    if source.rule.trim().is_empty() {
        errors.push(FieldError::required(
            format!("{at}.rule"),
            "rule is not specified",
        ));
        return None;
    }
    let optional_old_self = source.optional_old_self.unwrap_or(false);
    let mut compile = |text: &str, field: &str| -> Option<(Expr, check::Facts)> {
        let compiled = parse::parse(text).and_then(|expr| {
            let facts = check::check(&expr, node, is_root, optional_old_self)?;
            Ok((expr, facts))
        });
        compiled
            .map_err(|error| {
                let detail = format!("compilation failed: {}", error.located(text));
                errors.push(FieldError::invalid(format!("{at}.{field}"), text, detail));
            })
            .ok()
    };
    let program = compile(&source.rule, "rule");
    let message_program = match source.message_expression.trim() {
        "" => None,
        text => Some(compile(text, "messageExpression")?.0),
    };
    let (program, facts) = program?;
    if source.optional_old_self.is_some() && !facts.uses_old_self {
        errors.push(FieldError::invalid(
            format!("{at}.optionalOldSelf"),
            optional_old_self,
            "may not be set if oldSelf is not used in rule",
        ));
    }
    let reason = reason(source.reason.as_deref(), at, errors)?;
    let field_path = field_path(&source.field_path, node, at, errors)?;
    let message = source.message.trim();
    if source.message.contains('\n') {
        errors.push(FieldError::invalid(
            format!("{at}.message"),
            message,
            "message must not contain line breaks",
        ));
    }
    Some(Rule {
        program,
        message_program,
        uses_old_self: facts.uses_old_self,
        optional_old_self,
        reason,
        message: if message.is_empty() {
            format!("failed rule: {}", source.rule.trim())
        } else {
            message.to_owned()
        },
        name: if message.is_empty() {
            source.rule.trim().to_owned()
        } else {
            message.to_owned()
        },
        field_path,
    })
}

fn reason(reason: Option<&str>, at: &str, errors: &mut Vec<FieldError>) -> Option<ErrorKind> {
    const SUPPORTED: [&str; 4] = [
        "FieldValueForbidden",
        "FieldValueInvalid",
        "FieldValueRequired",
        "FieldValueDuplicate",
    ];
    Some(match reason {
        None | Some("FieldValueInvalid") => ErrorKind::Invalid,
        Some("FieldValueForbidden") => ErrorKind::Forbidden,
        Some("FieldValueRequired") => ErrorKind::Required,
        Some("FieldValueDuplicate") => ErrorKind::Duplicate,
        Some(other) => {
            errors.push(FieldError::not_supported(
                format!("{at}.reason"),
                other,
                &SUPPORTED,
            ));
            return None;
        }
    })
}

/// Parses the `fieldPath` of a rule: `.spec.name` and `.map['key']`. Every step must exist in the schema.
fn field_path(
    text: &str,
    node: &Node,
    at: &str,
    errors: &mut Vec<FieldError>,
) -> Option<Vec<String>> {
    let mut segments = Vec::new();
    let mut rest = text.trim();
    let mut current = Some(node);
    let mut problem = None;
    while !rest.is_empty() {
        let name;
        if let Some(after) = rest.strip_prefix('.') {
            let end = after.find(['.', '[']).unwrap_or(after.len());
            (name, rest) = (after[..end].to_owned(), &after[end..]);
        } else if let Some((quoted, after)) = rest
            .strip_prefix("['")
            .and_then(|after| after.split_once("']"))
        {
            (name, rest) = (quoted.replace("\\'", "'"), after);
        } else {
            problem = Some(format!("expected [ or . but got: {rest}"));
            break;
        }
        current = current.and_then(|node| node.member(&name));
        if current.is_none() || name.is_empty() {
            problem = Some("does not refer to a valid field".to_owned());
            break;
        }
        segments.push(name);
    }
    match problem {
        None => Some(segments),
        Some(problem) => {
            errors.push(FieldError::invalid(
                format!("{at}.fieldPath"),
                text,
                format!("fieldPath must be a valid path: {problem}"),
            ));
            None
        }
    }
}

/// A value and its old version.
#[derive(Clone, Copy)]
struct Change<'a> {
    new: &'a Json,
    /// `None` on creation, and for values that cannot be matched with an old value.
    old: Option<&'a Json>,
    /// The nearest enclosing value whose old version is known.
    around: Option<(&'a Json, &'a Json)>,
}

impl<'a> Change<'a> {
    fn within(self, new: &'a Json, old: Option<&'a Json>) -> Self {
        Self {
            new,
            old,
            around: self.known(),
        }
    }

    fn known(self) -> Option<(&'a Json, &'a Json)> {
        self.old.map(|old| (self.new, old)).or(self.around)
    }

    /// Whether an update does not change the value.
    fn is_unchanged(self) -> bool {
        self.known().is_some_and(|(new, old)| new == old)
    }
}

struct Run {
    budget: u64,
    errors: Vec<FieldError>,
}

/// The error for an exhausted cost budget.
struct Exhausted;

impl Run {
    fn visit(
        &mut self,
        tree: &RuleTree,
        node: &Node,
        mut change: Change<'_>,
        path: &Path<'_>,
    ) -> Result<(), Exhausted> {
        if change.new.is_null() {
            return Ok(());
        }
        change.old = change.old.filter(|old| !old.is_null());
        for rule in &tree.rules {
            self.rule(rule, node, change, path)?;
        }
        let old = change.old;
        match change.new {
            Json::Object(members) => {
                for (name, member) in members {
                    let branch = tree.properties.get(name).or(tree.additional.as_deref());
                    let (Some(branch), Some(schema)) = (branch, node.member(name)) else {
                        continue;
                    };
                    let before = old.and_then(|old| old.get(name));
                    let at = if node.properties.contains_key(name) {
                        path.child(name)
                    } else {
                        path.key(name)
                    };
                    self.visit(branch, schema, change.within(member, before), &at)?;
                }
            }
            Json::Array(items) => {
                let (Some(branch), Some(schema)) = (&tree.items, &node.items) else {
                    return Ok(());
                };
                // Each lookup of an old item costs as many comparisons as the old list has items.
                let past = old.and_then(Json::as_array).map_or(0, Vec::len) as u64 / 8;
                for (position, item) in items.iter().enumerate() {
                    self.budget = self.budget.saturating_sub(past);
                    let before = old.and_then(|old| node.old_item(item, position, old));
                    let change = change.within(item, before);
                    self.visit(branch, schema, change, &path.index(position))?;
                }
            }
            _ => {}
        }
        Ok(())
    }

    fn rule(
        &mut self,
        rule: &Rule,
        node: &Node,
        change: Change<'_>,
        path: &Path<'_>,
    ) -> Result<(), Exhausted> {
        let Change { new, old, .. } = change;
        if rule.uses_old_self && old.is_none() && !rule.optional_old_self {
            return Ok(());
        }
        let kind = node.kind().map_or("", |kind| kind.name());
        let invalid = |detail: String| FieldError::invalid(path, kind, detail);
        match self.evaluate(&rule.program, rule, node, new, old) {
            Ok(Value::Bool(true)) => return Ok(()),
            Err(Error::CostExceeded) if self.budget == 0 => {
                self.errors.push(invalid(
                    "validation failed due to running out of cost budget, no further validation rules will be run".to_owned(),
                ));
                return Err(Exhausted);
            }
            Err(error @ Error::CostExceeded) => {
                self.errors.push(invalid(format!(
                    "'{error}': no further validation rules will be run due to call cost exceeds limit for rule: {}",
                    rule.name
                )));
                return Err(Exhausted);
            }
            // Validation ratcheting: unchanged values that an older schema accepted stay valid. Only transition rules apply to
            // them.
            _ if !rule.uses_old_self && change.is_unchanged() => return Ok(()),
            Ok(_) => {}
            Err(error @ Error::NoSuchOverload) => {
                self.errors.push(invalid(format!(
                    "'{error}': call arguments did not match a supported operator, function or macro signature for rule: {}",
                    rule.name
                )));
                return Ok(());
            }
            Err(error) => {
                self.errors
                    .push(invalid(format!("{error} evaluating rule: {}", rule.name)));
                return Ok(());
            }
        }
        let message = self.message(rule, node, new, old);
        let mut field = path.to_string();
        for segment in &rule.field_path {
            field = if field == "<nil>" {
                segment.clone()
            } else {
                format!("{field}.{segment}")
            };
        }
        self.errors.push(FieldError::new(
            rule.reason,
            field,
            Some(Json::from(kind)),
            if rule.reason == ErrorKind::Duplicate {
                String::new()
            } else {
                message
            },
        ));
        Ok(())
    }

    fn message(&mut self, rule: &Rule, node: &Node, new: &Json, old: Option<&Json>) -> String {
        let computed = rule.message_program.as_ref().and_then(|program| {
            match self.evaluate(program, rule, node, new, old) {
                Ok(Value::String(text)) => Some(text.trim().to_owned()),
                _ => None,
            }
        });
        computed
            .filter(|text| !text.is_empty() && text.len() <= MAX_MESSAGE && !text.contains('\n'))
            .unwrap_or_else(|| rule.message.clone())
    }

    fn evaluate<'a>(
        &mut self,
        program: &'a Expr,
        rule: &Rule,
        node: &'a Node,
        new: &'a Json,
        old: Option<&'a Json>,
    ) -> Result<Value<'a>, Error> {
        let limit = RULE_LIMIT.min(self.budget);
        let mut budget = Budget::new(limit);
        let outer = Scope {
            parent: None,
            name: "self",
            value: Value::from_json(new, Some(node)),
        };
        let before = old.map(|old| Value::from_json(old, Some(node)));
        let old_value = match (rule.optional_old_self, before) {
            (true, Some(before)) => Value::some(before),
            (true, None) => Value::Optional(None),
            (false, before) => before.unwrap_or(Value::Null),
        };
        let scope = Scope {
            parent: Some(&outer),
            name: "oldSelf",
            value: old_value,
        };
        let result = eval(program, &scope, &mut budget);
        self.budget -= limit - budget.remaining();
        result
    }
}

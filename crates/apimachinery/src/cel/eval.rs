//! Evaluates expressions and charges every step to a cost budget. An expression that exceeds the budget fails.
//!
//! Costs have the order of magnitude of Kubernetes' costs (a million units are about 0.1 seconds), but do not follow its exact
//! model.

use super::ast::{Expr, Field, Literal, Node};
use super::comprehension::comprehend;
use super::functions;
use super::operators::binary;
use super::value::{Map, Value, equal};

/// An evaluation error.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub(super) enum Error {
    #[error("no such key: {0}")]
    NoSuchKey(String),
    #[error("no such overload")]
    NoSuchOverload,
    #[error("index out of bounds: {0}")]
    IndexOutOfBounds(i64),
    #[error("integer overflow")]
    Overflow,
    #[error("division by zero")]
    DivisionByZero,
    #[error("modulus by zero")]
    ModulusByZero,
    #[error("operation cancelled: actual cost limit exceeded")]
    CostExceeded,
    #[error("{0}")]
    Other(String),
}

pub(super) type Result<T> = std::result::Result<T, Error>;

/// The remaining cost budget of an evaluation.
#[derive(Debug)]
pub(super) struct Budget {
    remaining: u64,
}

impl Budget {
    pub fn new(limit: u64) -> Self {
        Self { remaining: limit }
    }

    pub fn remaining(&self) -> u64 {
        self.remaining
    }

    pub fn charge(&mut self, cost: u64) -> Result<()> {
        if let Some(remaining) = self.remaining.checked_sub(cost) {
            self.remaining = remaining;
            Ok(())
        } else {
            self.remaining = 0;
            Err(Error::CostExceeded)
        }
    }
}

/// The variables in scope, innermost first.
pub(super) struct Scope<'s, 'a> {
    pub parent: Option<&'s Scope<'s, 'a>>,
    pub name: &'s str,
    pub value: Value<'a>,
}

impl<'a> Scope<'_, 'a> {
    fn lookup(&self, name: &str) -> Option<&Value<'a>> {
        let mut scope = self;
        loop {
            if scope.name == name {
                return Some(&scope.value);
            }
            scope = scope.parent?;
        }
    }

    pub fn with<'s>(&'s self, name: &'s str, value: Value<'a>) -> Scope<'s, 'a> {
        Scope {
            parent: Some(self),
            name,
            value,
        }
    }
}

pub(super) fn eval<'a>(
    expr: &'a Expr,
    scope: &Scope<'_, 'a>,
    budget: &mut Budget,
) -> Result<Value<'a>> {
    budget.charge(1)?;
    match &expr.node {
        Node::Literal(literal) => Ok(literal_value(literal)),
        Node::Ident(name) => scope
            .lookup(name)
            .cloned()
            .or_else(|| type_value(name))
            .ok_or_else(|| Error::Other(format!("no such attribute: {name}"))),
        Node::Select {
            operand,
            field,
            optional,
        } => select(operand, field, *optional, scope, budget),
        Node::Has { operand, field } => {
            let operand = unwrap_optional(eval(operand, scope, budget)?);
            match operand {
                Some(Value::Map(map)) => Ok(Value::Bool(
                    map.field(&field.written, &field.property).is_some(),
                )),
                None => Ok(Value::Bool(false)),
                Some(_) => Err(Error::NoSuchOverload),
            }
        }
        Node::Index {
            operand,
            index,
            optional,
        } => {
            let operand = eval(operand, scope, budget)?;
            let index = eval(index, scope, budget)?;
            indexed(operand, &index, *optional, budget)
        }
        Node::Call {
            function,
            target,
            arguments,
            regex,
        } => {
            let target = match target {
                Some(target) => Some(eval(target, scope, budget)?),
                None => None,
            };
            let mut values = Vec::with_capacity(arguments.len());
            for argument in arguments {
                values.push(eval(argument, scope, budget)?);
            }
            functions::call(function, target, values, regex.as_ref(), budget)
        }
        Node::List(items) => list(items, scope, budget),
        Node::Map(entries) => map(entries, scope, budget),
        Node::Not(operand) => match eval(operand, scope, budget)? {
            Value::Bool(boolean) => Ok(Value::Bool(!boolean)),
            _ => Err(Error::NoSuchOverload),
        },
        Node::Negate(operand) => match eval(operand, scope, budget)? {
            Value::Int(number) => number.checked_neg().map(Value::Int).ok_or(Error::Overflow),
            Value::Double(number) => Ok(Value::Double(-number)),
            Value::Duration(nanos) => nanos
                .checked_neg()
                .map(Value::Duration)
                .ok_or(Error::Overflow),
            _ => Err(Error::NoSuchOverload),
        },
        Node::Binary(operator, left, right) => {
            let left = eval(left, scope, budget)?;
            let right = eval(right, scope, budget)?;
            binary(*operator, left, right, budget)
        }
        Node::And(terms) => logic(terms, false, scope, budget),
        Node::Or(terms) => logic(terms, true, scope, budget),
        Node::Conditional(parts) => match eval(&parts[0], scope, budget)? {
            Value::Bool(true) => eval(&parts[1], scope, budget),
            Value::Bool(false) => eval(&parts[2], scope, budget),
            _ => Err(Error::NoSuchOverload),
        },
        Node::Comprehension(comprehension) => comprehend(comprehension, scope, budget),
        Node::Bind {
            variable,
            value,
            body,
        } => {
            let value = eval(value, scope, budget)?;
            eval(body, &scope.with(variable, value), budget)
        }
    }
}

fn literal_value(literal: &Literal) -> Value<'_> {
    match literal {
        Literal::Null => Value::Null,
        Literal::Bool(boolean) => Value::Bool(*boolean),
        Literal::Int(number) => Value::Int(*number),
        Literal::Uint(number) => Value::Uint(*number),
        Literal::Double(number) => Value::Double(*number),
        Literal::String(text) => Value::text(text.as_str()),
        Literal::Bytes(bytes) => Value::Bytes(bytes.as_slice().into()),
    }
}

pub(super) const TYPES: [&str; 9] = [
    "bool",
    "int",
    "uint",
    "double",
    "string",
    "bytes",
    "list",
    "map",
    "null_type",
];

fn type_value<'a>(name: &str) -> Option<Value<'a>> {
    TYPES
        .iter()
        .find(|known| **known == name)
        .map(|known| Value::Type(known))
}

/// The value inside an optional, or the value itself. Returns `None` for an empty optional.
fn unwrap_optional(value: Value<'_>) -> Option<Value<'_>> {
    match value {
        Value::Optional(inner) => inner.map(|inner| (*inner).clone()),
        other => Some(other),
    }
}

fn select<'a>(
    operand: &'a Expr,
    field: &Field,
    optional: bool,
    scope: &Scope<'_, 'a>,
    budget: &mut Budget,
) -> Result<Value<'a>> {
    let operand = eval(operand, scope, budget)?;
    // The result of a selection on an optional is an optional.
    let optional = optional || matches!(operand, Value::Optional(_));
    let Some(operand) = unwrap_optional(operand) else {
        return Ok(Value::Optional(None));
    };
    let Value::Map(map) = operand else {
        return Err(Error::NoSuchOverload);
    };
    match (map.field(&field.written, &field.property), optional) {
        (Some(value), false) => Ok(value),
        (Some(value), true) => Ok(Value::some(value)),
        (None, true) => Ok(Value::Optional(None)),
        (None, false) => Err(Error::NoSuchKey(field.written.clone())),
    }
}

fn indexed<'a>(
    operand: Value<'a>,
    index: &Value<'a>,
    optional: bool,
    budget: &mut Budget,
) -> Result<Value<'a>> {
    let optional = optional || matches!(operand, Value::Optional(_));
    let Some(operand) = unwrap_optional(operand) else {
        return Ok(Value::Optional(None));
    };
    let found = match (&operand, index) {
        (Value::List(list), Value::Int(_) | Value::Uint(_) | Value::Double(_)) => {
            let position = match index {
                Value::Int(number) => usize::try_from(*number).ok(),
                Value::Uint(number) => usize::try_from(*number).ok(),
                _ => None,
            };
            let shown = if let Value::Int(number) = index {
                *number
            } else {
                -1
            };
            position
                .and_then(|position| list.get(position))
                .ok_or(Error::IndexOutOfBounds(shown))
        }
        (Value::Map(map), key) => map
            .get(key, budget)?
            .ok_or_else(|| Error::NoSuchKey(functions::print(key))),
        _ => return Err(Error::NoSuchOverload),
    };
    match (found, optional) {
        (Ok(value), true) => Ok(Value::some(value)),
        (Err(_), true) => Ok(Value::Optional(None)),
        (found, false) => found,
    }
}

fn list<'a>(
    items: &'a [(Expr, bool)],
    scope: &Scope<'_, 'a>,
    budget: &mut Budget,
) -> Result<Value<'a>> {
    let mut values = Vec::with_capacity(items.len());
    for (item, optional) in items {
        match (eval(item, scope, budget)?, optional) {
            (Value::Optional(None), true) => {}
            (Value::Optional(Some(value)), true) => values.push((*value).clone()),
            (value, _) => values.push(value),
        }
    }
    Ok(Value::list(values))
}

fn map<'a>(
    entries: &'a [(Expr, Expr, bool)],
    scope: &Scope<'_, 'a>,
    budget: &mut Budget,
) -> Result<Value<'a>> {
    let mut values: Vec<(Value<'a>, Value<'a>)> = Vec::with_capacity(entries.len());
    for (key, value, optional) in entries {
        let key = eval(key, scope, budget)?;
        let value = match (eval(value, scope, budget)?, optional) {
            (Value::Optional(None), true) => continue,
            (Value::Optional(Some(value)), true) => (*value).clone(),
            (value, _) => value,
        };
        for (existing, _) in &values {
            if equal(existing, &key, budget)? {
                return Err(Error::Other("Failed with repeated key".to_owned()));
            }
        }
        values.push((key, value));
    }
    Ok(Value::Map(Map::Owned(values.into())))
}

/// `&&` and `||`: a value that decides the result wins over an error on the other side.
fn logic<'a>(
    terms: &'a [Expr],
    deciding: bool,
    scope: &Scope<'_, 'a>,
    budget: &mut Budget,
) -> Result<Value<'a>> {
    let mut first_error = None;
    for term in terms {
        match eval(term, scope, budget) {
            Ok(Value::Bool(boolean)) if boolean == deciding => return Ok(Value::Bool(deciding)),
            Ok(Value::Bool(_)) => {}
            Ok(_) => first_error = first_error.or(Some(Error::NoSuchOverload)),
            Err(Error::CostExceeded) => return Err(Error::CostExceeded),
            Err(error) => first_error = first_error.or(Some(error)),
        }
    }
    first_error.map_or(Ok(Value::Bool(!deciding)), Err)
}

//! Functions on sizes, lists and sets, and arithmetic over several values.

use std::cmp::Ordering;

use super::super::eval::{Budget, Error, Result};
use super::super::operators::contains;
use super::super::value::{List, Value, compare, equal};

pub(super) fn size<'a>(value: &Value<'a>, budget: &mut Budget) -> Result<Value<'a>> {
    let size = match value {
        Value::String(text) => {
            budget.charge(text.len() as u64 / 10)?;
            text.chars().count()
        }
        Value::Bytes(bytes) => bytes.len(),
        Value::List(list) => list.len(),
        Value::Map(map) => map.len(),
        _ => return Err(Error::NoSuchOverload),
    };
    i64::try_from(size)
        .map(Value::Int)
        .map_err(|_| Error::Overflow)
}

pub(super) fn method<'a>(
    list: &List<'a>,
    name: &str,
    arguments: &[Value<'a>],
    budget: &mut Budget,
) -> Result<Value<'a>> {
    budget.charge(list.len() as u64)?;
    let items: Vec<Value<'a>> = list.iter().collect();
    match (name, arguments) {
        ("join", [] | [Value::String(_)]) => {
            let separator = match arguments {
                [Value::String(separator)] => separator.as_ref(),
                _ => "",
            };
            join(&items, separator, budget)
        }
        ("isSorted", []) => {
            for pair in items.windows(2) {
                match compare(&pair[0], &pair[1]) {
                    Some(Ordering::Greater) => return Ok(Value::Bool(false)),
                    Some(_) => {}
                    None => return Err(Error::NoSuchOverload),
                }
            }
            Ok(Value::Bool(true))
        }
        ("sum", []) => sum(&items),
        ("min" | "max", []) => extreme(&items, name == "max", budget).map_err(|error| {
            if items.is_empty() {
                Error::Other(format!("{name} called on empty list"))
            } else {
                error
            }
        }),
        ("indexOf" | "lastIndexOf", [wanted]) => {
            let mut position = -1;
            for (index, item) in items.iter().enumerate() {
                if equal(item, wanted, budget)? {
                    position = i64::try_from(index).unwrap_or(-1);
                    if name == "indexOf" {
                        break;
                    }
                }
            }
            Ok(Value::Int(position))
        }
        ("first", []) => Ok(Value::Optional(items.into_iter().next().map(Into::into))),
        ("last", []) => Ok(Value::Optional(
            items.into_iter().next_back().map(Into::into),
        )),
        ("reverse", []) => Ok(Value::list(items.into_iter().rev().collect())),
        ("sort", []) => sort(items, budget),
        ("distinct", []) => {
            let mut unique: Vec<Value<'a>> = Vec::new();
            for item in items {
                if !contains(&Value::list(unique.clone()), &item, budget)? {
                    budget.charge(unique.len() as u64)?;
                    unique.push(item);
                }
            }
            Ok(Value::list(unique))
        }
        ("slice", [Value::Int(start), Value::Int(end)]) => {
            let position = |index: i64| {
                usize::try_from(index)
                    .ok()
                    .filter(|index| *index <= items.len())
                    .ok_or(Error::IndexOutOfBounds(index))
            };
            let (from, to) = (position(*start)?, position(*end)?);
            items
                .get(from..to)
                .map(|part| Value::list(part.to_vec()))
                .ok_or(Error::IndexOutOfBounds(*end))
        }
        ("flatten", [] | [Value::Int(_)]) => {
            let depth = match arguments {
                [Value::Int(depth)] if *depth < 0 => {
                    return Err(Error::Other("level must be non-negative".to_owned()));
                }
                [Value::Int(depth)] => *depth,
                _ => 1,
            };
            let mut flat = Vec::new();
            flatten(items, depth, &mut flat, budget)?;
            Ok(Value::list(flat))
        }
        _ => Err(Error::NoSuchOverload),
    }
}

fn join<'a>(items: &[Value<'a>], separator: &str, budget: &mut Budget) -> Result<Value<'a>> {
    let mut joined = String::new();
    for (position, item) in items.iter().enumerate() {
        let Value::String(text) = item else {
            return Err(Error::NoSuchOverload);
        };
        budget.charge((text.len() + separator.len()) as u64 / 10)?;
        if position > 0 {
            joined.push_str(separator);
        }
        joined.push_str(text);
    }
    Ok(Value::text(joined))
}

fn sum<'a>(items: &[Value<'a>]) -> Result<Value<'a>> {
    let mut total = match items.first() {
        None => return Ok(Value::Int(0)),
        Some(first) => first.clone(),
    };
    for item in &items[1..] {
        total = match (&total, item) {
            (Value::Int(left), Value::Int(right)) => {
                Value::Int(left.checked_add(*right).ok_or(Error::Overflow)?)
            }
            (Value::Uint(left), Value::Uint(right)) => {
                Value::Uint(left.checked_add(*right).ok_or(Error::Overflow)?)
            }
            (Value::Double(left), Value::Double(right)) => Value::Double(left + right),
            (Value::Duration(left), Value::Duration(right)) => {
                Value::Duration(left.checked_add(*right).ok_or(Error::Overflow)?)
            }
            _ => return Err(Error::NoSuchOverload),
        };
    }
    match total {
        Value::Int(_) | Value::Uint(_) | Value::Double(_) | Value::Duration(_) => Ok(total),
        _ => Err(Error::NoSuchOverload),
    }
}

fn extreme<'a>(items: &[Value<'a>], largest: bool, budget: &mut Budget) -> Result<Value<'a>> {
    let mut best: Option<&Value<'a>> = None;
    for item in items {
        budget.charge(1)?;
        let better = match best {
            None => true,
            Some(best) => match compare(item, best) {
                Some(Ordering::Greater) => largest,
                Some(Ordering::Less) => !largest,
                Some(Ordering::Equal) => false,
                None => return Err(Error::NoSuchOverload),
            },
        };
        if better {
            best = Some(item);
        }
    }
    best.cloned().ok_or(Error::NoSuchOverload)
}

fn sort<'a>(mut items: Vec<Value<'a>>, budget: &mut Budget) -> Result<Value<'a>> {
    budget.charge(items.len() as u64 * 4)?;
    let mut comparable = true;
    items.sort_by(|left, right| {
        compare(left, right).unwrap_or_else(|| {
            comparable = false;
            Ordering::Equal
        })
    });
    if comparable {
        Ok(Value::list(items))
    } else {
        Err(Error::NoSuchOverload)
    }
}

fn flatten<'a>(
    items: Vec<Value<'a>>,
    depth: i64,
    flat: &mut Vec<Value<'a>>,
    budget: &mut Budget,
) -> Result<()> {
    for item in items {
        budget.charge(1)?;
        match item {
            Value::List(inner) if depth > 0 => {
                flatten(inner.iter().collect(), depth - 1, flat, budget)?;
            }
            other => flat.push(other),
        }
    }
    Ok(())
}

pub(super) fn sets<'a>(
    function: &str,
    arguments: &[Value<'a>],
    budget: &mut Budget,
) -> Result<Value<'a>> {
    let [
        left @ Value::List(left_items),
        right @ Value::List(right_items),
    ] = arguments
    else {
        return Err(Error::NoSuchOverload);
    };
    let mut all_in = |items: &List<'a>, container: &Value<'a>| -> Result<bool> {
        for item in items.iter() {
            if !contains(container, &item, budget)? {
                return Ok(false);
            }
        }
        Ok(true)
    };
    let result = match function {
        "contains" => all_in(right_items, left)?,
        "equivalent" => all_in(right_items, left)? && all_in(left_items, right)?,
        _ => {
            for item in left_items.iter() {
                if contains(right, &item, budget)? {
                    return Ok(Value::Bool(true));
                }
            }
            false
        }
    };
    Ok(Value::Bool(result))
}

pub(super) fn math<'a>(
    function: &str,
    arguments: &[Value<'a>],
    budget: &mut Budget,
) -> Result<Value<'a>> {
    match (function, arguments) {
        ("greatest" | "least", [Value::List(list)]) => {
            let items: Vec<Value<'a>> = list.iter().collect();
            extreme(&items, function == "greatest", budget)
        }
        ("greatest" | "least", items) => extreme(items, function == "greatest", budget),
        ("abs", [Value::Int(number)]) => {
            number.checked_abs().map(Value::Int).ok_or(Error::Overflow)
        }
        ("abs", [Value::Double(number)]) => Ok(Value::Double(number.abs())),
        ("abs", [Value::Uint(number)]) => Ok(Value::Uint(*number)),
        ("sign", [Value::Int(number)]) => Ok(Value::Int(number.signum())),
        ("sign", [Value::Double(number)]) if *number == 0.0 => Ok(Value::Double(0.0)),
        ("sign", [Value::Double(number)]) => Ok(Value::Double(number.signum())),
        ("ceil", [Value::Double(number)]) => Ok(Value::Double(number.ceil())),
        ("floor", [Value::Double(number)]) => Ok(Value::Double(number.floor())),
        ("round", [Value::Double(number)]) => Ok(Value::Double(number.round())),
        ("trunc", [Value::Double(number)]) => Ok(Value::Double(number.trunc())),
        ("isNaN", [Value::Double(number)]) => Ok(Value::Bool(number.is_nan())),
        ("isInf", [Value::Double(number)]) => Ok(Value::Bool(number.is_infinite())),
        ("isFinite", [Value::Double(number)]) => Ok(Value::Bool(number.is_finite())),
        _ => Err(Error::NoSuchOverload),
    }
}

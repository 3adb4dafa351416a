//! Macros that iterate (comprehensions): `all`, `exists`, `map`, `filter` and others.

use super::ast::{Comprehension, Expr, Macro};
use super::eval::{Budget, Error, Result, Scope, eval};
use super::value::{List, Map, Value, compare};

/// The elements that a macro iterates over: pairs of index or key, and value. With one variable, a map gives its keys.
fn pairs<'a>(range: &Value<'a>, two_variables: bool) -> Result<Vec<(Value<'a>, Value<'a>)>> {
    match range {
        Value::List(list) => {
            let pair = |(position, value): (usize, Value<'a>)| {
                (
                    Value::Int(i64::try_from(position).unwrap_or(i64::MAX)),
                    value,
                )
            };
            Ok(list.iter().enumerate().map(pair).collect())
        }
        Value::Map(map) if two_variables => Ok(map.entries()),
        Value::Map(map) => Ok(map
            .entries()
            .into_iter()
            .map(|(key, _)| (Value::Null, key))
            .collect()),
        _ => Err(Error::NoSuchOverload),
    }
}

pub(super) fn comprehend<'a>(
    comprehension: &'a Comprehension,
    scope: &Scope<'_, 'a>,
    budget: &mut Budget,
) -> Result<Value<'a>> {
    let range = eval(&comprehension.range, scope, budget)?;
    if matches!(comprehension.kind, Macro::OptMap | Macro::OptFlatMap) {
        let Value::Optional(inner) = range else {
            return Err(Error::NoSuchOverload);
        };
        let Some(inner) = inner else {
            return Ok(Value::Optional(None));
        };
        let mapped = eval(
            &comprehension.body,
            &scope.with(&comprehension.variable, (*inner).clone()),
            budget,
        )?;
        return Ok(if comprehension.kind == Macro::OptMap {
            Value::some(mapped)
        } else {
            mapped
        });
    }
    let items = pairs(&range, comprehension.second.is_some())?;
    budget.charge(items.len() as u64)?;
    match comprehension.kind {
        Macro::All => quantified(comprehension, items, false, scope, budget),
        Macro::Exists => quantified(comprehension, items, true, scope, budget),
        Macro::ExistsOne => {
            let mut count = 0;
            for (key, value) in items {
                if is_true(&step(
                    comprehension,
                    &comprehension.body,
                    &key,
                    &value,
                    scope,
                    budget,
                )?)? {
                    count += 1;
                }
            }
            Ok(Value::Bool(count == 1))
        }
        Macro::SortBy => sorted_by(comprehension, items, scope, budget),
        _ => collected(comprehension, items, scope, budget),
    }
}

/// Evaluates an expression of the macro with its variables bound.
fn step<'a>(
    comprehension: &'a Comprehension,
    expr: &'a Expr,
    key: &Value<'a>,
    value: &Value<'a>,
    scope: &Scope<'_, 'a>,
    budget: &mut Budget,
) -> Result<Value<'a>> {
    match &comprehension.second {
        Some(second) => {
            let outer = scope.with(&comprehension.variable, key.clone());
            eval(expr, &outer.with(second, value.clone()), budget)
        }
        None => eval(
            expr,
            &scope.with(&comprehension.variable, value.clone()),
            budget,
        ),
    }
}

fn is_true(value: &Value<'_>) -> Result<bool> {
    match value {
        Value::Bool(boolean) => Ok(*boolean),
        _ => Err(Error::NoSuchOverload),
    }
}

fn quantified<'a>(
    comprehension: &'a Comprehension,
    items: Vec<(Value<'a>, Value<'a>)>,
    deciding: bool,
    scope: &Scope<'_, 'a>,
    budget: &mut Budget,
) -> Result<Value<'a>> {
    let mut first_error = None;
    for (key, value) in items {
        match step(
            comprehension,
            &comprehension.body,
            &key,
            &value,
            scope,
            budget,
        )
        .and_then(|value| is_true(&value))
        {
            Ok(boolean) if boolean == deciding => return Ok(Value::Bool(deciding)),
            Ok(_) => {}
            Err(Error::CostExceeded) => return Err(Error::CostExceeded),
            Err(error) => first_error = first_error.or(Some(error)),
        }
    }
    first_error.map_or(Ok(Value::Bool(!deciding)), Err)
}

fn collected<'a>(
    comprehension: &'a Comprehension,
    items: Vec<(Value<'a>, Value<'a>)>,
    scope: &Scope<'_, 'a>,
    budget: &mut Budget,
) -> Result<Value<'a>> {
    let mut values = Vec::new();
    for (key, value) in items {
        if let Some(filter) = &comprehension.filter
            && !is_true(&step(comprehension, filter, &key, &value, scope, budget)?)?
        {
            continue;
        }
        let result = step(
            comprehension,
            &comprehension.body,
            &key,
            &value,
            scope,
            budget,
        )?;
        if comprehension.kind != Macro::Filter {
            values.push((key, result));
        } else if is_true(&result)? {
            values.push((key, value));
        }
    }
    if comprehension.kind == Macro::TransformMap {
        return Ok(Value::Map(Map::Owned(values.into())));
    }
    Ok(Value::list(
        values.into_iter().map(|(_, value)| value).collect(),
    ))
}

fn sorted_by<'a>(
    comprehension: &'a Comprehension,
    items: Vec<(Value<'a>, Value<'a>)>,
    scope: &Scope<'_, 'a>,
    budget: &mut Budget,
) -> Result<Value<'a>> {
    let mut keyed = Vec::with_capacity(items.len());
    for (key, value) in items {
        let by = step(
            comprehension,
            &comprehension.body,
            &key,
            &value,
            scope,
            budget,
        )?;
        keyed.push((by, value));
    }
    budget.charge(keyed.len() as u64 * 4)?;
    let mut comparable = true;
    keyed.sort_by(|(left, _), (right, _)| {
        compare(left, right).unwrap_or_else(|| {
            comparable = false;
            std::cmp::Ordering::Equal
        })
    });
    if !comparable {
        return Err(Error::NoSuchOverload);
    }
    Ok(Value::List(List::Owned(
        keyed
            .into_iter()
            .map(|(_, value)| value)
            .collect::<Vec<_>>()
            .into(),
    )))
}

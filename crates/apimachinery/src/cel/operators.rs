//! Binary operators: comparison, membership and arithmetic.

use std::cmp::Ordering;

use super::ast::Operator;
use super::eval::{Budget, Error, Result};
use super::value::{Value, compare, equal};

pub(super) fn binary<'a>(
    operator: Operator,
    left: Value<'a>,
    right: Value<'a>,
    budget: &mut Budget,
) -> Result<Value<'a>> {
    let ordered = |accept: fn(Ordering) -> bool| match compare(&left, &right) {
        Some(ordering) => Ok(Value::Bool(accept(ordering))),
        // NaN is unordered, so every comparison with it is false.
        None if matches!(
            (&left, &right),
            (Value::Double(_), _) | (_, Value::Double(_))
        ) =>
        {
            Ok(Value::Bool(false))
        }
        None => Err(Error::NoSuchOverload),
    };
    match operator {
        Operator::Equal => equal(&left, &right, budget).map(Value::Bool),
        Operator::NotEqual => equal(&left, &right, budget).map(|same| Value::Bool(!same)),
        Operator::Less => ordered(Ordering::is_lt),
        Operator::LessOrEqual => ordered(Ordering::is_le),
        Operator::Greater => ordered(Ordering::is_gt),
        Operator::GreaterOrEqual => ordered(Ordering::is_ge),
        Operator::In => contains(&right, &left, budget).map(Value::Bool),
        _ => arithmetic(operator, left, right, budget),
    }
}

pub(super) fn contains<'a>(
    container: &Value<'a>,
    wanted: &Value<'a>,
    budget: &mut Budget,
) -> Result<bool> {
    match container {
        Value::List(list) => {
            for item in list.iter() {
                if equal(&item, wanted, budget)? {
                    return Ok(true);
                }
            }
            Ok(false)
        }
        Value::Map(map) => Ok(map.get(wanted, budget)?.is_some()),
        _ => Err(Error::NoSuchOverload),
    }
}

fn arithmetic<'a>(
    operator: Operator,
    left: Value<'a>,
    right: Value<'a>,
    budget: &mut Budget,
) -> Result<Value<'a>> {
    match (left, right) {
        (Value::Int(left), Value::Int(right)) => integers(operator, left, right),
        (Value::Uint(left), Value::Uint(right)) => {
            let result = match operator {
                Operator::Add => left.checked_add(right),
                Operator::Subtract => left.checked_sub(right),
                Operator::Multiply => left.checked_mul(right),
                Operator::Divide => {
                    return left
                        .checked_div(right)
                        .map(Value::Uint)
                        .ok_or(Error::DivisionByZero);
                }
                _ => {
                    return left
                        .checked_rem(right)
                        .map(Value::Uint)
                        .ok_or(Error::ModulusByZero);
                }
            };
            result.map(Value::Uint).ok_or(Error::Overflow)
        }
        (Value::Double(left), Value::Double(right)) => match operator {
            Operator::Add => Ok(Value::Double(left + right)),
            Operator::Subtract => Ok(Value::Double(left - right)),
            Operator::Multiply => Ok(Value::Double(left * right)),
            Operator::Divide => Ok(Value::Double(left / right)),
            _ => Err(Error::NoSuchOverload),
        },
        (Value::String(left), Value::String(right)) if operator == Operator::Add => {
            budget.charge((left.len() + right.len()) as u64 / 10)?;
            Ok(Value::text(left.into_owned() + &right))
        }
        (Value::Bytes(left), Value::Bytes(right)) if operator == Operator::Add => {
            budget.charge((left.len() + right.len()) as u64 / 10)?;
            Ok(Value::Bytes([&*left, &*right].concat().into()))
        }
        (Value::List(left), Value::List(right)) if operator == Operator::Add => {
            left.concat(&right, budget)
        }
        (left, right) => temporal(operator, &left, &right),
    }
}

fn integers<'a>(operator: Operator, left: i64, right: i64) -> Result<Value<'a>> {
    let result = match operator {
        Operator::Add => left.checked_add(right),
        Operator::Subtract => left.checked_sub(right),
        Operator::Multiply => left.checked_mul(right),
        Operator::Divide if right == 0 => return Err(Error::DivisionByZero),
        Operator::Divide => left.checked_div(right),
        _ if right == 0 => return Err(Error::ModulusByZero),
        _ => left.checked_rem(right),
    };
    result.map(Value::Int).ok_or(Error::Overflow)
}

fn temporal<'a>(operator: Operator, left: &Value<'a>, right: &Value<'a>) -> Result<Value<'a>> {
    let shifted = |time: &jiff::Timestamp, nanos: i64| {
        time.checked_add(jiff::SignedDuration::from_nanos(nanos))
            .map(Value::Timestamp)
            .map_err(|_| Error::Other("timestamp overflow".to_owned()))
    };
    match (operator, left, right) {
        (Operator::Add, Value::Timestamp(time), Value::Duration(nanos))
        | (Operator::Add, Value::Duration(nanos), Value::Timestamp(time)) => shifted(time, *nanos),
        (Operator::Subtract, Value::Timestamp(time), Value::Duration(nanos)) => {
            shifted(time, nanos.checked_neg().ok_or(Error::Overflow)?)
        }
        (Operator::Subtract, Value::Timestamp(left), Value::Timestamp(right)) => {
            let nanos = left.as_nanosecond() - right.as_nanosecond();
            i64::try_from(nanos)
                .map(Value::Duration)
                .map_err(|_| Error::Overflow)
        }
        (Operator::Add, Value::Duration(left), Value::Duration(right)) => left
            .checked_add(*right)
            .map(Value::Duration)
            .ok_or(Error::Overflow),
        (Operator::Subtract, Value::Duration(left), Value::Duration(right)) => left
            .checked_sub(*right)
            .map(Value::Duration)
            .ok_or(Error::Overflow),
        _ => Err(Error::NoSuchOverload),
    }
}

//! String methods: the standard ones, the strings extension, and Kubernetes' regular expressions.

use std::borrow::Cow;
use std::fmt::Write;

use regex::{Regex, RegexBuilder};

use super::super::eval::{Budget, Error, Result};
use super::super::parse::MAX_REGEX;
use super::super::value::Value;

pub(super) fn method<'a>(
    target: &Value<'a>,
    name: &str,
    arguments: &[Value<'a>],
    regex: Option<&Regex>,
    budget: &mut Budget,
) -> Result<Value<'a>> {
    let Value::String(text) = target else {
        return Err(Error::NoSuchOverload);
    };
    budget.charge(text.len() as u64 / 10)?;
    match (name, arguments) {
        ("contains", [Value::String(part)]) => Ok(Value::Bool(text.contains(part.as_ref()))),
        ("startsWith", [Value::String(part)]) => Ok(Value::Bool(text.starts_with(part.as_ref()))),
        ("endsWith", [Value::String(part)]) => Ok(Value::Bool(text.ends_with(part.as_ref()))),
        ("matches" | "find" | "findAll", [Value::String(pattern), rest @ ..]) => {
            regular(text, name, pattern, rest, regex, budget)
        }
        ("lowerAscii", []) => Ok(Value::text(text.to_ascii_lowercase())),
        ("upperAscii", []) => Ok(Value::text(text.to_ascii_uppercase())),
        ("trim", []) => Ok(Value::text(text.trim().to_owned())),
        ("reverse", []) => Ok(Value::text(text.chars().rev().collect::<String>())),
        ("charAt", [Value::Int(index)]) => {
            let position = usize::try_from(*index).map_err(|_| Error::IndexOutOfBounds(*index))?;
            match text.chars().nth(position) {
                Some(character) => Ok(Value::text(character.to_string())),
                None if position == text.chars().count() => Ok(Value::text("")),
                None => Err(Error::IndexOutOfBounds(*index)),
            }
        }
        ("indexOf" | "lastIndexOf", [Value::String(part), rest @ ..]) => {
            index_of(text, name, part, rest, budget)
        }
        ("replace", [Value::String(from), Value::String(to), rest @ ..]) => {
            replace(text, from, to, rest, budget)
        }
        ("split", [Value::String(separator), rest @ ..]) => split(text, separator, rest),
        ("substring", [Value::Int(start), rest @ ..]) => substring(text, *start, rest),
        ("format", [Value::List(values)]) => {
            let values: Vec<Value<'a>> = values.iter().collect();
            format(text, &values, budget)
        }
        _ => Err(Error::NoSuchOverload),
    }
}

fn regular<'a>(
    text: &Cow<'a, str>,
    name: &str,
    pattern: &str,
    rest: &[Value<'a>],
    precompiled: Option<&Regex>,
    budget: &mut Budget,
) -> Result<Value<'a>> {
    budget.charge((text.len() as u64 / 10 + 1) * (pattern.len() as u64 / 4 + 1))?;
    let compiled;
    let regex = if let Some(regex) = precompiled {
        regex
    } else {
        // Compiling a pattern costs far more than matching. Constant patterns are compiled once; others are charged for it.
        budget.charge(200 + pattern.len() as u64 * 20)?;
        compiled = RegexBuilder::new(pattern)
            .size_limit(MAX_REGEX)
            .build()
            .map_err(|error| Error::Other(format!("error parsing regexp: {error}")))?;
        &compiled
    };
    match (name, rest) {
        ("matches", []) => Ok(Value::Bool(regex.is_match(text))),
        ("find", []) => Ok(Value::text(
            regex
                .find(text)
                .map(|found| found.as_str().to_owned())
                .unwrap_or_default(),
        )),
        ("findAll", [] | [Value::Int(_)]) => {
            let limit = match rest {
                [Value::Int(limit)] => usize::try_from(*limit).unwrap_or(usize::MAX),
                _ => usize::MAX,
            };
            let found = regex
                .find_iter(text)
                .take(limit)
                .map(|found| Value::text(found.as_str().to_owned()));
            Ok(Value::list(found.collect()))
        }
        _ => Err(Error::NoSuchOverload),
    }
}

fn index_of<'a>(
    text: &str,
    name: &str,
    part: &str,
    rest: &[Value<'a>],
    budget: &mut Budget,
) -> Result<Value<'a>> {
    budget.charge(text.len() as u64 / 4)?;
    let characters: Vec<char> = text.chars().collect();
    let length = i64::try_from(characters.len()).map_err(|_| Error::Overflow)?;
    let start = match rest {
        [] => None,
        [Value::Int(start)] if (0..=length).contains(start) => Some(*start),
        [Value::Int(start)] => return Err(Error::IndexOutOfBounds(*start)),
        _ => return Err(Error::NoSuchOverload),
    };
    let byte_at = |position: i64| -> usize {
        let position = usize::try_from(position).unwrap_or(0);
        characters[..position.min(characters.len())]
            .iter()
            .map(|c| c.len_utf8())
            .sum()
    };
    let found = if name == "indexOf" {
        let from = byte_at(start.unwrap_or(0));
        text[from..].find(part).map(|at| from + at)
    } else {
        let until = start.map_or(text.len(), |start| {
            (byte_at(start) + part.len()).min(text.len())
        });
        text.get(..until).unwrap_or(text).rfind(part)
    };
    let position = found.map_or(-1, |at| {
        i64::try_from(text[..at].chars().count()).unwrap_or(-1)
    });
    Ok(Value::Int(position))
}

fn replace<'a>(
    text: &str,
    from: &str,
    to: &str,
    rest: &[Value<'a>],
    budget: &mut Budget,
) -> Result<Value<'a>> {
    let limit = match rest {
        [] => usize::MAX,
        [Value::Int(limit)] => usize::try_from(*limit).unwrap_or(usize::MAX),
        _ => return Err(Error::NoSuchOverload),
    };
    // Replacing the empty string inserts text between all characters.
    let times = if from.is_empty() {
        text.len() + 1
    } else {
        text.len() / from.len()
    };
    budget.charge(((times.min(limit)).saturating_mul(to.len()) + text.len()) as u64 / 10)?;
    Ok(Value::text(text.replacen(from, to, limit)))
}

fn split<'a>(text: &str, separator: &str, rest: &[Value<'a>]) -> Result<Value<'a>> {
    let limit = match rest {
        [] => -1,
        [Value::Int(limit)] => *limit,
        _ => return Err(Error::NoSuchOverload),
    };
    let own = |part: &str| Value::text(part.to_owned());
    let parts: Vec<Value<'a>> = match (limit, separator) {
        (0, _) => Vec::new(),
        (limit, "") => {
            let most = usize::try_from(limit).unwrap_or(usize::MAX);
            let mut parts: Vec<String> = text.chars().map(String::from).collect();
            if parts.len() > most {
                let tail = parts.split_off(most - 1).concat();
                parts.push(tail);
            }
            parts.into_iter().map(Value::text).collect()
        }
        (limit, separator) if limit > 0 => text
            .splitn(usize::try_from(limit).unwrap_or(usize::MAX), separator)
            .map(own)
            .collect(),
        (_, separator) => text.split(separator).map(own).collect(),
    };
    Ok(Value::list(parts))
}

fn substring<'a>(text: &str, start: i64, rest: &[Value<'a>]) -> Result<Value<'a>> {
    let length = i64::try_from(text.chars().count()).map_err(|_| Error::Overflow)?;
    let end = match rest {
        [] => length,
        [Value::Int(end)] => *end,
        _ => return Err(Error::NoSuchOverload),
    };
    if !(0..=length).contains(&start) {
        return Err(Error::IndexOutOfBounds(start));
    }
    if !(start..=length).contains(&end) {
        return Err(Error::IndexOutOfBounds(end));
    }
    let (from, count) = (
        usize::try_from(start).unwrap_or(0),
        usize::try_from(end - start).unwrap_or(0),
    );
    Ok(Value::text(
        text.chars().skip(from).take(count).collect::<String>(),
    ))
}

/// `'%s is %d'.format([...])`.
fn format<'a>(template: &str, values: &[Value<'a>], budget: &mut Budget) -> Result<Value<'a>> {
    let mut output = String::new();
    let mut values = values.iter();
    let mut characters = template.chars().peekable();
    while let Some(character) = characters.next() {
        if character != '%' {
            output.push(character);
            continue;
        }
        if characters.peek() == Some(&'%') {
            characters.next();
            output.push('%');
            continue;
        }
        let mut precision = None;
        if characters.peek() == Some(&'.') {
            characters.next();
            let mut digits = String::new();
            while let Some(digit) = characters.next_if(char::is_ascii_digit) {
                digits.push(digit);
            }
            precision = digits
                .parse::<usize>()
                .ok()
                .filter(|precision| *precision <= 100);
        }
        let verb = characters
            .next()
            .ok_or_else(|| Error::Other("unexpected end of format string".to_owned()))?;
        let value = values
            .next()
            .ok_or_else(|| Error::Other("index out of range in format string".to_owned()))?;
        let printed = clause(verb, precision, value)?;
        budget.charge(printed.len() as u64 / 10)?;
        output.push_str(&printed);
    }
    Ok(Value::text(output))
}

#[expect(
    clippy::cast_precision_loss,
    reason = "%f and %e print integers as floats"
)]
fn clause(verb: char, precision: Option<usize>, value: &Value<'_>) -> Result<String> {
    let places = precision.unwrap_or(6);
    let float = match value {
        Value::Double(number) => Some(*number),
        Value::Int(number) => Some(*number as f64),
        Value::Uint(number) => Some(*number as f64),
        _ => None,
    };
    Ok(match (verb, value, float) {
        ('s', value, _) => super::print(value),
        ('d', Value::Int(number), _) => number.to_string(),
        ('d', Value::Uint(number), _) => number.to_string(),
        ('f', _, Some(number)) => format!("{number:.places$}"),
        ('e', _, Some(number)) => format!("{number:.places$e}"),
        ('b', Value::Int(number), _) => format!("{number:b}"),
        ('b', Value::Uint(number), _) => format!("{number:b}"),
        ('b', Value::Bool(boolean), _) => u8::from(*boolean).to_string(),
        ('o', Value::Int(number), _) => format!("{number:o}"),
        ('x', Value::Int(number), _) => format!("{number:x}"),
        ('X', Value::Int(number), _) => format!("{number:X}"),
        ('x', Value::String(text), _) => hexadecimal(text),
        ('X', Value::String(text), _) => hexadecimal(text).to_uppercase(),
        _ => {
            return Err(Error::Other(format!(
                "could not parse formatting clause: unrecognized formatting clause \"{verb}\""
            )));
        }
    })
}

fn hexadecimal(text: &str) -> String {
    let mut digits = String::with_capacity(text.len() * 2);
    for byte in text.bytes() {
        let _ = write!(digits, "{byte:02x}");
    }
    digits
}

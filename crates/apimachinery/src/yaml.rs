//! Decodes YAML request bodies into JSON values, within limits.
//!
//! YAML can make a parser do much work: aliases multiply values ("billion laughs"), and some parsers look far ahead for the end
//! of a possible key. This loader processes one parser event at a time and stops at the first exceeded limit: nesting depth,
//! memory of the decoded values, and memory added by aliases. The parser looks ahead at most 1,024 characters, so the time is
//! linear in the length of the body.
//!
//! Scalars follow the core schema of YAML 1.2. Directives, anchors and aliases are supported. Values without a JSON equivalent
//! (infinities, maps as keys) and application-specific tags are refused.

use std::collections::HashMap;
use std::fmt::Write;

use granit_parser::{Event, Options, Parser, ScalarStyle, Tag};
use serde_json::{Map, Number, Value};

use crate::memory_budget::{Exhausted, MemoryBudget};
use crate::strict::{self, Decoded, MAX_DUPLICATES};

/// The maximum levels of maps and lists in a body, the same as for JSON.
const MAX_LEVELS: usize = 127;

/// The total memory that aliases may add.
const MAX_ALIASED_BYTES: usize = 3 << 20;

#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error("{0}")]
    Json(#[source] serde_json::Error),
    #[error("yaml: control characters or bytes that are not UTF-8 are not allowed")]
    Encoding,
    #[error("yaml: line {line}: {problem}")]
    Syntax { line: usize, problem: String },
    #[error("yaml: exceeded max depth of {MAX_LEVELS}")]
    TooDeep,
    #[error("yaml: document contains excessive aliasing")]
    ExcessiveAliasing,
    #[error("yaml: {0}")]
    TooLarge(#[from] Exhausted),
    #[error("yaml: an alias refers to a value that contains it")]
    RecursiveAlias,
    #[error("yaml: a key of a map is not a scalar")]
    ComplexKey,
    #[error("yaml: tag {0} is not supported")]
    UnknownTag(String),
    #[error("yaml: {0} has no equivalent in JSON")]
    NotJson(String),
    #[error("yaml: more than one document")]
    SecondDocument,
    #[error("yaml: too many duplicate fields")]
    TooManyDuplicates,
}

/// Decodes one document. JSON is valid YAML, and most clients that declare YAML send JSON, so JSON is tried first.
pub fn decode(body: &[u8]) -> Result<Decoded, Error> {
    let first = body.iter().find(|byte| !byte.is_ascii_whitespace());
    if first == Some(&b'{') {
        match strict::decode(body) {
            Ok(decoded) => return Ok(decoded),
            // The body is valid JSON but exceeds the memory limit.
            Err(error) if error.is_data() => return Err(Error::Json(error)),
            Err(_) => {}
        }
    }
    let text = std::str::from_utf8(body).map_err(|_| Error::Encoding)?;
    Loader::default().load(text.strip_prefix('\u{feff}').unwrap_or(text))
}

/// A map or list that is not complete yet.
struct Open {
    value: Partial,
    /// The ID of its anchor, or 0 without one.
    anchor: usize,
    /// The memory charged before it started.
    before: usize,
}

enum Partial {
    List(Vec<Value>),
    Map {
        members: Map<String, Value>,
        /// The key of the next value.
        key: Option<String>,
    },
}

#[derive(Default)]
struct Loader {
    open: Vec<Open>,
    /// Complete values with an anchor, and the memory of each.
    anchored: HashMap<usize, (Value, usize)>,
    aliased: usize,
    budget: MemoryBudget,
    duplicates: Vec<String>,
    document: Option<Value>,
}

impl Loader {
    fn load(mut self, text: &str) -> Result<Decoded, Error> {
        let mut options = Options::default();
        options.set_emit_comments(false);
        options.flow_nesting_limit = MAX_LEVELS + 1;
        options.block_nesting_limit = MAX_LEVELS + 1;
        for event in Parser::new_from_str_with_options(text, options) {
            let (event, _) = event.map_err(|error| Error::Syntax {
                line: error.marker().line(),
                problem: error.info(),
            })?;
            self.take(event)?;
        }
        Ok(Decoded {
            value: self.document.unwrap_or_default(),
            duplicates: self.duplicates,
        })
    }

    fn take(&mut self, event: Event<'_>) -> Result<(), Error> {
        match event {
            Event::DocumentStart(..) if self.document.is_some() => Err(Error::SecondDocument),
            Event::Scalar(text, style, anchor, tag) => {
                let before = self.budget.spent();
                if self.expects_key() {
                    return self.key(text.into_owned(), anchor, before);
                }
                self.budget.value(text.len())?;
                let value = scalar(text.into_owned(), style, tag.as_deref())?;
                self.finished(value, anchor, before)
            }
            Event::SequenceStart(_, anchor, tag) => {
                known_collection(tag.as_deref(), "seq")?;
                self.begin(Partial::List(Vec::new()), anchor)
            }
            Event::MappingStart(_, anchor, tag) => {
                known_collection(tag.as_deref(), "map")?;
                let (members, key) = (Map::new(), None);
                self.begin(Partial::Map { members, key }, anchor)
            }
            Event::SequenceEnd | Event::MappingEnd => {
                let Some(open) = self.open.pop() else {
                    return Ok(());
                };
                let value = match open.value {
                    Partial::List(items) => Value::Array(items),
                    Partial::Map { members, .. } => Value::Object(members),
                };
                self.finished(value, open.anchor, open.before)
            }
            Event::Alias(anchor) => self.alias(anchor),
            _ => Ok(()),
        }
    }

    fn expects_key(&self) -> bool {
        matches!(
            self.open.last(),
            Some(Open {
                value: Partial::Map { key: None, .. },
                ..
            })
        )
    }

    fn begin(&mut self, value: Partial, anchor: usize) -> Result<(), Error> {
        if self.expects_key() {
            return Err(Error::ComplexKey);
        }
        if self.open.len() >= MAX_LEVELS {
            return Err(Error::TooDeep);
        }
        let before = self.budget.spent();
        self.budget.value(0)?;
        self.open.push(Open {
            value,
            anchor,
            before,
        });
        Ok(())
    }

    fn alias(&mut self, anchor: usize) -> Result<(), Error> {
        let (value, bytes) = self.anchored.get(&anchor).ok_or(Error::RecursiveAlias)?;
        let (value, bytes) = (value, *bytes);
        self.aliased = self.aliased.saturating_add(bytes);
        if self.aliased > MAX_ALIASED_BYTES {
            return Err(Error::ExcessiveAliasing);
        }
        let levels = crate::nesting::levels(value);
        if self.open.len() + levels > MAX_LEVELS {
            return Err(Error::TooDeep);
        }
        let value = value.clone();
        let before = self.budget.spent();
        self.budget.charge(bytes)?;
        if self.expects_key() {
            return match value {
                Value::String(text) => self.key(text, 0, before),
                _ => Err(Error::ComplexKey),
            };
        }
        self.finished(value, 0, before)
    }

    fn key(&mut self, text: String, anchor: usize, before: usize) -> Result<(), Error> {
        if anchor > 0 {
            let value = Value::from(text.as_str());
            self.remember(&value, anchor, before)?;
        }
        let Some(Open {
            value: Partial::Map { members, key },
            ..
        }) = self.open.last_mut()
        else {
            return Err(Error::ComplexKey);
        };
        self.budget.member(members.len(), text.len())?;
        let repeated = members.contains_key(&text);
        *key = Some(text);
        if repeated {
            self.duplicate()?;
        }
        Ok(())
    }

    /// Records the key at the end of the path of open maps as a duplicate.
    fn duplicate(&mut self) -> Result<(), Error> {
        let mut path = String::new();
        for open in &self.open {
            match &open.value {
                Partial::List(items) => {
                    // Writing into a string cannot fail.
                    let _ = write!(path, "[{}]", items.len());
                }
                Partial::Map { key, .. } => {
                    if !path.is_empty() {
                        path.push('.');
                    }
                    path.push_str(key.as_deref().unwrap_or_default());
                }
            }
        }
        if !self.duplicates.contains(&path) {
            self.duplicates.push(path);
        }
        if self.duplicates.len() > MAX_DUPLICATES {
            return Err(Error::TooManyDuplicates);
        }
        Ok(())
    }

    /// Stores a value for aliases of its anchor.
    fn remember(&mut self, value: &Value, anchor: usize, before: usize) -> Result<(), Error> {
        let bytes = self.budget.spent() - before;
        // Nested anchors store their common parts more than once.
        self.budget.charge(bytes)?;
        self.anchored.insert(anchor, (value.clone(), bytes));
        Ok(())
    }

    /// Adds a complete value to the map or list that contains it.
    fn finished(&mut self, value: Value, anchor: usize, before: usize) -> Result<(), Error> {
        if anchor > 0 {
            self.remember(&value, anchor, before)?;
        }
        match self.open.last_mut().map(|open| &mut open.value) {
            None => self.document = Some(value),
            Some(Partial::List(items)) => items.push(value),
            Some(Partial::Map { members, key }) => {
                let key = key.take().ok_or(Error::ComplexKey)?;
                members.insert(key, value);
            }
        }
        Ok(())
    }
}

fn known_collection(tag: Option<&Tag>, own: &str) -> Result<(), Error> {
    match tag {
        Some(tag) if tag.core_suffix() != Some(own) => Err(Error::UnknownTag(tag.original())),
        _ => Ok(()),
    }
}

fn scalar(text: String, style: ScalarStyle, tag: Option<&Tag>) -> Result<Value, Error> {
    match tag.map(|tag| (tag.core_suffix(), tag)) {
        Some((Some("str"), _)) => Ok(Value::String(text)),
        Some((Some("null" | "bool" | "int" | "float"), _)) => plain(text),
        Some((_, tag)) if tag.original() != "!" => Err(Error::UnknownTag(tag.original())),
        None if style == ScalarStyle::Plain => plain(text),
        _ => Ok(Value::String(text)),
    }
}

/// Parses a plain scalar by the core schema.
fn plain(text: String) -> Result<Value, Error> {
    Ok(match text.as_str() {
        "" | "~" | "null" | "Null" | "NULL" => Value::Null,
        "true" | "True" | "TRUE" => Value::Bool(true),
        "false" | "False" | "FALSE" => Value::Bool(false),
        ".inf" | ".Inf" | ".INF" | "+.inf" | "+.Inf" | "+.INF" | "-.inf" | "-.Inf" | "-.INF"
        | ".nan" | ".NaN" | ".NAN" => return Err(Error::NotJson(text)),
        other => match number(other) {
            Some(number) => Value::Number(number),
            None => Value::String(text),
        },
    })
}

fn number(text: &str) -> Option<Number> {
    let unsigned = text.strip_prefix(['+', '-']).unwrap_or(text);
    let negative = text.starts_with('-');
    for (prefix, radix) in [("0x", 16), ("0o", 8), ("0b", 2)] {
        if let Some(digits) = unsigned.strip_prefix(prefix) {
            if !digits.starts_with(|character: char| character.is_digit(radix)) {
                return None;
            }
            let value = i128::from_str_radix(digits, radix).ok()?;
            return integer(if negative { -value } else { value });
        }
    }
    let digits = unsigned.bytes().take_while(u8::is_ascii_digit).count();
    // Numbers with leading zeros become strings, because YAML versions disagree on whether they are octal.
    if digits > 1 && unsigned.starts_with('0') {
        return None;
    }
    if digits == unsigned.len() && digits > 0 {
        let value: i128 = text.parse().ok()?;
        return integer(value).or_else(|| float(text));
    }
    is_decimal(unsigned).then(|| float(text)).flatten()
}

fn integer(value: i128) -> Option<Number> {
    i64::try_from(value)
        .map(Number::from)
        .or_else(|_| u64::try_from(value).map(Number::from))
        .ok()
}

fn float(text: &str) -> Option<Number> {
    text.parse().ok().and_then(Number::from_f64)
}

/// Whether a text consists of digits with a point, an exponent or both.
fn is_decimal(text: &str) -> bool {
    let (mantissa, exponent) = match text.split_once(['e', 'E']) {
        Some((mantissa, exponent)) => (mantissa, Some(exponent)),
        None => (text, None),
    };
    let all_digits = |text: &str| text.bytes().all(|byte| byte.is_ascii_digit());
    let (whole, fraction) = mantissa.split_once('.').unwrap_or((mantissa, ""));
    let exponent = exponent.map(|exponent| exponent.strip_prefix(['+', '-']).unwrap_or(exponent));
    (!whole.is_empty() || !fraction.is_empty())
        && all_digits(whole)
        && all_digits(fraction)
        && exponent.is_none_or(|exponent| !exponent.is_empty() && all_digits(exponent))
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn value(text: &str) -> Value {
        decode(text.as_bytes())
            .unwrap_or_else(|error| panic!("{text}: {error}"))
            .value
    }

    fn refused(text: &str) -> String {
        decode(text.as_bytes()).expect_err(text).to_string()
    }

    #[test]
    fn yaml_documents_decode_to_the_expected_json() {
        for (text, expected) in [
            ("", json!(null)),
            ("# only a comment\n", json!(null)),
            (
                "a: 1\nb: [x, 'y', \"z\\n\"]\n",
                json!({"a": 1, "b": ["x", "y", "z\n"]}),
            ),
            (
                "a:\n- b: |\n    two\n    lines\n- >-\n  folded\n  text\n",
                json!({"a": [{"b": "two\nlines\n"}, "folded text"]}),
            ),
            ("---\na: b\n...\n", json!({"a": "b"})),
            (
                "{\"a\": {\"b\": [1, null, true]}}",
                json!({"a": {"b": [1, null, true]}}),
            ),
            (
                "{a: b, 1: c, true: d}",
                json!({"a": "b", "1": "c", "true": "d"}),
            ),
            (
                "a: &x {k: [1]}\nb: *x\n",
                json!({"a": {"k": [1]}, "b": {"k": [1]}}),
            ),
            ("a: &x name\n*x : 1\n", json!({"a": "name", "name": 1})),
            (
                "a: !!str 1\nb: !!int \"2\"\nc: !!map {}\n",
                json!({"a": "1", "b": 2, "c": {}}),
            ),
            ("\u{feff}a: 1", json!({"a": 1})),
        ] {
            assert_eq!(value(text), expected, "{text}");
        }
    }

    #[test]
    fn plain_scalars_follow_the_core_schema() {
        for (text, expected) in [
            ("~", json!(null)),
            ("Null", json!(null)),
            ("TRUE", json!(true)),
            ("yes", json!("yes")),
            ("on", json!("on")),
            ("0", json!(0)),
            ("-7", json!(-7)),
            ("+7", json!(7)),
            ("0x1F", json!(31)),
            ("0o17", json!(15)),
            ("0b11", json!(3)),
            ("010", json!("010")),
            ("1_000", json!("1_000")),
            ("18446744073709551615", json!(u64::MAX)),
            ("18446744073709551616", json!(18_446_744_073_709_551_616.0)),
            ("1.5", json!(1.5)),
            (".5", json!(0.5)),
            ("1e3", json!(1000.0)),
            ("1.2.3", json!("1.2.3")),
            ("1e", json!("1e")),
            ("e1", json!("e1")),
            ("0x", json!("0x")),
            ("0x-1", json!("0x-1")),
            ("12:30:45", json!("12:30:45")),
            ("2001-01-01", json!("2001-01-01")),
            ("100m", json!("100m")),
        ] {
            let found = value(&format!("a: {text}"));
            assert_eq!(found["a"], expected, "{text}");
        }
    }

    #[test]
    fn fields_given_twice_are_named_and_the_last_value_wins() {
        let decoded = decode(b"spec:\n  l:\n  - x: 1\n    x: 2\n  a: 1\n  a: 3\n").unwrap();
        assert_eq!(decoded.value, json!({"spec": {"l": [{"x": 2}], "a": 3}}));
        assert_eq!(decoded.duplicates, ["spec.l[0].x", "spec.a"]);
    }

    #[test]
    fn values_without_a_json_equivalent_are_refused() {
        for (text, expected) in [
            ("a: .inf", ".inf has no equivalent"),
            ("? [a]\n: b", "a key of a map"),
            ("a: !custom b", "tag !custom"),
            ("a: &x [*x]", "contains it"),
            ("a: *missing", "yaml: line 1"),
            ("--- a\n--- b\n", "more than one document"),
            ("a: [", "yaml: line"),
            ("\u{0}", "yaml"),
        ] {
            let found = refused(text);
            assert!(found.contains(expected), "{text}: {found}");
        }
        assert!(decode(b"a: \xff").is_err());
    }

    #[test]
    fn aliases_cannot_multiply_values() {
        let mut laughs = String::from("a0: &a0 [lol, lol, lol, lol, lol, lol, lol, lol, lol]\n");
        for level in 1..12 {
            let repeated = format!("*a{},", level - 1).repeat(9);
            writeln!(laughs, "a{level}: &a{level} [{repeated}]").unwrap();
        }
        assert!(refused(&laughs).contains("excessive aliasing"));
        let scalar = "x".repeat(100_000);
        let many = format!("a: &a {scalar}\nb: [{}]", "*a,".repeat(80_000));
        assert!(refused(&many).contains("excessive aliasing"));
    }

    #[test]
    fn values_are_bounded_in_depth_and_number() {
        assert!(refused(&"[".repeat(300_000)).contains("yaml"));
        assert!(refused(&"- ".repeat(300_000)).contains("yaml"));
        assert!(refused(&"{a: ".repeat(300_000)).contains("yaml"));
        assert!(refused(&"? ".repeat(300_000)).contains("yaml"));
        let within = format!("{}{}", "[".repeat(127), "]".repeat(127));
        assert_eq!(crate::nesting::levels(&value(&within)), 127);
        let maps = format!("a:\n{}", "- {b: 1}\n".repeat(200_000));
        assert!(refused(&maps).contains("too many values"));
    }

    /// Inputs for which YAML parsers look far ahead or back, so long that a quadratic parser would take minutes.
    #[test]
    fn time_grows_with_the_length_of_the_body() {
        for piece in [
            "[",
            "]",
            "{",
            "- ",
            "? ",
            "a: ",
            "[]",
            "[a,",
            "{a,",
            "\"",
            "'",
            "a\n",
            "a ",
            "# \n",
            "&a ",
            "*a ",
            "!!str ",
            "| \n",
            "--- \n",
            "%A\n",
            "\t",
            "\n",
            "a: b\n",
            "- a\n",
            "? a\n",
            "\"a\": b\n",
            "\"a\n",
            ": ",
            ",",
            "!<a> ",
            "\\",
            "é ",
        ] {
            let repeated = piece.repeat(300_000 / piece.len());
            for text in [
                repeated.clone(),
                format!("a: [{repeated}"),
                format!("a: \"{repeated}"),
            ] {
                drop(decode(text.as_bytes()));
            }
        }
    }
}

//! kubectl's JSONPath dialect, as printer columns and `selectableFields` use it: `.spec.x`, `\.` in names, `['a.b']`, `[0]`, `[-1]`,
//! slices, unions, `[*]`, `..name` and filters such as `[?(@.type=="Ready")]`.
//!
//! Templates (`{range}`, text between braces) are evaluated by kubectl, not by the server, and are not supported here. The number
//! of values that a path may visit and find is limited.

use std::cmp::Ordering;

use serde_json::Value;

/// A syntax error in a path.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("invalid JSONPath {}: {problem}", crate::go::quote(.path))]
pub struct Error {
    path: String,
    problem: String,
}

/// A compiled path.
#[derive(Debug, Clone, PartialEq)]
pub struct JsonPath {
    steps: Vec<Step>,
}

#[derive(Debug, Clone, PartialEq)]
enum Step {
    Field(String),
    Wildcard,
    Recursive,
    Index(i64),
    Slice {
        start: Option<i64>,
        end: Option<i64>,
        step: i64,
    },
    Union(Vec<Step>),
    Filter(Box<Filter>),
}

#[derive(Debug, Clone, PartialEq)]
struct Filter {
    left: Operand,
    comparison: Option<(Comparison, Operand)>,
}

#[derive(Debug, Clone, PartialEq)]
enum Operand {
    Path(JsonPath),
    Literal(Value),
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Comparison {
    Equal,
    NotEqual,
    Less,
    LessOrEqual,
    Greater,
    GreaterOrEqual,
}

const MAX_LENGTH: usize = 4 * 1024;
const MAX_DEPTH: usize = 8;
/// The limit for visited values. No useful column needs more; the search stops there.
const MAX_VISITS: usize = 100_000;

impl JsonPath {
    /// Parses a path, which may be enclosed in the braces of a template.
    pub fn parse(path: &str) -> Result<Self, Error> {
        let inner = path.trim();
        let inner = match inner.strip_prefix('{') {
            Some(rest) => rest
                .strip_suffix('}')
                .ok_or_else(|| fail(path, "unclosed action"))?,
            None => inner,
        };
        if path.len() > MAX_LENGTH {
            return Err(fail(path, "too long"));
        }
        let mut parser = Parser {
            path,
            rest: inner,
            depth: 0,
        };
        let steps = parser.steps()?;
        match parser.rest {
            "" => Ok(Self { steps }),
            _ => Err(parser.error("unexpected text")),
        }
    }

    /// All values that match the path. A missing key matches nothing.
    pub fn find<'a>(&self, root: &'a Value) -> Vec<&'a Value> {
        let mut budget = MAX_VISITS;
        follow(&self.steps, root, root, &mut budget)
    }

    /// The first value that matches the path.
    pub fn first<'a>(&self, root: &'a Value) -> Option<&'a Value> {
        self.find(root).into_iter().next()
    }
}

fn fail(path: &str, problem: &str) -> Error {
    Error {
        path: path.to_owned(),
        problem: problem.to_owned(),
    }
}

struct Parser<'a> {
    path: &'a str,
    rest: &'a str,
    depth: usize,
}

impl Parser<'_> {
    fn error(&self, problem: &str) -> Error {
        fail(self.path, problem)
    }

    fn accept(&mut self, prefix: &str) -> bool {
        match self.rest.strip_prefix(prefix) {
            Some(rest) => {
                self.rest = rest;
                true
            }
            None => false,
        }
    }

    fn expect(&mut self, prefix: &str) -> Result<(), Error> {
        if self.accept(prefix) {
            Ok(())
        } else {
            Err(self.error(&format!("expected {prefix}")))
        }
    }

    fn steps(&mut self) -> Result<Vec<Step>, Error> {
        let mut steps = Vec::new();
        if !self.accept("$") {
            self.accept("@");
        }
        loop {
            if self.accept("..") {
                steps.push(Step::Recursive);
                if self.rest.starts_with('[') {
                    continue;
                }
                steps.push(self.field()?);
            } else if self.accept(".") {
                // A single dot is the object itself.
                if self.rest.is_empty() || self.rest.starts_with('[') {
                    continue;
                }
                steps.push(self.field()?);
            } else if self.accept("[") {
                steps.push(self.bracket()?);
            } else if steps.is_empty()
                && self
                    .rest
                    .starts_with(|c: char| c.is_alphanumeric() || c == '_')
            {
                steps.push(self.field()?);
            } else {
                return Ok(steps);
            }
        }
    }

    fn field(&mut self) -> Result<Step, Error> {
        if self.accept("*") {
            return Ok(Step::Wildcard);
        }
        let mut name = String::new();
        let mut characters = self.rest.char_indices();
        let mut end = self.rest.len();
        while let Some((at, character)) = characters.next() {
            match character {
                '\\' => match characters.next() {
                    Some((_, escaped)) => name.push(escaped),
                    None => return Err(self.error("unterminated escape")),
                },
                '.' | '[' | ']' | ' ' | ')' | '=' | '!' | '<' | '>' | '|' | ',' | '{' | '}'
                | '(' | '\'' | '"' | '?' | '@' | '$' => {
                    end = at;
                    break;
                }
                other => name.push(other),
            }
        }
        self.rest = &self.rest[end..];
        if name.is_empty() {
            Err(self.error("empty field name"))
        } else {
            Ok(Step::Field(name))
        }
    }

    fn bracket(&mut self) -> Result<Step, Error> {
        if self.accept("?(") {
            self.depth += 1;
            if self.depth > MAX_DEPTH {
                return Err(self.error("filters are nested too deeply"));
            }
            let filter = self.filter()?;
            self.depth -= 1;
            self.expect(")")?;
            self.expect("]")?;
            return Ok(Step::Filter(Box::new(filter)));
        }
        let mut members = vec![self.bracket_member()?];
        while self.accept(",") {
            self.rest = self.rest.trim_start();
            members.push(self.bracket_member()?);
        }
        self.expect("]")?;
        if members.len() > 1 {
            return Ok(Step::Union(members));
        }
        members.pop().ok_or_else(|| self.error("empty brackets"))
    }

    fn bracket_member(&mut self) -> Result<Step, Error> {
        if self.accept("*") {
            return Ok(Step::Wildcard);
        }
        if self.rest.starts_with(['\'', '"']) {
            return self.quoted().map(Step::Field);
        }
        let end = self
            .rest
            .find([',', ']'])
            .ok_or_else(|| self.error("unterminated array"))?;
        let text = self.rest[..end].trim();
        let parts: Vec<&str> = text.split(':').collect();
        let mut numbers = Vec::with_capacity(3);
        for part in &parts {
            let number = if part.is_empty() {
                None
            } else {
                Some(
                    part.parse::<i64>()
                        .map_err(|_| self.error("invalid array index"))?,
                )
            };
            numbers.push(number);
        }
        let step = match numbers[..] {
            [Some(index)] => Step::Index(index),
            [start, end] => Step::Slice {
                start,
                end,
                step: 1,
            },
            [start, end, step] => {
                let step = step.unwrap_or(1);
                if step < 1 {
                    return Err(self.error("step must be > 0"));
                }
                Step::Slice { start, end, step }
            }
            _ => return Err(self.error("invalid array index")),
        };
        self.rest = &self.rest[end..];
        Ok(step)
    }

    fn quoted(&mut self) -> Result<String, Error> {
        let quote = self.rest.chars().next().unwrap_or('\'');
        let mut text = String::new();
        let mut characters = self.rest[1..].char_indices();
        while let Some((at, character)) = characters.next() {
            match character {
                '\\' => match characters.next() {
                    Some((_, escaped)) => text.push(escaped),
                    None => break,
                },
                character if character == quote => {
                    self.rest = &self.rest[at + 2..];
                    return Ok(text);
                }
                other => text.push(other),
            }
        }
        Err(self.error("unterminated quoted string"))
    }

    fn filter(&mut self) -> Result<Filter, Error> {
        let left = self.operand()?;
        self.rest = self.rest.trim_start();
        let operators = [
            ("==", Comparison::Equal),
            ("!=", Comparison::NotEqual),
            ("<=", Comparison::LessOrEqual),
            (">=", Comparison::GreaterOrEqual),
            ("<", Comparison::Less),
            (">", Comparison::Greater),
        ];
        for (symbol, comparison) in operators {
            if self.accept(symbol) {
                let right = self.operand()?;
                self.rest = self.rest.trim_start();
                return Ok(Filter {
                    left,
                    comparison: Some((comparison, right)),
                });
            }
        }
        Ok(Filter {
            left,
            comparison: None,
        })
    }

    fn operand(&mut self) -> Result<Operand, Error> {
        self.rest = self.rest.trim_start();
        if self.rest.starts_with(['\'', '"']) {
            return self
                .quoted()
                .map(|text| Operand::Literal(Value::String(text)));
        }
        if self.rest.starts_with(['@', '$', '.']) {
            return Ok(Operand::Path(JsonPath {
                steps: self.steps()?,
            }));
        }
        let end = self
            .rest
            .find([')', '=', '!', '<', '>', ' '])
            .unwrap_or(self.rest.len());
        let text = &self.rest[..end];
        let literal =
            serde_json::from_str(text).map_err(|_| self.error("unrecognized filter operand"))?;
        self.rest = &self.rest[end..];
        Ok(Operand::Literal(literal))
    }
}

fn follow<'a>(
    steps: &[Step],
    root: &'a Value,
    start: &'a Value,
    budget: &mut usize,
) -> Vec<&'a Value> {
    let mut current = vec![start];
    for step in steps {
        let mut next = Vec::new();
        for value in current {
            take(step, root, value, &mut next, budget);
        }
        if next.is_empty() {
            return next;
        }
        current = next;
    }
    current
}

fn take<'a>(
    step: &Step,
    root: &'a Value,
    value: &'a Value,
    found: &mut Vec<&'a Value>,
    budget: &mut usize,
) {
    match budget.checked_sub(1) {
        Some(rest) => *budget = rest,
        None => return,
    }
    match (step, value) {
        (Step::Field(name), Value::Object(members)) => found.extend(members.get(name)),
        // A field of a list stands for that field of each item.
        (Step::Wildcard, Value::Object(members)) => found.extend(members.values()),
        (Step::Wildcard, Value::Array(items)) => found.extend(items),
        (Step::Recursive, _) => descend(value, found, budget),
        (Step::Index(index), Value::Array(items)) => {
            found.extend(position(*index, items.len()).and_then(|at| items.get(at)));
        }
        (Step::Slice { start, end, step }, Value::Array(items)) => {
            let bound = |bound: Option<i64>, default: usize| {
                bound.map_or(default, |index| clamp(index, items.len()))
            };
            let (from, to) = (bound(*start, 0), bound(*end, items.len()));
            let step = usize::try_from(*step).unwrap_or(1);
            found.extend(items.iter().take(to).skip(from).step_by(step));
        }
        (Step::Union(members), _) => {
            for member in members {
                take(member, root, value, found, budget);
            }
        }
        (Step::Filter(filter), Value::Array(items)) => {
            for item in items {
                if holds(filter, root, item, budget) {
                    found.push(item);
                }
            }
        }
        _ => {}
    }
}

fn descend<'a>(value: &'a Value, found: &mut Vec<&'a Value>, budget: &mut usize) {
    let Some(rest) = budget.checked_sub(1) else {
        return;
    };
    *budget = rest;
    found.push(value);
    match value {
        Value::Object(members) => members
            .values()
            .for_each(|member| descend(member, found, budget)),
        Value::Array(items) => items.iter().for_each(|item| descend(item, found, budget)),
        _ => {}
    }
}

fn position(index: i64, length: usize) -> Option<usize> {
    let length = i64::try_from(length).ok()?;
    usize::try_from(if index < 0 { index + length } else { index }).ok()
}

fn clamp(index: i64, length: usize) -> usize {
    position(index, length).unwrap_or(0).min(length)
}

fn holds(filter: &Filter, root: &Value, item: &Value, budget: &mut usize) -> bool {
    fn resolve<'v>(
        operand: &'v Operand,
        root: &'v Value,
        item: &'v Value,
        budget: &mut usize,
    ) -> Option<&'v Value> {
        match operand {
            Operand::Literal(value) => Some(value),
            Operand::Path(path) => follow(&path.steps, root, item, budget).into_iter().next(),
        }
    }
    let left = resolve(&filter.left, root, item, budget);
    let Some((comparison, right)) = &filter.comparison else {
        return left.is_some();
    };
    let right = resolve(right, root, item, budget);
    let (Some(left), Some(right)) = (left, right) else {
        return false;
    };
    let ordering = match (left, right) {
        (Value::String(left), Value::String(right)) => Some(left.cmp(right)),
        (Value::Number(left), Value::Number(right)) => left
            .as_f64()
            .zip(right.as_f64())
            .and_then(|(left, right)| left.partial_cmp(&right)),
        _ => None,
    };
    match comparison {
        Comparison::Equal => ordering.map_or(left == right, Ordering::is_eq),
        Comparison::NotEqual => ordering.map_or(left != right, Ordering::is_ne),
        Comparison::Less => ordering.is_some_and(Ordering::is_lt),
        Comparison::LessOrEqual => ordering.is_some_and(Ordering::is_le),
        Comparison::Greater => ordering.is_some_and(Ordering::is_gt),
        Comparison::GreaterOrEqual => ordering.is_some_and(Ordering::is_ge),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn find(path: &str) -> Vec<Value> {
        let object = json!({
            "metadata": {"name": "x", "annotations": {"example.com/a.b": "v"}},
            "spec": {"replicas": 2, "list": [1, 2, 3, 4], "items": [{"n": "a", "v": 1}, {"n": "b", "v": 2}]},
            "status": {"conditions": [{"type": "Ready", "status": "True", "reason": "Fine"}, {"type": "Other", "status": "False"}]}
        });
        let path = JsonPath::parse(path).unwrap_or_else(|error| panic!("{error}"));
        path.find(&object).into_iter().cloned().collect()
    }

    #[test]
    fn paths_find_what_kubectl_finds() {
        let cases = [
            (".metadata.name", json!(["x"])),
            ("{.spec.replicas}", json!([2])),
            ("$.spec.replicas", json!([2])),
            ("spec.replicas", json!([2])),
            (".metadata.annotations.example\\.com/a\\.b", json!(["v"])),
            (".metadata.annotations['example.com/a.b']", json!(["v"])),
            (".spec.list[0]", json!([1])),
            (".spec.list[-1]", json!([4])),
            (".spec.list[1:3]", json!([2, 3])),
            (".spec.list[::2]", json!([1, 3])),
            (".spec.list[0,2]", json!([1, 3])),
            (".spec.list[*]", json!([1, 2, 3, 4])),
            (".spec.items[*].n", json!(["a", "b"])),
            ("..n", json!(["a", "b"])),
            (
                ".status.conditions[?(@.type==\"Ready\")].status",
                json!(["True"]),
            ),
            (
                ".status.conditions[?(@.type=='Ready')].reason",
                json!(["Fine"]),
            ),
            (
                ".status.conditions[?(@.type != 'Ready')].status",
                json!(["False"]),
            ),
            (".status.conditions[?(@.reason)].type", json!(["Ready"])),
            (".spec.items[?(@.v>1)].n", json!(["b"])),
            (".spec.missing.deeper", json!([])),
            (".spec.list[9]", json!([])),
        ];
        for (path, expected) in cases {
            assert_eq!(Value::Array(find(path)), expected, "{path}");
        }
    }

    #[test]
    fn malformed_paths_are_refused() {
        for path in [
            ".a[",
            ".a['x",
            ".a[x]",
            ".a..",
            "{.a",
            ".a[?(@.b==]",
            ".a b",
            ".[::0]",
            ".a[?(@.b",
        ] {
            assert!(JsonPath::parse(path).is_err(), "{path}");
        }
    }

    #[test]
    fn searches_are_bounded() {
        let mut deep = json!({"a": 1});
        for _ in 0..60 {
            deep = json!({"a": deep.clone(), "b": [deep["b"].clone()]});
        }
        let path = JsonPath::parse("..a..a..a..a..a").unwrap();
        assert!(path.find(&deep).len() <= MAX_VISITS);
    }
}

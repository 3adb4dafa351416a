//! Label selectors in their string form (`app in (a,b),!legacy,tier!=db`) and their object form
//! (`matchLabels`/`matchExpressions`).

use std::fmt;

use serde_json::{Map, Value};

use super::{Error, parser};
use crate::field::{FieldError, Path};
use crate::names;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Operator {
    In,
    NotIn,
    Equals,
    NotEquals,
    Exists,
    DoesNotExist,
    GreaterThan,
    LessThan,
}

/// A condition on one label.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Requirement {
    key: String,
    operator: Operator,
    /// Sorted and without duplicates, as Kubernetes prints them.
    values: Vec<String>,
}

/// A label selector. It matches if all requirements match; without requirements it matches everything.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct LabelSelector {
    requirements: Vec<Requirement>,
    matches_nothing: bool,
}

impl Requirement {
    /// Creates a requirement after validating key and values.
    pub fn new(key: &str, operator: Operator, values: Vec<String>) -> Result<Self, Error> {
        let fail = |error: FieldError| Err(Error(error.to_string()));
        let problems = names::qualified_name(key);
        if !problems.is_empty() {
            return fail(FieldError::invalid("key", key, problems.join("; ")));
        }
        let shown = || Value::from(values.clone());
        match operator {
            Operator::In | Operator::NotIn if values.is_empty() => {
                return fail(FieldError::invalid(
                    "values",
                    shown(),
                    "for 'in', 'notin' operators, values set can't be empty",
                ));
            }
            Operator::Equals | Operator::NotEquals if values.len() != 1 => {
                return fail(FieldError::invalid(
                    "values",
                    shown(),
                    "exact-match compatibility requires one single value",
                ));
            }
            Operator::Exists | Operator::DoesNotExist if !values.is_empty() => {
                return fail(FieldError::invalid(
                    "values",
                    shown(),
                    "values set must be empty for exists and does not exist",
                ));
            }
            Operator::GreaterThan | Operator::LessThan => {
                let [value] = &values[..] else {
                    return fail(FieldError::invalid(
                        "values",
                        shown(),
                        "for 'Gt', 'Lt' operators, exactly one value is required",
                    ));
                };
                if value.parse::<i64>().is_err() {
                    return fail(FieldError::invalid(
                        "values[0]",
                        value.as_str(),
                        "for 'Gt', 'Lt' operators, the value must be an integer",
                    ));
                }
            }
            _ => {}
        }
        for (index, value) in values.iter().enumerate() {
            let problems = names::label_value(value);
            if !problems.is_empty() {
                let values = Path::new("values");
                let at = values.index(index);
                return fail(FieldError::invalid(
                    at.key(key),
                    value.as_str(),
                    problems.join("; "),
                ));
            }
        }
        let mut values = values;
        values.sort_unstable();
        values.dedup();
        Ok(Self {
            key: key.to_owned(),
            operator,
            values,
        })
    }

    pub fn key(&self) -> &str {
        &self.key
    }

    pub fn operator(&self) -> Operator {
        self.operator
    }

    pub fn values(&self) -> &[String] {
        &self.values
    }

    fn holds(&self, label: Option<&str>) -> bool {
        let listed = |label: &str| self.values.iter().any(|value| value == label);
        match self.operator {
            Operator::In | Operator::Equals => label.is_some_and(listed),
            Operator::NotIn | Operator::NotEquals => !label.is_some_and(listed),
            Operator::Exists => label.is_some(),
            Operator::DoesNotExist => label.is_none(),
            Operator::GreaterThan | Operator::LessThan => {
                let pair = label.and_then(|label| label.parse::<i64>().ok()).zip(
                    self.values
                        .first()
                        .and_then(|value| value.parse::<i64>().ok()),
                );
                pair.is_some_and(|(label, bound)| match self.operator {
                    Operator::GreaterThan => label > bound,
                    _ => label < bound,
                })
            }
        }
    }
}

impl LabelSelector {
    /// Matches every object.
    pub fn everything() -> Self {
        Self::default()
    }

    /// Matches no object, like an absent selector.
    pub fn nothing() -> Self {
        Self {
            requirements: Vec::new(),
            matches_nothing: true,
        }
    }

    pub fn parse(text: &str) -> Result<Self, Error> {
        let requirements = parser::parse(text)?;
        Ok(Self::from_requirements(requirements))
    }

    fn from_requirements(mut requirements: Vec<Requirement>) -> Self {
        requirements.sort_by(|a, b| a.key.cmp(&b.key));
        Self {
            requirements,
            matches_nothing: false,
        }
    }

    /// Parses the object form. `None` and null match nothing, an empty object matches everything.
    pub fn from_object(selector: Option<&Value>) -> Result<Self, Error> {
        let Some(Value::Object(selector)) = selector else {
            return Ok(Self::nothing());
        };
        let mut requirements = Vec::new();
        if let Some(Value::Object(labels)) = selector.get("matchLabels") {
            for (key, value) in labels {
                let value = value.as_str().unwrap_or_default().to_owned();
                requirements.push(Requirement::new(key, Operator::In, vec![value])?);
            }
        }
        if let Some(Value::Array(expressions)) = selector.get("matchExpressions") {
            for expression in expressions {
                requirements.push(expression_requirement(expression)?);
            }
        }
        Ok(Self::from_requirements(requirements))
    }

    pub fn requirements(&self) -> &[Requirement] {
        &self.requirements
    }

    /// Whether it matches every object.
    pub fn is_empty(&self) -> bool {
        self.requirements.is_empty() && !self.matches_nothing
    }

    /// Whether the selector matches labels that are given by a lookup function.
    pub fn matches_with<'a>(&self, lookup: impl Fn(&str) -> Option<&'a str>) -> bool {
        !self.matches_nothing
            && self
                .requirements
                .iter()
                .all(|requirement| requirement.holds(lookup(&requirement.key)))
    }

    /// Whether the selector matches `metadata.labels`.
    pub fn matches(&self, labels: Option<&Map<String, Value>>) -> bool {
        self.matches_with(|key| labels?.get(key)?.as_str())
    }

    /// Whether the selector matches an object by its `metadata.labels`.
    pub fn matches_object(&self, object: &Value) -> bool {
        let labels = object
            .get("metadata")
            .and_then(|metadata| metadata.get("labels"))
            .and_then(Value::as_object);
        self.matches(labels)
    }
}

fn expression_requirement(expression: &Value) -> Result<Requirement, Error> {
    let text = |name: &str| {
        expression
            .get(name)
            .and_then(Value::as_str)
            .unwrap_or_default()
    };
    let operator = match text("operator") {
        "In" => Operator::In,
        "NotIn" => Operator::NotIn,
        "Exists" => Operator::Exists,
        "DoesNotExist" => Operator::DoesNotExist,
        other => {
            return Err(Error(format!(
                "\"{other}\" is not a valid label selector operator"
            )));
        }
    };
    let values = expression
        .get("values")
        .and_then(Value::as_array)
        .map(|values| {
            values
                .iter()
                .filter_map(Value::as_str)
                .map(str::to_owned)
                .collect()
        })
        .unwrap_or_default();
    Requirement::new(text("key"), operator, values)
}

impl fmt::Display for Requirement {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (key, values) = (&self.key, self.values.join(","));
        match self.operator {
            Operator::In => write!(f, "{key} in ({values})"),
            Operator::NotIn => write!(f, "{key} notin ({values})"),
            Operator::Equals => write!(f, "{key}={values}"),
            Operator::NotEquals => write!(f, "{key}!={values}"),
            Operator::Exists => write!(f, "{key}"),
            Operator::DoesNotExist => write!(f, "!{key}"),
            Operator::GreaterThan => write!(f, "{key}>{values}"),
            Operator::LessThan => write!(f, "{key}<{values}"),
        }
    }
}

impl fmt::Display for LabelSelector {
    /// Writes the string form, as in `status.selector` of a scale.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (position, requirement) in self.requirements.iter().enumerate() {
            if position > 0 {
                f.write_str(",")?;
            }
            // Kubernetes prints a set with one value as an equality.
            if requirement.operator == Operator::In && requirement.values.len() == 1 {
                write!(f, "{}={}", requirement.key, requirement.values[0])?;
            } else {
                write!(f, "{requirement}")?;
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn matches(selector: &str, labels: &Value) -> bool {
        LabelSelector::parse(selector)
            .unwrap_or_else(|e| panic!("{selector}: {e}"))
            .matches(labels.as_object())
    }

    #[test]
    fn every_operator_matches_as_kubernetes_does() {
        let labels = json!({"app": "web", "tier": "front", "size": "5", "in": "x"});
        let cases = [
            ("", true),
            ("app=web", true),
            ("app == web", true),
            ("app!=web", false),
            ("other!=web", true),
            ("app in (web, db)", true),
            ("app notin (db)", true),
            ("missing notin (db)", true),
            ("app", true),
            ("!app", false),
            ("!missing", true),
            ("size>4", true),
            ("size > 5", false),
            ("size<6", true),
            ("app>1", false),
            ("app=web,tier in (front),!legacy", true),
            ("in=x", true),
            ("app in (in,web)", true),
            ("missing=", false),
            ("app in (,web)", true),
        ];
        for (selector, expected) in cases {
            assert_eq!(matches(selector, &labels), expected, "{selector}");
        }
    }

    #[test]
    fn errors_have_the_messages_of_kube_apiserver() {
        let cases = [
            (
                "a b",
                "unable to parse requirement: found 'b', expected: in, notin, =, ==, !=, gt, lt",
            ),
            ("a,", "found '', expected: identifier after ','"),
            (
                "a in b",
                "unable to parse requirement: found 'b' expected: '('",
            ),
            ("a=b c", "found 'c', expected: ',' or 'end of string'"),
            (
                "(",
                "found '(', expected: !, identifier, or 'end of string'",
            ),
        ];
        for (selector, expected) in cases {
            assert_eq!(
                LabelSelector::parse(selector).unwrap_err().to_string(),
                expected
            );
        }
        let error = LabelSelector::parse("a=-b").unwrap_err().to_string();
        assert!(
            error.starts_with("unable to parse requirement: values[0][a]: Invalid value: \"-b\": a valid label must"),
            "{error}"
        );
        assert!(LabelSelector::parse("a>b").is_err());
        assert!(LabelSelector::parse("\u{c}").is_err());
    }

    #[test]
    fn the_object_form_selects_what_it_says() {
        let labels = json!({"app": "web", "tier": "front"});
        let object = json!({
            "matchLabels": {"app": "web"},
            "matchExpressions": [
                {"key": "tier", "operator": "In", "values": ["front", "back"]},
                {"key": "legacy", "operator": "DoesNotExist"}
            ]
        });
        let selector = LabelSelector::from_object(Some(&object)).unwrap();
        assert!(selector.matches(labels.as_object()));
        assert_eq!(selector.to_string(), "app=web,!legacy,tier in (back,front)");
        assert!(
            LabelSelector::from_object(Some(&json!({})))
                .unwrap()
                .matches(None)
        );
        assert!(
            !LabelSelector::from_object(None)
                .unwrap()
                .matches(labels.as_object())
        );
        let bad = json!({"matchExpressions": [{"key": "a", "operator": "Near"}]});
        assert_eq!(
            LabelSelector::from_object(Some(&bad))
                .unwrap_err()
                .to_string(),
            "\"Near\" is not a valid label selector operator"
        );
    }
}

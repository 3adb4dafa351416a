//! Field selectors: `metadata.name=x,status.phase!=Running`.

use std::fmt;

use super::Error;

/// A comparison of a field with a value.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct FieldTerm {
    pub field: String,
    pub value: String,
    /// Whether the operator is `!=` and not `=`.
    pub negated: bool,
}

/// A field selector. It matches if all terms match.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct FieldSelector {
    terms: Vec<FieldTerm>,
}

impl FieldSelector {
    pub fn parse(text: &str) -> Result<Self, Error> {
        let mut terms = Vec::new();
        for part in split_terms(text) {
            if part.is_empty() {
                continue;
            }
            let not_understood = || {
                Error(format!(
                    "invalid selector: '{text}'; can't understand '{part}'"
                ))
            };
            // The first operator splits the term. A '!' without '=' is part of the field name.
            let equals = part.find('=').ok_or_else(not_understood)?;
            let (field, negated) = match part[..equals].strip_suffix('!') {
                Some(field) => (field, true),
                None => (&part[..equals], false),
            };
            let rest = &part[equals + 1..];
            let value = if negated {
                rest
            } else {
                rest.strip_prefix('=').unwrap_or(rest)
            };
            terms.push(term(field, value, negated)?);
        }
        Ok(Self { terms })
    }

    pub fn terms(&self) -> &[FieldTerm] {
        &self.terms
    }

    pub fn is_empty(&self) -> bool {
        self.terms.is_empty()
    }

    /// Whether all terms match. `lookup` returns the value of a field; a missing field counts as the empty string, as in
    /// Kubernetes.
    pub fn matches<'a>(&self, lookup: impl Fn(&str) -> Option<&'a str>) -> bool {
        self.terms
            .iter()
            .all(|term| (lookup(&term.field).unwrap_or("") == term.value) != term.negated)
    }

    /// The value that `field` must be equal to, if a term requires one. It allows a lookup by name.
    pub fn required_value(&self, field: &str) -> Option<&str> {
        self.terms
            .iter()
            .find(|term| !term.negated && term.field == field)
            .map(|term| term.value.as_str())
    }

    /// Returns an error if the selector uses a field that is not in `supported`.
    pub fn check_fields(&self, supported: &[&str]) -> Result<(), Error> {
        match self
            .terms
            .iter()
            .find(|term| !supported.contains(&term.field.as_str()))
        {
            Some(term) => Err(Error(format!("field label not supported: {}", term.field))),
            None => Ok(()),
        }
    }
}

fn term(field: &str, escaped: &str, negated: bool) -> Result<FieldTerm, Error> {
    Ok(FieldTerm {
        field: field.to_owned(),
        value: unescape(escaped)?,
        negated,
    })
}

/// Splits at commas that are not escaped by a backslash.
fn split_terms(text: &str) -> Vec<&str> {
    let mut terms = Vec::new();
    let mut start = 0;
    let mut escaped = false;
    for (at, byte) in text.bytes().enumerate() {
        match byte {
            _ if escaped => escaped = false,
            b'\\' => escaped = true,
            b',' => {
                terms.push(&text[start..at]);
                start = at + 1;
            }
            _ => {}
        }
    }
    terms.push(&text[start..]);
    terms
}

fn unescape(text: &str) -> Result<String, Error> {
    if !text.contains(['\\', ',', '=']) {
        return Ok(text.to_owned());
    }
    let mut value = String::with_capacity(text.len());
    let mut characters = text.chars();
    while let Some(character) = characters.next() {
        match character {
            '\\' => match characters.next() {
                Some(escaped @ ('\\' | ',' | '=')) => value.push(escaped),
                Some(other) => {
                    return Err(Error(format!(
                        "invalid field selector: invalid escape sequence: \\{other}"
                    )));
                }
                None => {
                    return Err(Error(
                        "invalid field selector: invalid escape sequence: \\".to_owned(),
                    ));
                }
            },
            ',' | '=' => {
                return Err(Error(format!(
                    "invalid field selector: unescaped character in value: {character}"
                )));
            }
            other => value.push(other),
        }
    }
    Ok(value)
}

impl fmt::Display for FieldSelector {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (position, term) in self.terms.iter().enumerate() {
            if position > 0 {
                f.write_str(",")?;
            }
            let operator = if term.negated { "!=" } else { "=" };
            let value = term
                .value
                .replace('\\', "\\\\")
                .replace(',', "\\,")
                .replace('=', "\\=");
            write!(f, "{}{operator}{value}", term.field)?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn lookup(field: &str) -> Option<&'static str> {
        match field {
            "metadata.name" => Some("x"),
            "status.phase" => Some("a,b"),
            _ => None,
        }
    }

    #[test]
    fn terms_match_the_fields_of_an_object() {
        let cases = [
            ("", true),
            ("metadata.name=x", true),
            ("metadata.name==x", true),
            ("metadata.name!=x", false),
            ("metadata.name=x,status.phase=a\\,b", true),
            ("metadata.name=x,missing=y", false),
            ("missing=", true),
            ("missing!=", false),
        ];
        for (text, expected) in cases {
            let selector = FieldSelector::parse(text).unwrap();
            assert_eq!(selector.matches(lookup), expected, "{text}");
            assert_eq!(
                FieldSelector::parse(&selector.to_string()).unwrap(),
                selector
            );
        }
    }

    #[test]
    fn errors_have_the_messages_of_kube_apiserver() {
        assert_eq!(
            FieldSelector::parse("abc").unwrap_err().to_string(),
            "invalid selector: 'abc'; can't understand 'abc'"
        );
        assert!(FieldSelector::parse("a=b=c").is_err());
        assert!(FieldSelector::parse("a=\\x").is_err());
        let selector = FieldSelector::parse("spec.color=red").unwrap();
        assert_eq!(
            selector
                .check_fields(&["metadata.name"])
                .unwrap_err()
                .to_string(),
            "field label not supported: spec.color"
        );
    }

    #[test]
    fn a_lookup_by_name_is_recognised() {
        let selector = FieldSelector::parse("metadata.name=x").unwrap();
        assert_eq!(selector.required_value("metadata.name"), Some("x"));
        assert_eq!(
            FieldSelector::parse("metadata.name!=x")
                .unwrap()
                .required_value("metadata.name"),
            None
        );
    }
}

//! Errors about a field of an object, in the wording of Kubernetes' `field.Error`, and field paths.
//!
//! [`crate::status::Status::invalid`] puts these errors into a response.

use std::fmt;

use serde_json::Value;

use crate::go;

/// A path to a field. It is built from the root down without allocation. `Display` uses the notation of Kubernetes:
/// `spec.containers[0].env[name]`.
#[derive(Debug, Clone, Copy)]
pub struct Path<'a> {
    parent: Option<&'a Path<'a>>,
    segment: Segment<'a>,
}

#[derive(Debug, Clone, Copy)]
enum Segment<'a> {
    Root,
    Child(&'a str),
    Index(usize),
    Key(&'a str),
}

impl<'a> Path<'a> {
    /// The path of the object itself.
    pub const ROOT: Path<'static> = Path {
        parent: None,
        segment: Segment::Root,
    };

    /// The path of a top-level field.
    pub const fn new(name: &'a str) -> Self {
        Path {
            parent: None,
            segment: Segment::Child(name),
        }
    }

    #[must_use]
    pub const fn child(&'a self, name: &'a str) -> Path<'a> {
        Path {
            parent: Some(self),
            segment: Segment::Child(name),
        }
    }

    #[must_use]
    pub const fn index(&'a self, index: usize) -> Path<'a> {
        Path {
            parent: Some(self),
            segment: Segment::Index(index),
        }
    }

    #[must_use]
    pub const fn key(&'a self, key: &'a str) -> Path<'a> {
        Path {
            parent: Some(self),
            segment: Segment::Key(key),
        }
    }

    fn write(&self, f: &mut fmt::Formatter<'_>) -> Result<bool, fmt::Error> {
        let started = match self.parent {
            Some(parent) => parent.write(f)?,
            None => false,
        };
        match self.segment {
            Segment::Root => return Ok(started),
            Segment::Child(name) if started => write!(f, ".{name}")?,
            Segment::Child(name) => f.write_str(name)?,
            Segment::Index(index) => write!(f, "[{index}]")?,
            Segment::Key(key) => write!(f, "[{key}]")?,
        }
        Ok(true)
    }
}

impl fmt::Display for Path<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if !self.write(f)? {
            f.write_str("<nil>")?;
        }
        Ok(())
    }
}

/// The kind of a field error.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ErrorKind {
    NotFound,
    Required,
    Duplicate,
    Invalid,
    NotSupported,
    Forbidden,
    TooLong,
    TooMany,
    Internal,
    TypeInvalid,
}

impl ErrorKind {
    /// The machine-readable `reason` of a status cause.
    pub const fn cause_type(self) -> &'static str {
        match self {
            Self::NotFound => "FieldValueNotFound",
            Self::Required => "FieldValueRequired",
            Self::Duplicate => "FieldValueDuplicate",
            Self::Invalid => "FieldValueInvalid",
            Self::NotSupported => "FieldValueNotSupported",
            Self::Forbidden => "FieldValueForbidden",
            Self::TooLong => "FieldValueTooLong",
            Self::TooMany => "FieldValueTooMany",
            Self::Internal => "InternalError",
            Self::TypeInvalid => "FieldValueTypeInvalid",
        }
    }

    const fn words(self) -> &'static str {
        match self {
            Self::NotFound => "Not found",
            Self::Required => "Required value",
            Self::Duplicate => "Duplicate value",
            Self::Invalid | Self::TypeInvalid => "Invalid value",
            Self::NotSupported => "Unsupported value",
            Self::Forbidden => "Forbidden",
            Self::TooLong => "Too long",
            Self::TooMany => "Too many",
            Self::Internal => "Internal error",
        }
    }
}

/// An error about one field. `Display` gives `field: body`, the form in the message of a response.
#[derive(Debug, Clone, PartialEq)]
pub struct FieldError {
    pub kind: ErrorKind,
    pub field: String,
    /// The invalid value. `None` omits it from the message.
    pub bad_value: Option<Value>,
    pub detail: String,
}

impl FieldError {
    pub fn new(
        kind: ErrorKind,
        field: impl fmt::Display,
        bad_value: Option<Value>,
        detail: impl Into<String>,
    ) -> Self {
        Self {
            kind,
            field: field.to_string(),
            bad_value,
            detail: detail.into(),
        }
    }

    pub fn not_found(field: impl fmt::Display, value: impl Into<Value>) -> Self {
        Self::new(ErrorKind::NotFound, field, Some(value.into()), "")
    }

    pub fn required(field: impl fmt::Display, detail: impl Into<String>) -> Self {
        Self::new(ErrorKind::Required, field, None, detail)
    }

    pub fn duplicate(field: impl fmt::Display, value: impl Into<Value>) -> Self {
        Self::new(ErrorKind::Duplicate, field, Some(value.into()), "")
    }

    pub fn invalid(
        field: impl fmt::Display,
        value: impl Into<Value>,
        detail: impl Into<String>,
    ) -> Self {
        Self::new(ErrorKind::Invalid, field, Some(value.into()), detail)
    }

    pub fn type_invalid(
        field: impl fmt::Display,
        value: impl Into<Value>,
        detail: impl Into<String>,
    ) -> Self {
        Self::new(ErrorKind::TypeInvalid, field, Some(value.into()), detail)
    }

    pub fn not_supported<S: AsRef<str>>(
        field: impl fmt::Display,
        value: impl Into<Value>,
        supported: &[S],
    ) -> Self {
        let detail = if supported.is_empty() {
            String::new()
        } else {
            let quoted: Vec<String> = supported.iter().map(|s| go::quote(s.as_ref())).collect();
            format!("supported values: {}", quoted.join(", "))
        };
        Self::new(ErrorKind::NotSupported, field, Some(value.into()), detail)
    }

    pub fn forbidden(field: impl fmt::Display, detail: impl Into<String>) -> Self {
        Self::new(ErrorKind::Forbidden, field, None, detail)
    }

    pub fn too_long(field: impl fmt::Display, max_bytes: usize) -> Self {
        let detail = format!("may not be more than {max_bytes} bytes");
        Self::new(ErrorKind::TooLong, field, None, detail)
    }

    pub fn too_many(field: impl fmt::Display, actual: usize, maximum: usize) -> Self {
        let detail = format!("must have at most {maximum} items");
        Self::new(ErrorKind::TooMany, field, Some(actual.into()), detail)
    }

    pub fn internal(field: impl fmt::Display, detail: impl Into<String>) -> Self {
        Self::new(ErrorKind::Internal, field, None, detail)
    }

    /// The message without the field name, the form in a status cause.
    pub fn body(&self) -> String {
        let words = self.kind.words();
        let omits_value = matches!(
            self.kind,
            ErrorKind::Required | ErrorKind::Forbidden | ErrorKind::TooLong | ErrorKind::Internal
        );
        let mut body = match &self.bad_value {
            Some(value) if !omits_value => format!("{words}: {}", print_value(value)),
            _ => words.to_owned(),
        };
        if !self.detail.is_empty() {
            body.push_str(": ");
            body.push_str(&self.detail);
        }
        body
    }
}

fn print_value(value: &Value) -> String {
    match value {
        // Kubernetes replaces nil with the string "null" and then quotes it.
        Value::Null => "\"null\"".to_owned(),
        Value::String(text) => go::quote(text),
        Value::Number(number) => match number.as_f64() {
            Some(float) if number.is_f64() => go::float(float),
            _ => number.to_string(),
        },
        other => go::syntax(other),
    }
}

impl fmt::Display for FieldError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.field, self.body())
    }
}

impl std::error::Error for FieldError {}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn paths_print_in_kubernetes_notation() {
        let spec = Path::new("spec");
        let containers = spec.child("containers");
        let first = containers.index(0);
        assert_eq!(
            first.child("env").key("HOME").to_string(),
            "spec.containers[0].env[HOME]"
        );
        assert_eq!(Path::ROOT.child("spec").to_string(), "spec");
        assert_eq!(Path::ROOT.to_string(), "<nil>");
    }

    #[test]
    fn errors_read_as_kubernetes_writes_them() {
        let cases = [
            (FieldError::required("spec.x", ""), "spec.x: Required value"),
            (
                FieldError::required("a", "must be specified"),
                "a: Required value: must be specified",
            ),
            (
                FieldError::invalid("a", 2, "too big"),
                "a: Invalid value: 2: too big",
            ),
            (
                FieldError::invalid("a", "x", "bad"),
                "a: Invalid value: \"x\": bad",
            ),
            (
                FieldError::invalid("a", Value::Null, "bad"),
                "a: Invalid value: \"null\": bad",
            ),
            (
                FieldError::not_supported("a", "x", &["A", "B"]),
                "a: Unsupported value: \"x\": supported values: \"A\", \"B\"",
            ),
            (
                FieldError::duplicate("a[1]", json!({"name": "x"})),
                "a[1]: Duplicate value: map[string]interface {}{\"name\":\"x\"}",
            ),
            (
                FieldError::too_long("a", 5),
                "a: Too long: may not be more than 5 bytes",
            ),
            (
                FieldError::too_many("a", 3, 2),
                "a: Too many: 3: must have at most 2 items",
            ),
            (FieldError::forbidden("a", "no"), "a: Forbidden: no"),
        ];
        for (error, expected) in cases {
            assert_eq!(error.to_string(), expected);
        }
    }
}

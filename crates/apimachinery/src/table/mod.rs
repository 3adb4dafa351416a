//! `meta.k8s.io/v1` tables: server-side printing for `kubectl get`.
//!
//! Columns come from `additionalPrinterColumns` of a CRD; built-in resources have the usual kubectl columns. The caller provides
//! the current time, from which ages are computed.

mod builtin;
mod pods;

use jiff::Timestamp;
use serde_json::{Map, Value, json};

use crate::duration;
use crate::field::FieldError;
use crate::jsonpath::JsonPath;

/// The value of `includeObject`: what each row contains besides its cells.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum IncludeObject {
    None,
    #[default]
    Metadata,
    Object,
}

impl IncludeObject {
    /// Parses the `includeObject` parameter. Returns `None` for an unknown value.
    pub fn from_parameter(text: &str) -> Option<Self> {
        match text {
            "" | "Metadata" => Some(Self::Metadata),
            "None" => Some(Self::None),
            "Object" => Some(Self::Object),
            _ => None,
        }
    }
}

/// The columns of a resource. It prints rows.
#[derive(Debug, Clone)]
pub struct Printer {
    columns: Vec<Column>,
    cells: Cells,
}

#[derive(Debug, Clone)]
struct Column {
    name: String,
    kind: String,
    format: String,
    description: String,
    priority: i64,
}

#[derive(Debug, Clone)]
enum Cells {
    Paths(Vec<JsonPath>),
    Builtin(fn(&Value, Timestamp) -> Vec<Value>),
}

impl Column {
    fn fixed(name: &str, priority: i64) -> Self {
        Self {
            name: name.to_owned(),
            kind: "string".to_owned(),
            format: if name == "Name" {
                "name".to_owned()
            } else {
                String::new()
            },
            description: String::new(),
            priority,
        }
    }

    fn definition(&self) -> Value {
        json!({
            "name": self.name, "type": self.kind, "format": self.format, "description": self.description,
            "priority": self.priority
        })
    }
}

impl Printer {
    /// The printer of a custom resource version. Without additional columns it shows name and age.
    pub fn custom(additional: Option<&Value>, path: &str) -> Result<Self, Vec<FieldError>> {
        let mut columns = vec![Column::fixed("Name", 0)];
        let mut paths = Vec::new();
        let mut errors = Vec::new();
        let age =
            json!([{"name": "Age", "type": "date", "jsonPath": ".metadata.creationTimestamp"}]);
        let given = additional
            .and_then(Value::as_array)
            .filter(|columns| !columns.is_empty());
        for (position, column) in given.or(age.as_array()).into_iter().flatten().enumerate() {
            let text = |name: &str| column.get(name).and_then(Value::as_str).unwrap_or_default();
            let json_path = text("jsonPath");
            match JsonPath::parse(json_path) {
                Ok(parsed) => paths.push(parsed),
                Err(error) => {
                    let at = format!("{path}[{position}].jsonPath");
                    errors.push(FieldError::invalid(at, json_path, error.to_string()));
                }
            }
            let description = match text("description") {
                "" => {
                    format!("Custom resource definition column (in JSONPath format): {json_path}")
                }
                description => description.to_owned(),
            };
            columns.push(Column {
                name: text("name").to_owned(),
                kind: text("type").to_owned(),
                format: text("format").to_owned(),
                description,
                priority: column.get("priority").and_then(Value::as_i64).unwrap_or(0),
            });
        }
        if errors.is_empty() {
            Ok(Self {
                columns,
                cells: Cells::Paths(paths),
            })
        } else {
            Err(errors)
        }
    }

    /// The printer of a built-in resource (`pods`, `endpointslices`). Resources without known columns show name and creation
    /// time.
    pub fn builtin(resource: &str) -> Self {
        let (names, cells) = builtin::columns(resource);
        let column = |name: &str| match name.strip_prefix('+') {
            Some(wide) => Column::fixed(wide, 1),
            None => Column::fixed(name, 0),
        };
        Self {
            columns: names.split(',').map(column).collect(),
            cells: Cells::Builtin(cells),
        }
    }

    /// The `columnDefinitions` of the table.
    pub fn definitions(&self) -> Value {
        Value::Array(self.columns.iter().map(Column::definition).collect())
    }

    /// The cells of one object, one for each column.
    pub fn cells(&self, object: &Value, now: Timestamp) -> Vec<Value> {
        match &self.cells {
            Cells::Builtin(cells) => cells(object, now),
            Cells::Paths(paths) => {
                let name = object
                    .pointer("/metadata/name")
                    .cloned()
                    .unwrap_or_default();
                let columns = self.columns.iter().skip(1);
                let rest =
                    paths
                        .iter()
                        .zip(columns)
                        .map(|(path, column)| match path.first(object) {
                            Some(value) => custom_cell(&column.kind, value, now),
                            None => Value::Null,
                        });
                std::iter::once(name).chain(rest).collect()
            }
        }
    }

    /// One row.
    pub fn row(&self, object: &Value, include: IncludeObject, now: Timestamp) -> Value {
        let mut row = Map::new();
        row.insert("cells".to_owned(), Value::Array(self.cells(object, now)));
        if let Some(condition) = completed_condition(object) {
            row.insert("conditions".to_owned(), condition);
        }
        match include {
            IncludeObject::None => {}
            IncludeObject::Object => {
                row.insert("object".to_owned(), object.clone());
            }
            IncludeObject::Metadata => {
                let metadata = object.get("metadata").cloned().unwrap_or_else(|| json!({}));
                let partial = json!({"kind": "PartialObjectMetadata", "apiVersion": "meta.k8s.io/v1", "metadata": metadata});
                row.insert("object".to_owned(), partial);
            }
        }
        Value::Object(row)
    }

    /// A table of objects. `list_metadata` is the metadata of the list, or of the object if there is only one.
    pub fn table<'a>(
        &self,
        objects: impl IntoIterator<Item = &'a Value>,
        list_metadata: &Value,
        include: IncludeObject,
        with_headers: bool,
        now: Timestamp,
    ) -> Value {
        let rows: Vec<Value> = objects
            .into_iter()
            .map(|object| self.row(object, include, now))
            .collect();
        let definitions = if with_headers {
            self.definitions()
        } else {
            Value::Null
        };
        json!({
            "kind": "Table", "apiVersion": "meta.k8s.io/v1", "metadata": list_metadata,
            "columnDefinitions": definitions, "rows": rows
        })
    }
}

/// Marks terminated pods as completed, so that clients can hide them.
fn completed_condition(object: &Value) -> Option<Value> {
    if object.get("kind").and_then(Value::as_str) != Some("Pod") {
        return None;
    }
    let (reason, message) = match object.pointer("/status/phase")?.as_str()? {
        "Succeeded" => ("Succeeded", "The pod has completed successfully."),
        "Failed" => ("Failed", "The pod failed."),
        _ => return None,
    };
    Some(json!([{"type": "Completed", "status": "True", "reason": reason, "message": message}]))
}

#[expect(
    clippy::cast_possible_truncation,
    reason = "an integer column truncates, as Kubernetes does"
)]
fn custom_cell(kind: &str, value: &Value, now: Timestamp) -> Value {
    match (kind, value) {
        (_, Value::Null) => Value::Null,
        ("string", Value::String(_)) | ("boolean", Value::Bool(_)) => value.clone(),
        ("string", other) => Value::String(other.to_string()),
        ("integer", Value::Number(number)) => match number.as_i64() {
            Some(integer) => Value::from(integer),
            None => number
                .as_f64()
                .map_or(Value::Null, |float| Value::from(float as i64)),
        },
        ("number", Value::Number(number)) => number.as_f64().map_or(Value::Null, Value::from),
        ("date", Value::String(text)) => Value::String(age(Some(text), now)),
        _ => Value::Null,
    }
}

/// Formats an age. Returns `<unknown>` without a time and `<invalid>` for a malformed time.
fn age(time: Option<&str>, now: Timestamp) -> String {
    match time {
        None | Some("") => "<unknown>".to_owned(),
        Some(text) => match crate::time::parse(text) {
            Ok(time) => duration::human(crate::time::seconds_between(time, now)),
            Err(_) => "<invalid>".to_owned(),
        },
    }
}

#[cfg(test)]
mod tests;

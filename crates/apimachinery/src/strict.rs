//! Decodes JSON request bodies and detects duplicate fields.
//!
//! The last value wins, as in every JSON decoder that Kubernetes uses. Field validation then refuses the body or warns, with the
//! paths found here.

use std::fmt;

use serde::de::{DeserializeSeed, Deserializer, Error as _, MapAccess, SeqAccess, Visitor};
use serde_json::{Map, Number, Value};

use crate::field::Path;
use crate::memory_budget::MemoryBudget;

/// More duplicates than this are no mistake but an attack.
pub(crate) const MAX_DUPLICATES: usize = 100;

/// A decoded body and its duplicate fields.
#[derive(Debug, Clone, PartialEq)]
pub struct Decoded {
    pub value: Value,
    /// The paths of duplicate fields, each listed once: `spec.replicas`.
    pub duplicates: Vec<String>,
}

/// Decodes a JSON document within the memory limit of a body.
pub fn decode(body: &[u8]) -> Result<Decoded, serde_json::Error> {
    decode_within(body, &mut MemoryBudget::default())
}

/// Decodes a JSON document that is part of a body, within the remaining memory of that body.
pub fn decode_within(body: &[u8], budget: &mut MemoryBudget) -> Result<Decoded, serde_json::Error> {
    let mut duplicates = Vec::new();
    let mut deserializer = serde_json::Deserializer::from_slice(body);
    let seed = Seed {
        path: Path::ROOT,
        duplicates: &mut duplicates,
        budget,
    };
    let value = seed.deserialize(&mut deserializer)?;
    deserializer.end()?;
    Ok(Decoded { value, duplicates })
}

/// The error message of strict field validation, or `None` if there are no problems.
pub fn message(duplicates: &[String], unknown: &[String]) -> Option<String> {
    let problems = problems(duplicates, unknown);
    (!problems.is_empty()).then(|| format!("strict decoding error: {}", problems.join(", ")))
}

/// The single problems, as sent in `Warning` headers.
pub fn problems(duplicates: &[String], unknown: &[String]) -> Vec<String> {
    let duplicates = duplicates
        .iter()
        .map(|path| format!("duplicate field \"{path}\""));
    let unknown = unknown
        .iter()
        .map(|path| format!("unknown field \"{path}\""));
    duplicates.chain(unknown).collect()
}

struct Seed<'a> {
    path: Path<'a>,
    duplicates: &'a mut Vec<String>,
    budget: &'a mut MemoryBudget,
}

impl Seed<'_> {
    fn charged<E: serde::de::Error>(self, value: Value) -> Result<Value, E> {
        let text_bytes = value.as_str().map_or(0, str::len);
        self.budget.value(text_bytes).map_err(E::custom)?;
        Ok(value)
    }
}

impl<'de> DeserializeSeed<'de> for Seed<'_> {
    type Value = Value;

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<Value, D::Error> {
        deserializer.deserialize_any(self)
    }
}

impl<'de> Visitor<'de> for Seed<'_> {
    type Value = Value;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a JSON value")
    }

    fn visit_unit<E: serde::de::Error>(self) -> Result<Value, E> {
        self.charged(Value::Null)
    }

    fn visit_bool<E: serde::de::Error>(self, value: bool) -> Result<Value, E> {
        self.charged(Value::Bool(value))
    }

    fn visit_i64<E: serde::de::Error>(self, value: i64) -> Result<Value, E> {
        self.charged(Value::from(value))
    }

    fn visit_u64<E: serde::de::Error>(self, value: u64) -> Result<Value, E> {
        self.charged(Value::from(value))
    }

    fn visit_f64<E: serde::de::Error>(self, value: f64) -> Result<Value, E> {
        let number = Number::from_f64(value).ok_or_else(|| E::custom("number out of range"))?;
        self.charged(Value::Number(number))
    }

    fn visit_str<E: serde::de::Error>(self, value: &str) -> Result<Value, E> {
        self.charged(Value::from(value))
    }

    fn visit_string<E: serde::de::Error>(self, value: String) -> Result<Value, E> {
        self.charged(Value::String(value))
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut access: A) -> Result<Value, A::Error> {
        let mut items = Vec::new();
        self.budget.value(0).map_err(A::Error::custom)?;
        loop {
            let seed = Seed {
                path: self.path.index(items.len()),
                duplicates: self.duplicates,
                budget: self.budget,
            };
            match access.next_element_seed(seed)? {
                Some(item) => items.push(item),
                None => return Ok(Value::Array(items)),
            }
        }
    }

    fn visit_map<A: MapAccess<'de>>(self, mut access: A) -> Result<Value, A::Error> {
        let mut members = Map::new();
        self.budget.value(0).map_err(A::Error::custom)?;
        while let Some(key) = access.next_key::<String>()? {
            self.budget
                .member(members.len(), key.len())
                .map_err(A::Error::custom)?;
            if members.contains_key(&key) {
                let path = self.path.child(&key).to_string();
                if !self.duplicates.contains(&path) {
                    self.duplicates.push(path);
                }
                if self.duplicates.len() > MAX_DUPLICATES {
                    return Err(A::Error::custom("too many duplicate fields"));
                }
            }
            let seed = Seed {
                path: self.path.child(&key),
                duplicates: self.duplicates,
                budget: self.budget,
            };
            let value = access.next_value_seed(seed)?;
            members.insert(key, value);
        }
        Ok(Value::Object(members))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn a_field_given_twice_is_named_and_the_last_value_wins() {
        let decoded =
            decode(br#"{"spec": {"a": 1, "a": 2, "l": [{"x": 1, "x": 2}]}, "n": null}"#).unwrap();
        assert_eq!(
            decoded.value,
            json!({"spec": {"a": 2, "l": [{"x": 2}]}, "n": null})
        );
        assert_eq!(decoded.duplicates, ["spec.a", "spec.l[0].x"]);
        assert_eq!(
            message(&decoded.duplicates, &["spec.q".to_owned()]).unwrap(),
            "strict decoding error: duplicate field \"spec.a\", duplicate field \"spec.l[0].x\", unknown field \"spec.q\""
        );
        assert_eq!(message(&[], &[]), None);
    }

    #[test]
    fn malformed_json_is_refused() {
        for body in ["", "{", "{} x", "[1,]"] {
            assert!(decode(body.as_bytes()).is_err(), "{body}");
        }
        let deep = "[".repeat(100_000);
        assert!(decode(deep.as_bytes()).is_err());
    }

    #[test]
    fn a_body_that_would_take_too_much_memory_is_refused_while_it_is_read() {
        let maps = format!("[{}0]", r#"{"":0},"#.repeat(200_000));
        let error = decode(maps.as_bytes()).unwrap_err();
        assert!(error.is_data(), "{error}");
        assert!(error.to_string().contains("too many values"), "{error}");
        let large = format!(
            "[{}\"\"]",
            format!("\"{}\",", "x".repeat(1000)).repeat(3000)
        );
        assert!(
            decode(large.as_bytes()).is_ok(),
            "as many bytes as a body may have"
        );
    }
}

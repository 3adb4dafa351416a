//! Decoding objects without their managed fields.
//!
//! No controller reads `metadata.managedFields`, but they are a third of an object's JSON and the most expensive part to decode: a tree
//! of maps for every manager. This deserializer skips them.

use std::borrow::Cow;
use std::fmt;

use kube::Resource;
use kube::core::{NamespaceResourceScope, ObjectMeta};
use serde::de::value::CowStrDeserializer;
use serde::de::{
    DeserializeSeed, Deserializer, Error, IgnoredAny, IntoDeserializer, MapAccess, Visitor,
};
use serde::{Deserialize, forward_to_deserialize_any};

use crate::cached::Cached;

/// An object that was decoded without its managed fields.
#[derive(Clone, Debug)]
pub struct Trimmed<K>(pub K);

impl<'de, K: Deserialize<'de>> Deserialize<'de> for Trimmed<K> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        K::deserialize(Within {
            inner: deserializer,
            level: Level::Object,
        })
        .map(Self)
    }
}

impl<K: Cached> Resource for Trimmed<K> {
    type DynamicType = ();
    type Scope = NamespaceResourceScope;

    fn kind((): &()) -> Cow<'_, str> {
        K::kind(&())
    }

    fn group((): &()) -> Cow<'_, str> {
        K::group(&())
    }

    fn version((): &()) -> Cow<'_, str> {
        K::version(&())
    }

    fn plural((): &()) -> Cow<'_, str> {
        K::plural(&())
    }

    fn meta(&self) -> &ObjectMeta {
        self.0.meta()
    }

    fn meta_mut(&mut self) -> &mut ObjectMeta {
        self.0.meta_mut()
    }
}

/// The depth of a value in the object. Nothing is skipped below the metadata.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Level {
    Object,
    Metadata,
}

/// A deserializer, visitor or map of one of these levels.
struct Within<T> {
    inner: T,
    level: Level,
}

impl<'de, D: Deserializer<'de>> Deserializer<'de> for Within<D> {
    type Error = D::Error;

    fn deserialize_any<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, D::Error> {
        let Self { inner, level } = self;
        inner.deserialize_any(Within {
            inner: visitor,
            level,
        })
    }

    fn deserialize_option<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, D::Error> {
        let Self { inner, level } = self;
        inner.deserialize_option(Within {
            inner: visitor,
            level,
        })
    }

    forward_to_deserialize_any! {
        bool i8 i16 i32 i64 i128 u8 u16 u32 u64 u128 f32 f64 char str string bytes byte_buf unit unit_struct newtype_struct seq
        tuple tuple_struct map struct enum identifier ignored_any
    }
}

impl<'de, V: Visitor<'de>> Visitor<'de> for Within<V> {
    type Value = V::Value;

    fn expecting(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.inner.expecting(formatter)
    }

    fn visit_none<E: Error>(self) -> Result<V::Value, E> {
        self.inner.visit_none()
    }

    fn visit_unit<E: Error>(self) -> Result<V::Value, E> {
        self.inner.visit_unit()
    }

    fn visit_some<D: Deserializer<'de>>(self, deserializer: D) -> Result<V::Value, D::Error> {
        self.inner.visit_some(Within {
            inner: deserializer,
            level: self.level,
        })
    }

    fn visit_map<A: MapAccess<'de>>(self, map: A) -> Result<V::Value, A::Error> {
        self.inner.visit_map(Members {
            inner: map,
            level: self.level,
            at_metadata: false,
        })
    }
}

/// The members of an object or of its metadata.
struct Members<A> {
    inner: A,
    level: Level,
    /// The next value is the object's metadata.
    at_metadata: bool,
}

impl<'de, A: MapAccess<'de>> MapAccess<'de> for Members<A> {
    type Error = A::Error;

    fn next_key_seed<S: DeserializeSeed<'de>>(
        &mut self,
        seed: S,
    ) -> Result<Option<S::Value>, A::Error> {
        loop {
            let Some(Name(name)) = self.inner.next_key()? else {
                return Ok(None);
            };
            if self.level == Level::Metadata && name == "managedFields" {
                self.inner.next_value::<IgnoredAny>()?;
                continue;
            }
            self.at_metadata = self.level == Level::Object && name == "metadata";
            let name: CowStrDeserializer<'de, A::Error> = name.into_deserializer();
            return seed.deserialize(name).map(Some);
        }
    }

    fn next_value_seed<S: DeserializeSeed<'de>>(&mut self, seed: S) -> Result<S::Value, A::Error> {
        if self.at_metadata {
            self.inner.next_value_seed(Within {
                inner: seed,
                level: Level::Metadata,
            })
        } else {
            self.inner.next_value_seed(seed)
        }
    }
}

impl<'de, S: DeserializeSeed<'de>> DeserializeSeed<'de> for Within<S> {
    type Value = S::Value;

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<S::Value, D::Error> {
        self.inner.deserialize(Within {
            inner: deserializer,
            level: self.level,
        })
    }
}

/// A member's name, borrowed from the text where it has no escapes.
struct Name<'de>(Cow<'de, str>);

impl<'de> Deserialize<'de> for Name<'de> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_str(NameVisitor)
    }
}

struct NameVisitor;

impl<'de> Visitor<'de> for NameVisitor {
    type Value = Name<'de>;

    fn expecting(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str("the name of a member")
    }

    fn visit_borrowed_str<E>(self, name: &'de str) -> Result<Self::Value, E> {
        Ok(Name(Cow::Borrowed(name)))
    }

    fn visit_str<E>(self, name: &str) -> Result<Self::Value, E> {
        Ok(Name(Cow::Owned(name.to_owned())))
    }
}

#[cfg(test)]
mod tests {
    use api::Sandbox;
    use kube::ResourceExt;
    use kube::core::WatchEvent;
    use planner::sandbox::ObservedPod;
    use serde_json::{Value, json};

    use super::*;

    fn pod() -> Value {
        json!({
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": {
                "name": "one",
                "labels": { "managedFields": "a label", "metadata": "another" },
                "managedFields": [{ "manager": "x", "fieldsV1": { "f:metadata": {} } }],
                "uid": "u",
            },
            "spec": { "containers": [{ "name": "main", "image": "i" }] },
            "status": { "phase": "Running" },
        })
    }

    #[test]
    fn only_the_managed_fields_are_missing() {
        let mut expected: ObservedPod = serde_json::from_value(pod()).unwrap();
        expected.metadata.managed_fields = None;
        let Trimmed(decoded) =
            serde_json::from_str::<Trimmed<ObservedPod>>(&pod().to_string()).unwrap();
        assert_eq!(decoded, expected);
        assert_eq!(decoded.labels()["managedFields"], "a label");
    }

    #[test]
    fn watches_decode_so_too() {
        let event = json!({ "type": "MODIFIED", "object": pod() }).to_string();
        let event: WatchEvent<Trimmed<ObservedPod>> = serde_json::from_str(&event).unwrap();
        let WatchEvent::Modified(Trimmed(decoded)) = event else {
            panic!("{event:?}");
        };
        assert_eq!(decoded.metadata.managed_fields, None);
        assert_eq!(decoded.name_any(), "one");
    }

    #[test]
    fn what_cannot_be_decoded_still_says_why() {
        let broken = json!({ "metadata": { "name": 7 }, "spec": {} }).to_string();
        let error = serde_json::from_str::<Trimmed<Sandbox>>(&broken).unwrap_err();
        assert!(
            error.to_string().contains("invalid type: integer `7`"),
            "{error}"
        );
        let empty = serde_json::from_str::<Trimmed<ObservedPod>>("{}").unwrap();
        assert_eq!(empty.0, ObservedPod::default());
    }
}

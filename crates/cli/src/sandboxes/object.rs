//! An object as it is listed and shown. An object that cannot be decoded is shown with its metadata and conditions, and printed for
//! programs as the server returned it.

use std::borrow::Cow;

use api::conditions::{self, ConditionType, Finding, Reason};
use api::decoding::{Decoded, Unreadable, text_of};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{Condition, ObjectMeta, Time};
use k8s_openapi::jiff::Timestamp;
use kube::Resource;
use kube::core::NamespaceResourceScope;
use serde::{Deserialize, Deserializer, Serialize, Serializer};
use serde_json::Value;

use super::columns::{NOTHING, Shown};

#[derive(Clone, Debug)]
pub enum Object<Kind> {
    Readable(Kind),
    Unreadable {
        left: Box<Unreadable>,
        /// The object as the server gave it.
        whole: Value,
    },
}

impl<'de, Kind: Shown> Deserialize<'de> for Object<Kind> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let text = &text_of(deserializer)?;
        Ok(match Decoded::from_json(text) {
            Decoded::Readable(object) => Self::Readable(object),
            Decoded::Unreadable(left) => Self::Unreadable {
                left: Box::new(with_condition(*left)),
                whole: serde_json::from_str(text).unwrap_or_default(),
            },
        })
    }
}

/// Adds the condition that a controller would set on an object that cannot be decoded.
fn with_condition(mut left: Unreadable) -> Unreadable {
    let message = format!("The object cannot be read: {}", left.problem);
    let reason = Reason::InvalidConfiguration;
    let finding = Finding::new(ConditionType::Ready, false, reason, message);
    let created = left.metadata.creation_timestamp.clone();
    let since = created.unwrap_or(Time(Timestamp::UNIX_EPOCH));
    let generation = left.metadata.generation;
    conditions::merge(&mut left.conditions, &finding, generation, &since);
    left
}

impl<Kind: Serialize> Serialize for Object<Kind> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        match self {
            Self::Readable(object) => object.serialize(serializer),
            Self::Unreadable { whole, .. } => whole.serialize(serializer),
        }
    }
}

impl<Kind: Shown> Resource for Object<Kind> {
    type DynamicType = ();
    type Scope = NamespaceResourceScope;

    fn kind((): &()) -> Cow<'_, str> {
        Kind::kind(&())
    }

    fn group((): &()) -> Cow<'_, str> {
        Kind::group(&())
    }

    fn version((): &()) -> Cow<'_, str> {
        Kind::version(&())
    }

    fn plural((): &()) -> Cow<'_, str> {
        Kind::plural(&())
    }

    fn meta(&self) -> &ObjectMeta {
        match self {
            Self::Readable(object) => object.meta(),
            Self::Unreadable { left, .. } => &left.metadata,
        }
    }

    fn meta_mut(&mut self) -> &mut ObjectMeta {
        match self {
            Self::Readable(object) => object.meta_mut(),
            Self::Unreadable { left, .. } => &mut left.metadata,
        }
    }
}

impl<Kind: Shown> Shown for Object<Kind> {
    const SINGULAR: &'static str = Kind::SINGULAR;
    const PLURAL: &'static str = Kind::PLURAL;
    const TITLES: (&'static [&'static str], &'static [&'static str]) = Kind::TITLES;

    fn cells(&self, now: Timestamp) -> (Vec<String>, Vec<String>) {
        match self {
            Self::Readable(object) => object.cells(now),
            Self::Unreadable { .. } => {
                let (narrow, wide) = Self::TITLES;
                let cell = |title: &&str| match *title {
                    "READY" => "False".to_owned(),
                    "REASON" => Reason::InvalidConfiguration.to_string(),
                    "IMAGES" | "DESIRED" => "unreadable".to_owned(),
                    _ => NOTHING.to_owned(),
                };
                let cells = |titles: &[&str]| titles.iter().map(cell).collect();
                (cells(narrow), cells(wide))
            }
        }
    }

    fn conditions(&self) -> &[Condition] {
        match self {
            Self::Readable(object) => object.conditions(),
            Self::Unreadable { left, .. } => &left.conditions,
        }
    }
}

#[cfg(test)]
mod tests {
    use api::{Sandbox, SandboxClaim, SandboxTemplate, SandboxWarmPool};

    use super::*;
    use crate::output::Detail;
    use crate::sandboxes::columns::{header, row};

    fn read<Kind: Shown>(text: &str) -> Object<Kind> {
        serde_json::from_str(text).unwrap()
    }

    fn shown<Kind: Shown>(text: &str) -> Vec<String> {
        let row = row(
            &read::<Kind>(text),
            false,
            Detail::Wide,
            Timestamp::UNIX_EPOCH,
        );
        assert_eq!(row.len(), header::<Kind>(false, Detail::Wide).len());
        row
    }

    #[test]
    fn an_object_that_cannot_be_read_has_its_row_like_others() {
        let text = r#"{"metadata":{"name":"x"},"spec":{"replicas":3000000000,"podTemplate":{"spec":{"containers":[{"name":1}]}},
            "lifecycle":{"ttlSecondsAfterFinished":2147483648},"sandboxTemplateRef":{"name":"t"}}}"#;
        assert_eq!(
            shown::<SandboxClaim>(text)[..3],
            ["x", "False", "InvalidConfiguration"]
        );
        assert_eq!(
            shown::<Sandbox>(text)[..3],
            ["x", "False", "InvalidConfiguration"]
        );
        assert_eq!(shown::<SandboxWarmPool>(text)[..2], ["x", "unreadable"]);
        assert_eq!(shown::<SandboxTemplate>(text)[..2], ["x", "unreadable"]);
    }

    #[test]
    fn programs_get_the_object_as_it_is() {
        let text = r#"{"apiVersion":"v","metadata":{"name":"x"},"spec":{"replicas":3000000000}}"#;
        let object = read::<SandboxWarmPool>(text);
        let whole: Value = serde_json::from_str(text).unwrap();
        assert_eq!(serde_json::to_value(&object).unwrap(), whole);
        let message = &object.conditions()[0].message;
        assert!(message.contains("spec.replicas"), "{message}");
    }
}

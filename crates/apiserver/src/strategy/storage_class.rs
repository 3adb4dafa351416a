//! The rules of storage classes, and which of them is the default of claims.

use apimachinery::field::FieldError;
use serde_json::Value;
use store::{Range, ResourceId};

use super::{
    Context, Kind,
    fields::{default_text, immutable, one_of, text},
};
use crate::{metadata, registry::Resource, target::Part};

/// The annotations that mark the default class. The second is the older name.
const IS_DEFAULT: [&str; 2] = [
    "storageclass.kubernetes.io/is-default-class",
    "storageclass.beta.kubernetes.io/is-default-class",
];

/// Storage classes.
pub struct StorageClass;

impl Kind for StorageClass {
    fn default(&self, _resource: &Resource, object: &mut Value) {
        default(object);
    }

    fn validate(
        &self,
        _resource: &Resource,
        object: &Value,
        old: Option<&Value>,
        _part: Part,
    ) -> Vec<FieldError> {
        validate(object, old)
    }
}

fn default(class: &mut Value) {
    default_text(class, "reclaimPolicy", "Delete");
    default_text(class, "volumeBindingMode", "Immediate");
}

fn validate(class: &Value, old: Option<&Value>) -> Vec<FieldError> {
    let mut errors = Vec::new();
    if text(class, "provisioner").is_empty() {
        errors.push(FieldError::required("provisioner", ""));
    }
    one_of(
        &class["reclaimPolicy"],
        "reclaimPolicy",
        &["Delete", "Retain"],
        &mut errors,
    );
    one_of(
        &class["volumeBindingMode"],
        "volumeBindingMode",
        &["Immediate", "WaitForFirstConsumer"],
        &mut errors,
    );
    for (pointer, path) in [
        ("/provisioner", "provisioner"),
        ("/parameters", "parameters"),
        ("/reclaimPolicy", "reclaimPolicy"),
    ] {
        immutable(class, old, pointer, path, &mut errors);
    }
    errors
}

/// The name of the default class, if there is one.
pub fn default_class(context: &Context<'_>) -> Option<String> {
    let classes = ResourceId::new("storage.k8s.io", "storageclasses");
    let listed = context
        .store
        .list(&classes, &Range::namespace(""), None)
        .ok()?;
    let classes: Vec<Value> = listed.objects.iter().map(|class| class.value()).collect();
    newest_default(&classes)
}

/// The newest of the classes that are marked as default; of classes of the same age, the first by name.
fn newest_default(classes: &[Value]) -> Option<String> {
    let is_default = |class: &&Value| {
        let mut marks = IS_DEFAULT.into_iter();
        marks.any(|mark| annotation(class, mark) == Some("true"))
    };
    let age = |class: &Value| metadata::text(class, "creationTimestamp").to_owned();
    let name = |class: &Value| metadata::text(class, "name").to_owned();
    let newest = classes.iter().filter(is_default).max_by(|one, other| {
        let by_age = age(one).cmp(&age(other));
        by_age.then_with(|| name(other).cmp(&name(one)))
    });
    newest.map(name)
}

fn annotation<'a>(object: &'a Value, name: &str) -> Option<&'a str> {
    object["metadata"]["annotations"][name].as_str()
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn class(name: &str, created: &str, annotations: &Value) -> Value {
        json!({"metadata": {"name": name, "creationTimestamp": created, "annotations": annotations}})
    }

    #[test]
    fn of_several_default_classes_the_newest_counts_and_then_the_first_by_name() {
        let yes = json!({"storageclass.kubernetes.io/is-default-class": "true"});
        let beta = json!({"storageclass.beta.kubernetes.io/is-default-class": "true"});
        let no = json!({"storageclass.kubernetes.io/is-default-class": "false"});
        let (early, late) = ("2026-01-01T00:00:00Z", "2026-01-02T00:00:00Z");
        for (classes, expected) in [
            (vec![], None),
            (
                vec![class("a", late, &no), class("b", late, &json!(null))],
                None,
            ),
            (
                vec![class("a", early, &yes), class("b", late, &no)],
                Some("a"),
            ),
            (
                vec![class("a", early, &yes), class("b", late, &yes)],
                Some("b"),
            ),
            (
                vec![class("b", late, &yes), class("a", late, &yes)],
                Some("a"),
            ),
            (vec![class("a", early, &beta)], Some("a")),
        ] {
            assert_eq!(newest_default(&classes).as_deref(), expected, "{classes:?}");
        }
    }
}

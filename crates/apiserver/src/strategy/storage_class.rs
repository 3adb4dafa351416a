//! The class of claims that name none, as the admission plugin DefaultStorageClass gives it on every cluster.

use serde_json::Value;
use store::{Range, ResourceId};

use super::Context;
use crate::metadata;

/// Marks the default class. The second is how it was spelled once, and still counts.
const IS_DEFAULT: [&str; 2] = [
    "storageclass.kubernetes.io/is-default-class",
    "storageclass.beta.kubernetes.io/is-default-class",
];
/// Where a claim named its class once.
const CLASS_OF_CLAIM: &str = "volume.beta.kubernetes.io/storage-class";

/// Gives a new claim without a class the default one. A claim whose class is empty wants a volume that a user made by hand, and keeps it.
pub fn default_of_claim(context: &Context<'_>, claim: &mut Value) {
    let has_class = !claim["spec"]["storageClassName"].is_null();
    if has_class || annotation(claim, CLASS_OF_CLAIM).is_some() {
        return;
    }
    let classes = ResourceId::new("storage.k8s.io", "storageclasses");
    let Ok(listed) = context.store.list(&classes, &Range::namespace(""), None) else {
        return;
    };
    let classes: Vec<Value> = listed.objects.iter().map(|class| class.value()).collect();
    if let Some(name) = default_among(&classes) {
        claim["spec"]["storageClassName"] = Value::from(name);
    }
}

/// The default class: of several the newest, and of those of the same age the first by name.
fn default_among(classes: &[Value]) -> Option<String> {
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
            assert_eq!(default_among(&classes).as_deref(), expected, "{classes:?}");
        }
    }
}

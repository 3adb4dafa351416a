//! The objects of a watch, by UID.

use std::collections::{HashMap, HashSet};

use kube::Resource;
use kube::runtime::watcher::Event;

/// What a caller keeps of the objects of one watch.
#[derive(Debug)]
pub struct Watched<V> {
    /// By UID. While a list is in progress, also objects that it may turn out not to contain.
    pub objects: HashMap<String, V>,
    /// The UIDs that the list in progress has contained so far.
    listed: HashSet<String>,
    /// Whether a list has been completed.
    pub complete: bool,
}

impl<V> Default for Watched<V> {
    fn default() -> Self {
        Self {
            objects: HashMap::new(),
            listed: HashSet::new(),
            complete: false,
        }
    }
}

impl<V> Watched<V> {
    /// Applies an event, keeping `facts` of its object. Returns whether the caller must look at the objects again: not while a list
    /// is in progress.
    ///
    /// # Caveats
    /// An object without a UID is ignored. The API server sets it on every object.
    pub fn take<K: Resource>(&mut self, event: Event<K>, facts: impl Fn(K) -> V) -> bool {
        match event {
            Event::Init => {
                self.listed.clear();
                return false;
            }
            Event::InitApply(object) => {
                if let Some(uid) = uid(&object) {
                    self.listed.insert(uid.clone());
                    self.objects.insert(uid, facts(object));
                }
                return false;
            }
            Event::InitDone => {
                let listed = std::mem::take(&mut self.listed);
                self.objects.retain(|uid, _| listed.contains(uid));
                self.complete = true;
            }
            Event::Apply(object) => {
                let Some(uid) = uid(&object) else {
                    return false;
                };
                self.objects.insert(uid, facts(object));
            }
            Event::Delete(object) => {
                let Some(uid) = uid(&object) else {
                    return false;
                };
                self.objects.remove(&uid);
            }
        }
        true
    }
}

fn uid<K: Resource>(object: &K) -> Option<String> {
    object.meta().uid.clone().filter(|uid| !uid.is_empty())
}

#[cfg(test)]
mod tests {
    use k8s_openapi::api::core::v1::ConfigMap;
    use serde_json::json;

    use super::*;

    fn map(uid: Option<&str>, name: &str) -> ConfigMap {
        let object = json!({"metadata": {"name": name, "uid": uid}});
        serde_json::from_value(object).unwrap()
    }

    fn take(watched: &mut Watched<String>, event: Event<ConfigMap>) -> bool {
        watched.take(event, |map| map.metadata.name.unwrap())
    }

    fn names(watched: &Watched<String>) -> Vec<&str> {
        let mut names: Vec<&str> = watched.objects.values().map(String::as_str).collect();
        names.sort_unstable();
        names
    }

    #[test]
    fn a_list_replaces_what_was_known_once_it_is_complete() {
        let mut watched = Watched::default();
        assert!(!take(&mut watched, Event::Init));
        assert!(!take(&mut watched, Event::InitApply(map(Some("1"), "a"))));
        assert!(!watched.complete);
        assert!(take(&mut watched, Event::InitDone));
        assert!(watched.complete);
        assert!(take(&mut watched, Event::Apply(map(Some("2"), "b"))));
        assert_eq!(names(&watched), ["a", "b"]);

        take(&mut watched, Event::Init);
        take(&mut watched, Event::InitApply(map(Some("3"), "c")));
        // A list that fails is begun again.
        take(&mut watched, Event::Init);
        take(&mut watched, Event::InitApply(map(Some("2"), "b2")));
        assert_eq!(names(&watched), ["a", "b2", "c"], "still in progress");
        assert!(take(&mut watched, Event::InitDone));
        assert_eq!(names(&watched), ["b2"]);
        assert!(take(&mut watched, Event::Delete(map(Some("2"), "b2"))));
        assert!(watched.objects.is_empty());
    }

    #[test]
    fn objects_without_a_uid_are_not_taken_for_one_another() {
        let mut watched = Watched::default();
        for uid in [None, Some("")] {
            for event in [
                Event::Init,
                Event::InitApply(map(uid, "a")),
                Event::InitDone,
            ] {
                take(&mut watched, event);
            }
            assert!(!take(&mut watched, Event::Apply(map(uid, "b"))));
            assert!(!take(&mut watched, Event::Delete(map(uid, "c"))));
            assert!(watched.objects.is_empty());
        }
    }
}

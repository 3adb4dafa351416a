use std::sync::Mutex;

use planner::sandbox::ObservedPod;
use serde_json::json;

use super::*;

fn pod(name: &str, version: u64, owner: &str) -> ObservedPod {
    serde_json::from_value(json!({
        "metadata": {
            "name": name,
            "namespace": "default",
            "uid": format!("uid-of-{name}"),
            "resourceVersion": version.to_string(),
            "labels": {"kept": "yes"},
            "ownerReferences": [{
                "apiVersion": "v1", "kind": "Owner", "name": owner, "uid": owner, "controller": true,
            }],
        },
    }))
    .unwrap()
}

fn synced(pods: Vec<ObservedPod>) -> Cache<ObservedPod> {
    let cache = Cache::new(Some("kept"));
    list(&cache, pods);
    cache
}

fn list(cache: &Cache<ObservedPod>, pods: Vec<ObservedPod>) {
    cache.apply(Event::Init);
    for pod in pods {
        cache.apply(Event::InitApply(pod));
    }
    cache.apply(Event::InitDone);
}

fn version(cache: &Cache<ObservedPod>, name: &str) -> Option<u64> {
    let found = cache.get(&ObjectKey::new("default", name))?;
    resource_version(found.as_ref())
}

/// The versions before and after each change.
type Versions = Arc<Mutex<Vec<(Option<u64>, Option<u64>)>>>;

/// Records each change as the versions before and after it.
fn changes(cache: &Cache<ObservedPod>) -> Versions {
    let log = Arc::new(Mutex::new(Vec::new()));
    let noted = Arc::clone(&log);
    cache.subscribe(move |change| {
        let version =
            |pod: Option<&Arc<ObservedPod>>| pod.and_then(|pod| resource_version(pod.as_ref()));
        noted
            .lock()
            .unwrap()
            .push((version(change.before), version(change.after)));
    });
    log
}

#[test]
fn deletes_are_dispatched_also_those_that_only_a_new_listing_shows() {
    let cache = synced(vec![pod("a", 1, "x"), pod("b", 2, "x")]);
    let log = changes(&cache);
    cache.apply(Event::Delete(pod("a", 3, "x")));
    list(&cache, vec![]);
    assert_eq!(*log.lock().unwrap(), [(Some(1), None), (Some(2), None)]);
    assert!(cache.is_empty());
}

#[test]
fn an_own_write_is_known_at_once_and_its_echo_says_nothing_new() {
    let cache = synced(vec![pod("a", 1, "x")]);
    let log = changes(&cache);
    cache.learn(pod("a", 5, "x"), cache.epoch());
    assert_eq!(version(&cache, "a"), Some(5));
    cache.apply(Event::Apply(pod("a", 4, "x")));
    cache.apply(Event::Apply(pod("a", 5, "x")));
    assert_eq!(version(&cache, "a"), Some(5));
    assert_eq!(*log.lock().unwrap(), [(Some(1), Some(5))]);
}

#[test]
fn a_late_answer_does_not_bring_a_deleted_object_back() {
    let cache = synced(vec![]);
    let before_write = cache.epoch();
    cache.apply(Event::Apply(pod("a", 5, "x")));
    cache.apply(Event::Delete(pod("a", 6, "x")));
    cache.learn(pod("a", 5, "x"), before_write);
    assert_eq!(version(&cache, "a"), None);
    // The next object of the name is another one.
    cache.learn(pod("a", 7, "x"), before_write);
    assert_eq!(version(&cache, "a"), Some(7));
}

#[test]
fn a_deletion_that_was_never_seen_created_still_counts() {
    let cache = synced(vec![]);
    let before_write = cache.epoch();
    cache.apply(Event::Delete(pod("a", 6, "x")));
    cache.learn(pod("a", 5, "x"), before_write);
    assert_eq!(version(&cache, "a"), None);
}

#[test]
fn nothing_is_learned_across_a_new_listing() {
    let cache = synced(vec![]);
    let before_write = cache.epoch();
    list(&cache, vec![]);
    cache.learn(pod("a", 5, "x"), before_write);
    assert_eq!(version(&cache, "a"), None);

    cache.apply(Event::Init);
    cache.learn(pod("a", 5, "x"), cache.epoch());
    cache.apply(Event::InitDone);
    assert_eq!(version(&cache, "a"), None);
}

#[test]
fn a_listing_is_believed_even_when_the_server_went_back_in_time() {
    let cache = synced(vec![pod("a", 50, "x")]);
    list(&cache, vec![pod("a", 7, "x")]);
    assert_eq!(version(&cache, "a"), Some(7));
}

#[test]
fn objects_are_found_by_their_controller_as_it_changes() {
    let cache = synced(vec![pod("a", 1, "x"), pod("b", 2, "x")]);
    assert_eq!(cache.controlled_by("x").len(), 2);
    cache.apply(Event::Apply(pod("a", 3, "y")));
    assert_eq!(cache.controlled_by("x").len(), 1);
    assert_eq!(cache.controlled_by("y").len(), 1);
    cache.apply(Event::Delete(pod("a", 4, "y")));
    assert!(cache.controlled_by("y").is_empty());
}

#[test]
fn what_the_watch_does_not_select_is_not_learned() {
    let cache = synced(vec![]);
    let mut unlabelled = pod("a", 5, "x");
    unlabelled.metadata.labels = None;
    let answer = cache.learn(unlabelled, cache.epoch());
    assert_eq!(resource_version(answer.as_ref()), Some(5));
    assert!(cache.is_empty());
}

fn unreadable(name: &str, version: u64) -> Decoded<Trimmed<ObservedPod>> {
    let metadata = &pod(name, version, "o").metadata;
    let text = json!({ "metadata": metadata, "spec": 3, "status": 3 }).to_string();
    let decoded = Decoded::from_json(&text);
    assert!(decoded.readable().is_none(), "{text}");
    decoded
}

#[test]
fn an_object_that_becomes_unreadable_departs_and_comes_back_once_corrected() {
    let cache = synced(vec![pod("a", 1, "o"), pod("b", 2, "o")]);
    let log = changes(&cache);
    let reported = Arc::new(Mutex::new(Vec::new()));
    let noted = Arc::clone(&reported);
    cache.subscribe_unreadable(move |key| noted.lock().unwrap().push(key.name.to_string()));
    let key = ObjectKey::new("default", "a");
    cache.take(Event::Apply(unreadable("a", 5)));
    assert_eq!(version(&cache, "a"), None);
    assert!(cache.unreadable(&key).is_some());
    assert_eq!(cache.unreadable_in("default").len(), 1);
    assert!(cache.unreadable_in("defaul").is_empty());
    assert!(cache.controlled_by("o").len() == 1);
    // The late response to an earlier write does not bring it back.
    cache.learn(pod("a", 4, "o"), cache.epoch());
    assert_eq!(version(&cache, "a"), None);
    cache.apply(Event::Apply(pod("a", 6, "o")));
    assert_eq!(version(&cache, "a"), Some(6));
    assert!(cache.unreadable(&key).is_none());
    assert_eq!(*log.lock().unwrap(), [(Some(1), None), (None, Some(6))]);
    assert_eq!(*reported.lock().unwrap(), ["a"]);
}

#[test]
fn what_is_left_of_an_unreadable_object_goes_with_it() {
    let cache = synced(vec![]);
    let key = |name| ObjectKey::new("default", name);
    for name in ["a", "b"] {
        cache.take(Event::Apply(unreadable(name, 5)));
    }
    cache.take(Event::Delete(unreadable("a", 6)));
    assert!(cache.unreadable(&key("a")).is_none());
    list(&cache, vec![]);
    assert!(cache.unreadable(&key("b")).is_none());
    assert!(cache.is_synced());
}

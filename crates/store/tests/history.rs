//! Properties of the history that hold for any order of writes: a list and a watch never miss or repeat an event.

use std::collections::BTreeMap;

use proptest::prelude::*;
use serde_json::json;
use store::{
    Change, Draft, Event, EventKind, Expectation, Key, Location, Range, ResourceId, Store, Watch,
    Window, Write,
};

fn things() -> ResourceId {
    ResourceId::new("", "things")
}

fn draft(name: &str, number: usize) -> Draft {
    Draft::new(&json!({"apiVersion": "v1", "kind": "Thing", "metadata": {"name": name, "uid": name}, "number": number}))
        .expect("the object is well formed")
}

/// Creates, changes or deletes an object, depending on whether it exists.
async fn step(store: &Store, name: &str, number: usize, delete: bool) {
    let key = Key::new("", name);
    let current = store.get(&things(), &key);
    let expect = current.as_ref().map_or(Expectation::Absent, |object| {
        Expectation::Revision(object.revision)
    });
    let change = match (delete, &current) {
        (true, None) => return,
        (true, Some(_)) => Change::Delete(draft(name, number)),
        (false, _) => Change::Put(draft(name, number)),
    };
    // Another writer may win the race; then this step has no effect.
    let _ = store
        .write(Write {
            resource: things(),
            key,
            expect,
            requires: Vec::new(),
            change,
        })
        .await;
}

type State = BTreeMap<String, u64>;

fn listed(store: &Store) -> (State, u64) {
    let snapshot = store
        .list(&things(), &Range::namespace(""), None)
        .expect("the current revision never expires");
    (
        snapshot
            .objects
            .iter()
            .map(|object| (object.key.name().to_owned(), object.revision))
            .collect(),
        snapshot.revision,
    )
}

fn apply(state: &mut State, event: &Event) {
    let name = event.object.key.name().to_owned();
    let before = state.get(&name).copied();
    match event.kind {
        EventKind::Added => assert_eq!(before, None, "an object was added twice"),
        EventKind::Modified | EventKind::Deleted => assert_eq!(
            before,
            event.previous.as_ref().map(|previous| previous.revision)
        ),
    }
    if event.kind == EventKind::Deleted {
        state.remove(&name);
    } else {
        state.insert(name, event.revision());
    }
}

/// A watcher that started from a list and tracks the state by its events.
struct Follower {
    watch: Watch,
    state: State,
    revisions: Vec<u64>,
}

impl Follower {
    fn start(store: &Store) -> Self {
        let (state, revision) = listed(store);
        Self {
            watch: store
                .watch(&things(), revision)
                .expect("the current revision can be watched"),
            state,
            revisions: Vec::new(),
        }
    }

    /// Applies all available events. Returns whether the watch is still inside the window.
    fn catch_up(&mut self) -> bool {
        loop {
            match self.watch.ready() {
                Ok(events) if events.is_empty() => return true,
                Ok(events) => {
                    for event in &events {
                        apply(&mut self.state, event);
                        self.revisions.push(event.revision());
                    }
                }
                Err(_) => return false,
            }
        }
    }
}

#[derive(Clone, Debug)]
enum Action {
    Put(u8),
    Delete(u8),
    Follow,
    CatchUp(usize),
    ListOldRevisions,
    Restart,
}

fn action() -> impl Strategy<Value = Action> {
    prop_oneof![
        6 => (0..6_u8).prop_map(Action::Put),
        3 => (0..6_u8).prop_map(Action::Delete),
        2 => Just(Action::Follow),
        4 => (0..8_usize).prop_map(Action::CatchUp),
        2 => Just(Action::ListOldRevisions),
        1 => Just(Action::Restart),
    ]
}

async fn follow_history(actions: Vec<Action>) {
    let directory = tempfile::tempdir().expect("a temporary directory");
    let location = Location::Directory(directory.path().to_owned());
    let window = Window {
        events_per_kind: 24,
        ..Window::default()
    };
    let mut store = Store::open(&location, window).expect("the store opens");
    let mut followers: Vec<Follower> = Vec::new();
    let mut history: BTreeMap<u64, State> = BTreeMap::from([(0, State::new())]);
    for (number, action) in actions.into_iter().enumerate() {
        match action {
            Action::Put(name) => step(&store, &format!("t{name}"), number, false).await,
            Action::Delete(name) => step(&store, &format!("t{name}"), number, true).await,
            Action::Follow => followers.push(Follower::start(&store)),
            Action::CatchUp(index) if index < followers.len() => {
                if followers[index].catch_up() {
                    assert_eq!(
                        followers[index].state,
                        listed(&store).0,
                        "a follower that caught up has the current state"
                    );
                } else {
                    followers.remove(index);
                }
            }
            Action::CatchUp(_) => {}
            Action::ListOldRevisions => {
                for (revision, state) in &history {
                    if let Ok(snapshot) =
                        store.list(&things(), &Range::namespace(""), Some(*revision))
                    {
                        let past: State = snapshot
                            .objects
                            .iter()
                            .map(|object| (object.key.name().to_owned(), object.revision))
                            .collect();
                        assert_eq!(&past, state, "revision {revision} is unchanged");
                    }
                }
            }
            Action::Restart => {
                store.close().await;
                followers.clear();
                store = Store::open(&location, window).expect("the store opens again");
            }
        }
        let (state, revision) = listed(&store);
        history.insert(revision, state);
    }
    store.close().await;
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 48, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn list_then_watch_never_misses_or_repeats_an_event(actions in proptest::collection::vec(action(), 1..120)) {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime starts");
        runtime.block_on(follow_history(actions));
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn every_watcher_sees_the_exact_history_of_concurrent_writers() {
    let store = Store::open(&Location::Memory, Window::default()).unwrap();
    let mut witness = Follower::start(&store);
    let writers = (0..8).map(|writer| {
        let store = store.clone();
        tokio::spawn(async move {
            for number in 0..300 {
                step(
                    &store,
                    &format!("t{}", (number * 7 + writer) % 5),
                    number,
                    number % 4 == 3,
                )
                .await;
            }
        })
    });
    let watchers = (0..8).map(|index| {
        let store = store.clone();
        tokio::spawn(async move {
            for _ in 0..index * 20 {
                tokio::task::yield_now().await;
            }
            let mut follower = Follower::start(&store);
            for _ in 0..200 {
                assert!(follower.catch_up());
                tokio::task::yield_now().await;
            }
            follower
        })
    });
    let (writers, watchers): (Vec<_>, Vec<_>) = (writers.collect(), watchers.collect());
    for writer in writers {
        writer.await.unwrap();
    }
    assert!(witness.catch_up());
    let (present, revision) = listed(&store);
    assert_eq!(witness.state, present);
    assert_eq!(
        witness.revisions,
        (1..=revision).collect::<Vec<_>>(),
        "every revision exactly once, in order"
    );
    for watcher in watchers {
        let mut follower = watcher.await.unwrap();
        assert!(follower.catch_up());
        assert_eq!(follower.state, present);
        let first = follower.revisions.first().copied().unwrap_or(revision + 1);
        assert_eq!(follower.revisions, (first..=revision).collect::<Vec<_>>());
    }
    store.close().await;
}

//! Watching: the history of a kind, filtered by the selectors of a client.
//!
//! The client gets ADDED when an object starts to match and DELETED when it stops matching, even if the object itself was only
//! modified. The stream ends at its deadline, when the server stops, or with a 410 error when the window has moved past the
//! watcher.

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use apimachinery::{field::FieldError, status::Status};
use saturating_time::SaturatingTime;
use store::{Event, EventKind, Expired, Object, Range, Revision, Watch};

use super::{Api, ListOptions, VersionMatch, selection::Selection};
use crate::target::Target;

/// The options of a watch.
#[derive(Clone, Debug, Default)]
pub struct WatchOptions {
    /// Selectors, resource version and its match.
    pub list: ListOptions,
    /// Whether the client wants bookmarks.
    pub bookmarks: bool,
    /// Whether the current state is sent first (`sendInitialEvents`). If unset, the resource version decides.
    pub initial_events: Option<bool>,
    /// The maximum duration of the watch.
    pub timeout: Option<Duration>,
}

/// One event for a watcher.
#[derive(Clone, Debug)]
pub enum WatchEvent {
    /// An object started to match the selection.
    Added(Arc<Object>),
    /// A selected object changed.
    Modified(Arc<Object>),
    /// An object left the selection: its last matching version, and the revision at which it left.
    Deleted(Arc<Object>, Revision),
    /// There are no more events up to this revision.
    Bookmark(Revision),
    /// The current state is complete at this revision.
    InitialEnd(Revision),
    /// The watch failed.
    Error(Box<Status>),
}

/// A running watch.
#[derive(Debug)]
pub struct WatchStream {
    watch: Watch,
    selection: Selection,
    namespace: String,
    initial: std::vec::IntoIter<Arc<Object>>,
    initial_end: Option<Revision>,
    bookmarks: bool,
    next_bookmark: Instant,
    deadline: Instant,
    ended: bool,
    shutdown: tokio_util::sync::CancellationToken,
}

const BOOKMARK_INTERVAL: Duration = Duration::from_secs(60);
const DEFAULT_TIMEOUT: Duration = Duration::from_secs(1800);
const MAXIMUM_TIMEOUT: Duration = Duration::from_secs(365 * 24 * 3600);
const INITIAL_BATCH: usize = 256;

impl Api {
    /// Starts a watch. Returns 410 for a resource version that is too old.
    pub fn watch(&self, target: &Target, options: &WatchOptions) -> Result<WatchStream, Status> {
        let version = options.list.resource_version;
        check_options(options)?;
        let wants_state = options
            .initial_events
            .unwrap_or_else(|| version.is_none_or(|version| version == 0));
        if let Some(version) = version.filter(|version| *version > 0) {
            self.check_not_in_future(version)?;
        }
        let too_old =
            |expired: Expired| Status::too_old_resource_version(expired.requested, expired.oldest);
        let resource = &target.resource.id;
        let (initial, after) = if wants_state {
            let snapshot = self
                .store
                .list(resource, &Range::namespace(&target.namespace), None)
                .map_err(too_old)?;
            let objects = snapshot
                .objects
                .into_iter()
                .filter(|object| options.list.selection.matches(object))
                .collect();
            (objects, snapshot.revision)
        } else {
            (
                Vec::new(),
                version
                    .filter(|version| *version > 0)
                    .unwrap_or_else(|| self.store.revision()),
            )
        };
        let watch = self.store.watch(resource, after).map_err(too_old)?;
        let now = Instant::now();
        Ok(WatchStream {
            watch,
            selection: options.list.selection.clone(),
            namespace: target.namespace.clone(),
            initial: initial.into_iter(),
            initial_end: (options.initial_events == Some(true) && options.bookmarks)
                .then_some(after),
            bookmarks: options.bookmarks,
            next_bookmark: now.later_by(BOOKMARK_INTERVAL),
            // Capped, because a deadline beyond the range of the clock cannot be represented.
            deadline: now.later_by(
                options
                    .timeout
                    .unwrap_or(DEFAULT_TIMEOUT)
                    .min(MAXIMUM_TIMEOUT),
            ),
            ended: false,
            shutdown: self.shutdown.clone(),
        })
    }
}

fn check_options(options: &WatchOptions) -> Result<(), Status> {
    let invalid = |detail: &str| {
        let error = FieldError::forbidden("resourceVersionMatch", detail);
        Err(Status::invalid("meta.k8s.io", "ListOptions", "", &[error]))
    };
    match (options.initial_events, options.list.version_match) {
        (Some(_), Some(VersionMatch::NotOlderThan)) | (None, None) => Ok(()),
        (Some(_), _) => {
            invalid("sendInitialEvents requires setting resourceVersionMatch to NotOlderThan")
        }
        (None, Some(_)) => invalid(
            "resourceVersionMatch is forbidden for watch unless sendInitialEvents is provided",
        ),
    }
}

impl WatchStream {
    /// The next events; `None` when the watch is over.
    pub async fn next(&mut self) -> Option<Vec<WatchEvent>> {
        if self.ended {
            return None;
        }
        let present: Vec<WatchEvent> = self
            .initial
            .by_ref()
            .take(INITIAL_BATCH)
            .map(WatchEvent::Added)
            .collect();
        if !present.is_empty() {
            return Some(present);
        }
        if let Some(revision) = self.initial_end.take() {
            return Some(vec![WatchEvent::InitialEnd(revision)]);
        }
        loop {
            let wake = if self.bookmarks {
                self.deadline.min(self.next_bookmark)
            } else {
                self.deadline
            };
            tokio::select! {
                biased;
                () = self.shutdown.cancelled() => return None,
                events = self.watch.next() => match events {
                    Ok(events) => {
                        let watch_events: Vec<WatchEvent> = events.into_iter().filter_map(|event| self.translate(event)).collect();
                        if !watch_events.is_empty() {
                            return Some(watch_events);
                        }
                    }
                    Err(expired) => {
                        self.ended = true;
                        let status = Status::too_old_resource_version(expired.requested, expired.oldest);
                        return Some(vec![WatchEvent::Error(Box::new(status))]);
                    }
                },
                () = tokio::time::sleep_until(wake.into()) => {
                    self.ended = Instant::now() >= self.deadline;
                    self.next_bookmark = Instant::now().later_by(BOOKMARK_INTERVAL);
                    if !self.bookmarks {
                        return None;
                    }
                    return Some(vec![WatchEvent::Bookmark(self.watch.progress())]);
                }
            }
        }
    }

    fn selects(&self, object: &Object) -> bool {
        (self.namespace.is_empty() || object.key.namespace() == self.namespace)
            && self.selection.matches(object)
    }

    fn translate(&self, event: Event) -> Option<WatchEvent> {
        let revision = event.revision();
        if !self.namespace.is_empty() && event.object.key.namespace() != self.namespace {
            return None;
        }
        let before = event
            .previous
            .as_ref()
            .is_some_and(|previous| self.selects(previous));
        let after = event.kind != EventKind::Deleted && self.selects(&event.object);
        match (before, after) {
            (false, true) => Some(WatchEvent::Added(event.object)),
            (true, true) => Some(WatchEvent::Modified(event.object)),
            (true, false) if event.kind == EventKind::Deleted => {
                Some(WatchEvent::Deleted(event.object, revision))
            }
            (true, false) => event
                .previous
                .map(|previous| WatchEvent::Deleted(previous, revision)),
            (false, false) => None,
        }
    }
}

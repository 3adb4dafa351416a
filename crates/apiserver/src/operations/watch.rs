//! Watching: what a client sees of a kind's history through its selectors.
//!
//! An object that starts to match appears, one that stops matching disappears, whatever really happened to it. The stream ends at
//! its deadline, when the server stops, or with a 410 when the window has moved past the watcher.

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use apimachinery::{field::FieldError, status::Status};
use saturating_time::SaturatingTime;

use super::{Api, ListOptions, Target, VersionMatch, selection::Selection};
use crate::store::{Event, EventKind, Expired, Object, Range, Revision, Watch};

/// What a watch covers and how it starts.
#[derive(Clone, Debug, Default)]
pub struct WatchOptions {
    /// Selectors, resource version and its match.
    pub list: ListOptions,
    /// Whether the client wants bookmarks.
    pub bookmarks: bool,
    /// Whether the present state comes first; unset leaves it to the resource version.
    pub initial_events: Option<bool>,
    /// How long the watch lasts.
    pub timeout: Option<Duration>,
}

/// One message to a watcher.
#[derive(Clone, Debug)]
pub enum Notice {
    /// An object appeared in the selection.
    Added(Arc<Object>),
    /// A selected object changed.
    Modified(Arc<Object>),
    /// An object left the selection; as it last was, at the revision at which it left.
    Deleted(Arc<Object>, Revision),
    /// Nothing happened up to this revision.
    Bookmark(Revision),
    /// The present state is complete at this revision.
    InitialEnd(Revision),
    /// The watch is over.
    Error(Box<Status>),
}

/// A running watch.
#[derive(Debug)]
pub struct Watching {
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
const LONGEST_TIMEOUT: Duration = Duration::from_secs(365 * 24 * 3600);
const INITIAL_AT_ONCE: usize = 256;

impl Api {
    /// Starts a watch. A version that is too old is refused with 410.
    pub fn watch(&self, target: &Target, options: &WatchOptions) -> Result<Watching, Status> {
        let version = options.list.resource_version;
        check_options(options)?;
        let wants_state = options
            .initial_events
            .unwrap_or_else(|| version.is_none_or(|version| version == 0));
        if let Some(version) = version.filter(|version| *version > 0) {
            self.check_reached(version)?;
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
        Ok(Watching {
            watch,
            selection: options.list.selection.clone(),
            namespace: target.namespace.clone(),
            initial: initial.into_iter(),
            initial_end: (options.initial_events == Some(true) && options.bookmarks)
                .then_some(after),
            bookmarks: options.bookmarks,
            next_bookmark: now.later_by(BOOKMARK_INTERVAL),
            // One that lies beyond what a clock can hold is as good as none.
            deadline: now.later_by(
                options
                    .timeout
                    .unwrap_or(DEFAULT_TIMEOUT)
                    .min(LONGEST_TIMEOUT),
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

impl Watching {
    /// The next messages; nothing when the watch is over.
    pub async fn next(&mut self) -> Option<Vec<Notice>> {
        if self.ended {
            return None;
        }
        let present: Vec<Notice> = self
            .initial
            .by_ref()
            .take(INITIAL_AT_ONCE)
            .map(Notice::Added)
            .collect();
        if !present.is_empty() {
            return Some(present);
        }
        if let Some(revision) = self.initial_end.take() {
            return Some(vec![Notice::InitialEnd(revision)]);
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
                        let notices: Vec<Notice> = events.into_iter().filter_map(|event| self.translate(event)).collect();
                        if !notices.is_empty() {
                            return Some(notices);
                        }
                    }
                    Err(expired) => {
                        self.ended = true;
                        let status = Status::too_old_resource_version(expired.requested, expired.oldest);
                        return Some(vec![Notice::Error(Box::new(status))]);
                    }
                },
                () = tokio::time::sleep_until(wake.into()) => {
                    self.ended = Instant::now() >= self.deadline;
                    self.next_bookmark = Instant::now().later_by(BOOKMARK_INTERVAL);
                    if !self.bookmarks {
                        return None;
                    }
                    return Some(vec![Notice::Bookmark(self.watch.progress())]);
                }
            }
        }
    }

    fn selects(&self, object: &Object) -> bool {
        (self.namespace.is_empty() || object.key.namespace() == self.namespace)
            && self.selection.matches(object)
    }

    fn translate(&self, event: Event) -> Option<Notice> {
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
            (false, true) => Some(Notice::Added(event.object)),
            (true, true) => Some(Notice::Modified(event.object)),
            (true, false) if event.kind == EventKind::Deleted => {
                Some(Notice::Deleted(event.object, revision))
            }
            (true, false) => event
                .previous
                .map(|previous| Notice::Deleted(previous, revision)),
            (false, false) => None,
        }
    }
}

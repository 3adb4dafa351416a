//! Listing: consistent snapshots in pages, at the current revision or at an older one that is still in the window.

use std::sync::Arc;

use apimachinery::status::{Cause, Status};
use base64::{Engine, engine::general_purpose::URL_SAFE_NO_PAD};
use serde::{Deserialize, Serialize};
use store::{Key, Object, Range, Revision};

use super::{Api, selection::Selection};
use crate::target::Target;

/// The meaning of a list's resource version (`resourceVersionMatch`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum VersionMatch {
    /// That version or a newer one.
    NotOlderThan,
    /// Exactly that version.
    Exact,
}

/// The options of a list.
#[derive(Clone, Debug, Default)]
pub struct ListOptions {
    /// Selectors.
    pub selection: Selection,
    /// Maximum number of objects per page; zero for no limit.
    pub limit: usize,
    /// The continue token of the previous page.
    pub continuation: Option<String>,
    /// The requested resource version.
    pub resource_version: Option<Revision>,
    /// How the resource version is matched.
    pub version_match: Option<VersionMatch>,
}

/// One page of a list.
#[derive(Clone, Debug)]
pub struct ListPage {
    /// Revision of the snapshot.
    pub revision: Revision,
    /// The objects in key order.
    pub objects: Vec<Arc<Object>>,
    /// The continue token of the next page, if there is one.
    pub continuation: Option<String>,
    /// The number of objects on later pages, if it is known.
    pub remaining: Option<usize>,
}

#[derive(Serialize, Deserialize)]
struct Continuation {
    v: String,
    rv: Revision,
    start: String,
}

const CONTINUATION_VERSION: &str = "meta.k8s.io/v1";

impl Api {
    /// Lists one page of a kind's objects.
    pub fn list(&self, target: &Target, options: &ListOptions) -> Result<ListPage, Status> {
        let mut range = Range::namespace(&target.namespace);
        let mut at = None;
        if let Some(token) = &options.continuation {
            if options.resource_version.is_some_and(|version| version > 0) {
                return Err(Status::bad_request(
                    "specifying resource version is not allowed when using continue",
                ));
            }
            let position = decode(token)?;
            at = Some(position.rv);
            range.after = Some(position.start);
        } else if let Some(version) = options.resource_version.filter(|version| *version > 0) {
            self.check_not_in_future(version)?;
            // In Kubernetes, a resource version with a limit but without resourceVersionMatch means exactly that version.
            if options.version_match == Some(VersionMatch::Exact)
                || (options.version_match.is_none() && options.limit > 0)
            {
                at = Some(version);
            }
        }
        if options.limit == 0
            && options.continuation.is_none()
            && at.is_none()
            && let Some(name) = options.selection.name()
        {
            return Ok(self.list_named(target, name, &options.selection));
        }
        let snapshot = self.store.list(&target.resource.id, &range, at).map_err(|expired| {
            if options.continuation.is_some() {
                Status::expired(
                    "The provided continue parameter is too old to display a consistent list result. You must start a new list without the continue parameter.",
                )
            } else {
                Status::too_old_resource_version(expired.requested, expired.oldest)
            }
        })?;
        Ok(page(snapshot.objects, snapshot.revision, options))
    }

    fn list_named(&self, target: &Target, name: &str, selection: &Selection) -> ListPage {
        let revision = self.store.revision();
        let objects = if target.resource.is_namespaced() && target.namespace.is_empty() {
            let all = self
                .store
                .list(&target.resource.id, &Range::namespace(""), None);
            return page(
                all.map(|snapshot| snapshot.objects).unwrap_or_default(),
                revision,
                &ListOptions {
                    selection: selection.clone(),
                    ..ListOptions::default()
                },
            );
        } else {
            let found = self
                .store
                .get(&target.resource.id, &Key::new(&target.namespace, name));
            found
                .into_iter()
                .filter(|object| selection.matches(object))
                .collect()
        };
        ListPage {
            revision,
            objects,
            continuation: None,
            remaining: None,
        }
    }

    /// Rejects a resource version that is higher than the current one.
    pub(super) fn check_not_in_future(&self, version: Revision) -> Result<(), Status> {
        let current = self.store.revision();
        if version <= current {
            return Ok(());
        }
        let cause = Cause {
            reason: "ResourceVersionTooLarge".into(),
            message: "Too large resource version".into(),
            field: String::new(),
        };
        let mut status = Status::timeout(
            format_args!("Too large resource version: {version}, current: {current}"),
            1,
        );
        if let Some(details) = &mut status.details {
            details.causes = vec![cause];
        }
        Err(status)
    }
}

fn page(objects: Vec<Arc<Object>>, revision: Revision, options: &ListOptions) -> ListPage {
    let everything = options.selection.is_everything();
    let total = objects.len();
    let limit = if options.limit == 0 {
        usize::MAX
    } else {
        options.limit
    };
    let mut seen = 0;
    let mut selected = if everything {
        Vec::with_capacity(total.min(limit))
    } else {
        Vec::new()
    };
    for object in objects {
        if selected.len() == limit {
            break;
        }
        seen += 1;
        if everything || options.selection.matches(&object) {
            selected.push(object);
        }
    }
    let more = seen < total;
    let continuation = selected
        .last()
        .filter(|_| more)
        .map(|last| encode(revision, &last.key));
    let remaining = (more && everything).then_some(total - seen);
    ListPage {
        revision,
        objects: selected,
        continuation,
        remaining,
    }
}

fn encode(rv: Revision, last: &Key) -> String {
    let token = Continuation {
        v: CONTINUATION_VERSION.into(),
        rv,
        start: last.as_str().to_owned(),
    };
    URL_SAFE_NO_PAD.encode(serde_json::to_vec(&token).unwrap_or_default())
}

struct Position {
    rv: Revision,
    start: Key,
}

fn decode(token: &str) -> Result<Position, Status> {
    let decoded = URL_SAFE_NO_PAD
        .decode(token)
        .ok()
        .and_then(|bytes| serde_json::from_slice::<Continuation>(&bytes).ok());
    decoded
        .filter(|token| token.v == CONTINUATION_VERSION)
        .and_then(|token| {
            let (namespace, name) = token.start.split_once('/')?;
            Some(Position {
                rv: token.rv,
                start: Key::new(namespace, name),
            })
        })
        .ok_or_else(|| Status::bad_request("continue key is not valid"))
}

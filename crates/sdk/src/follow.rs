//! Follows one object of the Kubernetes API until it reaches a state: one watch by name, and a list only when the
//! watch has expired (410 Gone).

use std::fmt::Debug;
use std::time::Duration;

use api::conditions::Reason;
use api::decoding::{Decoded, Unreadable};
use futures::{StreamExt, TryStreamExt};
use kube::api::{ListParams, WatchEvent, WatchParams};
use kube::{Api, Resource, ResourceExt};
use serde::de::DeserializeOwned;

use crate::readiness::Verdict;
use crate::retry::{self, RetryPolicy};

/// The timeout of one watch request on the server; another one follows it.
const WATCH_SECONDS: u32 = 290;

/// Where the watch starts.
#[derive(Debug)]
pub(crate) enum Start {
    /// After this resource version, which was seen already.
    After(String),
    /// With the current state.
    Current,
}

/// How a missing object is treated.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Missing {
    /// It existed and was deleted.
    Gone,
    /// It may still be created.
    Awaited,
}

/// Why following ended before the object reached the state.
#[derive(Debug)]
pub(crate) enum Ended {
    Deleted,
    Refused {
        reason: String,
        message: String,
    },
    /// The API refused the request.
    Failed(kube::Error),
}

/// Waits, without a timeout of its own, until `judge` returns a verdict.
pub(crate) async fn follow<K, T>(
    api: &Api<Decoded<K>>,
    name: &str,
    start: Start,
    missing: Missing,
    judge: impl Fn(&K) -> Verdict<T>,
) -> Result<T, Ended>
where
    K: Resource + Clone + DeserializeOwned + Debug,
{
    let backoff = RetryPolicy {
        base_backoff: Duration::from_millis(100),
        max_backoff: Duration::from_secs(5),
        ..RetryPolicy::default()
    };
    let selector = format!("metadata.name={name}");
    let mut place = match start {
        Start::After(version) => Some(version),
        Start::Current => None,
    };
    let mut failures = 0;
    loop {
        let step = match place.take() {
            None => look(api, &selector, missing, &judge).await,
            Some(version) => watch(api, &selector, version, &judge).await,
        };
        match step {
            Ok(Step::Done(value)) => return Ok(value),
            Ok(Step::From(version)) => {
                failures = 0;
                place = Some(version);
            }
            Ok(Step::Lost) => failures = 0,
            Err(Ended::Failed(error)) if is_transient(&error) => {
                failures += 1;
                tracing::debug!(%error, name, failures, "the watch is interrupted");
                tokio::time::sleep(backoff.backoff(failures, retry::random())).await;
            }
            Err(ended) => return Err(ended),
        }
    }
}

enum Step<T> {
    Done(T),
    /// Continue after this resource version.
    From(String),
    /// The watch has expired: list again.
    Lost,
}

async fn look<K, T>(
    api: &Api<Decoded<K>>,
    selector: &str,
    missing: Missing,
    judge: &impl Fn(&K) -> Verdict<T>,
) -> Result<Step<T>, Ended>
where
    K: Resource + Clone + DeserializeOwned + Debug,
{
    let params = ListParams::default().fields(selector);
    let list = api.list(&params).await.map_err(Ended::Failed)?;
    match list.items.first() {
        None if missing == Missing::Gone => return Err(Ended::Deleted),
        None => {}
        Some(object) => {
            if let Some(value) = settle(object, judge)? {
                return Ok(Step::Done(value));
            }
        }
    }
    Ok(Step::From(
        list.metadata.resource_version.unwrap_or_default(),
    ))
}

async fn watch<K, T>(
    api: &Api<Decoded<K>>,
    selector: &str,
    mut version: String,
    judge: &impl Fn(&K) -> Verdict<T>,
) -> Result<Step<T>, Ended>
where
    K: Resource + Clone + DeserializeOwned + Debug,
{
    let params = WatchParams::default()
        .fields(selector)
        .timeout(WATCH_SECONDS);
    let events = match api.watch(&params, &version).await {
        Ok(events) => events,
        Err(kube::Error::Api(status)) if status.code == 410 => return Ok(Step::Lost),
        Err(error) => return Err(Ended::Failed(error)),
    };
    let mut events = events.boxed();
    while let Some(event) = events.try_next().await.map_err(Ended::Failed)? {
        match event {
            WatchEvent::Added(object) | WatchEvent::Modified(object) => {
                if let Some(value) = settle(&object, judge)? {
                    return Ok(Step::Done(value));
                }
                version = object.resource_version().unwrap_or(version);
            }
            WatchEvent::Deleted(_) => return Err(Ended::Deleted),
            WatchEvent::Bookmark(bookmark) => version = bookmark.metadata.resource_version,
            WatchEvent::Error(status) if status.code == 410 => return Ok(Step::Lost),
            WatchEvent::Error(status) => return Err(Ended::Failed(kube::Error::Api(status))),
        }
    }
    Ok(Step::From(version))
}

fn settle<K, T>(
    object: &Decoded<K>,
    judge: &impl Fn(&K) -> Verdict<T>,
) -> Result<Option<T>, Ended> {
    let verdict = match object {
        Decoded::Readable(object) => judge(object),
        Decoded::Unreadable(left) => return Err(unreadable(left)),
    };
    match verdict {
        Verdict::Done(value) => Ok(Some(value)),
        Verdict::Wait => Ok(None),
        Verdict::Refused { reason, message } => Err(Ended::Refused { reason, message }),
    }
}

/// An object that cannot be decoded: waiting does not change that.
pub(crate) fn unreadable(left: &Unreadable) -> Ended {
    Ended::Refused {
        reason: Reason::InvalidConfiguration.as_str().to_owned(),
        message: format!("The object {left}"),
    }
}

/// Whether the same request may succeed later.
fn is_transient(error: &kube::Error) -> bool {
    match error {
        kube::Error::Api(status) => status.code == 429 || status.code >= 500,
        kube::Error::HyperError(_) | kube::Error::Service(_) | kube::Error::ReadEvents(_) => true,
        _ => false,
    }
}

//! Deletes events one hour after their last occurrence.

use std::{sync::Arc, time::Duration};

use jiff::{SignedDuration, Timestamp};
use serde_json::Value;
use store::{Range, ResourceId};

use crate::{
    operations::{Api, DeleteOptions},
    target::{Target, WriteOptions},
};

const LIFETIME: SignedDuration = SignedDuration::from_hours(1);
const INTERVAL: Duration = Duration::from_secs(60);

/// Deletes expired events until the server stops.
pub async fn run(api: Arc<Api>) {
    loop {
        expire(&api).await;
        if api
            .shutdown
            .run_until_cancelled(tokio::time::sleep(INTERVAL))
            .await
            .is_none()
        {
            return;
        }
    }
}

async fn expire(api: &Api) {
    let Some(resource) = api.registry().find("", "v1", "events") else {
        return;
    };
    let Ok(events) = api
        .store
        .list(&ResourceId::new("", "events"), &Range::namespace(""), None)
    else {
        return;
    };
    let options = WriteOptions::system("event-expiry");
    for event in events.objects {
        if !is_expired(&event.value(), api.now()) {
            continue;
        }
        let target = Target {
            resource: resource.clone(),
            namespace: event.key.namespace().to_owned(),
            name: event.key.name().to_owned(),
        };
        if let Err(status) = api
            .delete(&target, &DeleteOptions::default(), &options)
            .await
            && !status.is_not_found()
        {
            tracing::warn!(error = %status, "cannot delete an expired event");
        }
    }
}

/// Whether the last occurrence of an event is more than an hour ago.
fn is_expired(event: &Value, now: Timestamp) -> bool {
    let times = [
        "/series/lastObservedTime",
        "/lastTimestamp",
        "/eventTime",
        "/metadata/creationTimestamp",
    ];
    let last = times
        .iter()
        .filter_map(|at| apimachinery::time::parse(event.pointer(at)?.as_str()?).ok())
        .max();
    last.is_some_and(|last| now.duration_since(last) > LIFETIME)
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn an_event_expires_an_hour_after_it_last_happened() {
        let event = json!({"metadata": {"creationTimestamp": "2026-01-01T00:00:00Z"}, "lastTimestamp": "2026-01-01T02:00:00Z"});
        let at = |text: &str| text.parse::<Timestamp>().unwrap();
        assert!(!is_expired(&event, at("2026-01-01T02:59:00Z")));
        assert!(is_expired(&event, at("2026-01-01T03:01:00Z")));
    }
}

//! When claims or sandboxes become Ready, as a watch of them reports. A load on an API is measured by it.

use std::collections::HashMap;
use std::fmt::Debug;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use api::conditions::{self, ConditionType};
use api::{Sandbox, SandboxClaim};
use futures::StreamExt;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Condition;
use kube::runtime::WatchStreamExt;
use kube::runtime::watcher::{self, Event, watcher};
use kube::{Api, Resource, ResourceExt};
use saturating_time::SaturatingTime;
use serde::de::DeserializeOwned;
use tokio::sync::Notify;

/// A kind that says by its conditions whether it is Ready.
pub trait Reports: Resource<DynamicType = ()> + Clone + Debug + DeserializeOwned + Send {
    fn conditions(&self) -> &[Condition];
}

impl Reports for SandboxClaim {
    fn conditions(&self) -> &[Condition] {
        let status = self.status.as_ref();
        status.map_or(&[], |status| &status.conditions)
    }
}

impl Reports for Sandbox {
    fn conditions(&self) -> &[Condition] {
        let status = self.status.as_ref();
        status.map_or(&[], |status| &status.conditions)
    }
}

/// When each object was first seen Ready, by its name.
#[derive(Debug, Default)]
pub struct Arrivals {
    at: Mutex<HashMap<String, Instant>>,
    changed: Notify,
}

impl Arrivals {
    pub async fn follow<K: Reports + 'static>(self: Arc<Self>, objects: Api<K>) {
        let events = watcher(objects, watcher::Config::default()).default_backoff();
        let mut events = std::pin::pin!(events);
        while let Some(event) = events.next().await {
            let Ok(Event::Apply(object) | Event::InitApply(object)) = event else {
                continue;
            };
            if conditions::is_true(object.conditions(), ConditionType::Ready) {
                self.at()
                    .entry(object.name_any())
                    .or_insert_with(Instant::now);
                self.changed.notify_waiters();
            }
        }
    }

    pub fn of(&self, name: &str) -> Option<Instant> {
        self.at().get(name).copied()
    }

    /// Waits until all of these are Ready, or the time is up.
    pub async fn wait_for(&self, names: &[&str], deadline: Duration) {
        let until = tokio::time::Instant::now().later_by(deadline);
        let mut missing = names;
        loop {
            let changed = self.changed.notified();
            // Those at the front are known to be Ready, and need not be looked at again.
            {
                let at = self.at();
                while let Some((first, rest)) = missing.split_first()
                    && at.contains_key(*first)
                {
                    missing = rest;
                }
            }
            if missing.is_empty() || tokio::time::timeout_at(until, changed).await.is_err() {
                return;
            }
        }
    }

    fn at(&self) -> MutexGuard<'_, HashMap<String, Instant>> {
        self.at.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

//! The times at which a watch shows claims or sandboxes Ready.

use std::collections::HashMap;
use std::fmt::Debug;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use api::conditions::{self, ConditionType};
use api::{Sandbox, SandboxClaim};
use futures::StreamExt;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Condition;
use kube::runtime::watcher::{self, Event};
use kube::{Api, Resource, ResourceExt};
use serde::de::DeserializeOwned;
use tokio::sync::Notify;

/// A kind whose status has conditions.
pub trait HasConditions:
    Resource<DynamicType = ()> + Clone + Debug + DeserializeOwned + Send
{
    fn conditions(&self) -> &[Condition];
}

impl HasConditions for SandboxClaim {
    fn conditions(&self) -> &[Condition] {
        let status = self.status.as_ref();
        status.map_or(&[], |status| &status.conditions)
    }
}

impl HasConditions for Sandbox {
    fn conditions(&self) -> &[Condition] {
        let status = self.status.as_ref();
        status.map_or(&[], |status| &status.conditions)
    }
}

/// When each object was first seen Ready, by name.
#[derive(Debug, Default)]
pub struct ReadyTimes {
    at: Mutex<HashMap<String, Instant>>,
    changed: Notify,
}

impl ReadyTimes {
    /// Watches objects until the task is aborted.
    pub async fn follow<K: HasConditions + 'static>(self: Arc<Self>, objects: Api<K>) {
        let mut events = object_watch::watch(objects, watcher::Config::default());
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

    /// When the object of this name was first seen Ready.
    pub fn of(&self, name: &str) -> Option<Instant> {
        self.at().get(name).copied()
    }

    /// Waits until all these objects are Ready, or until the deadline.
    pub async fn wait_for(&self, names: &[&str], deadline: Duration) {
        let until = tokio::time::Instant::now() + deadline;
        let mut missing = names;
        loop {
            let changed = self.changed.notified();
            // Objects at the front are known to be Ready and are not checked again.
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

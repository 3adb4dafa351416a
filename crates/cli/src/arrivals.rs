//! When claims become Ready, as a watch of them tells. Whoever puts a load on an API measures by it.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use api::SandboxClaim;
use api::conditions::{self, ConditionType};
use futures::StreamExt;
use kube::runtime::WatchStreamExt;
use kube::runtime::watcher::{self, Event, watcher};
use kube::{Api, ResourceExt};
use saturating_time::SaturatingTime;
use tokio::sync::Notify;

/// When each claim was first seen Ready.
#[derive(Debug, Default)]
pub struct Arrivals {
    at: Mutex<HashMap<String, Instant>>,
    changed: Notify,
}

impl Arrivals {
    pub async fn follow(self: Arc<Self>, claims: Api<SandboxClaim>) {
        let events = watcher(claims, watcher::Config::default()).default_backoff();
        let mut events = std::pin::pin!(events);
        while let Some(event) = events.next().await {
            let Ok(Event::Apply(claim) | Event::InitApply(claim)) = event else {
                continue;
            };
            let is_ready = claim.status.as_ref().is_some_and(|status| {
                conditions::is_true(&status.conditions, ConditionType::Ready)
            });
            if is_ready {
                self.at()
                    .entry(claim.name_any())
                    .or_insert_with(Instant::now);
                self.changed.notify_waiters();
            }
        }
    }

    pub fn of(&self, name: &str) -> Option<Instant> {
        self.at().get(name).copied()
    }

    pub fn names(&self) -> Vec<String> {
        self.at().keys().cloned().collect()
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

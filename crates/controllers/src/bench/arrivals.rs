//! When claims are seen to be Ready, by somebody who watches them as a client does.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Instant;

use api::SandboxClaim;
use api::conditions::{self, ConditionType};
use futures::StreamExt;
use kube::runtime::WatchStreamExt;
use kube::runtime::watcher::{self, Event, watcher};
use kube::{Api, Client, ResourceExt};
use tokio::sync::oneshot;

use crate::slim::Slim;

/// The claims that somebody waits for. Clones wait at the same place.
#[derive(Clone, Debug, Default)]
pub(super) struct Arrivals(Arc<Mutex<HashMap<String, oneshot::Sender<Instant>>>>);

impl Arrivals {
    /// Watches the claims of a namespace until it is dropped.
    pub async fn follow(self, client: Client, namespace: String) {
        let claims = Api::<Slim<SandboxClaim>>::namespaced(client, &namespace);
        let events = watcher(claims, watcher::Config::default()).default_backoff();
        let mut events = std::pin::pin!(events);
        while let Some(event) = events.next().await {
            let Ok(Event::Apply(Slim(claim)) | Event::InitApply(Slim(claim))) = event else {
                continue;
            };
            let is_ready = claim.status.as_ref().is_some_and(|status| {
                conditions::is_true(&status.conditions, ConditionType::Ready)
            });
            if is_ready && let Some(waiting) = self.waiting().remove(&claim.name_any()) {
                // Whoever has given up waiting does not need to know.
                let _ = waiting.send(Instant::now());
            }
        }
    }

    /// Resolves with the moment at which the claim of this name is seen Ready. To be asked before the claim is made.
    pub fn expect(&self, name: &str) -> oneshot::Receiver<Instant> {
        let (sender, receiver) = oneshot::channel();
        self.waiting().insert(name.to_owned(), sender);
        receiver
    }

    fn waiting(&self) -> std::sync::MutexGuard<'_, HashMap<String, oneshot::Sender<Instant>>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

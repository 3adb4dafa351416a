//! A watch of claims, which reports when each becomes Ready.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use api::SandboxClaim;
use api::conditions::{self, ConditionType};
use controllers::trimmed::Trimmed;
use futures::StreamExt;
use kube::runtime::watcher::{self, Event};
use kube::{Api, Client, ResourceExt};
use tokio::sync::oneshot;
use tokio::task::JoinHandle;

/// A watch of the claims of a namespace, until it is dropped.
#[derive(Debug)]
pub(super) struct ReadyWatch {
    expected: Arc<Expected>,
    task: JoinHandle<()>,
}

/// The claims that are waited for, by name.
#[derive(Debug, Default)]
struct Expected(Mutex<HashMap<String, oneshot::Sender<Instant>>>);

impl ReadyWatch {
    pub fn start(client: Client, namespace: &str) -> Self {
        let expected = Arc::new(Expected::default());
        let claims = Api::<Trimmed<SandboxClaim>>::namespaced(client, namespace);
        Self {
            task: tokio::spawn(follow(claims, Arc::clone(&expected))),
            expected,
        }
    }

    /// Resolves with the time at which the claim of this name is seen Ready. To be called before the claim is created.
    pub fn expect(&self, name: &str) -> oneshot::Receiver<Instant> {
        let (sender, receiver) = oneshot::channel();
        self.expected.lock().insert(name.to_owned(), sender);
        receiver
    }
}

impl Drop for ReadyWatch {
    fn drop(&mut self) {
        self.task.abort();
    }
}

impl Expected {
    fn lock(&self) -> MutexGuard<'_, HashMap<String, oneshot::Sender<Instant>>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

async fn follow(claims: Api<Trimmed<SandboxClaim>>, expected: Arc<Expected>) {
    let mut events = object_watch::watch(claims, watcher::Config::default());
    while let Some(event) = events.next().await {
        let Ok(Event::Apply(Trimmed(claim)) | Event::InitApply(Trimmed(claim))) = event else {
            continue;
        };
        let is_ready = claim
            .status
            .as_ref()
            .is_some_and(|status| conditions::is_true(&status.conditions, ConditionType::Ready));
        if is_ready && let Some(waiting) = expected.lock().remove(&claim.name_any()) {
            // The receiver may have timed out.
            let _ = waiting.send(Instant::now());
        }
    }
}

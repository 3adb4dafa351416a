//! The client: creates sandboxes, and keeps the registry of open ones.

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tokio::signal::unix::{SignalKind, signal};

use crate::claim::{CreateOptions, random_name};
use crate::cluster::{Cluster, kubernetes};
use crate::connector::Access;
use crate::error::{Error, ErrorKind, Key};
use crate::metrics::Metrics;
use crate::options::{Options, check_name, check_namespace};
use crate::route::Route;
use crate::sandbox::Sandbox;
use crate::transport;

/// Which sandboxes to list.
///
/// ```
/// let options = sdk::ListOptions::default().label_selector("team=search,tier!=batch");
/// ```
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ListOptions {
    namespace: Option<String>,
    label_selector: Option<String>,
}

impl ListOptions {
    /// The namespace, if not the client's.
    #[must_use]
    pub fn namespace(mut self, namespace: impl Into<String>) -> Self {
        self.namespace = Some(namespace.into());
        self
    }

    /// Only sandboxes whose claims match this label selector, in Kubernetes' syntax.
    #[must_use]
    pub fn label_selector(mut self, selector: impl Into<String>) -> Self {
        self.label_selector = Some(selector.into());
        self
    }
}

/// Creates sandboxes, attaches to existing ones, and tracks the ones it returned. Clones share their state.
#[derive(Clone, Debug)]
pub struct Client {
    shared: Arc<Shared>,
}

#[derive(Debug)]
struct Shared {
    access: Arc<Access>,
    tracked: Mutex<HashMap<Key, Sandbox>>,
}

impl Client {
    /// A client that uses this connection to a Kubernetes API.
    pub fn new(kubernetes: kube::Client, options: Options) -> Result<Self, Error> {
        options.validate()?;
        let cluster = Cluster::new(kubernetes);
        let (route, dialer) = Route::new(&options, &cluster);
        let http = transport::client(dialer, options.tls.clone());
        Ok(Self {
            shared: Arc::new(Shared {
                access: Arc::new(Access {
                    options,
                    cluster,
                    route,
                    http,
                    metrics: Metrics::default(),
                }),
                tracked: Mutex::default(),
            }),
        })
    }

    /// A client of the cluster that `KUBECONFIG`, `~/.kube/config` or the pod's service account selects.
    pub async fn connect(options: Options) -> Result<Self, Error> {
        let client = kube::Client::try_default().await;
        let client = client.map_err(|cause| kubernetes("connect to the cluster", cause))?;
        Self::new(client, options)
    }

    pub fn options(&self) -> &Options {
        &self.shared.access.options
    }

    /// The metrics of this client and its sandboxes: requests, errors and durations by operation.
    pub fn metrics(&self) -> &Metrics {
        &self.shared.access.metrics
    }

    /// A handle that is not open yet: [`Sandbox::open`] creates the claim. [`Client::create`] does both.
    pub fn sandbox(&self, request: CreateOptions) -> Result<Sandbox, Error> {
        request.validate()?;
        let key = Key {
            namespace: request
                .namespace
                .clone()
                .unwrap_or_else(|| self.options().namespace.clone()),
            claim: request.name.clone().unwrap_or_else(random_name),
        };
        Ok(Sandbox::new(Arc::clone(&self.shared.access), key, request))
    }

    /// Claims a sandbox and waits until it can be used. If that fails, the claim is deleted; see [`Sandbox::open`].
    pub async fn create(&self, request: CreateOptions) -> Result<Sandbox, Error> {
        let sandbox = self.sandbox(request)?;
        // From the first request on a claim may exist, which `delete_all` must include.
        let tracking = Tracking::begin(self, sandbox.clone());
        let opened = sandbox.open().await;
        if opened.is_ok() || sandbox.is_orphaned() {
            // A claim that could not be deleted stays tracked, so that `delete_all` tries again.
            tracking.keep();
        }
        opened.map(|()| sandbox)
    }

    /// Attaches to a sandbox by its id, in the client's namespace. A suspended sandbox can be attached to and then resumed.
    pub async fn attach(&self, id: &str) -> Result<Sandbox, Error> {
        self.attach_in(&self.options().namespace, id).await
    }

    /// As [`Client::attach`], in another namespace.
    pub async fn attach_in(&self, namespace: &str, id: &str) -> Result<Sandbox, Error> {
        let key = Self::key(namespace, id)?;
        let known = self.tracked().get(&key).cloned();
        if let Some(sandbox) = known {
            if sandbox.is_open() {
                return Ok(sandbox);
            }
            self.tracked().remove(&key);
        }
        let sandbox = Sandbox::existing(Arc::clone(&self.shared.access), key.clone());
        sandbox.open().await?;
        self.tracked().insert(key, sandbox.clone());
        Ok(sandbox)
    }

    /// The open sandboxes that this client has returned.
    pub fn active(&self) -> Vec<Sandbox> {
        let mut tracked = self.tracked();
        tracked.retain(|_, sandbox| sandbox.is_open() || sandbox.is_orphaned() || sandbox.is_new());
        let open = tracked.values().filter(|sandbox| sandbox.is_open());
        open.cloned().collect()
    }

    /// The ids of all sandboxes in the client's namespace, regardless of their creator.
    pub async fn list(&self) -> Result<Vec<String>, Error> {
        self.list_in(&self.options().namespace).await
    }

    /// As [`Client::list`], in another namespace.
    pub async fn list_in(&self, namespace: &str) -> Result<Vec<String>, Error> {
        self.list_with(&ListOptions::default().namespace(namespace))
            .await
    }

    /// As [`Client::list`], filtered by `options`.
    pub async fn list_with(&self, options: &ListOptions) -> Result<Vec<String>, Error> {
        let namespace = options.namespace.as_deref();
        let namespace = namespace.unwrap_or(&self.options().namespace);
        check_namespace("namespace", namespace)?;
        let cluster = &self.shared.access.cluster;
        let names = cluster.claim_names(namespace, options.label_selector.as_deref());
        Ok(names.await?)
    }

    /// Deletes a sandbox by its id, in the client's namespace. Deleting a sandbox that does not exist succeeds.
    pub async fn delete(&self, id: &str) -> Result<(), Error> {
        self.delete_in(&self.options().namespace, id).await
    }

    /// As [`Client::delete`], in another namespace.
    pub async fn delete_in(&self, namespace: &str, id: &str) -> Result<(), Error> {
        let key = Self::key(namespace, id)?;
        let known = self.tracked().get(&key).cloned();
        if let Some(sandbox) = known {
            sandbox.terminate().await?;
        } else {
            let deleted = self.shared.access.cluster.delete_claim(&key, None).await;
            deleted.map_err(|cause| Error::of(&key, kubernetes("delete the claim", cause)))?;
        }
        self.tracked().remove(&key);
        Ok(())
    }

    /// Deletes every sandbox that this client has returned, and returns the errors of those that could not be deleted.
    pub async fn delete_all(&self) -> Vec<Error> {
        let sandboxes: Vec<Sandbox> = self.tracked().values().cloned().collect();
        let ending = sandboxes.iter().map(|sandbox| async move {
            let result = sandbox.terminate().await;
            if result.is_ok() {
                self.tracked().remove(sandbox.key());
            }
            result.err()
        });
        futures::future::join_all(ending)
            .await
            .into_iter()
            .flatten()
            .collect()
    }

    /// Deletes all sandboxes of this client when the process receives SIGINT or SIGTERM, and then lets the signal take its
    /// default action. Applies until the returned value is dropped; after that signals end the process at once.
    pub fn enable_auto_cleanup(&self) -> Result<AutoCleanup, Error> {
        let listen = |kind| {
            signal(kind).map_err(|cause| {
                Error::from(ErrorKind::InvalidOption {
                    option: "auto_cleanup",
                    reason: cause.to_string(),
                })
            })
        };
        let (mut interrupts, mut terminations) = (
            listen(SignalKind::interrupt())?,
            listen(SignalKind::terminate())?,
        );
        let enabled = Arc::new(AtomicBool::new(true));
        let client = self.clone();
        let watching = Arc::clone(&enabled);
        // The task is never stopped: once a signal has a handler, its default action is not restored automatically.
        tokio::spawn(async move {
            let received = tokio::select! {
                _ = interrupts.recv() => SignalKind::interrupt(),
                _ = terminations.recv() => SignalKind::terminate(),
            };
            if watching.load(Ordering::Acquire) {
                for error in client.delete_all().await {
                    tracing::warn!(%error, "a sandbox could not be deleted");
                }
            }
            if signal_hook::low_level::emulate_default_handler(received.as_raw_value()).is_err() {
                std::process::exit(128 + received.as_raw_value());
            }
        });
        Ok(AutoCleanup { enabled })
    }

    fn key(namespace: &str, id: &str) -> Result<Key, Error> {
        check_namespace("namespace", namespace)?;
        check_name("id", id)?;
        Ok(Key {
            namespace: namespace.to_owned(),
            claim: id.to_owned(),
        })
    }

    fn tracked(&self) -> MutexGuard<'_, HashMap<Key, Sandbox>> {
        self.shared
            .tracked
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
    }
}

/// Tracks a sandbox while it is being opened, and afterwards only if `keep` was called.
struct Tracking<'a> {
    client: &'a Client,
    sandbox: Sandbox,
    is_permanent: bool,
}

impl<'a> Tracking<'a> {
    /// An open sandbox of the same name stays tracked: opening this one will fail.
    fn begin(client: &'a Client, sandbox: Sandbox) -> Self {
        let mut tracked = client.tracked();
        let known = tracked.get(sandbox.key());
        if !known.is_some_and(|known| known.is_open() || known.is_orphaned() || known.is_new()) {
            tracked.insert(sandbox.key().clone(), sandbox.clone());
        }
        Self {
            client,
            sandbox,
            is_permanent: false,
        }
    }

    fn keep(mut self) {
        let (key, sandbox) = (self.sandbox.key().clone(), self.sandbox.clone());
        self.client.tracked().insert(key, sandbox);
        self.is_permanent = true;
    }
}

impl Drop for Tracking<'_> {
    fn drop(&mut self) {
        if self.is_permanent {
            return;
        }
        let mut tracked = self.client.tracked();
        let known = tracked.get(self.sandbox.key());
        if known.is_some_and(|known| known.is_same(&self.sandbox)) {
            tracked.remove(self.sandbox.key());
        }
    }
}

/// Cleanup on signals is enabled while this value exists. See [`Client::enable_auto_cleanup`].
#[derive(Debug)]
#[must_use = "dropping it disables the cleanup"]
pub struct AutoCleanup {
    enabled: Arc<AtomicBool>,
}

impl Drop for AutoCleanup {
    fn drop(&mut self) {
        self.enabled.store(false, Ordering::Release);
    }
}

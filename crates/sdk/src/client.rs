//! The client: where sandboxes come from, and the registry of those that are in use.

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
    /// The namespace, when it is not the client's.
    #[must_use]
    pub fn namespace(mut self, namespace: impl Into<String>) -> Self {
        self.namespace = Some(namespace.into());
        self
    }

    /// Only those whose claims have these labels, in Kubernetes' syntax for selectors.
    #[must_use]
    pub fn label_selector(mut self, selector: impl Into<String>) -> Self {
        self.label_selector = Some(selector.into());
        self
    }
}

/// Makes sandboxes, takes them up again, and knows those it has handed out. Clones share everything.
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

    /// A client of the cluster that `KUBECONFIG`, `~/.kube/config` or the service account of this pod names.
    pub async fn connect(options: Options) -> Result<Self, Error> {
        let client = kube::Client::try_default().await;
        let client = client.map_err(|cause| kubernetes("connect to the cluster", cause))?;
        Self::new(client, options)
    }

    pub fn options(&self) -> &Options {
        &self.shared.access.options
    }

    /// What this client and its sandboxes have counted so far: requests, errors and time by operation.
    pub fn metrics(&self) -> &Metrics {
        &self.shared.access.metrics
    }

    /// A handle that is not open yet: [`Sandbox::open`] makes the claim. [`Client::create`] does both.
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
        // From the first request on there may be a claim, which `delete_all` must not miss.
        let tracking = Tracking::begin(self, sandbox.clone());
        let opened = sandbox.open().await;
        if opened.is_ok() || sandbox.is_orphaned() {
            // A claim that could not be deleted is kept in mind, for `delete_all` to try again.
            tracking.keep();
        }
        opened.map(|()| sandbox)
    }

    /// Takes up a sandbox by its id, in the client's namespace. One that is suspended can be taken up and then resumed.
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

    /// The sandboxes that this client has handed out and that are open.
    pub fn active(&self) -> Vec<Sandbox> {
        let mut tracked = self.tracked();
        tracked.retain(|_, sandbox| sandbox.is_open() || sandbox.is_orphaned() || sandbox.is_new());
        let open = tracked.values().filter(|sandbox| sandbox.is_open());
        open.cloned().collect()
    }

    /// The ids of all sandboxes in the client's namespace, whoever made them.
    pub async fn list(&self) -> Result<Vec<String>, Error> {
        self.list_in(&self.options().namespace).await
    }

    /// As [`Client::list`], in another namespace.
    pub async fn list_in(&self, namespace: &str) -> Result<Vec<String>, Error> {
        self.list_with(&ListOptions::default().namespace(namespace))
            .await
    }

    /// As [`Client::list`], of the sandboxes that `options` choose.
    pub async fn list_with(&self, options: &ListOptions) -> Result<Vec<String>, Error> {
        let namespace = options.namespace.as_deref();
        let namespace = namespace.unwrap_or(&self.options().namespace);
        check_namespace("namespace", namespace)?;
        let cluster = &self.shared.access.cluster;
        let names = cluster.claim_names(namespace, options.label_selector.as_deref());
        Ok(names.await?)
    }

    /// Ends a sandbox by its id, in the client's namespace. One that does not exist is a success.
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

    /// Ends every sandbox that this client has handed out, as far as that is possible, and returns what was not.
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

    /// Ends all sandboxes of this client when the process is told to stop by SIGINT or SIGTERM, and then lets the signal do
    /// what it does. Holds until the returned value is dropped; signals then end the process at once.
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
        // The task stays for good: once a signal has a handler, its default does not come back by itself.
        tokio::spawn(async move {
            let received = tokio::select! {
                _ = interrupts.recv() => SignalKind::interrupt(),
                _ = terminations.recv() => SignalKind::terminate(),
            };
            if watching.load(Ordering::Acquire) {
                for error in client.delete_all().await {
                    tracing::warn!(%error, "a sandbox is left behind");
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

/// A sandbox that is being opened is tracked as long as that lasts, and from then on only if it is kept.
struct Tracking<'a> {
    client: &'a Client,
    sandbox: Sandbox,
    kept: bool,
}

impl<'a> Tracking<'a> {
    /// Another of the same name that is in use stays tracked: opening this one will fail.
    fn begin(client: &'a Client, sandbox: Sandbox) -> Self {
        let mut tracked = client.tracked();
        let known = tracked.get(sandbox.key());
        if !known.is_some_and(|known| known.is_open() || known.is_orphaned() || known.is_new()) {
            tracked.insert(sandbox.key().clone(), sandbox.clone());
        }
        Self {
            client,
            sandbox,
            kept: false,
        }
    }

    fn keep(mut self) {
        let (key, sandbox) = (self.sandbox.key().clone(), self.sandbox.clone());
        self.client.tracked().insert(key, sandbox);
        self.kept = true;
    }
}

impl Drop for Tracking<'_> {
    fn drop(&mut self) {
        if self.kept {
            return;
        }
        let mut tracked = self.client.tracked();
        let known = tracked.get(self.sandbox.key());
        if known.is_some_and(|known| known.is_same(&self.sandbox)) {
            tracked.remove(self.sandbox.key());
        }
    }
}

/// Cleaning up on signals holds as long as this is kept. See [`Client::enable_auto_cleanup`].
#[derive(Debug)]
#[must_use = "dropping it turns cleaning up off"]
pub struct AutoCleanup {
    enabled: Arc<AtomicBool>,
}

impl Drop for AutoCleanup {
    fn drop(&mut self) {
        self.enabled.store(false, Ordering::Release);
    }
}

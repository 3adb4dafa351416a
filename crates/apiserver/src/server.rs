//! The server as a whole: opens it, provides its client, serves HTTPS, and shuts it down.

use std::{
    fmt,
    path::{Path, PathBuf},
    pin::pin,
    sync::Arc,
};

use apimachinery::status::Status;
use store::{Location, Store, Window};
use tokio::{net::TcpListener, task::JoinSet};
use tokio_util::sync::CancellationToken;

use crate::{
    admission::Admission,
    audit,
    auth::{User, access::Access},
    background,
    clock::Clock,
    http::{Documents, Frontend, Requests},
    identity::{self, Identity, IdentityError, NodeCertificate},
    local::Local,
    operations::Api,
    transport::{self, ServeError},
};

/// The configuration of a server.
#[derive(Clone, Debug)]
pub struct Config {
    /// The directory of all data. Unused if `in_memory` is set.
    pub data_dir: PathBuf,
    /// Whether to keep all data in memory only.
    pub in_memory: bool,
    /// Admission hooks that see every write, in order.
    pub admission: Vec<Arc<dyn Admission>>,
    /// The source of the current time.
    pub clock: Clock,
    /// The bounds of the event history, from which watches can resume.
    pub window: Window,
    /// Additional names and addresses for the server's certificate, besides loopback and the listener's address.
    pub tls_names: Vec<String>,
    /// The audit log, if enabled.
    pub audit: Option<audit::Options>,
}

impl Config {
    /// A server that stores its data in `data_dir`.
    pub fn new(data_dir: impl Into<PathBuf>) -> Self {
        Self {
            data_dir: data_dir.into(),
            in_memory: false,
            admission: Vec::new(),
            clock: Clock::default(),
            window: Window::default(),
            tls_names: Vec::new(),
            audit: None,
        }
    }

    /// A server that keeps its data in memory only, for tests.
    pub fn in_memory() -> Self {
        Self {
            in_memory: true,
            ..Self::new(PathBuf::new())
        }
    }
}

/// Why a server cannot be opened.
#[derive(Debug, thiserror::Error)]
pub enum OpenError {
    /// The store cannot be opened.
    #[error(transparent)]
    Store(#[from] store::OpenError),
    /// The certificates or the administrator's token cannot be loaded or created.
    #[error("cannot set up the server's certificates")]
    Identity(#[from] IdentityError),
    /// The audit log cannot be opened.
    #[error(transparent)]
    Audit(#[from] audit::OpenError),
    /// The initial objects cannot be created.
    #[error("cannot create the objects that every cluster starts with")]
    Bootstrap(#[source] Status),
    /// The task that reads the store was cancelled or panicked.
    #[error("reading the store was interrupted")]
    Interrupted(#[source] tokio::task::JoinError),
}

/// Why a kubeconfig cannot be written.
#[derive(Debug, thiserror::Error)]
#[error("cannot write the kubeconfig {path}")]
pub struct KubeconfigError {
    /// The path of the file.
    pub path: PathBuf,
    /// The I/O error.
    #[source]
    pub source: std::io::Error,
}

/// A running server.
pub struct Server {
    frontend: Arc<Frontend>,
    config: Config,
    tasks: JoinSet<()>,
}

impl fmt::Debug for Server {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter
            .debug_struct("Server")
            .field("data_dir", &self.config.data_dir)
            .finish_non_exhaustive()
    }
}

impl Server {
    /// Opens or creates the store and starts the background controllers. The default namespaces exist when this returns.
    pub async fn open(config: Config) -> Result<Self, OpenError> {
        let location = if config.in_memory {
            Location::Memory
        } else {
            Location::Directory(config.data_dir.clone())
        };
        let keys = (!config.in_memory).then(|| config.data_dir.join("pki"));
        let window = config.window;
        let opening = tokio::task::spawn_blocking(move || -> Result<_, OpenError> {
            let store = Store::open(&location, window)?;
            let identity = Arc::new(Identity::load_or_create(keys.as_deref())?);
            let dialer = identity.dialer()?;
            Ok((store, identity, dialer))
        });
        let (store, identity, dialer) = opening.await.map_err(OpenError::Interrupted)??;
        let api = Arc::new(Api::new(
            store,
            config.admission.clone(),
            config.clock.clone(),
        ));
        let access = Arc::new(Access::new(
            identity,
            api.store.clone(),
            config.clock.clone(),
        ));
        let audit = config.audit.clone().map(audit::Log::open).transpose()?;
        let namespace_defaults = Arc::new(background::NamespaceDefaults {
            authority_pem: access.identity().authority_pem().to_owned(),
        });
        background::bootstrap(&api, &namespace_defaults)
            .await
            .map_err(OpenError::Bootstrap)?;
        let _ = api.access.set(access.clone());
        let mut tasks = JoinSet::new();
        background::start(&api, &namespace_defaults, &mut tasks);
        Ok(Self {
            frontend: Arc::new(Frontend {
                api,
                access,
                dialer,
                documents: Documents::default(),
                audit,
                requests: Requests::default(),
            }),
            config,
            tasks,
        })
    }

    /// An in-process client with full permissions. Its default namespace is `default`.
    pub fn client(&self) -> kube::Client {
        self.client_as(User::admin())
    }

    /// An in-process client with the permissions of `user`.
    pub fn client_as(&self, user: User) -> kube::Client {
        kube::Client::new(Local::new(self.frontend.clone(), user), "default")
    }

    /// Serves HTTPS on `listener` until `shutdown`; running requests then get a short time to finish. Returns an error when the
    /// store can no longer write, so that the supervisor of the process restarts it.
    pub async fn serve(
        &self,
        listener: TcpListener,
        shutdown: CancellationToken,
    ) -> Result<(), ServeError> {
        let stop = shutdown.child_token();
        let mut serving = pin!(transport::serve(
            self.frontend.clone(),
            listener,
            &self.config.tls_names,
            stop.clone(),
        ));
        tokio::select! {
            served = &mut serving => served,
            failure = self.frontend.api.store.failed() => {
                stop.cancel();
                serving.await?;
                Err(ServeError::Storage(failure))
            }
        }
    }

    /// Writes a kubeconfig with the administrator's token. Only its owner can read the file.
    pub fn write_kubeconfig(&self, path: &Path, server_url: &str) -> Result<(), KubeconfigError> {
        let contents = self.frontend.access.identity().kubeconfig(server_url);
        identity::write_private(path, contents.as_bytes()).map_err(|source| KubeconfigError {
            path: path.to_owned(),
            source,
        })
    }

    /// Issues a certificate for the kubelet endpoint of a node, valid for the given names and addresses. The endpoint must
    /// require a client certificate of the same authority: the server presents one when it proxies logs, exec, attach and
    /// port-forward.
    pub fn issue_node_certificate(
        &self,
        node: &str,
        names: &[String],
    ) -> Result<NodeCertificate, IdentityError> {
        self.frontend
            .access
            .identity()
            .node_certificate(node, names)
    }

    /// Ends watches and background controllers and closes the store. Requests of this server's clients fail afterwards.
    pub async fn shutdown(mut self) {
        self.frontend.api.shutdown.cancel();
        while self.tasks.join_next().await.is_some() {}
        if let Some(log) = &self.frontend.audit {
            log.flush().await;
        }
        self.frontend.api.store.close().await;
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.frontend.api.shutdown.cancel();
    }
}

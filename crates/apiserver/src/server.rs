//! The server as a whole: opening, its client, serving, and stopping.

use std::{
    fmt,
    path::{Path, PathBuf},
    pin::pin,
    sync::Arc,
};

use apimachinery::status::Status;
use tokio::{net::TcpListener, task::JoinSet};
use tokio_util::sync::CancellationToken;

use crate::{
    admission::Admission,
    audit,
    auth::{User, access::Access},
    background,
    http::{Documents, Frontend, Requests},
    local::Local,
    operations::{Api, Clock},
    store::{self, Place, Store, Window},
    transport::{
        self,
        identity::{Identity, IdentityError, NodeCertificate},
    },
};

/// How a server is set up.
#[derive(Clone, Debug)]
pub struct Config {
    /// Where everything is kept. Unused in memory.
    pub data_dir: PathBuf,
    /// Whether nothing is kept at all.
    pub in_memory: bool,
    /// Hooks that see every write, in order.
    pub admission: Vec<Arc<dyn Admission>>,
    /// Where the time comes from.
    pub clock: Clock,
    /// How much history watches can resume from.
    pub window: Window,
    /// Names and addresses, beside the listener's own and loopback, that the server's certificate is good for.
    pub tls_names: Vec<String>,
    /// Where requests are recorded, if they are.
    pub audit: Option<audit::Options>,
}

impl Config {
    /// A durable server in `data_dir`.
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

    /// A server that keeps nothing, for tests.
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
    /// The store.
    #[error(transparent)]
    Store(#[from] store::OpenError),
    /// Certificates and tokens.
    #[error("cannot set up the server's certificates")]
    Identity(#[from] IdentityError),
    /// The audit log.
    #[error(transparent)]
    Audit(#[from] audit::OpenError),
    /// The first objects.
    #[error("cannot create the objects that every cluster starts with")]
    Bootstrap(#[source] Status),
    /// The thread that reads the store ended.
    #[error("reading the store was interrupted")]
    Interrupted(#[source] tokio::task::JoinError),
}

/// Why a server cannot serve.
#[derive(Debug, thiserror::Error)]
pub enum ServeError {
    /// Certificates.
    #[error("cannot set up TLS")]
    Identity(#[from] IdentityError),
    /// The listener.
    #[error("cannot use the listener")]
    Listener(#[source] std::io::Error),
    /// The disk failed, and nothing can be written until the store is opened anew.
    #[error("the store cannot write any more: it must be opened again")]
    Storage(#[source] Arc<store::log::LogError>),
}

/// Why a kubeconfig cannot be written.
#[derive(Debug, thiserror::Error)]
#[error("cannot write the kubeconfig {path}")]
pub struct KubeconfigError {
    /// Where.
    pub path: PathBuf,
    /// What the system said.
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
    /// Opens or creates the store and starts the background work. The default namespaces exist when this returns.
    pub async fn open(config: Config) -> Result<Self, OpenError> {
        let place = if config.in_memory {
            Place::Memory
        } else {
            Place::Directory(config.data_dir.clone())
        };
        let keys = (!config.in_memory).then(|| config.data_dir.join("pki"));
        let window = config.window;
        let opening = tokio::task::spawn_blocking(move || -> Result<_, OpenError> {
            let store = Store::open(&place, window)?;
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
        let access = Arc::new(Access::new(identity));
        let audit = config.audit.clone().map(audit::Log::open).transpose()?;
        let furnishing = Arc::new(background::Furnishing {
            authority_pem: access.identity().authority_pem().to_owned(),
        });
        background::bootstrap(&api, &furnishing)
            .await
            .map_err(OpenError::Bootstrap)?;
        let _ = api.access.set(access.clone());
        let mut tasks = JoinSet::new();
        background::start(&api, &furnishing, &mut tasks);
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

    /// A client straight into the server, with full rights. Its default namespace is `default`.
    pub fn client(&self) -> kube::Client {
        self.client_as(User::admin())
    }

    /// A client straight into the server that may do what `user` may do.
    pub fn client_as(&self, user: User) -> kube::Client {
        kube::Client::new(Local::new(self.frontend.clone(), user), "default")
    }

    /// Serves HTTPS on `listener` until `shutdown`; requests under way then get a moment to finish. Ends with an error when the store
    /// can no longer write, so that whoever supervises the process starts it again.
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

    /// Writes a kubeconfig with the administrator's token, readable by its owner alone.
    pub fn write_kubeconfig(&self, path: &Path, server_url: &str) -> Result<(), KubeconfigError> {
        let contents = self.frontend.access.identity().kubeconfig(server_url);
        transport::identity::write_private(path, contents.as_bytes()).map_err(|source| {
            KubeconfigError {
                path: path.to_owned(),
                source,
            }
        })
    }

    /// A certificate for the kubelet endpoint of a node, good for the given names and addresses. The endpoint must ask its clients
    /// for a certificate of the same authority: the server shows one when it passes on logs, exec, attach and port-forward.
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

    /// Ends watches and background work and closes the store. Clients of this server fail afterwards.
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

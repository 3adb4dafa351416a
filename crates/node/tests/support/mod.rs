//! A machine for tests: an API server in memory, a scheduler and a node in a temporary directory.

#![allow(dead_code, reason = "every test binary uses its own part of this")]

pub mod internet;

use std::path::{Path, PathBuf};
use std::time::Duration;

use agent_sandbox_node::{Config, Node};
use futures::StreamExt;
use k8s_openapi::api::core::v1::{Event, Namespace, Pod, PodStatus};
use kube::api::{DeleteParams, ListParams, PostParams, WatchEvent, WatchParams};
use kube::core::NamespaceResourceScope;
use kube::{Api, Client, Resource, ResourceExt};
use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::{Value, json};
use testkit::eventually;
use tokio_util::sync::CancellationToken;

pub struct Machine {
    pub client: Client,
    /// The client of the node, which may modify responses.
    pub node_client: Client,
    pub node: Option<Node>,
    pub config: Config,
    server: Option<apiserver::Server>,
    finished: bool,
    shutdown: CancellationToken,
    node_shutdown: CancellationToken,
    directory: Option<tempfile::TempDir>,
}

/// The timeout of everything that a pod does, on a busy machine. It is not a statement about speed: benchmarks measure that.
const TIMEOUT: Duration = Duration::from_secs(120);

/// The prefix of the directories of tests; the PID of their process follows.
const PREFIX: &str = "node-test-";

/// A directory with the PID of its process in its name.
pub fn temporary_directory() -> tempfile::TempDir {
    let prefix = format!("{PREFIX}{}-", std::process::id());
    tempfile::Builder::new().prefix(&prefix).tempdir().unwrap()
}

/// Removes what tests have left whose process died.
pub async fn sweep() {
    for data_dir in container_runtime::reclaim::stopped_nodes() {
        let Some(home) = data_dir.parent() else {
            continue;
        };
        let process = home
            .file_name()
            .and_then(|name| name.to_str()?.strip_prefix(PREFIX)?.split('-').next());
        if process.is_some_and(|process| !Path::new("/proc").join(process).exists()) {
            let _ = container_runtime::reclaim::reclaim(&data_dir).await;
            let _ = std::fs::remove_dir_all(home);
        }
    }
}

/// The privileges of a container inside its own pod. Outside of it, both variants have none.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Privilege {
    /// The defaults.
    Usual,
    /// The `restricted` Pod Security Standard.
    None,
}

impl Privilege {
    pub const BOTH: [Self; 2] = [Self::Usual, Self::None];

    pub fn security_context(self) -> Value {
        match self {
            Self::Usual => json!({}),
            Self::None => {
                json!({"allowPrivilegeEscalation": false, "capabilities": {"drop": ["ALL"]}})
            }
        }
    }

    /// The bounding set, as the kernel shows it.
    pub fn capabilities(self) -> &'static str {
        match self {
            Self::Usual => "00000000200405fb",
            Self::None => "0000000000000000",
        }
    }
}

/// A disk in memory, for tests that fill disks. It must outlive the machine on it.
pub struct SmallDisk {
    directory: tempfile::TempDir,
}

impl SmallDisk {
    pub fn new(options: &std::ffi::CStr) -> Self {
        let directory = tempfile::tempdir().unwrap();
        let none = rustix::mount::MountFlags::empty();
        rustix::mount::mount("tmpfs", directory.path(), "tmpfs", none, options).unwrap();
        Self { directory }
    }

    pub fn path(&self) -> &Path {
        self.directory.path()
    }
}

impl Drop for SmallDisk {
    fn drop(&mut self) {
        let detach = rustix::mount::UnmountFlags::DETACH;
        let _ = rustix::mount::unmount(self.directory.path(), detach);
    }
}

impl Machine {
    pub async fn start() -> Self {
        Self::start_with(|_| {}).await
    }

    pub async fn start_with(adjust: impl FnOnce(&mut Config)) -> Self {
        Self::start_seen_by(|client| client, adjust).await
    }

    /// Starts a node that uses the test's own API client.
    pub async fn start_seen_by(
        seen: impl FnOnce(Client) -> Client,
        adjust: impl FnOnce(&mut Config),
    ) -> Self {
        assert!(
            rustix::process::geteuid().is_root(),
            "these tests make containers and need to run as root"
        );
        let _ = tracing_subscriber::fmt()
            .with_env_filter(tracing_subscriber::EnvFilter::from_default_env())
            .with_test_writer()
            .try_init();
        sweep().await;
        let directory = temporary_directory();
        let server = apiserver::Server::open(apiserver::Config::in_memory())
            .await
            .unwrap();
        let client = server.client();
        let namespaces = Api::<Namespace>::all(client.clone());
        let namespace = serde_json::from_value(json!({"metadata": {"name": "t"}})).unwrap();
        namespaces
            .create(&PostParams::default(), &namespace)
            .await
            .unwrap();
        let mut config = Config::new(directory.path().join("data"));
        "test-node".clone_into(&mut config.node_name);
        // Trials of other runtimes take time, so only the tests of runtime classes enable them.
        config.runtime_drivers.clear();
        // The registries of tests are on loopback.
        config.allowed_registries = vec!["127.0.0.1".to_owned()];
        // Only the tests that fill a disk enable disk pressure.
        config.storage_check = Duration::from_secs(3600);
        adjust(&mut config);
        let shutdown = CancellationToken::new();
        let mut machine = Self {
            node_client: seen(client.clone()),
            client,
            node: None,
            config,
            server: Some(server),
            finished: false,
            node_shutdown: shutdown.child_token(),
            shutdown,
            directory: Some(directory),
        };
        machine.start_node().await;
        tokio::spawn(machine_control_plane::scheduler::run(
            machine.node_client.clone(),
            "test-node".to_owned(),
            machine.shutdown.clone(),
        ));
        machine
    }

    pub async fn start_node(&mut self) {
        let node = Node::start(
            self.config.clone(),
            self.node_client.clone(),
            self.node_shutdown.clone(),
        )
        .await;
        self.node = Some(node.unwrap_or_else(|error| panic!("the node did not start: {error:?}")));
    }

    /// Stops the node and leaves its pods running.
    pub async fn stop_node(&mut self) {
        self.node_shutdown.cancel();
        self.node.take().unwrap().join().await;
        self.node_shutdown = self.shutdown.child_token();
    }

    pub fn runtime(&self) -> &container_runtime::native::NativeRuntime {
        self.node.as_ref().unwrap().runtime()
    }

    pub fn pods(&self) -> Api<Pod> {
        Api::namespaced(self.client.clone(), "t")
    }

    pub async fn create(&self, name: &str, spec: Value) -> Pod {
        let pod =
            serde_json::from_value(json!({"metadata": {"name": name}, "spec": spec})).unwrap();
        self.pods()
            .create(&PostParams::default(), &pod)
            .await
            .unwrap()
    }

    /// Creates an object that pods use.
    pub async fn create_object<K>(&self, object: Value)
    where
        K: Resource<DynamicType = (), Scope = NamespaceResourceScope>,
        K: Clone + std::fmt::Debug + DeserializeOwned + Serialize,
    {
        let object: K = serde_json::from_value(object).unwrap();
        Api::namespaced(self.client.clone(), "t")
            .create(&PostParams::default(), &object)
            .await
            .unwrap();
    }

    pub async fn pod(&self, name: &str) -> Pod {
        self.pods().get(name).await.unwrap()
    }

    /// Waits until the pod's status satisfies `accepts`.
    pub async fn pod_with(&self, name: &str, what: &str, accepts: impl Fn(&Pod) -> bool) -> Pod {
        let last = std::sync::Mutex::new(Value::Null);
        let deadline = tokio::time::Instant::now() + TIMEOUT;
        loop {
            let pod = self.pods().get_opt(name).await.unwrap();
            if let Some(pod) = pod {
                if accepts(&pod) {
                    return pod;
                }
                *last.lock().unwrap() = serde_json::to_value(&pod.status).unwrap();
            }
            assert!(
                tokio::time::Instant::now() < deadline,
                "pod {name} never was {what}; its status is {:#}",
                last.lock().unwrap()
            );
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    }

    pub async fn ready(&self, name: &str) -> Pod {
        self.pod_with(name, "ready", is_ready).await
    }

    pub async fn phase(&self, name: &str, phase: &str) -> Pod {
        self.pod_with(name, phase, |pod| {
            pod.status
                .as_ref()
                .and_then(|status| status.phase.as_deref())
                == Some(phase)
        })
        .await
    }

    pub async fn delete(&self, name: &str) {
        self.pods()
            .delete(name, &DeleteParams::default())
            .await
            .unwrap();
        self.gone(name).await;
    }

    /// Deletes a pod. Returns every state of it in the API until it was gone.
    pub async fn delete_and_watch(&self, name: &str) -> Vec<PodStatus> {
        let before = self.pod(name).await;
        let own = WatchParams::default().fields(&format!("metadata.name={name}"));
        let version = before.resource_version().unwrap();
        let pods = self.pods();
        let mut events = std::pin::pin!(pods.watch(&own, &version).await.unwrap());
        pods.delete(name, &DeleteParams::default()).await.unwrap();
        let mut states = Vec::new();
        let all = async {
            while let Some(event) = events.next().await {
                match event.unwrap() {
                    WatchEvent::Modified(pod) => states.extend(pod.status),
                    WatchEvent::Deleted(_) => return,
                    WatchEvent::Bookmark(_) => {}
                    other => panic!("unexpected {other:?}"),
                }
            }
        };
        let waited = tokio::time::timeout(TIMEOUT, all).await;
        waited.unwrap_or_else(|_| panic!("pod {name} did not go"));
        states
    }

    pub async fn gone(&self, name: &str) {
        eventually("the pod to be gone", || async {
            self.pods()
                .get_opt(name)
                .await
                .unwrap()
                .is_none()
                .then_some(())
        })
        .await;
    }

    /// Runs a command to its end in a pod's container `c`: exit code, standard output, standard error.
    pub async fn exec(&self, pod: &Pod, command: &[&str]) -> (i32, String, String) {
        self.exec_in(pod, "c", command).await
    }

    /// The same, in a container of any kind.
    pub async fn exec_in(
        &self,
        pod: &Pod,
        container: &str,
        command: &[&str],
    ) -> (i32, String, String) {
        use container_runtime::agent::Output;
        use container_runtime::{ContainerId, Runtime};
        let status = pod.status.as_ref().unwrap();
        let mut statuses = [
            &status.container_statuses,
            &status.init_container_statuses,
            &status.ephemeral_container_statuses,
        ]
        .into_iter()
        .flatten()
        .flatten();
        let found = statuses.find(|status| status.name == container).unwrap();
        let id = ContainerId {
            pod: pod.uid().unwrap(),
            container: container.to_owned(),
            attempt: found.restart_count.unsigned_abs(),
        };
        let request = shim_protocol::ExecRequest {
            arguments: command.iter().map(|word| (*word).to_owned()).collect(),
            environment: Vec::new(),
            terminal: false,
            stdin: false,
            window: None,
        };
        let mut session = self
            .runtime()
            .exec(&id, request)
            .await
            .unwrap_or_else(|error| panic!("exec: {error:?}"));
        let (mut out, mut err) = (Vec::new(), Vec::new());
        loop {
            match session.output.next().await.unwrap() {
                Output::Stdout(data) => out.extend(data),
                Output::Stderr(data) => err.extend(data),
                Output::Exit(exit) => {
                    let text = |bytes: Vec<u8>| String::from_utf8_lossy(&bytes).into_owned();
                    return (exit.code, text(out), text(err));
                }
            }
        }
    }

    /// Removes the data directory of a stopped node whose pods are running, as an administrator who needs the space would.
    pub fn remove_directory(&self) {
        for name in ["run", "memory"] {
            let mount = self.config.data_dir.join(name);
            rustix::mount::unmount(mount, rustix::mount::UnmountFlags::DETACH).unwrap();
        }
        std::fs::remove_dir_all(&self.config.data_dir).unwrap();
    }

    /// Waits for an event of a pod with this text.
    pub async fn has_event(&self, pod: &str, reason: &str, note: &str) {
        let events = Api::<Event>::namespaced(self.client.clone(), "t");
        let what = format!("event {reason} of {pod} that says {note:?}");
        eventually(&what, || async {
            let found = events.list(&ListParams::default()).await.unwrap();
            let mut found = found.into_iter().filter(|event| {
                event.involved_object.name.as_deref() == Some(pod)
                    && event.reason.as_deref() == Some(reason)
                    && event.message.as_deref().unwrap_or_default().contains(note)
            });
            found.next().map(drop)
        })
        .await;
    }

    /// Removes every pod, stops the node, and checks that the machine is as it was.
    pub async fn finish(mut self) {
        for pod in self.pods().list(&ListParams::default()).await.unwrap() {
            let parameters = DeleteParams {
                grace_period_seconds: Some(0),
                ..DeleteParams::default()
            };
            let _ = self.pods().delete(&pod.name_any(), &parameters).await;
            self.gone(&pod.name_any()).await;
        }
        // A pod deleted without grace is gone from the API before it is gone from the machine.
        let pods = self.config.data_dir.join("pods");
        eventually("the pods to be gone from the machine", || async {
            entries(&pods).is_empty().then_some(())
        })
        .await;
        self.shutdown.cancel();
        let node = self.node.take().unwrap();
        node.dismantle()
            .await
            .unwrap_or_else(|error| panic!("dismantling: {error:?}"));
        self.finished = true;
        self.server.take().unwrap().shutdown().await;
        let data = self.directory.take().unwrap();
        let left = leftovers(data.path());
        assert!(left.is_empty(), "left behind: {left:#?}");
    }
}

/// Cleans up after a test that failed before it had finished.
impl Drop for Machine {
    fn drop(&mut self) {
        if self.finished {
            return;
        }
        self.shutdown.cancel();
        let data_dir = self.config.data_dir.clone();
        let data_dir = data_dir.canonicalize().unwrap_or(data_dir);
        // On its own thread, which is in the same network namespace and not in a tokio runtime.
        let cleaning = std::thread::spawn(move || clean_up(&data_dir));
        let _ = cleaning.join();
    }
}

fn clean_up(data_dir: &Path) {
    let group = container_runtime::cgroup(data_dir);
    let tag = group.trim_start_matches("agent-sandbox-").to_owned();
    let mut groups: Vec<PathBuf> = entries(Path::new("/sys/fs/cgroup"))
        .iter()
        .map(|hierarchy| hierarchy.join(&group))
        .chain([Path::new("/sys/fs/cgroup").join(&group)])
        .filter(|path| path.exists())
        .collect();
    let mut next = 0;
    while let Some(path) = groups.get(next).cloned() {
        groups.extend(entries(&path).into_iter().filter(|below| below.is_dir()));
        next += 1;
    }
    for round in 0..100 {
        let mut left = false;
        for path in groups.iter().rev() {
            for pid in std::fs::read_to_string(path.join("cgroup.procs"))
                .unwrap_or_default()
                .lines()
            {
                let pid = pid.parse().ok().and_then(rustix::process::Pid::from_raw);
                if let Some(pid) = pid {
                    let _ = rustix::process::kill_process(pid, rustix::process::Signal::KILL);
                }
            }
            let _ = std::fs::remove_dir(path);
            left |= path.exists();
        }
        if !left {
            break;
        }
        std::thread::sleep(Duration::from_millis(10 + round));
    }
    let shown = data_dir.display().to_string();
    let mounts = std::fs::read_to_string("/proc/self/mountinfo").unwrap_or_default();
    for point in mounts
        .lines()
        .rev()
        .filter_map(|line| line.split(' ').nth(4))
        .filter(|point| point.starts_with(&shown))
    {
        let _ = rustix::mount::unmount(point, rustix::mount::UnmountFlags::DETACH);
    }
    let _ = std::process::Command::new("nft")
        .args(["delete", "table", "inet", &format!("agent_sandbox_{tag}")])
        .stderr(std::process::Stdio::null())
        .status();
    internet::remove_links(&format!("asb-{tag}"), &format!("as{}", &tag[..6]));
}

pub fn is_ready(pod: &Pod) -> bool {
    let conditions = pod
        .status
        .as_ref()
        .and_then(|status| status.conditions.as_ref());
    conditions
        .into_iter()
        .flatten()
        .any(|condition| condition.type_ == "Ready" && condition.status == "True")
}

/// What the machine has of a node, except for the files in its data directory.
pub fn of_machine(data_dir: &Path) -> Vec<String> {
    let group = container_runtime::cgroup(data_dir);
    let tag = group.trim_start_matches("agent-sandbox-").to_owned();
    let mut found = Vec::new();
    let hierarchies = entries(Path::new("/sys/fs/cgroup"));
    let groups = hierarchies.iter().map(|hierarchy| hierarchy.join(&group));
    found.extend(
        groups
            .filter(|path| path.exists())
            .map(|path| format!("cgroup {}", path.display())),
    );
    let shown = data_dir.display().to_string();
    let mounts = std::fs::read_to_string("/proc/self/mountinfo").unwrap();
    let mounts = mounts.lines().filter(|line| line.contains(&shown));
    found.extend(mounts.map(|line| format!("mount {line}")));
    let links = std::fs::read_to_string("/proc/thread-self/net/dev").unwrap();
    let links = links.lines().filter_map(|line| line.split(':').next());
    let prefixes = [format!("asb-{tag}"), format!("as{}", &tag[..6])];
    found.extend(
        links
            .map(str::trim)
            .filter(|link| prefixes.iter().any(|prefix| link.starts_with(prefix)))
            .map(|link| format!("link {link}")),
    );
    // Without the program there are no nftables tables.
    let tables = std::process::Command::new("nft")
        .args(["list", "tables"])
        .output()
        .map(|listed| String::from_utf8_lossy(&listed.stdout).into_owned())
        .unwrap_or_default();
    let tables = tables.lines().filter(|table| table.contains(&tag));
    found.extend(tables.map(|table| format!("nft {table}")));
    found
}

/// What a node's data directory still has of the machine.
pub fn leftovers(directory: &Path) -> Vec<String> {
    let mut left = Vec::new();
    let mounts = std::fs::read_to_string("/proc/self/mountinfo").unwrap();
    let shown = directory.display().to_string();
    left.extend(
        mounts
            .lines()
            .filter(|line| line.contains(&shown))
            .map(|line| format!("mount {line}")),
    );
    left.extend(
        entries(&directory.join("data/pods"))
            .iter()
            .map(|path| format!("pod {}", path.display())),
    );
    left.extend(
        entries(&directory.join("data/run/slots"))
            .iter()
            .map(|path| format!("slot {}", path.display())),
    );
    left
}

pub fn entries(path: &Path) -> Vec<PathBuf> {
    std::fs::read_dir(path)
        .into_iter()
        .flatten()
        .flatten()
        .map(|entry| entry.path())
        .collect()
}

/// A pod's container `c` as its status has it.
pub fn container(pod: &Pod) -> Option<k8s_openapi::api::core::v1::ContainerStatus> {
    let statuses = pod.status.as_ref()?.container_statuses.as_ref()?;
    statuses.iter().find(|status| status.name == "c").cloned()
}

//! A leak test: after pods were created and deleted in every state, with the node killed in between, nothing is left on the machine.
//!
//! The node is a separate process here, so that it can be killed with SIGKILL. This program is both: with `--node` it is the node,
//! otherwise the test. `--pods` is the number of pods (a few by default; `cargo xtask test-leaks` uses a thousand), `--seed` repeats a
//! run.

#![expect(
    clippy::unwrap_used,
    reason = "a test that cannot go on says so by panicking"
)]

mod support;

use std::collections::BTreeSet;
use std::path::Path;
use std::process::{Child, Command};
use std::time::Duration;

use agent_sandbox_node::{Config, Node};
use k8s_openapi::api::core::v1::{Namespace, Pod};
use kube::api::{DeleteParams, ListParams, PostParams};
use kube::{Api, Client, ResourceExt};
use serde_json::{Value, json};
use support::internet::on_own_network;
use testkit::eventually_within;
use tokio_util::sync::CancellationToken;

const TIMEOUT: Duration = Duration::from_secs(120);

fn main() {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let after = |flag: &str| {
        let at = arguments.iter().position(|argument| argument == flag)?;
        arguments.get(at + 1).cloned()
    };
    if let Some(data_dir) = after("--node") {
        let kubeconfig = after("--kubeconfig").unwrap();
        be_the_node(Path::new(&data_dir), Path::new(&kubeconfig));
        return;
    }
    if arguments.iter().any(|argument| argument == "--list") {
        println!("pods_in_every_state_leave_nothing_behind_when_the_node_is_killed: test");
        return;
    }
    let pods = after("--pods").map_or(48, |text| text.parse().unwrap());
    let seed = after("--seed").map_or(u64::from(std::process::id()), |text| text.parse().unwrap());
    println!("{pods} pods, --seed {seed}");
    on_own_network(move || pods_leave_nothing_behind_when_the_node_is_killed(pods, seed));
    println!("nothing is left");
}

fn be_the_node(data_dir: &Path, kubeconfig: &Path) {
    let runtime = tokio::runtime::Runtime::new().unwrap();
    runtime.block_on(async {
        let kubeconfig = kube::config::Kubeconfig::read_from(kubeconfig).unwrap();
        let options = kube::config::KubeConfigOptions::default();
        let config = kube::Config::from_custom_kubeconfig(kubeconfig, &options);
        let client = Client::try_from(config.await.unwrap()).unwrap();
        let mut config = Config::new(data_dir);
        "test-node".clone_into(&mut config.node_name);
        let shutdown = CancellationToken::new();
        let node = Node::start(config, client, shutdown.clone()).await.unwrap();
        std::fs::write(data_dir.with_extension("up"), "").unwrap();
        // Stopped permanently, it removes everything from the machine.
        let stop = data_dir.with_extension("stop");
        while !stop.exists() {
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
        shutdown.cancel();
        node.dismantle().await.unwrap();
    });
}

/// A seeded random number generator.
struct Choices(u64);

impl Choices {
    fn below(&mut self, count: u64) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut value = self.0;
        value = (value ^ (value >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        value = (value ^ (value >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        (value ^ (value >> 31)) % count
    }
}

/// What the machine has of this node.
fn left_behind(data_dir: &Path) -> BTreeSet<String> {
    let names = |path: &Path| -> Vec<String> {
        let entries = std::fs::read_dir(path).into_iter().flatten().flatten();
        entries
            .filter_map(|entry| entry.file_name().into_string().ok())
            .collect()
    };
    let mut found = BTreeSet::new();
    let links = std::fs::read_to_string("/proc/thread-self/net/dev").unwrap();
    let links = links
        .lines()
        .skip(2)
        .filter_map(|line| line.split(':').next());
    found.extend(
        links
            .map(str::trim)
            .filter(|link| link.starts_with("as"))
            .map(|link| format!("link {link}")),
    );
    // Without the program there are no nftables tables.
    let rules = Command::new("nft")
        .args(["list", "tables"])
        .output()
        .map(|listed| String::from_utf8_lossy(&listed.stdout).into_owned())
        .unwrap_or_default();
    found.extend(rules.lines().map(|table| format!("nft {table}")));
    let shown = data_dir.display().to_string();
    let mounts = std::fs::read_to_string("/proc/self/mountinfo").unwrap();
    let mounts = mounts.lines().filter(|line| line.contains(&shown));
    found.extend(mounts.map(|line| format!("mount {line}")));
    let group = container_runtime::cgroup(data_dir);
    for hierarchy in names(Path::new("/sys/fs/cgroup")) {
        let path = Path::new("/sys/fs/cgroup").join(hierarchy).join(&group);
        if path.exists() {
            found.insert(format!("cgroup {}", path.display()));
        }
    }
    for pid in names(Path::new("/proc")) {
        let groups = std::fs::read_to_string(format!("/proc/{pid}/cgroup")).unwrap_or_default();
        // Zombies are ignored: after the node was killed, init reaps them.
        let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
        let has_ended = stat.contains(") Z ");
        if groups.contains(&group) && !has_ended {
            found.insert(format!("process {pid}"));
        }
    }
    for directory in ["pods", "run/slots", "memory"] {
        let below = names(&data_dir.join(directory));
        found.extend(below.into_iter().map(|name| format!("{directory}/{name}")));
    }
    found
}

struct NodeProcess {
    child: Child,
}

impl NodeProcess {
    async fn start(data_dir: &Path, kubeconfig: &Path) -> Self {
        let up = data_dir.with_extension("up");
        let _ = std::fs::remove_file(&up);
        let child = Command::new(std::env::current_exe().unwrap())
            .arg("--node")
            .arg(data_dir)
            .arg("--kubeconfig")
            .arg(kubeconfig)
            .spawn()
            .unwrap();
        let node = Self { child };
        eventually_within(TIMEOUT, "the node to be up", || async {
            up.exists().then_some(())
        })
        .await;
        node
    }

    fn descriptors(&self) -> std::path::PathBuf {
        Path::new("/proc")
            .join(self.child.id().to_string())
            .join("fd")
    }

    fn kill(mut self) {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
    }
}

fn spec(number: u64, choices: &mut Choices) -> Value {
    let script = [
        "sleep 1000",
        "exit 1",
        "exit 0",
        "trap '' TERM; while :; do sleep 0.05; done",
        "(sleep 1000 &) ; sleep 1000",
    ][usize::try_from(choices.below(5)).unwrap()];
    let policy = ["Never", "Always", "OnFailure"][usize::try_from(choices.below(3)).unwrap()];
    let container = |name: &str| {
        json!({"name": name, "image": "host", "command": ["sh", "-c", script],
            "volumeMounts": [{"name": "m", "mountPath": "/m"}, {"name": "d", "mountPath": "/d"}]})
    };
    let mut containers = vec![container("c")];
    if choices.below(4) == 0 {
        containers.push(container("second"));
    }
    json!({"metadata": {"name": format!("p-{number}"), "labels": {"round": "x"}}, "spec": {
        "terminationGracePeriodSeconds": 1, "restartPolicy": policy, "containers": containers,
        "volumes": [{"name": "m", "emptyDir": {"medium": "Memory"}}, {"name": "d", "emptyDir": {}}]}})
}

/// A running node has no more open descriptors after some pods than before them.
async fn descriptors_come_and_go(
    node: &NodeProcess,
    pods: &Api<Pod>,
    below: &Path,
    choices: &mut Choices,
) {
    const PODS: u64 = 12;
    /// Connections to the API come and go by themselves.
    const SLACK: usize = 4;
    let mut counts: Vec<usize> = Vec::new();
    // The first round warms the node up.
    for round in 0..2 {
        for number in 0..PODS {
            let pod = spec(1_000_000 + round * PODS + number, choices);
            let pod = serde_json::from_value(pod).unwrap();
            pods.create(&PostParams::default(), &pod).await.unwrap();
        }
        eventually_within(TIMEOUT, "pods to be on the machine", || async {
            (support::entries(below).len() as u64 == PODS).then_some(())
        })
        .await;
        for pod in pods.list(&ListParams::default()).await.unwrap() {
            let _ = pods.delete(&pod.name_any(), &DeleteParams::default()).await;
        }
        eventually_within(TIMEOUT, "pods to be gone again", || async {
            let left = pods.list(&ListParams::default()).await.unwrap();
            (left.items.is_empty() && support::entries(below).is_empty()).then_some(())
        })
        .await;
        let slots = below.with_file_name("run").join("slots");
        let ready = Config::new("/").ready_namespaces;
        eventually_within(TIMEOUT, "slots to be ready again", || async {
            let places = support::entries(&slots);
            let waiting = places.iter().filter(|place| place.join("ready-2").exists());
            (waiting.count() == ready && places.len() == ready).then_some(())
        })
        .await;
        let most = counts.last().map_or(usize::MAX, |before| before + SLACK);
        let held = eventually_within(TIMEOUT, "the node's descriptors to be closed", || async {
            let held = support::entries(&node.descriptors()).len();
            (held <= most).then_some(held)
        })
        .await;
        counts.push(held);
    }
    println!("descriptors after each round: {counts:?}");
}

async fn pods_leave_nothing_behind_when_the_node_is_killed(total: u64, seed: u64) {
    const AT_ONCE: u64 = 24;
    let mut choices = Choices(seed);
    support::sweep().await;
    let directory = support::temporary_directory();
    let data_dir = directory.path().join("data");
    std::fs::create_dir(&data_dir).unwrap();
    let server = std::sync::Arc::new(
        apiserver::Server::open(apiserver::Config::in_memory())
            .await
            .unwrap(),
    );
    support::internet::bring_up_loopback().await;
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let url = format!("https://{}", listener.local_addr().unwrap());
    let kubeconfig = directory.path().join("kubeconfig");
    server.write_kubeconfig(&kubeconfig, &url).unwrap();
    let shutdown = CancellationToken::new();
    let (serving, stop) = (server.clone(), shutdown.clone());
    tokio::spawn(async move { serving.serve(listener, stop).await });
    let client = server.client();
    let namespace: Namespace = serde_json::from_value(json!({"metadata": {"name": "t"}})).unwrap();
    let namespaces = Api::<Namespace>::all(client.clone());
    namespaces
        .create(&PostParams::default(), &namespace)
        .await
        .unwrap();
    tokio::spawn(machine_control_plane::scheduler::run(
        client.clone(),
        "test-node".to_owned(),
        shutdown.clone(),
    ));
    let pods = Api::<Pod>::namespaced(client, "t");
    let mut node = NodeProcess::start(&data_dir, &kubeconfig).await;
    let mut made = 0;
    while made < total {
        for _ in 0..AT_ONCE.min(total - made) {
            let pod = serde_json::from_value(spec(made, &mut choices)).unwrap();
            pods.create(&PostParams::default(), &pod).await.unwrap();
            made += 1;
        }
        // At a random time between the start of the pods and their end.
        tokio::time::sleep(Duration::from_millis(choices.below(700))).await;
        let listed = pods.list(&ListParams::default()).await.unwrap();
        for pod in &listed {
            let parameters = match choices.below(4) {
                0 => DeleteParams::default().grace_period(0),
                1 => continue,
                _ => DeleteParams::default(),
            };
            let _ = pods.delete(&pod.name_any(), &parameters).await;
        }
        if choices.below(2) == 0 {
            tokio::time::sleep(Duration::from_millis(choices.below(300))).await;
            node.kill();
            // Some are deleted while the node is down.
            for pod in pods
                .list(&ListParams::default())
                .await
                .unwrap()
                .iter()
                .step_by(3)
            {
                let now = DeleteParams::default().grace_period(0);
                let _ = pods.delete(&pod.name_any(), &now).await;
            }
            node = NodeProcess::start(&data_dir, &kubeconfig).await;
        }
    }
    for pod in pods.list(&ListParams::default()).await.unwrap() {
        let _ = pods.delete(&pod.name_any(), &DeleteParams::default()).await;
    }
    eventually_within(TIMEOUT, "the pods to be gone from the API", || async {
        let left = pods.list(&ListParams::default()).await.unwrap();
        left.items.is_empty().then_some(())
    })
    .await;
    let below = data_dir.join("pods");
    eventually_within(TIMEOUT, "the pods to be gone from the machine", || async {
        support::entries(&below).is_empty().then_some(())
    })
    .await;
    descriptors_come_and_go(&node, &pods, &below, &mut choices).await;
    std::fs::write(data_dir.with_extension("stop"), "").unwrap();
    let ended = node.child.wait().unwrap();
    assert!(ended.success(), "the node ended with {ended}");
    shutdown.cancel();
    let left = left_behind(&data_dir);
    assert!(left.is_empty(), "left behind: {left:#?}");
}

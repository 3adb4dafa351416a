//! A whole Kubernetes on this machine's namespaces: control plane, one node with kubelet and containerd, and add-ons.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, ensure};

use super::configuration::{ADDRESS, NODE, Places};
use crate::kubernetes::certificates::Authority;
use crate::kubernetes::parts::Parts;
use crate::kubernetes::processes::LOOK_AGAIN;

/// How long the cluster may take to be ready on a loaded machine.
const DEADLINE: Duration = Duration::from_secs(300);
const SOCKET: &str = "/run/containerd/containerd.sock";

/// Where everything is that the cluster is made of.
pub struct Sources<'a> {
    pub repository: &'a Path,
    /// The programs of the control plane.
    pub control_plane: &'a Path,
    /// The programs of the node.
    pub node: &'a Path,
    /// Archives of the images that the node has.
    pub images: &'a [PathBuf],
    /// Certificates, kubeconfigs, logs and state.
    pub directory: &'a Path,
    /// Where the daemons find their helpers: runc, the shims, iptables.
    pub path: &'a str,
}

/// A running cluster. Dropping it stops its daemons.
pub struct System {
    parts: Parts,
    kubectl: PathBuf,
    directory: PathBuf,
}

impl System {
    /// Starts a cluster and waits until its node and its DNS are ready.
    pub fn start(sources: &Sources) -> anyhow::Result<Self> {
        let places = Places {
            directory: sources.directory,
            programs: sources.node,
        };
        let mut system = Self {
            parts: Parts::new(sources.directory).with_path(sources.path),
            kubectl: sources.control_plane.join("kubectl"),
            directory: sources.directory.to_owned(),
        };
        write_identities(sources.directory)?;
        for (name, content) in places.files() {
            let path = sources.directory.join(name);
            if let Some(parent) = path.parent() {
                fs::create_dir_all(parent)?;
            }
            fs::write(&path, content).with_context(|| format!("writing {}", path.display()))?;
        }
        let mut run = |name: &'static str, programs: &Path, flags: &[String]| {
            system.parts.run(name, &programs.join(name), flags);
        };
        run("etcd", sources.control_plane, &places.etcd_flags());
        run(
            "kube-apiserver",
            sources.control_plane,
            &places.api_server_flags(),
        );
        run("containerd", sources.node, &places.containerd_flags());
        system.import(sources)?;
        system.until("kube-apiserver", &["get", "--raw=/readyz"])?;
        for (name, programs, flags) in [
            (
                "kube-controller-manager",
                sources.control_plane,
                places.controller_manager_flags(),
            ),
            (
                "kube-scheduler",
                sources.control_plane,
                places.scheduler_flags(),
            ),
            ("kubelet", sources.node, places.kubelet_flags()),
            ("kube-proxy", sources.node, places.kube_proxy_flags()),
            ("kube-router", sources.node, places.kube_router_flags()),
        ] {
            system.parts.run(name, &programs.join(name), &flags);
        }
        system.apply(&sources.repository.join("tests/cluster/add-ons"))?;
        system.until(
            "kubelet",
            &[
                "wait",
                "--for=condition=Ready",
                &format!("node/{NODE}"),
                "--timeout=1s",
            ],
        )?;
        system.until(
            "kube-controller-manager",
            &[
                "rollout",
                "status",
                "deployment/coredns",
                "--namespace=kube-system",
                "--timeout=5s",
            ],
        )?;
        Ok(system)
    }

    pub fn kubeconfig(&self) -> PathBuf {
        self.directory.join("admin.kubeconfig")
    }

    fn kubectl(&self) -> Command {
        let mut kubectl = Command::new(&self.kubectl);
        kubectl
            .env("KUBECONFIG", self.kubeconfig())
            .stdin(Stdio::null());
        kubectl
    }

    fn apply(&self, path: &Path) -> anyhow::Result<()> {
        let applied = self
            .kubectl()
            .args(["apply", "--server-side", "-f"])
            .arg(path)
            .output()?;
        ensure!(
            applied.status.success(),
            "applying {}: {}",
            path.display(),
            String::from_utf8_lossy(&applied.stderr)
        );
        Ok(())
    }

    /// Gives the images to the node once containerd answers.
    fn import(&self, sources: &Sources) -> anyhow::Result<()> {
        let ctr = || {
            let mut ctr = Command::new(sources.node.join("ctr"));
            ctr.args(["--address", SOCKET, "--namespace=k8s.io"]);
            ctr
        };
        self.wait("containerd", || ctr().arg("version").output())?;
        for image in sources.images {
            let imported = ctr()
                .args(["images", "import", "--local"])
                .arg(image)
                .output()?;
            ensure!(
                imported.status.success(),
                "importing {}: {}",
                image.display(),
                String::from_utf8_lossy(&imported.stderr)
            );
        }
        Ok(())
    }

    fn until(&self, part: &str, arguments: &[&str]) -> anyhow::Result<()> {
        self.wait(part, || self.kubectl().args(arguments).output())
    }

    /// Repeats a command until it succeeds. The log of the part says why it did not in time.
    fn wait(
        &self,
        part: &str,
        command: impl Fn() -> std::io::Result<std::process::Output>,
    ) -> anyhow::Result<()> {
        let deadline = Instant::now() + DEADLINE;
        loop {
            let answer = command()?;
            if answer.status.success() {
                return Ok(());
            }
            let log = self.parts.log(part);
            let tail: Vec<&str> = log.lines().rev().take(30).collect();
            ensure!(
                Instant::now() < deadline,
                "{part} was not ready in time: {}\nits log, last line first:\n{}",
                String::from_utf8_lossy(&answer.stderr),
                tail.join("\n")
            );
            std::thread::sleep(LOOK_AGAIN);
        }
    }
}

/// Certificates of servers, and kubeconfigs of users.
fn write_identities(directory: &Path) -> anyhow::Result<()> {
    let authority = Authority::new(directory)?;
    let masters = Some("system:masters");
    authority.sign(
        "apiserver",
        "kube-apiserver",
        None,
        &[
            "127.0.0.1",
            ADDRESS,
            "10.96.0.1",
            "localhost",
            "kubernetes",
            "kubernetes.default",
            "kubernetes.default.svc",
            "kubernetes.default.svc.cluster.local",
        ],
    )?;
    authority.sign(
        "kubelet-client",
        "kube-apiserver-kubelet-client",
        masters,
        &[],
    )?;
    authority.sign("kubelet", NODE, None, &[ADDRESS, NODE])?;
    authority.sign("front-proxy", "front-proxy", None, &[])?;
    // Any key will do to sign the tokens of service accounts.
    authority.sign("accounts", "accounts", None, &[])?;
    // The certificates of the machines that join in a test.
    for (number, name) in ["node-two", "node-three"].into_iter().enumerate() {
        let address = format!("10.99.0.{}", number + 3);
        authority.sign(&format!("{name}-serving"), name, None, &[&address, name])?;
        identity(
            &authority,
            directory,
            name,
            &format!("system:node:{name}"),
            Some("system:nodes"),
        )?;
    }
    for (file, user, group) in [
        ("admin", "admin", masters),
        ("controller-manager", "system:kube-controller-manager", None),
        ("scheduler", "system:kube-scheduler", None),
        (
            "node",
            &*format!("system:node:{NODE}"),
            Some("system:nodes"),
        ),
        ("proxy", "system:kube-proxy", None),
        ("network-policies", "network-policies", masters),
    ] {
        identity(&authority, directory, file, user, group)?;
    }
    Ok(())
}

fn identity(
    authority: &Authority,
    directory: &Path,
    file: &str,
    user: &str,
    group: Option<&str>,
) -> anyhow::Result<()> {
    let (certificate, key) = authority.sign(file, user, group, &[])?;
    let config = serde_json::json!({
        "apiVersion": "v1",
        "kind": "Config",
        "clusters": [{"name": "tests", "cluster": {
            "server": format!("https://{ADDRESS}:6443"),
            "certificate-authority": authority.certificate(),
        }}],
        "users": [{"name": file, "user": {"client-certificate": certificate, "client-key": key}}],
        "contexts": [{"name": "tests", "context": {"cluster": "tests", "user": file}}],
        "current-context": "tests",
    });
    let path = directory.join(format!("{file}.kubeconfig"));
    fs::write(&path, serde_yaml_ng::to_string(&config)?)
        .with_context(|| format!("writing {}", path.display()))
}

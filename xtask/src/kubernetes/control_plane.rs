//! A real Kubernetes control plane on this machine's loopback: etcd, kube-apiserver, kube-controller-manager, kube-scheduler.
//!
//! Like a kubelet with static pods, it starts a part again that ended; see [`super::parts`].

use std::fs;
use std::net::TcpListener;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::ensure;
use tempfile::TempDir;

use super::certificates::Authority;
use super::parts::Parts;
use super::processes::{Interruption, LOOK_AGAIN};

/// How long the control plane may take to be ready on a loaded machine.
const DEADLINE: Duration = Duration::from_secs(300);
/// The node that tests start, by the name in its certificate.
pub const NODE: &str = "node-one";

/// A running control plane. Dropping it stops it.
pub struct ControlPlane {
    // Before the directory, so that the parts stop before it is removed.
    parts: Parts,
    directory: TempDir,
    programs: PathBuf,
    interruption: Interruption,
    address: String,
}

impl ControlPlane {
    /// Starts one and waits until it is ready, or fails when it is interrupted before.
    pub fn start(programs: &Path, interruption: &Interruption) -> anyhow::Result<Self> {
        let directory = tempfile::Builder::new()
            .prefix("agent-sandbox-kubernetes-")
            .tempdir()?;
        let [client, peer, secure] = free_ports()?;
        let mut control_plane = Self {
            parts: Parts::new(directory.path()),
            directory,
            programs: programs.to_owned(),
            interruption: interruption.clone(),
            address: format!("127.0.0.1:{secure}"),
        };
        let authority = Authority::new(control_plane.path())?;
        control_plane.write_identities(&authority)?;
        control_plane.run("etcd", &control_plane.etcd_flags(client, peer));
        control_plane.run(
            "kube-apiserver",
            &control_plane.api_server_flags(client, secure),
        );
        control_plane.wait_until_ready()?;
        control_plane.run(
            "kube-controller-manager",
            &control_plane.controller_manager_flags(),
        );
        control_plane.run("kube-scheduler", &control_plane.scheduler_flags());
        control_plane.wait_for_default_account()?;
        Ok(control_plane)
    }

    /// Where its files are: kubeconfigs, certificates, logs.
    pub fn path(&self) -> &Path {
        self.directory.path()
    }

    pub fn kubeconfig(&self, user: &str) -> PathBuf {
        self.path().join(format!("{user}.kubeconfig"))
    }

    /// A kubectl that is administrator here.
    pub fn kubectl(&self) -> Command {
        let mut kubectl = Command::new(self.programs.join("kubectl"));
        kubectl
            .env("KUBECONFIG", self.kubeconfig("admin"))
            .stdin(Stdio::null());
        kubectl
    }

    fn write_identities(&self, authority: &Authority) -> anyhow::Result<()> {
        let masters = Some("system:masters");
        authority.sign(
            "apiserver",
            "kube-apiserver",
            None,
            &[
                "127.0.0.1",
                "10.0.0.1",
                "localhost",
                "kubernetes.default.svc",
            ],
        )?;
        authority.sign(
            "kubelet-client",
            "kube-apiserver-kubelet-client",
            masters,
            &[],
        )?;
        authority.sign("kubelet", NODE, None, &["127.0.0.1", NODE])?;
        // Any key will do to sign the tokens of service accounts.
        authority.sign("accounts", "accounts", None, &[])?;
        for (file, user, group) in [
            ("admin", "admin", masters),
            ("controller-manager", "system:kube-controller-manager", None),
            ("scheduler", "system:kube-scheduler", None),
            (
                "node",
                &*format!("system:node:{NODE}"),
                Some("system:nodes"),
            ),
        ] {
            let (certificate, key) = authority.sign(file, user, group, &[])?;
            let user = serde_json::json!({"client-certificate": certificate, "client-key": key});
            self.write_kubeconfig(file, &user)?;
        }
        Ok(())
    }

    fn write_kubeconfig(&self, file: &str, user: &serde_json::Value) -> anyhow::Result<()> {
        let cluster = serde_json::json!({
            "server": format!("https://{}", self.address),
            "certificate-authority": self.path().join("ca.crt"),
        });
        let config = serde_json::json!({
            "apiVersion": "v1",
            "kind": "Config",
            "clusters": [{"name": "tests", "cluster": cluster}],
            "users": [{"name": file, "user": user}],
            "contexts": [{"name": "tests", "context": {"cluster": "tests", "user": file}}],
            "current-context": "tests",
        });
        fs::write(self.kubeconfig(file), serde_yaml_ng::to_string(&config)?)?;
        Ok(())
    }

    fn file(&self, name: &str) -> String {
        self.path().join(name).display().to_string()
    }

    fn etcd_flags(&self, client: u16, peer: u16) -> Vec<String> {
        let (client, peer) = (
            format!("http://127.0.0.1:{client}"),
            format!("http://127.0.0.1:{peer}"),
        );
        vec![
            format!("--data-dir={}", self.file("etcd")),
            format!("--listen-client-urls={client}"),
            format!("--advertise-client-urls={client}"),
            format!("--listen-peer-urls={peer}"),
            format!("--initial-advertise-peer-urls={peer}"),
            format!("--initial-cluster=default={peer}"),
            "--log-level=warn".to_owned(),
        ]
    }

    fn api_server_flags(&self, etcd: u16, port: u16) -> Vec<String> {
        vec![
            format!("--etcd-servers=http://127.0.0.1:{etcd}"),
            format!("--secure-port={port}"),
            "--bind-address=127.0.0.1".to_owned(),
            "--service-cluster-ip-range=10.0.0.0/24".to_owned(),
            "--endpoint-reconciler-type=none".to_owned(),
            "--authorization-mode=Node,RBAC".to_owned(),
            "--enable-admission-plugins=NodeRestriction,OwnerReferencesPermissionEnforcement"
                .to_owned(),
            "--service-account-issuer=https://kubernetes.default.svc".to_owned(),
            "--kubelet-preferred-address-types=InternalIP".to_owned(),
            // The embedded server has it; kube-apiserver has it behind a gate.
            "--feature-gates=PodLogsQuerySplitStreams=true".to_owned(),
            format!("--tls-cert-file={}", self.file("apiserver.crt")),
            format!("--tls-private-key-file={}", self.file("apiserver.key")),
            format!("--client-ca-file={}", self.file("ca.crt")),
            format!("--service-account-key-file={}", self.file("accounts.crt")),
            format!(
                "--service-account-signing-key-file={}",
                self.file("accounts.key")
            ),
            format!("--kubelet-certificate-authority={}", self.file("ca.crt")),
            format!(
                "--kubelet-client-certificate={}",
                self.file("kubelet-client.crt")
            ),
            format!("--kubelet-client-key={}", self.file("kubelet-client.key")),
        ]
    }

    fn controller_manager_flags(&self) -> Vec<String> {
        let kubeconfig = self.file("controller-manager.kubeconfig");
        vec![
            format!("--kubeconfig={kubeconfig}"),
            format!(
                "--service-account-private-key-file={}",
                self.file("accounts.key")
            ),
            format!("--root-ca-file={}", self.file("ca.crt")),
            "--use-service-account-credentials=true".to_owned(),
            "--leader-elect=false".to_owned(),
            "--secure-port=0".to_owned(),
        ]
    }

    fn scheduler_flags(&self) -> Vec<String> {
        vec![
            format!("--kubeconfig={}", self.file("scheduler.kubeconfig")),
            "--leader-elect=false".to_owned(),
            "--secure-port=0".to_owned(),
        ]
    }

    fn run(&mut self, name: &'static str, flags: &[String]) {
        self.parts.run(name, &self.programs.join(name), flags);
    }

    fn wait_until_ready(&self) -> anyhow::Result<()> {
        self.wait_for("kube-apiserver", &["get", "--raw=/readyz"])
    }

    /// Pods can be created once their service account is there.
    fn wait_for_default_account(&self) -> anyhow::Result<()> {
        self.wait_for(
            "kube-controller-manager",
            &["get", "serviceaccount", "default"],
        )
    }

    fn wait_for(&self, part: &str, arguments: &[&str]) -> anyhow::Result<()> {
        let deadline = Instant::now() + DEADLINE;
        loop {
            let answer = self.kubectl().args(arguments).output()?;
            if answer.status.success() {
                return Ok(());
            }
            ensure!(
                self.interruption.received().is_none(),
                "interrupted before {part} was ready"
            );
            ensure!(
                Instant::now() < deadline,
                "{part} was not ready in time: {}\n{}",
                String::from_utf8_lossy(&answer.stderr),
                self.parts.log(part)
            );
            std::thread::sleep(LOOK_AGAIN);
        }
    }
}

fn free_ports<const N: usize>() -> anyhow::Result<[u16; N]> {
    // All are held until all are known, so that they differ.
    let mut listeners = Vec::new();
    let mut ports = [0; N];
    for port in &mut ports {
        let listener = TcpListener::bind("127.0.0.1:0")?;
        *port = listener.local_addr()?.port();
        listeners.push(listener);
    }
    Ok(ports)
}

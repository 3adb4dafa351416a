//! The configuration of the daemons of a test cluster: flags and files.

use std::path::Path;

use serde_json::{Value, json};

use super::images::PAUSE;

/// The node's own address, on which the API server listens too.
pub const ADDRESS: &str = "10.99.0.2";
/// The name of the node that a kubelet runs.
pub const NODE: &str = "node-one";
/// The address of the cluster's DNS service.
const DNS: &str = "10.96.0.10";
const SERVICES: &str = "10.96.0.0/16";
const PODS: &str = "10.244.0.0/16";
/// The pods of the first node: what kube-controller-manager allots to the first node that registers.
const PODS_OF_NODE: &str = "10.244.0.0/23";

/// The files and programs that the configuration names.
pub struct Places<'a> {
    /// Certificates, kubeconfigs, logs and state.
    pub directory: &'a Path,
    /// The programs of the node.
    pub programs: &'a Path,
}

impl Places<'_> {
    fn file(&self, name: &str) -> String {
        self.directory.join(name).display().to_string()
    }

    fn program(&self, name: &str) -> String {
        self.programs.join(name).display().to_string()
    }

    pub fn etcd_flags(&self) -> Vec<String> {
        let client = "http://127.0.0.1:2379";
        let peer = "http://127.0.0.1:2380";
        vec![
            format!("--data-dir={}", self.file("etcd")),
            format!("--listen-client-urls={client}"),
            format!("--advertise-client-urls={client}"),
            format!("--listen-peer-urls={peer}"),
            format!("--initial-advertise-peer-urls={peer}"),
            format!("--initial-cluster=default={peer}"),
            "--log-level=warn".to_owned(),
            // What is in it is thrown away.
            "--unsafe-no-fsync".to_owned(),
        ]
    }

    pub fn api_server_flags(&self) -> Vec<String> {
        let mut flags = [
            "--etcd-servers=http://127.0.0.1:2379",
            "--secure-port=6443",
            "--authorization-mode=Node,RBAC",
            "--enable-admission-plugins=NodeRestriction,OwnerReferencesPermissionEnforcement",
            "--service-account-issuer=https://kubernetes.default.svc",
            "--kubelet-preferred-address-types=InternalIP",
            "--allow-privileged=true",
            // The API server runs outside of pods, and reaches those of an extension API server directly.
            "--enable-aggregator-routing=true",
            "--requestheader-allowed-names=front-proxy",
            "--requestheader-username-headers=X-Remote-User",
            "--requestheader-group-headers=X-Remote-Group",
            "--requestheader-extra-headers-prefix=X-Remote-Extra-",
        ]
        .map(str::to_owned)
        .to_vec();
        flags.push(format!("--advertise-address={ADDRESS}"));
        flags.push(format!("--service-cluster-ip-range={SERVICES}"));
        for (flag, file) in [
            ("tls-cert-file", "apiserver.crt"),
            ("tls-private-key-file", "apiserver.key"),
            ("client-ca-file", "ca.crt"),
            ("service-account-key-file", "accounts.crt"),
            ("service-account-signing-key-file", "accounts.key"),
            ("kubelet-certificate-authority", "ca.crt"),
            ("kubelet-client-certificate", "kubelet-client.crt"),
            ("kubelet-client-key", "kubelet-client.key"),
            ("requestheader-client-ca-file", "ca.crt"),
            ("proxy-client-cert-file", "front-proxy.crt"),
            ("proxy-client-key-file", "front-proxy.key"),
        ] {
            flags.push(format!("--{flag}={}", self.file(file)));
        }
        flags
    }

    pub fn controller_manager_flags(&self) -> Vec<String> {
        let mut flags = [
            "--use-service-account-credentials=true",
            "--leader-elect=false",
            "--secure-port=0",
            "--allocate-node-cidrs=true",
            "--node-cidr-mask-size=23",
            // A node counts as lost sooner than after the default of 40 s, so that its loss can be tested.
            "--node-monitor-period=2s",
            "--node-monitor-grace-period=20s",
            "--horizontal-pod-autoscaler-sync-period=5s",
        ]
        .map(str::to_owned)
        .to_vec();
        flags.push(format!("--cluster-cidr={PODS}"));
        for (flag, file) in [
            ("kubeconfig", "controller-manager.kubeconfig"),
            ("service-account-private-key-file", "accounts.key"),
            ("root-ca-file", "ca.crt"),
        ] {
            flags.push(format!("--{flag}={}", self.file(file)));
        }
        flags
    }

    pub fn scheduler_flags(&self) -> Vec<String> {
        vec![
            format!("--kubeconfig={}", self.file("scheduler.kubeconfig")),
            "--leader-elect=false".to_owned(),
            "--secure-port=0".to_owned(),
        ]
    }

    pub fn containerd_flags(&self) -> Vec<String> {
        vec![format!("--config={}", self.file("containerd.toml"))]
    }

    pub fn kubelet_flags(&self) -> Vec<String> {
        vec![
            format!("--config={}", self.file("kubelet.yaml")),
            format!("--kubeconfig={}", self.file("node.kubeconfig")),
            format!("--root-dir={}", self.file("kubelet")),
            format!("--node-ip={ADDRESS}"),
            format!("--hostname-override={NODE}"),
        ]
    }

    pub fn kube_proxy_flags(&self) -> Vec<String> {
        vec![
            format!("--kubeconfig={}", self.file("proxy.kubeconfig")),
            format!("--hostname-override={NODE}"),
            "--proxy-mode=nftables".to_owned(),
            format!("--cluster-cidr={PODS}"),
            // These are settings of the whole machine.
            "--conntrack-max-per-core=0".to_owned(),
            "--conntrack-tcp-timeout-established=0s".to_owned(),
            "--conntrack-tcp-timeout-close-wait=0s".to_owned(),
        ]
    }

    pub fn kube_router_flags(&self) -> Vec<String> {
        vec![
            format!("--kubeconfig={}", self.file("network-policies.kubeconfig")),
            "--run-router=false".to_owned(),
            "--run-service-proxy=false".to_owned(),
            "--run-firewall=true".to_owned(),
            format!("--hostname-override={NODE}"),
            format!("--service-cluster-ip-range={SERVICES}"),
        ]
    }

    /// The files that the daemons read, by name.
    pub fn files(&self) -> Vec<(&'static str, String)> {
        vec![
            ("containerd.toml", self.containerd()),
            ("runsc.toml", self.runsc()),
            ("kubelet.yaml", self.kubelet().to_string()),
            ("cni.d/10-bridge.conflist", self.cni().to_string()),
            ("resolv.conf", "nameserver 10.99.0.1\n".to_owned()),
        ]
    }

    fn containerd(&self) -> String {
        format!(
            r#"version = 3
root = "{root}"
state = "/run/containerd"
oom_score = 0
[grpc]
  address = "/run/containerd/containerd.sock"
[plugins.'io.containerd.cri.v1.images']
  snapshotter = "overlayfs"
  [plugins.'io.containerd.cri.v1.images'.pinned_images]
    sandbox = "{PAUSE}"
[plugins.'io.containerd.cri.v1.runtime']
  restrict_oom_score_adj = true
  tolerate_missing_hugetlb_controller = true
  disable_hugetlb_controller = true
  [plugins.'io.containerd.cri.v1.runtime'.containerd]
    default_runtime_name = "runc"
    [plugins.'io.containerd.cri.v1.runtime'.containerd.runtimes.runc]
      runtime_type = "io.containerd.runc.v2"
      [plugins.'io.containerd.cri.v1.runtime'.containerd.runtimes.runc.options]
        SystemdCgroup = false
    [plugins.'io.containerd.cri.v1.runtime'.containerd.runtimes.runsc]
      runtime_type = "io.containerd.runsc.v1"
      [plugins.'io.containerd.cri.v1.runtime'.containerd.runtimes.runsc.options]
        TypeUrl = "io.containerd.runsc.v1.options"
        ConfigPath = "{runsc}"
  [plugins.'io.containerd.cri.v1.runtime'.cni]
    bin_dirs = ["{cni}"]
    conf_dir = "{networks}"
"#,
            root = self.file("containerd"),
            runsc = self.file("runsc.toml"),
            cni = self.program("cni"),
            networks = self.file("cni.d"),
        )
    }

    /// gVisor intercepts system calls without virtualization, which machines for tests rarely have.
    fn runsc(&self) -> String {
        let log = self.file("runsc-shim.log");
        format!(
            "log_path = \"{log}\"\nlog_level = \"info\"\n[runsc_config]\n  platform = \"systrap\"\n"
        )
    }

    fn kubelet(&self) -> Value {
        json!({
            "apiVersion": "kubelet.config.k8s.io/v1beta1",
            "kind": "KubeletConfiguration",
            "address": ADDRESS,
            "authentication": {
                "anonymous": {"enabled": false},
                "webhook": {"enabled": true},
                "x509": {"clientCAFile": self.file("ca.crt")},
            },
            "authorization": {"mode": "Webhook"},
            "tlsCertFile": self.file("kubelet.crt"),
            "tlsPrivateKeyFile": self.file("kubelet.key"),
            "cgroupDriver": "cgroupfs",
            "failCgroupV1": false,
            "failSwapOn": false,
            "containerRuntimeEndpoint": "unix:///run/containerd/containerd.sock",
            "clusterDNS": [DNS],
            "clusterDomain": "cluster.local",
            "resolvConf": self.file("resolv.conf"),
            "volumePluginDir": self.file("volume-plugins"),
            "podLogsDir": self.file("pod-logs"),
            "healthzBindAddress": "127.0.0.1",
            "maxPods": 400,
            "nodeStatusUpdateFrequency": "4s",
            "imageGCHighThresholdPercent": 100,
            "imageGCLowThresholdPercent": 99,
            "evictionHard": {
                "memory.available": "100Mi",
                "nodefs.available": "1Gi",
                "imagefs.available": "1Gi",
            },
        })
    }

    /// Without masquerading: every address that a pod can reach belongs to the cluster, and policies of another node see the pod's own.
    fn cni(&self) -> Value {
        let addresses = json!({
            "type": "host-local",
            "dataDir": self.file("cni-addresses"),
            "ranges": [[{"subnet": PODS_OF_NODE}]],
            "routes": [{"dst": "0.0.0.0/0"}],
        });
        json!({
            "cniVersion": "1.0.0",
            "name": "pods",
            "plugins": [
                {"type": "bridge", "bridge": "cni0", "isGateway": true, "hairpinMode": true, "ipam": addresses},
                {"type": "portmap", "capabilities": {"portMappings": true}},
            ],
        })
    }
}

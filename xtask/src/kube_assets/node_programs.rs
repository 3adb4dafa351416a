//! The programs of a Kubernetes node and of the add-ons of a cluster, for `cargo xtask test-cluster`.
//!
//! kubelet and kube-proxy come from the module of the control plane. Every other project is built in a throw-away module of its own, because
//! their dependencies differ; Go's checksum database verifies them, and `cluster.sum` pins the releases that the database does not know.

use std::fmt::Write as _;
use std::fs;
use std::path::{Path, PathBuf};
use std::time::Instant;

use anyhow::{Context, ensure};

use super::{COMPLETE, Versions, build_kubernetes, go, require_go, succeed, write_checksums};

/// kubelet and kube-proxy, with their packages.
pub const KUBERNETES: [(&str, &str); 2] = [
    ("kubelet", "k8s.io/kubernetes/cmd/kubelet"),
    ("kube-proxy", "k8s.io/kubernetes/cmd/kube-proxy"),
];

/// The directory of the CNI plugins, below that of the other programs.
pub const CNI: &str = "cni";

/// A Go module and the programs that are built from it, each with its package below the module.
struct Project {
    module: &'static str,
    version: fn(&Versions) -> &str,
    /// The variable that holds the version, if the program reports one.
    version_variable: Option<&'static str>,
    programs: &'static [(&'static str, &'static str)],
    /// A change of the source, for machines that a release does not consider.
    patch: Option<Patch>,
}

/// The replacement of a text in a file of a module.
struct Patch {
    file: &'static str,
    old: &'static str,
    new: &'static str,
}

const PROJECTS: [Project; 5] = [
    Project {
        module: "github.com/containerd/containerd/v2",
        version: |versions| &versions.containerd,
        version_variable: Some("github.com/containerd/containerd/v2/version.Version"),
        programs: &[
            ("containerd", "/cmd/containerd"),
            ("containerd-shim-runc-v2", "/cmd/containerd-shim-runc-v2"),
            ("ctr", "/cmd/ctr"),
        ],
        patch: None,
    },
    Project {
        module: "github.com/containernetworking/plugins",
        version: |versions| &versions.cni_plugins,
        version_variable: None,
        programs: &[
            ("cni/bridge", "/plugins/main/bridge"),
            ("cni/loopback", "/plugins/main/loopback"),
            ("cni/host-local", "/plugins/ipam/host-local"),
            ("cni/portmap", "/plugins/meta/portmap"),
        ],
        patch: None,
    },
    Project {
        module: "gvisor.dev/gvisor",
        version: |versions| &versions.gvisor,
        version_variable: None,
        programs: &[("runsc", "/runsc"), ("containerd-shim-runsc-v1", "/shim")],
        patch: Some(Patch {
            // The shim fails if it may not make itself unkillable by the OOM killer, which needs CAP_SYS_RESOURCE. containerd's own shim goes on.
            file: "pkg/shim/v1/manager.go",
            old: "oomScoreMax = -999",
            new: "oomScoreMax = 0",
        }),
    },
    Project {
        module: "github.com/coredns/coredns",
        version: |versions| &versions.coredns,
        version_variable: None,
        programs: &[("coredns", "")],
        patch: None,
    },
    Project {
        module: "github.com/cloudnativelabs/kube-router/v2",
        version: |versions| &versions.kube_router,
        version_variable: None,
        programs: &[("kube-router", "/cmd/kube-router")],
        patch: None,
    },
];

/// Returns the directory of the programs, and builds them if they are missing.
pub fn ensure_built(root: &Path) -> anyhow::Result<PathBuf> {
    let directory = super::directory(root)?.join("node");
    if directory.join(COMPLETE).exists() {
        return Ok(directory);
    }
    require_go()?;
    let versions = super::versions(root)?;
    println!(
        "building kubelet {}, containerd {} and the add-ons of a cluster; this takes a while, once",
        versions.kubernetes, versions.containerd
    );
    build_kubernetes(root, &versions, &directory, &KUBERNETES)?;
    let sums = root.join("xtask/kube-assets/cluster.sum");
    let sums = fs::read_to_string(&sums).with_context(|| format!("reading {}", sums.display()))?;
    fs::create_dir_all(directory.join(CNI))?;
    for project in &PROJECTS {
        build(project, &versions, &sums, &directory)?;
    }
    write_checksums(&directory)?;
    fs::write(directory.join(COMPLETE), "")?;
    Ok(directory)
}

fn build(
    project: &Project,
    versions: &Versions,
    sums: &str,
    directory: &Path,
) -> anyhow::Result<()> {
    let module = tempfile::tempdir()?;
    fs::write(
        module.path().join("go.mod"),
        "module node-programs\n\ngo 1.25.0\n",
    )?;
    // Go trusts a checksum in go.sum and asks the checksum database for every other one.
    fs::write(module.path().join("go.sum"), sums)?;
    let version = (project.version)(versions);
    succeed(go(module.path()).args(["get", &format!("{}@{version}", project.module)]))?;
    if let Some(patch) = &project.patch {
        apply(patch, project.module, module.path())?;
    }
    let mut flags = "-s -w".to_owned();
    if let Some(variable) = project.version_variable {
        let _ = write!(flags, " -X {variable}={version}");
    }
    for (program, package) in project.programs {
        let begin = Instant::now();
        succeed(
            go(module.path())
                .args(["build", "-mod=mod", "-trimpath", "-ldflags", &flags, "-o"])
                .arg(directory.join(program))
                .arg(format!("{}{package}", project.module)),
        )?;
        println!("  {program}: {} s", begin.elapsed().as_secs());
    }
    Ok(())
}

/// Makes a copy of the module with the patch, and lets the throw-away module use it.
fn apply(patch: &Patch, name: &str, module: &Path) -> anyhow::Result<()> {
    let found = go(module)
        .args(["list", "-m", "-f", "{{.Dir}}", name])
        .output()?;
    let source = String::from_utf8(found.stdout)?;
    let copy = module.join("patched");
    succeed(
        std::process::Command::new("cp")
            .args(["--recursive", "--no-preserve=mode", source.trim()])
            .arg(&copy),
    )?;
    let file = copy.join(patch.file);
    let text = fs::read_to_string(&file).with_context(|| format!("reading {}", file.display()))?;
    ensure!(
        text.contains(patch.old),
        "{name} has no {:?} in {} any more",
        patch.old,
        patch.file
    );
    fs::write(&file, text.replace(patch.old, patch.new))?;
    succeed(go(module).args(["mod", "edit", "-replace", &format!("{name}=./patched")]))
}

//! `cargo xtask kube-assets`: a real Kubernetes control plane, built from the Go module proxy into a cache outside the checkout.
//!
//! One throw-away Go module has Kubernetes, etcd and helm, so that they share what is compiled. The other implementation of
//! agent-sandbox is asked for too; where the proxy refuses it, that is said and recorded, and nothing stands in for it. Releases that
//! the checksum database does not know are held to the checksums in `upstream.sum`.

pub mod node_programs;

use std::fmt::Write as _;
use std::fs;
use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Instant;

use anyhow::{Context, bail, ensure};
use serde::Deserialize;
use sha2::{Digest, Sha256};

/// Modules that live in Kubernetes' own repository and are published under a version of their own.
const STAGING: [&str; 31] = [
    "api",
    "apiextensions-apiserver",
    "apimachinery",
    "apiserver",
    "cli-runtime",
    "client-go",
    "cloud-provider",
    "cluster-bootstrap",
    "code-generator",
    "component-base",
    "component-helpers",
    "controller-manager",
    "cri-api",
    "cri-client",
    "csi-translation-lib",
    "dynamic-resource-allocation",
    "endpointslice",
    "externaljwt",
    "kms",
    "kube-aggregator",
    "kube-controller-manager",
    "kube-proxy",
    "kube-scheduler",
    "kubectl",
    "kubelet",
    "metrics",
    "mount-utils",
    "pod-security-admission",
    "sample-apiserver",
    "sample-cli-plugin",
    "sample-controller",
];

/// A program and its Go package. What is needed first is built first.
const PROGRAMS: [(&str, &str); 6] = [
    ("etcd", "go.etcd.io/etcd/server/v3"),
    ("kube-apiserver", "k8s.io/kubernetes/cmd/kube-apiserver"),
    ("kubectl", "k8s.io/kubernetes/cmd/kubectl"),
    (
        "kube-controller-manager",
        "k8s.io/kubernetes/cmd/kube-controller-manager",
    ),
    ("kube-scheduler", "k8s.io/kubernetes/cmd/kube-scheduler"),
    ("helm", "helm.sh/helm/v3/cmd/helm"),
];

const UPSTREAM_MODULE: &str = "sigs.k8s.io/agent-sandbox";
/// The programs of the other implementation, as packages below its module.
const UPSTREAM_PROGRAMS: [&str; 2] = ["agent-sandbox-controller", "sandbox-router"];

/// Its custom resource definitions, as they lie beside its programs.
const DEFINITIONS: &str = "crds";
/// The manifests that install it, likewise.
const MANIFESTS: &str = "manifests";

/// Written last, so that an interrupted build is not taken for a whole one.
const COMPLETE: &str = "complete";
const CHECKSUMS: &str = "SHA256SUMS";
/// What the module proxy said when it was asked for the other implementation.
const REFUSED: &str = "upstream-refused";

#[derive(Debug, clap::Args)]
pub struct Arguments {
    /// Write go.sum anew from what the module proxy serves
    #[arg(long)]
    update_checksums: bool,

    /// Ask again for what the module proxy refused before
    #[arg(long)]
    retry: bool,

    /// Only print where the programs are or would be
    #[arg(long)]
    print_directory: bool,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Versions {
    kubernetes: String,
    etcd: String,
    helm: String,
    containerd: String,
    cni_plugins: String,
    coredns: String,
    gvisor: String,
    kube_router: String,
    upstream: Vec<String>,
}

pub fn run(root: &Path, arguments: &Arguments) -> anyhow::Result<()> {
    let directory = directory(root)?;
    if arguments.print_directory {
        println!("{}", directory.display());
        return Ok(());
    }
    if arguments.update_checksums {
        return update_checksums(root);
    }
    if arguments.retry {
        let _ = fs::remove_file(directory.join(REFUSED));
    }
    ensure_built(root)?;
    print!("{}", fs::read_to_string(directory.join(CHECKSUMS))?);
    if let Ok(refused) = fs::read_to_string(directory.join(REFUSED)) {
        print!("{refused}");
    }
    println!("programs are in {}", directory.display());
    Ok(())
}

/// The directory of the programs, which are built if they are not there.
pub fn ensure_built(root: &Path) -> anyhow::Result<PathBuf> {
    let versions = versions(root)?;
    let directory = directory(root)?;
    if !directory.join(COMPLETE).exists() {
        require_go()?;
        build(root, &versions, &directory)?;
        fs::write(directory.join(COMPLETE), "")?;
    }
    if missing_upstream(root, &directory)? {
        fetch_upstream(root, &versions, &directory)?;
    }
    Ok(directory)
}

fn versions(root: &Path) -> anyhow::Result<Versions> {
    let path = root.join("xtask/kube-assets/versions.yaml");
    let text = fs::read_to_string(&path).with_context(|| format!("reading {}", path.display()))?;
    serde_yaml_ng::from_str(&text).with_context(|| format!("reading {}", path.display()))
}

/// Where the programs of the pinned versions are kept: a change of the pins is another directory.
pub fn directory(root: &Path) -> anyhow::Result<PathBuf> {
    let mut digest = Sha256::new();
    for file in ["versions.yaml", "go.sum"] {
        let path = root.join("xtask/kube-assets").join(file);
        digest.update(fs::read(&path).with_context(|| format!("reading {}", path.display()))?);
    }
    let fingerprint = hexadecimal(&digest.finalize()[..4]);
    let name = format!("{}-{fingerprint}", versions(root)?.kubernetes);
    Ok(crate::test_clients::cache_directory()?
        .with_file_name("kubernetes")
        .join(name))
}

fn require_go() -> anyhow::Result<()> {
    let found = Command::new("go")
        .arg("version")
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .status();
    if found.is_ok_and(|status| status.success()) {
        return Ok(());
    }
    bail!(
        "Go is not installed, and a real Kubernetes control plane is built with it: install Go 1.25 or newer, or put etcd, \
         kube-apiserver, kube-controller-manager, kube-scheduler, kubectl and helm with a file named `complete` into the directory \
         that `cargo xtask kube-assets --print-directory` prints"
    );
}

/// The throw-away module that has everything in it.
fn go_module(versions: &Versions) -> anyhow::Result<String> {
    let staging = versions.kubernetes.strip_prefix("v1.").with_context(|| {
        format!(
            "kubernetes: {} does not begin with v1.",
            versions.kubernetes
        )
    })?;
    let mut module = format!(
        "module kube-assets\n\ngo 1.25.0\n\nrequire (\n\tk8s.io/kubernetes {}\n\tgo.etcd.io/etcd/server/v3 {}\n\thelm.sh/helm/v3 {}\n)\n\n",
        versions.kubernetes, versions.etcd, versions.helm
    );
    for name in STAGING {
        writeln!(
            module,
            "replace k8s.io/{name} => k8s.io/{name} v0.{staging}"
        )?;
    }
    Ok(module)
}

/// A file that names every package, so that Go knows what the module is for.
fn go_imports() -> String {
    let mut file = "package assets\n\n".to_owned();
    for (_, package) in PROGRAMS.into_iter().chain(node_programs::KUBERNETES) {
        let _ = writeln!(file, "import _ \"{package}\"");
    }
    file
}

fn throw_away_module(versions: &Versions) -> anyhow::Result<tempfile::TempDir> {
    let module = tempfile::tempdir()?;
    fs::write(module.path().join("go.mod"), go_module(versions)?)?;
    fs::write(module.path().join("imports.go"), go_imports())?;
    Ok(module)
}

fn go(directory: &Path) -> Command {
    let mut go = Command::new("go");
    go.current_dir(directory)
        .env("CGO_ENABLED", "0")
        .env("GOFLAGS", "-buildvcs=false")
        .env("GOWORK", "off");
    go
}

fn update_checksums(root: &Path) -> anyhow::Result<()> {
    require_go()?;
    let module = throw_away_module(&versions(root)?)?;
    succeed(go(module.path()).args(["mod", "tidy", "-e"]))?;
    fs::copy(
        module.path().join("go.sum"),
        root.join("xtask/kube-assets/go.sum"),
    )?;
    Ok(())
}

fn build(root: &Path, versions: &Versions, directory: &Path) -> anyhow::Result<()> {
    println!(
        "building Kubernetes {}, etcd {} and helm {}; this takes a while, once",
        versions.kubernetes, versions.etcd, versions.helm
    );
    build_kubernetes(root, versions, directory, &PROGRAMS)
}

/// Builds programs of the module that has Kubernetes, etcd and helm, with the recorded checksums.
fn build_kubernetes(
    root: &Path,
    versions: &Versions,
    directory: &Path,
    programs: &[(&str, &str)],
) -> anyhow::Result<()> {
    fs::create_dir_all(directory)?;
    let module = throw_away_module(versions)?;
    fs::copy(
        root.join("xtask/kube-assets/go.sum"),
        module.path().join("go.sum"),
    )?;
    let recorded = fs::read(module.path().join("go.sum"))?;
    succeed(go(module.path()).args(["mod", "tidy", "-e"]))?;
    ensure!(
        fs::read(module.path().join("go.sum"))? == recorded,
        "the modules are not those of xtask/kube-assets/go.sum; after a change of versions run `cargo xtask kube-assets --update-checksums`"
    );
    let flags = link_flags(versions);
    for (program, package) in programs {
        let begin = Instant::now();
        succeed(
            go(module.path())
                .args(["build", "-trimpath", "-tags=grpcnotrace,notest", "-ldflags"])
                .arg(&flags)
                .arg("-o")
                .arg(directory.join(program))
                .arg(package),
        )?;
        println!("  {program}: {} s", begin.elapsed().as_secs());
    }
    write_checksums(directory)
}

/// Without these the programs would call themselves v0.0.0, and clients go by what a server calls itself.
fn link_flags(versions: &Versions) -> String {
    let version = &versions.kubernetes;
    let mut numbers = version.trim_start_matches('v').split('.');
    let (major, minor) = (
        numbers.next().unwrap_or_default(),
        numbers.next().unwrap_or_default(),
    );
    let mut flags = format!(
        "-s -w -X helm.sh/helm/v3/internal/version.version={}",
        versions.helm
    );
    // What a chart is rendered for when there is no server to ask.
    for package in ["lint/rules", "chartutil"] {
        let _ = write!(
            flags,
            " -X helm.sh/helm/v3/pkg/{package}.k8sVersionMajor={major} -X helm.sh/helm/v3/pkg/{package}.k8sVersionMinor={minor}"
        );
    }
    for package in [
        "k8s.io/component-base/version",
        "k8s.io/client-go/pkg/version",
    ] {
        for (variable, value) in [
            ("gitVersion", version.as_str()),
            ("gitMajor", major),
            ("gitMinor", minor),
            ("gitTreeState", "clean"),
        ] {
            let _ = write!(flags, " -X {package}.{variable}={value}");
        }
    }
    flags
}

fn write_checksums(directory: &Path) -> anyhow::Result<()> {
    let mut sums = fs::File::create(directory.join(CHECKSUMS))?;
    let mut names: Vec<PathBuf> = fs::read_dir(directory)?
        .filter_map(|entry| Some(entry.ok()?.path()))
        .filter(|path| path.is_file() && is_program(path))
        .collect();
    names.sort();
    for path in names {
        let mut digest = Sha256::new();
        std::io::copy(&mut fs::File::open(&path)?, &mut digest)?;
        let name = path.file_name().unwrap_or_default().to_string_lossy();
        writeln!(sums, "{}  {name}", hexadecimal(&digest.finalize()))?;
    }
    Ok(())
}

fn is_program(path: &Path) -> bool {
    use std::os::unix::fs::PermissionsExt;
    fs::metadata(path).is_ok_and(|metadata| metadata.permissions().mode() & 0o111 != 0)
}

/// Checksums of the other implementation's releases that the checksum database does not know, as lines of a go.sum.
fn upstream_checksums(root: &Path) -> anyhow::Result<String> {
    let path = root.join("xtask/kube-assets/upstream.sum");
    fs::read_to_string(&path).with_context(|| format!("reading {}", path.display()))
}

/// Whether a release of the other implementation is still to be asked for, or was left without its definitions.
fn missing_upstream(root: &Path, directory: &Path) -> anyhow::Result<bool> {
    let releases = directory.join("upstream");
    // One whose checksum is known by now may have been refused for the lack of it.
    let is_pinned_and_missing = upstream_checksums(root)?
        .lines()
        .filter_map(|line| line.split(' ').nth(1))
        .filter(|version| !version.contains('/'))
        .any(|version| !releases.join(version).join(DEFINITIONS).exists());
    let is_settled = releases.join(COMPLETE).exists() || directory.join(REFUSED).exists();
    let is_partial = fs::read_dir(&releases).is_ok_and(|mut entries| {
        entries.any(|entry| {
            entry.is_ok_and(|entry| {
                let release = entry.path();
                release.join(UPSTREAM_PROGRAMS[0]).exists() && !release.join(DEFINITIONS).exists()
            })
        })
    });
    Ok(!is_settled || is_partial || is_pinned_and_missing)
}

/// Where the releases of the other implementation are that could be built, by version: controller, definitions and manifests.
pub fn upstream(root: &Path) -> anyhow::Result<PathBuf> {
    Ok(directory(root)?.join("upstream"))
}

/// Builds the other implementation's releases, or records what the proxy said.
fn fetch_upstream(root: &Path, versions: &Versions, directory: &Path) -> anyhow::Result<()> {
    require_go()?;
    let checksums = upstream_checksums(root)?;
    let mut refused = String::new();
    let mut built = 0;
    for wanted in &versions.upstream {
        match build_upstream(wanted, &checksums, &directory.join("upstream")) {
            Ok(version) => {
                println!("  {UPSTREAM_MODULE} {version}");
                built += 1;
            }
            Err(error) => {
                let _ = writeln!(
                    refused,
                    "refused  {UPSTREAM_MODULE}@{wanted}: {}",
                    one_line(&error)
                );
            }
        }
    }
    if refused.is_empty() {
        fs::write(directory.join("upstream").join(COMPLETE), "")?;
    } else {
        fs::write(directory.join(REFUSED), &refused)?;
    }
    if built > 0 {
        write_checksums(directory)?;
    }
    Ok(())
}

fn build_upstream(wanted: &str, checksums: &str, directory: &Path) -> anyhow::Result<String> {
    let module = tempfile::tempdir()?;
    // What is in here is verified by it, and the checksum database is not asked.
    fs::write(module.path().join("go.sum"), checksums)?;
    fs::write(
        module.path().join("go.mod"),
        "module upstream\n\ngo 1.25.0\n",
    )?;
    let resolved = go(module.path())
        .args(["list", "-m", "-f", "{{.Version}}"])
        .arg(format!("{UPSTREAM_MODULE}@{wanted}"))
        .output()?;
    ensure!(
        resolved.status.success(),
        "{}",
        String::from_utf8_lossy(&resolved.stderr)
    );
    let version = String::from_utf8(resolved.stdout)?.trim().to_owned();
    succeed(go(module.path()).args(["get", &format!("{UPSTREAM_MODULE}@{version}")]))?;
    let output = directory.join(&version);
    fs::create_dir_all(&output)?;
    for program in UPSTREAM_PROGRAMS {
        let package = format!("{UPSTREAM_MODULE}/cmd/{program}");
        let built = succeed(
            go(module.path())
                .args(["build", "-mod=mod", "-trimpath", "-o"])
                .arg(output.join(program))
                .arg(&package),
        );
        // Earlier releases have no router of their own.
        if program == UPSTREAM_PROGRAMS[0] {
            built?;
        }
    }
    copy_definitions(module.path(), &output)?;
    Ok(version)
}

/// Copies the release's manifests and definitions to where its programs are; the definitions last, because they tell that it is whole.
fn copy_definitions(module: &Path, output: &Path) -> anyhow::Result<()> {
    let found = go(module)
        .args(["list", "-m", "-f", "{{.Dir}}", UPSTREAM_MODULE])
        .output()?;
    let source = PathBuf::from(String::from_utf8(found.stdout)?.trim()).join("k8s");
    copy_files(&source, &output.join(MANIFESTS))?;
    let partial = output.join("crds.partial");
    copy_files(&source.join("crds"), &partial)?;
    let whole = output.join(DEFINITIONS);
    // Those of an earlier run, which kept less beside them.
    if whole.exists() {
        fs::remove_dir_all(&whole)?;
    }
    fs::rename(&partial, whole)?;
    Ok(())
}

/// Reads and writes, because the modules' own files are read-only.
fn copy_files(source: &Path, target: &Path) -> anyhow::Result<()> {
    fs::create_dir_all(target)?;
    let entries = fs::read_dir(source).with_context(|| format!("reading {}", source.display()))?;
    for entry in entries {
        let entry = entry?;
        if entry.file_type()?.is_file() {
            fs::write(target.join(entry.file_name()), fs::read(entry.path())?)?;
        }
    }
    Ok(())
}

fn one_line(error: &anyhow::Error) -> String {
    format!("{error:#}")
        .split_whitespace()
        .collect::<Vec<_>>()
        .join(" ")
}

fn hexadecimal(bytes: &[u8]) -> String {
    bytes.iter().fold(String::new(), |mut text, byte| {
        let _ = write!(text, "{byte:02x}");
        text
    })
}

fn succeed(command: &mut Command) -> anyhow::Result<()> {
    let output = command
        .stdin(Stdio::null())
        .output()
        .with_context(|| format!("cannot run {command:?}"))?;
    ensure!(
        output.status.success(),
        "{command:?}: {}\n{}",
        output.status,
        String::from_utf8_lossy(&output.stderr)
    );
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn staging_modules_have_the_version_of_the_release() {
        let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
        let versions = Versions {
            kubernetes: "v1.35.4".to_owned(),
            ..versions(&root).unwrap()
        };
        let module = go_module(&versions).unwrap();
        assert!(module.contains("\tk8s.io/kubernetes v1.35.4\n"));
        assert!(module.contains("replace k8s.io/api => k8s.io/api v0.35.4\n"));
        assert_eq!(module.matches("replace").count(), STAGING.len());
        assert!(link_flags(&versions).contains("k8s.io/component-base/version.gitVersion=v1.35.4"));
    }

    #[test]
    fn the_pinned_versions_can_be_read_and_have_checksums() {
        let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
        let versions = versions(&root).unwrap();
        let sums = fs::read_to_string(root.join("xtask/kube-assets/go.sum")).unwrap();
        for (module, version) in [
            ("k8s.io/kubernetes", &versions.kubernetes),
            ("go.etcd.io/etcd/server/v3", &versions.etcd),
            ("helm.sh/helm/v3", &versions.helm),
        ] {
            assert!(
                sums.contains(&format!("{module} {version} h1:")),
                "{module} {version} has no checksum"
            );
        }
    }
}

//! Builds the Go programs of `tests/clients/go` from the module proxy. Modules and built files are kept where Go keeps them, outside the
//! checkout, so that a second build is quick.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, ensure};

/// A Go module of `tests/clients/go`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Module {
    /// The oldest kubectl that is promised to work.
    Oldest,
    /// The newest kubectl, client-go and controller-runtime.
    Newest,
    /// The published Go SDK and typed clients of the v1alpha1 generation.
    Sdk,
    /// Those of the v1beta1 generation.
    SdkV1beta1,
}

impl Module {
    const fn name(self) -> &'static str {
        match self {
            Module::Oldest => "oldest",
            Module::Newest => "newest",
            Module::Sdk => "sdk",
            Module::SdkV1beta1 => "sdk_v1beta1",
        }
    }
}

/// Builds the module's kubectl, and says in which directory it lies.
pub fn kubectl(root: &Path, module: Module, cache: &Path) -> anyhow::Result<PathBuf> {
    let directory = cache.join(format!("kubectl-{}", module.name()));
    let program = directory.join("kubectl");
    // A release is told its version by whoever links it.
    let version = version(root, module)?;
    let flags = format!("-ldflags=-s -w -X k8s.io/component-base/version.gitVersion={version}");
    go(root, module, &["build", &flags], &program, "./kubectl")?;
    Ok(directory)
}

fn directory(root: &Path, module: Module) -> PathBuf {
    root.join("tests/clients/go").join(module.name())
}

/// The version of Kubernetes that the module's kubectl belongs to: module v0.28.3 is release v1.28.3.
fn version(root: &Path, module: Module) -> anyhow::Result<String> {
    let path = directory(root, module).join("go.mod");
    let text = fs::read_to_string(&path).with_context(|| format!("reading {}", path.display()))?;
    let found = text
        .lines()
        .find_map(|line| line.trim().strip_prefix("k8s.io/kubectl v0."));
    let rest = found.with_context(|| format!("{} names no kubectl", path.display()))?;
    Ok(format!("v1.{rest}"))
}

/// Builds the tests of a module, and says where the program that runs them is.
pub fn tests(root: &Path, module: Module, cache: &Path) -> anyhow::Result<PathBuf> {
    let program = cache.join(format!("go-tests-{}", module.name()));
    go(root, module, &["test", "-c"], &program, "./clients")?;
    Ok(program)
}

fn go(
    root: &Path,
    module: Module,
    arguments: &[&str],
    output: &Path,
    package: &str,
) -> anyhow::Result<()> {
    println!("-- building {package} of the {} Go module", module.name());
    let directory = output.parent().context("a program lies in a directory")?;
    fs::create_dir_all(directory)?;
    let status = Command::new("go")
        .args(arguments)
        .arg("-o")
        .arg(output)
        .arg(package)
        .current_dir(self::directory(root, module))
        .env("GOFLAGS", "-mod=readonly -trimpath -buildvcs=false")
        .env("CGO_ENABLED", "0")
        .status()
        .context("cannot run `go`, which builds clients for the tests: install Go")?;
    ensure!(status.success(), "go {}: {status}", arguments.join(" "));
    Ok(())
}

//! `cargo xtask dist`: everything that a release hands out, reproducibly, from a clean checkout.
//!
//! | path below the output directory | what it is |
//! |---|---|
//! | `bin/<triple>/{agent-sandbox,agent-sandbox-controller,sandbox-router,sandboxd}` | static programs; the first three are the same bytes |
//! | `images/{agent-sandbox-controller,agent-sandbox-router,sandboxd,python-runtime}.tar` | OCI archives, with an index if both targets are built; names are `<image prefix><name>:<image tag>` |
//! | `helm/agent-sandbox-<version>.tgz`, `helm/index.yaml` | the chart as a repository |
//! | `manifests/{manifest,extensions,all-in-one,router}.yaml` | what `cargo xtask release` writes, with the names of the images above |
//! | `deb/agent-sandbox_<version>_<architecture>.deb` | the Debian package |
//! | `completions/`, `man/` | shell completions and manual pages |
//! | `install.sh` | installs a program from this directory, by path or URL |
//! | `sbom/*.spdx.json` | SPDX 2.3, one for each program and target, one for each root file system of `python-runtime` |
//! | `provenance.json` | SLSA v1 provenance, unsigned |
//! | `VERSION`, `IMAGE_TAG`, `IMAGE_PREFIX`, `SHA256SUMS` | the version, the tag of the images and what stands before their names, the checksums of every other file |
//!
//! Two runs give the same bytes: times are the commit's, entries are sorted, owners and modes are fixed, paths of the build machine
//! are renamed. `python-runtime` has the packages that Debian serves at the time; the provenance lists their versions.

mod binaries;
mod chart;
pub mod checksums;
pub mod compare;
mod container_images;
pub mod debian_package;
mod provenance;
mod python_runtime;
mod sbom;
mod target;
mod toolchain;
mod version;

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, ensure};
use clap::Args;

use crate::release;
pub use target::Target;
pub use version::Version;

#[derive(Debug, Clone, Args)]
pub struct Arguments {
    /// For which processors
    #[arg(long, value_enum, value_delimiter = ',', default_values = ["x86_64", "aarch64"])]
    pub targets: Vec<Target>,

    /// The cargo profile of the programs; `release` builds in a fraction of the time
    #[arg(long, default_value = "dist")]
    pub profile: String,

    /// Where to write; what is there is replaced
    #[arg(long, value_name = "DIRECTORY", default_value = "dist")]
    pub out: PathBuf,

    /// What stands before the names of the images, as registry.example/team/
    #[arg(long, default_value = "localhost/")]
    pub image_prefix: String,

    /// Package the programs of an earlier run, in DIRECTORY/<triple>/, instead of compiling
    #[arg(long, value_name = "DIRECTORY")]
    pub binaries: Option<PathBuf>,

    /// Leave out the image python-runtime, which needs root and Debian's package mmdebstrap
    #[arg(long)]
    pub without_python_runtime: bool,

    /// Accept changes that are not committed; the version then ends in .dirty
    #[arg(long)]
    pub allow_dirty: bool,

    /// Do everything a second time, in other directories, and fail if a byte differs
    #[arg(long)]
    pub verify: bool,
}

/// What every step of one run needs to know.
#[derive(Debug)]
pub struct Run<'a> {
    pub root: &'a Path,
    pub out: PathBuf,
    pub version: Version,
    pub arguments: &'a Arguments,
}

pub fn run(root: &Path, arguments: &Arguments) -> anyhow::Result<()> {
    let version = Version::of(root)?;
    ensure!(
        arguments.allow_dirty || !version.is_dirty,
        "the checkout has changes that are not committed, so its commit would not name what is built: commit them, or pass --allow-dirty"
    );
    ensure!(
        !arguments.targets.is_empty(),
        "--targets: name at least one"
    );
    let out = root.join(&arguments.out);
    let target_directory = cargo_target_directory(root)?;
    make(root, arguments, &version, &out, &target_directory)?;
    println!("{}: version {}", out.display(), version.package());
    if arguments.verify {
        let again = tempfile::Builder::new()
            .prefix("dist-verify-")
            .tempdir_in(&target_directory)?;
        let second = again.path().join("out");
        make(
            root,
            arguments,
            &version,
            &second,
            &again.path().join("target"),
        )?;
        compare::same_bytes(&out, &second)?;
        println!("a second run gave the same bytes");
    }
    Ok(())
}

fn make(
    root: &Path,
    arguments: &Arguments,
    version: &Version,
    out: &Path,
    target_directory: &Path,
) -> anyhow::Result<()> {
    clear(out)?;
    let run = Run {
        root,
        out: out.to_owned(),
        version: version.clone(),
        arguments,
    };
    match &arguments.binaries {
        Some(directory) => binaries::copy(&run, &root.join(directory))?,
        None => binaries::build(&run, target_directory)?,
    }
    binaries::smoke_test(&run)?;
    binaries::write_documentation(&run)?;
    fs::write(run.out.join("VERSION"), run.version.package() + "\n")?;
    fs::write(run.out.join("IMAGE_TAG"), run.version.image_tag() + "\n")?;
    fs::write(
        run.out.join("IMAGE_PREFIX"),
        format!("{}\n", arguments.image_prefix),
    )?;
    fs::copy(root.join("deploy/install.sh"), run.out.join("install.sh"))
        .context("copying deploy/install.sh")?;
    release::run(
        root,
        &release::Arguments::new(
            run.version.image_tag(),
            arguments.image_prefix.clone(),
            run.out.join("manifests"),
        ),
    )?;
    chart::write(&run)?;
    sbom::write_programs(&run)?;
    for target in &arguments.targets {
        debian_package::write(&run, *target)?;
    }
    let roots = if arguments.without_python_runtime {
        Vec::new()
    } else {
        python_runtime::roots(&run)?
    };
    for root in &roots {
        sbom::write_root(&run, root)?;
    }
    container_images::write(&run, &roots)?;
    provenance::write(&run, &roots)?;
    checksums::write(&run.out)
}

/// Empties the output directory if an earlier run made it, and refuses to delete anything else.
fn clear(out: &Path) -> anyhow::Result<()> {
    if out.exists() {
        let is_empty = fs::read_dir(out)?.next().is_none();
        ensure!(
            is_empty || out.join("VERSION").exists() || out.join("bin").exists(),
            "{} has other files than those of a release; choose another directory",
            out.display()
        );
        fs::remove_dir_all(out).with_context(|| format!("emptying {}", out.display()))?;
    }
    fs::create_dir_all(out).with_context(|| format!("creating {}", out.display()))
}

fn cargo_target_directory(root: &Path) -> anyhow::Result<PathBuf> {
    let directory = match std::env::var_os("CARGO_TARGET_DIR") {
        Some(directory) => root.join(directory),
        None => root.join("target"),
    };
    fs::create_dir_all(&directory)?;
    Ok(directory)
}

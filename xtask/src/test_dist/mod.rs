//! `cargo xtask test-dist`: checks what `cargo xtask dist` has written, as a user would meet it.
//!
//! | step | what it shows |
//! |---|---|
//! | checksums | `SHA256SUMS` has every file |
//! | documentation | completions and manual pages |
//! | installer | `install.sh` from a server and from a directory; a tampered, truncated or missing program is refused |
//! | package | dpkg reads the package; its files, scripts and configuration files |
//! | images | our own store loads every archive under its name |
//! | chart | helm reads the package and computes the same digest, if `cargo xtask kube-assets` has built helm |
//! | packaging | a second packaging of the same programs gives the same bytes |
//! | minbase | the package and the installer in Debian's smallest root file system, as root and as an ordinary user |

mod http_server;
mod installer;
mod minbase;

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, bail, ensure};
use clap::{Args, ValueEnum};

use crate::dist::{self, Target, checksums, compare, debian_package};
use crate::kube_assets;

#[derive(Debug, Args)]
pub struct Arguments {
    /// What to check: the output of `cargo xtask dist`
    #[arg(long, value_name = "DIRECTORY", default_value = "dist")]
    dist: PathBuf,

    /// Only these steps
    #[arg(value_enum)]
    steps: Vec<Step>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Step {
    Checksums,
    Documentation,
    Installer,
    Package,
    Images,
    Chart,
    Packaging,
    Minbase,
}

/// The files under test.
#[derive(Debug)]
struct Release<'a> {
    root: &'a Path,
    directory: PathBuf,
    version: String,
}

pub fn run(root: &Path, arguments: &Arguments) -> anyhow::Result<()> {
    let directory = root.join(&arguments.dist);
    let version = fs::read_to_string(directory.join("VERSION")).with_context(|| {
        format!(
            "{} is no output of `cargo xtask dist`: run that first",
            directory.display()
        )
    })?;
    let release = Release {
        root,
        directory,
        version: version.trim().to_owned(),
    };
    let steps = if arguments.steps.is_empty() {
        Step::value_variants()
    } else {
        arguments.steps.as_slice()
    };
    for step in steps {
        let done = match step {
            Step::Checksums => release.checksums(),
            Step::Documentation => release.documentation(),
            Step::Installer => installer::check(&release),
            Step::Package => release.package(),
            Step::Images => release.images(),
            Step::Chart => release.chart(),
            Step::Packaging => release.packaging(),
            Step::Minbase => minbase::check(&release),
        };
        done.with_context(|| format!("{step:?}"))?;
        println!("-- {step:?}: ok");
    }
    Ok(())
}

impl Release<'_> {
    /// The target that this machine runs.
    fn target(&self) -> anyhow::Result<Target> {
        let native = Target::value_variants().iter().copied();
        let mut native = native.filter(|target| target.is_native());
        native
            .find(|target| self.programs(*target).exists())
            .context("the release has no programs for this machine")
    }

    fn targets(&self) -> Vec<Target> {
        let all = Target::value_variants().iter().copied();
        all.filter(|target| self.programs(*target).exists())
            .collect()
    }

    fn programs(&self, target: Target) -> PathBuf {
        self.directory.join("bin").join(target.triple())
    }

    fn program(&self) -> anyhow::Result<PathBuf> {
        Ok(self.programs(self.target()?).join("agent-sandbox"))
    }

    fn package_path(&self) -> anyhow::Result<PathBuf> {
        let file = debian_package::file_name(&self.version, self.target()?);
        Ok(self.directory.join("deb").join(file))
    }

    fn checksums(&self) -> anyhow::Result<()> {
        let listed = fs::read_to_string(self.directory.join(checksums::FILE))?;
        let sums = checksums::of_directory(&self.directory)?;
        let actual = sums
            .iter()
            .filter(|sum| sum.path != checksums::FILE)
            .map(|sum| format!("{}  {}", sum.sha256, sum.path));
        ensure!(
            listed.lines().eq(actual),
            "{} is not what is there",
            checksums::FILE
        );
        Ok(())
    }

    fn documentation(&self) -> anyhow::Result<()> {
        for (file, wanted) in [
            ("completions/agent-sandbox.bash", "_agent-sandbox()"),
            ("completions/_agent-sandbox", "#compdef agent-sandbox"),
            (
                "completions/agent-sandbox.fish",
                "complete -c agent-sandbox",
            ),
            ("man/agent-sandbox.1", ".TH agent-sandbox 1"),
            ("man/agent-sandbox-up.1", "data\\-dir"),
            ("man/agent-sandbox-run.1", ".SH SYNOPSIS"),
        ] {
            let text = fs::read_to_string(self.directory.join(file))
                .with_context(|| format!("reading {file}"))?;
            ensure!(text.contains(wanted), "{file} has no {wanted:?}");
        }
        Ok(())
    }

    fn package(&self) -> anyhow::Result<()> {
        for target in self.targets() {
            let file = debian_package::file_name(&self.version, target);
            let path = self.directory.join("deb").join(file);
            let path = path.to_string_lossy();
            let info = output("dpkg-deb", &["--info", &path])?;
            for wanted in [
                "Package: agent-sandbox",
                &format!("Version: {}", self.version),
                &format!("Architecture: {}", target.architecture()),
                "conffiles",
                "postinst",
                "prerm",
                "postrm",
            ] {
                ensure!(info.contains(wanted), "{path}: no {wanted:?} in {info}");
            }
            let contents = output("dpkg-deb", &["--contents", &path])?;
            for wanted in [
                "./usr/bin/agent-sandbox\n",
                "./usr/bin/agent-sandbox-controller -> agent-sandbox",
                "./usr/bin/sandbox-router -> agent-sandbox",
                "./usr/lib/systemd/system/agent-sandbox.service",
                "./etc/default/agent-sandbox",
                "./usr/share/bash-completion/completions/agent-sandbox",
                "./usr/share/zsh/vendor-completions/_agent-sandbox",
                "./usr/share/fish/vendor_completions.d/agent-sandbox.fish",
                "./usr/share/man/man1/agent-sandbox.1.gz",
                "./usr/share/doc/agent-sandbox/copyright",
            ] {
                ensure!(
                    contents.contains(wanted),
                    "{path}: no {wanted:?} in {contents}"
                );
            }
            let is_owned_by_root =
                |line: &str| line.contains(" 0/0 ") || line.contains(" root/root ");
            ensure!(contents.lines().all(is_owned_by_root), "{contents}");
        }
        Ok(())
    }

    fn images(&self) -> anyhow::Result<()> {
        let program = self.program()?;
        let program = program.to_string_lossy();
        let store = tempfile::tempdir()?;
        let store = store.path().to_string_lossy().into_owned();
        let tag = fs::read_to_string(self.directory.join("IMAGE_TAG"))?;
        let mut names = Vec::new();
        for entry in fs::read_dir(self.directory.join("images"))? {
            let path = entry?.path();
            let shown = path.to_string_lossy().into_owned();
            output(&program, &["image", "load", &shown, "--data-dir", &store])?;
            let name = path.file_stem().unwrap_or_default().to_string_lossy();
            names.push(format!("/{name}:{}", tag.trim()));
        }
        let list = output(&program, &["image", "list", "--data-dir", &store])?;
        for name in &names {
            ensure!(list.contains(name), "no image {name} in {list}");
        }
        ensure!(names.len() >= 3, "only {} images", names.len());
        Ok(())
    }

    fn chart(&self) -> anyhow::Result<()> {
        let helm = kube_assets::directory(self.root)?.join("helm");
        if !helm.exists() {
            bail!(
                "{} is not there: run `cargo xtask kube-assets`, or name the other steps",
                helm.display()
            );
        }
        let helm = helm.to_string_lossy();
        let file = format!("agent-sandbox-{}.tgz", self.version);
        let package = self.directory.join("helm").join(&file);
        let shown = package.to_string_lossy();
        let values = "image.repository=localhost/agent-sandbox-controller,image.tag=x";
        let rendered = output(&helm, &["template", "a", &shown, "--set", values])?;
        ensure!(rendered.contains("kind: Deployment"), "{rendered}");
        let again = tempfile::tempdir()?;
        fs::copy(&package, again.path().join(&file))?;
        output(&helm, &["repo", "index", &again.path().to_string_lossy()])?;
        let theirs = fs::read_to_string(again.path().join("index.yaml"))?;
        let ours = fs::read_to_string(self.directory.join("helm/index.yaml"))?;
        for key in ["digest", "version", "appVersion", "kubeVersion"] {
            let of = |text: &str| -> anyhow::Result<serde_json::Value> {
                let index: serde_json::Value = serde_yaml_ng::from_str(text)?;
                Ok(index["entries"]["agent-sandbox"][0][key].clone())
            };
            let (theirs, ours) = (of(&theirs)?, of(&ours)?);
            ensure!(
                theirs == ours,
                "{key}: helm writes {theirs}, we write {ours}"
            );
        }
        Ok(())
    }

    fn packaging(&self) -> anyhow::Result<()> {
        let again = tempfile::tempdir()?;
        let provenance = fs::read_to_string(self.directory.join("provenance.json"))?;
        let provenance: serde_json::Value = serde_json::from_str(&provenance)?;
        let parameters = &provenance["predicate"]["buildDefinition"]["externalParameters"];
        let text = |key: &str| parameters[key].as_str().unwrap_or_default().to_owned();
        let out = again.path().join("out");
        dist::run(
            self.root,
            &dist::Arguments {
                targets: self.targets(),
                profile: text("profile"),
                out: out.clone(),
                image_prefix: text("imagePrefix"),
                binaries: Some(self.directory.join("bin")),
                without_python_runtime: !self.directory.join("images/python-runtime.tar").exists(),
                allow_dirty: true,
                verify: false,
            },
        )?;
        compare::same_bytes(&self.directory, &out)
    }
}

/// What a program prints. Fails unless it exits with success.
fn output(program: &str, arguments: &[&str]) -> anyhow::Result<String> {
    let output = Command::new(program)
        .args(arguments)
        .output()
        .with_context(|| format!("cannot run {program}"))?;
    ensure!(
        output.status.success(),
        "{program} {}: {}: {}",
        arguments.join(" "),
        output.status,
        String::from_utf8_lossy(&output.stderr)
    );
    Ok(String::from_utf8_lossy(&output.stdout).into_owned())
}

//! The OCI archives, written without a container engine. What is in each image is the Dockerfile's: one static program, on nothing, as
//! an ordinary user; `python-runtime` has Debian below it.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::BufWriter;
use std::path::Path;

use anyhow::Context;
use images::Reference;
use images::write::{Archive, Content, Image, Layer, Process, Tree};

use super::binaries::{MAIN, RUNTIME};
use super::python_runtime::Root;
use super::{Run, Target};

const USER_ID: u32 = 65532;
const PASSWD: &str = "nonroot:x:65532:65532:nonroot:/:/sbin/nologin\n";
const GROUP: &str = "nonroot:x:65532:\n";
/// The directory of files and commands of the runtime inside a sandbox.
const BASE_DIRECTORY: &str = "app";

/// An image of one static program.
struct Program {
    image: &'static str,
    /// In `bin/<triple>/`.
    binary: &'static str,
    /// In the image.
    path: &'static str,
    ports: &'static [&'static str],
    has_base_directory: bool,
}

const PROGRAMS: [Program; 3] = [
    Program {
        image: "agent-sandbox-controller",
        binary: MAIN,
        path: "agent-sandbox-controller",
        ports: &["8080/tcp", "8081/tcp"],
        has_base_directory: false,
    },
    Program {
        image: "agent-sandbox-router",
        binary: MAIN,
        path: "sandbox-router",
        ports: &["8080/tcp", "8081/tcp", "9090/tcp"],
        has_base_directory: false,
    },
    Program {
        image: RUNTIME,
        binary: RUNTIME,
        path: "sandboxd",
        ports: &["8888/tcp"],
        has_base_directory: true,
    },
];

const PYTHON_RUNTIME: &str = "python-runtime";
const RUNTIME_PATH: &str = "usr/local/bin/sandboxd";

pub fn write(run: &Run<'_>, roots: &[Root]) -> anyhow::Result<()> {
    let directory = run.out.join("images");
    fs::create_dir_all(&directory)?;
    let work = tempfile::tempdir()?;
    for program in &PROGRAMS {
        let layers = run
            .arguments
            .targets
            .iter()
            .map(|target| {
                let tree = program_tree(run, program, *target)?;
                Ok((*target, vec![Layer::write(&tree, work.path())?]))
            })
            .collect::<anyhow::Result<Vec<_>>>()?;
        let process = Process {
            exposed_ports: program
                .ports
                .iter()
                .map(|port| (*port).to_owned())
                .collect(),
            entrypoint: vec![format!("/{}", program.path)],
            ..process(run, program.has_base_directory)
        };
        write_archive(
            run,
            &directory,
            program.image,
            &layers,
            &process,
            &["the program"],
        )?;
    }
    if roots.is_empty() {
        return Ok(());
    }
    let layers = roots
        .iter()
        .map(|root| {
            let mut upper = Tree::new(run.version.epoch);
            let program = run.programs(root.target).join(RUNTIME);
            upper.file(RUNTIME_PATH, 0o755, Content::Path(program))?;
            base_directory(&mut upper)?;
            upper.file(
                "etc/passwd",
                0o644,
                Content::Bytes(with_user(root, "etc/passwd", PASSWD)?),
            )?;
            upper.file(
                "etc/group",
                0o644,
                Content::Bytes(with_user(root, "etc/group", GROUP)?),
            )?;
            let debian = Layer::write(&root.tree, work.path())?;
            Ok((
                root.target,
                vec![debian, Layer::write(&upper, work.path())?],
            ))
        })
        .collect::<anyhow::Result<Vec<_>>>()?;
    let process = Process {
        exposed_ports: vec!["8888/tcp".to_owned()],
        entrypoint: vec![format!("/{RUNTIME_PATH}")],
        env: vec![
            "PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin".to_owned(),
            "LANG=C.UTF-8".to_owned(),
            "HOME=/app".to_owned(),
        ],
        ..process(run, true)
    };
    write_archive(
        run,
        &directory,
        PYTHON_RUNTIME,
        &layers,
        &process,
        &["Debian with Python", "sandboxd"],
    )
}

fn program_tree(run: &Run<'_>, program: &Program, target: Target) -> anyhow::Result<Tree> {
    let mut tree = Tree::new(run.version.epoch);
    let binary = run.programs(target).join(program.binary);
    tree.file(program.path, 0o755, Content::Path(binary))?;
    tree.file("etc/passwd", 0o644, Content::Bytes(PASSWD.into()))?;
    tree.file("etc/group", 0o644, Content::Bytes(GROUP.into()))?;
    if program.has_base_directory {
        base_directory(&mut tree)?;
        tree.directory("tmp", 0o1777)?;
    }
    Ok(tree)
}

/// The directory of commands and files, which their user may write.
fn base_directory(tree: &mut Tree) -> anyhow::Result<()> {
    tree.directory(BASE_DIRECTORY, 0o755)?;
    tree.owner(BASE_DIRECTORY, USER_ID, USER_ID)?;
    Ok(())
}

/// A file of accounts with that of the image's user.
fn with_user(root: &Root, path: &str, line: &str) -> anyhow::Result<Vec<u8>> {
    let found = root.tree.files().find(|(file, _)| file == path);
    let (_, content) = found.with_context(|| format!("the root file system has no /{path}"))?;
    let mut text = content.read()?;
    text.extend_from_slice(line.as_bytes());
    Ok(text)
}

fn process(run: &Run<'_>, has_base_directory: bool) -> Process {
    Process {
        user: Some(format!("{USER_ID}:{USER_ID}")),
        working_dir: has_base_directory.then(|| format!("/{BASE_DIRECTORY}")),
        labels: BTreeMap::from([
            (
                "org.opencontainers.image.version".to_owned(),
                run.version.package(),
            ),
            (
                "org.opencontainers.image.revision".to_owned(),
                run.version.commit.clone(),
            ),
            (
                "org.opencontainers.image.licenses".to_owned(),
                "Apache-2.0".to_owned(),
            ),
        ]),
        ..Process::default()
    }
}

fn write_archive(
    run: &Run<'_>,
    directory: &Path,
    image: &str,
    layers: &[(Target, Vec<Layer>)],
    process: &Process,
    history: &[&str],
) -> anyhow::Result<()> {
    let name = format!(
        "{}{image}:{}",
        run.arguments.image_prefix,
        run.version.image_tag()
    );
    let name = Reference::parse(&name)?;
    let archive = Archive {
        name: &name,
        images: layers
            .iter()
            .map(|(target, layers)| Image {
                architecture: target.architecture().to_owned(),
                process: process.clone(),
                layers: layers.iter().collect(),
                history: history.iter().map(|line| (*line).to_owned()).collect(),
            })
            .collect(),
        created: run.version.epoch,
    };
    let path = directory.join(format!("{image}.tar"));
    let file = File::create(&path).with_context(|| format!("creating {}", path.display()))?;
    let digest = archive.write(BufWriter::new(file))?;
    println!("-- {name} {digest}");
    Ok(())
}

//! What the image writer writes, the image store loads; and the same input gives the same bytes.

#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::fs;
use std::path::Path;

use agent_sandbox_images::write::{Archive, Content, Image, Layer, Process, Tree};
use agent_sandbox_images::{Images, Reference, Settings};

const CREATED: u64 = 1_750_000_000;

fn machine_architecture() -> &'static str {
    match std::env::consts::ARCH {
        "x86_64" => "amd64",
        "aarch64" => "arm64",
        other => other,
    }
}

fn bytes(text: &str) -> Content {
    Content::Bytes(text.as_bytes().to_vec())
}

fn layers(work: &Path, program: &str) -> [Layer; 2] {
    let mut base = Tree::new(CREATED);
    base.file("etc/passwd", 0o644, bytes("nonroot:x:65532:65532:::\n"))
        .unwrap();
    base.symlink("bin", "usr/bin").unwrap();
    let long = format!(
        "usr/share/{}/file",
        "long-name/".repeat(20).trim_end_matches('/')
    );
    base.file(&long, 0o600, bytes("deep")).unwrap();
    base.owner(&long, 65532, 65532).unwrap();
    let mut upper = Tree::new(CREATED);
    upper
        .file("usr/bin/program", 0o755, bytes(program))
        .unwrap();
    [
        Layer::write(&base, work).unwrap(),
        Layer::write(&upper, work).unwrap(),
    ]
}

/// An archive with an image for each architecture.
fn archive(work: &Path, architectures: &[&str]) -> Vec<u8> {
    let layers: Vec<(&str, [Layer; 2])> = architectures
        .iter()
        .map(|architecture| (*architecture, self::layers(work, architecture)))
        .collect();
    let images = layers
        .iter()
        .map(|(architecture, layers)| Image {
            architecture: (*architecture).to_owned(),
            process: Process {
                user: Some("65532:65532".to_owned()),
                exposed_ports: vec!["8888/tcp".to_owned()],
                env: vec!["PATH=/usr/bin".to_owned()],
                entrypoint: vec!["/usr/bin/program".to_owned()],
                ..Process::default()
            },
            layers: layers.iter().collect(),
            history: vec!["base".to_owned(), "program".to_owned()],
        })
        .collect();
    let name = Reference::parse("localhost/tool:1.2").unwrap();
    let mut written = Vec::new();
    Archive {
        name: &name,
        images,
        created: CREATED,
    }
    .write(&mut written)
    .unwrap();
    written
}

async fn load(archive: &[u8]) -> (tempfile::TempDir, Vec<String>, agent_sandbox_images::Image) {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("image.tar");
    fs::write(&path, archive).unwrap();
    let images = Images::open(Settings::new(directory.path().join("store"))).unwrap();
    let mut loaded = images.load(&path, None).await.unwrap();
    assert_eq!(loaded.len(), 1);
    let (names, image) = loaded.remove(0);
    let names = names.iter().map(ToString::to_string).collect();
    (directory, names, image)
}

#[tokio::test]
async fn the_store_loads_a_written_image_with_its_name_process_and_files() {
    let work = tempfile::tempdir().unwrap();
    let (_store, names, image) = load(&archive(work.path(), &[machine_architecture()])).await;
    assert_eq!(names, ["localhost/tool:1.2"]);
    let process = image.configuration.config.clone().unwrap();
    assert_eq!(process.user.as_deref(), Some("65532:65532"));
    assert_eq!(process.entrypoint.unwrap(), ["/usr/bin/program"]);
    let [upper, base] = image.layers.as_slice() else {
        panic!("the image has {} layers", image.layers.len());
    };
    let deep = base
        .join("usr/share")
        .join("long-name/".repeat(20))
        .join("file");
    assert_eq!(fs::read_to_string(deep).unwrap(), "deep");
    assert_eq!(
        fs::read_link(base.join("bin")).unwrap(),
        Path::new("usr/bin")
    );
    let program = fs::read_to_string(upper.join("usr/bin/program")).unwrap();
    assert_eq!(program, machine_architecture());
}

#[tokio::test]
async fn of_an_image_for_several_platforms_the_machine_gets_its_own() {
    let work = tempfile::tempdir().unwrap();
    let (_store, names, image) =
        load(&archive(work.path(), &["riscv64", machine_architecture()])).await;
    assert_eq!(names, ["localhost/tool:1.2"]);
    let program = image.layers[0].join("usr/bin/program");
    assert_eq!(fs::read_to_string(program).unwrap(), machine_architecture());
}

#[test]
fn the_same_input_gives_the_same_bytes() {
    let (one, two) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let architectures = ["amd64", "arm64"];
    assert_eq!(
        archive(one.path(), &architectures),
        archive(two.path(), &architectures)
    );
    assert_ne!(
        archive(one.path(), &architectures),
        archive(one.path(), &["amd64"])
    );
}

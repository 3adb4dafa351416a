//! Images for the nodes of a test cluster, as OCI archives. Nothing is pulled: the nodes have no network beyond the cluster.
//!
//! Images of other projects are the programs that `kube-assets` built. Images of this project are those that `cargo xtask dist` wrote, if a
//! directory is given, or the binary under test on a Debian root with Python.

use std::fs;
use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, ensure};
use serde_json::{Value, json};
use sha2::{Digest, Sha256};

/// The registry in the names of the images that this module makes of our programs.
pub const REGISTRY: &str = "agent-sandbox.test";
/// Their tag.
pub const TAG: &str = "test";
/// The image of the container that holds a pod's namespaces.
pub const PAUSE: &str = "registry.k8s.io/pause:3.10.1";

/// What an image has besides its layers.
struct Image<'a> {
    name: &'a str,
    entrypoint: &'a [&'a str],
    command: &'a [&'a str],
    user: &'a str,
    directory: &'a str,
}

/// Writes the archives of other projects' images, and returns their paths.
pub fn of_add_ons(programs: &Path, output: &Path) -> anyhow::Result<Vec<PathBuf>> {
    let busybox = Path::new("/bin/busybox");
    let pause = Image {
        name: PAUSE,
        entrypoint: &["/busybox", "sleep", "2147483647"],
        command: &[],
        user: "",
        directory: "/",
    };
    let coredns = Image {
        name: "agent-sandbox.test/coredns:test",
        entrypoint: &["/coredns"],
        ..pause
    };
    let busybox_image = Image {
        name: "agent-sandbox.test/busybox:test",
        entrypoint: &[],
        command: &["/bin/sh"],
        ..pause
    };
    let mut archives = Vec::new();
    for (image, program, place) in [
        (&pause, busybox, "busybox"),
        (&coredns, &programs.join("coredns"), "coredns"),
        (&busybox_image, busybox, "bin/busybox"),
    ] {
        let root = tempfile::tempdir_in(output)?;
        install(program, &root.path().join(place))?;
        if place == "bin/busybox" {
            for name in [
                "sh", "sleep", "cat", "wget", "nslookup", "nc", "httpd", "mkdir", "echo", "id",
                "env", "ls", "true",
            ] {
                std::os::unix::fs::symlink("busybox", root.path().join("bin").join(name))?;
            }
        }
        archives.push(image.write(output, &[layer(root.path())?])?);
    }
    Ok(archives)
}

/// Makes the images of this project from debug binaries, which need the C library: with their libraries alone, and the runtime of sandboxes on
/// a Debian root with Python.
pub fn of_binaries(
    binary: &Path,
    sandboxd: &Path,
    cache: &Path,
    output: &Path,
) -> anyhow::Result<Vec<PathBuf>> {
    let python = debian_layer(cache)?;
    let mut archives = Vec::new();
    for (name, program, place, user, base) in [
        (
            "agent-sandbox-controller",
            binary,
            "agent-sandbox-controller",
            "65532:65532",
            None,
        ),
        (
            "agent-sandbox-router",
            binary,
            "sandbox-router",
            "65532:65532",
            None,
        ),
        ("sandboxd", sandboxd, "sandboxd", "65532:65532", None),
        ("python-runtime", sandboxd, "sandboxd", "", Some(&python)),
    ] {
        let root = tempfile::tempdir_in(output)?;
        let file = root.path().join(place);
        install(program, &file)?;
        run(Command::new("strip").arg("--strip-debug").arg(&file))?;
        let directory = if base.is_some() { "/app" } else { "/" };
        let mut layers = Vec::new();
        if let Some(base) = base {
            fs::create_dir(root.path().join("app"))?;
            layers.push(fs::read(base)?);
        } else {
            install_libraries(&file, root.path())?;
        }
        layers.push(layer(root.path())?);
        let image = Image {
            name: &format!("{REGISTRY}/{name}:{TAG}"),
            entrypoint: &[&format!("/{place}")],
            command: &[],
            user,
            directory,
        };
        archives.push(image.write(output, &layers)?);
    }
    Ok(archives)
}

/// Copies the shared libraries of a program to where the dynamic linker looks for them.
fn install_libraries(program: &Path, root: &Path) -> anyhow::Result<()> {
    let listed = Command::new("ldd").arg(program).output()?;
    for word in String::from_utf8_lossy(&listed.stdout).split_whitespace() {
        if word.starts_with('/') && !word.ends_with(':') {
            install(Path::new(word), &root.join(&word[1..]))?;
        }
    }
    Ok(())
}

/// The archives that `cargo xtask dist` wrote.
pub fn of_directory(directory: &Path) -> anyhow::Result<Vec<PathBuf>> {
    let mut archives = Vec::new();
    for name in [
        "agent-sandbox-controller",
        "agent-sandbox-router",
        "sandboxd",
        "python-runtime",
    ] {
        let path = directory.join(format!("{name}.tar"));
        ensure!(path.exists(), "{} is missing", path.display());
        archives.push(path);
    }
    Ok(archives)
}

/// The layer of a Debian root with Python, which is made once and kept.
fn debian_layer(cache: &Path) -> anyhow::Result<PathBuf> {
    let path = cache.join("debian-bookworm-python.tar");
    if path.exists() {
        return Ok(path);
    }
    fs::create_dir_all(cache)?;
    println!("-- making a Debian root with Python");
    let root = tempfile::tempdir_in(cache)?;
    run(Command::new("debootstrap")
        .args(["--variant=minbase", "--include=python3", "bookworm"])
        .arg(root.path()))?;
    for waste in ["var/cache/apt", "var/lib/apt/lists", "usr/share/doc", "dev"] {
        let waste = root.path().join(waste);
        fs::remove_dir_all(&waste)?;
        fs::create_dir_all(&waste)?;
    }
    let partial = cache.join("debian-bookworm-python.partial");
    fs::write(&partial, layer(root.path())?)?;
    fs::rename(&partial, &path)?;
    Ok(path)
}

fn install(program: &Path, place: &Path) -> anyhow::Result<()> {
    if let Some(directory) = place.parent() {
        fs::create_dir_all(directory)?;
    }
    fs::copy(program, place).with_context(|| format!("copying {}", program.display()))?;
    Ok(())
}

/// A directory as an uncompressed tar file.
fn layer(directory: &Path) -> anyhow::Result<Vec<u8>> {
    use std::os::unix::fs::PermissionsExt;
    fs::set_permissions(directory, fs::Permissions::from_mode(0o755))?;
    let tar = Command::new("tar")
        .args(["--sort=name", "--mtime=@0", "--numeric-owner", "-C"])
        .arg(directory)
        .args(["-cf", "-", "."])
        .output()?;
    ensure!(
        tar.status.success(),
        "tar: {}",
        String::from_utf8_lossy(&tar.stderr)
    );
    Ok(tar.stdout)
}

fn run(command: &mut Command) -> anyhow::Result<()> {
    let output = command
        .output()
        .with_context(|| format!("cannot run {command:?}"))?;
    ensure!(
        output.status.success(),
        "{command:?}: {}\n{}{}",
        output.status,
        String::from_utf8_lossy(&output.stdout),
        String::from_utf8_lossy(&output.stderr)
    );
    Ok(())
}

impl Image<'_> {
    /// Writes an OCI archive into the directory, and returns its path.
    fn write(&self, output: &Path, layers: &[Vec<u8>]) -> anyhow::Result<PathBuf> {
        let layout = tempfile::tempdir_in(output)?;
        let blobs = layout.path().join("blobs/sha256");
        fs::create_dir_all(&blobs)?;
        let blob = |content: &[u8], media_type: &str| -> anyhow::Result<Value> {
            let digest = hexadecimal(&Sha256::digest(content));
            fs::File::create(blobs.join(&digest))?.write_all(content)?;
            Ok(
                json!({"mediaType": media_type, "digest": format!("sha256:{digest}"), "size": content.len()}),
            )
        };
        let layers = layers
            .iter()
            .map(|layer| blob(layer, "application/vnd.oci.image.layer.v1.tar"))
            .collect::<anyhow::Result<Vec<_>>>()?;
        let differences: Vec<&Value> = layers.iter().map(|layer| &layer["digest"]).collect();
        let configuration = json!({
            "created": "2026-01-01T00:00:00Z",
            "architecture": architecture(),
            "os": "linux",
            "config": {
                "User": self.user,
                "Entrypoint": self.entrypoint,
                "Cmd": self.command,
                "WorkingDir": self.directory,
                "Env": ["PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"],
            },
            "rootfs": {"type": "layers", "diff_ids": differences},
        });
        let configuration = blob(
            configuration.to_string().as_bytes(),
            "application/vnd.oci.image.config.v1+json",
        )?;
        let media_type = "application/vnd.oci.image.manifest.v1+json";
        let manifest = json!({"schemaVersion": 2, "mediaType": media_type, "config": configuration, "layers": layers});
        let mut manifest = blob(manifest.to_string().as_bytes(), media_type)?;
        manifest["annotations"] = json!({"io.containerd.image.name": self.name});
        manifest["platform"] = json!({"architecture": architecture(), "os": "linux"});
        let index = json!({"schemaVersion": 2, "manifests": [manifest]});
        fs::write(layout.path().join("index.json"), index.to_string())?;
        fs::write(
            layout.path().join("oci-layout"),
            r#"{"imageLayoutVersion":"1.0.0"}"#,
        )?;
        let file = self.name.replace(['/', ':'], "_");
        let archive = output.join(format!("{file}.tar"));
        fs::write(&archive, layer(layout.path())?)?;
        Ok(archive)
    }
}

/// The machine's architecture, by its name in images.
fn architecture() -> &'static str {
    match std::env::consts::ARCH {
        "x86_64" => "amd64",
        "aarch64" => "arm64",
        other => other,
    }
}

fn hexadecimal(bytes: &[u8]) -> String {
    use std::fmt::Write as _;
    bytes.iter().fold(String::new(), |mut text, byte| {
        let _ = write!(text, "{byte:02x}");
        text
    })
}

/// The name of an archive's image.
pub fn name(archive: &Path) -> anyhow::Result<String> {
    let index = Command::new("tar")
        .arg("-xOf")
        .arg(archive)
        .args(["--wildcards", "*index.json"])
        .output()?;
    let index: Value = serde_json::from_slice(&index.stdout)
        .with_context(|| format!("reading the index of {}", archive.display()))?;
    let manifests = index["manifests"].as_array().into_iter().flatten();
    let mut names =
        manifests.filter_map(|one| one["annotations"]["io.containerd.image.name"].as_str());
    names
        .next()
        .map(str::to_owned)
        .with_context(|| format!("{} does not name its image", archive.display()))
}

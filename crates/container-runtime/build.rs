//! Builds the two programs that run inside containers, as static binaries, and packs them, so that the node can carry
//! them inside itself.
//!
//! They are built by a nested cargo in a target directory of its own: one that every profile of this workspace shares,
//! and that does not wait for the lock the outer cargo holds.

use std::env;
use std::fs::File;
use std::path::{Path, PathBuf};
use std::process::Command;

use flate2::Compression;
use flate2::write::GzEncoder;

/// Package, binary, and the variable under which the node includes it.
const PROGRAMS: [(&str, &str, &str); 2] = [
    ("agent-sandbox-shim", "agent-sandbox-shim", "SHIM_BINARY"),
    ("agent-sandbox-sandboxd", "sandboxd", "SANDBOXD_BINARY"),
];

fn main() {
    let manifest = PathBuf::from(variable("CARGO_MANIFEST_DIR"));
    let workspace = manifest
        .parent()
        .and_then(Path::parent)
        .expect("the crate is two levels below the workspace");
    for directory in ["crates/shim", "crates/shim-protocol", "crates/sandboxd"] {
        println!(
            "cargo::rerun-if-changed={}",
            workspace.join(directory).join("src").display()
        );
        println!(
            "cargo::rerun-if-changed={}",
            workspace.join(directory).join("Cargo.toml").display()
        );
    }
    let script = workspace.join("crates/sandboxd/build.rs");
    println!("cargo::rerun-if-changed={}", script.display());
    println!("cargo::rerun-if-changed=build.rs");
    let target = variable("TARGET");
    let directory = guest_directory();
    let mut cargo = Command::new(variable("CARGO"));
    cargo
        .current_dir(workspace)
        .args(["build", "--profile", "guest", "--target", &target]);
    for (package, _, _) in PROGRAMS {
        cargo.args(["--package", package]);
    }
    for (_, binary, _) in PROGRAMS {
        cargo.args(["--bin", binary]);
    }
    if workspace.join("Cargo.lock").exists() {
        cargo.arg("--locked");
    }
    // Flags of the outer cargo (from clippy, a coverage run or a user) do not apply to these programs.
    for inherited in [
        "RUSTFLAGS",
        "CARGO_ENCODED_RUSTFLAGS",
        "RUSTC_WORKSPACE_WRAPPER",
        "CARGO_BUILD_TARGET",
        "CLIPPY_ARGS",
    ] {
        cargo.env_remove(inherited);
    }
    cargo.env("CARGO_TARGET_DIR", &directory);
    cargo.env("CARGO_ENCODED_RUSTFLAGS", guest_flags());
    let status = cargo
        .status()
        .expect("cargo runs, since it runs this build script");
    assert!(
        status.success(),
        "building the programs that run inside containers failed: {status}"
    );
    for (_, binary, name) in PROGRAMS {
        let path = directory.join(&target).join("guest").join(binary);
        let packed = PathBuf::from(variable("OUT_DIR")).join(format!("{binary}.gz"));
        pack(&path, &packed)
            .unwrap_or_else(|error| panic!("packing {} failed: {error}", path.display()));
        println!("cargo::rustc-env={name}={}", packed.display());
    }
}

/// The compiler's flags for the programs: static linking, and the renamings of paths that make the outer build reproducible.
fn guest_flags() -> String {
    let outer = env::var("CARGO_ENCODED_RUSTFLAGS").unwrap_or_default();
    let renamings = outer
        .split('\u{1f}')
        .filter(|flag| flag.starts_with("--remap-path-prefix="));
    let flags: Vec<&str> = std::iter::once("-Ctarget-feature=+crt-static")
        .chain(renamings)
        .collect();
    flags.join("\u{1f}")
}

fn pack(program: &Path, packed: &Path) -> std::io::Result<()> {
    let mut encoder = GzEncoder::new(File::create(packed)?, Compression::best());
    std::io::copy(&mut File::open(program)?, &mut encoder)?;
    encoder.finish()?;
    Ok(())
}

fn variable(name: &str) -> String {
    env::var(name).unwrap_or_else(|_| panic!("cargo sets {name} for build scripts"))
}

/// `guest` inside the workspace's target directory, found upwards from this script's own output directory
/// (`<target>/<profile>/build/<package>/out`, with a triple in between when one was asked for).
fn guest_directory() -> PathBuf {
    let output = PathBuf::from(variable("OUT_DIR"));
    let target = variable("TARGET");
    let profile = output
        .ancestors()
        .nth(3)
        .expect("OUT_DIR is four levels below the target directory");
    let mut root = profile
        .parent()
        .expect("a profile is inside a target directory");
    if root.file_name().is_some_and(|name| name == target.as_str()) {
        root = root
            .parent()
            .expect("a triple is inside a target directory");
    }
    root.join("guest")
}

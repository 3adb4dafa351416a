//! What cross-compiles the programs: Rust's own musl targets and linker, and zig from PyPI as the C compiler of SQLite, zstd, ring and
//! mimalloc. Both targets use it, so that the C library and the compiler are the same on every build machine.

use std::ffi::OsString;
use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, bail, ensure};

use super::Target;

/// The version of PyPI's package `ziglang`.
pub const ZIG_VERSION: &str = "0.17.0";

/// The compilers, in a directory outside the checkout.
#[derive(Debug)]
pub struct Toolchain {
    directory: PathBuf,
}

impl Toolchain {
    /// Installs what is missing.
    pub fn install(targets: &[Target], root: &Path) -> anyhow::Result<Self> {
        for target in targets {
            require_rust_target(root, *target)?;
        }
        let directory = cache_directory()?.join(format!("ziglang-{ZIG_VERSION}"));
        let zig = directory.join("ziglang/zig");
        if !zig.exists() {
            install_zig(&directory)?;
        }
        for target in [Target::X86_64, Target::Aarch64] {
            write_script(
                &directory.join(format!("cc-{}", target.machine())),
                &compiler_script(&zig, target),
            )?;
        }
        write_script(
            &directory.join("ar"),
            &format!("#!/bin/sh\nexec '{}' ar \"$@\"\n", zig.display()),
        )?;
        Ok(Self { directory })
    }

    /// The variables by which cargo and build scripts find the compilers.
    pub fn environment(&self, target: Target) -> Vec<(String, OsString)> {
        let underscored = target.triple().replace('-', "_");
        let cache = self.directory.join("cache");
        vec![
            (
                format!("CC_{underscored}"),
                self.directory
                    .join(format!("cc-{}", target.machine()))
                    .into(),
            ),
            (
                format!("AR_{underscored}"),
                self.directory.join("ar").into(),
            ),
            // The linker that comes with Rust: with the start files and the C library of its musl targets it needs nothing else.
            (
                format!("CARGO_TARGET_{}_LINKER", underscored.to_uppercase()),
                "rust-lld".into(),
            ),
            ("ZIG_GLOBAL_CACHE_DIR".to_owned(), cache.clone().into()),
            ("ZIG_LOCAL_CACHE_DIR".to_owned(), cache.into()),
        ]
    }
}

/// Calls zig as a C compiler. Crates name the target in Rust's words, which zig does not know; paths of the machine are renamed.
fn compiler_script(zig: &Path, target: Target) -> String {
    format!(
        r#"#!/bin/sh
# Written by `cargo xtask dist`.
count=$#
while [ "$count" -gt 0 ]; do
  case $1 in
    --target=*) ;;
    *) set -- "$@" "$1" ;;
  esac
  shift
  count=$((count - 1))
done
exec '{zig}' cc -target {triple} -fno-sanitize=all -g0 "-ffile-prefix-map=${{CARGO_HOME:-$HOME/.cargo}}=/cargo" "$@"
"#,
        zig = zig.display(),
        triple = target.zig(),
    )
}

fn write_script(path: &Path, text: &str) -> anyhow::Result<()> {
    if fs::read_to_string(path).is_ok_and(|present| present == text) {
        return Ok(());
    }
    fs::write(path, text).with_context(|| format!("writing {}", path.display()))?;
    fs::set_permissions(path, fs::Permissions::from_mode(0o755))?;
    Ok(())
}

fn install_zig(directory: &Path) -> anyhow::Result<()> {
    println!("-- installing ziglang {ZIG_VERSION} from PyPI");
    let status = Command::new("python3")
        .args(["-m", "pip", "install", "--quiet", "--no-deps", "--target"])
        .arg(directory)
        .arg(format!("ziglang=={ZIG_VERSION}"))
        .env("PIP_DISABLE_PIP_VERSION_CHECK", "1")
        .env("PIP_ROOT_USER_ACTION", "ignore")
        .status()
        .context("cannot run python3, whose pip installs the C compiler: install python3-pip")?;
    ensure!(status.success(), "pip install ziglang: {status}");
    Ok(())
}

/// The standard library of the target. rustup is asked once if it is missing.
fn require_rust_target(root: &Path, target: Target) -> anyhow::Result<()> {
    if has_rust_target(root, target)? {
        return Ok(());
    }
    println!("-- rustup target add {}", target.triple());
    let added = Command::new("rustup")
        .current_dir(root)
        .args(["target", "add", target.triple()])
        .status();
    if !added.is_ok_and(|status| status.success()) || !has_rust_target(root, target)? {
        bail!(
            "the toolchain has no standard library for {0}: run `rustup target add {0}`",
            target.triple()
        );
    }
    Ok(())
}

fn has_rust_target(root: &Path, target: Target) -> anyhow::Result<bool> {
    let output = Command::new("rustc")
        .current_dir(root)
        .args(["--print", "target-libdir", "--target", target.triple()])
        .output()
        .context("cannot run rustc")?;
    let directory = String::from_utf8(output.stdout)?;
    Ok(output.status.success() && Path::new(directory.trim()).is_dir())
}

/// Where tools are kept between runs, as `.ci/run` keeps its own.
pub fn cache_directory() -> anyhow::Result<PathBuf> {
    let home = |variable: &str| std::env::var_os(variable).filter(|value| !value.is_empty());
    let cache = match home("XDG_CACHE_HOME") {
        Some(cache) => PathBuf::from(cache),
        None => PathBuf::from(home("HOME").context("HOME is not set")?).join(".cache"),
    };
    let directory = cache.join("agent-sandbox-ci/tools");
    fs::create_dir_all(&directory).with_context(|| format!("creating {}", directory.display()))?;
    Ok(directory)
}

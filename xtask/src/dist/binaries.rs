//! The programs: compiled, copied, run once; and what they print about themselves, completions and manual pages.

use std::ffi::OsString;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, bail, ensure};

use super::toolchain::Toolchain;
use super::{Run, Target};

/// The program that is all of them but `sandboxd`, by the name under which it is called.
pub const MAIN: &str = "agent-sandbox";
/// Other names of the same program.
pub const OTHER_NAMES: [&str; 2] = ["agent-sandbox-controller", "sandbox-router"];
pub const RUNTIME: &str = "sandboxd";

/// Shells with completions, and the name of the file by which each finds them.
const COMPLETIONS: [(&str, &str); 3] = [
    ("bash", "agent-sandbox.bash"),
    ("zsh", "_agent-sandbox"),
    ("fish", "agent-sandbox.fish"),
];

impl Run<'_> {
    pub fn programs(&self, target: Target) -> PathBuf {
        self.out.join("bin").join(target.triple())
    }
}

/// Compiles the programs of every target.
pub fn build(run: &Run<'_>, target_directory: &Path) -> anyhow::Result<()> {
    let toolchain = Toolchain::install(&run.arguments.targets, run.root)?;
    for target in &run.arguments.targets {
        println!("-- building for {}", target.triple());
        let status = Command::new("cargo")
            .current_dir(run.root)
            .args(["build", "--locked", "--package", MAIN, "--bin", MAIN])
            .args(["--profile", &run.arguments.profile])
            .args(["--target", target.triple()])
            .env("CARGO_TARGET_DIR", target_directory)
            .env(
                "CARGO_ENCODED_RUSTFLAGS",
                flags(run.root, target_directory)?,
            )
            .env("CARGO_INCREMENTAL", "0")
            .env("SOURCE_DATE_EPOCH", run.version.epoch.to_string())
            .env("AGENT_SANDBOX_GIT_COMMIT", commit(run))
            .env("AGENT_SANDBOX_BUILD_DATE", &run.version.date)
            .envs(toolchain.environment(*target))
            .status()
            .context("cannot run cargo")?;
        ensure!(
            status.success(),
            "cargo build for {}: {status}",
            target.triple()
        );
        let profile = match run.arguments.profile.as_str() {
            "dev" => "debug",
            other => other,
        };
        let built = target_directory.join(target.triple()).join(profile);
        // The runtime that the main program carries inside itself, which its build script has built.
        let guest = target_directory
            .join("guest")
            .join(target.triple())
            .join("guest");
        install(run, *target, &built.join(MAIN), &guest.join(RUNTIME))?;
    }
    Ok(())
}

fn commit(run: &Run<'_>) -> String {
    let dirty = if run.version.is_dirty { "-dirty" } else { "" };
    format!("{}{dirty}", run.version.commit)
}

/// Renames the paths of this machine, which panics and debug information would carry.
fn flags(root: &Path, target_directory: &Path) -> anyhow::Result<OsString> {
    let home = std::env::var_os("CARGO_HOME").map(PathBuf::from);
    let home = match home {
        Some(home) => home,
        None => PathBuf::from(std::env::var_os("HOME").context("HOME is not set")?).join(".cargo"),
    };
    let mut flags = OsString::from("-Ctarget-feature=+crt-static");
    // The last that matches holds: the target directory may lie in the checkout.
    for (path, name) in [
        (home.as_path(), "/cargo"),
        (root, "/source"),
        (target_directory, "/target"),
    ] {
        flags.push("\u{1f}--remap-path-prefix=");
        flags.push(path);
        flags.push(format!("={name}"));
    }
    Ok(flags)
}

/// Takes the programs of an earlier run.
pub fn copy(run: &Run<'_>, directory: &Path) -> anyhow::Result<()> {
    for target in &run.arguments.targets {
        let from = directory.join(target.triple());
        install(run, *target, &from.join(MAIN), &from.join(RUNTIME))?;
    }
    Ok(())
}

fn install(run: &Run<'_>, target: Target, main: &Path, runtime: &Path) -> anyhow::Result<()> {
    let directory = run.programs(target);
    fs::create_dir_all(&directory)?;
    let put = |from: &Path, name: &str| -> anyhow::Result<()> {
        fs::copy(from, directory.join(name))
            .map(drop)
            .with_context(|| format!("copying {}", from.display()))
    };
    put(main, MAIN)?;
    put(runtime, RUNTIME)?;
    for name in OTHER_NAMES {
        fs::hard_link(directory.join(MAIN), directory.join(name))?;
    }
    for name in [MAIN, RUNTIME] {
        ensure_static(&directory.join(name))?;
    }
    Ok(())
}

/// Fails unless the ELF file names no interpreter.
fn ensure_static(program: &Path) -> anyhow::Result<()> {
    let bytes = fs::read(program)?;
    ensure!(
        bytes.starts_with(b"\x7fELF"),
        "{} is no program",
        program.display()
    );
    ensure!(
        !has_interpreter(&bytes).unwrap_or(true),
        "{} is linked dynamically: it would need the C library of another machine",
        program.display()
    );
    Ok(())
}

/// Whether a 64-bit little-endian ELF file has a program header of type `PT_INTERP`.
fn has_interpreter(elf: &[u8]) -> Option<bool> {
    const PT_INTERP: usize = 3;
    let number = |at: usize, bytes: usize| -> Option<usize> {
        let mut wide = [0; 8];
        wide[..bytes].copy_from_slice(elf.get(at..at + bytes)?);
        usize::try_from(u64::from_le_bytes(wide)).ok()
    };
    let (offset, size, count) = (number(32, 8)?, number(54, 2)?, number(56, 2)?);
    for index in 0..count {
        if number(offset + index * size, 4)? == PT_INTERP {
            return Some(true);
        }
    }
    Some(false)
}

/// The command that runs a program of the target on this machine.
fn runner(target: Target, program: &Path) -> anyhow::Result<Command> {
    if target.is_native() {
        return Ok(Command::new(program));
    }
    let emulator = format!("qemu-{}-static", target.machine());
    let found = Command::new(&emulator).arg("--version").output();
    if !found.is_ok_and(|output| output.status.success()) {
        bail!(
            "{emulator} runs the programs for {} once: install Debian's package qemu-user-static, or leave the target out",
            target.machine()
        );
    }
    let mut command = Command::new(emulator);
    command.arg(program);
    Ok(command)
}

fn output(mut command: Command) -> anyhow::Result<Vec<u8>> {
    let shown = format!("{command:?}");
    let output = command
        .output()
        .with_context(|| format!("cannot run {shown}"))?;
    ensure!(
        output.status.success(),
        "{shown}: {}: {}",
        output.status,
        String::from_utf8_lossy(&output.stderr)
    );
    Ok(output.stdout)
}

/// Every program starts, and says from which commit it is.
pub fn smoke_test(run: &Run<'_>) -> anyhow::Result<()> {
    for target in &run.arguments.targets {
        let directory = run.programs(*target);
        let answer = |name: &str, arguments: &[&str]| -> anyhow::Result<String> {
            let mut command = runner(*target, &directory.join(name))?;
            command.args(arguments);
            Ok(String::from_utf8(output(command)?)?)
        };
        let version = answer(MAIN, &["--version"])?;
        ensure!(
            version.contains(&run.version.commit),
            "{} for {} is not of commit {}: {version}",
            MAIN,
            target.triple(),
            run.version.commit
        );
        ensure!(
            answer(MAIN, &["--help"])?.contains("sandboxes"),
            "--help is empty"
        );
        ensure!(
            answer(OTHER_NAMES[0], &["--help"])?.contains("--leader-elect"),
            "agent-sandbox-controller is not the controller"
        );
        let router = answer(OTHER_NAMES[1], &["--version"])?;
        ensure!(router.starts_with("sandbox-router "), "{router}");
        ensure!(
            answer(RUNTIME, &["--version"])?.starts_with("sandboxd "),
            "sandboxd has no version"
        );
        // The embedded manifests: the program reads its own data.
        ensure!(
            answer(MAIN, &["generate", "crds"])?.contains("kind: CustomResourceDefinition"),
            "generate crds is empty"
        );
        println!("-- {}: {}", target.triple(), version.trim());
    }
    Ok(())
}

/// Completions and manual pages, as the program writes them.
pub fn write_documentation(run: &Run<'_>) -> anyhow::Result<()> {
    let target = run.arguments.targets.iter().copied();
    let target = target
        .clone()
        .find(|target| target.is_native())
        .or_else(|| target.clone().next())
        .context("no target")?;
    let program = run.programs(target).join(MAIN);
    let completions = run.out.join("completions");
    fs::create_dir_all(&completions)?;
    for (shell, file) in COMPLETIONS {
        let mut command = runner(target, &program)?;
        command.args(["completions", shell]);
        fs::write(completions.join(file), output(command)?)?;
    }
    let manual = run.out.join("man");
    fs::create_dir_all(&manual)?;
    let mut command = runner(target, &program)?;
    command.arg("man-pages").arg(&manual);
    output(command)?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn programs_with_an_interpreter_are_recognised() {
        let own = fs::read(std::env::current_exe().unwrap()).unwrap();
        assert_eq!(has_interpreter(&own), Some(true));
        assert_eq!(has_interpreter(b"\x7fELF"), None);
    }
}

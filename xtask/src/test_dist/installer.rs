//! `install.sh` against a server that is honest, and against servers that are not.

use std::fs;
use std::path::Path;
use std::process::{Command, Output};

use anyhow::{Context, ensure};

use super::Release;
use super::http_server::Server;

pub fn check(release: &Release<'_>) -> anyhow::Result<()> {
    installs_from_a_server(release)?;
    installs_from_its_own_directory(release)?;
    refuses(release, "tampered program", |path, mut bytes| {
        if path.ends_with("/agent-sandbox") {
            let middle = bytes.len() / 2;
            bytes[middle] ^= 1;
        }
        Some(bytes)
    })?;
    refuses(release, "truncated program", |path, mut bytes| {
        if path.ends_with("/agent-sandbox") {
            bytes.truncate(bytes.len() / 2);
        }
        Some(bytes)
    })?;
    refuses(release, "missing program", |path, bytes| {
        (!path.ends_with("/agent-sandbox")).then_some(bytes)
    })?;
    refuses(release, "missing checksums", |path, bytes| {
        (path != "SHA256SUMS").then_some(bytes)
    })?;
    refuses(release, "checksums without the program", |path, bytes| {
        Some(if path == "SHA256SUMS" {
            Vec::new()
        } else {
            bytes
        })
    })
}

fn install(script: &Path, arguments: &[&str], home: &Path) -> anyhow::Result<Output> {
    Command::new("sh")
        .arg(script)
        .args(arguments)
        .env("HOME", home)
        .env_remove("AGENT_SANDBOX_RELEASE")
        .env_remove("AGENT_SANDBOX_BIN")
        .output()
        .context("cannot run sh")
}

fn ensure_installed(release: &Release<'_>, to: &Path, output: &Output) -> anyhow::Result<()> {
    let stdout = String::from_utf8_lossy(&output.stdout);
    ensure!(
        output.status.success(),
        "{}: {stdout}{}",
        output.status,
        String::from_utf8_lossy(&output.stderr)
    );
    ensure!(
        stdout.contains("agent-sandbox run -- "),
        "no next command in {stdout}"
    );
    let program = to.join("agent-sandbox");
    ensure!(
        fs::read(&program)? == fs::read(release.program()?)?,
        "another program was installed"
    );
    let controller = to.join("agent-sandbox-controller");
    let help = super::output(&controller.to_string_lossy(), &["--help"])?;
    ensure!(help.contains("--leader-elect"), "{help}");
    ensure!(
        fs::read_dir(to)?.count() == 3,
        "temporary files are left in {}",
        to.display()
    );
    Ok(())
}

fn installs_from_a_server(release: &Release<'_>) -> anyhow::Result<()> {
    let server = Server::start(&release.directory, |_, bytes| Some(bytes))?;
    let home = tempfile::tempdir()?;
    // As `curl URL/install.sh | sh -s -- --from URL` has it: a script without a directory of its own.
    let script = home.path().join("downloaded.sh");
    fs::copy(release.directory.join("install.sh"), &script)?;
    let to = home.path().join("bin");
    let arguments = ["--from", &server.url(), "--to", &to.to_string_lossy()];
    let output = install(&script, &arguments, home.path())?;
    ensure_installed(release, &to, &output)?;
    // Again, over what is there.
    let output = install(&script, &arguments, home.path())?;
    ensure_installed(release, &to, &output)?;
    let without_release = install(&script, &[], home.path())?;
    let complaint = String::from_utf8_lossy(&without_release.stderr).into_owned();
    ensure!(
        !without_release.status.success() && complaint.contains("--from"),
        "{complaint}"
    );
    Ok(())
}

fn installs_from_its_own_directory(release: &Release<'_>) -> anyhow::Result<()> {
    let home = tempfile::tempdir()?;
    let to = home.path().join("a b");
    let script = release.directory.join("install.sh");
    let output = install(&script, &["--to", &to.to_string_lossy()], home.path())?;
    ensure_installed(release, &to, &output)
}

fn refuses(
    release: &Release<'_>,
    what: &str,
    change: impl Fn(&str, Vec<u8>) -> Option<Vec<u8>> + Send + Sync + 'static,
) -> anyhow::Result<()> {
    let server = Server::start(&release.directory, change)?;
    let home = tempfile::tempdir()?;
    let to = home.path().join("bin");
    fs::create_dir(&to)?;
    fs::write(to.join("agent-sandbox"), "the version before")?;
    let script = release.directory.join("install.sh");
    let arguments = ["--from", &server.url(), "--to", &to.to_string_lossy()];
    let output = install(&script, &arguments, home.path())?;
    let stderr = String::from_utf8_lossy(&output.stderr);
    ensure!(!output.status.success(), "{what}: was installed");
    ensure!(
        stderr.contains("install.sh: "),
        "{what}: no reason in {stderr}"
    );
    let present = fs::read_to_string(to.join("agent-sandbox"))?;
    ensure!(
        present == "the version before" && fs::read_dir(&to)?.count() == 1,
        "{what}: something was changed"
    );
    Ok(())
}

//! The Debian package, written without dpkg: an `ar` archive of a version, a control archive and a data archive.

use std::fs;
use std::io::Write as _;
use std::path::Path;

use anyhow::Context;
use images::write::{Content, Naming, Tree, gzip};

use super::binaries::{MAIN, OTHER_NAMES};
use super::{Run, Target};

/// Files of `deploy/debian`, where they are installed, and their mode.
const FILES: [(&str, &str, u32); 3] = [
    (
        "agent-sandbox.service",
        "usr/lib/systemd/system/agent-sandbox.service",
        0o644,
    ),
    ("default", "etc/default/agent-sandbox", 0o644),
    ("copyright", "usr/share/doc/agent-sandbox/copyright", 0o644),
];
const SCRIPTS: [&str; 3] = ["postinst", "prerm", "postrm"];
/// Files that the administrator may change, and that an upgrade keeps.
const CONFIGURATION_FILES: &str = "/etc/default/agent-sandbox\n";

/// Completions in `completions/`, and where each shell looks for them.
const COMPLETIONS: [(&str, &str); 3] = [
    (
        "agent-sandbox.bash",
        "usr/share/bash-completion/completions/agent-sandbox",
    ),
    (
        "_agent-sandbox",
        "usr/share/zsh/vendor-completions/_agent-sandbox",
    ),
    (
        "agent-sandbox.fish",
        "usr/share/fish/vendor_completions.d/agent-sandbox.fish",
    ),
];

pub fn file_name(version: &str, target: Target) -> String {
    format!("{MAIN}_{version}_{}.deb", target.architecture())
}

pub fn write(run: &Run<'_>, target: Target) -> anyhow::Result<()> {
    let directory = run.out.join("deb");
    fs::create_dir_all(&directory)?;
    let data = data(run, target)?;
    let control = control(run, target, data.content_bytes()?)?;
    let bytes = archive(
        run.version.epoch,
        &[
            ("debian-binary", b"2.0\n".to_vec()),
            ("control.tar.gz", compressed(&control)?),
            ("data.tar.gz", compressed(&data)?),
        ],
    );
    let path = directory.join(file_name(&run.version.package(), target));
    fs::write(&path, bytes).with_context(|| format!("writing {}", path.display()))?;
    println!("-- {}", path.display());
    Ok(())
}

/// What is installed.
fn data(run: &Run<'_>, target: Target) -> anyhow::Result<Tree> {
    let mut tree = Tree::new(run.version.epoch);
    let program = run.programs(target).join(MAIN);
    tree.file("usr/bin/agent-sandbox", 0o755, Content::Path(program))?;
    for name in OTHER_NAMES {
        tree.symlink(&format!("usr/bin/{name}"), MAIN)?;
    }
    let packaging = run.root.join("deploy/debian");
    for (file, path, mode) in FILES {
        tree.file(path, mode, Content::Bytes(read(&packaging.join(file))?))?;
    }
    for (file, path) in COMPLETIONS {
        let content = read(&run.out.join("completions").join(file))?;
        tree.file(path, 0o644, Content::Bytes(content))?;
    }
    let manual = run.out.join("man");
    for entry in fs::read_dir(&manual)? {
        let entry = entry?;
        let name = entry.file_name().to_string_lossy().into_owned();
        let mut encoder = gzip(Vec::new());
        encoder.write_all(&read(&entry.path())?)?;
        let path = format!("usr/share/man/man1/{name}.gz");
        tree.file(&path, 0o644, Content::Bytes(encoder.finish()?))?;
    }
    let bill = format!("agent-sandbox-{}.spdx.json", target.machine());
    let content = read(&run.out.join("sbom").join(bill))?;
    tree.file(
        "usr/share/doc/agent-sandbox/agent-sandbox.spdx.json",
        0o644,
        Content::Bytes(content),
    )?;
    Ok(tree)
}

fn control(run: &Run<'_>, target: Target, installed_bytes: u64) -> anyhow::Result<Tree> {
    let fields = format!(
        "Package: agent-sandbox\n\
         Version: {}\n\
         Architecture: {}\n\
         Maintainer: The agent-sandbox authors\n\
         Installed-Size: {}\n\
         Recommends: nftables\n\
         Suggests: python3, runsc, runc\n\
         Section: admin\n\
         Priority: optional\n\
         Description: isolated, stateful sandboxes for AI agents\n\
         \x20A sandbox is a pod with a stable identity in which an agent runs untrusted code.\n\
         \x20This package has the whole system in one static program: Kubernetes API server,\n\
         \x20controllers, node and router, and the command line.\n",
        run.version.package(),
        target.architecture(),
        installed_bytes.div_ceil(1024),
    );
    let mut tree = Tree::new(run.version.epoch);
    tree.file("control", 0o644, Content::Bytes(fields.into_bytes()))?;
    let files = Content::Bytes(CONFIGURATION_FILES.into());
    tree.file("conffiles", 0o644, files)?;
    for script in SCRIPTS {
        let content = read(&run.root.join("deploy/debian").join(script))?;
        tree.file(script, 0o755, Content::Bytes(content))?;
    }
    Ok(tree)
}

fn read(path: &Path) -> anyhow::Result<Vec<u8>> {
    fs::read(path).with_context(|| format!("reading {}", path.display()))
}

fn compressed(tree: &Tree) -> anyhow::Result<Vec<u8>> {
    let encoder = tree.write(gzip(Vec::new()), Naming::DotSlash)?;
    Ok(encoder.finish()?)
}

/// The common `ar` format: a magic line, then a header of 60 bytes and the content for each member, at even offsets.
fn archive(epoch: u64, members: &[(&str, Vec<u8>)]) -> Vec<u8> {
    let mut bytes = b"!<arch>\n".to_vec();
    for (name, content) in members {
        let header = format!(
            "{name:<16}{epoch:<12}{:<6}{:<6}{:<8}{:<10}`\n",
            0,
            0,
            "100644",
            content.len()
        );
        bytes.extend_from_slice(header.as_bytes());
        bytes.extend_from_slice(content);
        if content.len() % 2 == 1 {
            bytes.push(b'\n');
        }
    }
    bytes
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn members_have_headers_of_sixty_bytes_at_even_offsets() {
        let bytes = archive(
            1_795_000_000,
            &[
                ("debian-binary", b"2.0\n".to_vec()),
                ("odd", b"x".to_vec()),
                ("end", Vec::new()),
            ],
        );
        let text = String::from_utf8(bytes).unwrap();
        assert!(text.starts_with(
            "!<arch>\ndebian-binary   1795000000  0     0     100644  4         `\n2.0\nodd "
        ));
        assert_eq!(text.len(), 8 + 3 * 60 + 4 + 2);
        assert_eq!(text.find("end ").unwrap() % 2, 0);
    }
}

//! `agent-sandbox cp`: files and directories into and out of a sandbox.
//!
//! It uses the sandbox's file API, so it needs no `tar` inside. File names from the sandbox are not trusted (path traversal): a name
//! with a separator, or `..`, ends the copy before anything is written under it. Permissions are not copied.

use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Duration;

use anyhow::{Context, bail};
use clap::Args;
use futures::{StreamExt, TryStreamExt};
use sdk::EntryKind;
use sdk::files::{FileStream, Files};
use tokio::io::AsyncWriteExt;
use tokio_util::io::ReaderStream;

use super::{connect, explain};
use crate::connection;
use crate::output::bytes;
use crate::terminal::Progress;

/// How much is read and sent at a time.
const PIECE: usize = 256 * 1024;
/// No time limit for an upload that makes progress: the router ends idle ones.
const LONGEST: Duration = Duration::from_secs(24 * 3600);
const EXAMPLES: &str = "Examples:
  agent-sandbox cp data.csv mine:
  agent-sandbox cp ./project mine:src
  agent-sandbox cp mine:results/out.json .";
/// The depth limit, against a sandbox that reports an endless tree.
const DEEPEST: usize = 64;

/// Copy files and directories into a sandbox, or out of it
///
/// One of the two places is in a sandbox: NAME:PATH, with the name of its claim and a path relative to the sandbox's working
/// directory. Directories are copied with all they hold; permissions are not carried over.
#[derive(Debug, Args)]
#[command(after_help = EXAMPLES)]
pub struct CopyArguments {
    /// From where
    source: String,

    /// To where
    destination: String,

    #[command(flatten)]
    connection: connection::Arguments,
}

/// One end of a copy.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Place {
    Here(PathBuf),
    Sandbox { claim: String, path: String },
}

impl Place {
    /// `NAME:PATH` is in a sandbox, unless the part before the colon cannot be the name of a claim.
    fn parse(text: &str) -> Self {
        match text.split_once(':') {
            Some((claim, path)) if claim.parse::<api::names::ObjectName>().is_ok() => {
                Self::Sandbox {
                    claim: claim.to_owned(),
                    path: path.to_owned(),
                }
            }
            _ => Self::Here(PathBuf::from(text)),
        }
    }
}

pub async fn copy(arguments: CopyArguments) -> anyhow::Result<ExitCode> {
    let source = Place::parse(&arguments.source);
    let destination = Place::parse(&arguments.destination);
    let (claim, upload) = match (&source, &destination) {
        (Place::Here(_), Place::Sandbox { claim, .. }) => (claim, true),
        (Place::Sandbox { claim, .. }, Place::Here(_)) => (claim, false),
        (Place::Here(_), Place::Here(_)) => bail!(
            "neither {} nor {} is in a sandbox: write NAME:PATH with the name of a claim",
            arguments.source,
            arguments.destination
        ),
        _ => bail!("both places are in a sandbox: copy by way of this machine"),
    };
    let connected = connect(&arguments.connection).await?;
    let sandbox = explain::attach(&connected, claim).await?;
    let mut transfer = Transfer {
        files: sandbox.files(),
        progress: Progress::begin(),
        copied: Copied::default(),
    };
    let result = match (source, destination, upload) {
        (Place::Here(from), Place::Sandbox { path, .. }, true) => {
            transfer.upload(&from, &path).await
        }
        (Place::Sandbox { path, .. }, Place::Here(to), false) => {
            transfer.download(&path, &to).await
        }
        _ => Ok(()),
    };
    transfer.progress.finish();
    result?;
    let Copied { files, bytes: size } = transfer.copied;
    let noun = if files == 1 { "file" } else { "files" };
    eprintln!("{files} {noun}, {}", bytes(size));
    Ok(ExitCode::SUCCESS)
}

#[derive(Debug, Default)]
struct Copied {
    files: u64,
    bytes: u64,
}

struct Transfer {
    files: Files,
    progress: Progress,
    copied: Copied,
}

impl Transfer {
    async fn upload(&mut self, from: &Path, to: &str) -> anyhow::Result<()> {
        let described = || format!("cannot read {}", from.display());
        let metadata = tokio::fs::metadata(from).await.with_context(described)?;
        let name = base_name(from).await?;
        let target = if self.is_directory(to).await? {
            join(to, &name)
        } else {
            to.to_owned()
        };
        if metadata.is_dir() {
            self.upload_directory(from.to_owned(), target).await
        } else {
            self.upload_file(from, &target, metadata.len()).await
        }
    }

    async fn upload_directory(&mut self, from: PathBuf, to: String) -> anyhow::Result<()> {
        let mut waiting = vec![(from, to)];
        while let Some((directory, target)) = waiting.pop() {
            let described = || format!("cannot read {}", directory.display());
            let mut entries = tokio::fs::read_dir(&directory)
                .await
                .with_context(described)?;
            let mut empty = true;
            while let Some(entry) = entries.next_entry().await.with_context(described)? {
                empty = false;
                let path = entry.path();
                let name = entry.file_name();
                let name = name
                    .to_str()
                    .with_context(|| format!("{} is not a name in UTF-8", path.display()))?;
                let target = join(&target, name);
                // A symbolic link to a directory may form a cycle, or lead outside the tree.
                if entry.file_type().await.with_context(described)?.is_dir() {
                    waiting.push((path, target));
                    continue;
                }
                match tokio::fs::metadata(&path).await {
                    Ok(metadata) if metadata.is_file() => {
                        self.upload_file(&path, &target, metadata.len()).await?;
                    }
                    _ => self.note(&format!("{} is not a file and left out", path.display())),
                }
            }
            // Directories that are not empty are created with their first file.
            if empty {
                self.make_directory(&directory, &target).await?;
            }
        }
        Ok(())
    }

    async fn make_directory(&self, from: &Path, to: &str) -> anyhow::Result<()> {
        match self.files.make_directory(to).await {
            Err(error) if error.http_status() == Some(http::StatusCode::NOT_FOUND) => {
                self.note(&format!(
                    "{} is empty and left out: the runtime of this sandbox cannot make directories",
                    from.display()
                ));
                Ok(())
            }
            made => Ok(made?),
        }
    }

    async fn upload_file(&mut self, from: &Path, to: &str, size: u64) -> anyhow::Result<()> {
        let file = tokio::fs::File::open(from).await;
        let file = file.with_context(|| format!("cannot read {}", from.display()))?;
        let shown = from.display().to_string();
        let mut meter = Meter::new(self.progress, shown, Some(size));
        let content = ReaderStream::with_capacity(file, PIECE).inspect_ok(move |piece| {
            meter.advance(piece.len() as u64);
        });
        let options = sdk::CallOptions::timeout(LONGEST);
        self.files
            .write_stream(to, content.boxed(), &options)
            .await?;
        self.copied.files += 1;
        self.copied.bytes += size;
        Ok(())
    }

    async fn download(&mut self, from: &str, to: &Path) -> anyhow::Result<()> {
        let name = from
            .trim_end_matches('/')
            .rsplit('/')
            .next()
            .unwrap_or_default();
        let into_directory = to.is_dir() || to.to_string_lossy().ends_with('/');
        let target = if into_directory && is_plain(name) {
            to.join(name)
        } else {
            to.to_owned()
        };
        if self.is_directory(from).await? {
            return self.download_directory(from.to_owned(), target).await;
        }
        if target.is_dir() {
            bail!("{} is a directory", target.display());
        }
        self.download_file(from, &target).await
    }

    async fn download_directory(&mut self, from: String, to: PathBuf) -> anyhow::Result<()> {
        let mut waiting = vec![(from, to, 0)];
        while let Some((directory, target, depth)) = waiting.pop() {
            if depth > DEEPEST {
                bail!("{directory} is more than {DEEPEST} directories deep");
            }
            let made = tokio::fs::create_dir_all(&target).await;
            made.with_context(|| format!("cannot make {}", target.display()))?;
            for entry in self.files.list(&directory).await? {
                if !is_plain(&entry.name) {
                    bail!(
                        "the sandbox has a file called {:?}, which cannot be one",
                        entry.name
                    );
                }
                let (source, target) = (join(&directory, &entry.name), target.join(&entry.name));
                match entry.kind {
                    EntryKind::Directory => waiting.push((source, target, depth + 1)),
                    EntryKind::File => self.download_file(&source, &target).await?,
                }
            }
        }
        Ok(())
    }

    async fn download_file(&mut self, from: &str, to: &Path) -> anyhow::Result<()> {
        let content = self.files.read_stream(from).await?;
        let described = || format!("cannot write {}", to.display());
        // Through a symbolic link, as `cp` writes.
        let to = tokio::fs::canonicalize(to)
            .await
            .unwrap_or_else(|_| to.to_owned());
        let mut meter = Meter::new(self.progress, from.to_owned(), content.size());
        match tokio::fs::metadata(&to).await {
            // A device or a pipe must not be replaced by a file.
            Ok(metadata) if !metadata.is_file() => {
                let device = tokio::fs::File::options().write(true).open(&to).await;
                receive(content, device.with_context(described)?, &mut meter)
                    .await
                    .with_context(described)?;
            }
            _ => replace(content, &to, &mut meter)
                .await
                .with_context(described)?,
        }
        self.copied.files += 1;
        self.copied.bytes += meter.passed;
        Ok(())
    }

    /// Whether a path in the sandbox is a directory.
    async fn is_directory(&self, path: &str) -> anyhow::Result<bool> {
        if matches!(path, "" | ".") || path.ends_with('/') {
            return Ok(true);
        }
        match self.files.list(path).await {
            Ok(_) => Ok(true),
            Err(error)
                if error
                    .http_status()
                    .is_some_and(|status| status.is_client_error()) =>
            {
                Ok(false)
            }
            Err(error) => Err(error.into()),
        }
    }

    fn note(&self, sentence: &str) {
        self.progress.finish();
        eprintln!("{}", crate::visible::line(sentence));
    }
}

/// Writes a temporary file beside the target and renames it, so that an interrupted copy leaves no partial file.
async fn replace(content: FileStream, to: &Path, meter: &mut Meter) -> anyhow::Result<()> {
    let parent = to.parent().filter(|parent| !parent.as_os_str().is_empty());
    let parent = parent.unwrap_or(Path::new("."));
    tokio::fs::create_dir_all(parent).await?;
    let temporary = tempfile::Builder::new()
        .permissions(std::os::unix::fs::PermissionsExt::from_mode(0o666))
        .tempfile_in(parent)?;
    let (file, temporary) = temporary.into_parts();
    receive(content, tokio::fs::File::from_std(file), meter).await?;
    temporary.persist(to)?;
    Ok(())
}

async fn receive(
    mut content: FileStream,
    mut file: tokio::fs::File,
    meter: &mut Meter,
) -> anyhow::Result<()> {
    while let Some(piece) = content.next().await? {
        file.write_all(&piece).await?;
        meter.advance(piece.len() as u64);
    }
    Ok(file.flush().await?)
}

/// Shows the progress of a file from time to time.
struct Meter {
    progress: Progress,
    name: String,
    size: Option<u64>,
    passed: u64,
    shown: u64,
}

impl Meter {
    fn new(progress: Progress, name: String, size: Option<u64>) -> Self {
        Self {
            progress,
            name,
            size,
            passed: 0,
            shown: 0,
        }
    }

    fn advance(&mut self, length: u64) {
        /// The line is rewritten after this many bytes.
        const STEP: u64 = 1024 * 1024;
        self.passed += length;
        if self.passed - self.shown >= STEP {
            self.shown = self.passed;
            self.progress.say(&format!(
                "{} {}",
                self.name,
                fraction(self.passed, self.size)
            ));
        }
    }
}

fn fraction(passed: u64, size: Option<u64>) -> String {
    match size {
        Some(size @ 1..) => format!(
            "{} of {}, {} %",
            bytes(passed),
            bytes(size),
            passed.saturating_mul(100) / size
        ),
        _ => bytes(passed),
    }
}

/// The last part of a local path; of `.` and `..` that of the directory they stand for.
async fn base_name(path: &Path) -> anyhow::Result<String> {
    let whole = match path.file_name() {
        Some(_) => path.to_owned(),
        None => tokio::fs::canonicalize(path).await?,
    };
    let name = whole.file_name().and_then(|name| name.to_str());
    name.map(str::to_owned)
        .with_context(|| format!("{} has no name in UTF-8 to copy it under", path.display()))
}

fn join(directory: &str, name: &str) -> String {
    match directory.trim_end_matches('/') {
        "" if directory.starts_with('/') => format!("/{name}"),
        "" | "." => name.to_owned(),
        directory => format!("{directory}/{name}"),
    }
}

fn is_plain(name: &str) -> bool {
    !matches!(name, "" | "." | "..") && !name.contains(['/', '\0'])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_place_with_a_claims_name_before_a_colon_is_in_a_sandbox() {
        let there = |claim: &str, path: &str| Place::Sandbox {
            claim: claim.into(),
            path: path.into(),
        };
        assert_eq!(Place::parse("mine:a/b"), there("mine", "a/b"));
        assert_eq!(Place::parse("mine:"), there("mine", ""));
        assert_eq!(Place::parse("mine:a:b"), there("mine", "a:b"));
        assert_eq!(Place::parse("my.claim:x"), there("my.claim", "x"));
        for here in [
            "a/b",
            "./a:b",
            "/tmp/a:b",
            ":x",
            "../mine:x",
            "..:x",
            "File:x",
        ] {
            assert_eq!(Place::parse(here), Place::Here(here.into()), "{here}");
        }
    }

    #[test]
    fn paths_in_the_sandbox_are_joined() {
        let table = [
            ("", "x"),
            (".", "x"),
            ("a", "a/x"),
            ("a/", "a/x"),
            ("/", "/x"),
        ];
        for (directory, expected) in table {
            assert_eq!(join(directory, "x"), expected, "{directory:?}");
        }
    }

    #[test]
    fn names_that_a_sandbox_may_not_have_are_known() {
        for name in ["", ".", "..", "a/b", "../x", "a\0"] {
            assert!(!is_plain(name), "{name:?}");
        }
        assert!(is_plain("..x") && is_plain("ä b"));
    }

    #[test]
    fn progress_is_shown_in_bytes_and_per_cent() {
        assert_eq!(fraction(512, Some(1024)), "512 B of 1.0 KiB, 50 %");
        assert_eq!(fraction(2048, None), "2.0 KiB");
    }
}

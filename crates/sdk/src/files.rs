//! The `files` engine: write, read, list, exists, stat, delete, rename, and directories.
//!
//! All operations are idempotent and therefore retried, except for streamed content, which can be sent only once, and
//! for renaming.

use std::io;

use bytes::Bytes;
use futures::{Stream, StreamExt};
use http::Method;
use http_body_util::{BodyExt, StreamBody};
use hyper::body::{Frame, Incoming};
use k8s_openapi::jiff::Timestamp;
use serde::{Deserialize, Deserializer};
use tokio_util::task::task_tracker::TaskTrackerToken;
use tracing::Span;

use crate::connector::{Call, CallOptions, Connector};
use crate::encoding::{Form, is_plain_name, segment};
use crate::error::{Error, ErrorKind, Key};
use crate::sandbox::Sandbox;

/// The largest response that is not a file, in bytes.
const MAX_METADATA_RESPONSE_SIZE: u64 = 8 * 1024 * 1024;

/// The kind of a directory entry.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum EntryKind {
    File,
    Directory,
}

/// An entry of a directory.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub struct FileEntry {
    pub name: String,
    pub size: u64,
    pub kind: EntryKind,
    /// Seconds since the Unix epoch.
    pub modified: f64,
}

/// Metadata of a file or directory.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct FileStat {
    /// The last component of the path.
    pub name: String,
    pub kind: EntryKind,
    pub size: u64,
    /// With a resolution of one second.
    pub modified: Timestamp,
    /// The permission bits, for example `0o644`.
    pub mode: u32,
}

#[derive(Deserialize)]
struct Inspected {
    name: String,
    #[serde(rename = "type")]
    kind: EntryKind,
    size: u64,
    #[serde(deserialize_with = "timestamp")]
    modified_at: Timestamp,
    mode: String,
}

fn timestamp<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Timestamp, D::Error> {
    let text = String::deserialize(deserializer)?;
    text.parse().map_err(serde::de::Error::custom)
}

#[derive(Deserialize)]
struct ListedEntry {
    name: String,
    #[serde(default)]
    size: u64,
    #[serde(rename = "type")]
    kind: String,
    #[serde(default)]
    mod_time: f64,
}

impl ListedEntry {
    /// Devices, sockets and other special files are omitted.
    fn into_entry(self) -> Option<FileEntry> {
        let kind = match self.kind.as_str() {
            "file" => EntryKind::File,
            "directory" => EntryKind::Directory,
            _ => return None,
        };
        Some(FileEntry {
            name: self.name,
            size: self.size,
            kind,
            modified: self.mod_time,
        })
    }
}

#[derive(Deserialize)]
struct Existence {
    exists: bool,
}

/// Copies files into and out of a sandbox. Paths are relative to the sandbox's base directory, and cannot leave it. See
/// [`Sandbox::files`].
#[derive(Clone, Debug)]
pub struct Files {
    sandbox: Sandbox,
}

/// A file's content as a stream.
#[derive(Debug)]
pub struct FileStream {
    key: Key,
    body: Incoming,
    size: Option<u64>,
    /// The stream counts as a running operation until it is dropped; terminating the sandbox waits for that.
    _running: TaskTrackerToken,
}

impl FileStream {
    /// The file's size, if the sandbox sent it.
    pub fn size(&self) -> Option<u64> {
        self.size
    }

    /// The next chunk, or `None` at the end.
    pub async fn next(&mut self) -> Result<Option<Bytes>, Error> {
        loop {
            match self.body.frame().await {
                None => return Ok(None),
                Some(Ok(frame)) => {
                    if let Ok(data) = frame.into_data() {
                        return Ok(Some(data));
                    }
                }
                Some(Err(cause)) => {
                    let kind = ErrorKind::Transport {
                        operation: "read",
                        cause: cause.into(),
                    };
                    return Err(Error::of(&self.key, kind));
                }
            }
        }
    }
}

impl Files {
    pub(crate) fn new(sandbox: Sandbox) -> Self {
        Self { sandbox }
    }

    /// Writes a file with this name into the base directory. The name must be a single path component.
    pub async fn write(&self, name: &str, content: impl AsRef<[u8]>) -> Result<(), Error> {
        self.write_with(name, content, &CallOptions::default())
            .await
    }

    pub async fn write_with(
        &self,
        name: &str,
        content: impl AsRef<[u8]>,
        options: &CallOptions,
    ) -> Result<(), Error> {
        if !is_plain_name(name) {
            let name = name.to_owned();
            return Err(Error::of(
                self.sandbox.key(),
                ErrorKind::InvalidFileName { name },
            ));
        }
        self.upload(name, content.as_ref(), options).await
    }

    /// Writes a file at this path. Missing directories are created. This requires a runtime that accepts paths, as this
    /// project's does; [`Files::write`] works with all of them.
    pub async fn write_path(&self, path: &str, content: impl AsRef<[u8]>) -> Result<(), Error> {
        self.upload(path, content.as_ref(), &CallOptions::default())
            .await
    }

    async fn upload(&self, path: &str, content: &[u8], options: &CallOptions) -> Result<(), Error> {
        let size = content.len() as u64;
        self.sandbox
            .operate("upload", |connector| async move {
                self.check_size(size)?;
                let span = Span::current();
                span.record("sandbox.file.path", path);
                span.record("sandbox.file.size", size);
                let form = Form::new(path);
                let call = Call {
                    body: form.whole(content),
                    content_type: Some(form.content_type()),
                    method: Method::POST,
                    ..self.call("upload", "upload".into(), options)
                };
                let answer = connector.send(call).await?;
                answer.bytes(MAX_METADATA_RESPONSE_SIZE).await.map(drop)
            })
            .await
    }

    /// Writes a file at this path from a stream. The content is not buffered, so it is sent only once. The limit for
    /// uploads applies.
    pub async fn write_stream<S>(
        &self,
        path: &str,
        content: S,
        options: &CallOptions,
    ) -> Result<(), Error>
    where
        S: Stream<Item = io::Result<Bytes>> + Send + 'static,
    {
        let limit = self.sandbox.options().max_upload_size;
        self.sandbox
            .operate("upload", |connector| async move {
                Span::current().record("sandbox.file.path", path);
                let form = Form::new(path);
                let (head, tail) = (form.head(), form.tail());
                let mut sent = 0_u64;
                let content = content.map(move |piece| {
                    let piece = piece?;
                    sent += piece.len() as u64;
                    if sent > limit {
                        let kind = ErrorKind::UploadTooLarge { size: sent, limit };
                        return Err(io::Error::other(kind));
                    }
                    Ok(piece)
                });
                let frames = futures::stream::once(async { Ok(head) })
                    .chain(content)
                    .chain(futures::stream::once(async { Ok(tail) }))
                    .map(|piece| piece.map(Frame::data));
                let call = Call {
                    content_type: Some(form.content_type()),
                    method: Method::POST,
                    ..self.call("upload", "upload".into(), options)
                };
                let body = StreamBody::new(frames).boxed_unsync();
                let answer = connector.send_stream(call, body).await?;
                answer.bytes(MAX_METADATA_RESPONSE_SIZE).await.map(drop)
            })
            .await
    }

    /// Reads a file.
    pub async fn read(&self, path: &str) -> Result<Bytes, Error> {
        self.read_with(path, &CallOptions::default()).await
    }

    pub async fn read_with(&self, path: &str, options: &CallOptions) -> Result<Bytes, Error> {
        let limit = self.sandbox.options().max_download_size;
        self.sandbox
            .operate("read", |connector| async move {
                let span = Span::current();
                span.record("sandbox.file.path", path);
                let endpoint = format!("download/{}", segment(path));
                let answer = connector.send(self.call("read", endpoint, options)).await?;
                let content = answer.bytes(limit).await?;
                span.record("sandbox.file.size", content.len());
                Ok(content)
            })
            .await
    }

    /// Reads a file of any size, chunk by chunk.
    pub async fn read_stream(&self, path: &str) -> Result<FileStream, Error> {
        let (answer, running) = self
            .sandbox
            .operate_on("read", |connector| async move {
                Span::current().record("sandbox.file.path", path);
                let endpoint = format!("download/{}", segment(path));
                connector
                    .send(self.call("read", endpoint, &CallOptions::default()))
                    .await
            })
            .await?;
        Ok(FileStream {
            key: self.sandbox.key().clone(),
            size: answer.content_length(),
            body: answer.into_body(),
            _running: running,
        })
    }

    /// Creates a directory and its missing parents. A directory that exists is a success. This requires a runtime with this
    /// operation, as this project's has; others respond with 404.
    pub async fn make_directory(&self, path: &str) -> Result<(), Error> {
        self.sandbox
            .operate("mkdir", |connector| async move {
                Span::current().record("sandbox.file.path", path);
                let endpoint = format!("mkdir/{}", segment(path));
                let call = Call {
                    method: Method::POST,
                    ..self.call("mkdir", endpoint, &CallOptions::default())
                };
                let answer = connector.send(call).await?;
                answer.bytes(MAX_METADATA_RESPONSE_SIZE).await.map(drop)
            })
            .await
    }

    /// Metadata of the file or directory at this path. This requires a runtime with this operation, as this project's has; others respond with 404.
    pub async fn stat(&self, path: &str) -> Result<FileStat, Error> {
        self.sandbox
            .operate("stat", |connector| async move {
                Span::current().record("sandbox.file.path", path);
                let endpoint = format!("v1/files/{}?stat=true", segment(path));
                let call = self.call("stat", endpoint, &CallOptions::default());
                let answer = connector.send(call).await?;
                let found: Inspected = answer.json(MAX_METADATA_RESPONSE_SIZE).await?;
                Ok(FileStat {
                    name: found.name,
                    kind: found.kind,
                    size: found.size,
                    modified: found.modified_at,
                    mode: u32::from_str_radix(&found.mode, 8).unwrap_or_default(),
                })
            })
            .await
    }

    /// Deletes a file, a link or an empty directory. If a response is lost the request is retried, and then finds nothing: 404 may
    /// mean that the first attempt succeeded. This requires a runtime of upstream's newer API, such as this project's.
    pub async fn delete(&self, path: &str) -> Result<(), Error> {
        self.remove(path, false).await
    }

    /// Deletes a directory and its contents, or whatever [`Files::delete`] deletes.
    pub async fn delete_recursively(&self, path: &str) -> Result<(), Error> {
        self.remove(path, true).await
    }

    async fn remove(&self, path: &str, recursive: bool) -> Result<(), Error> {
        self.sandbox
            .operate("delete", |connector| async move {
                Span::current().record("sandbox.file.path", path);
                let endpoint = format!("v1/files/{}?recursive={recursive}", segment(path));
                let call = Call {
                    method: Method::DELETE,
                    ..self.call("delete", endpoint, &CallOptions::default())
                };
                let answer = connector.send(call).await?;
                answer.bytes(MAX_METADATA_RESPONSE_SIZE).await.map(drop)
            })
            .await
    }

    /// Moves a file or directory to another path, atomically. A file there is replaced, and missing directories are created. It is
    /// tried once. This requires this project's runtime; others respond with 404 or 405.
    pub async fn rename(&self, from: &str, to: &str) -> Result<(), Error> {
        self.sandbox
            .operate("rename", |connector| async move {
                Span::current().record("sandbox.file.path", from);
                let endpoint = format!("v1/files/{}?rename_to={}", segment(from), segment(to));
                let once = CallOptions::default().with_max_attempts(1);
                let call = Call {
                    method: Method::POST,
                    ..self.call("rename", endpoint, &once)
                };
                let answer = connector.send(call).await?;
                answer.bytes(MAX_METADATA_RESPONSE_SIZE).await.map(drop)
            })
            .await
    }

    /// The files and directories in a directory.
    pub async fn list(&self, path: &str) -> Result<Vec<FileEntry>, Error> {
        self.list_with(path, &CallOptions::default()).await
    }

    pub async fn list_with(
        &self,
        path: &str,
        options: &CallOptions,
    ) -> Result<Vec<FileEntry>, Error> {
        self.sandbox
            .operate("list", |connector| async move {
                let span = Span::current();
                span.record("sandbox.file.path", path);
                let entries: Vec<ListedEntry> = self.ask(&connector, "list", path, options).await?;
                let entries: Vec<_> = entries
                    .into_iter()
                    .filter_map(ListedEntry::into_entry)
                    .collect();
                span.record("sandbox.file.count", entries.len());
                Ok(entries)
            })
            .await
    }

    /// Whether there is a file or directory at this path.
    pub async fn exists(&self, path: &str) -> Result<bool, Error> {
        self.exists_with(path, &CallOptions::default()).await
    }

    pub async fn exists_with(&self, path: &str, options: &CallOptions) -> Result<bool, Error> {
        self.sandbox
            .operate("exists", |connector| async move {
                let span = Span::current();
                span.record("sandbox.file.path", path);
                let existence: Existence = self.ask(&connector, "exists", path, options).await?;
                span.record("sandbox.file.exists", existence.exists);
                Ok(existence.exists)
            })
            .await
    }

    async fn ask<T: serde::de::DeserializeOwned>(
        &self,
        connector: &Connector,
        operation: &'static str,
        path: &str,
        options: &CallOptions,
    ) -> Result<T, ErrorKind> {
        let endpoint = format!("{operation}/{}", segment(path));
        let answer = connector
            .send(self.call(operation, endpoint, options))
            .await?;
        answer.json(MAX_METADATA_RESPONSE_SIZE).await
    }

    fn call(&self, operation: &'static str, endpoint: String, options: &CallOptions) -> Call {
        let default_attempts = self.sandbox.options().retry.max_attempts;
        Call {
            operation,
            method: Method::GET,
            endpoint,
            content_type: None,
            body: Bytes::new(),
            max_attempts: options.max_attempts.unwrap_or(default_attempts),
            timeout: options.timeout,
        }
    }

    fn check_size(&self, size: u64) -> Result<(), ErrorKind> {
        let limit = self.sandbox.options().max_upload_size;
        if size > limit {
            return Err(ErrorKind::UploadTooLarge { size, limit });
        }
        Ok(())
    }
}

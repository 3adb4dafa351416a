//! Files over HTTP: the upload, download, list and exists requests of the SDK API. `directory_tree` confines paths; this
//! module streams bytes between the tree and the client, and maps results to responses.

use std::fs::File;
use std::io::{self, Read, Seek, SeekFrom};
use std::sync::Arc;

use bytes::Bytes;
use futures::{Stream, StreamExt};
use http::{HeaderMap, HeaderName, HeaderValue, Request, Response, StatusCode, header};
use http_body::Frame;
use http_body_util::{BodyDataStream, BodyExt, StreamBody};
use hyper::body::Incoming;
use percent_encoding::{AsciiSet, NON_ALPHANUMERIC, utf8_percent_encode};
use serde::Serialize;
use tokio::io::AsyncWriteExt;

use crate::directory_tree::{Entry, EntryKind, Node, PendingFile, Tree, TreeError};
use crate::path::{BelowBase, PathError, decode_lossy};
use crate::ranges::{self, Selection, Validators};
use crate::response::{Body, BodyError, Refusal, empty, json, message};

const CHUNK: usize = 128 * 1024;
/// The characters that RFC 8187 leaves unescaped.
const ATTRIBUTE: &AsciiSet = &NON_ALPHANUMERIC
    .remove(b'.')
    .remove(b'-')
    .remove(b'_')
    .remove(b'~');

impl From<PathError> for Refusal {
    fn from(error: PathError) -> Self {
        match error {
            PathError::Escapes => Refusal::new(
                StatusCode::FORBIDDEN,
                "Access denied: the path leaves the base directory",
            ),
            PathError::Nul | PathError::TooLong => Refusal::bad_request(error.to_string()),
        }
    }
}

impl From<TreeError> for Refusal {
    fn from(error: TreeError) -> Self {
        let status = match error {
            TreeError::Escapes | TreeError::Denied => StatusCode::FORBIDDEN,
            TreeError::NotFound => StatusCode::NOT_FOUND,
            TreeError::NotAFile | TreeError::NotADirectory | TreeError::IntoItself => {
                StatusCode::BAD_REQUEST
            }
            TreeError::NotEmpty | TreeError::OtherVolume => StatusCode::CONFLICT,
            TreeError::Io { ref source, .. } if source.kind() == io::ErrorKind::StorageFull => {
                StatusCode::INSUFFICIENT_STORAGE
            }
            TreeError::Io { .. } => StatusCode::INTERNAL_SERVER_ERROR,
        };
        let text = match &error {
            TreeError::Escapes => "Access denied: the path leaves the base directory".to_owned(),
            TreeError::NotFound => "File not found".to_owned(),
            TreeError::Io { operation, source } => format!("Cannot {operation}: {source}"),
            other => other.to_string(),
        };
        Refusal::new(status, text)
    }
}

/// Runs blocking file I/O on a blocking thread.
pub async fn blocking<T: Send + 'static>(
    work: impl FnOnce() -> Result<T, TreeError> + Send + 'static,
) -> Result<T, Refusal> {
    match tokio::task::spawn_blocking(work).await {
        Ok(result) => result.map_err(Refusal::from),
        Err(_) => Err(Refusal::new(
            StatusCode::INTERNAL_SERVER_ERROR,
            "the file operation failed",
        )),
    }
}

/// `GET /download/{path}`
pub async fn download(
    tree: &Arc<Tree>,
    encoded: &str,
    headers: &HeaderMap,
) -> Result<Response<Body>, Refusal> {
    let path = BelowBase::parse_encoded(tree.base(), encoded)?;
    let reading = Arc::clone(tree);
    let node = blocking(move || match reading.read(&path) {
        // Published runtimes respond "not found" for everything that is not a file.
        Err(TreeError::NotAFile | TreeError::NotADirectory) => Err(TreeError::NotFound),
        node => node,
    })
    .await?;
    match node {
        Node::File { file, entry } => file_response(file, &entry, headers),
        Node::Directory => Err(TreeError::NotFound.into()),
    }
}

/// Streams an open file: all of it, or the range in the request's headers.
pub fn file_response(
    mut file: File,
    entry: &Entry,
    asked: &HeaderMap,
) -> Result<Response<Body>, Refusal> {
    let validators = Validators::of(entry);
    let (first, length, is_part) = match ranges::select(asked, entry.size, &validators) {
        Selection::Whole => (0, entry.size, false),
        Selection::Part { first, length } => (first, length, true),
        Selection::Unsatisfiable => return Ok(unsatisfiable(entry.size)),
    };
    if first > 0 {
        file.seek(SeekFrom::Start(first))
            .map_err(|source| TreeError::Io {
                operation: "read the file from there on",
                source,
            })?;
    }
    let stream = file_stream(file, length);
    let mut response = Response::new(StreamBody::new(stream).boxed_unsync());
    if is_part {
        *response.status_mut() = StatusCode::PARTIAL_CONTENT;
        let last = first.saturating_add(length).saturating_sub(1);
        let range = format!("bytes {first}-{last}/{}", entry.size);
        set(&mut response, header::CONTENT_RANGE, &range);
    }
    set(&mut response, header::ETAG, &validators.etag);
    if let Some(modified) = validators.last_modified() {
        set(&mut response, header::LAST_MODIFIED, &modified);
    }
    let headers = response.headers_mut();
    headers.insert(header::ACCEPT_RANGES, HeaderValue::from_static("bytes"));
    headers.insert(
        header::CONTENT_TYPE,
        HeaderValue::from_static("application/octet-stream"),
    );
    headers.insert(header::CONTENT_LENGTH, length.into());
    let name = entry.name.to_string_lossy();
    let disposition = format!(
        "attachment; filename*=utf-8''{}",
        utf8_percent_encode(&name, ATTRIBUTE)
    );
    if let Ok(disposition) = HeaderValue::from_str(&disposition) {
        headers.insert(header::CONTENT_DISPOSITION, disposition);
    }
    Ok(response)
}

/// The response to a range that begins beyond the end of a file.
fn unsatisfiable(size: u64) -> Response<Body> {
    let status = StatusCode::RANGE_NOT_SATISFIABLE;
    let mut response = message(status, "the range begins beyond the end of the file");
    set(
        &mut response,
        header::CONTENT_RANGE,
        &format!("bytes */{size}"),
    );
    response
}

fn set(response: &mut Response<Body>, name: HeaderName, value: &str) {
    if let Ok(value) = HeaderValue::from_str(value) {
        response.headers_mut().insert(name, value);
    }
}

/// Streams exactly `size` bytes of the file: bytes appended meanwhile are omitted, and a file truncated meanwhile breaks the
/// connection, so that the client does not take it for complete.
fn file_stream(
    file: File,
    size: u64,
) -> impl Stream<Item = Result<Frame<Bytes>, BodyError>> + Send {
    futures::stream::try_unfold((file, size), |(mut file, remaining)| async move {
        if remaining == 0 {
            return Ok(None);
        }
        let length = usize::try_from(remaining).unwrap_or(CHUNK).min(CHUNK);
        let read = tokio::task::spawn_blocking(move || {
            let mut chunk = vec![0; length];
            let count = file.read(&mut chunk)?;
            chunk.truncate(count);
            Ok::<_, io::Error>((file, chunk))
        });
        let (file, chunk) = read.await.map_err(BodyError::from)??;
        if chunk.is_empty() {
            return Err(BodyError::from("the file was cut short while it was read"));
        }
        let remaining = remaining - chunk.len() as u64;
        Ok(Some((Frame::data(Bytes::from(chunk)), (file, remaining))))
    })
}

#[derive(Serialize)]
struct ListedEntry {
    name: String,
    size: u64,
    #[serde(rename = "type")]
    kind: &'static str,
    mod_time: f64,
}

pub fn kind_name(kind: EntryKind) -> &'static str {
    match kind {
        EntryKind::File => "file",
        EntryKind::Directory => "directory",
    }
}

/// `GET /list/{path}`
pub async fn list(tree: &Arc<Tree>, encoded: &str) -> Result<Response<Body>, Refusal> {
    let path = BelowBase::parse_encoded(tree.base(), encoded)?;
    let reading = Arc::clone(tree);
    let entries = blocking(move || match reading.list(&path) {
        Err(TreeError::NotADirectory) => Err(TreeError::NotFound),
        entries => entries,
    })
    .await
    .map_err(|refusal| match refusal.status {
        StatusCode::NOT_FOUND => Refusal::new(StatusCode::NOT_FOUND, "Directory not found"),
        _ => refusal,
    })?;
    let listed: Vec<_> = entries
        .into_iter()
        .map(|entry| ListedEntry {
            name: entry.name.to_string_lossy().into_owned(),
            size: entry.size,
            kind: kind_name(entry.kind),
            mod_time: seconds(&entry),
        })
        .collect();
    Ok(json(StatusCode::OK, &listed))
}

#[expect(
    clippy::cast_precision_loss,
    reason = "the API defines a float of seconds, which is exact to the microsecond"
)]
fn seconds(entry: &Entry) -> f64 {
    entry.modified_seconds as f64 + f64::from(entry.modified_nanoseconds) / 1e9
}

#[derive(Serialize)]
struct Existence {
    path: String,
    exists: bool,
}

/// `GET /exists/{path}`
pub async fn exists(tree: &Arc<Tree>, encoded: &str) -> Result<Response<Body>, Refusal> {
    let path = BelowBase::parse_encoded(tree.base(), encoded)?;
    let reading = Arc::clone(tree);
    let exists = blocking(move || reading.exists(&path)).await?;
    Ok(json(
        StatusCode::OK,
        &Existence {
            path: decode_lossy(encoded),
            exists,
        },
    ))
}

/// `POST /mkdir/{path}`: creates a directory and its parents. A directory that exists is a success.
pub async fn make_directory(tree: &Arc<Tree>, encoded: &str) -> Result<Response<Body>, Refusal> {
    let path = BelowBase::parse_encoded(tree.base(), encoded)?;
    let making = Arc::clone(tree);
    let made = blocking(move || match making.make_directory(&path) {
        // Not found would mean that this runtime has no such endpoint.
        Err(TreeError::NotADirectory) => Ok(false),
        made => made.map(|()| true),
    });
    if !made.await? {
        let reason = "there is something that is not a directory";
        return Err(Refusal::new(StatusCode::CONFLICT, reason));
    }
    let name = decode_lossy(encoded);
    Ok(message(
        StatusCode::OK,
        &format!("Directory '{name}' is there."),
    ))
}

/// `POST /upload`
pub async fn upload(
    tree: &Arc<Tree>,
    request: Request<Incoming>,
) -> Result<Response<Body>, Refusal> {
    let boundary = request
        .headers()
        .get(header::CONTENT_TYPE)
        .and_then(|value| value.to_str().ok())
        .and_then(|value| multer::parse_boundary(value).ok())
        .ok_or_else(|| {
            Refusal::bad_request("a multipart/form-data body with a boundary is needed")
        })?;
    let mut form = multer::Multipart::new(BodyDataStream::new(request.into_body()), boundary);
    while let Some(field) = form.next_field().await.map_err(|error| malformed(&error))? {
        if field.name() != Some("file") {
            continue;
        }
        let disposition = field
            .headers()
            .get(header::CONTENT_DISPOSITION)
            .map(HeaderValue::as_bytes);
        let name = disposition
            .and_then(extended_file_name)
            .or_else(|| field.file_name().map(str::to_owned));
        let name = name.filter(|name| !name.is_empty());
        let name = name.ok_or_else(|| Refusal::bad_request("the file field has no file name"))?;
        let path = BelowBase::parse(tree.base(), name.as_bytes())?;
        if path.is_base() {
            return Err(Refusal::bad_request("the file name names no file"));
        }
        let creating = Arc::clone(tree);
        let pending = blocking(move || creating.create(&path)).await?;
        let content = field.map(|piece| piece.map_err(|error| malformed(&error)));
        store(pending, content).await?;
        return Ok(message(
            StatusCode::OK,
            &format!("File '{name}' uploaded successfully."),
        ));
    }
    Err(Refusal::bad_request("the form has no field called file"))
}

/// Writes a stream into a pending file and commits it. A stream that fails leaves no file.
pub async fn store(
    pending: PendingFile,
    mut content: impl Stream<Item = Result<Bytes, Refusal>> + Unpin,
) -> Result<(), Refusal> {
    let written = |source| {
        Refusal::from(TreeError::Io {
            operation: "write the file",
            source,
        })
    };
    let mut writer = tokio::fs::File::from_std(pending.writer().map_err(written)?);
    writer.set_max_buf_size(CHUNK);
    while let Some(piece) = content.next().await {
        writer.write_all(&piece?).await.map_err(written)?;
    }
    writer.flush().await.map_err(written)?;
    drop(writer);
    blocking(move || pending.commit()).await
}

pub fn malformed(error: &multer::Error) -> Refusal {
    Refusal::bad_request(format!("the form cannot be read: {error}"))
}

/// The name in `filename*=utf-8''…` (RFC 8187), which some clients send for names outside ASCII.
fn extended_file_name(disposition: &[u8]) -> Option<String> {
    let disposition = std::str::from_utf8(disposition).ok()?;
    let value = disposition
        .split(';')
        .find_map(|part| part.trim().strip_prefix("filename*="))?;
    let encoded = value.trim_matches('"').splitn(3, '\'').nth(2)?;
    percent_encoding::percent_decode_str(encoded)
        .decode_utf8()
        .ok()
        .map(std::borrow::Cow::into_owned)
}

/// `HEAD` on a file: only the headers of a download.
pub fn head_of(response: &Response<Body>) -> Response<Body> {
    let mut head = empty(response.status());
    *head.headers_mut() = response.headers().clone();
    head
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn extended_names_are_decoded() {
        assert_eq!(
            extended_file_name(b"form-data; name=\"file\"; filename*=utf-8''na%C3%AFve%2Fx.txt")
                .as_deref(),
            Some("naïve/x.txt")
        );
        assert_eq!(
            extended_file_name(b"form-data; name=\"file\"; filename=\"x\""),
            None
        );
    }
}

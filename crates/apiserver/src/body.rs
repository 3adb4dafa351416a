//! HTTP bodies: reads and decodes the body of a request within limits, and builds responses.

use std::{convert::Infallible, time::Duration};

use bytes::{Buf, BufMut, Bytes, BytesMut};
use futures::{StreamExt, stream::BoxStream};
use http::{HeaderMap, HeaderValue, Response, StatusCode, header};
use http_body::{Body as _, Frame};
use http_body_util::{BodyExt, Either, Full, LengthLimitError, Limited, StreamBody};
use serde::Serialize;
use tokio::sync::Semaphore;

use apimachinery::{
    status::Status,
    strict::{self, Decoded},
    yaml,
};

/// Maximum size of a request body, as in kube-apiserver.
pub const BODY_BYTES: usize = 3 << 20;

/// The time within which a client must send its body.
const BODY_TIMEOUT: Duration = Duration::from_secs(30);

/// Larger bodies are decoded on a blocking thread, because decoding on an async worker delays the other requests of that worker.
const LARGE_BYTES: usize = 32 << 10;

/// Limits how many large bodies are decoded at the same time, and so the memory and the CPU time of decoding.
static LARGE_BODIES: Semaphore = Semaphore::const_new(2);

/// The body of a response: complete, or a stream for lists and watches.
pub type Body =
    Either<Full<Bytes>, StreamBody<BoxStream<'static, Result<Frame<Bytes>, Infallible>>>>;

/// A response.
pub type HttpResponse = Response<Body>;

/// A complete body.
pub fn full(bytes: impl Into<Bytes>) -> Body {
    Either::Left(Full::new(bytes.into()))
}

/// A body that is sent in chunks.
pub fn stream(chunks: impl futures::Stream<Item = Bytes> + Send + 'static) -> Body {
    Either::Right(StreamBody::new(
        chunks.map(|chunk| Ok(Frame::data(chunk))).boxed(),
    ))
}

/// A JSON response from bytes.
pub fn json_bytes(code: StatusCode, bytes: impl Into<Bytes>) -> HttpResponse {
    let mut response = Response::new(full(bytes));
    *response.status_mut() = code;
    response.headers_mut().insert(
        header::CONTENT_TYPE,
        HeaderValue::from_static("application/json"),
    );
    response
}

/// A JSON response.
pub fn json(code: StatusCode, value: &impl Serialize) -> HttpResponse {
    json_bytes(code, serde_json::to_vec(value).unwrap_or_default())
}

/// A plain text response.
pub fn text(code: StatusCode, message: impl Into<Bytes>) -> HttpResponse {
    let mut response = Response::new(full(message));
    *response.status_mut() = code;
    response.headers_mut().insert(
        header::CONTENT_TYPE,
        HeaderValue::from_static("text/plain; charset=utf-8"),
    );
    response
}

/// Turns a failure into a response. This is the only place that does so.
pub fn failure(status: &Status) -> HttpResponse {
    let code = StatusCode::from_u16(status.code).unwrap_or(StatusCode::INTERNAL_SERVER_ERROR);
    let mut response = json(code, status);
    let retry = status
        .details
        .as_ref()
        .map_or(0, |details| details.retry_after_seconds);
    if retry > 0 {
        response
            .headers_mut()
            .insert(header::RETRY_AFTER, HeaderValue::from(retry));
    }
    if code == StatusCode::UNAUTHORIZED {
        response
            .headers_mut()
            .insert(header::WWW_AUTHENTICATE, HeaderValue::from_static("Bearer"));
    }
    response
}

/// The response of kube-apiserver to a path whose group or version is not served.
pub fn page_not_found() -> HttpResponse {
    let mut response = HttpResponse::new(full(Bytes::from_static(b"404 page not found\n")));
    *response.status_mut() = StatusCode::NOT_FOUND;
    response.headers_mut().insert(
        header::CONTENT_TYPE,
        HeaderValue::from_static("text/plain; charset=utf-8"),
    );
    response
}

/// Reads a whole body within the limits of size and time. `charge` gets the length of each chunk and may reject it.
pub async fn read<B>(
    body: B,
    charge: impl FnMut(usize) -> Result<(), Status>,
) -> Result<Bytes, Status>
where
    B: http_body::Body,
    B::Data: Send,
    B::Error: Into<Box<dyn std::error::Error + Send + Sync>>,
{
    match tokio::time::timeout(BODY_TIMEOUT, collect(body, charge)).await {
        Ok(read) => read,
        Err(_) => Err(Status::timeout(
            "the request's body did not arrive within the allotted time",
            0,
        )),
    }
}

async fn collect<B>(
    body: B,
    mut charge: impl FnMut(usize) -> Result<(), Status>,
) -> Result<Bytes, Status>
where
    B: http_body::Body,
    B::Data: Send,
    B::Error: Into<Box<dyn std::error::Error + Send + Sync>>,
{
    let mut body = std::pin::pin!(Limited::new(body, BODY_BYTES));
    let mut collected = BytesMut::new();
    while let Some(frame) = body.frame().await {
        let frame = frame.map_err(|error| unreadable(error.as_ref()))?;
        let Ok(mut data) = frame.into_data() else {
            continue;
        };
        let length = data.remaining();
        charge(length)?;
        // Most bodies arrive in one chunk, which need not be copied.
        if collected.is_empty() && body.is_end_stream() {
            return Ok(data.copy_to_bytes(length));
        }
        collected.put(data);
    }
    Ok(collected.freeze())
}

fn unreadable(error: &(dyn std::error::Error + 'static)) -> Status {
    if error.is::<LengthLimitError>() {
        return Status::request_entity_too_large(format_args!("limit is {BODY_BYTES}"));
    }
    Status::bad_request(format!("cannot read the request's body: {error}"))
}

/// The formats of an object in a request body.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Format {
    /// `application/json`.
    Json,
    /// `application/yaml`.
    Yaml,
    /// `application/vnd.kubernetes.protobuf`.
    Protobuf,
}

/// The media type of a request without its parameters, in lower case.
pub fn media_type(headers: &HeaderMap) -> String {
    let text = headers
        .get(header::CONTENT_TYPE)
        .and_then(|value| value.to_str().ok())
        .unwrap_or_default();
    text.split(';')
        .next()
        .unwrap_or_default()
        .trim()
        .to_ascii_lowercase()
}

/// The format of the object in a request.
pub fn format(headers: &HeaderMap) -> Result<Format, Status> {
    match media_type(headers).as_str() {
        "" | "*/*" | "application/json" => Ok(Format::Json),
        "application/yaml" | "text/yaml" | "application/x-yaml" => Ok(Format::Yaml),
        "application/vnd.kubernetes.protobuf" => Ok(Format::Protobuf),
        _ => Err(Status::unsupported_media_type(&[
            "application/json",
            "application/yaml",
            "application/vnd.kubernetes.protobuf",
        ])),
    }
}

/// Decodes the object in a body.
pub async fn decode(bytes: &Bytes, format: Format) -> Result<Decoded, Status> {
    off_worker(bytes, move |bytes| decode_now(bytes, format)).await
}

/// Runs a parser over a body: directly for a small body, on a blocking thread for a large one.
pub async fn off_worker<T: Send + 'static>(
    bytes: &Bytes,
    parse: impl FnOnce(&[u8]) -> Result<T, Status> + Send + 'static,
) -> Result<T, Status> {
    if bytes.len() <= LARGE_BYTES {
        return parse(bytes);
    }
    let interrupted = |error: &dyn std::fmt::Display| {
        Status::internal(format_args!("decoding the body was interrupted: {error}"))
    };
    let _permit = LARGE_BODIES
        .acquire()
        .await
        .map_err(|error| interrupted(&error))?;
    let bytes = bytes.clone();
    tokio::task::spawn_blocking(move || parse(&bytes))
        .await
        .map_err(|error| interrupted(&error))?
}

fn decode_now(bytes: &[u8], format: Format) -> Result<Decoded, Status> {
    match format {
        Format::Json => strict::decode(bytes).map_err(|error| {
            Status::bad_request(format!(
                "the object provided is unrecognized (must be of type JSON): {error}"
            ))
        }),
        Format::Yaml => yaml::decode(bytes).map_err(|error| {
            Status::bad_request(format!("error converting YAML to JSON: {error}"))
        }),
        Format::Protobuf => Ok(Decoded {
            value: crate::protobuf::decode(bytes)?,
            duplicates: Vec::new(),
        }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn a_body_that_never_ends_times_out() {
        let first = futures::stream::iter([Ok::<_, Infallible>(Frame::data(Bytes::from("{")))]);
        let endless = StreamBody::new(first.chain(futures::stream::pending()));
        let started = tokio::time::Instant::now();
        let read = read(endless, |_| Ok(())).await;
        assert_eq!(read.unwrap_err().code, 504);
        assert_eq!(started.elapsed(), BODY_TIMEOUT);
    }
}

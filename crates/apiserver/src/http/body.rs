//! Bodies: reading a request's within bounds and in any format, and building answers.

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

/// Most bytes of a request's body, as in kube-apiserver.
pub const BODY_BYTES: usize = 3 << 20;

/// How long a client may take to send its body.
const BODY_TIMEOUT: Duration = Duration::from_secs(30);

/// Larger bodies are decoded on a blocking thread: an async worker that decodes serves nobody else meanwhile.
const LARGE_BYTES: usize = 32 << 10;

/// Large bodies that are decoded at a time. It bounds the memory and the CPUs that decoding takes.
static LARGE_BODIES: Semaphore = Semaphore::const_new(2);

/// The body of an answer: all at once, or a stream for lists and watches.
pub type Body =
    Either<Full<Bytes>, StreamBody<BoxStream<'static, Result<Frame<Bytes>, Infallible>>>>;

/// An answer.
pub type Answer = Response<Body>;

/// A body that is there already.
pub fn full(bytes: impl Into<Bytes>) -> Body {
    Either::Left(Full::new(bytes.into()))
}

/// A body that comes in pieces.
pub fn stream(chunks: impl futures::Stream<Item = Bytes> + Send + 'static) -> Body {
    Either::Right(StreamBody::new(
        chunks.map(|chunk| Ok(Frame::data(chunk))).boxed(),
    ))
}

/// A JSON answer from bytes.
pub fn json_bytes(code: StatusCode, bytes: impl Into<Bytes>) -> Answer {
    let mut answer = Response::new(full(bytes));
    *answer.status_mut() = code;
    answer.headers_mut().insert(
        header::CONTENT_TYPE,
        HeaderValue::from_static("application/json"),
    );
    answer
}

/// A JSON answer.
pub fn json(code: StatusCode, value: &impl Serialize) -> Answer {
    json_bytes(code, serde_json::to_vec(value).unwrap_or_default())
}

/// A plain text answer.
pub fn text(code: StatusCode, message: impl Into<Bytes>) -> Answer {
    let mut answer = Response::new(full(message));
    *answer.status_mut() = code;
    answer.headers_mut().insert(
        header::CONTENT_TYPE,
        HeaderValue::from_static("text/plain; charset=utf-8"),
    );
    answer
}

/// The one place where a failure becomes an answer.
pub fn failure(status: &Status) -> Answer {
    let code = StatusCode::from_u16(status.code).unwrap_or(StatusCode::INTERNAL_SERVER_ERROR);
    let mut answer = json(code, status);
    let retry = status
        .details
        .as_ref()
        .map_or(0, |details| details.retry_after_seconds);
    if retry > 0 {
        answer
            .headers_mut()
            .insert(header::RETRY_AFTER, HeaderValue::from(retry));
    }
    if code == StatusCode::UNAUTHORIZED {
        answer
            .headers_mut()
            .insert(header::WWW_AUTHENTICATE, HeaderValue::from_static("Bearer"));
    }
    answer
}

/// What kube-apiserver answers where it knows of nobody who would answer: a group or a version that is not served.
pub fn page_not_found() -> Answer {
    let mut answer = Answer::new(full(Bytes::from_static(b"404 page not found\n")));
    *answer.status_mut() = StatusCode::NOT_FOUND;
    answer.headers_mut().insert(
        header::CONTENT_TYPE,
        HeaderValue::from_static("text/plain; charset=utf-8"),
    );
    answer
}

/// Reads a whole body, up to the limits of length and time; `charge` is told of each piece and may refuse it.
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
        // Most bodies come in one piece, which need not be copied.
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

/// The formats a body of an object may have.
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

/// The format of a request's object.
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

/// Parses the object in a body.
pub async fn decode(bytes: &Bytes, format: Format) -> Result<Decoded, Status> {
    off_worker(bytes, move |bytes| decode_now(bytes, format)).await
}

/// Runs a parser over a body: in place over a small one, on a blocking thread over a large one.
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
    async fn a_body_that_never_ends_is_given_up() {
        let first = futures::stream::iter([Ok::<_, Infallible>(Frame::data(Bytes::from("{")))]);
        let endless = StreamBody::new(first.chain(futures::stream::pending()));
        let started = tokio::time::Instant::now();
        let read = read(endless, |_| Ok(())).await;
        assert_eq!(read.unwrap_err().code, 504);
        assert_eq!(started.elapsed(), BODY_TIMEOUT);
    }
}

//! Bodies: reading a request's within bounds and in any format, and building answers.

use std::convert::Infallible;

use bytes::Bytes;
use futures::{StreamExt, stream::BoxStream};
use http::{HeaderMap, HeaderValue, Response, StatusCode, header};
use http_body::Frame;
use http_body_util::{BodyExt, Either, Full, LengthLimitError, Limited, StreamBody};
use serde::Serialize;

use apimachinery::{
    status::Status,
    strict::{self, Decoded},
};

/// Most bytes of a request's body, as in kube-apiserver.
pub const BODY_BYTES: usize = 3 << 20;

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

/// Reads a whole body, up to the limit.
pub async fn read<B>(body: B) -> Result<Bytes, Status>
where
    B: http_body::Body,
    B::Data: Send,
    B::Error: Into<Box<dyn std::error::Error + Send + Sync>>,
{
    match Limited::new(body, BODY_BYTES).collect().await {
        Ok(collected) => Ok(collected.to_bytes()),
        Err(error) if error.is::<LengthLimitError>() => Err(Status::request_entity_too_large(
            format_args!("limit is {BODY_BYTES}"),
        )),
        Err(error) => Err(Status::bad_request(format!(
            "cannot read the request's body: {error}"
        ))),
    }
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
pub fn decode(bytes: &[u8], format: Format) -> Result<Decoded, Status> {
    match format {
        Format::Json => strict::decode(bytes).map_err(|error| {
            Status::bad_request(format!(
                "the object provided is unrecognized (must be of type JSON): {error}"
            ))
        }),
        Format::Yaml => {
            let value = serde_yaml_ng::from_slice(bytes).map_err(|error| {
                Status::bad_request(format!("error converting YAML to JSON: {error}"))
            })?;
            Ok(Decoded {
                value,
                duplicates: Vec::new(),
            })
        }
        Format::Protobuf => Ok(Decoded {
            value: crate::protobuf::decode(bytes)?,
            duplicates: Vec::new(),
        }),
    }
}

//! Compresses responses with gzip, if the client accepts it and the response is large enough.

use std::io::Write;

use bytes::Bytes;
use flate2::{Compression, write::GzEncoder};
use futures::StreamExt;
use http::{HeaderMap, HeaderValue, header};
use http_body::Body as _;
use http_body_util::{BodyExt, Either};

use crate::body::{self, HttpResponse};

/// Smaller responses are not compressed, as in kube-apiserver.
const MINIMUM_BYTES: u64 = 128 << 10;

/// Whether the client accepts gzip.
pub fn is_accepted(headers: &HeaderMap) -> bool {
    let accepted = headers
        .get(header::ACCEPT_ENCODING)
        .and_then(|value| value.to_str().ok())
        .unwrap_or_default();
    accepted.split(',').any(|coding| {
        let (name, weight) = coding.split_once(';').unwrap_or((coding, ""));
        name.trim() == "gzip" && weight.trim() != "q=0"
    })
}

/// Whether the response is a log. A log must be sent as it is written, and an encoder would buffer it.
fn is_log(response: &HttpResponse) -> bool {
    let kind = response.headers().get(header::CONTENT_TYPE);
    kind.is_some_and(|kind| kind.as_bytes().starts_with(b"text/plain"))
}

/// Compresses a response if it is large enough.
pub fn compress(response: HttpResponse) -> HttpResponse {
    let long = match response.body() {
        Either::Left(full) => full.size_hint().lower() >= MINIMUM_BYTES,
        Either::Right(_) => true,
    };
    if !long || is_log(&response) || response.headers().contains_key(header::CONTENT_ENCODING) {
        return response;
    }
    let (mut parts, content) = response.into_parts();
    parts
        .headers
        .insert(header::CONTENT_ENCODING, HeaderValue::from_static("gzip"));
    parts
        .headers
        .append(header::VARY, HeaderValue::from_static("Accept-Encoding"));
    parts.headers.remove(header::CONTENT_LENGTH);
    // Prefers speed over size, because most clients run on the same machine.
    let state = Some((
        content.into_data_stream(),
        GzEncoder::new(Vec::new(), Compression::fast()),
    ));
    let pieces = futures::stream::unfold(state, |state| async move {
        let (mut content, mut encoder) = state?;
        loop {
            let Some(Ok(piece)) = content.next().await else {
                let last = encoder.finish().unwrap_or_default();
                return Some((Bytes::from(last), None));
            };
            if encoder.write_all(&piece).is_err() {
                return None;
            }
            let ready = std::mem::take(encoder.get_mut());
            if !ready.is_empty() {
                return Some((Bytes::from(ready), Some((content, encoder))));
            }
        }
    });
    HttpResponse::from_parts(parts, body::stream(pieces))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn objects_are_compressed_and_logs_are_not() {
        for (kind, encoding) in [("application/json", Some("gzip")), ("text/plain", None)] {
            let response = http::Response::builder()
                .header(header::CONTENT_TYPE, kind)
                .body(body::stream(futures::stream::empty()))
                .unwrap();
            let response = compress(response);
            let found = response.headers().get(header::CONTENT_ENCODING);
            assert_eq!(found.map(|value| value.to_str().unwrap()), encoding);
        }
    }
}

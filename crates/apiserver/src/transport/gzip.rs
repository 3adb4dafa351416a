//! Compressed answers, for clients that accept them and answers that are long enough to be worth it.

use std::io::Write;

use bytes::Bytes;
use flate2::{Compression, write::GzEncoder};
use futures::StreamExt;
use http::{HeaderMap, HeaderValue, header};
use http_body::Body as _;
use http_body_util::{BodyExt, Either};

use crate::http::body::{self, Answer};

/// Shorter answers are sent as they are, as kube-apiserver does.
const LEAST_BYTES: u64 = 128 << 10;

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

/// Whether the answer is a log, which must be passed on as it is written: an encoder would keep it back.
fn is_log(answer: &Answer) -> bool {
    let kind = answer.headers().get(header::CONTENT_TYPE);
    kind.is_some_and(|kind| kind.as_bytes().starts_with(b"text/plain"))
}

/// Compresses an answer when that is worth it.
pub fn compress(answer: Answer) -> Answer {
    let long = match answer.body() {
        Either::Left(full) => full.size_hint().lower() >= LEAST_BYTES,
        Either::Right(_) => true,
    };
    if !long || is_log(&answer) || answer.headers().contains_key(header::CONTENT_ENCODING) {
        return answer;
    }
    let (mut parts, content) = answer.into_parts();
    parts
        .headers
        .insert(header::CONTENT_ENCODING, HeaderValue::from_static("gzip"));
    parts
        .headers
        .append(header::VARY, HeaderValue::from_static("Accept-Encoding"));
    parts.headers.remove(header::CONTENT_LENGTH);
    // Speed over size: the client is mostly on the same machine.
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
    Answer::from_parts(parts, body::stream(pieces))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn objects_are_compressed_and_logs_are_not_kept_back() {
        for (kind, encoding) in [("application/json", Some("gzip")), ("text/plain", None)] {
            let answer = http::Response::builder()
                .header(header::CONTENT_TYPE, kind)
                .body(body::stream(futures::stream::empty()))
                .unwrap();
            let answer = compress(answer);
            let found = answer.headers().get(header::CONTENT_ENCODING);
            assert_eq!(found.map(|value| value.to_str().unwrap()), encoding);
        }
    }
}

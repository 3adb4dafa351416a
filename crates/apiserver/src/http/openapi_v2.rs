//! OpenAPI v2, for clients that still ask for it: kubectl does when it is given a `List`. The document is valid and describes no
//! kind, which tells such a client that the server checks fields itself. What the kinds look like is in [`super::openapi`].

use http::{HeaderMap, HeaderValue, StatusCode, header};
use serde_json::json;

use super::body::{self, Answer};

const PATH: &str = "/openapi/v2";
const TITLE: &str = "agent-sandbox";
const VERSION: &str = env!("CARGO_PKG_VERSION");

/// The form client-go wants. It asks with an `@`, which is no valid media type and which it could not read in the answer: that has
/// the first of these.
const PROTOBUF: [&str; 2] = [
    "application/com.github.proto-openapi.spec.v2.v1.0+protobuf",
    "application/com.github.proto-openapi.spec.v2@v1.0+protobuf",
];

/// Answers the document's path, and no other.
pub fn answer(path: &str, headers: &HeaderMap) -> Option<Answer> {
    if path != PATH {
        return None;
    }
    let accepted = headers
        .get(header::ACCEPT)
        .and_then(|value| value.to_str().ok())
        .unwrap_or_default();
    if !PROTOBUF.iter().any(|kind| accepted.contains(kind)) {
        let document =
            json!({"swagger": "2.0", "info": {"title": TITLE, "version": VERSION}, "paths": {}});
        return Some(body::json(StatusCode::OK, &document));
    }
    let mut answer = Answer::new(body::full(protobuf()));
    answer
        .headers_mut()
        .insert(header::CONTENT_TYPE, HeaderValue::from_static(PROTOBUF[0]));
    Some(answer)
}

/// The same document as a message of gnostic's `openapi.v2.Document`.
fn protobuf() -> Vec<u8> {
    const SWAGGER: u8 = 1;
    const INFO: u8 = 2;
    const PATHS: u8 = 8;
    let info = [field(1, TITLE.as_bytes()), field(2, VERSION.as_bytes())].concat();
    [
        field(SWAGGER, b"2.0"),
        field(INFO, &info),
        field(PATHS, b""),
    ]
    .concat()
}

/// A length-delimited field. All are short, so the length is one byte.
fn field(number: u8, content: &[u8]) -> Vec<u8> {
    const LENGTH_DELIMITED: u8 = 2;
    let length = u8::try_from(content.len()).unwrap_or(0x7f).min(0x7f);
    let mut bytes = vec![(number << 3) | LENGTH_DELIMITED, length];
    bytes.extend_from_slice(&content[..usize::from(length)]);
    bytes
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_form_is_the_one_asked_for() {
        let mut headers = HeaderMap::new();
        let kind = |headers: &HeaderMap| {
            let answer = answer(PATH, headers).unwrap();
            answer.headers()[header::CONTENT_TYPE].clone()
        };
        assert_eq!(kind(&headers), "application/json");
        for protobuf in PROTOBUF {
            headers.insert(header::ACCEPT, HeaderValue::from_static(protobuf));
            assert_eq!(kind(&headers), PROTOBUF[0]);
        }
        assert!(answer("/openapi/v3", &headers).is_none());
    }

    #[test]
    fn the_message_is_well_formed() {
        let title = [&[0x0a, 13], TITLE.as_bytes()].concat();
        let version = [&[0x12, 5], VERSION.as_bytes()].concat();
        let length = u8::try_from(title.len() + version.len()).unwrap();
        let expected = [
            b"\x0a\x032.0\x12".as_slice(),
            &[length],
            &title,
            &version,
            b"\x42\x00",
        ];
        assert_eq!(protobuf(), expected.concat());
    }
}

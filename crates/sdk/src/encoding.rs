//! Encodes paths, files and command lines for requests. Pure.

use bytes::{BufMut, Bytes, BytesMut};
use percent_encoding::{AsciiSet, NON_ALPHANUMERIC, utf8_percent_encode};

/// Everything but RFC 3986's unreserved characters.
const RESERVED: &AsciiSet = &NON_ALPHANUMERIC
    .remove(b'-')
    .remove(b'_')
    .remove(b'.')
    .remove(b'~');

/// Encodes a path as one opaque URL segment, including its slashes, so that no proxy splits it.
pub(crate) fn segment(path: &str) -> String {
    utf8_percent_encode(path, RESERVED).to_string()
}

/// Whether a name is a single path component.
pub(crate) fn is_plain_name(name: &str) -> bool {
    !matches!(name, "" | "." | "..") && !name.contains(['/', '\\', '\0'])
}

/// A multipart form with one file.
pub(crate) struct Form {
    boundary: String,
    name: String,
}

impl Form {
    pub(crate) fn new(name: &str) -> Self {
        Self {
            boundary: uuid::Uuid::new_v4().simple().to_string(),
            name: name.to_owned(),
        }
    }

    pub(crate) fn content_type(&self) -> String {
        format!("multipart/form-data; boundary={}", self.boundary)
    }

    /// The bytes before the file's content.
    pub(crate) fn head(&self) -> Bytes {
        let boundary = &self.boundary;
        let name = file_name_parameter(&self.name);
        Bytes::from(format!(
            "--{boundary}\r\nContent-Disposition: form-data; name=\"file\"; {name}\r\n\
             Content-Type: application/octet-stream\r\n\r\n"
        ))
    }

    /// The bytes after the file's content.
    pub(crate) fn tail(&self) -> Bytes {
        Bytes::from(format!("\r\n--{}--\r\n", self.boundary))
    }

    pub(crate) fn whole(&self, content: &[u8]) -> Bytes {
        let (head, tail) = (self.head(), self.tail());
        let mut body = BytesMut::with_capacity(head.len() + content.len() + tail.len());
        body.put(head);
        body.put(content);
        body.put(tail);
        body.freeze()
    }
}

/// Servers parse a quoted name consistently only if it needs no escapes; other names are percent-encoded.
fn file_name_parameter(name: &str) -> String {
    if name.contains(['"', '\\']) || name.chars().any(char::is_control) {
        format!("filename*=utf-8''{}", segment(name))
    } else {
        format!("filename=\"{name}\"")
    }
}

/// A command line that a shell, or a program that splits words as a shell does, splits into these words again.
pub(crate) fn command_line<'a>(words: impl IntoIterator<Item = &'a str>) -> String {
    let quoted = words.into_iter().map(|word| {
        let is_safe = |byte: u8| byte.is_ascii_alphanumeric() || b"-_./:=@%+,".contains(&byte);
        if !word.is_empty() && word.bytes().all(is_safe) {
            word.to_owned()
        } else {
            format!("'{}'", word.replace('\'', r"'\''"))
        }
    });
    quoted.collect::<Vec<_>>().join(" ")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_path_is_one_opaque_segment() {
        let table = [
            ("a/b.txt", "a%2Fb.txt"),
            ("/abs path", "%2Fabs%20path"),
            ("../x", "..%2Fx"),
            ("A-z_0~9.", "A-z_0~9."),
            ("ü?#%", "%C3%BC%3F%23%25"),
            ("", ""),
        ];
        for (path, expected) in table {
            assert_eq!(segment(path), expected);
        }
    }

    #[test]
    fn plain_names_are_single_path_components() {
        for name in ["a", "a.py", "...", "ü", ".hidden"] {
            assert!(is_plain_name(name), "{name}");
        }
        for name in ["", ".", "..", "a/b", "/a", "a\\b", "a\0"] {
            assert!(!is_plain_name(name), "{name}");
        }
    }

    #[test]
    fn a_form_contains_the_file_between_its_boundaries() {
        let form = Form::new("a b.txt");
        let body = String::from_utf8(form.whole(b"content").to_vec()).unwrap();
        let boundary = form
            .content_type()
            .split_once("boundary=")
            .unwrap()
            .1
            .to_owned();
        assert!(body.starts_with(&format!("--{boundary}\r\n")));
        assert!(body.contains("name=\"file\"; filename=\"a b.txt\"\r\n"));
        assert!(body.ends_with(&format!("\r\n\r\ncontent\r\n--{boundary}--\r\n")));
    }

    #[test]
    fn a_name_cannot_break_out_of_its_header() {
        let head = Form::new("a\"; filename=\"b\r\nX: y").head();
        let head = std::str::from_utf8(&head).unwrap();
        assert!(
            head.contains("filename*=utf-8''a%22%3B%20filename%3D%22b%0D%0AX%3A%20y\r\n"),
            "{head}"
        );
    }

    #[test]
    fn words_are_quoted_if_necessary() {
        let words = ["python3", "-c", "print('a b')", "", "$HOME"];
        assert_eq!(
            command_line(words),
            r"python3 -c 'print('\''a b'\'')' '' '$HOME'"
        );
    }
}

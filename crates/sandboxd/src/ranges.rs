//! Selects the part of a file that a request asks for: `Range` and `If-Range` (RFC 9110, sections 13 and 14). Pure.
//!
//! One range is served. A request with several ranges gets the whole file, which the RFC allows; so does an invalid
//! header.

use std::time::{Duration, SystemTime};

use http::header::{self, HeaderMap};

use crate::directory_tree::Entry;

/// The part of a file to send.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Selection {
    Whole,
    /// This many bytes from the first byte on.
    Part {
        first: u64,
        length: u64,
    },
    /// The range begins beyond the end of the file.
    Unsatisfiable,
}

/// The entity tag and time by which a client recognises an unchanged file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Validators {
    pub etag: String,
    /// In whole seconds; absent for a file that was modified before 1970.
    modified: Option<SystemTime>,
}

impl Validators {
    pub fn of(entry: &Entry) -> Self {
        let seconds = u64::try_from(entry.modified_seconds).ok();
        Self {
            etag: format!(
                "\"{:x}-{:x}-{:x}-{:x}\"",
                entry.inode, entry.size, entry.modified_seconds, entry.modified_nanoseconds
            ),
            modified: seconds.and_then(|seconds| {
                SystemTime::UNIX_EPOCH.checked_add(Duration::from_secs(seconds))
            }),
        }
    }

    /// The time in the format of `Last-Modified`.
    pub fn last_modified(&self) -> Option<String> {
        self.modified.map(httpdate::fmt_http_date)
    }

    /// Whether the condition of `If-Range` holds: an entity tag or a time, which must equal the file's.
    fn match_if_range(&self, condition: &str) -> bool {
        if condition.starts_with('"') || condition.starts_with("W/") {
            return condition == self.etag;
        }
        let time = httpdate::parse_http_date(condition).ok();
        time.is_some() && time == self.modified
    }
}

/// Selects the part of a file of this size from a request's headers.
pub fn select(headers: &HeaderMap, size: u64, validators: &Validators) -> Selection {
    let mut ranges = headers.get_all(header::RANGE).iter();
    let (Some(range), None) = (ranges.next(), ranges.next()) else {
        return Selection::Whole;
    };
    let Ok(range) = range.to_str() else {
        return Selection::Whole;
    };
    if let Some(condition) = headers.get(header::IF_RANGE) {
        let holds = condition
            .to_str()
            .is_ok_and(|condition| validators.match_if_range(condition.trim()));
        if !holds {
            return Selection::Whole;
        }
    }
    parse(range, size).unwrap_or(Selection::Whole)
}

/// `bytes=<first>-<last>`, `bytes=<first>-` or `bytes=-<length of the end>`. `None` for anything else.
fn parse(range: &str, size: u64) -> Option<Selection> {
    let (unit, range) = range.split_once('=')?;
    if !unit.trim().eq_ignore_ascii_case("bytes") {
        return None;
    }
    let (first, last) = range.trim().split_once('-')?;
    let part = |first: u64, last: u64| Selection::Part {
        first,
        length: last.saturating_sub(first).saturating_add(1),
    };
    let end = size.checked_sub(1);
    if first.is_empty() {
        let length = number(last)?.min(size);
        return Some(match end {
            Some(end) if length > 0 => part(size.saturating_sub(length), end),
            _ => Selection::Unsatisfiable,
        });
    }
    let first = number(first)?;
    let last = if last.is_empty() {
        u64::MAX
    } else {
        number(last)?
    };
    if last < first {
        return None;
    }
    Some(match end {
        Some(end) if first <= end => part(first, last.min(end)),
        _ => Selection::Unsatisfiable,
    })
}

/// Parses decimal digits. A number that is too large saturates.
fn number(text: &str) -> Option<u64> {
    let digits = !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit());
    digits.then(|| text.parse().unwrap_or(u64::MAX))
}

#[cfg(test)]
mod tests {
    use super::*;
    use http::HeaderValue;
    use proptest::prelude::*;

    fn validators() -> Validators {
        Validators {
            etag: "\"1-a-3-0\"".into(),
            modified: Some(SystemTime::UNIX_EPOCH + Duration::from_secs(784_111_777)),
        }
    }

    fn asked(pairs: &[(header::HeaderName, &str)], size: u64) -> Selection {
        let mut headers = HeaderMap::new();
        for (name, value) in pairs {
            headers.append(name, HeaderValue::from_str(value).unwrap());
        }
        select(&headers, size, &validators())
    }

    fn part(first: u64, length: u64) -> Selection {
        Selection::Part { first, length }
    }

    #[test]
    fn one_range_selects_a_part_and_anything_else_the_whole_file() {
        let table = [
            ("bytes=0-0", 10, part(0, 1)),
            ("bytes=2-5", 10, part(2, 4)),
            ("bytes=2-", 10, part(2, 8)),
            ("bytes=-3", 10, part(7, 3)),
            ("bytes=-30", 10, part(0, 10)),
            ("bytes=0-99999999999999999999999", 10, part(0, 10)),
            ("Bytes = 9-9", 10, part(9, 1)),
            ("bytes=10-", 10, Selection::Unsatisfiable),
            ("bytes=10-20", 10, Selection::Unsatisfiable),
            ("bytes=-0", 10, Selection::Unsatisfiable),
            ("bytes=0-", 0, Selection::Unsatisfiable),
            ("bytes=-1", 0, Selection::Unsatisfiable),
            ("bytes=5-2", 10, Selection::Whole),
            ("bytes=0-1,3-4", 10, Selection::Whole),
            ("bytes=", 10, Selection::Whole),
            ("bytes=-", 10, Selection::Whole),
            ("bytes=+1-2", 10, Selection::Whole),
            ("bytes=a-b", 10, Selection::Whole),
            ("lines=1-2", 10, Selection::Whole),
            ("nonsense", 10, Selection::Whole),
        ];
        for (range, size, expected) in table {
            assert_eq!(asked(&[(header::RANGE, range)], size), expected, "{range}");
        }
        assert_eq!(asked(&[], 10), Selection::Whole);
        let twice = [(header::RANGE, "bytes=0-1"), (header::RANGE, "bytes=0-1")];
        assert_eq!(asked(&twice, 10), Selection::Whole);
    }

    #[test]
    fn a_range_of_a_changed_file_selects_the_whole_file() {
        let table = [
            ("\"1-a-3-0\"", part(0, 1)),
            ("\"other\"", Selection::Whole),
            ("W/\"1-a-3-0\"", Selection::Whole),
            ("Sun, 06 Nov 1994 08:49:37 GMT", part(0, 1)),
            ("Sun, 06 Nov 1994 08:49:38 GMT", Selection::Whole),
            ("nonsense", Selection::Whole),
        ];
        for (condition, expected) in table {
            let pairs = [(header::RANGE, "bytes=0-0"), (header::IF_RANGE, condition)];
            assert_eq!(asked(&pairs, 10), expected, "{condition}");
        }
    }

    proptest! {
        #[test]
        fn no_range_extends_beyond_the_file(range in "\\PC{0,40}", first in 0u64.., last in 0u64.., size in 0u64..) {
            for range in [range, format!("bytes={first}-{last}"), format!("bytes=-{last}")] {
                if let Some(Selection::Part { first, length }) = parse(&range, size) {
                    prop_assert!(length > 0);
                    prop_assert!(first.checked_add(length).is_some_and(|end| end <= size));
                }
            }
        }
    }
}

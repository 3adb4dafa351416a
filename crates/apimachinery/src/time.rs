//! Times in the formats of Kubernetes: RFC 3339 with seconds (`Time`) and microseconds (`MicroTime`).
//!
//! This module does not read the clock. Callers pass the current time.

use jiff::Timestamp;

/// The text is not a valid RFC 3339 time.
#[derive(Debug, thiserror::Error)]
#[error("parsing time {} as RFC 3339", crate::go::quote(.text))]
pub struct Error {
    text: String,
    #[source]
    source: jiff::Error,
}

/// Parses an RFC 3339 time with any offset and any fraction.
pub fn parse(text: &str) -> Result<Timestamp, Error> {
    text.parse().map_err(|source| Error {
        text: text.to_owned(),
        source,
    })
}

/// `metav1.Time`: UTC, whole seconds, as in `creationTimestamp`.
pub fn format(time: Timestamp) -> String {
    time.strftime("%Y-%m-%dT%H:%M:%SZ").to_string()
}

/// `metav1.MicroTime`: UTC with six digits, as in a lease's `renewTime`.
pub fn format_micro(time: Timestamp) -> String {
    time.strftime("%Y-%m-%dT%H:%M:%S%.6fZ").to_string()
}

/// The whole seconds from `then` to `now`. Negative if `then` is in the future.
pub fn seconds_between(then: Timestamp, now: Timestamp) -> i64 {
    now.as_second() - then.as_second()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_are_written_in_utc() {
        let time = parse("2026-11-15T22:50:01.1234567+02:00").unwrap();
        assert_eq!(format(time), "2026-11-15T20:50:01Z");
        assert_eq!(format_micro(time), "2026-11-15T20:50:01.123456Z");
        assert!(parse("yesterday").is_err());
        assert_eq!(
            format_micro(parse("2026-01-01T00:00:00Z").unwrap()),
            "2026-01-01T00:00:00.000000Z"
        );
    }
}

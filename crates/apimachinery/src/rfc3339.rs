//! Parses RFC 3339 times like Go's `time.Parse`, for the `Time` and `MicroTime` fields of the built-in kinds.
//!
//! A time may lie outside the range of [`jiff::Timestamp`], which ends a day before the end of the year 9999.

use jiff::{SignedDuration, civil::DateTime};

use crate::go;

/// The two forms in which Kubernetes stores times.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Precision {
    /// `metav1.Time`: whole seconds; a fraction is accepted and dropped.
    Seconds,
    /// `metav1.MicroTime`: a fraction with exactly six digits.
    Microseconds,
}

impl Precision {
    const fn layout(self) -> &'static str {
        match self {
            Self::Seconds => "2006-01-02T15:04:05Z07:00",
            Self::Microseconds => "2006-01-02T15:04:05.000000Z07:00",
        }
    }
}

/// Parses a time and formats it as Kubernetes stores it: in UTC. The error is the text of Go's `time.ParseError`.
///
/// A time whose UTC form has no four-digit year is returned unchanged.
pub fn canonical(text: &str, precision: Precision) -> Result<String, String> {
    let (civil, offset) = parse(text, precision).map_err(|problem| match problem {
        Problem::Shape { rest, wanted } => format!(
            "parsing time {} as {}: cannot parse {} as {}",
            go::quote(text),
            go::quote(precision.layout()),
            go::quote(rest),
            go::quote(wanted)
        ),
        Problem::Range(part) => {
            format!("parsing time {}: {part} out of range", go::quote(text))
        }
        Problem::Extra(rest) => format!(
            "parsing time {}: extra text: {}",
            go::quote(text),
            go::quote(rest)
        ),
    })?;
    let utc = civil.checked_sub(SignedDuration::from_secs(offset));
    let Some(utc) = utc.ok().filter(|utc| utc.year() >= 0) else {
        return Ok(text.to_owned());
    };
    let format = match precision {
        Precision::Seconds => "%Y-%m-%dT%H:%M:%SZ",
        Precision::Microseconds => "%Y-%m-%dT%H:%M:%S.%6fZ",
    };
    Ok(utc.strftime(format).to_string())
}

enum Problem<'a> {
    Shape { rest: &'a str, wanted: &'static str },
    Range(&'static str),
    Extra(&'a str),
}

/// The rest of the input.
struct Cursor<'a>(&'a str);

impl<'a> Cursor<'a> {
    /// Parses a number of `least` to `most` digits.
    fn number(
        &mut self,
        least: usize,
        most: usize,
        wanted: &'static str,
    ) -> Result<i16, Problem<'a>> {
        let rest = self.0;
        let digits = rest
            .bytes()
            .take(most)
            .take_while(u8::is_ascii_digit)
            .count();
        let shape = Problem::Shape { rest, wanted };
        if digits < least {
            return Err(shape);
        }
        self.0 = &rest[digits..];
        rest[..digits].parse().map_err(|_| shape)
    }

    fn literal(&mut self, wanted: &'static str) -> Result<(), Problem<'a>> {
        let rest = self.0;
        self.0 = rest
            .strip_prefix(wanted)
            .ok_or(Problem::Shape { rest, wanted })?;
        Ok(())
    }

    /// Parses an optional fraction, in nanoseconds.
    fn fraction(&mut self, precision: Precision) -> Result<i32, Problem<'a>> {
        const WANTED: &str = ".000000";
        let rest = self.0;
        let digits = match rest.strip_prefix(['.', ',']) {
            Some(after) => after.bytes().take_while(u8::is_ascii_digit).count(),
            None => 0,
        };
        let taken = match precision {
            Precision::Seconds => digits,
            Precision::Microseconds if digits >= 6 => 6,
            Precision::Microseconds => {
                return Err(Problem::Shape {
                    rest,
                    wanted: WANTED,
                });
            }
        };
        if taken == 0 {
            return Ok(0);
        }
        self.0 = &rest[1 + taken..];
        let shown = rest[1..=taken.min(9)].bytes();
        Ok(shown
            .chain(std::iter::repeat(b'0'))
            .take(9)
            .fold(0, |sum, digit| sum * 10 + i32::from(digit - b'0')))
    }

    /// Parses the offset, in seconds east of UTC.
    fn offset(&mut self) -> Result<i64, Problem<'a>> {
        const WANTED: &str = "Z07:00";
        let rest = self.0;
        if let Some(after) = rest.strip_prefix('Z') {
            self.0 = after;
            return Ok(0);
        }
        let shape = Problem::Shape {
            rest,
            wanted: WANTED,
        };
        let sign = match rest.as_bytes().first() {
            Some(b'+') => 1,
            Some(b'-') => -1,
            _ => return Err(shape),
        };
        self.0 = &rest[1..];
        let read = |cursor: &mut Self| -> Result<(i16, i16), Problem<'a>> {
            let hours = cursor.number(2, 2, WANTED)?;
            cursor.literal(":")?;
            Ok((hours, cursor.number(2, 2, WANTED)?))
        };
        let (hours, minutes) = read(self).map_err(|_| shape)?;
        // Like Go, accept offsets of 24 hours and of 60 minutes.
        if hours > 24 {
            return Err(Problem::Range("time zone offset hour"));
        }
        if minutes > 60 {
            return Err(Problem::Range("time zone offset minute"));
        }
        Ok(sign * (i64::from(hours) * 3600 + i64::from(minutes) * 60))
    }
}

fn parse(text: &str, precision: Precision) -> Result<(DateTime, i64), Problem<'_>> {
    let mut cursor = Cursor(text);
    let year = cursor.number(4, 4, "2006")?;
    cursor.literal("-")?;
    let month = cursor.number(2, 2, "01")?;
    if !(1..=12).contains(&month) {
        return Err(Problem::Range("month"));
    }
    cursor.literal("-")?;
    let day = cursor.number(2, 2, "02")?;
    cursor.literal("T")?;
    // Go accepts an hour with one digit.
    let hour = cursor.number(1, 2, "15")?;
    if hour > 23 {
        return Err(Problem::Range("hour"));
    }
    cursor.literal(":")?;
    let minute = cursor.number(2, 2, "04")?;
    if minute > 59 {
        return Err(Problem::Range("minute"));
    }
    cursor.literal(":")?;
    let second = cursor.number(2, 2, "05")?;
    if second > 59 {
        return Err(Problem::Range("second"));
    }
    let nanoseconds = cursor.fraction(precision)?;
    let offset = cursor.offset()?;
    if !cursor.0.is_empty() {
        return Err(Problem::Extra(cursor.0));
    }
    let small = |number: i16| i8::try_from(number).unwrap_or(i8::MAX);
    let civil = DateTime::new(
        year,
        small(month),
        small(day),
        small(hour),
        small(minute),
        small(second),
        nanoseconds,
    );
    let civil = civil.map_err(|_| Problem::Range("day"))?;
    Ok((civil, offset))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_are_read_as_go_reads_them_and_written_in_utc() {
        for (text, seconds) in [
            ("2026-11-15T22:50:01+02:00", "2026-11-15T20:50:01Z"),
            (
                "2026-01-01T00:00:00.12345678901234Z",
                "2026-01-01T00:00:00Z",
            ),
            ("2026-01-01T00:00:00,5Z", "2026-01-01T00:00:00Z"),
            ("2026-01-01T1:00:00Z", "2026-01-01T01:00:00Z"),
            ("0000-01-01T00:00:00Z", "0000-01-01T00:00:00Z"),
            ("9999-12-31T23:59:59Z", "9999-12-31T23:59:59Z"),
            ("9999-12-31T23:59:59-01:00", "9999-12-31T23:59:59-01:00"),
            ("0000-01-01T00:00:00+01:00", "0000-01-01T00:00:00+01:00"),
        ] {
            assert_eq!(canonical(text, Precision::Seconds).as_deref(), Ok(seconds));
        }
        assert_eq!(
            canonical("2026-01-01T01:00:00.123456+01:00", Precision::Microseconds).as_deref(),
            Ok("2026-01-01T00:00:00.123456Z")
        );
    }

    #[test]
    fn malformed_times_get_the_error_message_of_go() {
        for (text, problem) in [
            (
                "",
                r#"parsing time "" as "2006-01-02T15:04:05Z07:00": cannot parse "" as "2006""#,
            ),
            (
                "soon",
                r#"parsing time "soon" as "2006-01-02T15:04:05Z07:00": cannot parse "soon" as "2006""#,
            ),
            (
                "2026-01-01 00:00:00Z",
                r#"parsing time "2026-01-01 00:00:00Z" as "2006-01-02T15:04:05Z07:00": cannot parse " 00:00:00Z" as "T""#,
            ),
            (
                "2026-01-01T00:00:00",
                r#"parsing time "2026-01-01T00:00:00" as "2006-01-02T15:04:05Z07:00": cannot parse "" as "Z07:00""#,
            ),
            (
                "2026-01-01T00:00:00z",
                r#"parsing time "2026-01-01T00:00:00z" as "2006-01-02T15:04:05Z07:00": cannot parse "z" as "Z07:00""#,
            ),
            (
                "2026-13-01T00:00:00Z",
                r#"parsing time "2026-13-01T00:00:00Z": month out of range"#,
            ),
            (
                "2026-02-30T00:00:00Z",
                r#"parsing time "2026-02-30T00:00:00Z": day out of range"#,
            ),
            (
                "2026-01-01T00:00:60Z",
                r#"parsing time "2026-01-01T00:00:60Z": second out of range"#,
            ),
            (
                "2026-01-01T00:00:00Zulu",
                r#"parsing time "2026-01-01T00:00:00Zulu": extra text: "ulu""#,
            ),
            (
                "2026-01-01T00:00:00+25:00",
                r#"parsing time "2026-01-01T00:00:00+25:00": time zone offset hour out of range"#,
            ),
        ] {
            assert_eq!(canonical(text, Precision::Seconds), Err(problem.to_owned()));
        }
        assert_eq!(
            canonical("2026-01-01T00:00:00Z", Precision::Microseconds),
            Err(r#"parsing time "2026-01-01T00:00:00Z" as "2006-01-02T15:04:05.000000Z07:00": cannot parse "Z" as ".000000""#.to_owned())
        );
    }
}

//! Durations in Go's notation (`1h30m`, `250ms`), and the short ages that `kubectl get` prints.

use std::time::Duration;

/// The text is not a valid Go duration.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Error {
    #[error("time: invalid duration {}", crate::go::quote(.0))]
    Invalid(String),
    #[error("time: missing unit in duration {}", crate::go::quote(.0))]
    MissingUnit(String),
    #[error("time: unknown unit {} in duration {}", crate::go::quote(.unit), crate::go::quote(.text))]
    UnknownUnit { unit: String, text: String },
}

/// A signed number of nanoseconds, like Go's `time.Duration`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct GoDuration(pub i64);

const UNITS: [(&str, u64); 8] = [
    ("ns", 1),
    ("us", 1_000),
    ("µs", 1_000),
    ("μs", 1_000),
    ("ms", 1_000_000),
    ("s", 1_000_000_000),
    ("m", 60_000_000_000),
    ("h", 3_600_000_000_000),
];

/// Parses a Go duration string such as `1h15m30.5s` or `-250ms`.
pub fn parse(text: &str) -> Result<GoDuration, Error> {
    let invalid = || Error::Invalid(text.to_owned());
    let (negative, mut rest) = match text.as_bytes().first() {
        Some(b'-') => (true, &text[1..]),
        Some(b'+') => (false, &text[1..]),
        _ => (false, text),
    };
    if rest == "0" {
        return Ok(GoDuration(0));
    }
    if rest.is_empty() {
        return Err(invalid());
    }
    let mut total: u64 = 0;
    while !rest.is_empty() {
        let whole_end = rest
            .find(|c: char| !c.is_ascii_digit())
            .unwrap_or(rest.len());
        let (whole, after) = rest.split_at(whole_end);
        let (fraction, after) = match after.strip_prefix('.') {
            Some(tail) => {
                let end = tail
                    .find(|c: char| !c.is_ascii_digit())
                    .unwrap_or(tail.len());
                tail.split_at(end)
            }
            None => ("", after),
        };
        if whole.is_empty() && fraction.is_empty() {
            return Err(invalid());
        }
        let unit_end = after
            .find(|c: char| c == '.' || c.is_ascii_digit())
            .unwrap_or(after.len());
        let (unit, after) = after.split_at(unit_end);
        if unit.is_empty() {
            return Err(Error::MissingUnit(text.to_owned()));
        }
        let Some((_, scale)) = UNITS.iter().find(|(name, _)| *name == unit) else {
            return Err(Error::UnknownUnit {
                unit: unit.to_owned(),
                text: text.to_owned(),
            });
        };
        let whole: u64 = if whole.is_empty() {
            0
        } else {
            whole.parse().map_err(|_| invalid())?
        };
        let part = whole
            .checked_mul(*scale)
            .and_then(|nanos| nanos.checked_add(fraction_of(fraction, *scale)))
            .ok_or_else(invalid)?;
        total = total.checked_add(part).ok_or_else(invalid)?;
        rest = after;
    }
    let signed = i64::try_from(total);
    match (negative, signed) {
        (true, Ok(nanos)) => Ok(GoDuration(-nanos)),
        (true, Err(_)) if total == i64::MIN.unsigned_abs() => Ok(GoDuration(i64::MIN)),
        (false, Ok(nanos)) => Ok(GoDuration(nanos)),
        _ => Err(invalid()),
    }
}

fn fraction_of(digits: &str, scale: u64) -> u64 {
    let mut value: u128 = 0;
    let mut divisor: u128 = 1;
    // Digits below a nanosecond of the largest unit have no effect.
    for digit in digits.bytes().take(20) {
        value = value * 10 + u128::from(digit - b'0');
        divisor *= 10;
    }
    u64::try_from(value * u128::from(scale) / divisor).unwrap_or(u64::MAX)
}

impl GoDuration {
    /// The duration, or `None` if it is negative.
    pub fn to_std(self) -> Option<Duration> {
        u64::try_from(self.0).ok().map(Duration::from_nanos)
    }
}

impl std::fmt::Display for GoDuration {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let magnitude = self.0.unsigned_abs();
        if self.0 < 0 {
            f.write_str("-")?;
        }
        match magnitude {
            0 => f.write_str("0s"),
            1..1_000 => write!(f, "{magnitude}ns"),
            1_000..1_000_000 => write!(f, "{}µs", decimal(magnitude, 1_000)),
            1_000_000..1_000_000_000 => write!(f, "{}ms", decimal(magnitude, 1_000_000)),
            _ => {
                let minutes = magnitude / 60_000_000_000;
                let seconds = decimal(magnitude % 60_000_000_000, 1_000_000_000);
                match minutes {
                    0 => write!(f, "{seconds}s"),
                    1..60 => write!(f, "{minutes}m{seconds}s"),
                    _ => write!(f, "{}h{}m{seconds}s", minutes / 60, minutes % 60),
                }
            }
        }
    }
}

fn decimal(value: u64, unit: u64) -> String {
    let fraction = value % unit;
    if fraction == 0 {
        return (value / unit).to_string();
    }
    let width = unit.ilog10() as usize;
    let digits = format!("{fraction:0width$}");
    format!("{}.{}", value / unit, digits.trim_end_matches('0'))
}

/// Formats an age as `kubectl get` does: at most two units, and coarser for larger ages. A negative age means that the other
/// clock is ahead: a small difference gives `0s`, a larger one `<invalid>`.
pub fn human(seconds: i64) -> String {
    if seconds < -1 {
        return "<invalid>".to_owned();
    }
    if seconds < 0 {
        return "0s".to_owned();
    }
    let minutes = seconds / 60;
    let hours = minutes / 60;
    let days = hours / 24;
    let years = days / 365;
    let with = |value: i64, unit: &str, rest: i64, smaller: &str| {
        if rest == 0 {
            format!("{value}{unit}")
        } else {
            format!("{value}{unit}{rest}{smaller}")
        }
    };
    if seconds < 120 {
        format!("{seconds}s")
    } else if minutes < 10 {
        with(minutes, "m", seconds % 60, "s")
    } else if minutes < 180 {
        format!("{minutes}m")
    } else if hours < 8 {
        with(hours, "h", minutes % 60, "m")
    } else if hours < 48 {
        format!("{hours}h")
    } else if hours < 192 {
        with(days, "d", hours % 24, "h")
    } else if days < 730 {
        format!("{days}d")
    } else if days < 2920 {
        with(years, "y", days % 365, "d")
    } else {
        format!("{years}y")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn go_durations_parse_and_print() {
        let cases = [
            ("0", 0, "0s"),
            ("1h15m30.5s", 4_530_500_000_000, "1h15m30.5s"),
            ("-1.5h", -5_400_000_000_000, "-1h30m0s"),
            ("250ms", 250_000_000, "250ms"),
            ("1.5us", 1_500, "1.5µs"),
            (".5s", 500_000_000, "500ms"),
            ("1ns", 1, "1ns"),
        ];
        for (text, nanos, printed) in cases {
            let parsed = parse(text).unwrap();
            assert_eq!(parsed.0, nanos, "{text}");
            assert_eq!(parsed.to_string(), printed);
        }
    }

    #[test]
    fn bad_durations_are_refused_with_the_reason() {
        assert_eq!(
            parse("").unwrap_err().to_string(),
            "time: invalid duration \"\""
        );
        assert_eq!(
            parse("10").unwrap_err().to_string(),
            "time: missing unit in duration \"10\""
        );
        assert_eq!(
            parse("1d").unwrap_err().to_string(),
            "time: unknown unit \"d\" in duration \"1d\""
        );
        assert!(parse("99999999999h").is_err());
        assert!(parse("s").is_err());
        assert!(parse("1é").is_err());
    }

    #[test]
    fn ages_are_formatted_as_in_kubectl() {
        let cases = [
            (-5, "<invalid>"),
            (-1, "0s"),
            (0, "0s"),
            (119, "119s"),
            (120, "2m"),
            (125, "2m5s"),
            (599, "9m59s"),
            (600, "10m"),
            (10_799, "179m"),
            (10_800, "3h"),
            (11_100, "3h5m"),
            (28_800, "8h"),
            (172_800, "2d"),
            (180_000, "2d2h"),
            (691_200, "8d"),
            (63_072_000, "2y"),
            (63_158_400, "2y1d"),
            (252_288_000, "8y"),
        ];
        for (seconds, expected) in cases {
            assert_eq!(human(seconds), expected, "{seconds}");
        }
    }
}

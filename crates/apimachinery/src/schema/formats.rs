//! The string formats that CRD schemas enforce. Unknown formats (including `int32`, `int64` and `double`) are ignored, as in
//! Kubernetes: only `minimum` and `maximum` limit a number.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::sync::LazyLock;

use regex::Regex;

/// An enforced format.
#[derive(Debug, Clone)]
pub(crate) struct Format {
    /// The name of the format in the schema, for error messages.
    pub name: String,
    check: fn(&str) -> bool,
}

impl Format {
    pub fn from_name(name: &str) -> Option<Self> {
        let check: fn(&str) -> bool = match name.replace('-', "").as_str() {
            "uri" => is_uri,
            "email" => is_email,
            "hostname" => is_hostname,
            "ipv4" => |text| text.parse::<Ipv4Addr>().is_ok(),
            "ipv6" => |text| text.parse::<Ipv6Addr>().is_ok(),
            "cidr" => is_cidr,
            "mac" => is_mac,
            "uuid" => |text| is_uuid(text, None),
            "uuid3" => |text| is_uuid(text, Some('3')),
            "uuid4" => |text| is_uuid(text, Some('4')),
            "uuid5" => |text| is_uuid(text, Some('5')),
            "bsonobjectid" => {
                |text| text.len() == 24 && text.bytes().all(|b| b.is_ascii_hexdigit())
            }
            "hexcolor" => is_hex_color,
            "rgbcolor" => is_rgb_color,
            "ssn" => is_social_security_number,
            "creditcard" => is_credit_card,
            "isbn" => |text| is_isbn10(text) || is_isbn13(text),
            "isbn10" => is_isbn10,
            "isbn13" => is_isbn13,
            "byte" => is_base64,
            "password" => |_| true,
            "date" => is_date,
            "datetime" => is_date_time,
            "duration" => is_duration,
            _ => return None,
        };
        Some(Self {
            name: name.to_owned(),
            check,
        })
    }

    pub fn accepts(&self, text: &str) -> bool {
        (self.check)(text)
    }
}

/// Accepts what Kubernetes accepts: a date, `T`, and a time of day with an offset. There is no range check, so
/// `9999-12-31T23:59:59Z`, a common value for "never", is valid, although no [`jiff::Timestamp`] can represent it.
fn is_date_time(text: &str) -> bool {
    static TIME: LazyLock<Regex> = LazyLock::new(|| {
        Regex::new(
            "^([01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](.[0-9]+)?([zZ]|[+-][0-9]{2}:[0-9]{2})$",
        )
        .expect("the pattern is a constant")
    });
    text.split_once(['T', 't'])
        .is_some_and(|(date, time)| is_date(date) && TIME.is_match(time))
}

fn is_date(text: &str) -> bool {
    text.len() == 10 && text.parse::<jiff::civil::Date>().is_ok()
}

fn is_duration(text: &str) -> bool {
    static WORDS: LazyLock<Regex> = LazyLock::new(|| {
        Regex::new(
            r"^(\d+\s*(ns|nanosecond|nanoseconds|us|µs|μs|microsecond|microseconds|ms|millis|millisecond|milliseconds|s|sec|second|seconds|m|min|minute|minutes|h|hr|hour|hours|d|day|days|w|week|weeks)\s*)+$",
        )
        .expect("the pattern is a constant")
    });
    crate::duration::parse(text).is_ok() || WORDS.is_match(text)
}

fn is_uri(text: &str) -> bool {
    // Accepts what Go's url.ParseRequestURI accepts: an absolute URI or an absolute path.
    let printable = !text.bytes().any(|b| b <= b' ' || b == 0x7f);
    let scheme = text.split_once(':').is_some_and(|(scheme, rest)| {
        scheme.starts_with(|c: char| c.is_ascii_alphabetic())
            && scheme
                .bytes()
                .all(|b| b.is_ascii_alphanumeric() || b"+-.".contains(&b))
            && !rest.is_empty()
    });
    printable && (text.starts_with('/') || scheme)
}

fn is_email(text: &str) -> bool {
    let address = match (text.rfind('<'), text.strip_suffix('>')) {
        (Some(open), Some(inner)) => &inner[open + 1..],
        _ => text,
    };
    let Some((local, domain)) = address.rsplit_once('@') else {
        return false;
    };
    let is_atom = |part: &str| {
        !part.is_empty()
            && part.split('.').all(|word| {
                !word.is_empty()
                    && word.chars().all(|c| {
                        c.is_alphanumeric() || !c.is_ascii() || "!#$%&'*+-/=?^_`{|}~".contains(c)
                    })
            })
    };
    let is_quoted = local.len() > 2 && local.starts_with('"') && local.ends_with('"');
    (is_atom(local) || is_quoted) && is_atom(domain)
}

fn is_hostname(text: &str) -> bool {
    let labels: Vec<&str> = text.split('.').collect();
    let is_label = |label: &&str| {
        (1..=63).contains(&label.len())
            && !label.starts_with('-')
            && !label.ends_with('-')
            && label
                .chars()
                .all(|c| c.is_alphanumeric() || c == '-' || (!c.is_ascii() && !c.is_control()))
    };
    let top = labels.last().copied().unwrap_or_default();
    let good_top =
        labels.len() == 1 || (top.chars().count() >= 2 && top.chars().all(char::is_alphabetic));
    text.len() <= 255 && good_top && labels.iter().all(is_label)
}

fn is_cidr(text: &str) -> bool {
    let Some((address, prefix)) = text.split_once('/') else {
        return false;
    };
    let Ok(address) = address.parse::<IpAddr>() else {
        return false;
    };
    let longest = if address.is_ipv4() { 32 } else { 128 };
    let plain = prefix.bytes().all(|b| b.is_ascii_digit())
        && (prefix.len() == 1 || !prefix.starts_with('0'));
    plain && prefix.parse::<u8>().is_ok_and(|length| length <= longest)
}

fn is_mac(text: &str) -> bool {
    let octets = |separator: char, width: usize| -> Option<usize> {
        let parts: Vec<&str> = text.split(separator).collect();
        let good = parts
            .iter()
            .all(|p| p.len() == width && p.bytes().all(|b| b.is_ascii_hexdigit()));
        good.then_some(parts.len() * width / 2)
    };
    [octets(':', 2), octets('-', 2), octets('.', 4)]
        .iter()
        .flatten()
        .any(|octets| matches!(octets, 6 | 8 | 20))
}

fn is_uuid(text: &str, version: Option<char>) -> bool {
    let plain: String = text.chars().filter(|c| *c != '-').collect();
    let dashes_fit = text
        .char_indices()
        .filter(|(_, c)| *c == '-')
        .all(|(at, _)| {
            matches!(
                text[..at].chars().filter(|c| *c != '-').count(),
                8 | 12 | 16 | 20
            )
        })
        && !text.contains("--");
    let hex = plain.len() == 32 && plain.bytes().all(|b| b.is_ascii_hexdigit());
    if !hex || !dashes_fit {
        return false;
    }
    let Some(version) = version else { return true };
    let variant = plain.as_bytes()[16].to_ascii_lowercase();
    plain.chars().nth(12) == Some(version) && (version == '3' || b"89ab".contains(&variant))
}

fn is_hex_color(text: &str) -> bool {
    let digits = text.strip_prefix('#').unwrap_or(text);
    matches!(digits.len(), 3 | 6) && digits.bytes().all(|b| b.is_ascii_hexdigit())
}

fn is_rgb_color(text: &str) -> bool {
    let inner = text
        .strip_prefix("rgb(")
        .and_then(|rest| rest.strip_suffix(')'));
    let Some(inner) = inner else { return false };
    let parts: Vec<&str> = inner.split(',').map(str::trim).collect();
    parts.len() == 3 && parts.iter().all(|part| part.parse::<u8>().is_ok())
}

fn is_social_security_number(text: &str) -> bool {
    static PATTERN: LazyLock<Regex> = LazyLock::new(|| {
        Regex::new(r"^\d{3}[- ]?\d{2}[- ]?\d{4}$").expect("the pattern is a constant")
    });
    PATTERN.is_match(text)
}

fn is_credit_card(text: &str) -> bool {
    let digits: Vec<u32> = text.chars().filter_map(|c| c.to_digit(10)).collect();
    let doubled = |(at, digit): (usize, &u32)| match (at % 2, digit * 2) {
        (0, _) => *digit,
        (_, twice) if twice > 9 => twice - 9,
        (_, twice) => twice,
    };
    let sum: u32 = digits.iter().rev().enumerate().map(doubled).sum();
    (13..=16).contains(&digits.len()) && sum.is_multiple_of(10)
}

fn is_isbn10(text: &str) -> bool {
    let plain: Vec<char> = text.chars().filter(|c| !matches!(c, '-' | ' ')).collect();
    let value = |(at, c): (usize, &char)| match c {
        'X' | 'x' if at == 9 => Some(10),
        c => c.to_digit(10),
    };
    let digits: Option<Vec<u32>> = plain.iter().enumerate().map(value).collect();
    digits.is_some_and(|digits| {
        digits.len() == 10
            && digits
                .iter()
                .zip((1..=10).rev())
                .map(|(d, w)| d * w)
                .sum::<u32>()
                % 11
                == 0
    })
}

fn is_isbn13(text: &str) -> bool {
    let digits: Option<Vec<u32>> = text
        .chars()
        .filter(|c| !matches!(c, '-' | ' '))
        .map(|c| c.to_digit(10))
        .collect();
    digits.is_some_and(|digits| {
        let weighted = digits
            .iter()
            .enumerate()
            .map(|(at, d)| if at % 2 == 0 { *d } else { d * 3 });
        digits.len() == 13 && weighted.sum::<u32>() % 10 == 0
    })
}

fn is_base64(text: &str) -> bool {
    let body = text.trim_end_matches('=');
    text.len().is_multiple_of(4)
        && text.len() - body.len() <= 2
        && body
            .bytes()
            .all(|b| b.is_ascii_alphanumeric() || b == b'+' || b == b'/')
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn formats_accept_and_refuse() {
        let cases = [
            ("date-time", "2026-11-15T20:00:00Z", "2026-11-15 20:00:00"),
            ("date-time", "9999-12-31T23:59:59Z", "10000-01-01T00:00:00Z"),
            (
                "date-time",
                "2026-11-15t20:00:00.1234567890+23:59",
                "2026-11-15T20:00:60Z",
            ),
            ("date-time", "0000-01-01T00:00:00Z", "2026-02-30T00:00:00Z"),
            ("date", "2026-11-15", "15.11.2026"),
            ("ipv4", "10.0.0.1", "10.0.0"),
            ("ipv6", "fe80::1", "10.0.0.1"),
            ("cidr", "10.0.0.0/8", "10.0.0.0/33"),
            (
                "uuid",
                "123e4567-e89b-12d3-a456-426614174000",
                "123e4567-e89b-12d3-a456",
            ),
            (
                "uuid4",
                "9b2f1d9e-3c0a-4b7e-9d61-0c2d3e4f5a6b",
                "9b2f1d9e-3c0a-1b7e-9d61-0c2d3e4f5a6b",
            ),
            ("byte", "aGVsbG8=", "aGVsbG8"),
            ("duration", "1h30m", "soon"),
            ("duration", "22 ns", "22 parsecs"),
            ("hostname", "example.com", "exa mple"),
            ("email", "a@example.com", "a.example.com"),
            ("uri", "https://example.com/x", "not a uri"),
            ("mac", "01:23:45:67:89:ab", "01:23:45"),
            ("hexcolor", "#ffFFff", "#ffff"),
            ("rgbcolor", "rgb(1,2,255)", "rgb(1,2,256)"),
            ("isbn", "978-0321751041", "978-0321751042"),
            ("isbn10", "0321751043", "0321751044"),
            ("creditcard", "4111 1111 1111 1111", "4111 1111 1111 1112"),
            ("ssn", "111-22-3333", "111-22-33"),
        ];
        for (name, good, bad) in cases {
            let format = Format::from_name(name).unwrap();
            assert!(format.accepts(good), "{name} {good}");
            assert!(!format.accepts(bad), "{name} {bad}");
        }
        assert!(Format::from_name("int32").is_none());
    }
}

//! The CEL types of Kubernetes: quantities, IP addresses, CIDRs, URLs, semantic versions and named formats.

use std::borrow::Cow;
use std::cmp::Ordering;
use std::fmt;
use std::net::IpAddr;

use super::super::eval::{Error, Result};
use super::super::value::{Map, Value};
use crate::names;
use crate::quantity::Quantity;

/// `quantity(s)`, `isQuantity(s)` and the same functions for the other types.
pub(super) fn parse<'a>(name: &str, text: &str) -> Result<Value<'a>> {
    let parsed = match name {
        "quantity" | "isQuantity" => text
            .parse()
            .map(Value::Quantity)
            .map_err(|error: crate::quantity::Error| error.to_string()),
        "ip" | "isIP" | "ip.isCanonical" => address(text)
            .map(Value::Ip)
            .ok_or_else(|| format!("IP Address {} parse error", crate::go::quote(text))),
        "cidr" | "isCIDR" => network(text)
            .map(|(address, width)| Value::Cidr(address, width))
            .ok_or_else(|| format!("network address parse error: {}", crate::go::quote(text))),
        "url" | "isURL" => Url::parse(text)
            .map(|url| Value::Url(url.into()))
            .ok_or_else(|| "URL parse error during conversion from string".to_owned()),
        _ => return Err(Error::NoSuchOverload),
    };
    match (name, parsed) {
        ("ip.isCanonical", Ok(Value::Ip(address))) => Ok(Value::Bool(address.to_string() == text)),
        ("isQuantity" | "isIP" | "isCIDR" | "isURL", parsed) => Ok(Value::Bool(parsed.is_ok())),
        (_, parsed) => parsed.map_err(Error::Other),
    }
}

/// Parses an IP address. Zones and IPv4-mapped IPv6 addresses are refused.
fn address(text: &str) -> Option<IpAddr> {
    let address: IpAddr = text.parse().ok()?;
    match address {
        IpAddr::V6(six) if six.to_ipv4_mapped().is_some() => None,
        other => Some(other),
    }
}

fn network(text: &str) -> Option<(IpAddr, u8)> {
    let (host, width) = text.split_once('/')?;
    let host = address(host)?;
    let plain =
        width.bytes().all(|b| b.is_ascii_digit()) && (width.len() == 1 || !width.starts_with('0'));
    let width: u8 = width.parse().ok().filter(|_| plain)?;
    (width <= if host.is_ipv4() { 32 } else { 128 }).then_some((host, width))
}

fn masked(address: IpAddr, width: u8) -> IpAddr {
    match address {
        IpAddr::V4(four) => {
            let mask = u32::MAX.checked_shl(32 - u32::from(width)).unwrap_or(0);
            IpAddr::V4((u32::from(four) & mask).into())
        }
        IpAddr::V6(six) => {
            let mask = u128::MAX.checked_shl(128 - u32::from(width)).unwrap_or(0);
            IpAddr::V6((u128::from(six) & mask).into())
        }
    }
}

pub(super) fn method<'a>(
    target: &Value<'a>,
    name: &str,
    arguments: &[Value<'a>],
) -> Result<Value<'a>> {
    match target {
        Value::Quantity(quantity) => quantity_method(quantity, name, arguments),
        Value::Ip(address) if arguments.is_empty() => address_method(*address, name),
        Value::Cidr(address, width) => network_method(*address, *width, name, arguments),
        Value::Url(url) if arguments.is_empty() => url_method(url, name),
        Value::Semver(version) => {
            let compared = match arguments {
                [Value::Semver(other)] => Some(version.cmp(other)),
                _ => None,
            };
            let part = match name {
                "major" => version.numbers[0],
                "minor" => version.numbers[1],
                "patch" => version.numbers[2],
                _ => return ordering(name, compared.ok_or(Error::NoSuchOverload)?),
            };
            i64::try_from(part)
                .map(Value::Int)
                .map_err(|_| Error::Overflow)
        }
        _ => Err(Error::NoSuchOverload),
    }
}

fn ordering<'a>(name: &str, ordering: Ordering) -> Result<Value<'a>> {
    match name {
        "isLessThan" => Ok(Value::Bool(ordering.is_lt())),
        "isGreaterThan" => Ok(Value::Bool(ordering.is_gt())),
        "compareTo" => Ok(Value::Int(ordering as i64)),
        _ => Err(Error::NoSuchOverload),
    }
}

fn quantity_method<'a>(
    quantity: &Quantity,
    name: &str,
    arguments: &[Value<'a>],
) -> Result<Value<'a>> {
    let other = match arguments {
        [Value::Quantity(other)] => Some(*other),
        [Value::Int(number)] if matches!(name, "add" | "sub") => Some(Quantity::from(*number)),
        [] => None,
        _ => return Err(Error::NoSuchOverload),
    };
    let fits = quantity.is_integer()
        && *quantity <= Quantity::from(i64::MAX)
        && *quantity >= Quantity::from(i64::MIN);
    match (name, other) {
        ("isInteger", None) => Ok(Value::Bool(fits)),
        ("asInteger", None) if fits => Ok(Value::Int(quantity.value())),
        ("asInteger", None) => Err(Error::Other("cannot convert value to integer".to_owned())),
        ("asApproximateFloat", None) => Ok(Value::Double(quantity.as_f64())),
        ("sign", None) => Ok(Value::Int(quantity.sign().into())),
        ("add", Some(other)) => quantity
            .checked_add(other)
            .map(Value::Quantity)
            .ok_or(Error::Overflow),
        ("sub", Some(other)) => quantity
            .checked_sub(other)
            .map(Value::Quantity)
            .ok_or(Error::Overflow),
        (name, Some(other)) => ordering(name, quantity.cmp(&other)),
        _ => Err(Error::NoSuchOverload),
    }
}

fn address_method<'a>(address: IpAddr, name: &str) -> Result<Value<'a>> {
    let link_local_multicast = match address {
        IpAddr::V4(four) => four.octets()[..3] == [224, 0, 0],
        IpAddr::V6(six) => six.segments()[0] & 0xff0f == 0xff02,
    };
    let link_local = match address {
        IpAddr::V4(four) => four.is_link_local(),
        IpAddr::V6(six) => six.segments()[0] & 0xffc0 == 0xfe80,
    };
    let broadcast = matches!(address, IpAddr::V4(four) if four.is_broadcast());
    Ok(match name {
        "family" => Value::Int(if address.is_ipv4() { 4 } else { 6 }),
        "isUnspecified" => Value::Bool(address.is_unspecified()),
        "isLoopback" => Value::Bool(address.is_loopback()),
        "isLinkLocalMulticast" => Value::Bool(link_local_multicast),
        "isLinkLocalUnicast" => Value::Bool(link_local),
        "isGlobalUnicast" => Value::Bool(
            !(address.is_unspecified()
                || address.is_loopback()
                || address.is_multicast()
                || link_local
                || broadcast),
        ),
        _ => return Err(Error::NoSuchOverload),
    })
}

fn network_method<'a>(
    address: IpAddr,
    width: u8,
    name: &str,
    arguments: &[Value<'a>],
) -> Result<Value<'a>> {
    let contains = |other: IpAddr, other_width: u8| {
        other.is_ipv4() == address.is_ipv4()
            && other_width >= width
            && masked(other, width) == masked(address, width)
    };
    let full = |address: IpAddr| if address.is_ipv4() { 32 } else { 128 };
    Ok(match (name, arguments) {
        ("ip", []) => Value::Ip(address),
        ("masked", []) => Value::Cidr(masked(address, width), width),
        ("prefixLength", []) => Value::Int(width.into()),
        ("containsIP", [Value::Ip(other)]) => Value::Bool(contains(*other, full(*other))),
        ("containsIP", [Value::String(text)]) => match self::address(text) {
            Some(other) => Value::Bool(contains(other, full(other))),
            None => {
                return Err(Error::Other(format!(
                    "IP Address {} parse error",
                    crate::go::quote(text)
                )));
            }
        },
        ("containsCIDR", [Value::Cidr(other, other_width)]) => {
            Value::Bool(contains(*other, *other_width))
        }
        ("containsCIDR", [Value::String(text)]) => match network(text) {
            Some((other, other_width)) => Value::Bool(contains(other, other_width)),
            None => {
                return Err(Error::Other(format!(
                    "network address parse error: {}",
                    crate::go::quote(text)
                )));
            }
        },
        _ => return Err(Error::NoSuchOverload),
    })
}

/// The parts of an absolute URI or of an absolute path.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Url {
    pub text: String,
    scheme: String,
    host: String,
    path: String,
    query: String,
}

impl Url {
    fn parse(text: &str) -> Option<Self> {
        if text.bytes().any(|b| b < b' ' || b == 0x7f) {
            return None;
        }
        let without_fragment = text.split('#').next()?;
        let (scheme, rest) = match without_fragment.split_once(':') {
            _ if without_fragment.starts_with('/') => ("", without_fragment),
            Some((scheme, rest)) => (scheme, rest),
            None => return None,
        };
        let valid_scheme = scheme.is_empty()
            || (scheme.starts_with(|c: char| c.is_ascii_alphabetic())
                && scheme
                    .bytes()
                    .all(|b| b.is_ascii_alphanumeric() || b"+-.".contains(&b)));
        if !valid_scheme {
            return None;
        }
        let (rest, query) = rest.split_once('?').unwrap_or((rest, ""));
        let (host, path) = match rest.strip_prefix("//") {
            Some(authority) => {
                let end = authority.find('/').unwrap_or(authority.len());
                (&authority[..end], &authority[end..])
            }
            None => ("", rest),
        };
        let host = host.rsplit('@').next().unwrap_or_default();
        let url = Self {
            text: text.to_owned(),
            scheme: scheme.to_ascii_lowercase(),
            host: host.to_owned(),
            path: path.to_owned(),
            query: query.to_owned(),
        };
        let port = url.port();
        let good_host = url
            .hostname()
            .is_some_and(|name| !name.contains([' ', '<', '>', '"']));
        (good_host && port.bytes().all(|b| b.is_ascii_digit())).then_some(url)
    }

    fn hostname(&self) -> Option<&str> {
        if let Some(rest) = self.host.strip_prefix('[') {
            let (inner, after) = rest.split_once(']')?;
            return (after.is_empty() || after.starts_with(':')).then_some(inner);
        }
        match self.host.split_once(':') {
            Some((_, port)) if port.contains(':') => None,
            Some((name, _)) => Some(name),
            None => Some(&self.host),
        }
    }

    fn port(&self) -> &str {
        let after = self.host.rsplit(']').next().unwrap_or_default();
        after.rsplit_once(':').map_or("", |(_, port)| port)
    }
}

fn url_method<'a>(url: &Url, name: &str) -> Result<Value<'a>> {
    Ok(match name {
        "getScheme" => Value::text(url.scheme.clone()),
        "getHost" => Value::text(url.host.clone()),
        "getHostname" => Value::text(url.hostname().unwrap_or_default().to_owned()),
        "getPort" => Value::text(url.port().to_owned()),
        "getEscapedPath" => Value::text(url.path.replace(' ', "%20")),
        "getQuery" => {
            let mut entries: Vec<(String, Vec<Value<'a>>)> = Vec::new();
            for pair in url.query.split('&').filter(|pair| !pair.is_empty()) {
                let (key, value) = pair.split_once('=').unwrap_or((pair, ""));
                let (key, value) = (percent_decode(key), Value::text(percent_decode(value)));
                match entries.iter_mut().find(|(existing, _)| *existing == key) {
                    Some((_, values)) => values.push(value),
                    None => entries.push((key, vec![value])),
                }
            }
            let entries = entries
                .into_iter()
                .map(|(key, values)| (Value::text(key), Value::list(values)));
            Value::Map(Map::Owned(entries.collect::<Vec<_>>().into()))
        }
        _ => return Err(Error::NoSuchOverload),
    })
}

fn percent_decode(text: &str) -> String {
    let mut bytes = Vec::with_capacity(text.len());
    let mut rest = text.as_bytes();
    while let Some((&first, after)) = rest.split_first() {
        let hex = after
            .get(..2)
            .and_then(|hex| std::str::from_utf8(hex).ok())
            .and_then(|hex| u8::from_str_radix(hex, 16).ok());
        match (first, hex) {
            (b'%', Some(byte)) => {
                bytes.push(byte);
                rest = &after[2..];
            }
            (b'+', _) => {
                bytes.push(b' ');
                rest = after;
            }
            _ => {
                bytes.push(first);
                rest = after;
            }
        }
    }
    String::from_utf8_lossy(&bytes).into_owned()
}

/// A semantic version.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Semver {
    numbers: [u64; 3],
    prerelease: Vec<String>,
    build: String,
}

impl Semver {
    pub fn parse(text: &str, normalize: bool) -> Option<Self> {
        let text = if normalize {
            text.strip_prefix('v').unwrap_or(text)
        } else {
            text
        };
        let (rest, build) = text.split_once('+').unwrap_or((text, ""));
        let (core, prerelease) = match rest.split_once('-') {
            Some((core, prerelease)) => (core, prerelease.split('.').map(str::to_owned).collect()),
            None => (rest, Vec::new()),
        };
        let parts: Vec<&str> = core.split('.').collect();
        if parts.len() > 3 || (parts.len() < 3 && !normalize) {
            return None;
        }
        let mut numbers = [0; 3];
        for (slot, part) in numbers.iter_mut().zip(&parts) {
            let digits = !part.is_empty() && part.bytes().all(|b| b.is_ascii_digit());
            if !digits || (!normalize && part.len() > 1 && part.starts_with('0')) {
                return None;
            }
            *slot = part.parse().ok()?;
        }
        let identifier = |part: &str| {
            !part.is_empty() && part.bytes().all(|b| b.is_ascii_alphanumeric() || b == b'-')
        };
        let good = prerelease.iter().all(|part: &String| identifier(part))
            && (build.is_empty() || build.split('.').all(identifier));
        good.then(|| Self {
            numbers,
            prerelease,
            build: build.to_owned(),
        })
    }

    pub fn cmp(&self, other: &Self) -> Ordering {
        let prerelease = match (self.prerelease.is_empty(), other.prerelease.is_empty()) {
            (true, true) => Ordering::Equal,
            (true, false) => Ordering::Greater,
            (false, true) => Ordering::Less,
            (false, false) => {
                let parts = self.prerelease.iter().zip(&other.prerelease);
                parts
                    .map(
                        |(left, right)| match (left.parse::<u64>(), right.parse::<u64>()) {
                            (Ok(left), Ok(right)) => left.cmp(&right),
                            (Ok(_), Err(_)) => Ordering::Less,
                            (Err(_), Ok(_)) => Ordering::Greater,
                            _ => left.cmp(right),
                        },
                    )
                    .find(|ordering| ordering.is_ne())
                    .unwrap_or_else(|| self.prerelease.len().cmp(&other.prerelease.len()))
            }
        };
        self.numbers.cmp(&other.numbers).then(prerelease)
    }
}

impl fmt::Display for Semver {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let [major, minor, patch] = self.numbers;
        write!(f, "{major}.{minor}.{patch}")?;
        if !self.prerelease.is_empty() {
            write!(f, "-{}", self.prerelease.join("."))?;
        }
        if !self.build.is_empty() {
            write!(f, "+{}", self.build)?;
        }
        Ok(())
    }
}

/// A format that `format.<name>()` returns.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum NamedFormat {
    Dns1123Label,
    Dns1123Subdomain,
    Dns1035Label,
    QualifiedName,
    Dns1123LabelPrefix,
    Dns1123SubdomainPrefix,
    Dns1035LabelPrefix,
    LabelValue,
    Uri,
    Uuid,
    Byte,
    Date,
    DateTime,
}

const FORMATS: [(&str, NamedFormat); 13] = [
    ("dns1123Label", NamedFormat::Dns1123Label),
    ("dns1123Subdomain", NamedFormat::Dns1123Subdomain),
    ("dns1035Label", NamedFormat::Dns1035Label),
    ("qualifiedName", NamedFormat::QualifiedName),
    ("dns1123LabelPrefix", NamedFormat::Dns1123LabelPrefix),
    (
        "dns1123SubdomainPrefix",
        NamedFormat::Dns1123SubdomainPrefix,
    ),
    ("dns1035LabelPrefix", NamedFormat::Dns1035LabelPrefix),
    ("labelValue", NamedFormat::LabelValue),
    ("uri", NamedFormat::Uri),
    ("uuid", NamedFormat::Uuid),
    ("byte", NamedFormat::Byte),
    ("date", NamedFormat::Date),
    ("datetime", NamedFormat::DateTime),
];

impl NamedFormat {
    pub fn name(self) -> &'static str {
        FORMATS
            .iter()
            .find(|(_, format)| *format == self)
            .map_or("", |(name, _)| name)
    }

    pub fn problems(self, text: &str) -> Vec<String> {
        let prefix = names::as_generate_name(text);
        let schema = |name: &str, message: &str| {
            let good = crate::schema::accepts_format(name, text);
            if good {
                Vec::new()
            } else {
                vec![message.to_owned()]
            }
        };
        match self {
            Self::Dns1123Label => names::dns_1123_label(text),
            Self::Dns1123Subdomain => names::dns_1123_subdomain(text),
            Self::Dns1035Label => names::dns_1035_label(text),
            Self::QualifiedName => names::qualified_name(text),
            Self::Dns1123LabelPrefix => names::dns_1123_label(prefix),
            Self::Dns1123SubdomainPrefix => names::dns_1123_subdomain(prefix),
            Self::Dns1035LabelPrefix => names::dns_1035_label(prefix),
            Self::LabelValue => names::label_value(text),
            Self::Uri if Url::parse(text).is_some() => Vec::new(),
            Self::Uri => vec!["invalid URL".to_owned()],
            Self::Uuid => schema("uuid", "does not match the UUID format"),
            Self::Byte => schema("byte", "invalid base64"),
            Self::Date => schema("date", "invalid date"),
            Self::DateTime => schema("date-time", "invalid datetime"),
        }
    }
}

/// `format.dns1123Label()` and `format.named('dns1123Label')`.
pub(super) fn format<'a>(name: &str, arguments: &[Value<'a>]) -> Result<Value<'a>> {
    let find = |wanted: &str| {
        FORMATS
            .iter()
            .find(|(name, _)| *name == wanted)
            .map(|(_, format)| Value::Format(*format))
    };
    match (name, arguments) {
        ("named", [Value::String(wanted)]) => {
            let wanted: &Cow<'a, str> = wanted;
            Ok(find(wanted).map_or(Value::Optional(None), Value::some))
        }
        (name, []) => find(name).ok_or(Error::NoSuchOverload),
        _ => Err(Error::NoSuchOverload),
    }
}

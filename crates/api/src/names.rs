//! Name hashes, and names that are valid by construction.

use std::fmt;

/// The maximum length of a label value.
const LABEL_VALUE_MAX: usize = 63;
/// The maximum length of a DNS-1123 subdomain, the name of most objects.
const SUBDOMAIN_MAX: usize = 253;

/// The hash by which labels refer to a name of any length: 32-bit FNV-1a as eight lower-case hex digits.
pub fn name_hash(name: &str) -> String {
    const OFFSET_BASIS: u32 = 0x811c_9dc5;
    const PRIME: u32 = 0x0100_0193;
    let hash = name.bytes().fold(OFFSET_BASIS, |hash, byte| {
        (hash ^ u32::from(byte)).wrapping_mul(PRIME)
    });
    format!("{hash:08x}")
}

/// Why a text is not a valid name.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum NameError {
    #[error("{what} must not be empty")]
    Empty { what: &'static str },
    #[error("{what} {value:?} has {length} characters and may have at most {max}")]
    TooLong {
        what: &'static str,
        value: String,
        length: usize,
        max: usize,
    },
    #[error("{what} {value:?} {rule}")]
    Malformed {
        what: &'static str,
        value: String,
        rule: &'static str,
    },
}

macro_rules! validated_name {
    ($(#[$meta:meta])* $name:ident, $check:ident) => {
        $(#[$meta])*
        #[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
        pub struct $name(String);

        impl $name {
            pub fn as_str(&self) -> &str {
                &self.0
            }
        }

        impl std::str::FromStr for $name {
            type Err = NameError;

            fn from_str(value: &str) -> Result<Self, NameError> {
                $check(value)?;
                Ok(Self(value.to_owned()))
            }
        }

        impl fmt::Display for $name {
            fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
                formatter.write_str(&self.0)
            }
        }

        impl AsRef<str> for $name {
            fn as_ref(&self) -> &str {
                &self.0
            }
        }
    };
}

validated_name! {
    /// The name of an object: a DNS-1123 subdomain.
    ObjectName, check_object_name
}
validated_name! {
    /// The name of a namespace: a DNS-1123 label.
    NamespaceName, check_namespace_name
}
validated_name! {
    /// A label or annotation key: an optional domain, a slash, and a name.
    MetadataKey, check_metadata_key
}
validated_name! {
    /// The value of a label: at most 63 characters, may be empty.
    LabelValue, check_label_value
}

impl MetadataKey {
    /// The domain before the slash, if there is one.
    pub fn domain(&self) -> Option<&str> {
        self.0.split_once('/').map(|(domain, _)| domain)
    }
}

fn check_object_name(value: &str) -> Result<(), NameError> {
    check_subdomain("name", value)
}

fn check_namespace_name(value: &str) -> Result<(), NameError> {
    check_length("namespace", value, LABEL_VALUE_MAX)?;
    if is_dns_label(value) {
        return Ok(());
    }
    Err(malformed(
        "namespace",
        value,
        "must consist of lower-case letters, digits and '-', and begin and end with a letter or digit",
    ))
}

fn check_metadata_key(value: &str) -> Result<(), NameError> {
    let (domain, name) = match value.split_once('/') {
        Some((domain, name)) => (Some(domain), name),
        None => (None, value),
    };
    if let Some(domain) = domain {
        check_subdomain("key domain", domain)?;
    }
    check_length("key name", name, LABEL_VALUE_MAX)?;
    check_label_text("key name", name)
}

fn check_label_value(value: &str) -> Result<(), NameError> {
    if value.is_empty() {
        return Ok(());
    }
    check_length("label value", value, LABEL_VALUE_MAX)?;
    check_label_text("label value", value)
}

fn check_subdomain(what: &'static str, value: &str) -> Result<(), NameError> {
    check_length(what, value, SUBDOMAIN_MAX)?;
    if value.split('.').all(is_dns_label) {
        return Ok(());
    }
    Err(malformed(
        what,
        value,
        "must consist of lower-case letters, digits, '-' and '.', and begin and end with a letter or digit",
    ))
}

fn check_length(what: &'static str, value: &str, max: usize) -> Result<(), NameError> {
    if value.is_empty() {
        return Err(NameError::Empty { what });
    }
    if value.len() > max {
        return Err(NameError::TooLong {
            what,
            value: value.to_owned(),
            length: value.len(),
            max,
        });
    }
    Ok(())
}

fn check_label_text(what: &'static str, value: &str) -> Result<(), NameError> {
    let bytes = value.as_bytes();
    let ends_are_alphanumeric = [bytes.first(), bytes.last()]
        .into_iter()
        .all(|end| end.is_some_and(u8::is_ascii_alphanumeric));
    let all_allowed = bytes
        .iter()
        .all(|byte| byte.is_ascii_alphanumeric() || matches!(byte, b'-' | b'_' | b'.'));
    if ends_are_alphanumeric && all_allowed {
        return Ok(());
    }
    Err(malformed(
        what,
        value,
        "must consist of letters, digits, '-', '_' and '.', and begin and end with a letter or digit",
    ))
}

fn is_dns_label(text: &str) -> bool {
    let bytes = text.as_bytes();
    !bytes.is_empty()
        && !text.starts_with('-')
        && !text.ends_with('-')
        && bytes
            .iter()
            .all(|byte| byte.is_ascii_lowercase() || byte.is_ascii_digit() || *byte == b'-')
}

fn malformed(what: &'static str, value: &str, rule: &'static str) -> NameError {
    NameError::Malformed {
        what,
        value: value.to_owned(),
        rule,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn name_hashes_are_those_of_existing_clusters() {
        let vectors = [
            ("", "811c9dc5"),
            ("a", "e40c292c"),
            ("foobar", "bf9cf968"),
            ("test", "afd071e5"),
        ];
        for (name, hash) in vectors {
            assert_eq!(name_hash(name), hash, "{name}");
        }
    }

    #[test]
    fn a_hash_keeps_its_leading_zeros() {
        let short = (0..1_000)
            .map(|number| name_hash(&format!("name-{number}")))
            .find(|hash| hash.starts_with('0'))
            .unwrap();
        assert_eq!(short.len(), 8);
    }

    #[test]
    fn invalid_names_are_refused_with_the_violated_rule() {
        assert!("my-sandbox.v1".parse::<ObjectName>().is_ok());
        assert!("a".repeat(253).parse::<ObjectName>().is_ok());
        for bad in ["", "My", "-a", "a-", "a..b", "a_b", "ä", &"a".repeat(254)] {
            assert!(bad.parse::<ObjectName>().is_err(), "{bad:?}");
        }
        for bad in ["a.b", "", "A", &"a".repeat(64)] {
            assert!(bad.parse::<NamespaceName>().is_err(), "{bad:?}");
        }
        let error = "Bad Value".parse::<LabelValue>().unwrap_err().to_string();
        assert!(
            error.contains("label value \"Bad Value\" must consist of"),
            "{error}"
        );
        let error = "x"
            .repeat(64)
            .parse::<LabelValue>()
            .unwrap_err()
            .to_string();
        assert!(
            error.contains("64 characters and may have at most 63"),
            "{error}"
        );
    }

    #[test]
    fn keys_have_an_optional_domain() {
        let key: MetadataKey = "example.com/team".parse().unwrap();
        assert_eq!(key.domain(), Some("example.com"));
        assert_eq!("team".parse::<MetadataKey>().unwrap().domain(), None);
        for bad in ["/team", "example.com/", "a/b/c", "Example.com/x", "_x", ""] {
            assert!(bad.parse::<MetadataKey>().is_err(), "{bad:?}");
        }
        assert!("".parse::<LabelValue>().is_ok());
    }
}

//! Validates names, label keys and label values, with the error messages of Kubernetes.
//!
//! A check returns the list of problems, which is empty for a valid value. Callers add the field path.

const QUALIFIED_NAME: &str = "([A-Za-z0-9][-A-Za-z0-9_.]*)?[A-Za-z0-9]";
const QUALIFIED_NAME_MESSAGE: &str = "must consist of alphanumeric characters, '-', '_' or '.', and must start and end with an alphanumeric character";
const LABEL_VALUE: &str = "(([A-Za-z0-9][-A-Za-z0-9_.]*)?[A-Za-z0-9])?";
const LABEL_VALUE_MESSAGE: &str = "a valid label must be an empty string or consist of alphanumeric characters, '-', '_' or '.', and must start and end with an alphanumeric character";
const DNS_1123_LABEL: &str = "[a-z0-9]([-a-z0-9]*[a-z0-9])?";
const DNS_1123_LABEL_MESSAGE: &str = "a lowercase RFC 1123 label must consist of lower case alphanumeric characters or '-', and must start and end with an alphanumeric character";
const DNS_1123_SUBDOMAIN: &str = "[a-z0-9]([-a-z0-9]*[a-z0-9])?(\\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*";
const DNS_1123_SUBDOMAIN_MESSAGE: &str = "a lowercase RFC 1123 subdomain must consist of lower case alphanumeric characters, '-' or '.', and must start and end with an alphanumeric character";
const DNS_1035_LABEL: &str = "[a-z]([-a-z0-9]*[a-z0-9])?";
const DNS_1035_LABEL_MESSAGE: &str = "a DNS-1035 label must consist of lower case alphanumeric characters or '-', start with an alphabetic character, and end with an alphanumeric character";
const ENV_VAR_MESSAGE: &str = "a valid environment variable name must consist only of printable ASCII characters other than '='";
const CONFIG_KEY: &str = "[-._a-zA-Z0-9]+";
const CONFIG_KEY_MESSAGE: &str =
    "a valid config key must consist of alphanumeric characters, '-', '_' or '.'";

pub const DNS_1123_LABEL_MAX: usize = 63;
pub const DNS_1123_SUBDOMAIN_MAX: usize = 253;

fn too_long(maximum: usize) -> String {
    format!("must be no more than {maximum} bytes")
}

fn expected(message: &str, pattern: &str, examples: &[&str]) -> String {
    let examples: Vec<String> = examples.iter().map(|e| format!("'{e}'")).collect();
    format!(
        "{message} (e.g. {}, regex used for validation is '{pattern}')",
        examples.join(",  or ")
    )
}

/// Whether the first and last characters satisfy `edge` and those between satisfy `inner`.
fn edges_and_inner(text: &str, edge: impl Fn(u8) -> bool, inner: impl Fn(u8) -> bool) -> bool {
    let bytes = text.as_bytes();
    match (bytes.first(), bytes.last()) {
        (Some(&first), Some(&last)) => edge(first) && edge(last) && bytes.iter().all(|&b| inner(b)),
        _ => false,
    }
}

fn lower_alphanumeric(byte: u8) -> bool {
    byte.is_ascii_lowercase() || byte.is_ascii_digit()
}

fn is_dns_label(text: &str) -> bool {
    edges_and_inner(text, lower_alphanumeric, |b| {
        lower_alphanumeric(b) || b == b'-'
    })
}

fn is_dns_subdomain(text: &str) -> bool {
    text.split('.').all(is_dns_label)
}

fn is_name_part(text: &str) -> bool {
    edges_and_inner(
        text,
        |b| b.is_ascii_alphanumeric(),
        |b| b.is_ascii_alphanumeric() || matches!(b, b'-' | b'_' | b'.'),
    )
}

/// A DNS label (RFC 1123), such as the name of a namespace or of a container.
pub fn dns_1123_label(value: &str) -> Vec<String> {
    let mut problems = Vec::new();
    if value.len() > DNS_1123_LABEL_MAX {
        problems.push(too_long(DNS_1123_LABEL_MAX));
    }
    if !is_dns_label(value) {
        if is_dns_subdomain(value) {
            problems.push("must not contain dots".to_owned());
        } else {
            problems.push(expected(
                DNS_1123_LABEL_MESSAGE,
                DNS_1123_LABEL,
                &["my-name", "123-abc"],
            ));
        }
    }
    problems
}

/// A DNS subdomain (RFC 1123), such as the name of most objects.
pub fn dns_1123_subdomain(value: &str) -> Vec<String> {
    let mut problems = Vec::new();
    if value.len() > DNS_1123_SUBDOMAIN_MAX {
        problems.push(too_long(DNS_1123_SUBDOMAIN_MAX));
    }
    if !is_dns_subdomain(value) {
        problems.push(expected(
            DNS_1123_SUBDOMAIN_MESSAGE,
            DNS_1123_SUBDOMAIN,
            &["example.com"],
        ));
    }
    problems
}

/// A DNS label (RFC 1035), such as the name of a service.
pub fn dns_1035_label(value: &str) -> Vec<String> {
    let mut problems = Vec::new();
    if value.len() > DNS_1123_LABEL_MAX {
        problems.push(too_long(DNS_1123_LABEL_MAX));
    }
    let starts_with_letter = value.as_bytes().first().is_some_and(u8::is_ascii_lowercase);
    if !starts_with_letter || !is_dns_label(value) {
        problems.push(expected(
            DNS_1035_LABEL_MESSAGE,
            DNS_1035_LABEL,
            &["my-name", "abc-123"],
        ));
    }
    problems
}

/// `[prefix/]name`, such as the key of a label or annotation, or the name of a finalizer or condition.
pub fn qualified_name(value: &str) -> Vec<String> {
    let mut problems = Vec::new();
    let message = || {
        expected(
            QUALIFIED_NAME_MESSAGE,
            QUALIFIED_NAME,
            &["MyName", "my.name", "123-abc"],
        )
    };
    let parts: Vec<&str> = value.split('/').collect();
    let name = match parts[..] {
        [name] => name,
        [prefix, name] => {
            if prefix.is_empty() {
                problems.push("prefix part must be non-empty".to_owned());
            } else {
                problems.extend(
                    dns_1123_subdomain(prefix)
                        .into_iter()
                        .map(|p| format!("prefix part {p}")),
                );
            }
            name
        }
        _ => {
            problems.push(format!(
                "a qualified name {} with an optional DNS subdomain prefix and '/' (e.g. 'example.com/MyName')",
                message()
            ));
            return problems;
        }
    };
    if name.is_empty() {
        problems.push("name part must be non-empty".to_owned());
    } else if name.len() > DNS_1123_LABEL_MAX {
        problems.push(format!("name part {}", too_long(DNS_1123_LABEL_MAX)));
    }
    if !is_name_part(name) {
        problems.push(format!("name part {}", message()));
    }
    problems
}

pub fn label_value(value: &str) -> Vec<String> {
    let mut problems = Vec::new();
    if value.len() > DNS_1123_LABEL_MAX {
        problems.push(too_long(DNS_1123_LABEL_MAX));
    }
    if !value.is_empty() && !is_name_part(value) {
        problems.push(expected(
            LABEL_VALUE_MESSAGE,
            LABEL_VALUE,
            &["MyValue", "my_value", "12345"],
        ));
    }
    problems
}

/// The name of a container port: an IANA service name.
pub fn port_name(value: &str) -> Vec<String> {
    let mut problems = Vec::new();
    if value.len() > 15 {
        problems.push(too_long(15));
    }
    if value.is_empty() || !value.bytes().all(|b| lower_alphanumeric(b) || b == b'-') {
        problems.push(
            "must contain only alpha-numeric characters (a-z, 0-9), and hyphens (-)".to_owned(),
        );
    }
    if !value.bytes().any(|b| b.is_ascii_lowercase()) {
        problems.push("must contain at least one letter (a-z)".to_owned());
    }
    if value.contains("--") {
        problems.push("must not contain consecutive hyphens".to_owned());
    }
    if value.starts_with('-') || value.ends_with('-') {
        problems.push("must not begin or end with a hyphen".to_owned());
    }
    problems
}

pub fn port_number(value: i64) -> Vec<String> {
    if (1..=65535).contains(&value) {
        Vec::new()
    } else {
        vec!["must be between 1 and 65535, inclusive".to_owned()]
    }
}

pub fn environment_variable(value: &str) -> Vec<String> {
    if value.is_empty() {
        return vec!["environment variable name must be non-empty".to_owned()];
    }
    if value
        .bytes()
        .all(|b| (b' '..=b'~').contains(&b) && b != b'=')
    {
        Vec::new()
    } else {
        vec![ENV_VAR_MESSAGE.to_owned()]
    }
}

/// The key of a config map or secret.
pub fn config_key(value: &str) -> Vec<String> {
    let mut problems = Vec::new();
    if value.len() > DNS_1123_SUBDOMAIN_MAX {
        problems.push(too_long(DNS_1123_SUBDOMAIN_MAX));
    }
    let permitted = |b: u8| b.is_ascii_alphanumeric() || matches!(b, b'-' | b'_' | b'.');
    if value.is_empty() || !value.bytes().all(permitted) {
        problems.push(expected(
            CONFIG_KEY_MESSAGE,
            CONFIG_KEY,
            &["key.name", "KEY_NAME", "key-name"],
        ));
    } else if value == "." || value == ".." {
        problems.push(format!("must not be '{value}'"));
    } else if value.starts_with("..") {
        problems.push("must not start with '..'".to_owned());
    }
    problems
}

/// Removes the trailing '-' of `metadata.generateName`, so that the prefix can be validated as a name.
pub fn as_generate_name(prefix: &str) -> &str {
    prefix.strip_suffix('-').unwrap_or(prefix)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn good_names_pass() {
        for name in ["a", "my-name", "123-abc"] {
            assert!(dns_1123_label(name).is_empty(), "{name}");
        }
        assert!(dns_1123_subdomain("a.b-c.d").is_empty());
        assert!(dns_1035_label("web-0").is_empty());
        for key in ["app", "kubernetes.io/metadata.name", "a/B_c"] {
            assert!(qualified_name(key).is_empty(), "{key}");
        }
        for value in ["", "a", "A_b.c-d"] {
            assert!(label_value(value).is_empty(), "{value}");
        }
    }

    #[test]
    fn invalid_names_get_the_messages_of_kubernetes() {
        assert_eq!(
            dns_1123_subdomain("Bad_Name"),
            [
                "a lowercase RFC 1123 subdomain must consist of lower case alphanumeric characters, '-' or '.', and \
                 must start and end with an alphanumeric character (e.g. 'example.com', regex used for validation is \
                 '[a-z0-9]([-a-z0-9]*[a-z0-9])?(\\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*')"
            ]
        );
        assert_eq!(dns_1123_label("a.b"), ["must not contain dots"]);
        assert_eq!(
            dns_1123_label(&"a".repeat(64)),
            ["must be no more than 63 bytes"]
        );
        assert_eq!(qualified_name("/x"), ["prefix part must be non-empty"]);
        assert_eq!(qualified_name("a/b/c").len(), 1);
        assert_eq!(label_value("-a").len(), 1);
        assert_eq!(dns_1035_label("0a").len(), 1);
        assert_eq!(port_number(0), ["must be between 1 and 65535, inclusive"]);
        assert_eq!(config_key(".."), ["must not be '..'"]);
    }
}

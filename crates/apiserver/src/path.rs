//! Parses the path and the query string of a request. It knows Kubernetes' URL scheme but not which resources are served.

/// The path of a request for a resource.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ResourcePath {
    /// API group, empty for core.
    pub group: String,
    /// API version.
    pub version: String,
    /// Namespace, empty for cluster scope or all namespaces.
    pub namespace: String,
    /// Plural name.
    pub resource: String,
    /// Object name, empty for the collection.
    pub name: String,
    /// Subresource, empty for the object itself.
    pub subresource: String,
    /// The path after the subresource, for proxies.
    pub rest: String,
}

/// A parsed path.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Path {
    /// `/api` and `/apis` and the paths directly below them.
    Discovery(Vec<String>),
    /// Objects.
    Resource(ResourcePath),
    /// Anything else: health, version, OpenAPI.
    Other(String),
}

/// Parses a path. Segments are percent-decoded.
pub fn parse(path: &str) -> Path {
    let segments: Vec<String> = path
        .split('/')
        .filter(|segment| !segment.is_empty())
        .map(decode)
        .collect();
    let (group, version, rest) = match segments.first().map(String::as_str) {
        Some("api") if segments.len() <= 2 => return Path::Discovery(segments),
        Some("apis") if segments.len() <= 3 => return Path::Discovery(segments),
        Some("api") => (String::new(), segments[1].clone(), &segments[2..]),
        Some("apis") => (segments[1].clone(), segments[2].clone(), &segments[3..]),
        _ => return Path::Other(path.to_owned()),
    };
    let mut found = ResourcePath {
        group,
        version,
        ..ResourcePath::default()
    };
    let object = match rest {
        // `namespaces/x`, `namespaces/x/status` and `namespaces/x/finalize` are the namespace itself.
        [namespaces, _] if namespaces == "namespaces" => rest,
        [namespaces, _, sub]
            if namespaces == "namespaces" && matches!(sub.as_str(), "status" | "finalize") =>
        {
            rest
        }
        [namespaces, namespace, below @ ..] if namespaces == "namespaces" => {
            found.namespace.clone_from(namespace);
            below
        }
        _ => rest,
    };
    let mut parts = object.iter().cloned();
    found.resource = parts.next().unwrap_or_default();
    found.name = parts.next().unwrap_or_default();
    found.subresource = parts.next().unwrap_or_default();
    found.rest = parts.collect::<Vec<_>>().join("/");
    Path::Resource(found)
}

/// Percent-decodes one segment. Malformed escapes stay unchanged.
pub fn decode(segment: &str) -> String {
    decode_with(segment, false)
}

fn decode_with(text: &str, plus_is_space: bool) -> String {
    let bytes = text.as_bytes();
    let mut decoded = Vec::with_capacity(bytes.len());
    let mut index = 0;
    while index < bytes.len() {
        let escaped = (bytes[index] == b'%')
            .then(|| bytes.get(index + 1..index + 3))
            .flatten()
            .and_then(|digits| std::str::from_utf8(digits).ok())
            .and_then(|digits| u8::from_str_radix(digits, 16).ok());
        if let Some(byte) = escaped {
            decoded.push(byte);
            index += 3;
        } else {
            decoded.push(if plus_is_space && bytes[index] == b'+' {
                b' '
            } else {
                bytes[index]
            });
            index += 1;
        }
    }
    String::from_utf8_lossy(&decoded).into_owned()
}

/// A decoded query string. If a name occurs more than once, the first value counts.
#[derive(Clone, Debug, Default)]
pub struct Query(Vec<(String, String)>);

impl Query {
    /// Splits a query string.
    pub fn parse(query: Option<&str>) -> Self {
        let pairs = query
            .unwrap_or_default()
            .split('&')
            .filter(|pair| !pair.is_empty())
            .map(|pair| {
                let (name, value) = pair.split_once('=').unwrap_or((pair, ""));
                (decode_with(name, true), decode_with(value, true))
            });
        Self(pairs.collect())
    }

    /// A value, which may be empty.
    pub fn get(&self, name: &str) -> Option<&str> {
        self.0
            .iter()
            .find(|(key, _)| key == name)
            .map(|(_, value)| value.as_str())
    }

    /// A value that is not empty.
    pub fn text(&self, name: &str) -> Option<&str> {
        self.get(name).filter(|value| !value.is_empty())
    }

    /// A boolean parameter; absent is false.
    pub fn flag(&self, name: &str) -> bool {
        self.tri_state(name).unwrap_or_default()
    }

    /// A boolean parameter that may be absent. As in Kubernetes, only `false` and `0` mean false, so `?watch` is true.
    pub fn tri_state(&self, name: &str) -> Option<bool> {
        self.get(name).map(|value| !matches!(value, "false" | "0"))
    }

    /// All values of a name.
    pub fn all<'a>(&'a self, name: &'a str) -> impl Iterator<Item = &'a str> {
        self.0
            .iter()
            .filter(move |(key, _)| key == name)
            .map(|(_, value)| value.as_str())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn resource(path: &str) -> ResourcePath {
        match parse(path) {
            Path::Resource(found) => found,
            other => panic!("{path} is {other:?}"),
        }
    }

    #[test]
    fn paths_are_parsed_like_kubernetes_request_paths() {
        let pod = resource("/api/v1/namespaces/n/pods/p/log");
        assert_eq!(
            (
                &*pod.namespace,
                &*pod.resource,
                &*pod.name,
                &*pod.subresource
            ),
            ("n", "pods", "p", "log")
        );
        let namespace = resource("/api/v1/namespaces/n/status");
        assert_eq!(
            (
                &*namespace.namespace,
                &*namespace.resource,
                &*namespace.name,
                &*namespace.subresource
            ),
            ("", "namespaces", "n", "status")
        );
        let custom = resource("/apis/a.io/v1/things");
        assert_eq!(
            (
                &*custom.group,
                &*custom.version,
                &*custom.resource,
                &*custom.name
            ),
            ("a.io", "v1", "things", "")
        );
        let status = resource("/api/v1/namespaces/n/status/s");
        assert_eq!(
            (&*status.namespace, &*status.resource, &*status.name),
            ("n", "status", "s")
        );
        assert_eq!(
            parse("/apis/a.io/v1"),
            Path::Discovery(vec!["apis".into(), "a.io".into(), "v1".into()])
        );
        assert_eq!(parse("/healthz"), Path::Other("/healthz".into()));
    }

    #[test]
    fn queries_are_decoded() {
        let query = Query::parse(Some("labelSelector=a%3Db%2Cc+in+(d)&watch=1&limit=&x=%zz"));
        assert_eq!(query.get("labelSelector"), Some("a=b,c in (d)"));
        assert!(query.flag("watch"));
        for (value, expected) in [
            ("watch", true),
            ("watch=", true),
            ("watch=yes", true),
            ("watch=0", false),
            ("watch=false", false),
            ("", false),
        ] {
            assert_eq!(Query::parse(Some(value)).flag("watch"), expected, "{value}");
        }
        assert_eq!(query.text("limit"), None);
        assert_eq!(query.get("x"), Some("%zz"));
    }
}

//! Derives the target and the authorization attributes of a request, like Kubernetes' `RequestInfo`. The verb depends on the
//! method and the path only, with one exception: the query parameter `watch` distinguishes a watch from a list. A field selector
//! in the query may name the single object that a list or watch requests.

use apimachinery::selector::FieldSelector;
use http::Request;

use crate::{
    auth::rbac::Attributes,
    path::{self, Path, Query, ResourcePath},
};

/// The pod subresources that the node answers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stream {
    /// Logs.
    Log,
    /// Runs a command in a container.
    Exec,
    /// Attaches to the streams of a container's main process.
    Attach,
    /// Forwards ports of the pod.
    PortForward,
}

impl Stream {
    /// The stream of a subresource.
    pub fn of(subresource: &str) -> Option<Self> {
        match subresource {
            "log" => Some(Self::Log),
            "exec" => Some(Self::Exec),
            "attach" => Some(Self::Attach),
            "portforward" => Some(Self::PortForward),
            _ => None,
        }
    }
}

/// The target of a request and the permission that it needs.
#[derive(Clone, Debug)]
pub struct RequestInfo {
    /// The parsed path.
    pub path: Path,
    /// The required permission. It is checked before the request's body is read.
    pub attributes: Attributes,
}

impl RequestInfo {
    /// Reads the method, the path and the query of a request.
    pub fn of<B>(request: &Request<B>) -> Self {
        let path = path::parse(request.uri().path());
        let attributes = match &path {
            Path::Resource(found) => {
                resource_attributes(request.method().as_str(), found, request.uri().query())
            }
            Path::Discovery(_) | Path::Other(_) => Attributes {
                verb: request.method().as_str().to_ascii_lowercase(),
                path: request.uri().path().to_owned(),
                ..Attributes::default()
            },
        };
        Self { path, attributes }
    }

    /// Whether the answer is a stream of events.
    pub fn is_watch(&self) -> bool {
        self.attributes.verb == "watch"
    }

    /// The `create` permission that exec, attach and port-forward need in addition to their own verb. A WebSocket starts with a
    /// GET request, and a user with only read permission must not run commands.
    pub fn upgrade_attributes(&self) -> Option<Attributes> {
        let Path::Resource(found) = &self.path else {
            return None;
        };
        let is_core_pod = found.group.is_empty() && found.resource == "pods";
        let upgrades = Stream::of(&found.subresource).is_some_and(|stream| stream != Stream::Log);
        (is_core_pod && upgrades && self.attributes.verb != "create").then(|| Attributes {
            verb: "create".into(),
            ..self.attributes.clone()
        })
    }
}

fn resource_attributes(method: &str, found: &ResourcePath, query: Option<&str>) -> Attributes {
    let is_collection = found.name.is_empty();
    let mut name = found.name.clone();
    let verb = match method {
        "GET" | "HEAD" if is_collection => {
            let query = Query::parse(query);
            name = selected_name(&query).unwrap_or_default();
            if query.flag("watch") { "watch" } else { "list" }
        }
        "GET" | "HEAD" => "get",
        "POST" => "create",
        "PUT" => "update",
        "PATCH" => "patch",
        "DELETE" if is_collection => "deletecollection",
        "DELETE" => "delete",
        // Only the verb `*` in a rule matches this verb.
        _ => "",
    };
    let resource = if found.subresource.is_empty() {
        found.resource.clone()
    } else {
        format!("{}/{}", found.resource, found.subresource)
    };
    Attributes {
        verb: verb.to_owned(),
        group: found.group.clone(),
        resource,
        namespace: if found.resource == "namespaces" {
            found.name.clone()
        } else {
            found.namespace.clone()
        },
        name,
        path: String::new(),
    }
}

/// The object name in a field selector, so that a role with `resourceNames` may list and watch that object.
fn selected_name(query: &Query) -> Option<String> {
    let selector = FieldSelector::parse(query.text("fieldSelector")?).ok()?;
    let name = selector.required_value("metadata.name")?;
    let is_segment = !matches!(name, "." | "..") && !name.contains(['/', '%']);
    is_segment.then(|| name.to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::registry::Registry;

    const METHODS: [&str; 9] = [
        "GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "get", "watch",
    ];
    const QUERIES: [&str; 8] = [
        "",
        "?watch",
        "?watch=1",
        "?watch=true",
        "?watch=false",
        "?WATCH=1",
        "?verb=list&watch=t",
        "?dryRun=All",
    ];
    const SUBRESOURCES: [&str; 12] = [
        "status",
        "scale",
        "finalize",
        "exec",
        "attach",
        "portforward",
        "log",
        "proxy",
        "binding",
        "eviction",
        "token",
        "ephemeralcontainers",
    ];

    fn info(method: &str, target: &str) -> RequestInfo {
        let request = Request::builder().method(method).uri(target).body(());
        RequestInfo::of(&request.expect("a request"))
    }

    fn expected(method: &str, is_collection: bool, query: &str) -> &'static str {
        let watches = query.contains("watch") && !query.ends_with("false");
        match (method, is_collection) {
            ("GET" | "HEAD", true) if watches => "watch",
            ("GET" | "HEAD", true) => "list",
            ("GET" | "HEAD", false) => "get",
            ("POST", _) => "create",
            ("PUT", _) => "update",
            ("PATCH", _) => "patch",
            ("DELETE", true) => "deletecollection",
            ("DELETE", false) => "delete",
            _ => "",
        }
    }

    /// Every served resource, with every subresource, method and query.
    #[test]
    fn verbs_depend_only_on_the_method_and_the_path() {
        let registry = Registry::new(&Registry::default(), std::iter::empty());
        let mut asked = 0;
        for (group, versions) in registry.groups() {
            for version in versions {
                for resource in registry.resources(group, version) {
                    let root = if group.is_empty() {
                        format!("/api/{version}")
                    } else {
                        format!("/apis/{group}/{version}")
                    };
                    let below = if resource.is_namespaced() {
                        "/namespaces/n"
                    } else {
                        ""
                    };
                    let collection = format!("{root}{below}/{}", resource.plural);
                    let mut targets =
                        vec![(collection.clone(), ""), (format!("{collection}/x"), "")];
                    targets.extend(SUBRESOURCES.map(|sub| (format!("{collection}/x/{sub}"), sub)));
                    for (target, subresource) in &targets {
                        for (method, query) in METHODS
                            .iter()
                            .flat_map(|method| QUERIES.map(|query| (*method, query)))
                        {
                            let found = info(method, &format!("{target}{query}")).attributes;
                            let is_collection = *target == collection;
                            // `namespaces/x/log` is a collection of `log` in the namespace `x`.
                            if resource.plural.as_ref() == "namespaces"
                                && !matches!(*subresource, "" | "status" | "finalize")
                            {
                                continue;
                            }
                            assert_eq!(
                                found.verb,
                                expected(method, is_collection, query),
                                "{method} {target}{query}"
                            );
                            let named = if subresource.is_empty() {
                                resource.plural.to_string()
                            } else {
                                format!("{}/{subresource}", resource.plural)
                            };
                            assert_eq!(found.resource, named, "{target}");
                            asked += 1;
                        }
                    }
                }
            }
        }
        assert!(asked > 1000, "{asked}");
    }

    #[test]
    fn exec_attach_and_port_forward_need_the_create_verb() {
        let pod = "/api/v1/namespaces/n/pods/p";
        for subresource in ["exec", "attach", "portforward"] {
            let asked = info("GET", &format!("{pod}/{subresource}?watch=1"));
            assert_eq!(asked.attributes.verb, "get");
            let upgrade = asked.upgrade_attributes().expect("a second permission");
            assert_eq!(
                (
                    upgrade.verb.as_str(),
                    upgrade.resource,
                    upgrade.name.as_str()
                ),
                ("create", format!("pods/{subresource}"), "p")
            );
            let asked = info("POST", &format!("{pod}/{subresource}"));
            assert_eq!(asked.attributes.verb, "create");
            assert_eq!(asked.upgrade_attributes(), None);
        }
        for target in [
            format!("{pod}/log"),
            pod.to_owned(),
            "/apis/a.io/v1/namespaces/n/pods/p/exec".into(),
        ] {
            assert_eq!(info("GET", &target).upgrade_attributes(), None, "{target}");
        }
    }

    #[test]
    fn a_field_selector_names_the_object_that_a_list_or_watch_asks_for() {
        let maps = "/api/v1/namespaces/n/configmaps";
        for (query, name) in [
            ("fieldSelector=metadata.name%3Dx", "x"),
            ("watch=1&fieldSelector=metadata.name%3D%3Dx", "x"),
            ("fieldSelector=metadata.name!%3Dx", ""),
            ("fieldSelector=metadata.name%3D..", ""),
            ("fieldSelector=metadata.namespace%3Dx", ""),
            ("fieldSelector=%3D%3D%3D", ""),
        ] {
            assert_eq!(
                info("GET", &format!("{maps}?{query}")).attributes.name,
                name,
                "{query}"
            );
        }
        let deleted = info("DELETE", &format!("{maps}?fieldSelector=metadata.name%3Dx"));
        assert_eq!(
            (
                deleted.attributes.verb.as_str(),
                deleted.attributes.name.as_str()
            ),
            ("deletecollection", "")
        );
    }
}

//! Role-based access control (RBAC) as a pure function: compiles roles and bindings into a policy, and checks requests against
//! it.

use std::collections::{HashMap, HashSet};
use std::fmt;

use serde_json::Value;

use super::{MASTERS, User};

/// One rule of a role.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Rule {
    /// Verbs.
    pub verbs: Vec<String>,
    /// API groups.
    pub groups: Vec<String>,
    /// Resources, with subresources after a slash.
    pub resources: Vec<String>,
    /// Object names; empty for all.
    pub names: Vec<String>,
    /// Paths outside the resource API.
    pub urls: Vec<String>,
}

/// The authorization attributes of a request.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Attributes {
    /// The verb.
    pub verb: String,
    /// API group.
    pub group: String,
    /// Resource, with its subresource after a slash; empty for other paths.
    pub resource: String,
    /// Namespace, empty for cluster scope.
    pub namespace: String,
    /// Object name, empty for collections.
    pub name: String,
    /// The path of a request that is not for a resource.
    pub path: String,
}

fn texts(value: &Value) -> Vec<String> {
    value
        .as_array()
        .into_iter()
        .flatten()
        .filter_map(|item| item.as_str().map(ToOwned::to_owned))
        .collect()
}

impl Rule {
    /// Parses the `rules` of a role.
    pub fn parse_all(role: &Value) -> Vec<Self> {
        let rules = role["rules"].as_array().into_iter().flatten();
        rules
            .map(|rule| Self {
                verbs: texts(&rule["verbs"]),
                groups: texts(&rule["apiGroups"]),
                resources: texts(&rule["resources"]),
                names: texts(&rule["resourceNames"]),
                urls: texts(&rule["nonResourceURLs"]),
            })
            .collect()
    }

    fn allows(&self, wanted: &Attributes) -> bool {
        let has =
            |list: &[String], value: &str| list.iter().any(|item| item == "*" || item == value);
        if !has(&self.verbs, &wanted.verb) {
            return false;
        }
        if wanted.resource.is_empty() {
            return self.urls.iter().any(|url| url_covers(url, &wanted.path));
        }
        let any_of_subresource = wanted
            .resource
            .split_once('/')
            .map(|(_, part)| format!("*/{part}"));
        has(&self.groups, &wanted.group)
            && (has(&self.resources, &wanted.resource)
                || any_of_subresource.is_some_and(|pattern| self.resources.contains(&pattern)))
            && (self.names.is_empty() || self.names.contains(&wanted.name))
    }

    /// Breaks the rule down into single permissions.
    fn permissions(&self) -> Vec<Attributes> {
        let mut permissions = Vec::new();
        for verb in &self.verbs {
            permissions.extend(self.urls.iter().map(|url| Attributes {
                verb: verb.clone(),
                path: url.clone(),
                ..Attributes::default()
            }));
            for (group, resource) in self
                .groups
                .iter()
                .flat_map(|group| self.resources.iter().map(move |resource| (group, resource)))
            {
                let one = Attributes {
                    verb: verb.clone(),
                    group: group.clone(),
                    resource: resource.clone(),
                    ..Attributes::default()
                };
                if self.names.is_empty() {
                    permissions.push(one);
                } else {
                    permissions.extend(self.names.iter().map(|name| Attributes {
                        name: name.clone(),
                        ..one.clone()
                    }));
                }
            }
        }
        permissions
    }
}

/// Whether a URL pattern covers a path. A `*` in `path` is literal here, so only the pattern `*` covers the path `*`.
fn url_covers(pattern: &str, path: &str) -> bool {
    match pattern.strip_suffix('*') {
        Some(prefix) => path.starts_with(prefix),
        None => pattern == path,
    }
}

#[derive(Clone, Debug, PartialEq, Eq)]
enum Subject {
    User(String),
    Group(String),
    /// The user name of the account, and the account as Kubernetes formats it in reasons.
    ServiceAccount {
        user: String,
        account: String,
    },
}

impl Subject {
    fn parse(subject: &Value, namespace: &str) -> Option<Self> {
        let name = subject["name"].as_str()?;
        match subject["kind"].as_str()? {
            "User" => Some(Self::User(name.to_owned())),
            "Group" => Some(Self::Group(name.to_owned())),
            "ServiceAccount" => {
                let namespace = subject["namespace"].as_str().unwrap_or(namespace);
                Some(Self::ServiceAccount {
                    user: format!("system:serviceaccount:{namespace}:{name}"),
                    account: format!("{name}/{namespace}"),
                })
            }
            _ => None,
        }
    }

    fn matches(&self, user: &User) -> bool {
        match self {
            Self::User(name) | Self::ServiceAccount { user: name, .. } => *name == user.name,
            Self::Group(group) => user.groups.contains(group),
        }
    }
}

impl fmt::Display for Subject {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::User(name) => write!(formatter, "User \"{name}\""),
            Self::Group(name) => write!(formatter, "Group \"{name}\""),
            Self::ServiceAccount { account, .. } => {
                write!(formatter, "ServiceAccount \"{account}\"")
            }
        }
    }
}

#[derive(Clone, Debug)]
struct Grant {
    /// The binding and its role, as Kubernetes formats them in reasons.
    origin: String,
    subjects: Vec<Subject>,
    rules: Vec<Rule>,
}

/// All grants of a cluster.
#[derive(Clone, Debug, Default)]
pub struct Policy {
    cluster_wide: Vec<Grant>,
    by_namespace: HashMap<String, Vec<Grant>>,
}

/// The objects that a policy is compiled from.
#[derive(Clone, Debug, Default)]
pub struct Sources {
    /// Roles.
    pub roles: Vec<Value>,
    /// Role bindings.
    pub role_bindings: Vec<Value>,
    /// Cluster roles.
    pub cluster_roles: Vec<Value>,
    /// Cluster role bindings.
    pub cluster_role_bindings: Vec<Value>,
}

/// The rules of a cluster role, including aggregated ones.
fn rules_of_cluster_role(role: &Value, all: &[Value]) -> Vec<Rule> {
    let Some(selectors) = role
        .pointer("/aggregationRule/clusterRoleSelectors")
        .and_then(Value::as_array)
    else {
        return Rule::parse_all(role);
    };
    let selected = |other: &Value| {
        selectors.iter().any(|selector| {
            apimachinery::selector::LabelSelector::from_object(Some(selector))
                .is_ok_and(|selector| selector.matches_object(other))
        })
    };
    // An aggregated role may itself aggregate (admin includes edit, edit includes view), so this recurses until no new role
    // appears.
    let mut names = HashSet::from([role["metadata"]["name"].to_string()]);
    let mut rules = Rule::parse_all(role);
    for other in all.iter().filter(|other| selected(other)) {
        if names.insert(other["metadata"]["name"].to_string()) {
            rules.extend(
                if other.get("aggregationRule").is_some()
                    && other["metadata"]["name"] != role["metadata"]["name"]
                {
                    rules_of_cluster_role(other, &without(all, role))
                } else {
                    Rule::parse_all(other)
                },
            );
        }
    }
    rules
}

fn without(all: &[Value], role: &Value) -> Vec<Value> {
    all.iter()
        .filter(|other| other["metadata"]["name"] != role["metadata"]["name"])
        .cloned()
        .collect()
}

impl Sources {
    /// The rules of the role that a binding references.
    pub fn referenced(&self, binding: &Value) -> Option<Vec<Rule>> {
        let (kind, name) = (
            binding["roleRef"]["kind"].as_str()?,
            &binding["roleRef"]["name"],
        );
        if kind == "ClusterRole" {
            let role = self
                .cluster_roles
                .iter()
                .find(|role| role["metadata"]["name"] == *name)?;
            return Some(rules_of_cluster_role(role, &self.cluster_roles));
        }
        let namespace = &binding["metadata"]["namespace"];
        let role = self.roles.iter().find(|role| {
            role["metadata"]["name"] == *name && role["metadata"]["namespace"] == *namespace
        })?;
        Some(Rule::parse_all(role))
    }

    /// Compiles a policy.
    pub fn compile(&self) -> Policy {
        let grant = |binding: &Value| {
            let namespace = binding["metadata"]["namespace"]
                .as_str()
                .unwrap_or_default();
            let subjects = binding["subjects"].as_array().into_iter().flatten();
            let subjects = subjects
                .filter_map(|subject| Subject::parse(subject, namespace))
                .collect();
            Some(Grant {
                origin: origin(binding),
                subjects,
                rules: self.referenced(binding)?,
            })
        };
        let mut policy = Policy {
            cluster_wide: self
                .cluster_role_bindings
                .iter()
                .filter_map(grant)
                .collect(),
            ..Policy::default()
        };
        for binding in &self.role_bindings {
            if let Some(grant) = grant(binding) {
                let namespace = binding["metadata"]["namespace"]
                    .as_str()
                    .unwrap_or_default();
                policy
                    .by_namespace
                    .entry(namespace.to_owned())
                    .or_default()
                    .push(grant);
            }
        }
        policy
    }
}

/// A binding and its role, in the format of Kubernetes' reasons.
fn origin(binding: &Value) -> String {
    let text = |pointer: &str| {
        let text = binding.pointer(pointer).and_then(Value::as_str);
        text.unwrap_or_default()
    };
    let (name, namespace) = (text("/metadata/name"), text("/metadata/namespace"));
    let bound = if namespace.is_empty() {
        format!("ClusterRoleBinding \"{name}\"")
    } else {
        format!("RoleBinding \"{name}/{namespace}\"")
    };
    format!(
        "{bound} of {} \"{}\"",
        text("/roleRef/kind"),
        text("/roleRef/name")
    )
}

impl Policy {
    /// The reason why a user is allowed to do something, with Kubernetes' message; `None` if no rule allows it.
    pub fn reason(&self, user: &User, wanted: &Attributes) -> Option<String> {
        let local = self.by_namespace.get(&wanted.namespace);
        let grants = self.cluster_wide.iter().chain(local.into_iter().flatten());
        grants
            .filter(|grant| grant.rules.iter().any(|rule| rule.allows(wanted)))
            .find_map(|grant| {
                let subject = grant
                    .subjects
                    .iter()
                    .find(|subject| subject.matches(user))?;
                Some(format!("RBAC: allowed by {} to {subject}", grant.origin))
            })
    }

    /// The rules that apply to a user in a namespace. An empty namespace means only cluster-wide rules.
    pub fn rules_for<'a>(
        &'a self,
        user: &'a User,
        namespace: &str,
    ) -> impl Iterator<Item = &'a Rule> {
        let local = self.by_namespace.get(namespace).into_iter().flatten();
        let grants = self.cluster_wide.iter().chain(local);
        grants
            .filter(|grant| grant.subjects.iter().any(|subject| subject.matches(user)))
            .flat_map(|grant| &grant.rules)
    }

    /// Whether a user has a permission.
    pub fn allows(&self, user: &User, wanted: &Attributes) -> bool {
        user.groups.iter().any(|group| group == MASTERS)
            || self
                .rules_for(user, &wanted.namespace)
                .any(|rule| rule.allows(wanted))
    }

    /// The permissions in `rules` that a user does not have in a namespace. Granting them would be privilege escalation.
    pub fn missing(&self, user: &User, namespace: &str, rules: &[Rule]) -> Vec<Attributes> {
        let permissions = rules.iter().flat_map(Rule::permissions);
        permissions
            .map(|permission| Attributes {
                namespace: namespace.to_owned(),
                ..permission
            })
            .filter(|permission| !self.allows(user, permission))
            .collect()
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn policy() -> Policy {
        Sources {
            roles: vec![json!({"metadata": {"name": "reader", "namespace": "a"}, "rules": [{"verbs": ["get"], "apiGroups": [""], "resources": ["pods", "pods/log"]}]})],
            role_bindings: vec![json!({"metadata": {"name": "b", "namespace": "a"}, "roleRef": {"kind": "Role", "name": "reader"},
                "subjects": [{"kind": "ServiceAccount", "name": "robot"}, {"kind": "User", "name": "ann"}]})],
            cluster_roles: vec![
                json!({"metadata": {"name": "all"}, "aggregationRule": {"clusterRoleSelectors": [{"matchLabels": {"to": "all"}}]}, "rules": []}),
                json!({"metadata": {"name": "part", "labels": {"to": "all"}}, "rules": [{"verbs": ["*"], "apiGroups": ["x.io"], "resources": ["*"], "resourceNames": ["one"]}]}),
            ],
            cluster_role_bindings: vec![json!({"roleRef": {"kind": "ClusterRole", "name": "all"}, "subjects": [{"kind": "Group", "name": "team"}]})],
        }
        .compile()
    }

    fn attributes(
        verb: &str,
        group: &str,
        resource: &str,
        namespace: &str,
        name: &str,
    ) -> Attributes {
        Attributes {
            verb: verb.into(),
            group: group.into(),
            resource: resource.into(),
            namespace: namespace.into(),
            name: name.into(),
            path: String::new(),
        }
    }

    #[test]
    fn grants_apply_only_to_their_namespace_verb_and_resource() {
        let policy = policy();
        let ann = User {
            name: "ann".into(),
            ..User::default()
        };
        let robot = User {
            name: "system:serviceaccount:a:robot".into(),
            ..User::default()
        };
        let team = User {
            name: "t".into(),
            groups: vec!["team".into()],
            ..User::default()
        };
        assert!(policy.allows(&ann, &attributes("get", "", "pods", "a", "p")));
        assert!(policy.allows(&robot, &attributes("get", "", "pods/log", "a", "p")));
        assert!(
            !policy.allows(&ann, &attributes("get", "", "pods", "b", "p")),
            "another namespace"
        );
        assert!(
            !policy.allows(&ann, &attributes("delete", "", "pods", "a", "p")),
            "another verb"
        );
        assert!(
            !policy.allows(&ann, &attributes("get", "", "pods/exec", "a", "p")),
            "another subresource"
        );
        assert!(
            policy.allows(&team, &attributes("delete", "x.io", "things", "z", "one")),
            "through aggregation"
        );
        assert!(!policy.allows(&team, &attributes("delete", "x.io", "things", "z", "two")));
        assert!(policy.allows(&User::admin(), &attributes("anything", "at", "all", "", "")));
    }

    #[test]
    fn granting_a_missing_permission_is_escalation() {
        let policy = policy();
        let ann = User {
            name: "ann".into(),
            ..User::default()
        };
        let rule = |verb: &str| Rule {
            verbs: vec![verb.into()],
            groups: vec![String::new()],
            resources: vec!["pods".into()],
            ..Rule::default()
        };
        assert!(policy.missing(&ann, "a", &[rule("get")]).is_empty());
        assert_eq!(
            policy.missing(&ann, "a", &[rule("get"), rule("*")]).len(),
            1
        );
        assert_eq!(policy.missing(&ann, "", &[rule("get")]).len(), 1);
    }
}

//! Prevention of privilege escalation through roles and bindings: as in Kubernetes, the writer must hold the permissions it
//! grants.
//!
//! | write | required permission |
//! |---|---|
//! | a role | every permission in its rules, or `escalate` on the role |
//! | a cluster role that has or had an aggregation rule | all permissions, or `escalate`: it also includes rules of roles that
//! are written later |
//! | a binding | every permission of the role that it references, or `bind` on that role |
//! | a binding to a role that does not exist | `bind` on that role, otherwise 404: the role may have any rules when it is created
//! |
//! | only owner references and finalizers | none: the garbage collector must be able to change them |
//!
//! `escalate` on named roles does not allow creating them, because a create request has no name.

use std::collections::BTreeSet;

use apimachinery::{go, status::Status};
use serde_json::Value;

use super::{
    User,
    access::RBAC,
    rbac::{Attributes, Policy, Rule, Sources},
};
use crate::registry::Rules;

/// Fields of the metadata that the garbage collector and the server change.
const COLLECTOR_FIELDS: [&str; 4] = [
    "ownerReferences",
    "finalizers",
    "managedFields",
    "resourceVersion",
];

/// A write of a role or binding.
#[derive(Clone, Copy, Debug)]
pub struct RbacWrite<'a> {
    /// The user who writes.
    pub user: &'a User,
    /// The kind of the object.
    pub rules: Rules,
    /// The new version.
    pub object: &'a Value,
    /// The stored version; `None` for a creation.
    pub old: Option<&'a Value>,
}

impl RbacWrite<'_> {
    fn text(&self, pointer: &str) -> String {
        let text = self.object.pointer(pointer).and_then(Value::as_str);
        text.unwrap_or_default().to_owned()
    }

    /// The namespace in which the permissions must be held; empty for cluster-wide permissions.
    fn namespace(&self) -> String {
        match self.rules {
            Rules::Role | Rules::RoleBinding => self.text("/metadata/namespace"),
            _ => String::new(),
        }
    }

    fn changes_only_collector_fields(&self) -> bool {
        let bare = |object: &Value| {
            let mut object = object.clone();
            if let Some(metadata) = object["metadata"].as_object_mut() {
                for field in COLLECTOR_FIELDS {
                    metadata.remove(field);
                }
            }
            object
        };
        self.old.is_some_and(|old| bare(old) == bare(self.object))
    }
}

/// Rejects a write that would grant permissions that the writer does not have.
pub fn check(write: &RbacWrite<'_>, policy: &Policy, sources: &Sources) -> Result<(), Status> {
    if write.changes_only_collector_fields() {
        return Ok(());
    }
    match write.rules {
        Rules::Role => check_role(write, policy, "roles"),
        Rules::ClusterRole => check_role(write, policy, "clusterroles"),
        Rules::RoleBinding => check_binding(write, policy, sources, "rolebindings"),
        Rules::ClusterRoleBinding => check_binding(write, policy, sources, "clusterrolebindings"),
        _ => Ok(()),
    }
}

fn check_role(write: &RbacWrite<'_>, policy: &Policy, resource: &str) -> Result<(), Status> {
    let escalate = Attributes {
        verb: "escalate".into(),
        group: RBAC.into(),
        resource: resource.into(),
        namespace: write.namespace(),
        name: if write.old.is_some() {
            write.text("/metadata/name")
        } else {
            String::new()
        },
        path: String::new(),
    };
    if policy.allows(write.user, &escalate) {
        return Ok(());
    }
    let granted = Rule::parse_all(write.object);
    check_granted(write, policy, resource, &granted)?;
    let aggregates = std::iter::once(write.object)
        .chain(write.old)
        .any(has_aggregation_rule);
    let lacks = !policy.missing(write.user, "", &full_authority()).is_empty();
    if resource == "clusterroles" && aggregates && lacks {
        let cause = "must have cluster-admin privileges to use the aggregationRule";
        let name = write.text("/metadata/name");
        return Err(Status::forbidden(RBAC, resource, &name, cause));
    }
    Ok(())
}

fn check_binding(
    write: &RbacWrite<'_>,
    policy: &Policy,
    sources: &Sources,
    resource: &str,
) -> Result<(), Status> {
    let named = write.text("/roleRef/name");
    let roles = match write.text("/roleRef/kind").as_str() {
        "ClusterRole" => "clusterroles",
        _ => "roles",
    };
    let bind = Attributes {
        verb: "bind".into(),
        group: RBAC.into(),
        resource: roles.into(),
        namespace: write.namespace(),
        name: named.clone(),
        path: String::new(),
    };
    if policy.allows(write.user, &bind) {
        return Ok(());
    }
    match sources.referenced(write.object) {
        Some(granted) => check_granted(write, policy, resource, &granted),
        // Like kube-apiserver, combines the name of the role with the resource of the binding.
        None => Err(Status::not_found(RBAC, resource, &named)),
    }
}

fn has_aggregation_rule(role: &Value) -> bool {
    role.pointer("/aggregationRule/clusterRoleSelectors")
        .and_then(Value::as_array)
        .is_some_and(|selectors| !selectors.is_empty())
}

/// All permissions, which only an administrator has.
fn full_authority() -> [Rule; 2] {
    let every = || vec!["*".to_owned()];
    [
        Rule {
            verbs: every(),
            groups: every(),
            resources: every(),
            ..Rule::default()
        },
        Rule {
            verbs: every(),
            urls: every(),
            ..Rule::default()
        },
    ]
}

fn check_granted(
    write: &RbacWrite<'_>,
    policy: &Policy,
    resource: &str,
    granted: &[Rule],
) -> Result<(), Status> {
    let user = write.user;
    let missing = policy.missing(user, &write.namespace(), granted);
    if missing.is_empty() {
        return Ok(());
    }
    let cause = format!(
        "user {} (groups={}) is attempting to grant RBAC permissions not currently held:\n{}",
        go::quote(&user.name),
        list(user.groups.iter()),
        compact(&missing).into_iter().collect::<Vec<_>>().join("\n")
    );
    let name = write.text("/metadata/name");
    Err(Status::forbidden(RBAC, resource, &name, &cause))
}

/// A list of strings as Go prints it with `%q`.
fn list<'a>(texts: impl Iterator<Item = &'a String>) -> String {
    let quoted: Vec<String> = texts.map(|text| go::quote(text)).collect();
    format!("[{}]", quoted.join(" "))
}

/// The missing permissions, sorted, with one line for each target.
fn compact(missing: &[Attributes]) -> BTreeSet<String> {
    let mut targets: Vec<(String, Vec<String>)> = Vec::new();
    for permission in missing {
        let one = |text: &String| list(std::iter::once(text));
        let target = if permission.resource.is_empty() {
            format!("NonResourceURLs:{}", one(&permission.path))
        } else {
            let names = if permission.name.is_empty() {
                String::new()
            } else {
                format!(", ResourceNames:{}", one(&permission.name))
            };
            format!(
                "APIGroups:{}, Resources:{}{names}",
                one(&permission.group),
                one(&permission.resource)
            )
        };
        match targets.iter_mut().find(|(known, _)| *known == target) {
            Some((_, verbs)) => verbs.push(permission.verb.clone()),
            None => targets.push((target, vec![permission.verb.clone()])),
        }
    }
    targets
        .into_iter()
        .map(|(target, verbs)| format!("{{{target}, Verbs:{}}}", list(verbs.iter())))
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn missing_permissions_are_formatted_as_in_kubernetes() {
        let permission = |verb: &str, resource: &str, name: &str, path: &str| Attributes {
            verb: verb.into(),
            resource: resource.into(),
            name: name.into(),
            path: path.into(),
            ..Attributes::default()
        };
        let missing = [
            permission("get", "secrets", "", ""),
            permission("list", "secrets", "", ""),
            permission("get", "secrets", "one", ""),
            permission("get", "", "", "/metrics"),
        ];
        let lines: Vec<String> = compact(&missing).into_iter().collect();
        assert_eq!(
            lines,
            [
                "{APIGroups:[\"\"], Resources:[\"secrets\"], ResourceNames:[\"one\"], Verbs:[\"get\"]}",
                "{APIGroups:[\"\"], Resources:[\"secrets\"], Verbs:[\"get\" \"list\"]}",
                "{NonResourceURLs:[\"/metrics\"], Verbs:[\"get\"]}",
            ]
        );
    }
}

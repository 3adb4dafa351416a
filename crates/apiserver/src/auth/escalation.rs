//! Privilege escalation through roles and bindings: who writes one must hold what it grants, as in Kubernetes.
//!
//! | write | needs |
//! |---|---|
//! | a role | every right in its rules, or `escalate` on the role |
//! | a cluster role with an aggregation rule, or one that had one | every right there is, or `escalate`: it gathers what others write later |
//! | a binding | every right of the role that it names, or `bind` on that role |
//! | a binding to a role that is not there | `bind` on that role; without it, 404: the role may be strong when it comes |
//! | only owner references and finalizers | nothing: the garbage collector must get through |
//!
//! A right to `escalate` for named roles does not reach a role that is being created, because that request has no name.

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
const COLLECTED: [&str; 4] = [
    "ownerReferences",
    "finalizers",
    "managedFields",
    "resourceVersion",
];

/// A role or binding that somebody wants to write.
#[derive(Clone, Copy, Debug)]
pub struct Attempt<'a> {
    /// Who.
    pub user: &'a User,
    /// Which kind of object.
    pub rules: Rules,
    /// What it will be.
    pub object: &'a Value,
    /// What it was, if it was.
    pub old: Option<&'a Value>,
}

impl Attempt<'_> {
    fn text(&self, pointer: &str) -> String {
        let text = self.object.pointer(pointer).and_then(Value::as_str);
        text.unwrap_or_default().to_owned()
    }

    /// The namespace in which rights count: none for what reaches everywhere.
    fn namespace(&self) -> String {
        match self.rules {
            Rules::Role | Rules::RoleBinding => self.text("/metadata/namespace"),
            _ => String::new(),
        }
    }

    fn only_collects(&self) -> bool {
        let bare = |object: &Value| {
            let mut object = object.clone();
            if let Some(metadata) = object["metadata"].as_object_mut() {
                for field in COLLECTED {
                    metadata.remove(field);
                }
            }
            object
        };
        self.old.is_some_and(|old| bare(old) == bare(self.object))
    }
}

/// Refuses an attempt that would grant what its writer does not hold.
pub fn check(attempt: &Attempt<'_>, policy: &Policy, sources: &Sources) -> Result<(), Status> {
    if attempt.only_collects() {
        return Ok(());
    }
    match attempt.rules {
        Rules::Role => check_role(attempt, policy, "roles"),
        Rules::ClusterRole => check_role(attempt, policy, "clusterroles"),
        Rules::RoleBinding => check_binding(attempt, policy, sources, "rolebindings"),
        Rules::ClusterRoleBinding => check_binding(attempt, policy, sources, "clusterrolebindings"),
        _ => Ok(()),
    }
}

fn check_role(attempt: &Attempt<'_>, policy: &Policy, resource: &str) -> Result<(), Status> {
    let escalate = Attributes {
        verb: "escalate".into(),
        group: RBAC.into(),
        resource: resource.into(),
        namespace: attempt.namespace(),
        name: if attempt.old.is_some() {
            attempt.text("/metadata/name")
        } else {
            String::new()
        },
        path: String::new(),
    };
    if policy.allows(attempt.user, &escalate) {
        return Ok(());
    }
    let granted = Rule::parse_all(attempt.object);
    confirm(attempt, policy, resource, &granted)?;
    let aggregates = std::iter::once(attempt.object)
        .chain(attempt.old)
        .any(has_aggregation_rule);
    let lacks = !policy
        .missing(attempt.user, "", &full_authority())
        .is_empty();
    if resource == "clusterroles" && aggregates && lacks {
        let cause = "must have cluster-admin privileges to use the aggregationRule";
        let name = attempt.text("/metadata/name");
        return Err(Status::forbidden(RBAC, resource, &name, cause));
    }
    Ok(())
}

fn check_binding(
    attempt: &Attempt<'_>,
    policy: &Policy,
    sources: &Sources,
    resource: &str,
) -> Result<(), Status> {
    let named = attempt.text("/roleRef/name");
    let roles = match attempt.text("/roleRef/kind").as_str() {
        "ClusterRole" => "clusterroles",
        _ => "roles",
    };
    let bind = Attributes {
        verb: "bind".into(),
        group: RBAC.into(),
        resource: roles.into(),
        namespace: attempt.namespace(),
        name: named.clone(),
        path: String::new(),
    };
    if policy.allows(attempt.user, &bind) {
        return Ok(());
    }
    match sources.referenced(attempt.object) {
        Some(granted) => confirm(attempt, policy, resource, &granted),
        // kube-apiserver, too, gives the role's name and the binding's kind.
        None => Err(Status::not_found(RBAC, resource, &named)),
    }
}

fn has_aggregation_rule(role: &Value) -> bool {
    role.pointer("/aggregationRule/clusterRoleSelectors")
        .and_then(Value::as_array)
        .is_some_and(|selectors| !selectors.is_empty())
}

/// Everything, which only an administrator holds.
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

fn confirm(
    attempt: &Attempt<'_>,
    policy: &Policy,
    resource: &str,
    granted: &[Rule],
) -> Result<(), Status> {
    let user = attempt.user;
    let missing = policy.missing(user, &attempt.namespace(), granted);
    if missing.is_empty() {
        return Ok(());
    }
    let cause = format!(
        "user {} (groups={}) is attempting to grant RBAC permissions not currently held:\n{}",
        go::quote(&user.name),
        list(user.groups.iter()),
        compact(&missing).into_iter().collect::<Vec<_>>().join("\n")
    );
    let name = attempt.text("/metadata/name");
    Err(Status::forbidden(RBAC, resource, &name, &cause))
}

/// A list of texts as Go prints it with `%q`.
fn list<'a>(texts: impl Iterator<Item = &'a String>) -> String {
    let quoted: Vec<String> = texts.map(|text| go::quote(text)).collect();
    format!("[{}]", quoted.join(" "))
}

/// Missing rights, those for the same target in one line, in order.
fn compact(missing: &[Attributes]) -> BTreeSet<String> {
    let mut targets: Vec<(String, Vec<String>)> = Vec::new();
    for right in missing {
        let one = |text: &String| list(std::iter::once(text));
        let target = if right.resource.is_empty() {
            format!("NonResourceURLs:{}", one(&right.path))
        } else {
            let names = if right.name.is_empty() {
                String::new()
            } else {
                format!(", ResourceNames:{}", one(&right.name))
            };
            format!(
                "APIGroups:{}, Resources:{}{names}",
                one(&right.group),
                one(&right.resource)
            )
        };
        match targets.iter_mut().find(|(known, _)| *known == target) {
            Some((_, verbs)) => verbs.push(right.verb.clone()),
            None => targets.push((target, vec![right.verb.clone()])),
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
    fn missing_rights_read_as_kubernetes_writes_them() {
        let right = |verb: &str, resource: &str, name: &str, path: &str| Attributes {
            verb: verb.into(),
            resource: resource.into(),
            name: name.into(),
            path: path.into(),
            ..Attributes::default()
        };
        let missing = [
            right("get", "secrets", "", ""),
            right("list", "secrets", "", ""),
            right("get", "secrets", "one", ""),
            right("get", "", "", "/metrics"),
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

//! The rules of roles and cluster roles. `auth::escalation` checks what they grant.

use super::Kind;

/// Roles and cluster roles.
pub struct Role;

impl Kind for Role {
    fn name_problems(&self, name: &str) -> Vec<String> {
        path_segment_problems(name)
    }
}

/// The problems of a name that only needs to be a valid path segment: names of RBAC objects may contain colons.
pub fn path_segment_problems(name: &str) -> Vec<String> {
    match name {
        "." | ".." => vec![format!("may not be '{name}'")],
        _ => ["/", "%"]
            .iter()
            .filter(|part| name.contains(**part))
            .map(|part| format!("may not contain '{part}'"))
            .collect(),
    }
}

//! How a controller declares the permissions it needs, next to its code. The manifests are generated from these.

/// What a controller may do with some resources.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Rule {
    pub groups: &'static [&'static str],
    pub resources: &'static [&'static str],
    pub verbs: &'static [&'static str],
}

/// Everything one does with a resource one manages.
pub const MANAGE: &[&str] = &[
    "create", "delete", "get", "list", "patch", "update", "watch",
];
/// What one does with a subresource.
pub const SUBRESOURCE: &[&str] = &["get", "patch", "update"];
/// What one does with a resource one only follows.
pub const FOLLOW: &[&str] = &["get", "list", "watch"];

//! Authentication and authorization: users, tokens, RBAC, impersonation and the review APIs.

pub(crate) mod access;
pub(crate) mod defaults;
pub(crate) mod escalation;
pub(crate) mod impersonation;
pub(crate) mod rbac;
pub(crate) mod reviews;
pub(crate) mod tokens;

use std::collections::BTreeMap;

/// An authenticated user.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct User {
    /// User name.
    pub name: String,
    /// UID of the user, for service accounts.
    pub uid: String,
    /// Groups.
    pub groups: Vec<String>,
    /// Additional attributes from the authenticator.
    pub extra: BTreeMap<String, Vec<String>>,
}

/// The group of all authenticated users.
pub(crate) const AUTHENTICATED: &str = "system:authenticated";

/// The group with all permissions.
pub const MASTERS: &str = "system:masters";

impl User {
    /// The administrator: the in-process client and the generated kubeconfig.
    pub fn admin() -> Self {
        Self {
            name: "system:admin".into(),
            groups: vec![MASTERS.into(), "system:authenticated".into()],
            ..Self::default()
        }
    }

    /// The user of a built-in background controller, with the controller's name in Kubernetes.
    pub fn system(controller: &str) -> Self {
        Self {
            name: format!("system:serviceaccount:kube-system:{controller}"),
            groups: vec![
                MASTERS.into(),
                "system:serviceaccounts".into(),
                "system:authenticated".into(),
            ],
            ..Self::default()
        }
    }
}

//! Who is asking, and what they may do.

pub(crate) mod access;
pub(crate) mod defaults;
pub(crate) mod escalation;
pub(crate) mod impersonation;
pub(crate) mod rbac;
pub(crate) mod reviews;
pub(crate) mod tokens;

use std::collections::BTreeMap;

/// An authenticated identity.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct User {
    /// User name.
    pub name: String,
    /// Identity behind the name, for service accounts.
    pub uid: String,
    /// Groups.
    pub groups: Vec<String>,
    /// What else the authenticator knows.
    pub extra: BTreeMap<String, Vec<String>>,
}

/// The group of everybody who is known.
pub(crate) const AUTHENTICATED: &str = "system:authenticated";

/// The group that may do everything.
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

    /// The server's own background work, named as the controller that does it on a cluster.
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

//! Who is asking.

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

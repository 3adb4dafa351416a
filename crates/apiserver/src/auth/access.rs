//! Authentication and authorization of requests: maps certificates and tokens to users, and checks requests against RBAC.

use std::sync::Arc;

use apimachinery::status::Status;
use arc_swap::ArcSwapOption;
use http::{HeaderMap, header};
use jiff::Timestamp;
use store::{Key, Range, ResourceId, Revision, Store};

use super::{
    MASTERS, User,
    escalation::{self, RbacWrite},
    impersonation,
    rbac::{Attributes, Policy, Sources},
    tokens::{Claims, ISSUER, Signer},
};
use crate::{clock::Clock, identity::Identity, registry::Rules};

pub(super) const RBAC: &str = "rbac.authorization.k8s.io";
const TABLES: [&str; 4] = [
    "roles",
    "rolebindings",
    "clusterroles",
    "clusterrolebindings",
];

/// Authentication and authorization over one store.
#[derive(Debug)]
pub struct Access {
    identity: Arc<Identity>,
    store: Store,
    clock: Clock,
    signer: Signer,
    compiled: ArcSwapOption<(Revision, Policy)>,
}

impl Access {
    /// Creates the access control of a server with the given identity. Accounts, roles and bindings are in `store`.
    pub fn new(identity: Arc<Identity>, store: Store, clock: Clock) -> Self {
        let signer = Signer::new(identity.secret().as_bytes());
        Self {
            identity,
            store,
            clock,
            signer,
            compiled: ArcSwapOption::empty(),
        }
    }

    /// The server's identity.
    pub fn identity(&self) -> &Arc<Identity> {
        &self.identity
    }

    /// Authenticates a request by its client certificate or bearer token, and applies impersonation. Returns the effective user
    /// and, with impersonation, also the authenticated sender.
    pub fn authenticate(
        &self,
        certified: Option<&User>,
        headers: &HeaderMap,
    ) -> Result<(User, Option<User>), Status> {
        let sender = match certified {
            Some(user) => user.clone(),
            None => self.sender(headers)?,
        };
        let Some((user, permissions)) = impersonation::wanted(headers)? else {
            return Ok((sender, None));
        };
        for permission in &permissions {
            self.authorize(&sender, permission)?;
        }
        Ok((user, Some(sender)))
    }

    fn sender(&self, headers: &HeaderMap) -> Result<User, Status> {
        let token = headers
            .get(header::AUTHORIZATION)
            .and_then(|value| value.to_str().ok())
            .and_then(|value| {
                let (scheme, token) = value.split_once(' ')?;
                let token = token.trim();
                (scheme.eq_ignore_ascii_case("bearer") && !token.is_empty()).then_some(token)
            });
        token
            .and_then(|token| self.user_of(token))
            // Rejects a token for another audience: the service that received it could replay it here (confused deputy).
            .filter(|(_, audiences)| audiences.iter().any(|audience| audience == ISSUER))
            .map(|(user, _)| user)
            .ok_or_else(Status::unauthorized)
    }

    /// The user of a token, and the token's audiences.
    pub fn user_of(&self, token: &str) -> Option<(User, Vec<String>)> {
        if self.identity.is_admin_token(token) {
            return Some((User::admin(), vec![ISSUER.to_owned()]));
        }
        let claims = self.signer.verify(token, self.clock.now())?;
        let exists = |plural: &str, name: &str, uid: &str| {
            let object = self.store.get(
                &ResourceId::new("", plural),
                &Key::new(&claims.namespace, name),
            );
            object.is_some_and(|object| &*object.metadata.uid == uid)
        };
        let account = exists("serviceaccounts", &claims.account, &claims.account_uid);
        let pod = claims
            .pod
            .as_ref()
            .is_none_or(|(name, uid)| exists("pods", name, uid));
        (account && pod).then(|| (service_account(&claims), claims.audiences.clone()))
    }

    /// The store with the accounts, roles and bindings.
    pub(super) fn store(&self) -> &Store {
        &self.store
    }

    /// The current time.
    pub(super) fn now(&self) -> Timestamp {
        self.clock.now()
    }

    /// Issues a token for an account.
    pub fn issue(&self, claims: &Claims, now: Timestamp) -> String {
        self.signer.issue(claims, now)
    }

    fn sources(store: &Store) -> Sources {
        let [roles, role_bindings, cluster_roles, cluster_role_bindings] = TABLES.map(|plural| {
            let listed = store.list(&ResourceId::new(RBAC, plural), &Range::namespace(""), None);
            listed
                .map(|snapshot| {
                    snapshot
                        .objects
                        .iter()
                        .map(|object| object.value())
                        .collect()
                })
                .unwrap_or_default()
        });
        Sources {
            roles,
            role_bindings,
            cluster_roles,
            cluster_role_bindings,
        }
    }

    /// The current policy. It is compiled again only after a role or binding changed.
    pub fn policy(&self) -> Arc<(Revision, Policy)> {
        let newest = TABLES
            .iter()
            .map(|plural| self.store.newest(&ResourceId::new(RBAC, plural)))
            .max()
            .unwrap_or_default();
        if let Some(compiled) = self
            .compiled
            .load_full()
            .filter(|compiled| compiled.0 == newest)
        {
            return compiled;
        }
        let compiled = Arc::new((newest, Self::sources(&self.store).compile()));
        self.compiled.store(Some(compiled.clone()));
        compiled
    }

    /// Rejects a request that the user has no permission for.
    pub fn authorize(&self, user: &User, wanted: &Attributes) -> Result<(), Status> {
        let is_master = user.groups.iter().any(|group| group == MASTERS);
        if is_master || self.policy().1.allows(user, wanted) {
            Ok(())
        } else {
            Err(forbidden(user, wanted))
        }
    }

    /// Rejects a role or binding that grants permissions that its writer does not have.
    pub fn check_escalation(&self, write: &RbacWrite<'_>) -> Result<(), Status> {
        let is_rbac = matches!(
            write.rules,
            Rules::Role | Rules::ClusterRole | Rules::RoleBinding | Rules::ClusterRoleBinding
        );
        if !is_rbac || write.user.groups.iter().any(|group| group == MASTERS) {
            return Ok(());
        }
        let policy = &self.policy().1;
        escalation::check(write, policy, &Self::sources(&self.store))
    }
}

fn service_account(claims: &Claims) -> User {
    let mut user = User {
        name: format!(
            "system:serviceaccount:{}:{}",
            claims.namespace, claims.account
        ),
        uid: claims.account_uid.clone(),
        groups: vec![
            "system:serviceaccounts".into(),
            format!("system:serviceaccounts:{}", claims.namespace),
            "system:authenticated".into(),
        ],
        ..User::default()
    };
    if let Some((name, uid)) = &claims.pod {
        user.extra.insert(
            "authentication.kubernetes.io/pod-name".into(),
            vec![name.clone()],
        );
        user.extra.insert(
            "authentication.kubernetes.io/pod-uid".into(),
            vec![uid.clone()],
        );
    }
    user
}

/// The 403 response, with kube-apiserver's message.
pub fn forbidden(user: &User, wanted: &Attributes) -> Status {
    let name = &user.name;
    if wanted.resource.is_empty() {
        let cause = format!(
            "User \"{name}\" cannot {} path \"{}\"",
            wanted.verb, wanted.path
        );
        return Status::forbidden("", "", "", &cause);
    }
    let scope = if wanted.namespace.is_empty() {
        "at the cluster scope".to_owned()
    } else {
        format!("in the namespace \"{}\"", wanted.namespace)
    };
    let cause = format!(
        "User \"{name}\" cannot {} resource \"{}\" in API group \"{}\" {scope}",
        wanted.verb, wanted.resource, wanted.group
    );
    let plural = wanted.resource.split('/').next().unwrap_or_default();
    Status::forbidden(&wanted.group, plural, &wanted.name, &cause)
}

//! Acting as somebody else: what the `Impersonate-*` headers ask for, and the permissions it takes.

use apimachinery::status::Status;
use http::HeaderMap;

use super::{AUTHENTICATED, User, rbac::Attributes};

const USER: &str = "impersonate-user";
const GROUP: &str = "impersonate-group";
const UID: &str = "impersonate-uid";
const EXTRA: &str = "impersonate-extra-";

const AUTHENTICATION: &str = "authentication.k8s.io";

const UNAUTHENTICATED: &str = "system:unauthenticated";
const SERVICE_ACCOUNT: &str = "system:serviceaccount:";

/// The user that a request wants to be, and what its sender must be allowed for that; nothing without such headers.
pub fn wanted(headers: &HeaderMap) -> Result<Option<(User, Vec<Attributes>)>, Status> {
    let texts = |name: &str| -> Vec<String> {
        let values = headers.get_all(name).iter();
        values
            .filter_map(|value| value.to_str().ok())
            .map(ToOwned::to_owned)
            .collect()
    };
    let mut user = User {
        name: texts(USER).into_iter().next().unwrap_or_default(),
        uid: texts(UID).into_iter().next().unwrap_or_default(),
        groups: texts(GROUP),
        ..User::default()
    };
    for name in headers.keys() {
        if let Some(key) = name.as_str().strip_prefix(EXTRA) {
            user.extra.insert(key.to_owned(), texts(name.as_str()));
        }
    }
    if user == User::default() {
        return Ok(None);
    }
    if user.name.is_empty() {
        return Err(Status::internal(format_args!(
            "requested {:?} without impersonating a user",
            user.groups
        )));
    }
    let permissions = permissions(&user);
    complete_groups(&mut user);
    Ok(Some((user, permissions)))
}

fn permissions(user: &User) -> Vec<Attributes> {
    let impersonate = |group: &str, resource: String, name: &str| Attributes {
        verb: "impersonate".into(),
        group: group.into(),
        resource,
        name: name.into(),
        ..Attributes::default()
    };
    let mut permissions = vec![match service_account(&user.name) {
        Some((namespace, name)) => Attributes {
            namespace: namespace.into(),
            ..impersonate("", "serviceaccounts".into(), name)
        },
        None => impersonate("", "users".into(), &user.name),
    }];
    let groups = user.groups.iter();
    permissions.extend(groups.map(|group| impersonate("", "groups".into(), group)));
    if !user.uid.is_empty() {
        permissions.push(impersonate(AUTHENTICATION, "uids".into(), &user.uid));
    }
    for (key, values) in &user.extra {
        let resource = format!("userextras/{key}");
        permissions.extend(
            values
                .iter()
                .map(|value| impersonate(AUTHENTICATION, resource.clone(), value)),
        );
    }
    permissions
}

fn service_account(name: &str) -> Option<(&str, &str)> {
    name.strip_prefix(SERVICE_ACCOUNT)?.split_once(':')
}

/// The groups that come with being this user.
fn complete_groups(user: &mut User) {
    if user.groups.is_empty()
        && let Some((namespace, _)) = service_account(&user.name)
    {
        user.groups = vec![
            "system:serviceaccounts".into(),
            format!("system:serviceaccounts:{namespace}"),
        ];
    }
    let known = |group: &String| group == AUTHENTICATED || group == UNAUTHENTICATED;
    if user.name != "system:anonymous" && !user.groups.iter().any(known) {
        user.groups.push(AUTHENTICATED.into());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn asked(headers: &[(&'static str, &str)]) -> Option<(User, Vec<String>)> {
        let mut map = HeaderMap::new();
        for (name, value) in headers {
            map.append(*name, value.parse().unwrap());
        }
        let (user, permissions) = wanted(&map).unwrap()?;
        let told = permissions.iter().map(|permission| {
            let Attributes {
                group,
                resource,
                namespace,
                name,
                ..
            } = permission;
            format!("{group}/{namespace}/{resource}/{name}")
        });
        Some((user, told.collect()))
    }

    #[test]
    fn each_header_takes_its_own_permission() {
        assert_eq!(asked(&[("accept", "*/*")]), None);
        let (user, permissions) = asked(&[
            (USER, "ann"),
            (GROUP, "blue"),
            (GROUP, "red"),
            (UID, "7"),
            ("impersonate-extra-scope", "view"),
        ])
        .unwrap();
        assert_eq!(user.groups, ["blue", "red", AUTHENTICATED]);
        assert_eq!(
            permissions,
            [
                "//users/ann",
                "//groups/blue",
                "//groups/red",
                "authentication.k8s.io//uids/7",
                "authentication.k8s.io//userextras/scope/view",
            ]
        );
    }

    #[test]
    fn a_service_account_brings_its_groups() {
        let (user, permissions) = asked(&[(USER, "system:serviceaccount:n:a")]).unwrap();
        assert_eq!(permissions, ["/n/serviceaccounts/a"]);
        let groups = [
            "system:serviceaccounts",
            "system:serviceaccounts:n",
            AUTHENTICATED,
        ];
        assert_eq!(user.groups, groups);
    }

    #[test]
    fn groups_without_a_user_are_refused() {
        let mut headers = HeaderMap::new();
        headers.insert(GROUP, "system:masters".parse().unwrap());
        assert_eq!(wanted(&headers).unwrap_err().code, 500);
    }
}

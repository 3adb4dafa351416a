//! User impersonation: parses the `Impersonate-*` headers and derives the permissions that the sender needs.

use apimachinery::{names, status::Status};
use http::HeaderMap;

use super::{AUTHENTICATED, User, rbac::Attributes};

const USER: &str = "impersonate-user";
const GROUP: &str = "impersonate-group";
const UID: &str = "impersonate-uid";
const EXTRA: &str = "impersonate-extra-";

const AUTHENTICATION: &str = "authentication.k8s.io";

const UNAUTHENTICATED: &str = "system:unauthenticated";
const SERVICE_ACCOUNT: &str = "system:serviceaccount:";

/// The user to impersonate, and the permissions that the sender needs for it; `None` without impersonation headers.
///
/// An unreadable header fails the request. Ignoring it would let a proxy that impersonates its user act with its own permissions.
pub fn wanted(headers: &HeaderMap) -> Result<Option<(User, Vec<Attributes>)>, Status> {
    let mut user = User {
        name: single(headers, USER)?,
        uid: single(headers, UID)?,
        groups: texts(headers, GROUP)?,
        ..User::default()
    };
    for name in headers.keys() {
        if let Some(key) = name.as_str().strip_prefix(EXTRA) {
            let values = texts(headers, name.as_str())?;
            user.extra.entry(unescape(key)).or_default().extend(values);
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

/// The values of a header. Empty values are rejected.
fn texts(headers: &HeaderMap, name: &str) -> Result<Vec<String>, Status> {
    let values = headers.get_all(name).iter();
    values
        .map(|value| match std::str::from_utf8(value.as_bytes()) {
            Ok(text) if !text.is_empty() => Ok(text.to_owned()),
            _ => Err(Status::bad_request(format!(
                "the header {name} is empty or not UTF-8"
            ))),
        })
        .collect()
}

/// The only value of a header; empty if the header is missing.
fn single(headers: &HeaderMap, name: &str) -> Result<String, Status> {
    let mut values = texts(headers, name)?;
    match values.len() {
        0 | 1 => Ok(values.pop().unwrap_or_default()),
        _ => Err(Status::bad_request(format!(
            "the header {name} is given more than once"
        ))),
    }
}

/// Keys of extra fields are percent-encoded, because header names cannot contain every character.
fn unescape(key: &str) -> String {
    crate::path::decode(key)
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

/// The namespace and name of a service account. A name that only resembles one is an ordinary user, and permission to impersonate
/// service accounts does not cover it.
fn service_account(user: &str) -> Option<(&str, &str)> {
    let (namespace, name) = user.strip_prefix(SERVICE_ACCOUNT)?.split_once(':')?;
    let is_valid =
        names::dns_1123_label(namespace).is_empty() && names::dns_1123_subdomain(name).is_empty();
    is_valid.then_some((namespace, name))
}

/// Adds the groups that belong to the user implicitly.
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

    fn parse(headers: &[(&'static str, &str)]) -> Option<(User, Vec<String>)> {
        let mut map = HeaderMap::new();
        for (name, value) in headers {
            map.append(*name, value.parse().unwrap());
        }
        let (user, permissions) = wanted(&map).unwrap()?;
        let described = permissions.iter().map(|permission| {
            let Attributes {
                group,
                resource,
                namespace,
                name,
                ..
            } = permission;
            format!("{group}/{namespace}/{resource}/{name}")
        });
        Some((user, described.collect()))
    }

    #[test]
    fn each_header_needs_its_own_permission() {
        assert_eq!(parse(&[("accept", "*/*")]), None);
        let (user, permissions) = parse(&[
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
    fn an_impersonated_service_account_has_its_groups() {
        let (user, permissions) = parse(&[(USER, "system:serviceaccount:n:a")]).unwrap();
        assert_eq!(permissions, ["/n/serviceaccounts/a"]);
        let groups = [
            "system:serviceaccounts",
            "system:serviceaccounts:n",
            AUTHENTICATED,
        ];
        assert_eq!(user.groups, groups);
    }

    #[test]
    fn a_name_that_only_resembles_a_service_account_is_a_user() {
        for name in [
            "system:serviceaccount:n:a:b",
            "system:serviceaccount::a",
            "system:serviceaccount:n:",
            "system:serviceaccount:n:A",
            "system:serviceaccount:n/..:a",
            "system:serviceaccount:n",
            "system:serviceaccount:*:a",
        ] {
            let (user, permissions) = parse(&[(USER, name)]).unwrap();
            assert_eq!(permissions, [format!("//users/{name}")]);
            assert_eq!(user.groups, [AUTHENTICATED], "{name}");
        }
    }

    #[test]
    fn an_unreadable_impersonation_header_fails_the_request() {
        let mut headers = HeaderMap::new();
        headers.insert(USER, http::HeaderValue::from_bytes(b"\xff").unwrap());
        assert_eq!(wanted(&headers).unwrap_err().code, 400);
        headers.insert(USER, http::HeaderValue::from_static(""));
        assert_eq!(wanted(&headers).unwrap_err().code, 400);
        headers.insert(USER, "ann".parse().unwrap());
        headers.append(USER, "root".parse().unwrap());
        assert_eq!(wanted(&headers).unwrap_err().code, 400);
        let name = http::HeaderValue::from_bytes("jörg".as_bytes()).unwrap();
        headers.insert(USER, name);
        assert_eq!(wanted(&headers).unwrap().unwrap().0.name, "jörg");
    }

    #[test]
    fn keys_of_extra_fields_are_decoded() {
        let (user, permissions) = parse(&[
            (USER, "ann"),
            ("impersonate-extra-example.com%2fscope", "a"),
        ])
        .unwrap();
        assert_eq!(user.extra["example.com/scope"], ["a"]);
        assert_eq!(
            permissions[1],
            "authentication.k8s.io//userextras/example.com/scope/a"
        );
    }

    #[test]
    fn groups_without_a_user_are_refused() {
        let mut headers = HeaderMap::new();
        headers.insert(GROUP, "system:masters".parse().unwrap());
        assert_eq!(wanted(&headers).unwrap_err().code, 500);
    }
}

//! The review APIs (`TokenReview`, `SubjectAccessReview` and others), which are answered but not stored, and token requests.

use apimachinery::{field::FieldError, status::Status};
use jiff::SignedDuration;
use serde_json::{Value, json};
use store::{Key, ResourceId};

use super::{
    User,
    access::Access,
    rbac::Attributes,
    tokens::{Claims, ISSUER},
};
use crate::metadata;

const AUTHENTICATION: &str = "authentication.k8s.io";
const AUTHORIZATION: &str = "authorization.k8s.io";
const MINIMUM_SECONDS: i64 = 600;
const DEFAULT_SECONDS: i64 = 3600;
const MAXIMUM_SECONDS: i64 = 1 << 32;

/// The kinds that are answered but not stored: group, plural, kind, namespaced.
pub const REVIEWS: &[(&str, &str, &str, bool)] = &[
    (AUTHENTICATION, "tokenreviews", "TokenReview", false),
    (
        AUTHENTICATION,
        "selfsubjectreviews",
        "SelfSubjectReview",
        false,
    ),
    (
        AUTHORIZATION,
        "subjectaccessreviews",
        "SubjectAccessReview",
        false,
    ),
    (
        AUTHORIZATION,
        "selfsubjectaccessreviews",
        "SelfSubjectAccessReview",
        false,
    ),
    (
        AUTHORIZATION,
        "selfsubjectrulesreviews",
        "SelfSubjectRulesReview",
        false,
    ),
    (
        AUTHORIZATION,
        "localsubjectaccessreviews",
        "LocalSubjectAccessReview",
        true,
    ),
];

/// Whether a path addresses a review.
pub fn is_review(group: &str, version: &str, plural: &str) -> bool {
    version == "v1"
        && REVIEWS
            .iter()
            .any(|(review_group, review, _, _)| *review_group == group && *review == plural)
}

/// Answers a review.
pub fn answer(
    access: &Access,
    user: &User,
    plural: &str,
    mut review: Value,
) -> Result<Value, Status> {
    let Some((group, _, kind, _)) = REVIEWS.iter().find(|(_, name, _, _)| *name == plural) else {
        return Err(Status::unknown_path());
    };
    review["apiVersion"] = Value::from(format!("{group}/v1"));
    review["kind"] = Value::from(*kind);
    if !review["metadata"].is_object() {
        review["metadata"] = json!({"creationTimestamp": null});
    }
    review["status"] = match plural {
        "tokenreviews" => token_review(access, &review["spec"]),
        "selfsubjectreviews" => json!({"userInfo": user_info(user)}),
        "selfsubjectaccessreviews" => access_review(access, user, &review["spec"]),
        "selfsubjectrulesreviews" => rules_review(access, user, &review["spec"]),
        _ => access_review(access, &subject(&review["spec"]), &review["spec"]),
    };
    Ok(review)
}

fn user_info(user: &User) -> Value {
    let mut info = json!({"username": user.name, "groups": user.groups});
    if !user.uid.is_empty() {
        info["uid"] = Value::from(user.uid.as_str());
    }
    if !user.extra.is_empty() {
        info["extra"] = json!(user.extra);
    }
    info
}

fn token_review(access: &Access, spec: &Value) -> Value {
    let mut wanted = metadata::list_of_text(spec.get("audiences"));
    if wanted.is_empty() {
        // A review without audiences means the audience of the API server. Otherwise a service that verifies tokens this way
        // would accept a token that was issued for another service (confused deputy).
        wanted.push(ISSUER);
    }
    let Some((user, audiences)) = access.user_of(spec["token"].as_str().unwrap_or_default()) else {
        return json!({"error": "[invalid bearer token]", "user": {}});
    };
    let shared: Vec<&String> = audiences
        .iter()
        .filter(|audience| wanted.contains(&audience.as_str()))
        .collect();
    if shared.is_empty() {
        let error = format!(
            "[invalid bearer token, token audiences {audiences:?} is invalid for the target audiences {wanted:?}]"
        );
        return json!({"error": error, "user": {}});
    }
    json!({"authenticated": true, "user": user_info(&user), "audiences": shared})
}

fn subject(spec: &Value) -> User {
    let text = |field: &str| spec[field].as_str().unwrap_or_default().to_owned();
    let groups = metadata::list_of_text(spec.get("groups"))
        .into_iter()
        .map(ToOwned::to_owned)
        .collect();
    User {
        name: text("user"),
        uid: text("uid"),
        groups,
        ..User::default()
    }
}

/// The attributes of an access review.
fn attributes(spec: &Value) -> Attributes {
    let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
    if let Some(asked) = spec
        .get("nonResourceAttributes")
        .filter(|asked| asked.is_object())
    {
        return Attributes {
            verb: text(&asked["verb"]),
            path: text(&asked["path"]),
            ..Attributes::default()
        };
    }
    let asked = &spec["resourceAttributes"];
    let mut resource = text(&asked["resource"]);
    if !text(&asked["subresource"]).is_empty() {
        resource = format!("{resource}/{}", text(&asked["subresource"]));
    }
    Attributes {
        verb: text(&asked["verb"]),
        group: text(&asked["group"]),
        resource,
        namespace: text(&asked["namespace"]),
        name: text(&asked["name"]),
        path: String::new(),
    }
}

fn access_review(access: &Access, user: &User, spec: &Value) -> Value {
    let policy = &access.policy().1;
    let wanted = attributes(spec);
    match policy.reason(user, &wanted) {
        Some(reason) => json!({"allowed": true, "reason": reason}),
        // The group system:masters needs no rule.
        None => json!({"allowed": policy.allows(user, &wanted)}),
    }
}

fn rules_review(access: &Access, user: &User, spec: &Value) -> Value {
    let namespace = spec["namespace"].as_str().unwrap_or_default();
    let policy = access.policy();
    let (mut resources, mut paths) = (Vec::new(), Vec::new());
    if user.groups.iter().any(|group| group == super::MASTERS) {
        resources.push(json!({"verbs": ["*"], "apiGroups": ["*"], "resources": ["*"]}));
        paths.push(json!({"verbs": ["*"], "nonResourceURLs": ["*"]}));
    }
    for rule in policy.1.rules_for(user, namespace) {
        if !rule.resources.is_empty() {
            let mut shown =
                json!({"verbs": rule.verbs, "apiGroups": rule.groups, "resources": rule.resources});
            if !rule.names.is_empty() {
                shown["resourceNames"] = json!(rule.names);
            }
            resources.push(shown);
        }
        if !rule.urls.is_empty() {
            paths.push(json!({"verbs": rule.verbs, "nonResourceURLs": rule.urls}));
        }
    }
    json!({"resourceRules": resources, "nonResourceRules": paths, "incomplete": false})
}

/// Issues a token for a service account: `serviceaccounts/x/token`.
pub fn request_token(access: &Access, key: &Key, mut request: Value) -> Result<Value, Status> {
    let account = access
        .store()
        .get(&ResourceId::new("", "serviceaccounts"), key)
        .ok_or_else(|| Status::not_found("", "serviceaccounts", key.name()))?;
    let spec = &request["spec"];
    let seconds = spec["expirationSeconds"]
        .as_i64()
        .unwrap_or(DEFAULT_SECONDS);
    if !(MINIMUM_SECONDS..=MAXIMUM_SECONDS).contains(&seconds) {
        let detail = if seconds < MINIMUM_SECONDS {
            "may not specify a duration less than 10 minutes"
        } else {
            "may not specify a duration larger than 2^32 seconds"
        };
        let error = FieldError::invalid("spec.expirationSeconds", seconds, detail);
        return Err(Status::invalid(
            AUTHENTICATION,
            "TokenRequest",
            key.name(),
            &[error],
        ));
    }
    let mut audiences: Vec<String> = metadata::list_of_text(spec.get("audiences"))
        .into_iter()
        .map(ToOwned::to_owned)
        .collect();
    if audiences.is_empty() {
        audiences.push(ISSUER.to_owned());
    }
    let pod = bound_pod(access, key, &spec["boundObjectRef"])?;
    let now = access.now();
    let expires = now
        .saturating_add(SignedDuration::from_secs(seconds))
        .map_err(|error| Status::bad_request(error.to_string()))?;
    let claims = Claims {
        namespace: key.namespace().to_owned(),
        account: key.name().to_owned(),
        account_uid: account.metadata.uid.to_string(),
        pod,
        audiences: audiences.clone(),
        expires,
    };
    request["apiVersion"] = Value::from("authentication.k8s.io/v1");
    request["kind"] = Value::from("TokenRequest");
    request["metadata"] = json!({"name": key.name(), "namespace": key.namespace(), "creationTimestamp": metadata::timestamp(now)});
    request["spec"]["audiences"] = json!(audiences);
    request["spec"]["expirationSeconds"] = Value::from(seconds);
    request["status"] = json!({"token": access.issue(&claims, now), "expirationTimestamp": metadata::timestamp(expires)});
    Ok(request)
}

fn bound_pod(
    access: &Access,
    account: &Key,
    reference: &Value,
) -> Result<Option<(String, String)>, Status> {
    if !reference.is_object() {
        return Ok(None);
    }
    if reference["kind"] != "Pod" {
        let error = FieldError::not_supported(
            "spec.boundObjectRef.kind",
            reference["kind"].clone(),
            &["Pod"],
        );
        return Err(Status::invalid(
            AUTHENTICATION,
            "TokenRequest",
            account.name(),
            &[error],
        ));
    }
    let name = reference["name"].as_str().unwrap_or_default();
    let pod = access
        .store()
        .get(
            &ResourceId::new("", "pods"),
            &Key::new(account.namespace(), name),
        )
        .ok_or_else(|| Status::not_found("", "pods", name))?;
    let runs_as = pod.value()["spec"]["serviceAccountName"].take();
    if runs_as != account.name() {
        // Otherwise a user who may request tokens of one account could impersonate pods of another account.
        return Err(Status::bad_request(format!(
            "cannot bind token for serviceaccount \"{}\" to pod running with different serviceaccount name.",
            account.name()
        )));
    }
    let uid = reference["uid"].as_str().unwrap_or(&pod.metadata.uid);
    if uid != &*pod.metadata.uid {
        let cause = format!(
            "the UID in the bound object reference ({uid}) does not match the UID in record. The object might have been deleted and then recreated"
        );
        return Err(Status::conflict_because("", "pods", name, &cause));
    }
    Ok(Some((name.to_owned(), uid.to_owned())))
}

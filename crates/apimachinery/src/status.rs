//! The `Status` object, in which a Kubernetes API server reports errors, with one constructor per kind of error.
//!
//! The messages are exactly those of kube-apiserver, because clients match on them. This module knows no HTTP except the status
//! code in every `Status`.

use std::collections::HashSet;
use std::fmt;

use serde::{Deserialize, Serialize};

use crate::field::FieldError;

/// A `v1` `Status`: the body of every unsuccessful response.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Status {
    kind: StatusKind,
    api_version: StatusVersion,
    #[serde(default)]
    metadata: EmptyMetadata,
    /// `Success` or `Failure`.
    pub status: String,
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub message: String,
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub reason: String,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub details: Option<Details>,
    /// Omitted in the response to a delete, as in kube-apiserver.
    #[serde(default, skip_serializing_if = "is_no_code")]
    pub code: u16,
}

#[expect(
    clippy::trivially_copy_pass_by_ref,
    reason = "serde requires this signature"
)]
fn is_no_code(code: &u16) -> bool {
    *code == 0
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
enum StatusKind {
    Status,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
enum StatusVersion {
    #[serde(rename = "v1")]
    V1,
}

#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
struct EmptyMetadata {}

/// The object or resource that the error is about.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct Details {
    #[serde(skip_serializing_if = "String::is_empty")]
    pub name: String,
    #[serde(skip_serializing_if = "String::is_empty")]
    pub group: String,
    #[serde(skip_serializing_if = "String::is_empty")]
    pub kind: String,
    #[serde(skip_serializing_if = "String::is_empty")]
    pub uid: String,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub causes: Vec<Cause>,
    #[serde(skip_serializing_if = "is_zero")]
    pub retry_after_seconds: u32,
}

#[expect(
    clippy::trivially_copy_pass_by_ref,
    reason = "serde requires this signature"
)]
fn is_zero(number: &u32) -> bool {
    *number == 0
}

/// A cause of an error, usually a field.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Cause {
    #[serde(skip_serializing_if = "String::is_empty")]
    pub reason: String,
    #[serde(skip_serializing_if = "String::is_empty")]
    pub message: String,
    #[serde(skip_serializing_if = "String::is_empty")]
    pub field: String,
}

impl From<&FieldError> for Cause {
    fn from(error: &FieldError) -> Self {
        Self {
            reason: error.kind.cause_type().to_owned(),
            message: error.body(),
            field: error.field.clone(),
        }
    }
}

/// `resource.group`, or only `resource` in the core group.
pub fn qualified(group: &str, resource_or_kind: &str) -> String {
    if group.is_empty() {
        resource_or_kind.to_owned()
    } else {
        format!("{resource_or_kind}.{group}")
    }
}

const CONFLICT_ADVICE: &str =
    "the object has been modified; please apply your changes to the latest version and try again";

impl Status {
    /// An error with any code and reason. The other constructors cover the errors of Kubernetes itself.
    pub fn failure(code: u16, reason: &str, message: impl Into<String>) -> Self {
        Self {
            kind: StatusKind::Status,
            api_version: StatusVersion::V1,
            metadata: EmptyMetadata {},
            status: "Failure".to_owned(),
            message: message.into(),
            reason: reason.to_owned(),
            details: None,
            code,
        }
    }

    /// The response to a delete that removed the object.
    pub fn success(group: &str, resource: &str, name: &str, uid: &str) -> Self {
        let mut status = Self::failure(0, "", "").about(group, resource, name);
        "Success".clone_into(&mut status.status);
        if let Some(details) = &mut status.details {
            uid.clone_into(&mut details.uid);
        }
        status
    }

    fn about(mut self, group: &str, kind: &str, name: &str) -> Self {
        self.details = Some(Details {
            group: group.to_owned(),
            kind: kind.to_owned(),
            name: name.to_owned(),
            ..Details::default()
        });
        self
    }

    /// Adds causes to the error.
    #[must_use]
    pub fn with_causes(mut self, causes: Vec<Cause>) -> Self {
        self.details.get_or_insert_with(Details::default).causes = causes;
        self
    }

    /// Adds a `Retry-After` to the error.
    #[must_use]
    pub fn with_retry_after(mut self, seconds: u32) -> Self {
        self.details
            .get_or_insert_with(Details::default)
            .retry_after_seconds = seconds;
        self
    }

    pub fn not_found(group: &str, resource: &str, name: &str) -> Self {
        let message = format!("{} \"{name}\" not found", qualified(group, resource));
        Self::failure(404, "NotFound", message).about(group, resource, name)
    }

    /// The server does not serve the requested path.
    pub fn unknown_path() -> Self {
        let mut status = Self::failure(
            404,
            "NotFound",
            "the server could not find the requested resource",
        );
        status.details = Some(Details::default());
        status
    }

    pub fn already_exists(group: &str, resource: &str, name: &str) -> Self {
        let message = format!("{} \"{name}\" already exists", qualified(group, resource));
        Self::failure(409, "AlreadyExists", message).about(group, resource, name)
    }

    /// Every generated name was already taken.
    pub fn generate_name_conflict(group: &str, resource: &str, name: &str) -> Self {
        let message = format!(
            "{} \"{name}\" already exists, the server was not able to generate a unique name for the object",
            qualified(group, resource)
        );
        Self::failure(409, "AlreadyExists", message)
            .about(group, resource, name)
            .with_retry_after(1)
    }

    /// The write was based on an outdated version of the object.
    pub fn conflict(group: &str, resource: &str, name: &str) -> Self {
        Self::conflict_because(group, resource, name, CONFLICT_ADVICE)
    }

    pub fn conflict_because(group: &str, resource: &str, name: &str, cause: &str) -> Self {
        let message = format!(
            "Operation cannot be fulfilled on {} \"{name}\": {cause}",
            qualified(group, resource)
        );
        Self::failure(409, "Conflict", message).about(group, resource, name)
    }

    /// Other managers own fields that a server-side apply would set.
    pub fn apply_conflict(message: impl Into<String>, causes: Vec<Cause>) -> Self {
        Self::failure(409, "Conflict", message).with_causes(causes)
    }

    pub fn invalid(group: &str, kind: &str, name: &str, errors: &[FieldError]) -> Self {
        let subject = format!("{} \"{name}\" is invalid", qualified(group, kind));
        // A small body can contain a million errors. The response would be many times larger.
        let reported = &errors[..errors.len().min(MAX_REPORTED_ERRORS)];
        let mut message = match aggregate(reported) {
            Some(all) => format!("{subject}: {all}"),
            None => subject,
        };
        if reported.len() < errors.len() {
            let more = errors.len() - reported.len();
            message = format!("{message} and {more} more");
        }
        Self::failure(422, "Invalid", message)
            .about(group, kind, name)
            .with_causes(reported.iter().map(Cause::from).collect())
    }

    pub fn bad_request(message: impl Into<String>) -> Self {
        Self::failure(400, "BadRequest", message)
    }

    pub fn unauthorized() -> Self {
        Self::failure(401, "Unauthorized", "Unauthorized")
    }

    pub fn forbidden(group: &str, resource: &str, name: &str, cause: &str) -> Self {
        let message = match (resource, name) {
            ("", _) => format!("forbidden: {cause}"),
            (_, "") => format!("{} is forbidden: {cause}", qualified(group, resource)),
            _ => format!(
                "{} \"{name}\" is forbidden: {cause}",
                qualified(group, resource)
            ),
        };
        Self::failure(403, "Forbidden", message).about(group, resource, name)
    }

    pub fn method_not_supported(group: &str, resource: &str, action: &str) -> Self {
        let message = format!(
            "{action} is not supported on resources of kind \"{}\"",
            qualified(group, resource)
        );
        Self::failure(405, "MethodNotAllowed", message).about(group, resource, "")
    }

    /// 405 for a path that exists and does not support the verb.
    pub fn method_not_allowed() -> Self {
        let message = "the server does not allow this method on the requested resource";
        let mut status = Self::failure(405, "MethodNotAllowed", message);
        status.details = Some(Details::default());
        status
    }

    pub fn not_acceptable(media_types: &[&str]) -> Self {
        let message = format!(
            "only the following media types are accepted: {}",
            media_types.join(", ")
        );
        Self::failure(406, "NotAcceptable", message)
    }

    /// The resource version is older than the oldest one in the watch cache.
    pub fn expired(message: impl Into<String>) -> Self {
        Self::failure(410, "Expired", message)
    }

    /// 410 for a watch that starts before the oldest stored event.
    pub fn too_old_resource_version(requested: u64, oldest: u64) -> Self {
        Self::expired(format!("too old resource version: {requested} ({oldest})"))
    }

    pub fn gone(message: impl Into<String>) -> Self {
        Self::failure(410, "Gone", message)
    }

    pub fn request_entity_too_large(message: impl fmt::Display) -> Self {
        let message = format!("Request entity too large: {message}");
        Self::failure(413, "RequestEntityTooLarge", message)
    }

    pub fn unsupported_media_type(media_types: &[&str]) -> Self {
        let message = format!(
            "the body of the request was in an unknown format - accepted media types include: {}",
            media_types.join(", ")
        );
        Self::failure(415, "UnsupportedMediaType", message)
    }

    /// A well-formed patch that cannot be applied to the object. Kubernetes omits the cause; here it is part of the message.
    pub fn unprocessable(cause: impl fmt::Display) -> Self {
        let message =
            format!("the server rejected our request due to an error in our request: {cause}");
        Self::failure(422, "Invalid", message)
    }

    pub fn too_many_requests(message: impl Into<String>, retry_after_seconds: u32) -> Self {
        Self::failure(429, "TooManyRequests", message).with_retry_after(retry_after_seconds)
    }

    pub fn internal(cause: impl fmt::Display) -> Self {
        let cause = cause.to_string();
        Self::failure(
            500,
            "InternalError",
            format!("Internal error occurred: {cause}"),
        )
        .with_causes(vec![Cause {
            message: cause,
            ..Cause::default()
        }])
    }

    pub fn service_unavailable(message: impl Into<String>) -> Self {
        Self::failure(503, "ServiceUnavailable", message)
    }

    pub fn timeout(message: impl fmt::Display, retry_after_seconds: u32) -> Self {
        Self::failure(504, "Timeout", format!("Timeout: {message}"))
            .with_retry_after(retry_after_seconds)
    }

    /// The write cannot be made durable because the disk is full.
    pub fn insufficient_storage(message: impl Into<String>) -> Self {
        Self::failure(507, "InsufficientStorage", message)
    }

    pub fn is_not_found(&self) -> bool {
        self.reason == "NotFound"
    }

    pub fn is_conflict(&self) -> bool {
        self.reason == "Conflict"
    }
}

/// The maximum number of errors in one response.
const MAX_REPORTED_ERRORS: usize = 1000;

/// Joins errors into one message: a single one alone, several in brackets without duplicates.
pub fn aggregate(errors: &[FieldError]) -> Option<String> {
    let mut seen = HashSet::new();
    let messages = errors.iter().map(ToString::to_string);
    let mut messages: Vec<String> = messages
        .filter(|message| seen.insert(message.clone()))
        .collect();
    match messages.len() {
        0 => None,
        1 => messages.pop(),
        _ => Some(format!("[{}]", messages.join(", "))),
    }
}

impl fmt::Display for Status {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.message)
    }
}

impl std::error::Error for Status {}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn the_number_of_reported_errors_is_limited() {
        let errors: Vec<FieldError> = (0..300_000)
            .map(|index| FieldError::required(format!("spec.list[{index}].name"), ""))
            .collect();
        let status = Status::invalid("", "Pod", "p", &errors);
        assert!(status.message.ends_with("] and 299000 more"));
        assert_eq!(status.details.unwrap().causes.len(), 1000);
        assert!(aggregate(&errors).is_some());
    }

    #[test]
    fn not_found_serialises_as_kubernetes_does() {
        let status = Status::not_found("", "pods", "x");
        assert_eq!(
            serde_json::to_value(&status).unwrap(),
            json!({
                "kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Failure",
                "message": "pods \"x\" not found", "reason": "NotFound",
                "details": {"name": "x", "kind": "pods"}, "code": 404
            })
        );
    }

    #[test]
    fn groups_qualify_the_resource() {
        let status = Status::conflict("agents.x-k8s.io", "sandboxes", "a");
        assert_eq!(
            status.message,
            "Operation cannot be fulfilled on sandboxes.agents.x-k8s.io \"a\": the object has been modified; \
             please apply your changes to the latest version and try again"
        );
    }

    #[test]
    fn one_field_error_stands_alone_and_several_are_bracketed() {
        let one = [FieldError::required("spec.a", "")];
        assert_eq!(
            Status::invalid("g", "Foo", "x", &one).message,
            "Foo.g \"x\" is invalid: spec.a: Required value"
        );
        let two = [
            FieldError::required("spec.a", ""),
            FieldError::invalid("spec.b", 1, "no"),
            FieldError::required("spec.a", ""),
        ];
        let status = Status::invalid("", "Pod", "x", &two);
        assert_eq!(
            status.message,
            "Pod \"x\" is invalid: [spec.a: Required value, spec.b: Invalid value: 1: no]"
        );
        assert_eq!(status.details.unwrap().causes.len(), 3);
    }

    #[test]
    fn a_status_round_trips_through_json() {
        let status = Status::too_many_requests("slow down", 3);
        let text = serde_json::to_string(&status).unwrap();
        assert_eq!(serde_json::from_str::<Status>(&text).unwrap(), status);
    }
}

//! Parses query parameters and headers into the options of operations.

use std::time::Duration;

use apimachinery::{field::FieldError, status::Status};
use http::{HeaderMap, header};

use crate::{
    auth::User,
    operations::{
        DeleteOptions, ListOptions, Propagation, VersionMatch, WatchOptions, selection::Selection,
    },
    path::Query,
    registry::Resource,
    target::{FieldValidation, WriteOptions},
};

fn parse_number<T: std::str::FromStr>(query: &Query, name: &str) -> Result<Option<T>, Status> {
    let Some(text) = query.text(name) else {
        return Ok(None);
    };
    text.parse().map(Some).map_err(|_| {
        Status::bad_request(format!(
            "strconv.ParseUint: parsing \"{text}\": invalid syntax ({name})"
        ))
    })
}

/// Maximum length of a field manager's name.
const MANAGER_BYTES: usize = 128;

/// The 422 response to invalid options; `kind` is the kind of the options.
pub fn invalid_options(kind: &str, errors: &[FieldError]) -> Status {
    Status::invalid("meta.k8s.io", kind, "", errors)
}

/// Options of a list.
pub fn list(resource: &Resource, query: &Query) -> Result<ListOptions, Status> {
    let resource_version = match query.text("resourceVersion") {
        None => None,
        Some(text) => Some(text.parse().map_err(|_| {
            Status::bad_request(format!("Invalid value: \"{text}\": invalid resource version \"{text}\": strconv.ParseUint: parsing \"{text}\": invalid syntax"))
        })?),
    };
    let version_match = match query.text("resourceVersionMatch") {
        None => None,
        Some("NotOlderThan") => Some(VersionMatch::NotOlderThan),
        Some("Exact") => Some(VersionMatch::Exact),
        Some(other) => {
            let supported = ["Exact", "NotOlderThan", ""];
            let error = FieldError::not_supported("resourceVersionMatch", other, &supported);
            return Err(invalid_options("ListOptions", &[error]));
        }
    };
    if !query.flag("watch") {
        check_list(query, version_match, resource_version)?;
    }
    Ok(ListOptions {
        selection: Selection::parse(
            resource,
            query.text("labelSelector"),
            query.text("fieldSelector"),
        )?,
        limit: parse_number(query, "limit")?.unwrap_or_default(),
        continuation: query.text("continue").map(ToOwned::to_owned),
        resource_version,
        version_match,
    })
}

/// Rejects options that a list does not support, alone or together.
fn check_list(
    query: &Query,
    version_match: Option<VersionMatch>,
    resource_version: Option<u64>,
) -> Result<(), Status> {
    let mut errors = Vec::new();
    if version_match.is_some() && resource_version.is_none() {
        let detail = "resourceVersionMatch is forbidden unless resourceVersion is provided";
        errors.push(FieldError::forbidden("resourceVersionMatch", detail));
    }
    if query.tri_state("sendInitialEvents").is_some() {
        let detail = "sendInitialEvents is forbidden for list";
        errors.push(FieldError::forbidden("sendInitialEvents", detail));
    }
    if errors.is_empty() {
        return Ok(());
    }
    Err(invalid_options("ListOptions", &errors))
}

/// Options of a watch.
pub fn watch(resource: &Resource, query: &Query) -> Result<WatchOptions, Status> {
    Ok(WatchOptions {
        list: list(resource, query)?,
        bookmarks: query.flag("allowWatchBookmarks"),
        initial_events: query.tri_state("sendInitialEvents"),
        timeout: parse_number(query, "timeoutSeconds")?
            .filter(|seconds| *seconds > 0)
            .map(Duration::from_secs),
    })
}

/// Options of a write.
pub fn write(query: &Query, headers: &HeaderMap, user: &User) -> Result<WriteOptions, Status> {
    let dry_run = match query.all("dryRun").collect::<Vec<_>>().as_slice() {
        [] | [""] => false,
        values if values.iter().all(|value| *value == "All") => true,
        values => {
            let error = FieldError::not_supported("dryRun", values.join(","), &["All"]);
            return Err(invalid_options("PatchOptions", &[error]));
        }
    };
    let field_validation = match query.text("fieldValidation") {
        None | Some("Warn") => FieldValidation::Warn,
        Some("Ignore") => FieldValidation::Ignore,
        Some("Strict") => FieldValidation::Strict,
        Some(other) => {
            let supported = ["Ignore", "Strict", "Warn"];
            let error = FieldError::not_supported("fieldValidation", other, &supported);
            return Err(invalid_options("CreateOptions", &[error]));
        }
    };
    let agent = headers
        .get(header::USER_AGENT)
        .and_then(|value| value.to_str().ok())
        .unwrap_or("unknown");
    let manager = query
        .text("fieldManager")
        .unwrap_or_else(|| agent.split('/').next().unwrap_or_default());
    if manager.len() > MANAGER_BYTES || !manager.chars().all(|character| !character.is_control()) {
        let detail = "may not be more than 128 bytes or contain control characters";
        let error = FieldError::invalid("fieldManager", manager, detail);
        return Err(invalid_options("PatchOptions", &[error]));
    }
    Ok(WriteOptions {
        dry_run,
        field_validation,
        field_manager: manager.to_owned(),
        user: user.clone(),
        ..WriteOptions::default()
    })
}

/// Options of a delete. The query string overrides the body.
pub fn delete(query: &Query, body: Option<DeleteOptions>) -> Result<DeleteOptions, Status> {
    let mut options = body.unwrap_or_default();
    if let Some(seconds) = parse_number(query, "gracePeriodSeconds")? {
        options.grace_period_seconds = Some(seconds);
    }
    if let Some(policy) = query.text("propagationPolicy") {
        options.propagation_policy = Some(match policy {
            "Orphan" => Propagation::Orphan,
            "Background" => Propagation::Background,
            "Foreground" => Propagation::Foreground,
            other => {
                let supported = ["Background", "Foreground", "Orphan"];
                let error = FieldError::not_supported("propagationPolicy", other, &supported);
                return Err(invalid_options("DeleteOptions", &[error]));
            }
        });
    }
    if let Some(orphan) = query.tri_state("orphanDependents") {
        options.orphan_dependents = Some(orphan);
    }
    if query.text("dryRun") == Some("All") {
        options.dry_run = vec!["All".into()];
    }
    if options.orphan_dependents.is_some() && options.propagation_policy.is_some() {
        let policy = query.text("propagationPolicy").unwrap_or_default();
        let detail = "orphanDependents and deletionPropagation cannot be both set";
        let error = FieldError::invalid("propagationPolicy", policy, detail);
        return Err(invalid_options("DeleteOptions", &[error]));
    }
    Ok(options)
}

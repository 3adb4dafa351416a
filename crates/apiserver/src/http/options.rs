//! Query parameters and headers as the operations understand them.

use std::time::Duration;

use apimachinery::status::Status;
use http::{HeaderMap, header};

use super::path::Query;
use crate::{
    auth::User,
    operations::{
        DeleteOptions, FieldValidation, ListOptions, Propagation, VersionMatch, WatchOptions,
        WriteOptions, selection::Selection,
    },
    registry::Resource,
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

/// Longest name of a field manager.
const MANAGER_BYTES: usize = 128;

/// A refusal of write options.
pub fn invalid_options(message: &str) -> Status {
    Status::failure(
        422,
        "Invalid",
        format!("PatchOptions.meta.k8s.io \"\" is invalid: {message}"),
    )
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
            let message = format!(
                "resourceVersionMatch: Unsupported value: \"{other}\": supported values: \"Exact\", \"NotOlderThan\", \"\""
            );
            return Err(Status::failure(
                422,
                "Invalid",
                format!("ListOptions.meta.k8s.io \"\" is invalid: {message}"),
            ));
        }
    };
    let is_watch = query.flag("watch");
    if !is_watch
        && version_match.is_some()
        && resource_version.is_none()
        && query.tri_state("sendInitialEvents").is_none()
    {
        let message = "resourceVersionMatch: Forbidden: resourceVersionMatch is forbidden unless resourceVersion is provided";
        return Err(Status::failure(
            422,
            "Invalid",
            format!("ListOptions.meta.k8s.io \"\" is invalid: {message}"),
        ));
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

/// Options of a watch.
pub fn watch(resource: &Resource, query: &Query, name: &str) -> Result<WatchOptions, Status> {
    let mut list = list(resource, query)?;
    if !name.is_empty() {
        list.selection = list.selection.named(name);
    }
    Ok(WatchOptions {
        list,
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
            let message = format!(
                "dryRun: Unsupported value: \"{}\": supported values: \"All\"",
                values.join(",")
            );
            return Err(Status::failure(
                422,
                "Invalid",
                format!("PatchOptions.meta.k8s.io \"\" is invalid: {message}"),
            ));
        }
    };
    let field_validation = match query.text("fieldValidation") {
        None | Some("Warn") => FieldValidation::Warn,
        Some("Ignore") => FieldValidation::Ignore,
        Some("Strict") => FieldValidation::Strict,
        Some(other) => {
            let message = format!(
                "fieldValidation: Unsupported value: \"{other}\": supported values: \"Ignore\", \"Strict\", \"Warn\""
            );
            return Err(Status::failure(
                422,
                "Invalid",
                format!("CreateOptions.meta.k8s.io \"\" is invalid: {message}"),
            ));
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
        return Err(invalid_options(
            "fieldManager: Invalid value: may not be more than 128 bytes or contain control characters",
        ));
    }
    Ok(WriteOptions {
        dry_run,
        field_validation,
        field_manager: manager.to_owned(),
        user: user.clone(),
        ..WriteOptions::default()
    })
}

/// Options of a delete: the body, then the query string.
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
                let supported = "supported values: \"Foreground\", \"Background\", \"Orphan\"";
                return Err(Status::bad_request(format!(
                    "invalid propagationPolicy: Unsupported value: \"{other}\": {supported}"
                )));
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
        let message = "orphanDependents and deletionPropagation cannot be both set";
        return Err(Status::failure(
            422,
            "Invalid",
            format!(
                "DeleteOptions.meta.k8s.io \"\" is invalid: propagationPolicy: Invalid value: {message}"
            ),
        ));
    }
    Ok(options)
}

//! The patch formats, parsed once and applied as often as other writers make it necessary.

use apimachinery::{
    field::FieldError,
    patch::{json::JsonPatch, merge, strategic},
    status::Status,
};
use bytes::Bytes;
use http::HeaderMap;
use jiff::Timestamp;
use serde_json::Value;

use super::{
    body::{self, Format},
    options,
    path::Query,
};
use crate::{
    operations::{Part, WriteOptions, modify::Transform},
    registry::Resource,
    strategy::ownership,
};

const SUPPORTED: [&str; 4] = [
    "application/json-patch+json",
    "application/merge-patch+json",
    "application/apply-patch+yaml",
    "application/strategic-merge-patch+json",
];

/// What the client wants changed.
#[derive(Debug)]
pub enum Patch {
    /// RFC 6902.
    Json(JsonPatch),
    /// RFC 7386.
    Merge(Value),
    /// Kubernetes' own, which knows how lists of built-in kinds are merged.
    Strategic(Value),
    /// Server-side apply.
    Apply {
        /// The fields the manager wants to own.
        configuration: Value,
        /// Whether it takes them from others.
        force: bool,
    },
}

impl Patch {
    /// Parses a patch by its media type; the second value lists fields given twice.
    pub async fn parse(
        headers: &HeaderMap,
        query: &Query,
        bytes: &Bytes,
    ) -> Result<(Self, Vec<String>), Status> {
        match body::media_type(headers).as_str() {
            "application/json-patch+json" => {
                let parse = |bytes: &[u8]| {
                    JsonPatch::from_slice(bytes)
                        .map_err(|error| Status::bad_request(error.to_string()))
                };
                let patch = body::off_worker(bytes, parse).await?;
                Ok((Self::Json(patch), Vec::new()))
            }
            "application/merge-patch+json" => {
                let decoded = body::decode(bytes, Format::Json).await?;
                Ok((Self::Merge(decoded.value), decoded.duplicates))
            }
            "application/strategic-merge-patch+json" => {
                let decoded = body::decode(bytes, Format::Json).await?;
                Ok((Self::Strategic(decoded.value), decoded.duplicates))
            }
            "application/apply-patch+yaml" | "application/apply-patch+json" => {
                if query.text("fieldManager").is_none() {
                    let error = FieldError::required("fieldManager", "is required for apply patch");
                    return Err(options::invalid_options("PatchOptions", &[error]));
                }
                let decoded = body::decode(bytes, Format::Yaml).await?;
                Ok((
                    Self::Apply {
                        configuration: decoded.value,
                        force: query.flag("force"),
                    },
                    decoded.duplicates,
                ))
            }
            _ => Err(Status::unsupported_media_type(&SUPPORTED)),
        }
    }

    /// The patch as a change of objects of one resource.
    pub fn bind<'a>(
        &'a self,
        resource: &'a Resource,
        part: Part,
        options: &'a WriteOptions,
        now: Timestamp,
    ) -> Bound<'a> {
        Bound {
            patch: self,
            resource,
            part,
            options,
            now,
        }
    }
}

/// A patch about to be applied.
#[derive(Debug)]
pub struct Bound<'a> {
    patch: &'a Patch,
    resource: &'a Resource,
    part: Part,
    options: &'a WriteOptions,
    now: Timestamp,
}

impl Bound<'_> {
    /// The object that applying creates when there is none.
    pub fn create(&self) -> Result<Value, Status> {
        match self.patch {
            Patch::Apply {
                configuration,
                force,
            } => ownership::apply(
                self.resource,
                None,
                configuration,
                self.options,
                self.part,
                *force,
                self.now,
            ),
            _ => Err(Status::method_not_allowed()),
        }
    }
}

impl Transform for Bound<'_> {
    fn apply(&self, old: &Value) -> Result<Value, Status> {
        match self.patch {
            Patch::Json(patch) => patch
                .apply(old)
                .map_err(|error| Status::unprocessable(error.to_string())),
            Patch::Merge(patch) => {
                let mut object = old.clone();
                merge::apply(&mut object, patch.clone());
                Ok(object)
            }
            Patch::Strategic(patch) => {
                let types = match self.resource.custom {
                    None => ownership::types_of(self.resource),
                    // A custom resource has no directives, so Kubernetes does not take this format for one.
                    Some(_) => None,
                };
                let types = types.ok_or_else(|| Status::unsupported_media_type(&SUPPORTED[..2]))?;
                strategic::apply(old, patch, types).map_err(Status::from)
            }
            Patch::Apply {
                configuration,
                force,
            } => ownership::apply(
                self.resource,
                Some(old),
                configuration,
                self.options,
                self.part,
                *force,
                self.now,
            ),
        }
    }
}

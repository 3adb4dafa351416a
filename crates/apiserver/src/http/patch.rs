//! The patch formats. A patch is parsed once and applied again after each write conflict.

use apimachinery::{
    field::FieldError,
    patch::{json::JsonPatch, merge, strategic},
    status::Status,
};
use bytes::Bytes;
use http::HeaderMap;
use jiff::Timestamp;
use serde_json::Value;

use super::options;
use crate::{
    body::{self, Format},
    operations::modify::Transform,
    path::Query,
    registry::Resource,
    strategy::managed_fields,
    target::{Part, WriteOptions},
};

const SUPPORTED: [&str; 4] = [
    "application/json-patch+json",
    "application/merge-patch+json",
    "application/apply-patch+yaml",
    "application/strategic-merge-patch+json",
];

/// The change that a client requests.
#[derive(Debug)]
pub enum Patch {
    /// RFC 6902.
    Json(JsonPatch),
    /// RFC 7386.
    Merge(Value),
    /// Kubernetes' strategic merge patch, which knows how lists of built-in kinds are merged.
    Strategic(Value),
    /// Server-side apply.
    Apply {
        /// The fields the manager wants to own.
        configuration: Value,
        /// Whether to take over fields that other managers own.
        force: bool,
    },
}

impl Patch {
    /// Parses a patch by its media type. The second value lists duplicate fields.
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

    /// Binds the patch to a resource and to the options of the request.
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

/// A patch that is bound to a resource and ready to be applied.
#[derive(Debug)]
pub struct Bound<'a> {
    patch: &'a Patch,
    resource: &'a Resource,
    part: Part,
    options: &'a WriteOptions,
    now: Timestamp,
}

impl Bound<'_> {
    /// The object that server-side apply creates if it does not exist.
    pub fn create(&self) -> Result<Value, Status> {
        match self.patch {
            Patch::Apply {
                configuration,
                force,
            } => managed_fields::apply(
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
                    None => managed_fields::types_of(self.resource),
                    // A custom resource has no patch directives, so Kubernetes rejects this format for custom resources.
                    Some(_) => None,
                };
                let types = types.ok_or_else(|| Status::unsupported_media_type(&SUPPORTED[..2]))?;
                strategic::apply(old, patch, types).map_err(Status::from)
            }
            Patch::Apply {
                configuration,
                force,
            } => managed_fields::apply(
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

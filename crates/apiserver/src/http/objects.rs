//! Requests for objects: maps the method and the path to an operation, reads its options, and renders its result.

use std::sync::Arc;

use apimachinery::{status::Status, table::IncludeObject};
use bytes::Bytes;
use http::{HeaderValue, Method, StatusCode, header::HeaderName, request::Parts};
use serde_json::Value;

use super::{
    options,
    patch::Patch,
    render::{self, Renderer},
};
use crate::{
    auth::User,
    body::{self, HttpResponse},
    operations::{
        Api, DeleteOptions, WriteOutcome,
        modify::{Replace, Transform},
        subresource,
    },
    path::{Query, ResourcePath},
    registry::{Resource, Rules},
    target::{Part, Target, WriteOptions},
};

struct Call<'a> {
    api: &'a Arc<Api>,
    user: &'a User,
    parts: &'a Parts,
    query: Query,
    target: Target,
    renderer: Renderer,
    bytes: Bytes,
}

/// Answers a request for objects.
pub async fn answer(
    api: &Arc<Api>,
    user: &User,
    parts: &Parts,
    path: &ResourcePath,
    bytes: Bytes,
) -> Result<HttpResponse, Status> {
    let registry = api.registry();
    let Some(resource) = registry.find(&path.group, &path.version, &path.resource) else {
        return if registry.is_built_in(&path.group, &path.version) {
            Err(Status::unknown_path())
        } else {
            Ok(body::page_not_found())
        };
    };
    if resource.is_namespaced() == path.namespace.is_empty()
        && !(resource.is_namespaced() && path.name.is_empty())
    {
        return Err(Status::unknown_path());
    }
    let accepted = render::negotiate(&parts.headers)?;
    let query = Query::parse(parts.uri.query());
    let include = query
        .text("includeObject")
        .and_then(IncludeObject::from_parameter)
        .unwrap_or_default();
    let renderer = Renderer::new(resource.clone(), accepted, include, api.now());
    let target = Target {
        resource: resource.clone(),
        namespace: path.namespace.clone(),
        name: path.name.clone(),
    };
    let call = Call {
        api,
        user,
        parts,
        query,
        target,
        renderer,
        bytes,
    };
    let mut response = match path.subresource.as_str() {
        "" => call.object().await,
        "status" if resource.has_status => call.part(Part::Status).await,
        "finalize" if resource.rules == Rules::Namespace => call.part(Part::Finalize).await,
        "scale" if resource.scale.is_some() => call.scale().await,
        "ephemeralcontainers" if resource.rules == Rules::Pod => {
            call.part(Part::EphemeralContainers).await
        }
        "binding" if resource.rules == Rules::Pod => call.binding().await,
        "eviction" if resource.rules == Rules::Pod => call.eviction().await,
        _ => Err(Status::unknown_path()),
    }?;
    if let Some(deprecation) = resource
        .custom
        .as_ref()
        .and_then(|custom| custom.deprecation.as_deref())
    {
        warn(&mut response, deprecation);
    }
    Ok(response)
}

/// Adds a `Warning` header.
fn warn(response: &mut HttpResponse, message: &str) {
    let escaped = message.replace('\\', "\\\\").replace('"', "\\\"");
    if let Ok(value) = HeaderValue::from_str(&format!("299 - \"{escaped}\"")) {
        response
            .headers_mut()
            .append(HeaderName::from_static("warning"), value);
    }
}

impl Call<'_> {
    fn write_options(&self) -> Result<WriteOptions, Status> {
        options::write(&self.query, &self.parts.headers, self.user)
    }

    async fn decoded(&self) -> Result<Value, Status> {
        let format = body::format(&self.parts.headers)?;
        Ok(body::decode(&self.bytes, format).await?.value)
    }

    /// The object of a write, and options that list the duplicate fields of its body.
    async fn decoded_for_write(&self) -> Result<(Value, WriteOptions), Status> {
        let format = body::format(&self.parts.headers)?;
        let decoded = body::decode(&self.bytes, format).await?;
        let options = WriteOptions {
            duplicate_fields: decoded.duplicates,
            ..self.write_options()?
        };
        Ok((decoded.value, options))
    }

    fn resource(&self) -> &Arc<Resource> {
        &self.target.resource
    }

    async fn object(self) -> Result<HttpResponse, Status> {
        match (&self.parts.method, self.target.name.is_empty()) {
            (&(Method::GET | Method::HEAD), true) if self.query.flag("watch") => self.watch(),
            (&(Method::GET | Method::HEAD), true) => {
                let options = options::list(self.resource(), &self.query)?;
                let listed = self.api.list(&self.target, &options)?;
                Ok(self.renderer.answer_list(listed))
            }
            (&(Method::GET | Method::HEAD), false) => {
                let object = self.api.get(&self.target)?;
                Ok(self.renderer.answer(StatusCode::OK, &object))
            }
            (&Method::POST, true) => {
                let (object, options) = self.decoded_for_write().await?;
                let written = self.api.create(&self.target, object, &options).await?;
                Ok(self.written(&written))
            }
            (&(Method::PUT | Method::PATCH), false) => self.part(Part::Main).await,
            (&Method::DELETE, false) => self.delete().await,
            // Namespaces cannot be deleted as a collection.
            (&Method::DELETE, true) if self.resource().rules != Rules::Namespace => {
                self.delete_collection().await
            }
            _ => Err(Status::method_not_allowed()),
        }
    }

    fn watch(self) -> Result<HttpResponse, Status> {
        let options = options::watch(self.resource(), &self.query)?;
        match self.api.watch(&self.target, &options) {
            Ok(watching) => Ok(self.renderer.answer_watch(watching)),
            Err(status) if status.code == 410 => Ok(Renderer::answer_failed_watch(&status)),
            Err(status) => Err(status),
        }
    }

    fn written(&self, written: &WriteOutcome) -> HttpResponse {
        let code = if written.created {
            StatusCode::CREATED
        } else {
            StatusCode::OK
        };
        let mut response = self.renderer.answer(code, &written.object);
        for warning in &written.warnings {
            warn(&mut response, warning);
        }
        response
    }

    async fn part(self, part: Part) -> Result<HttpResponse, Status> {
        match self.parts.method {
            Method::GET | Method::HEAD => {
                let object = self.api.get(&self.target)?;
                Ok(self.renderer.answer(StatusCode::OK, &object))
            }
            Method::PUT => {
                let (object, options) = self.decoded_for_write().await?;
                let written = self
                    .api
                    .modify(&self.target, part, &Replace(object), &options)
                    .await?;
                Ok(self.written(&written))
            }
            Method::PATCH => self.patch(part).await,
            _ => Err(Status::method_not_allowed()),
        }
    }

    async fn patch(self, part: Part) -> Result<HttpResponse, Status> {
        let (patch, duplicate_fields) =
            Patch::parse(&self.parts.headers, &self.query, &self.bytes).await?;
        let applies = matches!(patch, Patch::Apply { .. });
        let options = WriteOptions {
            duplicate_fields,
            applies,
            ..self.write_options()?
        };
        let bound = patch.bind(self.resource(), part, &options, self.api.now());
        loop {
            let missing = match self.api.modify(&self.target, part, &bound, &options).await {
                Ok(written) => return Ok(self.written(&written)),
                Err(status) if status.is_not_found() && applies && part == Part::Main => status,
                Err(status) => return Err(status),
            };
            // Server-side apply creates a missing object. Another client may create or delete it between the two operations.
            let mut object = bound
                .create()
                .map_err(|status| if status.code == 405 { missing } else { status })?;
            let name = crate::metadata::of(&mut object);
            name.entry("name")
                .or_insert_with(|| Value::from(self.target.name.as_str()));
            match self
                .api
                .create(
                    &Target {
                        name: String::new(),
                        ..self.target.clone()
                    },
                    object,
                    &options,
                )
                .await
            {
                Err(status) if status.reason == "AlreadyExists" => tokio::task::yield_now().await,
                outcome => return outcome.map(|written| self.written(&written)),
            }
        }
    }

    async fn scale(self) -> Result<HttpResponse, Status> {
        let options = self.write_options()?;
        let scale = match self.parts.method {
            Method::GET | Method::HEAD => {
                let object = self.api.get(&self.target)?;
                let paths = self
                    .resource()
                    .scale
                    .as_ref()
                    .ok_or_else(Status::unknown_path)?;
                subresource::scale_of(paths, &Api::value_of(self.resource(), &object))
            }
            Method::PUT => {
                let wanted = self.decoded().await?;
                self.api
                    .modify_scale(&self.target, |_| Ok(wanted.clone()), &options)
                    .await?
            }
            Method::PATCH => {
                let (patch, _) =
                    Patch::parse(&self.parts.headers, &self.query, &self.bytes).await?;
                let bound = patch.bind(self.resource(), Part::Main, &options, self.api.now());
                self.api
                    .modify_scale(&self.target, |scale| bound.apply(&scale), &options)
                    .await?
            }
            _ => return Err(Status::method_not_allowed()),
        };
        Ok(self.renderer.answer_value(StatusCode::OK, &scale))
    }

    async fn binding(self) -> Result<HttpResponse, Status> {
        if self.parts.method != Method::POST {
            return Err(Status::method_not_allowed());
        }
        self.api
            .bind_pod(&self.target, &self.decoded().await?, &self.write_options()?)
            .await?;
        Ok(created_status())
    }

    async fn eviction(self) -> Result<HttpResponse, Status> {
        if self.parts.method != Method::POST {
            return Err(Status::method_not_allowed());
        }
        self.api
            .evict_pod(&self.target, &self.decoded().await?, &self.write_options()?)
            .await?;
        Ok(created_status())
    }

    async fn delete_options(&self) -> Result<DeleteOptions, Status> {
        let body =
            if self.bytes.iter().all(u8::is_ascii_whitespace) {
                None
            } else {
                let decoded = self.decoded().await?;
                Some(serde_json::from_value(decoded).map_err(|error| {
                    Status::bad_request(format!("invalid DeleteOptions: {error}"))
                })?)
            };
        options::delete(&self.query, body)
    }

    async fn delete(self) -> Result<HttpResponse, Status> {
        let deleted = self
            .api
            .delete(
                &self.target,
                &self.delete_options().await?,
                &self.write_options()?,
            )
            .await?;
        let resource = self.resource();
        if deleted.gone && !resource.returns_deleted {
            let status = Status::success(
                &resource.group,
                &resource.plural,
                &self.target.name,
                &deleted.object.metadata.uid,
            );
            return Ok(body::json(StatusCode::OK, &status));
        }
        Ok(self.renderer.answer(StatusCode::OK, &deleted.object))
    }

    async fn delete_collection(self) -> Result<HttpResponse, Status> {
        let list = options::list(self.resource(), &self.query)?;
        let options = self.delete_options().await?;
        let objects = self
            .api
            .delete_collection(&self.target, &list, &options, &self.write_options()?)
            .await?;
        let listed = crate::operations::ListPage {
            revision: self.api.store.revision(),
            objects,
            continuation: None,
            remaining: None,
        };
        Ok(self.renderer.answer_deleted(listed))
    }
}

fn created_status() -> HttpResponse {
    let mut status = Status::success("", "", "", "");
    status.details = None;
    status.code = 201;
    body::json(StatusCode::CREATED, &status)
}

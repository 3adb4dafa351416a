//! Renders stored objects in the form that the client accepts: the whole object, its metadata or a table row, in JSON or YAML, as
//! a single object, a list or a watch.
//!
//! The default form copies the stored bytes without parsing them.

use std::sync::Arc;

use apimachinery::{
    status::Status,
    table::{IncludeObject, Printer},
};
use bytes::Bytes;
use http::{HeaderMap, HeaderValue, StatusCode, header};
use jiff::Timestamp;
use serde_json::{Value, json};
use store::{Object, Revision};

use crate::{
    body::{self, HttpResponse},
    operations::{Api, ListPage, WatchStream, watch::WatchEvent},
    registry::Resource,
    strategy,
};

/// The size after which a chunk of a list is sent.
const CHUNK_BYTES: usize = 128 << 10;

/// The part of an object that is shown.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Form {
    /// The whole object.
    Object,
    /// `PartialObjectMetadata`.
    Metadata,
    /// A row of a `Table`, as kubectl prints it.
    Table,
}

/// The format of the response.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Encoding {
    /// JSON.
    Json,
    /// YAML.
    Yaml,
}

/// The form and the encoding that the client accepts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Accepted {
    /// The part of an object that is shown.
    pub form: Form,
    /// The format of the response.
    pub encoding: Encoding,
}

/// Chooses the first entry of the `Accept` header that the server supports.
pub fn negotiate(headers: &HeaderMap) -> Result<Accepted, Status> {
    let plain = Accepted {
        form: Form::Object,
        encoding: Encoding::Json,
    };
    let Some(accept) = headers
        .get(header::ACCEPT)
        .and_then(|value| value.to_str().ok())
        .filter(|text| !text.trim().is_empty())
    else {
        return Ok(plain);
    };
    for choice in accept.split(',') {
        let mut parts = choice.split(';').map(str::trim);
        let media_type = parts.next().unwrap_or_default();
        let form = parts.find_map(|part| part.strip_prefix("as="));
        let encoding = match media_type {
            "*/*" | "application/*" | "application/json" => Encoding::Json,
            "application/yaml" => Encoding::Yaml,
            _ => continue,
        };
        match form {
            None => {
                return Ok(Accepted {
                    form: Form::Object,
                    encoding,
                });
            }
            Some("PartialObjectMetadata" | "PartialObjectMetadataList") => {
                return Ok(Accepted {
                    form: Form::Metadata,
                    encoding,
                });
            }
            Some("Table")
                if encoding == Encoding::Json && choice.contains("v=v1;")
                    || choice.trim_end().ends_with("v=v1") =>
            {
                return Ok(Accepted {
                    form: Form::Table,
                    encoding,
                });
            }
            Some(_) => {}
        }
    }
    Err(Status::not_acceptable(&[
        "application/json",
        "application/yaml",
    ]))
}

/// Renders objects of one resource in one form.
#[derive(Clone, Debug)]
pub struct Renderer {
    resource: Arc<Resource>,
    accepted: Accepted,
    include: IncludeObject,
    now: Timestamp,
}

impl Renderer {
    /// A renderer of `resource`.
    pub fn new(
        resource: Arc<Resource>,
        accepted: Accepted,
        include: IncludeObject,
        now: Timestamp,
    ) -> Self {
        Self {
            resource,
            accepted,
            include,
            now,
        }
    }

    /// A table of objects.
    fn table(&self, objects: &[Value], list_metadata: &Value) -> Value {
        let built_in = Printer::builtin(&self.resource.plural);
        let printer = self
            .resource
            .custom
            .as_ref()
            .map_or(&built_in, |custom| &custom.printer);
        printer.table(objects, list_metadata, self.include, true, self.now)
    }

    /// Answers with one object.
    pub fn answer(&self, code: StatusCode, object: &Object) -> HttpResponse {
        let bytes = if self.accepted.form == Form::Object
            && !strategy::of(&self.resource).needs_conversion(&self.resource)
        {
            object.bytes_as(&self.resource.api_version)
        } else {
            let mut buffer = Vec::new();
            self.append(object, &mut buffer);
            Bytes::from(buffer)
        };
        self.encode(code, bytes)
    }

    /// Answers with a JSON value in the encoding that the client accepts.
    pub fn answer_value(&self, code: StatusCode, value: &Value) -> HttpResponse {
        self.encode(
            code,
            Bytes::from(serde_json::to_vec(value).unwrap_or_default()),
        )
    }

    fn encode(&self, code: StatusCode, json: Bytes) -> HttpResponse {
        if self.accepted.encoding == Encoding::Json {
            return body::json_bytes(code, json);
        }
        let value: Value = serde_json::from_slice(&json).unwrap_or_default();
        let mut response = body::text(code, serde_yaml_ng::to_string(&value).unwrap_or_default());
        response.headers_mut().insert(
            header::CONTENT_TYPE,
            HeaderValue::from_static("application/yaml"),
        );
        response
    }

    fn append(&self, object: &Object, buffer: &mut Vec<u8>) {
        if self.accepted.form == Form::Object
            && !strategy::of(&self.resource).needs_conversion(&self.resource)
        {
            object.write_as(&self.resource.api_version, buffer);
        } else {
            self.append_value(&Api::value_of(&self.resource, object), buffer);
        }
    }

    fn append_value(&self, value: &Value, buffer: &mut Vec<u8>) {
        let shown = match self.accepted.form {
            Form::Object => value,
            Form::Metadata => {
                &json!({"kind": "PartialObjectMetadata", "apiVersion": "meta.k8s.io/v1", "metadata": value["metadata"]})
            }
            Form::Table => {
                let version = json!({"resourceVersion": value["metadata"]["resourceVersion"]});
                &self.table(std::slice::from_ref(value), &version)
            }
        };
        serde_json::to_writer(buffer, shown)
            .expect("serializing a JSON value into memory cannot fail");
    }

    fn list_head(&self, listed: &ListPage) -> Vec<u8> {
        let (kind, api_version) = match self.accepted.form {
            Form::Object => (&*self.resource.list_kind, &*self.resource.api_version),
            Form::Metadata | Form::Table => ("PartialObjectMetadataList", "meta.k8s.io/v1"),
        };
        let metadata = list_metadata(listed);
        format!(
            "{{\"kind\":{},\"apiVersion\":{},\"metadata\":{metadata},\"items\":[",
            Value::from(kind),
            Value::from(api_version)
        )
        .into_bytes()
    }

    /// Answers with a list, in chunks if it is long.
    pub fn answer_list(self, listed: ListPage) -> HttpResponse {
        if self.accepted.form == Form::Table {
            let objects: Vec<Value> = listed
                .objects
                .iter()
                .map(|object| Api::value_of(&self.resource, object))
                .collect();
            return self.answer_value(
                StatusCode::OK,
                &self.table(&objects, &list_metadata(&listed)),
            );
        }
        let mut buffer = self.list_head(&listed);
        let mut objects = listed.objects.into_iter();
        let mut first = true;
        let finished = self.fill(&mut objects, &mut buffer, &mut first);
        if finished {
            return self.encode(StatusCode::OK, Bytes::from(buffer));
        }
        if self.accepted.encoding == Encoding::Yaml {
            while !self.fill(&mut objects, &mut buffer, &mut first) {}
            return self.encode(StatusCode::OK, Bytes::from(buffer));
        }
        let rest = futures::stream::unfold(Some((self, objects)), |state| async move {
            let (renderer, mut objects) = state?;
            let mut buffer = Vec::with_capacity(CHUNK_BYTES + 8192);
            let finished = renderer.fill(&mut objects, &mut buffer, &mut false);
            Some((
                Bytes::from(buffer),
                (!finished).then_some((renderer, objects)),
            ))
        });
        let head = futures::stream::once(std::future::ready(Bytes::from(buffer)));
        let mut response = HttpResponse::new(body::stream(futures::StreamExt::chain(head, rest)));
        response.headers_mut().insert(
            header::CONTENT_TYPE,
            HeaderValue::from_static("application/json"),
        );
        response
    }

    /// Answers with a deleted collection. Items of built-in kinds have no `apiVersion` and `kind`.
    pub fn answer_deleted(self, listed: ListPage) -> HttpResponse {
        if self.accepted.form != Form::Object || self.resource.custom.is_some() {
            return self.answer_list(listed);
        }
        let mut buffer = self.list_head(&listed);
        for (index, object) in listed.objects.iter().enumerate() {
            let mut item = Api::value_of(&self.resource, object);
            if let Value::Object(fields) = &mut item {
                fields.remove("apiVersion");
                fields.remove("kind");
            }
            if index > 0 {
                buffer.push(b',');
            }
            buffer.extend_from_slice(item.to_string().as_bytes());
        }
        buffer.extend_from_slice(b"]}");
        self.encode(StatusCode::OK, Bytes::from(buffer))
    }

    /// Appends items until the chunk is large enough. Returns whether the list is complete.
    fn fill(
        &self,
        objects: &mut std::vec::IntoIter<Arc<Object>>,
        buffer: &mut Vec<u8>,
        first: &mut bool,
    ) -> bool {
        while buffer.len() < CHUNK_BYTES {
            let Some(object) = objects.next() else {
                buffer.extend_from_slice(b"]}");
                return true;
            };
            if !std::mem::take(first) {
                buffer.push(b',');
            }
            self.append(&object, buffer);
        }
        false
    }

    /// Answers with a watch.
    pub fn answer_watch(self, watching: WatchStream) -> HttpResponse {
        let pieces =
            futures::stream::unfold((self, watching), |(renderer, mut watching)| async move {
                let watch_events = watching.next().await?;
                let mut buffer = Vec::new();
                for watch_event in &watch_events {
                    renderer.append_watch_event(watch_event, &mut buffer);
                }
                Some((Bytes::from(buffer), (renderer, watching)))
            });
        let mut response = HttpResponse::new(body::stream(pieces));
        response.headers_mut().insert(
            header::CONTENT_TYPE,
            HeaderValue::from_static("application/json"),
        );
        response
    }

    /// Answers with a watch that failed at its start, in the way kube-apiserver reports a resource version that is too old.
    pub fn answer_failed_watch(status: &Status) -> HttpResponse {
        let mut buffer = Vec::new();
        append_error(status, &mut buffer);
        body::json_bytes(StatusCode::OK, buffer)
    }

    fn append_watch_event(&self, watch_event: &WatchEvent, buffer: &mut Vec<u8>) {
        match watch_event {
            WatchEvent::Added(object) => self.append_event("ADDED", object, None, buffer),
            WatchEvent::Modified(object) => self.append_event("MODIFIED", object, None, buffer),
            WatchEvent::Deleted(object, revision) => {
                self.append_event("DELETED", object, Some(*revision), buffer);
            }
            WatchEvent::Bookmark(revision) => self.append_bookmark(*revision, false, buffer),
            WatchEvent::InitialEnd(revision) => self.append_bookmark(*revision, true, buffer),
            WatchEvent::Error(status) => append_error(status, buffer),
        }
    }

    fn append_event(
        &self,
        kind: &str,
        object: &Object,
        at: Option<Revision>,
        buffer: &mut Vec<u8>,
    ) {
        buffer.extend_from_slice(b"{\"type\":\"");
        buffer.extend_from_slice(kind.as_bytes());
        buffer.extend_from_slice(b"\",\"object\":");
        match at {
            Some(revision) if revision != object.revision => {
                if self.accepted.form == Form::Object
                    && !strategy::of(&self.resource).needs_conversion(&self.resource)
                {
                    object.write_at(&self.resource.api_version, revision, buffer);
                } else {
                    let mut value = Api::value_of(&self.resource, object);
                    value["metadata"]["resourceVersion"] = Value::from(revision.to_string());
                    self.append_value(&value, buffer);
                }
            }
            _ => self.append(object, buffer),
        }
        buffer.extend_from_slice(b"}\n");
    }

    fn append_bookmark(&self, revision: Revision, initial_end: bool, buffer: &mut Vec<u8>) {
        let (kind, api_version) = match self.accepted.form {
            Form::Object => (&*self.resource.kind, &*self.resource.api_version),
            Form::Metadata | Form::Table => ("PartialObjectMetadata", "meta.k8s.io/v1"),
        };
        let mut metadata =
            json!({"resourceVersion": revision.to_string(), "creationTimestamp": null});
        if initial_end {
            metadata["annotations"] = json!({"k8s.io/initial-events-end": "true"});
        }
        let bookmark = json!({"type": "BOOKMARK", "object": {"kind": kind, "apiVersion": api_version, "metadata": metadata}});
        serde_json::to_writer(&mut *buffer, &bookmark)
            .expect("serializing a JSON value into memory cannot fail");
        buffer.push(b'\n');
    }
}

fn list_metadata(listed: &ListPage) -> Value {
    let mut metadata = json!({"resourceVersion": listed.revision.to_string()});
    if let Some(token) = &listed.continuation {
        metadata["continue"] = Value::from(token.as_str());
    }
    if let Some(count) = listed.remaining {
        metadata["remainingItemCount"] = Value::from(count);
    }
    metadata
}

fn append_error(status: &Status, buffer: &mut Vec<u8>) {
    let event = json!({"type": "ERROR", "object": status});
    serde_json::to_writer(&mut *buffer, &event)
        .expect("serializing a JSON value into memory cannot fail");
    buffer.push(b'\n');
}

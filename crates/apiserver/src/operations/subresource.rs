//! The subresources of stored objects: `scale` of custom resources, `binding` and `eviction` of pods.

use apimachinery::{
    field::FieldError,
    status::Status,
    types::{self, TypeRef},
};
use serde_json::{Value, json};

use super::{Api, DeleteOptions, DeleteOutcome, WriteOutcome};
use crate::{
    metadata,
    registry::{Resource, ScalePaths},
    strategy::{self, pod::binding},
    target::{Part, Target, WriteOptions},
};

/// The `Scale` of a stored object.
pub fn scale_of(paths: &ScalePaths, object: &Value) -> Value {
    let at = |path: &[String]| {
        Resource::at(object, path)
            .and_then(Value::as_i64)
            .unwrap_or_default()
    };
    // Like kube-apiserver, omits zero replicas in the spec but not in the status.
    let spec = match at(&paths.spec_replicas) {
        0 => json!({}),
        replicas => json!({"replicas": replicas}),
    };
    let mut scale = json!({
        "apiVersion": "autoscaling/v1",
        "kind": "Scale",
        "metadata": {
            "name": metadata::text(object, "name"),
            "namespace": metadata::text(object, "namespace"),
            "uid": metadata::text(object, "uid"),
            "resourceVersion": metadata::text(object, "resourceVersion"),
            "creationTimestamp": metadata::text(object, "creationTimestamp"),
        },
        "spec": spec,
        "status": {"replicas": at(&paths.status_replicas)},
    });
    let selector = paths
        .label_selector
        .as_ref()
        .and_then(|path| Resource::at(object, path))
        .and_then(Value::as_str);
    if let Some(selector) = selector {
        scale["status"]["selector"] = Value::from(selector);
    }
    scale
}

impl Api {
    /// Changes the scale of an object. `change` computes the new `Scale` from the current one.
    pub async fn modify_scale(
        &self,
        target: &Target,
        change: impl Fn(Value) -> Result<Value, Status> + Send + Sync,
        options: &WriteOptions,
    ) -> Result<Value, Status> {
        let resource = &target.resource;
        let paths = resource.scale.as_ref().ok_or_else(Status::unknown_path)?;
        let transform = |old: &Value| {
            let mut scale = change(scale_of(paths, old))?;
            if let Some(types) = TypeRef::builtin("autoscaling/v1", "Scale") {
                types::decode(&mut scale, types)
                    .map_err(|error| strategy::undecodable("Scale", "v1", &error))?;
            }
            let replicas = scale
                .pointer("/spec/replicas")
                .cloned()
                .unwrap_or_else(|| Value::from(0));
            if replicas.as_i64().is_none_or(|replicas| replicas < 0) {
                let error = FieldError::invalid(
                    "spec.replicas",
                    replicas,
                    "must be greater than or equal to 0",
                );
                return Err(Status::invalid(
                    "autoscaling",
                    "Scale",
                    &target.name,
                    &[error],
                ));
            }
            let mut object = old.clone();
            let stated = metadata::text(&scale, "resourceVersion");
            metadata::of(&mut object).insert("resourceVersion".into(), Value::from(stated));
            set(&mut object, &paths.spec_replicas, replicas);
            Ok(object)
        };
        let written = self.modify(target, Part::Main, &transform, options).await?;
        Ok(scale_of(paths, &Self::value_of(resource, &written.object)))
    }

    /// Assigns a pod to a node. A pod that is already assigned yields a conflict.
    pub async fn bind_pod(
        &self,
        target: &Target,
        binding: &Value,
        options: &WriteOptions,
    ) -> Result<WriteOutcome, Status> {
        let node = binding
            .pointer("/target/name")
            .and_then(Value::as_str)
            .unwrap_or_default()
            .to_owned();
        if node.is_empty() {
            return Err(Status::invalid(
                "",
                "Binding",
                &target.name,
                &[FieldError::required("target.name", "")],
            ));
        }
        let now = metadata::timestamp(self.now());
        let transform = |old: &Value| binding::assign(old, &node, &now);
        self.modify(target, Part::Finalize, &transform, options)
            .await
    }

    /// Deletes a pod because of an eviction.
    pub async fn evict_pod(
        &self,
        target: &Target,
        eviction: &Value,
        options: &WriteOptions,
    ) -> Result<DeleteOutcome, Status> {
        let delete = eviction
            .get("deleteOptions")
            .cloned()
            .unwrap_or_else(|| json!({}));
        let delete: DeleteOptions = serde_json::from_value(delete)
            .map_err(|error| Status::bad_request(error.to_string()))?;
        self.delete(target, &delete, options).await
    }
}

fn set(object: &mut Value, path: &[String], value: Value) {
    let mut place = object;
    for segment in path {
        if !place.is_object() {
            *place = json!({});
        }
        place = &mut place[segment.as_str()];
    }
    *place = value;
}

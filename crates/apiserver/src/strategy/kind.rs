//! The rules of a kind as a trait. [`of`] is the only place that lists all kinds.

use std::fmt;

use apimachinery::{
    field::FieldError,
    names,
    status::Status,
    types::{self, DecodeError},
};
use serde_json::Value;

use super::{
    Context, config_map, custom_resource, custom_resource_definition, endpoint_slice, endpoints,
    event, fields, lease, managed_fields, namespace, network_policy, node, persistent_volume,
    persistent_volume_claim, pod, role, role_binding, runtime_class, secret, service,
    storage_class,
};
use crate::{
    registry::{Resource, Rules},
    target::Part,
};

/// The rules of one kind. The provided methods are those of a kind without rules of its own.
pub trait Kind: Sync {
    /// Rejects an object that kube-apiserver cannot decode into its Go types.
    fn decode(&self, resource: &Resource, object: &mut Value) -> Result<(), DecodeError> {
        match managed_fields::types_of(resource) {
            Some(types) => types::decode(object, types),
            None => Ok(()),
        }
    }

    /// The paths of unknown fields. May remove them from the object.
    fn unknown_fields(&self, resource: &Resource, object: &mut Value) -> Vec<String> {
        managed_fields::types_of(resource)
            .map(|types| types::unknown_fields(object, types))
            .unwrap_or_default()
    }

    /// Removes unknown fields.
    fn prune(&self, resource: &Resource, object: &mut Value) {
        if let Some(types) = managed_fields::types_of(resource) {
            managed_fields::prune(object, types);
        }
    }

    /// Sets the defaults.
    fn default(&self, _resource: &Resource, _object: &mut Value) {}

    /// Initializes a new object before its defaults are set.
    fn prepare_create(&self, _context: &Context<'_>, _object: &mut Value) {}

    /// Sets the fields of a new object that follow from its defaults.
    fn complete_create(&self, _object: &mut Value) {}

    /// Adjusts a new version before its defaults are set: restores the fields that a write to `part` may not change.
    fn prepare_update(
        &self,
        _context: &Context<'_>,
        _object: &mut Value,
        _old: &Value,
        _part: Part,
    ) {
    }

    /// Validates an object and, on an update, the change from `old`.
    fn validate(
        &self,
        _resource: &Resource,
        _object: &Value,
        _old: Option<&Value>,
        _part: Part,
    ) -> Vec<FieldError> {
        Vec::new()
    }

    /// The problems of the name of a new object.
    fn name_problems(&self, name: &str) -> Vec<String> {
        names::dns_1123_subdomain(name)
    }

    /// The quantities in an object, with their field paths.
    fn quantities<'a>(&self, _object: &'a Value) -> Vec<(String, &'a Value)> {
        Vec::new()
    }

    /// The fields that a field selector may use.
    fn selectable_fields(&self) -> &'static [&'static str] {
        &["metadata.name", "metadata.namespace"]
    }

    /// The value of a field of a stored object, as a field selector compares it.
    fn selected_field(&self, object: &Value, field: &str) -> Option<String> {
        fields::scalar(object, field)
    }

    /// Whether a change of the content is no change of the desired state, so that the generation stays.
    fn keeps_generation(&self, _object: &Value, _old: &Value) -> bool {
        false
    }

    /// Rejects the deletion of an object that must exist.
    fn check_delete(&self, _name: &str) -> Result<(), Status> {
        Ok(())
    }

    /// The grace period of a deletion.
    fn grace_period_seconds(&self, _object: &Value, _requested: Option<i64>) -> i64 {
        0
    }

    /// Changes an object that has just been marked for deletion.
    fn mark_for_deletion(&self, _object: &mut Value) {}

    /// Whether finalizers outside the metadata delay the removal of the object.
    fn has_own_finalizers(&self, _object: &Value) -> bool {
        false
    }

    /// Whether the last version of an object has a deletion timestamp even if it is removed at once.
    fn is_terminating_when_removed(&self) -> bool {
        false
    }

    /// Whether a stored object differs from the requested version in more than its `apiVersion`.
    fn needs_conversion(&self, _resource: &Resource) -> bool {
        false
    }

    /// Converts an object to its storage form, if the version needs a conversion.
    fn convert_to_storage(&self, _object: &mut Value) {}

    /// Converts a stored object to the requested version, if the version needs a conversion.
    fn convert_from_storage(&self, _object: &mut Value) {}

    /// The group of the kind in an error.
    fn group_in_errors<'a>(&self, resource: &'a Resource) -> &'a str {
        &resource.group
    }
}

impl fmt::Debug for dyn Kind {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str("Kind")
    }
}

/// A kind without rules of its own.
struct Plain;

impl Kind for Plain {}

/// The rules of a kind.
pub fn of(rules: Rules) -> &'static dyn Kind {
    match rules {
        Rules::Namespace => &namespace::Namespace,
        Rules::Pod => &pod::Pod,
        Rules::Service => &service::Service,
        Rules::Endpoints => &endpoints::Endpoints,
        Rules::PersistentVolumeClaim => &persistent_volume_claim::PersistentVolumeClaim,
        Rules::PersistentVolume => &persistent_volume::PersistentVolume,
        Rules::ConfigMap => &config_map::ConfigMap,
        Rules::Secret => &secret::Secret,
        Rules::ServiceAccount => &Plain,
        Rules::Event => &event::Event,
        Rules::Node => &node::Node,
        Rules::Lease => &lease::Lease,
        Rules::EndpointSlice => &endpoint_slice::EndpointSlice,
        Rules::NetworkPolicy => &network_policy::NetworkPolicy,
        Rules::RuntimeClass => &runtime_class::RuntimeClass,
        Rules::StorageClass => &storage_class::StorageClass,
        Rules::CustomResourceDefinition => &custom_resource_definition::CustomResourceDefinition,
        Rules::Role | Rules::ClusterRole => &role::Role,
        Rules::RoleBinding | Rules::ClusterRoleBinding => &role_binding::RoleBinding,
        Rules::Custom => &custom_resource::CustomResource,
    }
}

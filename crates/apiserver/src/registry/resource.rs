//! A served resource: its names, its scope, its subresources and the rules that apply to it.

use std::sync::Arc;

use serde_json::Value;
use store::ResourceId;

use crate::registry::custom::CustomVersion;

/// The rules that apply to objects of a resource.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Rules {
    Namespace,
    Pod,
    Service,
    Endpoints,
    PersistentVolumeClaim,
    PersistentVolume,
    ConfigMap,
    Secret,
    ServiceAccount,
    Event,
    Node,
    Lease,
    EndpointSlice,
    NetworkPolicy,
    RuntimeClass,
    StorageClass,
    CustomResourceDefinition,
    Role,
    ClusterRole,
    RoleBinding,
    ClusterRoleBinding,
    /// Defined by a CustomResourceDefinition.
    Custom,
}

/// Whether objects are namespaced.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Scope {
    /// Objects are in namespaces.
    Namespaced,
    /// Objects are cluster-scoped.
    Cluster,
}

/// The field paths of a `/scale` subresource.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ScalePaths {
    /// Path of the desired count, below `.spec`.
    pub spec_replicas: Vec<String>,
    /// Path of the observed count, below `.status`.
    pub status_replicas: Vec<String>,
    /// Path of the serialized selector, below `.status`.
    pub label_selector: Option<Vec<String>>,
}

/// One resource in one served version.
#[derive(Clone, Debug)]
#[expect(
    clippy::struct_excessive_bools,
    reason = "the flags are independent properties of a kind"
)]
pub struct Resource {
    /// API group, empty for core.
    pub group: Arc<str>,
    /// The served version.
    pub version: Arc<str>,
    /// `group/version`, or `version` in core.
    pub api_version: Arc<str>,
    /// The apiVersion of stored objects.
    pub storage_api_version: Arc<str>,
    /// Name in paths.
    pub plural: Arc<str>,
    /// Singular name.
    pub singular: Arc<str>,
    /// Kind.
    pub kind: Arc<str>,
    /// Kind of its lists.
    pub list_kind: Arc<str>,
    /// Short names for kubectl.
    pub short_names: Vec<String>,
    /// Categories for kubectl.
    pub categories: Vec<String>,
    /// Whether objects are namespaced.
    pub scope: Scope,
    /// Whether `status` is a subresource.
    pub has_status: bool,
    /// Whether changes outside metadata and status increment `metadata.generation`.
    pub has_generation: bool,
    /// Whether a PUT may omit the resource version.
    pub unconditional_update: bool,
    /// Whether a deletion returns the object instead of a `Status`.
    pub returns_deleted: bool,
    /// The `/scale` subresource.
    pub scale: Option<ScalePaths>,
    /// The rules that apply.
    pub rules: Rules,
    /// The id in the store.
    pub id: ResourceId,
    /// The version of a CustomResourceDefinition, for custom resources.
    pub custom: Option<Arc<CustomVersion>>,
}

impl Resource {
    /// Whether objects are namespaced.
    pub fn is_namespaced(&self) -> bool {
        self.scope == Scope::Namespaced
    }

    /// Gets a field of an object by its path.
    pub fn at<'a>(object: &'a Value, path: &[String]) -> Option<&'a Value> {
        path.iter()
            .try_fold(object, |value, segment| value.get(segment))
    }
}

/// A row of the table of built-in resources.
struct Row {
    group: &'static str,
    version: &'static str,
    plural: &'static str,
    kind: &'static str,
    short: &'static [&'static str],
    scope: Scope,
    rules: Rules,
    flags: &'static [Flag],
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Flag {
    Status,
    Generation,
    ReturnsDeleted,
    All,
}

use Flag::{All, Generation, ReturnsDeleted, Status};
use Scope::{Cluster, Namespaced};

const RBAC: &str = "rbac.authorization.k8s.io";

#[rustfmt::skip]
const BUILT_IN: &[Row] = &[
    Row { group: "", version: "v1", plural: "namespaces", kind: "Namespace", short: &["ns"], scope: Cluster, rules: Rules::Namespace, flags: &[Status] },
    Row { group: "", version: "v1", plural: "pods", kind: "Pod", short: &["po"], scope: Namespaced, rules: Rules::Pod, flags: &[Status, Generation, ReturnsDeleted, All] },
    Row { group: "", version: "v1", plural: "services", kind: "Service", short: &["svc"], scope: Namespaced, rules: Rules::Service, flags: &[Status, ReturnsDeleted, All] },
    Row { group: "", version: "v1", plural: "endpoints", kind: "Endpoints", short: &["ep"], scope: Namespaced, rules: Rules::Endpoints, flags: &[] },
    Row { group: "", version: "v1", plural: "persistentvolumeclaims", kind: "PersistentVolumeClaim", short: &["pvc"], scope: Namespaced, rules: Rules::PersistentVolumeClaim, flags: &[Status, ReturnsDeleted] },
    Row { group: "", version: "v1", plural: "persistentvolumes", kind: "PersistentVolume", short: &["pv"], scope: Cluster, rules: Rules::PersistentVolume, flags: &[Status, ReturnsDeleted] },
    Row { group: "", version: "v1", plural: "configmaps", kind: "ConfigMap", short: &["cm"], scope: Namespaced, rules: Rules::ConfigMap, flags: &[] },
    Row { group: "", version: "v1", plural: "secrets", kind: "Secret", short: &[], scope: Namespaced, rules: Rules::Secret, flags: &[] },
    Row { group: "", version: "v1", plural: "serviceaccounts", kind: "ServiceAccount", short: &["sa"], scope: Namespaced, rules: Rules::ServiceAccount, flags: &[ReturnsDeleted] },
    Row { group: "", version: "v1", plural: "events", kind: "Event", short: &["ev"], scope: Namespaced, rules: Rules::Event, flags: &[] },
    Row { group: "", version: "v1", plural: "nodes", kind: "Node", short: &["no"], scope: Cluster, rules: Rules::Node, flags: &[Status] },
    Row { group: "events.k8s.io", version: "v1", plural: "events", kind: "Event", short: &["ev"], scope: Namespaced, rules: Rules::Event, flags: &[] },
    Row { group: "coordination.k8s.io", version: "v1", plural: "leases", kind: "Lease", short: &[], scope: Namespaced, rules: Rules::Lease, flags: &[] },
    Row { group: "discovery.k8s.io", version: "v1", plural: "endpointslices", kind: "EndpointSlice", short: &[], scope: Namespaced, rules: Rules::EndpointSlice, flags: &[Generation] },
    Row { group: "networking.k8s.io", version: "v1", plural: "networkpolicies", kind: "NetworkPolicy", short: &["netpol"], scope: Namespaced, rules: Rules::NetworkPolicy, flags: &[Generation] },
    Row { group: "node.k8s.io", version: "v1", plural: "runtimeclasses", kind: "RuntimeClass", short: &[], scope: Cluster, rules: Rules::RuntimeClass, flags: &[] },
    Row { group: "storage.k8s.io", version: "v1", plural: "storageclasses", kind: "StorageClass", short: &["sc"], scope: Cluster, rules: Rules::StorageClass, flags: &[ReturnsDeleted] },
    Row { group: "apiextensions.k8s.io", version: "v1", plural: "customresourcedefinitions", kind: "CustomResourceDefinition", short: &["crd", "crds"], scope: Cluster, rules: Rules::CustomResourceDefinition, flags: &[Status, Generation] },
    Row { group: RBAC, version: "v1", plural: "roles", kind: "Role", short: &[], scope: Namespaced, rules: Rules::Role, flags: &[] },
    Row { group: RBAC, version: "v1", plural: "rolebindings", kind: "RoleBinding", short: &[], scope: Namespaced, rules: Rules::RoleBinding, flags: &[] },
    Row { group: RBAC, version: "v1", plural: "clusterroles", kind: "ClusterRole", short: &[], scope: Cluster, rules: Rules::ClusterRole, flags: &[] },
    Row { group: RBAC, version: "v1", plural: "clusterrolebindings", kind: "ClusterRoleBinding", short: &[], scope: Cluster, rules: Rules::ClusterRoleBinding, flags: &[] },
];

/// `group/version`, or `version` in the core group.
pub fn api_version(group: &str, version: &str) -> Arc<str> {
    if group.is_empty() {
        Arc::from(version)
    } else {
        Arc::from(format!("{group}/{version}"))
    }
}

/// The built-in resources.
pub fn built_in() -> impl Iterator<Item = Resource> {
    BUILT_IN.iter().map(|row| {
        let served: Arc<str> = api_version(row.group, row.version);
        // Both event APIs read and write the same objects, which are stored in the core form.
        let (storage, id) = match row.rules {
            Rules::Event => (Arc::from("v1"), ResourceId::new("", "events")),
            _ => (served.clone(), ResourceId::new(row.group, row.plural)),
        };
        Resource {
            group: Arc::from(row.group),
            version: Arc::from(row.version),
            api_version: served,
            storage_api_version: storage,
            plural: Arc::from(row.plural),
            singular: Arc::from(row.kind.to_lowercase()),
            kind: Arc::from(row.kind),
            list_kind: Arc::from(format!("{}List", row.kind)),
            short_names: row.short.iter().map(ToString::to_string).collect(),
            categories: if row.flags.contains(&All) {
                vec!["all".to_owned()]
            } else {
                Vec::new()
            },
            scope: row.scope,
            has_status: row.flags.contains(&Status),
            has_generation: row.flags.contains(&Generation),
            unconditional_update: row.rules != Rules::CustomResourceDefinition,
            returns_deleted: row.flags.contains(&ReturnsDeleted),
            scale: None,
            rules: row.rules,
            id,
            custom: None,
        }
    })
}

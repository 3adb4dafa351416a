//! The served resources: built-in ones and those of CustomResourceDefinitions.
//!
//! A registry is immutable. A change of definitions creates a new one, so a request sees a consistent set from start to end.

pub mod custom;
pub mod resource;

use std::{
    collections::{BTreeMap, HashMap},
    sync::Arc,
};

use serde_json::Value;
use store::ResourceId;

pub use self::resource::{Resource, Rules, ScalePaths, Scope};

/// Group, version and plural name.
type PathKey = (Arc<str>, Arc<str>, Arc<str>);

/// Every served resource.
#[derive(Debug, Default)]
pub struct Registry {
    by_path: HashMap<PathKey, Arc<Resource>>,
    by_kind: HashMap<(Arc<str>, Arc<str>), Arc<Resource>>,
    by_id: HashMap<ResourceId, Arc<Resource>>,
    /// Maps a group to its versions, in order of preference.
    groups: BTreeMap<Arc<str>, Vec<Arc<str>>>,
}

impl Registry {
    /// The built-in resources and those of the given definitions that are established. Reuses the compiled versions of
    /// `previous`.
    pub fn new<'a>(previous: &Self, definitions: impl Iterator<Item = &'a Value>) -> Self {
        let known = |group: &str, version: &str, plural: &str| {
            previous
                .find(group, version, plural)
                .and_then(|resource| resource.custom.clone())
        };
        let mut registry = Self::default();
        for resource in resource::built_in() {
            registry.add(resource);
        }
        for definition in definitions {
            for resource in custom::resources_of(definition, known) {
                registry.add(resource);
            }
        }
        for versions in registry.groups.values_mut() {
            versions.sort_by(|left, right| custom::compare_versions(right, left));
        }
        registry
    }

    fn add(&mut self, resource: Resource) {
        let resource = Arc::new(resource);
        let versions = self.groups.entry(resource.group.clone()).or_default();
        if !versions.contains(&resource.version) {
            versions.push(resource.version.clone());
        }
        self.by_path.insert(
            (
                resource.group.clone(),
                resource.version.clone(),
                resource.plural.clone(),
            ),
            resource.clone(),
        );
        self.by_kind.insert(
            (resource.api_version.clone(), resource.kind.clone()),
            resource.clone(),
        );
        // Background controllers use the storage version of a resource.
        if resource.api_version == resource.storage_api_version
            || !self.by_id.contains_key(&resource.id)
        {
            self.by_id.insert(resource.id.clone(), resource);
        }
    }

    /// The resource at a path.
    pub fn find(&self, group: &str, version: &str, plural: &str) -> Option<Arc<Resource>> {
        self.by_path
            .get(&(Arc::from(group), Arc::from(version), Arc::from(plural)))
            .cloned()
    }

    /// The resource of a kind.
    pub fn find_kind(&self, api_version: &str, kind: &str) -> Option<Arc<Resource>> {
        self.by_kind
            .get(&(Arc::from(api_version), Arc::from(kind)))
            .cloned()
    }

    /// The resource with the store id `id`.
    pub fn find_id(&self, id: &ResourceId) -> Option<Arc<Resource>> {
        self.by_id.get(id).cloned()
    }

    /// The groups other than core in the order of discovery. `x-k8s.io` comes first, because kubectl resolves an ambiguous name
    /// to the first group that has it.
    pub fn groups(&self) -> Vec<(&Arc<str>, &Vec<Arc<str>>)> {
        let mut groups: Vec<_> = self
            .groups
            .iter()
            .filter(|(group, _)| !group.is_empty())
            .collect();
        groups.sort_by_key(|(group, _)| (!group.ends_with(".x-k8s.io"), Arc::clone(group)));
        groups
    }

    /// The versions of a group, the preferred one first.
    pub fn versions(&self, group: &str) -> Option<&Vec<Arc<str>>> {
        self.groups.get(group)
    }

    /// Whether a group and version are built in, rather than defined by CustomResourceDefinitions.
    pub fn is_built_in(&self, group: &str, version: &str) -> bool {
        let mut resources = self.by_path.values();
        resources.any(|resource| {
            &*resource.group == group && &*resource.version == version && resource.custom.is_none()
        })
    }

    /// The resources of a group and version, sorted by name.
    pub fn resources(&self, group: &str, version: &str) -> Vec<&Arc<Resource>> {
        let mut resources: Vec<_> = self
            .by_path
            .values()
            .filter(|resource| &*resource.group == group && &*resource.version == version)
            .collect();
        resources.sort_by(|left, right| left.plural.cmp(&right.plural));
        resources
    }
}

//! The owner graph of the garbage collector, by UID. It is pure: it takes events and returns decisions about single objects.

use std::collections::{HashMap, HashSet};

use store::{Event, EventKind, Key, Object, Owner, ResourceId};

use crate::operations::delete::{FOREGROUND, ORPHAN};

type Uid = Box<str>;

/// One object in the graph.
#[derive(Clone, Debug)]
pub struct Node {
    /// Kind of the object.
    pub resource: ResourceId,
    /// The key of the object.
    pub key: Key,
    /// The last observed revision.
    pub revision: u64,
    owners: Box<[Owner]>,
    deleting: bool,
    foreground: bool,
    orphan: bool,
}

impl Node {
    fn new(resource: &ResourceId, object: &Object) -> Self {
        let has = |name: &str| {
            object
                .metadata
                .finalizers
                .iter()
                .any(|finalizer| &**finalizer == name)
        };
        Self {
            resource: resource.clone(),
            key: object.key.clone(),
            revision: object.revision,
            owners: object.metadata.owners.clone(),
            deleting: object.is_deleting(),
            foreground: has(FOREGROUND),
            orphan: has(ORPHAN),
        }
    }

    fn waits_for_dependents(&self) -> bool {
        self.deleting && self.foreground
    }
}

/// How a garbage object is deleted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Policy {
    /// Dependents are deleted after it.
    Background,
    /// Dependents are deleted before it, because its owner waits for all of them.
    Foreground,
    /// Its dependents stay.
    Orphan,
}

/// What the collector does with an object.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Decision {
    /// Keep it unchanged.
    Keep,
    /// Delete it: it has no owner left.
    Delete(Policy),
    /// Remove the references to missing or terminating owners; another owner exists.
    Release(Vec<Uid>),
    /// Remove its `foregroundDeletion` finalizer: it has no dependents left.
    FinishForeground,
    /// Remove the references of its dependents to it, then its `orphan` finalizer.
    Orphan(Vec<Uid>),
}

/// The scope of the kind in an owner reference.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OwnerKind {
    /// The kind is not served, so its objects cannot be seen.
    Unknown,
    /// Objects of the kind are namespaced and can own only objects of the same namespace.
    Namespaced,
    /// Objects of the kind are cluster-scoped.
    Cluster,
}

/// All objects and their references.
#[derive(Debug, Default)]
pub struct Graph {
    nodes: HashMap<Uid, Node>,
    dependents: HashMap<Uid, HashSet<Uid>>,
    /// Deleted owners that still have dependents. They count as deleted even if their kind is not served any more.
    gone: HashSet<Uid>,
}

impl Graph {
    /// Adds or updates an object. Returns the UIDs to check.
    pub fn insert(&mut self, resource: &ResourceId, object: &Object) -> Vec<Uid> {
        let uid = object.metadata.uid.clone();
        let node = Node::new(resource, object);
        let mut affected = Vec::new();
        let before = self.nodes.get(&uid).map(|before| {
            (
                before.owners.clone(),
                before.deleting,
                before.foreground,
                before.orphan,
            )
        });
        if let Some((owners, ..)) = &before {
            for owner in owners.iter().filter(|owner| !node.owners.contains(owner)) {
                self.unlink(&owner.uid, &uid);
                // A terminating owner may have waited for the removal of this reference.
                affected.push(owner.uid.clone());
            }
        }
        for owner in &node.owners {
            self.dependents
                .entry(owner.uid.clone())
                .or_default()
                .insert(uid.clone());
        }
        let changed = before.is_none_or(|(owners, deleting, foreground, orphan)| {
            owners != node.owners
                || deleting != node.deleting
                || foreground != node.foreground
                || orphan != node.orphan
        });
        if changed && (!node.owners.is_empty() || node.deleting) {
            affected.push(uid.clone());
        }
        if changed && node.waits_for_dependents() {
            affected.extend(self.dependents_of(&uid));
        }
        self.nodes.insert(uid, node);
        affected
    }

    /// Applies an event. Returns the UIDs to check.
    pub fn observe(&mut self, resource: &ResourceId, event: &Event) -> Vec<Uid> {
        if event.kind != EventKind::Deleted {
            return self.insert(resource, &event.object);
        }
        let uid = &event.object.metadata.uid;
        let mut affected: Vec<Uid> = self.dependents_of(uid).collect();
        if !affected.is_empty() {
            self.gone.insert(uid.clone());
        }
        if let Some(node) = self.nodes.remove(uid) {
            for owner in &node.owners {
                self.unlink(&owner.uid, uid);
                affected.push(owner.uid.clone());
            }
        }
        affected
    }

    fn unlink(&mut self, owner: &Uid, dependent: &Uid) {
        if let Some(dependents) = self.dependents.get_mut(owner) {
            dependents.remove(dependent);
            if dependents.is_empty() {
                self.dependents.remove(owner);
                self.gone.remove(owner);
            }
        }
    }

    fn dependents_of(&self, uid: &str) -> impl Iterator<Item = Uid> {
        self.dependents.get(uid).into_iter().flatten().cloned()
    }

    /// The object with a UID.
    pub fn node(&self, uid: &str) -> Option<&Node> {
        self.nodes.get(uid)
    }

    /// Decides what to do with an object now.
    pub fn decide(&self, uid: &str, kind_of: impl Fn(&Owner) -> OwnerKind) -> Decision {
        let Some(node) = self.nodes.get(uid) else {
            return Decision::Keep;
        };
        if node.deleting && node.orphan {
            return Decision::Orphan(self.dependents_of(uid).collect());
        }
        if node.waits_for_dependents() {
            return if self.is_blocked(uid) {
                Decision::Keep
            } else {
                Decision::FinishForeground
            };
        }
        if node.deleting || node.owners.is_empty() {
            return Decision::Keep;
        }
        let (mut solid, mut going, mut waited_for) = (false, Vec::new(), false);
        for owner in &node.owners {
            match self.owner(node, owner) {
                Some(found) if found.waits_for_dependents() => {
                    waited_for = true;
                    going.push(owner.uid.clone());
                }
                Some(_) => solid = true,
                None if self.is_unresolvable(node, owner, kind_of(owner)) => solid = true,
                None => going.push(owner.uid.clone()),
            }
        }
        match (solid, going.is_empty()) {
            (true, true) => Decision::Keep,
            (true, false) => Decision::Release(going),
            (false, _) if node.orphan => Decision::Delete(Policy::Orphan),
            (false, _) if node.foreground || (waited_for && self.dependents.contains_key(uid)) => {
                Decision::Delete(Policy::Foreground)
            }
            (false, _) => Decision::Delete(Policy::Background),
        }
    }

    /// Whether it is unknown if an owner that is not in the graph exists.
    fn is_unresolvable(&self, node: &Node, owner: &Owner, kind: OwnerKind) -> bool {
        match kind {
            OwnerKind::Unknown => !self.gone.contains(&owner.uid),
            // A cluster-scoped object cannot tell the namespace of its owner.
            OwnerKind::Namespaced => node.key.namespace().is_empty(),
            OwnerKind::Cluster => false,
        }
    }

    /// The owner that a reference of `node` resolves to: same UID and name, and cluster-scoped or in the same namespace.
    fn owner(&self, node: &Node, owner: &Owner) -> Option<&Node> {
        let found = self.nodes.get(&owner.uid)?;
        let reachable =
            found.key.namespace().is_empty() || found.key.namespace() == node.key.namespace();
        (reachable && found.key.name() == &*owner.name).then_some(found)
    }

    /// Whether an existing dependent blocks the deletion of its owner.
    fn is_blocked(&self, uid: &str) -> bool {
        let mut dependents = self
            .dependents
            .get(uid)
            .into_iter()
            .flatten()
            .filter_map(|dependent| self.nodes.get(dependent));
        dependents.any(|dependent| {
            // Two objects that own each other would wait forever, so a dependent that itself waits for its owner does not block.
            let blocks =
                |owner: &Owner| &*owner.uid == uid && owner.block_owner_deletion == Some(true);
            dependent.owners.iter().any(blocks)
                && !(dependent.waits_for_dependents() && self.owns(uid, dependent))
        })
    }

    fn owns(&self, dependent: &str, owner: &Node) -> bool {
        let references = self.nodes.get(dependent).map(|node| &node.owners);
        references.into_iter().flatten().any(|reference| {
            self.nodes
                .get(&reference.uid)
                .is_some_and(|node| node.key == owner.key && node.resource == owner.resource)
        })
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use serde_json::{Value, json};
    use store::Draft;

    use super::*;

    fn object(namespace: &str, name: &str, owner: Option<&Value>) -> Arc<Object> {
        let metadata = json!({"name": name, "namespace": namespace, "uid": name, "ownerReferences": owner.into_iter().collect::<Vec<_>>()});
        let value = json!({"apiVersion": "v1", "kind": "Thing", "metadata": metadata});
        let draft = Draft::new(&value).unwrap();
        Arc::new(draft.preview_of_new(Key::new(namespace, name)))
    }

    fn owned_by(name: &str) -> Value {
        json!({"apiVersion": "example.com/v1", "kind": "Owner", "name": name, "uid": name})
    }

    fn things() -> ResourceId {
        ResourceId::new("", "things")
    }

    #[test]
    fn a_deleted_owner_counts_as_deleted_even_after_its_kind() {
        let mut graph = Graph::default();
        let owner = object("n", "owner", None);
        graph.insert(&things(), &owner);
        graph.insert(&things(), &object("n", "thing", Some(&owned_by("owner"))));
        graph.insert(&things(), &object("n", "other", Some(&owned_by("unseen"))));
        let event = Event::new(EventKind::Deleted, owner, None);
        assert_eq!(graph.observe(&things(), &event), ["thing".into()]);
        let unknown = |_: &Owner| OwnerKind::Unknown;
        let deleted = Decision::Delete(Policy::Background);
        assert_eq!(graph.decide("thing", unknown), deleted);
        assert_eq!(
            graph.decide("other", unknown),
            Decision::Keep,
            "the owner may exist"
        );
    }

    #[test]
    fn a_namespaced_owner_cannot_own_a_cluster_scoped_object() {
        let mut graph = Graph::default();
        graph.insert(&things(), &object("n", "owner", None));
        graph.insert(&things(), &object("", "thing", Some(&owned_by("owner"))));
        let kept = graph.decide("thing", |_: &Owner| OwnerKind::Namespaced);
        assert_eq!(kept, Decision::Keep);
        let gone = graph.decide("thing", |_: &Owner| OwnerKind::Cluster);
        assert_eq!(gone, Decision::Delete(Policy::Background));
    }
}

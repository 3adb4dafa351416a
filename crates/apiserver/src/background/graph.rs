//! Who owns whom, by UID, and what garbage collection must do about one object. Pure: it sees events and answers with decisions.

use std::collections::{HashMap, HashSet};

use crate::{
    operations::delete::{FOREGROUND, ORPHAN},
    store::{Event, EventKind, Key, Object, Owner, ResourceId},
};

type Uid = Box<str>;

/// One object in the graph.
#[derive(Clone, Debug)]
pub struct Node {
    /// Kind of the object.
    pub resource: ResourceId,
    /// Which object.
    pub key: Key,
    /// Which version of it was seen last.
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
                .facts
                .finalizers
                .iter()
                .any(|finalizer| &**finalizer == name)
        };
        Self {
            resource: resource.clone(),
            key: object.key.clone(),
            revision: object.revision,
            owners: object.facts.owners.clone(),
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
    /// Its dependents follow.
    Background,
    /// Its dependents go first, because its owner waits for all of them.
    Foreground,
    /// Its dependents stay.
    Orphan,
}

/// What to do about an object.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Decision {
    /// Nothing.
    Keep,
    /// Delete it: no owner is left.
    Delete(Policy),
    /// Take away references to owners that are gone or going; another owner holds it.
    Release(Vec<Uid>),
    /// It waited for its dependents and none is left.
    FinishForeground,
    /// Its dependents shall lose their reference to it, and then it may go.
    Orphan(Vec<Uid>),
}

/// What is known of the kind that an owner reference names.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OwnerKind {
    /// It is not served, and may own things we cannot see.
    Unknown,
    /// Its objects are in namespaces, and own nothing outside of theirs.
    Namespaced,
    /// Its objects are in none.
    Cluster,
}

/// All objects and their references.
#[derive(Debug, Default)]
pub struct Graph {
    nodes: HashMap<Uid, Node>,
    dependents: HashMap<Uid, HashSet<Uid>>,
    /// Owners that were seen to go and still have dependents: they are gone, even if their kind went after them.
    gone: HashSet<Uid>,
}

impl Graph {
    /// Takes an object in; answers with the UIDs to decide about.
    pub fn insert(&mut self, resource: &ResourceId, object: &Object) -> Vec<Uid> {
        let uid = object.facts.uid.clone();
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
                // An owner that waits may have been waiting for this reference.
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

    /// Takes an event in; answers with the UIDs to decide about.
    pub fn observe(&mut self, resource: &ResourceId, event: &Event) -> Vec<Uid> {
        if event.kind != EventKind::Deleted {
            return self.insert(resource, &event.object);
        }
        let uid = &event.object.facts.uid;
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

    /// The object behind a UID.
    pub fn node(&self, uid: &str) -> Option<&Node> {
        self.nodes.get(uid)
    }

    /// What to do about an object now.
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

    /// Whether nobody can say what became of an owner that is not found.
    fn is_unresolvable(&self, node: &Node, owner: &Owner, kind: OwnerKind) -> bool {
        match kind {
            OwnerKind::Unknown => !self.gone.contains(&owner.uid),
            // In which namespace would it be?
            OwnerKind::Namespaced => node.key.namespace().is_empty(),
            OwnerKind::Cluster => false,
        }
    }

    /// The owner that a reference of `node` really names: same identity and name, cluster-scoped or in the same namespace.
    fn owner(&self, node: &Node, owner: &Owner) -> Option<&Node> {
        let found = self.nodes.get(&owner.uid)?;
        let reachable =
            found.key.namespace().is_empty() || found.key.namespace() == node.key.namespace();
        (reachable && found.key.name() == &*owner.name).then_some(found)
    }

    /// Whether a dependent that is still there blocks the deletion of its owner.
    fn is_blocked(&self, uid: &str) -> bool {
        let mut dependents = self
            .dependents
            .get(uid)
            .into_iter()
            .flatten()
            .filter_map(|dependent| self.nodes.get(dependent));
        dependents.any(|dependent| {
            // Two objects that own each other would wait for ever; the one that already waits does not block.
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

    use super::*;
    use crate::store::{Draft, Event};

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
    fn an_owner_that_was_seen_to_go_is_gone_even_if_its_kind_went_too() {
        let mut graph = Graph::default();
        let owner = object("n", "owner", None);
        graph.insert(&things(), &owner);
        graph.insert(&things(), &object("n", "thing", Some(&owned_by("owner"))));
        graph.insert(&things(), &object("n", "other", Some(&owned_by("unseen"))));
        let event = Event {
            kind: EventKind::Deleted,
            object: owner,
            previous: None,
            at: std::time::Instant::now(),
        };
        assert_eq!(graph.observe(&things(), &event), ["thing".into()]);
        let unknown = |_: &Owner| OwnerKind::Unknown;
        let goes = Decision::Delete(Policy::Background);
        assert_eq!(graph.decide("thing", unknown), goes);
        assert_eq!(
            graph.decide("other", unknown),
            Decision::Keep,
            "it may be there"
        );
    }

    #[test]
    fn nobody_in_a_namespace_owns_what_is_in_none() {
        let mut graph = Graph::default();
        graph.insert(&things(), &object("n", "owner", None));
        graph.insert(&things(), &object("", "thing", Some(&owned_by("owner"))));
        let kept = graph.decide("thing", |_: &Owner| OwnerKind::Namespaced);
        assert_eq!(kept, Decision::Keep);
        let gone = graph.decide("thing", |_: &Owner| OwnerKind::Cluster);
        assert_eq!(gone, Decision::Delete(Policy::Background));
    }
}

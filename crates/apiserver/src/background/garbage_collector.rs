//! The garbage collector: follows every event, and applies the decisions of the owner graph through the same operations as any
//! client.

use std::{
    collections::{HashSet, VecDeque},
    sync::Arc,
    time::Duration,
};

use apimachinery::status::Status;
use futures::{StreamExt, future::BoxFuture, stream::FuturesUnordered};
use serde_json::Value;
use store::{Feed, Object, Owner, ResourceId};

use super::owner_graph::{Decision, Graph, Node, OwnerKind, Policy};
use crate::{
    metadata,
    operations::{Api, DeleteOptions, Propagation, delete},
    target::{Part, Target, WriteOptions},
};

type Uid = Box<str>;

const CONCURRENCY: usize = 64;
const RETRY_DELAY: Duration = Duration::from_millis(200);
const CONFLICT_DELAY: Duration = Duration::from_millis(5);

/// Runs the garbage collector until the server stops.
pub async fn run(api: Arc<Api>, existing: Vec<(ResourceId, Arc<Object>)>, mut feed: Feed) {
    let mut graph = Graph::default();
    let mut queue = Queue::default();
    for (resource, object) in &existing {
        graph.insert(resource, object);
    }
    queue.extend(
        existing
            .iter()
            .map(|(_, object)| object.metadata.uid.clone()),
    );
    drop(existing);
    let mut running: FuturesUnordered<BoxFuture<'static, Option<Uid>>> = FuturesUnordered::new();
    let shutdown = api.shutdown.clone();
    loop {
        while running.len() < CONCURRENCY
            && let Some(uid) = queue.pop()
        {
            let registry = api.registry();
            let decision = graph.decide(&uid, |owner: &Owner| {
                match registry.find_kind(&owner.api_version, &owner.kind) {
                    None => OwnerKind::Unknown,
                    Some(kind) if kind.is_namespaced() => OwnerKind::Namespaced,
                    Some(_) => OwnerKind::Cluster,
                }
            });
            if let Some(work) = prepare(&api, &graph, uid, decision) {
                running.push(work);
            }
        }
        tokio::select! {
            () = shutdown.cancelled() => return,
            event = feed.recv() => match event {
                Some((resource, event)) => queue.extend(graph.observe(&resource, &event)),
                None => return,
            },
            Some(again) = running.next(), if !running.is_empty() => queue.extend(again),
        }
    }
}

/// A queue of UIDs to check, without duplicates.
#[derive(Default)]
struct Queue {
    order: VecDeque<Uid>,
    waiting: HashSet<Uid>,
}

impl Queue {
    fn extend(&mut self, uids: impl IntoIterator<Item = Uid>) {
        for uid in uids {
            if self.waiting.insert(uid.clone()) {
                self.order.push_back(uid);
            }
        }
    }

    fn pop(&mut self) -> Option<Uid> {
        let uid = self.order.pop_front()?;
        self.waiting.remove(&uid);
        Some(uid)
    }
}

/// Prepares the work for a decision. The future returns the UID if the work must be retried.
fn prepare(
    api: &Arc<Api>,
    graph: &Graph,
    uid: Uid,
    decision: Decision,
) -> Option<BoxFuture<'static, Option<Uid>>> {
    let node = graph.node(&uid)?;
    let target = target_of(api, node)?;
    let preconditions = delete::Preconditions {
        uid: Some(uid.to_string()),
        // Another client may just have added an owner.
        resource_version: Some(node.revision.to_string()),
    };
    let dependents: Vec<Target> = match &decision {
        Decision::Keep => return None,
        Decision::Orphan(dependents) => dependents
            .iter()
            .filter_map(|dependent| target_of(api, graph.node(dependent)?))
            .collect(),
        _ => Vec::new(),
    };
    let api = api.clone();
    Some(Box::pin(async move {
        match execute(&api, &target, &uid, preconditions, decision, dependents).await {
            Ok(()) => None,
            Err(status) if status.is_not_found() => None,
            // The object has a newer version, which the graph will receive soon.
            Err(status) if status.is_conflict() => {
                tokio::time::sleep(CONFLICT_DELAY).await;
                Some(uid)
            }
            Err(status) => {
                tracing::warn!(error = %status, resource = %target.resource.id, name = %target.name, "garbage collection failed and will be retried");
                tokio::time::sleep(RETRY_DELAY).await;
                Some(uid)
            }
        }
    }))
}

fn target_of(api: &Api, node: &Node) -> Option<Target> {
    let resource = api.registry().find_id(&node.resource)?;
    Some(Target {
        resource,
        namespace: node.key.namespace().to_owned(),
        name: node.key.name().to_owned(),
    })
}

async fn execute(
    api: &Api,
    target: &Target,
    uid: &Uid,
    preconditions: delete::Preconditions,
    decision: Decision,
    dependents: Vec<Target>,
) -> Result<(), Status> {
    let options = WriteOptions::system("generic-garbage-collector");
    match decision {
        Decision::Keep => Ok(()),
        Decision::Delete(policy) => {
            let policy = match policy {
                Policy::Background => Propagation::Background,
                Policy::Foreground => Propagation::Foreground,
                Policy::Orphan => Propagation::Orphan,
            };
            let request = DeleteOptions {
                propagation_policy: Some(policy),
                preconditions: Some(preconditions),
                ..DeleteOptions::default()
            };
            api.delete(target, &request, &options).await.map(drop)
        }
        Decision::Release(owners) => release(api, target, &owners, &options).await,
        Decision::FinishForeground => {
            remove_finalizer(api, target, uid, delete::FOREGROUND, &options).await
        }
        Decision::Orphan(_) => {
            for dependent in &dependents {
                match release(api, dependent, std::slice::from_ref(uid), &options).await {
                    Err(status) if !status.is_not_found() => return Err(status),
                    _ => {}
                }
            }
            remove_finalizer(api, target, uid, delete::ORPHAN, &options).await
        }
    }
}

async fn release(
    api: &Api,
    target: &Target,
    owners: &[Uid],
    options: &WriteOptions,
) -> Result<(), Status> {
    let transform = |old: &Value| {
        let mut object = old.clone();
        if let Some(references) = metadata::of(&mut object)
            .get_mut("ownerReferences")
            .and_then(Value::as_array_mut)
        {
            references.retain(|reference| !owners.iter().any(|owner| reference["uid"] == **owner));
        }
        Ok(object)
    };
    api.modify(target, Part::Main, &transform, options)
        .await
        .map(drop)
}

async fn remove_finalizer(
    api: &Api,
    target: &Target,
    uid: &Uid,
    finalizer: &str,
    options: &WriteOptions,
) -> Result<(), Status> {
    let transform = |old: &Value| {
        let mut object = old.clone();
        if metadata::text(old, "uid") == &**uid
            && let Some(finalizers) = metadata::of(&mut object)
                .get_mut("finalizers")
                .and_then(Value::as_array_mut)
        {
            finalizers.retain(|present| present != finalizer);
        }
        Ok(object)
    };
    api.modify(target, Part::Main, &transform, options)
        .await
        .map(drop)
}

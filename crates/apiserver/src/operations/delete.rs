//! Deleting: preconditions, propagation policies, finalizers and the grace period of pods.

use std::sync::Arc;

use apimachinery::status::Status;
use futures::{StreamExt, stream::FuturesUnordered};
use jiff::{SignedDuration, Timestamp};
use serde::Deserialize;
use serde_json::Value;

use super::{
    Api, ListOptions, Part, Target, WriteOptions, metadata, modify::is_finished, storage_failure,
};
use crate::{
    admission::Operation,
    registry::{Resource, Rules},
    store::{Change, Expectation, Object, Write, WriteError},
};

/// The finalizer of an owner whose dependents shall lose their reference to it.
pub const ORPHAN: &str = "orphan";
/// The finalizer of an owner that waits for its dependents.
pub const FOREGROUND: &str = "foregroundDeletion";

const DEFAULT_GRACE_SECONDS: i64 = 30;
const DELETIONS_AT_ONCE: usize = 128;

/// What happens to the dependents of a deleted object.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
pub enum Propagation {
    /// They stay, without the reference.
    Orphan,
    /// They go after it.
    Background,
    /// They go before it.
    Foreground,
}

/// What must hold for a deletion.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct Preconditions {
    /// The identity of the object.
    pub uid: Option<String>,
    /// Its version.
    pub resource_version: Option<String>,
}

/// `DeleteOptions`.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct DeleteOptions {
    /// Seconds a pod has to end.
    pub grace_period_seconds: Option<i64>,
    /// What must hold.
    pub preconditions: Option<Preconditions>,
    /// The old way to say `Orphan`.
    pub orphan_dependents: Option<bool>,
    /// What happens to dependents.
    pub propagation_policy: Option<Propagation>,
    /// `All` when nothing shall be stored.
    pub dry_run: Vec<String>,
}

/// A finished request to delete.
#[derive(Clone, Debug)]
pub struct Deleted {
    /// The object, as it is now or as it last was.
    pub object: Arc<Object>,
    /// Whether it is gone already.
    pub gone: bool,
}

impl Api {
    /// Deletes an object, or starts to.
    pub async fn delete(
        &self,
        target: &Target,
        options: &DeleteOptions,
        write: &WriteOptions,
    ) -> Result<Deleted, Status> {
        loop {
            let current = self.get(target)?;
            check_preconditions(target, &current, options)?;
            let resource = &target.resource;
            let old = Self::value_of(resource, &current);
            let mut nothing = Value::Null;
            self.admit(
                target,
                Part::Main,
                Operation::Delete,
                &mut nothing,
                Some(&old),
                write,
            )?;
            if resource.rules == Rules::Namespace
                && matches!(
                    target.name.as_str(),
                    "default" | "kube-system" | "kube-public"
                )
            {
                return Err(Status::forbidden(
                    "",
                    "namespaces",
                    &target.name,
                    "this namespace may not be deleted",
                ));
            }
            let marked = mark(resource, &old, options, self.now());
            let gone = is_finished(&marked);
            // What goes at once was never seen to be going; only of a pod it is said when and how.
            let goes_unmarked = gone && resource.rules != Rules::Pod && !current.is_deleting();
            let object = if goes_unmarked { old.clone() } else { marked };
            if !gone && object == old {
                return Ok(Deleted {
                    object: current,
                    gone: false,
                });
            }
            let draft = Self::draft(resource, object)?;
            if write.dry_run || options.dry_run.iter().any(|value| value == "All") {
                return Ok(Deleted {
                    object: Arc::new(draft.preview(target.key(), current.revision)),
                    gone,
                });
            }
            let change = if gone {
                Change::Delete(draft)
            } else {
                Change::Put(draft)
            };
            let expect = Expectation::Revision(current.revision);
            let request = Write {
                resource: resource.id.clone(),
                key: target.key(),
                expect,
                requires: Vec::new(),
                change,
            };
            match self.store.write(request).await {
                Ok(object) => {
                    self.written(resource);
                    return Ok(Deleted { object, gone });
                }
                Err(WriteError::Conflict { .. }) => tokio::task::yield_now().await,
                Err(error) => return Err(storage_failure(target, &error)),
            }
        }
    }

    /// Deletes every object that the list options select; answers with what they were.
    pub async fn delete_collection(
        &self,
        target: &Target,
        list: &ListOptions,
        options: &DeleteOptions,
        write: &WriteOptions,
    ) -> Result<Vec<Arc<Object>>, Status> {
        let listed = self.list(target, list)?;
        let targets: Vec<Target> = listed
            .objects
            .iter()
            .map(|object| Target {
                resource: target.resource.clone(),
                namespace: object.key.namespace().to_owned(),
                name: object.key.name().to_owned(),
            })
            .collect();
        // Writes share a sync, so deleting side by side costs little more than deleting one.
        let mut running = FuturesUnordered::new();
        for one in &targets {
            if running.len() == DELETIONS_AT_ONCE
                && let Some(outcome) = running.next().await
            {
                present(outcome)?;
            }
            running.push(self.delete(one, options, write));
        }
        while let Some(outcome) = running.next().await {
            present(outcome)?;
        }
        drop(running);
        Ok(listed.objects)
    }
}

/// Another client may have been faster.
fn present(outcome: Result<Deleted, Status>) -> Result<(), Status> {
    match outcome {
        Err(status) if !status.is_not_found() => Err(status),
        _ => Ok(()),
    }
}

fn check_preconditions(
    target: &Target,
    current: &Object,
    options: &DeleteOptions,
) -> Result<(), Status> {
    let Some(preconditions) = &options.preconditions else {
        return Ok(());
    };
    let fail = |what: &str, wanted: &str, found: &str, guess: &str| {
        let cause = format!(
            "the {what} in the precondition ({wanted}) does not match the {what} in record ({found}). The object might have been {guess}"
        );
        // Elsewhere a conflict names the resource; here kube-apiserver names the kind.
        Err(Status::conflict_because(
            &target.resource.group,
            &target.resource.kind,
            &target.name,
            &cause,
        ))
    };
    let found = current.revision.to_string();
    match (&preconditions.uid, &preconditions.resource_version) {
        (Some(uid), _) if **uid != *current.facts.uid => {
            fail("UID", uid, &current.facts.uid, "deleted and then recreated")
        }
        (_, Some(version)) if *version != found => {
            fail("ResourceVersion", version, &found, "modified")
        }
        _ => Ok(()),
    }
}

/// The object with everything on it that deleting puts there.
fn mark(resource: &Resource, old: &Value, options: &DeleteOptions, now: Timestamp) -> Value {
    let mut object = old.clone();
    let finalizers = finalizers_for(old, options);
    let fields = metadata::of(&mut object);
    if finalizers.is_empty() {
        fields.remove("finalizers");
    } else {
        fields.insert("finalizers".into(), Value::from(finalizers));
    }
    let grace = grace_seconds(resource, old, options);
    let already = fields.get("deletionTimestamp").is_some();
    let before = fields
        .get("deletionGracePeriodSeconds")
        .and_then(Value::as_i64)
        .unwrap_or_default();
    // Asking again can only shorten the grace period.
    if !already || grace < before {
        let started = deletion_start(fields.get("deletionTimestamp"), before).unwrap_or(now);
        let ends = started
            .saturating_add(SignedDuration::from_secs(grace))
            .unwrap_or(started);
        fields.insert("deletionTimestamp".into(), metadata::timestamp(ends));
        if resource.rules != Rules::Namespace {
            fields.insert("deletionGracePeriodSeconds".into(), Value::from(grace));
        }
        if !already && fields.get("generation").is_some() {
            metadata::advance_generation(&mut object);
        }
        if resource.rules == Rules::Namespace {
            object["status"]["phase"] = Value::from("Terminating");
        }
    }
    object
}

fn deletion_start(timestamp: Option<&Value>, grace: i64) -> Option<Timestamp> {
    let ends = apimachinery::time::parse(timestamp?.as_str()?).ok()?;
    let started = ends.checked_sub(SignedDuration::from_secs(grace)).ok()?;
    // An end that was cut at the last year there is does not tell when it began. A year before our era cannot even be written so
    // that clients read it.
    (started >= Timestamp::UNIX_EPOCH).then_some(started)
}

fn finalizers_for(old: &Value, options: &DeleteOptions) -> Vec<String> {
    let present = metadata::list_of_text(old["metadata"].get("finalizers"));
    let policy = match (options.propagation_policy, options.orphan_dependents) {
        (Some(policy), _) => Some(policy),
        (None, Some(true)) => Some(Propagation::Orphan),
        (None, Some(false)) => Some(Propagation::Background),
        (None, None) if present.contains(&ORPHAN) => Some(Propagation::Orphan),
        (None, None) if present.contains(&FOREGROUND) => Some(Propagation::Foreground),
        (None, None) => None,
    };
    let mut finalizers: Vec<String> = present
        .into_iter()
        .filter(|finalizer| !matches!(*finalizer, ORPHAN | FOREGROUND))
        .map(ToOwned::to_owned)
        .collect();
    match policy {
        Some(Propagation::Orphan) => finalizers.push(ORPHAN.to_owned()),
        Some(Propagation::Foreground) => finalizers.push(FOREGROUND.to_owned()),
        Some(Propagation::Background) | None => {}
    }
    finalizers
}

/// Only pods end gracefully, and only those that a node has taken and that still run.
fn grace_seconds(resource: &Resource, old: &Value, options: &DeleteOptions) -> i64 {
    if resource.rules != Rules::Pod {
        return 0;
    }
    let bound = old
        .pointer("/spec/nodeName")
        .and_then(Value::as_str)
        .is_some_and(|node| !node.is_empty());
    let ended = matches!(
        old.pointer("/status/phase").and_then(Value::as_str),
        Some("Succeeded" | "Failed")
    );
    if !bound || ended {
        return 0;
    }
    let wanted = options
        .grace_period_seconds
        .or_else(|| {
            old.pointer("/spec/terminationGracePeriodSeconds")
                .and_then(Value::as_i64)
        })
        .unwrap_or(DEFAULT_GRACE_SECONDS);
    // A negative period once meant "immediately"; kube-apiserver reads it as one second.
    if wanted < 0 { 1 } else { wanted }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_grace_period_beyond_all_time_leaves_timestamps_that_clients_can_read() {
        let start = |ends: &str, grace| deletion_start(Some(&Value::from(ends)), grace);
        let time = |text: &str| text.parse::<Timestamp>().ok();
        assert_eq!(
            start("2026-01-01T00:00:30Z", 30),
            time("2026-01-01T00:00:00Z")
        );
        // Cut at the last year there is when the deletion began.
        let last = metadata::timestamp(Timestamp::MAX);
        for grace in [i64::MAX, 1 << 40, 1 << 38, i64::MIN] {
            let started = deletion_start(Some(&last), grace);
            assert_eq!(started, None, "{grace}");
        }
    }
}

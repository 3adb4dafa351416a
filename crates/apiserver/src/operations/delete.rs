//! Deleting: preconditions, propagation policies, finalizers and the grace period of pods.

use std::sync::Arc;

use apimachinery::status::Status;
use futures::{StreamExt, stream::FuturesUnordered};
use jiff::{SignedDuration, Timestamp};
use serde::Deserialize;
use serde_json::Value;
use store::{Change, Expectation, Object, Write, WriteError};

use super::{Api, ListOptions, modify::is_finished, storage_failure};
use crate::{
    admission::Operation,
    metadata,
    registry::Resource,
    strategy,
    target::{Part, Target, WriteOptions},
};

/// The finalizer of an owner whose dependents are to be orphaned: they lose their reference to the owner.
pub const ORPHAN: &str = "orphan";
/// The finalizer of an owner that waits for the deletion of its dependents.
pub const FOREGROUND: &str = "foregroundDeletion";

const CONCURRENT_DELETIONS: usize = 128;

/// How the dependents of a deleted object are handled (`propagationPolicy`).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
pub enum Propagation {
    /// Dependents stay, without the owner reference.
    Orphan,
    /// Dependents are deleted after the owner.
    Background,
    /// Dependents are deleted before the owner.
    Foreground,
}

/// The preconditions of a deletion.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct Preconditions {
    /// The UID of the object.
    pub uid: Option<String>,
    /// The resource version of the object.
    pub resource_version: Option<String>,
}

/// `DeleteOptions`.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct DeleteOptions {
    /// Seconds within which a pod must terminate.
    pub grace_period_seconds: Option<i64>,
    /// The preconditions.
    pub preconditions: Option<Preconditions>,
    /// The deprecated way to request `Orphan`.
    pub orphan_dependents: Option<bool>,
    /// How dependents are handled.
    pub propagation_policy: Option<Propagation>,
    /// `All` for a dry run.
    pub dry_run: Vec<String>,
}

/// The result of a delete request.
#[derive(Clone, Debug)]
pub struct DeleteOutcome {
    /// The object, in its current or last version.
    pub object: Arc<Object>,
    /// Whether the object has been removed, not only marked for deletion.
    pub gone: bool,
}

impl Api {
    /// Deletes an object, or marks it for deletion if it has finalizers or a grace period.
    pub async fn delete(
        &self,
        target: &Target,
        options: &DeleteOptions,
        write: &WriteOptions,
    ) -> Result<DeleteOutcome, Status> {
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
            let kind = strategy::of(resource);
            kind.check_delete(&target.name)?;
            let marked = mark_for_deletion(resource, &old, options, self.now());
            let gone = is_finished(resource, &marked);
            // An object that is removed at once was never terminating, so its last version has no deletionTimestamp. Only a pod's
            // last version has one, with the grace period.
            let stays_unmarked =
                gone && !kind.is_terminating_when_removed() && !current.is_deleting();
            let object = if stays_unmarked { old.clone() } else { marked };
            if !gone && object == old {
                return Ok(DeleteOutcome {
                    object: current,
                    gone: false,
                });
            }
            let draft = Self::draft(resource, object)?;
            if write.dry_run || options.dry_run.iter().any(|value| value == "All") {
                return Ok(DeleteOutcome {
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
                    self.after_write(resource);
                    return Ok(DeleteOutcome { object, gone });
                }
                Err(WriteError::Conflict { .. }) => tokio::task::yield_now().await,
                Err(error) => return Err(storage_failure(target, &error)),
            }
        }
    }

    /// Deletes every object that the list options select. Returns their last listed versions.
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
        // Concurrent writes share one sync, so concurrent deletions cost little more than a single one.
        let mut running = FuturesUnordered::new();
        for one in &targets {
            if running.len() == CONCURRENT_DELETIONS
                && let Some(outcome) = running.next().await
            {
                ignore_not_found(outcome)?;
            }
            running.push(self.delete(one, options, write));
        }
        while let Some(outcome) = running.next().await {
            ignore_not_found(outcome)?;
        }
        drop(running);
        Ok(listed.objects)
    }
}

/// Another client may have deleted the object first.
fn ignore_not_found(outcome: Result<DeleteOutcome, Status>) -> Result<(), Status> {
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
        // In other conflicts kube-apiserver names the resource; here it names the kind.
        Err(Status::conflict_because(
            &target.resource.group,
            &target.resource.kind,
            &target.name,
            &cause,
        ))
    };
    let found = current.revision.to_string();
    match (&preconditions.uid, &preconditions.resource_version) {
        (Some(uid), _) if **uid != *current.metadata.uid => fail(
            "UID",
            uid,
            &current.metadata.uid,
            "deleted and then recreated",
        ),
        (_, Some(version)) if *version != found => {
            fail("ResourceVersion", version, &found, "modified")
        }
        _ => Ok(()),
    }
}

/// The object with the metadata that a deletion sets: timestamp, grace period and finalizers.
fn mark_for_deletion(
    resource: &Resource,
    old: &Value,
    options: &DeleteOptions,
    now: Timestamp,
) -> Value {
    let mut object = old.clone();
    let finalizers = finalizers_for(old, options);
    let fields = metadata::of(&mut object);
    if finalizers.is_empty() {
        fields.remove("finalizers");
    } else {
        fields.insert("finalizers".into(), Value::from(finalizers));
    }
    let kind = strategy::of(resource);
    let grace = kind.grace_period_seconds(old, options.grace_period_seconds);
    let already = fields.get("deletionTimestamp").is_some();
    let before = fields
        .get("deletionGracePeriodSeconds")
        .and_then(Value::as_i64)
        .unwrap_or_default();
    // A repeated delete request can only shorten the grace period.
    if !already || grace < before {
        let started = deletion_start(fields.get("deletionTimestamp"), before).unwrap_or(now);
        let ends = started
            .saturating_add(SignedDuration::from_secs(grace))
            .unwrap_or(started);
        fields.insert("deletionTimestamp".into(), metadata::timestamp(ends));
        fields.insert("deletionGracePeriodSeconds".into(), Value::from(grace));
        if !already && fields.get("generation").is_some() {
            metadata::increment_generation(&mut object);
        }
        kind.mark_for_deletion(&mut object);
    }
    object
}

fn deletion_start(timestamp: Option<&Value>, grace: i64) -> Option<Timestamp> {
    let ends = apimachinery::time::parse(timestamp?.as_str()?).ok()?;
    let started = ends.checked_sub(SignedDuration::from_secs(grace)).ok()?;
    // If the end was clamped to the latest representable year, the start cannot be computed from it. And clients cannot parse a
    // timestamp with a negative year.
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_huge_grace_period_yields_timestamps_that_clients_can_parse() {
        let start = |ends: &str, grace| deletion_start(Some(&Value::from(ends)), grace);
        let time = |text: &str| text.parse::<Timestamp>().ok();
        assert_eq!(
            start("2026-01-01T00:00:30Z", 30),
            time("2026-01-01T00:00:00Z")
        );
        // The end was clamped to the latest representable year when the deletion began.
        let last = metadata::timestamp(Timestamp::MAX);
        for grace in [i64::MAX, 1 << 40, 1 << 38, i64::MIN] {
            let started = deletion_start(Some(&last), grace);
            assert_eq!(started, None, "{grace}");
        }
    }
}

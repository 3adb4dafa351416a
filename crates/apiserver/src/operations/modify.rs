//! Changing an object. An update or a patch is a function from the stored version to the new version. On a write conflict it is
//! applied again, unless the client gave the resource version that it changes.

use std::sync::Arc;

use apimachinery::{field::FieldError, status::Status, types::DecodeError};
use serde_json::Value;
use store::{Change, Expectation, Object, Write, WriteError};

use super::{Api, WriteOutcome, storage_failure};
use crate::{
    admission::Operation,
    metadata,
    registry::Resource,
    strategy,
    target::{Part, Target, WriteOptions},
};

/// The maximum number of attempts after write conflicts. More conflicts in a row indicate a bug.
const ATTEMPTS: usize = 1000;

/// Computes the new version of an object.
pub trait Transform: Send + Sync {
    /// Computes the new version from `old`.
    fn apply(&self, old: &Value) -> Result<Value, Status>;

    /// Whether the change replaces the whole object (PUT). Some kinds then require a resource version.
    fn replaces(&self) -> bool {
        false
    }
}

/// PUT: the new version is the client's object.
#[derive(Debug)]
pub struct Replace(pub Value);

impl Transform for Replace {
    fn apply(&self, _old: &Value) -> Result<Value, Status> {
        Ok(self.0.clone())
    }

    fn replaces(&self) -> bool {
        true
    }
}

impl<F: Fn(&Value) -> Result<Value, Status> + Send + Sync> Transform for F {
    fn apply(&self, old: &Value) -> Result<Value, Status> {
        self(old)
    }
}

impl Api {
    /// Changes `part` of an object.
    pub async fn modify(
        &self,
        target: &Target,
        part: Part,
        transform: &dyn Transform,
        options: &WriteOptions,
    ) -> Result<WriteOutcome, Status> {
        for _ in 0..ATTEMPTS {
            let current = self.get(target)?;
            match self
                .modify_once(target, part, &current, transform, options)
                .await?
            {
                Some(written) => return Ok(written),
                None => tokio::task::yield_now().await,
            }
        }
        Err(Status::conflict(
            &target.resource.group,
            &target.resource.plural,
            &target.name,
        ))
    }

    /// Makes one attempt. Returns `None` on a write conflict.
    async fn modify_once(
        &self,
        target: &Target,
        part: Part,
        current: &Arc<Object>,
        transform: &dyn Transform,
        options: &WriteOptions,
    ) -> Result<Option<WriteOutcome>, Status> {
        let resource = &target.resource;
        let old = Self::value_of(resource, current);
        let (object, warnings) = self.new_version(target, part, &old, transform, options)?;
        let written = |object| WriteOutcome {
            object,
            created: false,
            warnings,
        };
        let unchanged = if options.applies {
            use strategy::managed_fields::without_times;
            without_times(&object) == without_times(&old)
        } else {
            object == old
        };
        let finished = is_finished(resource, &object);
        if unchanged && !finished {
            return Ok(Some(written(current.clone())));
        }
        Self::check_nesting(&object, Some(&old))?;
        let draft = Self::draft(resource, object)?;
        if options.dry_run {
            let preview = draft.preview(target.key(), current.revision);
            return Ok(Some(written(Arc::new(preview))));
        }
        // A client that removes the last finalizer gets the resource version from before the removal, as in kube-apiserver.
        let last =
            finished.then(|| Arc::new(draft.clone().preview(target.key(), current.revision)));
        let change = if finished {
            Change::Delete(draft)
        } else {
            Change::Put(draft)
        };
        let write = Write {
            resource: resource.id.clone(),
            key: target.key(),
            expect: Expectation::Revision(current.revision),
            requires: Vec::new(),
            change,
        };
        match self.store.write(write).await {
            Ok(object) => {
                self.after_write(resource);
                Ok(Some(written(last.unwrap_or(object))))
            }
            Err(WriteError::Conflict { .. }) => Ok(None),
            Err(error) => Err(storage_failure(target, &error)),
        }
    }

    /// The new version of `old`, complete and validated, and warnings for the client.
    fn new_version(
        &self,
        target: &Target,
        part: Part,
        old: &Value,
        transform: &dyn Transform,
        options: &WriteOptions,
    ) -> Result<(Value, Vec<String>), Status> {
        let resource = &target.resource;
        let mut object = transform.apply(old)?;
        metadata::check_identity(&mut object, resource, &target.namespace, &target.name)?;
        check_version(target, &object, old, transform.replaces())?;
        strategy::check_types(resource, &mut object, Some(old)).map_err(|error| {
            if transform.replaces() || options.applies {
                strategy::undecodable(&resource.kind, &resource.version, &error)
            } else {
                undecodable_patch(&error)
            }
        })?;
        let mut warnings = match part {
            Part::Main | Part::EphemeralContainers => strategy::check_fields(
                resource,
                &mut object,
                &options.duplicate_fields,
                options.field_validation,
            )?,
            Part::Status | Part::Finalize => Vec::new(),
        };
        strategy::check_quantities(resource, &object)?;
        metadata::prepare_update(&mut object, old);
        if part == Part::Main {
            self.fill_in(resource, &mut object);
        }
        strategy::prepare_update(&self.context(), resource, &mut object, old, part);
        self.admit(
            target,
            part,
            Operation::Update,
            &mut object,
            Some(old),
            options,
        )?;
        strategy::increment_generation_on_change(resource, &mut object, old);
        let errors = strategy::validate(resource, &object, Some(old), part);
        if !errors.is_empty() {
            return Err(Status::invalid(
                strategy::of(resource).group_in_errors(resource),
                &resource.kind,
                &target.name,
                &errors,
            ));
        }
        self.check_escalation(resource, &object, Some(old), options)?;
        warnings.extend(self.check_pod_security(target, part, &object, Some(old))?);
        if !options.applies {
            strategy::managed_fields::track(
                resource,
                &mut object,
                Some(old),
                options,
                part,
                self.now(),
            );
        }
        Ok((object, warnings))
    }
}

/// The error for a patch whose result cannot be decoded. kube-apiserver includes the object in the error. We do not, because a
/// user with permission to patch may have no permission to read.
pub(super) fn undecodable_patch(error: &DecodeError) -> Status {
    let error = FieldError::invalid("patch", "", error.to_string());
    Status::invalid("", "", "", &[error])
}

/// Whether a terminating object can be removed: no finalizers and no grace period are left.
pub(super) fn is_finished(resource: &Resource, object: &Value) -> bool {
    let metadata = &object["metadata"];
    let no_finalizers = metadata
        .get("finalizers")
        .and_then(Value::as_array)
        .is_none_or(Vec::is_empty);
    let no_grace = metadata
        .get("deletionGracePeriodSeconds")
        .and_then(Value::as_i64)
        .unwrap_or_default()
        == 0;
    metadata.get("deletionTimestamp").is_some()
        && no_finalizers
        && no_grace
        && !strategy::of(resource).has_own_finalizers(object)
}

fn check_version(
    target: &Target,
    object: &Value,
    old: &Value,
    replaces: bool,
) -> Result<(), Status> {
    let resource = &target.resource;
    let (stated, stored) = (
        metadata::text(object, "resourceVersion"),
        metadata::text(old, "resourceVersion"),
    );
    if stated.is_empty() || stated == "0" {
        if replaces && !resource.unconditional_update {
            let error = FieldError::invalid(
                "metadata.resourceVersion",
                0,
                "must be specified for an update",
            );
            return Err(Status::invalid(
                &resource.group,
                &resource.kind,
                &target.name,
                &[error],
            ));
        }
    } else if stated != stored {
        return Err(Status::conflict(
            &resource.group,
            &resource.plural,
            &target.name,
        ));
    }
    // In an update, the UID is a precondition. In a patch, it is an immutable field, which is validated later.
    let (stated, stored) = (metadata::text(object, "uid"), metadata::text(old, "uid"));
    if replaces && !stated.is_empty() && stated != stored {
        let cause = format!(
            "Precondition failed: UID in precondition: {stated}, UID in object meta: {stored}"
        );
        return Err(Status::conflict_because(
            &resource.group,
            &resource.plural,
            &target.name,
            &cause,
        ));
    }
    Ok(())
}

//! Creating an object.

use std::sync::Arc;

use apimachinery::status::Status;
use serde_json::Value;
use store::{Change, Expectation, Key, ResourceId, Write, WriteError};

use super::{
    Api, DEFINITIONS, WriteOutcome, storage_failure, terminating_definition, terminating_namespace,
};
use crate::{
    admission::Operation,
    metadata,
    registry::Rules,
    strategy,
    target::{Part, Target, WriteOptions},
};

/// How many generated names are tried before the client gets a conflict.
const NAME_ATTEMPTS: usize = 8;

impl Api {
    /// Creates an object. If the name is missing, the server derives one from `generateName`.
    pub async fn create(
        &self,
        target: &Target,
        mut object: Value,
        options: &WriteOptions,
    ) -> Result<WriteOutcome, Status> {
        let resource = &target.resource;
        if resource.is_namespaced() && target.namespace.is_empty() {
            return Err(Status::bad_request(
                "an empty namespace may not be set during creation",
            ));
        }
        metadata::check_identity(&mut object, resource, &target.namespace, "")?;
        strategy::check_types(resource, &mut object, None)
            .map_err(|error| strategy::undecodable(&resource.kind, &resource.version, &error))?;
        let warnings = strategy::check_fields(
            resource,
            &mut object,
            &options.duplicate_fields,
            options.field_validation,
        )?;
        let prefix = metadata::text(&object, "generateName").to_owned();
        let generated = metadata::text(&object, "name").is_empty() && !prefix.is_empty();
        if !generated {
            let name = metadata::text(&object, "name").to_owned();
            let named = Target {
                name,
                ..target.clone()
            };
            let written = self.create_named(&named, object, options).await?;
            return Ok(written.with_earlier_warnings(warnings));
        }
        for _ in 0..NAME_ATTEMPTS {
            let mut candidate = object.clone();
            let name = metadata::generate_name(&prefix);
            metadata::of(&mut candidate).insert("name".into(), Value::from(name.as_str()));
            let named = Target {
                name,
                ..target.clone()
            };
            match self.create_named(&named, candidate, options).await {
                Err(status) if status.reason == "AlreadyExists" => {}
                outcome => return outcome.map(|written| written.with_earlier_warnings(warnings)),
            }
        }
        Err(Status::generate_name_conflict(
            &resource.group,
            &resource.plural,
            &prefix,
        ))
    }

    async fn create_named(
        &self,
        target: &Target,
        mut object: Value,
        options: &WriteOptions,
    ) -> Result<WriteOutcome, Status> {
        let resource = &target.resource;
        strategy::check_quantities(resource, &object)?;
        let mut requires = Vec::from_iter(self.containing_namespace(target)?);
        requires.extend(self.defining_object(target)?);
        let is_versioned = metadata::text(&object, "resourceVersion")
            .parse::<u64>()
            .is_ok_and(|version| version > 0);
        metadata::prepare_create(&mut object, resource, self.now());
        self.fill_in(resource, &mut object);
        strategy::prepare_create(&self.context(), resource, &mut object);
        self.admit(
            target,
            Part::Main,
            Operation::Create,
            &mut object,
            None,
            options,
        )?;
        let errors = strategy::validate(resource, &object, None, Part::Main);
        if !errors.is_empty() {
            return Err(Status::invalid(
                strategy::of(resource).group_in_errors(resource),
                &resource.kind,
                &target.name,
                &errors,
            ));
        }
        self.check_escalation(resource, &object, None, options)?;
        let warnings = self.check_pod_security(target, Part::Main, &object, None)?;
        if !options.applies {
            strategy::managed_fields::track(
                resource,
                &mut object,
                None,
                options,
                Part::Main,
                self.now(),
            );
        }
        Self::check_nesting(&object, None)?;
        let draft = Self::draft(resource, object)?;
        let key = target.key();
        if options.dry_run {
            if self.store.get(&resource.id, &key).is_some() {
                return Err(Status::already_exists(
                    &resource.group,
                    &resource.plural,
                    &target.name,
                ));
            }
            let object = Arc::new(draft.preview_of_new(key));
            return Ok(WriteOutcome {
                object,
                created: true,
                warnings,
            });
        }
        if is_versioned {
            // kube-apiserver gives no reason either: its storage layer rejects this with an untyped error.
            let message = "resourceVersion should not be set on objects to be created";
            return Err(Status::failure(500, "", message));
        }
        let write = Write {
            resource: resource.id.clone(),
            key,
            expect: Expectation::Absent,
            requires,
            change: Change::Put(draft),
        };
        match self.store.write(write).await {
            Ok(object) => {
                self.after_write(resource);
                Ok(WriteOutcome {
                    object,
                    created: true,
                    warnings,
                })
            }
            Err(WriteError::Conflict { .. }) => Err(Status::already_exists(
                &resource.group,
                &resource.plural,
                &target.name,
            )),
            Err(error) => Err(storage_failure(target, &error)),
        }
    }

    /// The CustomResourceDefinition that must exist before an object of a custom kind can be created.
    fn defining_object(&self, target: &Target) -> Result<Option<(ResourceId, Key)>, Status> {
        let resource = &target.resource;
        if resource.rules != Rules::Custom {
            return Ok(None);
        }
        let id = ResourceId::new(DEFINITIONS.0, DEFINITIONS.1);
        let key = Key::new("", &format!("{}.{}", resource.plural, resource.group));
        let definition = self.store.get(&id, &key);
        if definition.is_none_or(|definition| definition.is_deleting()) {
            return Err(terminating_definition(target));
        }
        Ok(Some((id, key)))
    }

    /// The namespace that must exist before an object can be created in it.
    pub(super) fn containing_namespace(
        &self,
        target: &Target,
    ) -> Result<Option<(ResourceId, Key)>, Status> {
        if !target.resource.is_namespaced() || target.resource.rules == Rules::Namespace {
            return Ok(None);
        }
        let id = ResourceId::new("", "namespaces");
        let key = Key::new("", &target.namespace);
        let namespace = self
            .store
            .get(&id, &key)
            .ok_or_else(|| Status::not_found("", "namespaces", &target.namespace))?;
        if namespace.is_deleting() {
            return Err(terminating_namespace(target));
        }
        Ok(Some((id, key)))
    }
}

//! Applies PodSecurity admission to writes of pods, of objects with a pod template, and of namespaces (whose labels set the
//! policy).

use apimachinery::status::Status;
use pod_security::{
    admission::{self, Subject},
    policy,
};
use serde_json::Value;
use store::{Key, Range, ResourceId};

use super::Api;
use crate::{
    audit,
    registry::Rules,
    target::{Part, Target},
};

/// The paths of pod templates in custom kinds. Kubernetes checks only its own workload kinds; on this server all workload kinds
/// are custom.
const TEMPLATES: [&str; 2] = ["/spec/podTemplate", "/spec/template"];

impl Api {
    /// Rejects an object that violates the policy of its namespace. Otherwise returns warnings for the client.
    pub(super) fn check_pod_security(
        &self,
        target: &Target,
        part: Part,
        object: &Value,
        old: Option<&Value>,
    ) -> Result<Vec<String>, Status> {
        let resource = &target.resource;
        match (resource.rules, part) {
            (Rules::Namespace, Part::Main) => self.check_namespace_labels(target, object, old),
            (Rules::Pod, Part::Main | Part::EphemeralContainers) => {
                let is_checked =
                    old.is_none_or(|old| admission::is_significant(&object["spec"], &old["spec"]));
                if is_checked {
                    self.evaluate(target, Subject::Pod, object)
                } else {
                    Ok(Vec::new())
                }
            }
            (Rules::Custom, Part::Main) => {
                let template = TEMPLATES
                    .iter()
                    .filter_map(|pointer| object.pointer(pointer))
                    .find(|template| template["spec"]["containers"].is_array());
                match template {
                    Some(template) => self.evaluate(target, Subject::Template, template),
                    None => Ok(Vec::new()),
                }
            }
            _ => Ok(Vec::new()),
        }
    }

    fn evaluate(
        &self,
        target: &Target,
        subject: Subject,
        pod: &Value,
    ) -> Result<Vec<String>, Status> {
        let id = ResourceId::new("", "namespaces");
        let Some(namespace) = self.store.get(&id, &Key::new("", &target.namespace)) else {
            return Ok(Vec::new());
        };
        let mut labels = namespace
            .metadata
            .labels
            .iter()
            .flat_map(|labels| labels.keys());
        if !labels.any(|label| label.starts_with(policy::PREFIX)) {
            return Ok(Vec::new());
        }
        let verdict =
            admission::evaluate(&namespace.value(), subject, &pod["metadata"], &pod["spec"]);
        for (name, value) in &verdict.annotations {
            audit::annotate(&format!("{}{name}", policy::PREFIX), value);
        }
        match verdict.refusal {
            Some(refusal) => Err(Status::forbidden("", "pods", &target.name, &refusal)),
            None => Ok(verdict.warnings),
        }
    }

    fn check_namespace_labels(
        &self,
        target: &Target,
        namespace: &Value,
        old: Option<&Value>,
    ) -> Result<Vec<String>, Status> {
        let errors = admission::label_errors(namespace, old);
        if !errors.is_empty() {
            return Err(Status::invalid("", "Namespace", &target.name, &errors));
        }
        let Some(enforced) = old.and_then(|old| admission::newly_enforced(namespace, old)) else {
            return Ok(Vec::new());
        };
        let pods = self.store.list(
            &ResourceId::new("", "pods"),
            &Range::namespace(&target.name),
            None,
        );
        let pods: Vec<Value> = pods
            .map(|snapshot| snapshot.objects.iter().map(|pod| pod.value()).collect())
            .unwrap_or_default();
        Ok(admission::warn_of_pods(&target.name, enforced, &pods))
    }
}

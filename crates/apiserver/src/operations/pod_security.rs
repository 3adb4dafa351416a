//! Asks PodSecurity admission about writes of pods, of what makes pods, and of the namespaces whose labels decide.

use apimachinery::status::Status;
use serde_json::Value;

use super::{Api, Part, Target};
use crate::{
    audit,
    pod_security::{
        admission::{self, Subject},
        policy,
    },
    registry::Rules,
    store::{Key, Range, ResourceId},
};

/// Where kinds that make pods keep the pod. Kubernetes asks only its own kinds; on this server they are custom ones.
const TEMPLATES: [&str; 2] = ["/spec/podTemplate", "/spec/template"];

impl Api {
    /// Refuses what the labels of the namespace forbid; else says what the client should be told.
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
                let is_judged =
                    old.is_none_or(|old| admission::is_significant(&object["spec"], &old["spec"]));
                if is_judged {
                    self.judge(target, Subject::Pod, object)
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
                    Some(template) => self.judge(target, Subject::Template, template),
                    None => Ok(Vec::new()),
                }
            }
            _ => Ok(Vec::new()),
        }
    }

    fn judge(&self, target: &Target, subject: Subject, pod: &Value) -> Result<Vec<String>, Status> {
        let id = ResourceId::new("", "namespaces");
        let Some(namespace) = self.store.get(&id, &Key::new("", &target.namespace)) else {
            return Ok(Vec::new());
        };
        let mut labels = namespace
            .facts
            .labels
            .iter()
            .flat_map(|labels| labels.keys());
        if !labels.any(|label| label.starts_with(policy::PREFIX)) {
            return Ok(Vec::new());
        }
        let verdict = admission::judge(&namespace.value(), subject, &pod["metadata"], &pod["spec"]);
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

//! Events about pods, as `kubectl describe` shows them. Sent behind the work they tell of; losing one loses a line.

#![cfg_attr(not(test), warn(clippy::arithmetic_side_effects))]

use api::events::fitting_note;
use k8s_openapi::api::core::v1::{ObjectReference, Pod};
use kube::Client;
use kube::Resource;
use kube::runtime::events::{Event, EventType, Recorder, Reporter};

/// Whether an event is news or a problem.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Severity {
    Normal,
    Warning,
}

/// Writes events in the background.
#[derive(Clone)]
pub struct EventSink {
    recorder: Recorder,
}

impl std::fmt::Debug for EventSink {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter.write_str("EventSink")
    }
}

impl EventSink {
    pub fn new(client: Client, component: &str, node_name: &str) -> Self {
        let reporter = Reporter {
            controller: component.to_owned(),
            instance: Some(node_name.to_owned()),
        };
        Self {
            recorder: Recorder::new(client, reporter),
        }
    }

    /// Tells of `pod`; `container` narrows it to one of its containers.
    pub fn tell(
        &self,
        pod: &Pod,
        container: Option<&str>,
        severity: Severity,
        reason: impl AsRef<str>,
        note: String,
    ) {
        let reason = reason.as_ref();
        self.tell_doing(reason, pod, container, severity, reason, note);
    }

    /// Reports something about a pod of which only this reference is known.
    pub fn tell_of_pod(
        &self,
        namespace: &str,
        name: &str,
        uid: &str,
        severity: Severity,
        reason: &str,
        note: String,
    ) {
        let subject = ObjectReference {
            api_version: Some("v1".to_owned()),
            kind: Some("Pod".to_owned()),
            namespace: Some(namespace.to_owned()),
            name: Some(name.to_owned()),
            uid: Some(uid.to_owned()),
            ..ObjectReference::default()
        };
        self.publish(subject, severity, reason, reason, note);
    }

    /// Reports something about the node itself.
    pub fn tell_of_node(&self, name: &str, severity: Severity, reason: &str, note: String) {
        // As the kubelet has it: a node is known by its name.
        let subject = ObjectReference {
            api_version: Some("v1".to_owned()),
            kind: Some("Node".to_owned()),
            name: Some(name.to_owned()),
            uid: Some(name.to_owned()),
            ..ObjectReference::default()
        };
        self.publish(subject, severity, reason, reason, note);
    }

    /// Tells what came of doing something. Events of one reason and one such action are counted as one, whatever else they say.
    pub fn tell_doing(
        &self,
        action: &str,
        pod: &Pod,
        container: Option<&str>,
        severity: Severity,
        reason: &str,
        note: String,
    ) {
        let mut subject: ObjectReference = pod.object_ref(&());
        subject.field_path = container.map(|name| field_of(pod, name));
        self.publish(subject, severity, action, reason, note);
    }

    fn publish(
        &self,
        subject: ObjectReference,
        severity: Severity,
        action: &str,
        reason: &str,
        note: String,
    ) {
        let event = Event {
            type_: match severity {
                Severity::Normal => EventType::Normal,
                Severity::Warning => EventType::Warning,
            },
            reason: reason.to_owned(),
            note: Some(fitting_note(note)),
            action: action.to_owned(),
            secondary: None,
        };
        let recorder = self.recorder.clone();
        tokio::spawn(async move {
            if let Err(error) = recorder.publish(&event, &subject).await {
                tracing::debug!(%error, reason = event.reason, "an event was not recorded");
            }
        });
    }
}

/// Where in a pod's specification a container is.
fn field_of(pod: &Pod, container: &str) -> String {
    let spec = pod.spec.as_ref();
    let init = spec.is_some_and(|spec| {
        let mut init = spec.init_containers.iter().flatten();
        init.any(|init| init.name == container)
    });
    let ephemeral = spec.is_some_and(|spec| {
        let mut ephemeral = spec.ephemeral_containers.iter().flatten();
        ephemeral.any(|ephemeral| ephemeral.name == container)
    });
    let list = match (init, ephemeral) {
        (true, _) => "initContainers",
        (_, true) => "ephemeralContainers",
        _ => "containers",
    };
    format!("spec.{list}{{{container}}}")
}

/// The examples of README.md.
#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct ReadmeExamples;

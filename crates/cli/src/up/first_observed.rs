//! Annotates each new claim with the time at which it reached the API, from which its latency is measured.

use std::sync::Arc;

use apiserver::{Admission, AdmissionRequest, Operation, Status};
use k8s_openapi::jiff::Timestamp;
use serde_json::{Value, json};

/// The admission hook that sets the annotation, with its clock.
pub struct StampFirstObserved {
    clock: fn() -> Timestamp,
}

impl StampFirstObserved {
    pub fn hook(clock: fn() -> Timestamp) -> Arc<dyn Admission> {
        Arc::new(Self { clock })
    }
}

impl Admission for StampFirstObserved {
    fn admit(&self, request: &mut AdmissionRequest) -> Result<(), Status> {
        let is_new_claim = request.operation == Operation::Create
            && request.subresource.is_empty()
            && request.gvr.group == api::EXTENSIONS_GROUP
            && request.gvr.resource == "sandboxclaims";
        if is_new_claim && let Some(Value::Object(metadata)) = request.object.get_mut("metadata") {
            let annotations = metadata.entry("annotations").or_insert_with(|| json!({}));
            if let Value::Object(annotations) = annotations {
                annotations.insert(
                    api::labels::WEBHOOK_FIRST_OBSERVED_AT.to_owned(),
                    json!((self.clock)().to_string()),
                );
            }
        }
        Ok(())
    }
}

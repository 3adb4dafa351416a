//! The audit event of one request.

use std::net::IpAddr;

use apimachinery::time;
use http::{StatusCode, header, request::Parts};
use jiff::Timestamp;
use serde_json::{Value, json};

use crate::{auth::User, path::Path, request_info::RequestInfo};

/// The origin of a request. The transport adds it to the request's extensions.
#[derive(Clone, Debug)]
pub struct Origin {
    /// The audit id, which the response carries too (header `Audit-ID`).
    pub audit_id: String,
    /// The client's address.
    pub address: Option<IpAddr>,
    /// The authenticated user, if the request impersonates another user.
    pub sender: Option<User>,
}

/// The audit event of a request that is in progress.
#[derive(Clone, Debug)]
pub struct Record(Value);

fn user(user: &User) -> Value {
    let mut value = json!({"username": user.name, "groups": user.groups});
    if !user.uid.is_empty() {
        value["uid"] = Value::from(user.uid.as_str());
    }
    if !user.extra.is_empty() {
        value["extra"] = json!(user.extra);
    }
    value
}

impl Record {
    /// Starts the event of a request that was just received. `acting` is the effective user, if the request is authenticated.
    pub fn new(parts: &Parts, info: &RequestInfo, acting: Option<&User>, now: Timestamp) -> Self {
        let origin = parts.extensions.get::<Origin>();
        let address = origin.and_then(|origin| origin.address);
        let target = parts
            .uri
            .path_and_query()
            .map_or("/", |target| target.as_str());
        let mut event = json!({
            "kind": "Event", "apiVersion": "audit.k8s.io/v1", "level": "Metadata",
            "auditID": origin.map_or_else(|| uuid::Uuid::new_v4().to_string(), |origin| origin.audit_id.clone()),
            "requestURI": target, "verb": info.attributes.verb,
            // In-process requests have no address.
            "sourceIPs": [address.map_or_else(|| "127.0.0.1".to_owned(), |address| address.to_canonical().to_string())],
            "requestReceivedTimestamp": time::format_micro(now),
            "user": {},
        });
        if let Some(acting) = acting {
            event["user"] = user(acting);
        }
        if let Some(sender) = origin.and_then(|origin| origin.sender.as_ref()) {
            event["impersonatedUser"] = event["user"].take();
            event["user"] = user(sender);
        }
        if let Some(agent) = parts
            .headers
            .get(header::USER_AGENT)
            .and_then(|agent| agent.to_str().ok())
        {
            event["userAgent"] = Value::from(agent);
        }
        if let Path::Resource(found) = &info.path {
            let fields = [
                ("resource", &found.resource),
                ("namespace", &found.namespace),
                ("name", &found.name),
                ("apiGroup", &found.group),
                ("apiVersion", &found.version),
                ("subresource", &found.subresource),
            ];
            for (name, value) in fields {
                if !value.is_empty() {
                    event["objectRef"][name] = Value::from(value.as_str());
                }
            }
        }
        Self(event)
    }

    /// Adds annotations to the event.
    pub fn annotate(&mut self, annotations: super::Annotations) {
        for (name, value) in annotations {
            self.0["annotations"][name] = Value::from(value);
        }
    }

    /// The line of the log at a stage: `ResponseComplete`, or `ResponseStarted` for a watch.
    pub fn line(&self, stage: &str, code: StatusCode, now: Timestamp) -> String {
        let mut event = self.0.clone();
        event["stage"] = Value::from(stage);
        event["stageTimestamp"] = Value::from(time::format_micro(now));
        event["responseStatus"] = json!({"metadata": {}, "code": code.as_u16()});
        if code != StatusCode::UNAUTHORIZED {
            let decision = if code == StatusCode::FORBIDDEN {
                "forbid"
            } else {
                "allow"
            };
            event["annotations"]["authorization.k8s.io/decision"] = Value::from(decision);
        }
        event.to_string()
    }
}

//! `GET /metrics`: the number of answered requests, with the metric name and the labels of kube-apiserver.
//!
//! Only served resources get their own label values. So requests for unknown resources cannot make the table grow without bound.

use std::collections::HashMap;
use std::fmt::Write;
use std::sync::{Arc, Mutex, PoisonError};

use http::{HeaderValue, StatusCode, header, request::Parts};

use crate::{
    body::{self, HttpResponse},
    path::{Path, ResourcePath},
    registry::{Registry, Resource},
    request_info::RequestInfo,
};

const NAME: &str = "apiserver_request_total";

/// The label values of one time series.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
struct Series {
    group: Arc<str>,
    version: Arc<str>,
    resource: Arc<str>,
    subresource: &'static str,
    scope: &'static str,
    verb: &'static str,
    code: u16,
}

/// A request that is being answered.
#[derive(Debug)]
pub struct Request {
    resource: Option<Arc<Resource>>,
    subresource: &'static str,
    scope: &'static str,
    verb: &'static str,
}

impl Request {
    /// Collects the labels that are known before the request is answered.
    pub fn new(registry: &Registry, parts: &Parts, info: &RequestInfo) -> Self {
        let verb = metric_verb(&info.attributes.verb, parts);
        let Path::Resource(path) = &info.path else {
            return Self {
                resource: None,
                subresource: "",
                scope: "",
                verb,
            };
        };
        Self {
            resource: registry.find(&path.group, &path.version, &path.resource),
            subresource: subresource(&path.subresource),
            scope: scope(path),
            verb,
        }
    }
}

/// The requests answered so far.
#[derive(Debug, Default)]
pub struct Requests(Mutex<HashMap<Series, u64>>);

impl Requests {
    /// Counts an answered request.
    pub fn answered(&self, request: Request, code: StatusCode) {
        let empty = || Arc::from("");
        let (group, version, resource) = request.resource.map_or_else(
            || (empty(), empty(), empty()),
            |resource| {
                (
                    resource.group.clone(),
                    resource.version.clone(),
                    resource.plural.clone(),
                )
            },
        );
        let series = Series {
            group,
            version,
            resource,
            subresource: request.subresource,
            scope: request.scope,
            verb: request.verb,
            code: code.as_u16(),
        };
        let mut counts = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        *counts.entry(series).or_default() += 1;
    }

    /// The counts in the Prometheus text format.
    pub fn answer(&self) -> HttpResponse {
        let mut counts: Vec<(Series, u64)> = {
            let counts = self.0.lock().unwrap_or_else(PoisonError::into_inner);
            let counts = counts.iter();
            counts
                .map(|(series, count)| (series.clone(), *count))
                .collect()
        };
        counts.sort_unstable();
        let mut text = format!(
            "# HELP {NAME} Counter of API server requests by verb, group, version, resource, subresource, scope and HTTP response code.\n# TYPE {NAME} counter\n"
        );
        for (series, count) in counts {
            let Series {
                group,
                version,
                resource,
                subresource,
                scope,
                verb,
                code,
            } = series;
            // Writing into a string cannot fail.
            let _ = writeln!(
                text,
                "{NAME}{{code=\"{code}\",component=\"apiserver\",dry_run=\"\",group=\"{group}\",resource=\"{resource}\",\
                 scope=\"{scope}\",subresource=\"{subresource}\",verb=\"{verb}\",version=\"{version}\"}} {count}"
            );
        }
        let mut response = body::text(StatusCode::OK, text);
        response.headers_mut().insert(
            header::CONTENT_TYPE,
            HeaderValue::from_static("text/plain; version=0.0.4; charset=utf-8"),
        );
        response
    }
}

fn metric_verb(verb: &str, parts: &Parts) -> &'static str {
    match verb {
        "get" => "GET",
        "list" => "LIST",
        "watch" => "WATCH",
        "create" | "post" => "POST",
        "update" | "put" => "PUT",
        "patch" if body::media_type(&parts.headers).starts_with("application/apply-patch") => {
            "APPLY"
        }
        "patch" => "PATCH",
        "delete" => "DELETE",
        "deletecollection" => "DELETECOLLECTION",
        _ => "other",
    }
}

fn subresource(name: &str) -> &'static str {
    const KNOWN: [&str; 13] = [
        "",
        "status",
        "scale",
        "finalize",
        "binding",
        "ephemeralcontainers",
        "eviction",
        "token",
        "log",
        "exec",
        "attach",
        "portforward",
        "proxy",
    ];
    KNOWN
        .into_iter()
        .find(|known| *known == name)
        .unwrap_or("other")
}

fn scope(path: &ResourcePath) -> &'static str {
    match (path.name.is_empty(), path.namespace.is_empty()) {
        (false, _) => "resource",
        (true, false) => "namespace",
        (true, true) => "cluster",
    }
}

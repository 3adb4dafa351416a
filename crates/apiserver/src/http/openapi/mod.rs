//! OpenAPI v2 and v3. Documents are built on request. Only their hashes stay in memory: clients use them as `ETag` to check
//! whether their cached copy is still current.

mod builtin;
mod document;
mod gnostic;
mod v2;

use std::{collections::BTreeMap, sync::Arc};

use arc_swap::ArcSwapOption;
use http::{HeaderValue, StatusCode, header, request::Parts};
use serde_json::{Map, Value, json};

use crate::{
    body::{self, HttpResponse},
    path::Query,
    registry::Registry,
};
use apimachinery::status::Status;

/// `Cache-Control` for a document that was requested by its hash.
const FOREVER: &str = "public, immutable, max-age=31536000";

/// The OpenAPI documents of a registry: built on request, with cached hashes.
#[derive(Debug, Default)]
pub struct Documents {
    hashes: ArcSwapOption<Hashes>,
}

/// Maps the path of a document (group and version) to the hash of the document.
#[derive(Debug)]
struct Hashes {
    registry: Arc<Registry>,
    by_path: BTreeMap<String, String>,
}

impl Documents {
    /// Answers a path below `/openapi`; `None` if the path is not an OpenAPI path.
    pub fn answer(&self, registry: &Arc<Registry>, parts: &Parts) -> Option<HttpResponse> {
        let path = parts.uri.path();
        if path == "/openapi/v2" {
            return Some(v2::answer(registry, &parts.headers));
        }
        let rest = path.strip_prefix("/openapi/v3")?.trim_matches('/');
        if rest.is_empty() {
            return Some(body::json(StatusCode::OK, &self.index(registry)));
        }
        Some(self.version(registry, rest, parts))
    }

    fn hashes(&self, registry: &Arc<Registry>) -> Arc<Hashes> {
        if let Some(known) = self.hashes.load_full()
            && Arc::ptr_eq(&known.registry, registry)
        {
            return known;
        }
        let mut by_path = BTreeMap::new();
        for (group, version) in group_versions(registry) {
            let resources = registry.resources(group, version);
            let Some(first) = resources.first() else {
                continue;
            };
            let text = document::document(&resources).to_string();
            by_path.insert(document::root(first), hash(text.as_bytes()));
        }
        let made = Arc::new(Hashes {
            registry: registry.clone(),
            by_path,
        });
        self.hashes.store(Some(made.clone()));
        made
    }

    /// The index of all documents.
    fn index(&self, registry: &Arc<Registry>) -> Value {
        let hashes = self.hashes(registry);
        let paths: Map<String, Value> = hashes
            .by_path
            .iter()
            .map(|(path, hash)| {
                (
                    path.clone(),
                    json!({"serverRelativeURL": location(path, hash)}),
                )
            })
            .collect();
        json!({"paths": paths})
    }

    /// The document of one group and version. A response to a request with the current hash may be cached forever; a request with
    /// an outdated hash is redirected to the current one.
    fn version(&self, registry: &Arc<Registry>, path: &str, parts: &Parts) -> HttpResponse {
        let found = match path.split('/').collect::<Vec<_>>().as_slice() {
            ["api", version] => Some(("", *version)),
            ["apis", group, version] => Some((*group, *version)),
            _ => None,
        };
        let resources = found
            .map(|(group, version)| registry.resources(group, version))
            .unwrap_or_default();
        let hashes = self.hashes(registry);
        let Some(hash) = hashes.by_path.get(path).filter(|_| !resources.is_empty()) else {
            return body::failure(&Status::unknown_path());
        };
        let query = Query::parse(parts.uri.query());
        let asked = query.text("hash");
        if asked.is_some_and(|asked| asked != hash) {
            let mut response = body::text(StatusCode::MOVED_PERMANENTLY, "");
            if let Ok(place) = HeaderValue::from_str(&location(path, hash)) {
                response.headers_mut().insert(header::LOCATION, place);
            }
            return response;
        }
        let mut response = unless_current(parts.headers.get(header::IF_NONE_MATCH), hash, || {
            body::json(StatusCode::OK, &document::document(&resources))
        });
        if asked.is_some() {
            response
                .headers_mut()
                .insert(header::CACHE_CONTROL, HeaderValue::from_static(FOREVER));
        }
        response
    }
}

/// Every served group and version, core first.
fn group_versions(registry: &Registry) -> Vec<(&str, &str)> {
    let core = registry.versions("").into_iter().flatten();
    let mut all: Vec<(&str, &str)> = core.map(|version| ("", &**version)).collect();
    for (group, versions) in registry.groups() {
        all.extend(versions.iter().map(|version| (&**group, &**version)));
    }
    all
}

fn location(path: &str, hash: &str) -> String {
    format!("/openapi/v3/{path}?hash={hash}")
}

fn hash(text: &[u8]) -> String {
    format!("{:08X}", crc32fast::hash(text))
}

/// Returns the document with its `ETag`, or 304 Not Modified if the client has the current version.
fn unless_current(
    known: Option<&HeaderValue>,
    hash: &str,
    document: impl FnOnce() -> HttpResponse,
) -> HttpResponse {
    let tag = format!("\"{hash}\"");
    let is_known = known
        .and_then(|value| value.to_str().ok())
        .is_some_and(|tags| {
            tags.split(',')
                .any(|known| known.trim().trim_start_matches("W/") == tag)
        });
    let mut response = if is_known {
        let mut response = HttpResponse::new(body::full(""));
        *response.status_mut() = StatusCode::NOT_MODIFIED;
        response
    } else {
        document()
    };
    if let Ok(tag) = HeaderValue::from_str(&tag) {
        response.headers_mut().insert(header::ETAG, tag);
    }
    response
}

#[cfg(test)]
mod tests {
    use super::*;
    use http::Request;

    fn ask(
        documents: &Documents,
        registry: &Arc<Registry>,
        path: &str,
        tag: Option<&str>,
    ) -> HttpResponse {
        let mut request = Request::get(path);
        if let Some(tag) = tag {
            request = request.header(header::IF_NONE_MATCH, tag);
        }
        let (parts, ()) = request.body(()).unwrap().into_parts();
        documents.answer(registry, &parts).unwrap()
    }

    #[test]
    fn a_document_is_cacheable_by_its_hash_until_it_changes() {
        let registry = Arc::new(Registry::new(&Registry::default(), std::iter::empty()));
        let documents = Documents::default();
        let index = documents.index(&registry);
        let place = index["paths"]["api/v1"]["serverRelativeURL"]
            .as_str()
            .unwrap();
        let response = ask(&documents, &registry, place, None);
        assert_eq!(response.headers()[header::CACHE_CONTROL], FOREVER);
        let tag = response.headers()[header::ETAG]
            .to_str()
            .unwrap()
            .to_owned();
        let again = ask(&documents, &registry, "/openapi/v3/api/v1", Some(&tag));
        assert_eq!(again.status(), StatusCode::NOT_MODIFIED);
        let stale = ask(&documents, &registry, "/openapi/v3/api/v1?hash=0", None);
        assert_eq!(stale.status(), StatusCode::MOVED_PERMANENTLY);
        assert_eq!(stale.headers()[header::LOCATION], place);
        let missing = ask(&documents, &registry, "/openapi/v3/apis/none/v1", None);
        assert_eq!(missing.status(), StatusCode::NOT_FOUND);
    }
}

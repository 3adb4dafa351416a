//! The REST part of the newer runtime API: `/v1/files/{path}`, `/v1/health` and `/v1/metadata`, disabled unless a port is given. The
//! SDK API's port serves `/v1/files/{path}` as well. GET, HEAD, PUT and DELETE are upstream's API; `?stat=true` and
//! `POST …?rename_to=` are extensions of this runtime.
//! Errors are `{"code", "message"}` with gRPC's names for codes.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Instant;

use bytes::Bytes;
use futures::StreamExt;
use http::{HeaderMap, Method, Request, Response, StatusCode, Uri, header};
use http_body_util::BodyDataStream;
use hyper::body::Incoming;
use serde::Serialize;

use crate::directory_tree::{Entry, Node, Tree};
use crate::files::{self, blocking, kind_name, store};
use crate::http_server::Handler;
use crate::path::{BelowBase, decode_lossy};
use crate::response::{Body, Refusal, empty, json};

/// The prefix of file paths.
pub const PREFIX: &str = "/v1/files/";

#[derive(Debug)]
pub struct RestApi {
    tree: Arc<Tree>,
    started: Instant,
    metadata: BTreeMap<String, String>,
}

#[derive(Serialize)]
struct Listing {
    path: String,
    entries: Vec<ListedEntry>,
}

#[derive(Serialize)]
struct ListedEntry {
    name: String,
    size: u64,
    #[serde(rename = "type")]
    kind: &'static str,
    modified_at: String,
    mode: String,
}

#[derive(Serialize)]
struct Health {
    status: &'static str,
    uptime_seconds: u64,
}

#[derive(Serialize)]
struct Metadata<'a> {
    env: &'a BTreeMap<String, String>,
}

#[derive(Serialize)]
struct Failure<'a> {
    code: &'a str,
    message: &'a str,
}

impl RestApi {
    /// `environment` is that of the process; this module decides which variables `/v1/metadata` shows.
    pub fn new(tree: Arc<Tree>, environment: impl Iterator<Item = (String, String)>) -> Self {
        let metadata = environment
            .filter(|(name, _)| is_public_variable(name))
            .collect();
        Self {
            tree,
            started: Instant::now(),
            metadata,
        }
    }

    async fn route(&self, request: Request<Incoming>) -> Result<Response<Body>, Refusal> {
        let path = request.uri().path().to_owned();
        let reading = matches!(*request.method(), Method::GET | Method::HEAD);
        match path.as_str() {
            "/v1/health" if reading => Ok(json(
                StatusCode::OK,
                &Health {
                    status: "ok",
                    uptime_seconds: self.started.elapsed().as_secs(),
                },
            )),
            "/v1/metadata" if reading => Ok(json(
                StatusCode::OK,
                &Metadata {
                    env: &self.metadata,
                },
            )),
            _ => {
                let encoded = path.strip_prefix(PREFIX);
                let encoded = encoded
                    .ok_or_else(|| Refusal::new(StatusCode::NOT_FOUND, "no such endpoint"))?;
                let target = BelowBase::parse_encoded(self.tree.base(), encoded)?;
                match *request.method() {
                    Method::GET if flag(request.uri(), "stat")? => self.stat(target).await,
                    Method::GET => self.read(target, encoded, request.headers()).await,
                    Method::HEAD => {
                        // A range applies only to GET.
                        let whole = self.read(target, encoded, &HeaderMap::new()).await?;
                        Ok(files::head_of(&whole))
                    }
                    Method::POST => self.rename(target, request.uri()).await,
                    Method::PUT => self.write(target, request).await,
                    Method::DELETE => self.delete(target, request.uri()).await,
                    _ => Err(Refusal::new(
                        StatusCode::METHOD_NOT_ALLOWED,
                        "method not allowed",
                    )),
                }
            }
        }
    }

    async fn read(
        &self,
        path: BelowBase,
        encoded: &str,
        headers: &HeaderMap,
    ) -> Result<Response<Body>, Refusal> {
        let tree = Arc::clone(&self.tree);
        let (opened, entries) = blocking(move || {
            let node = tree.read(&path)?;
            let entries = if matches!(node, Node::Directory) {
                tree.list(&path)?
            } else {
                Vec::new()
            };
            Ok((node, entries))
        })
        .await?;
        match opened {
            Node::File { file, entry } => files::file_response(file, &entry, headers),
            Node::Directory => {
                let path = format!("/{}", decode_lossy(encoded).trim_start_matches('/'));
                Ok(json(
                    StatusCode::OK,
                    &Listing {
                        path,
                        entries: entries.iter().map(listed).collect(),
                    },
                ))
            }
        }
    }

    /// `GET …?stat=true`: the metadata of the path, as an entry of a listing.
    async fn stat(&self, path: BelowBase) -> Result<Response<Body>, Refusal> {
        let tree = Arc::clone(&self.tree);
        let entry = blocking(move || tree.stat(&path)).await?;
        Ok(json(StatusCode::OK, &listed(&entry)))
    }

    /// `POST …?rename_to={path}`
    async fn rename(&self, from: BelowBase, uri: &Uri) -> Result<Response<Body>, Refusal> {
        let to = encoded_query(uri, "rename_to").filter(|to| !to.is_empty());
        let to = to.ok_or_else(|| {
            Refusal::bad_request("rename_to is needed: the path to move the file to")
        })?;
        let to = BelowBase::parse_encoded(self.tree.base(), to)?;
        let tree = Arc::clone(&self.tree);
        blocking(move || tree.rename(&from, &to)).await?;
        Ok(empty(StatusCode::NO_CONTENT))
    }

    async fn write(
        &self,
        path: BelowBase,
        request: Request<Incoming>,
    ) -> Result<Response<Body>, Refusal> {
        let mode = match query(request.uri(), "mode") {
            None => 0o644,
            Some(text) => parse_mode(&text).ok_or_else(|| {
                Refusal::bad_request(format!(
                    "mode {text:?} must be a 0 and three octal digits, such as 0644"
                ))
            })?,
        };
        let content_type = request
            .headers()
            .get(header::CONTENT_TYPE)
            .and_then(|value| value.to_str().ok());
        let boundary = content_type.and_then(|value| multer::parse_boundary(value).ok());
        let tree = Arc::clone(&self.tree);
        let pending = blocking(move || {
            let mut pending = tree.create(&path)?;
            pending.set_mode(mode)?;
            Ok(pending)
        });
        let body = BodyDataStream::new(request.into_body());
        if let Some(boundary) = boundary {
            let mut form = multer::Multipart::new(body, boundary);
            while let Some(field) = form
                .next_field()
                .await
                .map_err(|error| files::malformed(&error))?
            {
                if field.name() == Some("file") {
                    let content =
                        field.map(|piece| piece.map_err(|error| files::malformed(&error)));
                    store(pending.await?, content).await?;
                    return Ok(empty(StatusCode::NO_CONTENT));
                }
            }
            return Err(Refusal::bad_request("the form has no field called file"));
        }
        let content = body.map(|piece: Result<Bytes, _>| {
            piece.map_err(|_| Refusal::bad_request("the request's body cannot be read"))
        });
        store(pending.await?, content).await?;
        Ok(empty(StatusCode::NO_CONTENT))
    }

    async fn delete(&self, path: BelowBase, uri: &Uri) -> Result<Response<Body>, Refusal> {
        let recursive = flag(uri, "recursive")?;
        let tree = Arc::clone(&self.tree);
        blocking(move || {
            if !path.is_base() {
                return tree.remove(&path, recursive);
            }
            // The base directory itself is not removed: it may be a mount. Only its contents can be deleted.
            if !recursive {
                return Err(crate::directory_tree::TreeError::NotEmpty);
            }
            tree.list(&path)?
                .iter()
                .try_for_each(|entry| tree.remove(&path.join(&entry.name), true))
        })
        .await?;
        Ok(empty(StatusCode::NO_CONTENT))
    }
}

impl Handler for RestApi {
    async fn handle(self: Arc<Self>, request: Request<Incoming>) -> Response<Body> {
        self.route(request).await.unwrap_or_else(|refusal| {
            let code = match refusal.status {
                StatusCode::BAD_REQUEST => "INVALID_ARGUMENT",
                StatusCode::FORBIDDEN => "PERMISSION_DENIED",
                StatusCode::NOT_FOUND => "NOT_FOUND",
                StatusCode::CONFLICT => "CONFLICT",
                StatusCode::INSUFFICIENT_STORAGE => "RESOURCE_EXHAUSTED",
                StatusCode::METHOD_NOT_ALLOWED => "UNIMPLEMENTED",
                _ => "INTERNAL",
            };
            json(
                refusal.status,
                &Failure {
                    code,
                    message: &refusal.message,
                },
            )
        })
    }
}

fn listed(entry: &Entry) -> ListedEntry {
    ListedEntry {
        name: entry.name.to_string_lossy().into_owned(),
        size: entry.size,
        kind: kind_name(entry.kind),
        modified_at: timestamp(entry.modified_seconds),
        mode: format!("{:04o}", entry.mode & 0o777),
    }
}

/// Seconds since the Unix epoch as RFC 3339, in UTC.
fn timestamp(seconds: i64) -> String {
    let (days, rest) = (seconds.div_euclid(86_400), seconds.rem_euclid(86_400));
    // Civil date from a day number: years that begin in March put the leap day last.
    let shifted = days + 719_468;
    let era = shifted.div_euclid(146_097);
    let day_of_era = shifted.rem_euclid(146_097);
    let year_of_era =
        (day_of_era - day_of_era / 1460 + day_of_era / 36_524 - day_of_era / 146_096) / 365;
    let day_of_year = day_of_era - (365 * year_of_era + year_of_era / 4 - year_of_era / 100);
    let month_from_march = (5 * day_of_year + 2) / 153;
    let day = day_of_year - (153 * month_from_march + 2) / 5 + 1;
    let month = if month_from_march < 10 {
        month_from_march + 3
    } else {
        month_from_march - 9
    };
    let year = year_of_era + era * 400 + i64::from(month <= 2);
    format!(
        "{year:04}-{month:02}-{day:02}T{:02}:{:02}:{:02}Z",
        rest / 3600,
        rest / 60 % 60,
        rest % 60
    )
}

/// A zero and three octal digits.
fn parse_mode(text: &str) -> Option<u32> {
    let digits = text.strip_prefix('0').filter(|digits| digits.len() == 3)?;
    digits
        .bytes()
        .all(|digit| (b'0'..=b'7').contains(&digit))
        .then(|| u32::from_str_radix(digits, 8).ok())?
}

fn query(uri: &Uri, name: &str) -> Option<String> {
    encoded_query(uri, name).map(decode_lossy)
}

/// A query parameter as it was sent, percent-encoded: a path need not be UTF-8.
fn encoded_query<'u>(uri: &'u Uri, name: &str) -> Option<&'u str> {
    let mut pairs = uri
        .query()?
        .split('&')
        .map(|pair| pair.split_once('=').unwrap_or((pair, "")));
    pairs.find(|(key, _)| *key == name).map(|(_, value)| value)
}

fn flag(uri: &Uri, name: &str) -> Result<bool, Refusal> {
    match query(uri, name).as_deref() {
        None | Some("false" | "0" | "") => Ok(false),
        Some("true" | "1") => Ok(true),
        Some(other) => Err(Refusal::bad_request(format!(
            "{name} {other:?} must be true or false"
        ))),
    }
}

/// Whether `/v1/metadata` shows a variable. Untrusted code can read the metadata: only variables meant for it are shown, and none whose name suggests a credential.
fn is_public_variable(name: &str) -> bool {
    const SUSPECT: [&str; 5] = ["TOKEN", "SECRET", "PASSWORD", "CREDENTIAL", "KEY"];
    let upper = name.to_ascii_uppercase();
    name.starts_with("SANDBOX_") && !SUSPECT.iter().any(|word| upper.contains(word))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn timestamps_follow_the_calendar() {
        let table = [
            (0, "1970-01-01T00:00:00Z"),
            (-1, "1969-12-31T23:59:59Z"),
            (951_782_400, "2000-02-29T00:00:00Z"),
            (1_709_208_000, "2024-02-29T12:00:00Z"),
            (4_107_542_400, "2100-03-01T00:00:00Z"),
        ];
        for (seconds, text) in table {
            assert_eq!(timestamp(seconds), text);
        }
    }

    #[test]
    fn modes_are_a_zero_and_three_octal_digits() {
        assert_eq!(parse_mode("0755"), Some(0o755));
        for wrong in ["755", "0", "0888", "07777", "0+55", ""] {
            assert_eq!(parse_mode(wrong), None, "{wrong}");
        }
    }

    #[test]
    fn metadata_contains_no_credentials() {
        assert!(is_public_variable("SANDBOX_BASE_DIR"));
        assert!(!is_public_variable("SANDBOX_API_TOKEN"));
        assert!(!is_public_variable("HOME"));
    }
}

//! Answers the authentication challenge of a registry, with a password or with a token from the token server that it names.

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use bytes::Bytes;
use http::header::{AUTHORIZATION, CONTENT_TYPE, HeaderMap, HeaderValue, WWW_AUTHENTICATE};
use http::{Request, StatusCode};
use http_body_util::Full;
use serde::Deserialize;

use super::{MANIFEST_BYTES_MAX, RegistryError, Session, host_and_scheme, read};
use crate::credentials::Credential;

const CLIENT: &str = "agent-sandbox";

/// An authentication method that a registry offers.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Challenge {
    Basic,
    Bearer {
        realm: String,
        service: Option<String>,
        scope: Option<String>,
    },
}

/// Parses `WWW-Authenticate`.
pub fn challenges(headers: &HeaderMap) -> Vec<Challenge> {
    headers
        .get_all(WWW_AUTHENTICATE)
        .iter()
        .filter_map(|value| parse(value.to_str().ok()?))
        .collect()
}

fn parse(text: &str) -> Option<Challenge> {
    let (scheme, rest) = text.trim().split_once(' ').unwrap_or((text.trim(), ""));
    if scheme.eq_ignore_ascii_case("basic") {
        return Some(Challenge::Basic);
    }
    if !scheme.eq_ignore_ascii_case("bearer") {
        return None;
    }
    let parameters = parameters(rest);
    let find = |name: &str| {
        parameters
            .iter()
            .find(|(key, _)| key.eq_ignore_ascii_case(name))
            .map(|(_, value)| value.clone())
    };
    Some(Challenge::Bearer {
        realm: find("realm")?,
        service: find("service"),
        scope: find("scope"),
    })
}

/// Parses `key="value", key=value`. A quoted value may contain commas and escaped quotes.
fn parameters(text: &str) -> Vec<(String, String)> {
    let mut found = Vec::new();
    let mut rest = text;
    while let Some((key, after)) = rest.split_once('=') {
        let key = key.trim_matches([',', ' ']).to_owned();
        let (value, remaining) = match after.strip_prefix('"') {
            Some(quoted) => {
                let mut value = String::new();
                let mut characters = quoted.char_indices();
                let mut end = quoted.len();
                while let Some((index, character)) = characters.next() {
                    match character {
                        '"' => {
                            end = index + 1;
                            break;
                        }
                        '\\' => value.extend(characters.next().map(|(_, escaped)| escaped)),
                        other => value.push(other),
                    }
                }
                (value, &quoted[end..])
            }
            None => match after.split_once(',') {
                Some((value, remaining)) => (value.trim().to_owned(), remaining),
                None => (after.trim().to_owned(), ""),
            },
        };
        found.push((key, value));
        rest = remaining;
    }
    found
}

#[derive(Deserialize)]
struct TokenResponse {
    token: Option<String>,
    access_token: Option<String>,
}

impl Session<'_> {
    /// The `Authorization` header for the next request, or `None` if the registry requires a credential that is not configured.
    pub(super) async fn authorize(
        &self,
        challenges: &[Challenge],
    ) -> Result<Option<HeaderValue>, RegistryError> {
        if let Some(Credential::AccessToken(token)) = self.credential {
            return Ok(secret(&format!("Bearer {token}")));
        }
        let bearer = challenges
            .iter()
            .find(|challenge| matches!(challenge, Challenge::Bearer { .. }));
        if let Some(Challenge::Bearer {
            realm,
            service,
            scope,
        }) = bearer
        {
            let token = self
                .token(realm, service.as_deref(), scope.as_deref())
                .await?;
            return Ok(secret(&format!("Bearer {token}")));
        }
        if challenges.contains(&Challenge::Basic) {
            return Ok(self.basic());
        }
        Ok(None)
    }

    fn basic(&self) -> Option<HeaderValue> {
        let Some(Credential::Password { user, password }) = self.credential else {
            return None;
        };
        secret(&format!(
            "Basic {}",
            STANDARD.encode(format!("{user}:{password}"))
        ))
    }

    async fn token(
        &self,
        realm: &str,
        service: Option<&str>,
        scope: Option<&str>,
    ) -> Result<String, RegistryError> {
        match host_and_scheme(realm) {
            Some((scheme, _)) if scheme == "https" => {}
            Some((scheme, host))
                if scheme == "http" && self.registries.allows_plain_http(&host) => {}
            Some(_) => return Err(RegistryError::Plain(realm.to_owned())),
            None => {
                return Err(RegistryError::InvalidResponse {
                    url: realm.to_owned(),
                    problem: "the realm is not a URL of a token server",
                });
            }
        }
        let own_scope = format!("repository:{}:pull", self.reference.repository());
        let mut query: Vec<(&str, &str)> = vec![("scope", scope.unwrap_or(&own_scope))];
        query.extend(service.map(|service| ("service", service)));
        let request = if let Some(Credential::IdentityToken(refresh)) = self.credential {
            query.extend([
                ("grant_type", "refresh_token"),
                ("client_id", CLIENT),
                ("refresh_token", refresh),
            ]);
            Request::post(realm)
                .header(CONTENT_TYPE, "application/x-www-form-urlencoded")
                .body(Full::new(Bytes::from(encode(&query))))
        } else {
            let joint = if realm.contains('?') { '&' } else { '?' };
            let mut request = Request::get(format!("{realm}{joint}{}", encode(&query)));
            if let Some(value) = self.basic() {
                request = request.header(AUTHORIZATION, value);
            }
            request.body(Full::default())
        };
        let request = request.map_err(|_| RegistryError::InvalidResponse {
            url: realm.to_owned(),
            problem: "the realm is not a URL of a token server",
        })?;
        let response = self.registries.send(realm, request).await?;
        match response.status() {
            status if status.is_success() => {}
            StatusCode::UNAUTHORIZED | StatusCode::FORBIDDEN | StatusCode::BAD_REQUEST => {
                return Err(self.denied(self.error_text(realm.to_owned(), response).await));
            }
            status => {
                return Err(RegistryError::Status {
                    url: realm.to_owned(),
                    status,
                    detail: self.error_text(realm.to_owned(), response).await,
                });
            }
        }
        let bytes = read(realm, response.into_body(), MANIFEST_BYTES_MAX).await?;
        let response: Option<TokenResponse> = serde_json::from_slice(&bytes).ok();
        response
            .and_then(|response| response.token.or(response.access_token))
            .filter(|token| !token.is_empty())
            .ok_or_else(|| RegistryError::InvalidResponse {
                url: realm.to_owned(),
                problem: "it contains no token",
            })
    }
}

/// A header value that is marked as sensitive, so that it does not appear in logs.
fn secret(text: &str) -> Option<HeaderValue> {
    let mut value = HeaderValue::from_str(text).ok()?;
    value.set_sensitive(true);
    Some(value)
}

fn encode(query: &[(&str, &str)]) -> String {
    let escape = |text: &str| -> String {
        text.bytes()
            .map(|byte| match byte {
                b'a'..=b'z' | b'A'..=b'Z' | b'0'..=b'9' | b'-' | b'.' | b'_' | b'~' => {
                    char::from(byte).to_string()
                }
                other => format!("%{other:02X}"),
            })
            .collect()
    };
    query
        .iter()
        .map(|(key, value)| format!("{key}={}", escape(value)))
        .collect::<Vec<_>>()
        .join("&")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn challenges_are_read_with_quotes_commas_and_case() {
        let text = r#"bearer realm="https://auth.example/token",service="a \"b\"", scope="repository:x:pull,push""#;
        assert_eq!(
            parse(text),
            Some(Challenge::Bearer {
                realm: "https://auth.example/token".into(),
                service: Some("a \"b\"".into()),
                scope: Some("repository:x:pull,push".into()),
            })
        );
        assert_eq!(parse("Basic realm=\"x\""), Some(Challenge::Basic));
        assert_eq!(parse("Bearer service=x"), None);
        assert_eq!(parse("Negotiate"), None);
        assert_eq!(
            parse("Bearer realm=\"unterminated"),
            Some(Challenge::Bearer {
                realm: "unterminated".into(),
                service: None,
                scope: None,
            })
        );
    }

    #[test]
    fn queries_are_escaped() {
        assert_eq!(encode(&[("scope", "a b&c=ü")]), "scope=a%20b%26c%3D%C3%BC");
    }
}

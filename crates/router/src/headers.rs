//! Decides which headers are forwarded, and which the router sets. Pure.

use std::net::IpAddr;
use std::sync::Arc;

use http::header::{self, HeaderMap, HeaderName, HeaderValue};

use crate::socket_owners::Client;

/// Hop-by-hop headers (RFC 9110, 7.6.1). The codec writes `Transfer-Encoding` itself.
const HOP_BY_HOP: [HeaderName; 6] = [
    header::CONNECTION,
    header::PROXY_AUTHENTICATE,
    header::PROXY_AUTHORIZATION,
    header::TRANSFER_ENCODING,
    HeaderName::from_static("keep-alive"),
    HeaderName::from_static("proxy-connection"),
];
const FORWARDED_FOR: HeaderName = HeaderName::from_static("x-forwarded-for");
const FORWARDED_HOST: HeaderName = HeaderName::from_static("x-forwarded-host");
const FORWARDED_PROTO: HeaderName = HeaderName::from_static("x-forwarded-proto");
/// The header by which a browser reports the relation of the requesting page to the target.
const FETCH_SITE: HeaderName = HeaderName::from_static("sec-fetch-site");
/// Carries a scoped token if `Authorization` is in use for the sandbox itself.
pub const SANDBOX_TOKEN: HeaderName = HeaderName::from_static("x-sandbox-token");
/// Carries a scoped token from a browser, which cannot set headers on navigation.
pub const TOKEN_COOKIE: &str = "sandbox_token";

/// The protocol that the client wants to upgrade to, if any.
pub fn requested_upgrade(headers: &HeaderMap) -> Option<HeaderValue> {
    let asks =
        list(headers, &header::CONNECTION).any(|token| token.eq_ignore_ascii_case("upgrade"));
    if asks {
        headers.get(header::UPGRADE).cloned()
    } else {
        None
    }
}

/// Removes hop-by-hop headers of a request or response, including those of upgrades.
pub fn strip_hop_by_hop(headers: &mut HeaderMap) {
    if headers.contains_key(header::CONNECTION) {
        let named: Vec<HeaderName> = list(headers, &header::CONNECTION)
            .filter_map(|token| token.parse().ok())
            .collect();
        for name in named {
            headers.remove(name);
        }
    }
    for name in &HOP_BY_HOP {
        headers.remove(name);
    }
    headers.remove(header::UPGRADE);
    if headers.contains_key(header::TE) {
        // `TE: trailers` is the only value that is meant for the sandbox.
        let trailers =
            list(headers, &header::TE).any(|token| token.eq_ignore_ascii_case("trailers"));
        headers.remove(header::TE);
        if trailers {
            headers.insert(header::TE, HeaderValue::from_static("trailers"));
        }
    }
}

/// The origin of a connection's requests.
#[derive(Clone, Debug)]
pub struct Origin {
    pub address: IpAddr,
    forwarded_for: HeaderValue,
    forwarded_proto: HeaderValue,
    /// Set if authorization depends on the local user that connects.
    client: Option<Arc<Client>>,
    /// The namespace of the mirror pod for which the connection was port-forwarded.
    tunnel: Option<Arc<str>>,
}

impl Origin {
    pub fn new(address: IpAddr, secure: bool, client: Option<Client>) -> Self {
        let address = address.to_canonical();
        let forwarded_for = HeaderValue::from_str(&address.to_string());
        Self {
            address,
            forwarded_for: forwarded_for.unwrap_or(HeaderValue::from_static("unknown")),
            forwarded_proto: HeaderValue::from_static(if secure { "https" } else { "http" }),
            client: client.map(Arc::new),
            tunnel: None,
        }
    }

    /// The same origin, port-forwarded for a mirror pod of this namespace.
    pub fn through(self, namespace: &str) -> Self {
        Self {
            tunnel: Some(namespace.into()),
            ..self
        }
    }

    /// Whether the connection's user may authorize requests for a namespace. The node connects as root on behalf of accounts that may
    /// forward ports in a namespace (confused deputy): such a connection counts for its own namespace, that of the system for all.
    pub fn counts_for(&self, namespace: &str) -> bool {
        let tunnel = self.tunnel.as_deref();
        tunnel.is_none_or(|from| from == namespace || from == api::SYSTEM_NAMESPACE)
    }

    /// The local user whose process has connected.
    pub fn user(&self) -> Option<u32> {
        self.client.as_ref()?.user()
    }
}

/// Turns a client's headers into those of the request to the sandbox. The client's `Host` becomes `X-Forwarded-Host`;
/// the router's credentials are removed.
pub fn prepare_request(
    headers: &mut HeaderMap,
    origin: &Origin,
    original_host: Option<HeaderValue>,
    host: HeaderValue,
) {
    strip_hop_by_hop(headers);
    headers.remove(header::AUTHORIZATION);
    headers.remove(header::EXPECT);
    headers.remove(SANDBOX_TOKEN);
    if headers.contains_key(header::COOKIE) {
        strip_token_cookie(headers);
    }
    headers.insert(header::HOST, host);
    // `X-Forwarded-*` of the client are not forwarded: the router cannot vouch for them.
    if let Some(original) = original_host {
        headers.insert(FORWARDED_HOST, original);
    } else {
        headers.remove(FORWARDED_HOST);
    }
    headers.insert(FORWARDED_FOR, origin.forwarded_for.clone());
    headers.insert(FORWARDED_PROTO, origin.forwarded_proto.clone());
}

/// Replaces the `Origin` of an upgrade by `Sec-Fetch-Site`. The sandbox would compare the origin with a host that it does not see.
/// Browsers send `Sec-Fetch-Site` with other requests but not with WebSockets, so the router derives it. Call on prepared headers.
pub fn replace_origin(headers: &mut HeaderMap) {
    let Some(origin) = headers.remove(header::ORIGIN) else {
        return;
    };
    if headers.contains_key(FETCH_SITE) {
        return;
    }
    let host = headers.get(FORWARDED_HOST).map(HeaderValue::as_bytes);
    let page = origin.to_str().ok().and_then(|text| text.split_once("://"));
    let is_same = page
        .zip(host)
        .is_some_and(|((_, page), host)| page.as_bytes().eq_ignore_ascii_case(host));
    let site = if is_same { "same-origin" } else { "cross-site" };
    headers.insert(FETCH_SITE, HeaderValue::from_static(site));
}

fn strip_token_cookie(headers: &mut HeaderMap) {
    let is_token = |pair: &str| pair.trim().split('=').next() == Some(TOKEN_COOKIE);
    let carries = list_by(headers, &header::COOKIE, ';').any(is_token);
    if !carries {
        return;
    }
    let remaining: Vec<&str> = list_by(headers, &header::COOKIE, ';')
        .filter(|pair| !is_token(pair))
        .collect();
    let joined = HeaderValue::from_str(&remaining.join("; "));
    headers.remove(header::COOKIE);
    if let Ok(joined) = joined
        && !joined.is_empty()
    {
        headers.insert(header::COOKIE, joined);
    }
}

/// The client's token, from any of the places that may carry it.
pub fn shown_token(headers: &HeaderMap) -> Option<&str> {
    bearer_token(headers)
        .or_else(|| headers.get(SANDBOX_TOKEN)?.to_str().ok())
        .or_else(|| {
            list_by(headers, &header::COOKIE, ';')
                .find_map(|pair| pair.strip_prefix(TOKEN_COOKIE)?.strip_prefix('='))
        })
}

/// The token of an `Authorization: Bearer` header.
pub fn bearer_token(headers: &HeaderMap) -> Option<&str> {
    let value = headers.get(header::AUTHORIZATION)?.to_str().ok()?;
    let (scheme, token) = value.split_once(' ')?;
    scheme
        .eq_ignore_ascii_case("bearer")
        .then(|| token.trim())
        .filter(|token| !token.is_empty())
}

fn list<'h>(headers: &'h HeaderMap, name: &HeaderName) -> impl Iterator<Item = &'h str> {
    list_by(headers, name, ',')
}

fn list_by<'h>(
    headers: &'h HeaderMap,
    name: &HeaderName,
    separator: char,
) -> impl Iterator<Item = &'h str> {
    let values = headers
        .get_all(name)
        .into_iter()
        .filter_map(|value| value.to_str().ok());
    values
        .flat_map(move |value| value.split(separator))
        .map(str::trim)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn headers(pairs: &[(&'static str, &'static str)]) -> HeaderMap {
        pairs
            .iter()
            .map(|(name, value)| {
                (
                    HeaderName::from_static(name),
                    HeaderValue::from_static(value),
                )
            })
            .collect()
    }

    fn prepared(pairs: &[(&'static str, &'static str)]) -> HeaderMap {
        let mut headers = headers(pairs);
        let host = headers.get("host").cloned();
        let origin = Origin::new("::ffff:192.0.2.7".parse().unwrap(), true, None);
        prepare_request(
            &mut headers,
            &origin,
            host,
            HeaderValue::from_static("10.0.0.1:8888"),
        );
        headers
    }

    #[test]
    fn connection_headers_and_credentials_are_not_forwarded() {
        let after = prepared(&[
            ("host", "public.example"),
            ("authorization", "Bearer secret"),
            ("connection", "keep-alive, x-private"),
            ("x-private", "1"),
            ("keep-alive", "timeout=5"),
            ("te", "gzip, trailers"),
            ("transfer-encoding", "chunked"),
            ("upgrade", "websocket"),
            ("expect", "100-continue"),
            ("cookie", "a=1; sandbox_token=secret; b=2"),
            ("x-forwarded-for", "6.6.6.6"),
            ("x-sandbox-id", "abc"),
            ("x-custom", "kept"),
        ]);
        let names: Vec<_> = after.keys().map(HeaderName::as_str).collect();
        for gone in [
            "authorization",
            "connection",
            "x-private",
            "keep-alive",
            "transfer-encoding",
            "upgrade",
            "expect",
        ] {
            assert!(!names.contains(&gone), "{gone}");
        }
        assert_eq!(after["host"], "10.0.0.1:8888");
        assert_eq!(after["x-forwarded-host"], "public.example");
        assert_eq!(after["x-forwarded-for"], "192.0.2.7");
        assert_eq!(after["x-forwarded-proto"], "https");
        assert_eq!(after["te"], "trailers");
        assert_eq!(after["cookie"], "a=1; b=2");
        assert_eq!(after["x-sandbox-id"], "abc");
        assert_eq!(after["x-custom"], "kept");
    }

    #[test]
    fn the_origin_of_an_upgrade_becomes_sec_fetch_site() {
        const HOST: (&str, &str) = ("host", "8888-mine.localhost:8080");
        for (sent, expected) in [
            (vec![HOST], None),
            (
                vec![HOST, ("origin", "http://8888-mine.localhost:8080")],
                Some("same-origin"),
            ),
            (
                vec![HOST, ("origin", "http://8888-Mine.localhost:8080")],
                Some("same-origin"),
            ),
            (
                vec![HOST, ("origin", "http://3000-mine.localhost:8080")],
                Some("cross-site"),
            ),
            (
                vec![HOST, ("origin", "https://evil.example")],
                Some("cross-site"),
            ),
            (vec![HOST, ("origin", "null")], Some("cross-site")),
            (vec![("origin", "http://x")], Some("cross-site")),
            // A header of the browser itself is not changed.
            (
                vec![HOST, ("origin", "null"), ("sec-fetch-site", "none")],
                Some("none"),
            ),
        ] {
            let mut headers = prepared(&sent);
            replace_origin(&mut headers);
            let site = headers.get("sec-fetch-site");
            assert_eq!(
                site.map(HeaderValue::as_bytes),
                expected.map(str::as_bytes),
                "{sent:?}"
            );
            assert!(!headers.contains_key("origin"));
        }
    }

    #[test]
    fn tokens_are_found_where_clients_put_them() {
        assert_eq!(
            shown_token(&headers(&[("authorization", "bearer abc")])),
            Some("abc")
        );
        assert_eq!(
            shown_token(&headers(&[("x-sandbox-token", "abc")])),
            Some("abc")
        );
        assert_eq!(
            shown_token(&headers(&[("cookie", "x=y; sandbox_token=abc")])),
            Some("abc")
        );
        assert_eq!(
            shown_token(&headers(&[("authorization", "Basic abc")])),
            None
        );
    }

    #[test]
    fn an_upgrade_needs_both_headers() {
        assert!(
            requested_upgrade(&headers(&[
                ("connection", "keep-alive, Upgrade"),
                ("upgrade", "websocket")
            ]))
            .is_some()
        );
        assert!(requested_upgrade(&headers(&[("upgrade", "websocket")])).is_none());
        assert!(requested_upgrade(&headers(&[("connection", "upgrade")])).is_none());
    }
}

//! Refuses requests that a page of another site sends through a user's browser (CSRF, DNS rebinding). Pure.
//!
//! A router that finds sandboxes by host name makes them reachable from browsers, and so from every page that such a browser shows:
//! a page of another sandbox, or of any site. Browsers report the origin of a request, and no page can change that report: in `Sec-Fetch-Site`,
//! or where they omit it, as for WebSockets and hosts without TLS, in `Origin`. Other clients seldom send either. A page
//! whose domain resolves to this sandbox's address (DNS rebinding) is same-origin, and is recognised by the name in its `Host`.

use std::net::IpAddr;

use http::{HeaderMap, HeaderValue, Method, header};

/// Whether a page of another site sent the request. Links to a `GET` are allowed, since it changes nothing.
pub fn is_cross_site(method: &Method, headers: &HeaderMap) -> bool {
    let is_of_a_page =
        headers.contains_key("sec-fetch-site") || headers.contains_key(header::ORIGIN);
    let host = headers
        .get(header::HOST)
        .and_then(|host| host.to_str().ok());
    if is_of_a_page && host.is_some_and(is_registrable) {
        return true;
    }
    // No page of another site can send this header, and no page can with a WebSocket.
    if headers.contains_key("x-sandbox-id") {
        return false;
    }
    let value = |name: &str| headers.get(name).map(HeaderValue::as_bytes);
    let is_ours = match (value("sec-fetch-site"), value(header::ORIGIN.as_str())) {
        (Some(site), _) => matches!(site, b"same-origin" | b"none"),
        (None, Some(origin)) => {
            let host = value("x-forwarded-host").or_else(|| value(header::HOST.as_str()));
            host.is_some_and(|host| names(origin, host))
        }
        (None, None) => true,
    };
    let follows_link = matches!(*method, Method::GET | Method::HEAD)
        && value("sec-fetch-mode") == Some(b"navigate");
    !is_ours && !follows_link
}

/// Whether a host name can be registered on the internet. The router and the machine itself address a sandbox by its IP address.
fn is_registrable(host: &str) -> bool {
    let name = host.rsplit_once(':').map_or(host, |(name, _)| name);
    let address = name.trim_start_matches('[').trim_end_matches(']');
    let is_local = address.parse::<IpAddr>().is_ok()
        || !name.contains('.')
        || name.to_ascii_lowercase().ends_with(".localhost");
    !is_local
}

/// Whether an origin is that of a host: `http://host:port` and `host:port`.
fn names(origin: &[u8], host: &[u8]) -> bool {
    let authority = std::str::from_utf8(origin)
        .ok()
        .and_then(|origin| origin.split_once("://"));
    authority.is_some_and(|(_, authority)| authority.as_bytes().eq_ignore_ascii_case(host))
}

#[cfg(test)]
mod tests {
    use super::*;

    type HeaderPair = (&'static str, &'static str);

    fn headers(sent: &[HeaderPair]) -> HeaderMap {
        let pairs = sent.iter().map(|(name, value)| {
            let value = HeaderValue::from_static(value);
            (http::HeaderName::from_static(name), value)
        });
        pairs.collect()
    }

    #[test]
    fn cross_site_requests_are_distinguished_from_clients_links_and_same_origin_pages() {
        let site = |value| ("sec-fetch-site", value);
        let mode = |value| ("sec-fetch-mode", value);
        let (host, forwarded) = (
            ("host", "10.0.0.7:8888"),
            ("x-forwarded-host", "8888-a.lan"),
        );
        let origin = |value| ("origin", value);
        for (method, sent, expected) in [
            (Method::POST, vec![], false),
            (Method::POST, vec![site("none"), mode("navigate")], false),
            (Method::POST, vec![site("same-origin"), mode("cors")], false),
            (Method::POST, vec![site("same-site"), mode("cors")], true),
            (
                Method::POST,
                vec![site("cross-site"), mode("no-cors")],
                true,
            ),
            // A form submission of a page is a navigation, too.
            (
                Method::POST,
                vec![site("cross-site"), mode("navigate")],
                true,
            ),
            (
                Method::GET,
                vec![site("cross-site"), mode("navigate")],
                false,
            ),
            (
                Method::HEAD,
                vec![site("same-site"), mode("navigate")],
                false,
            ),
            (
                Method::GET,
                vec![site("cross-site"), mode("websocket")],
                true,
            ),
            (Method::GET, vec![site("cross-site")], true),
            (Method::GET, vec![site("a-future-value")], true),
            // Programs name the sandbox in a header.
            (
                Method::GET,
                vec![site("cross-site"), ("x-sandbox-id", "a")],
                false,
            ),
            // Without TLS browsers send only the origin.
            (
                Method::POST,
                vec![origin("http://evil.example"), host],
                true,
            ),
            (
                Method::POST,
                vec![origin("http://8888-a.lan"), forwarded, host],
                false,
            ),
            (
                Method::POST,
                vec![origin("http://3000-a.lan"), forwarded, host],
                true,
            ),
            (
                Method::GET,
                vec![origin("http://10.0.0.7:8888"), host],
                false,
            ),
            (Method::GET, vec![origin("null"), host], true),
            (Method::GET, vec![origin("http://x")], true),
        ] {
            let found = is_cross_site(&method, &headers(&sent));
            assert_eq!(found, expected, "{method} {sent:?}");
        }
    }

    #[test]
    fn dns_rebinding_is_recognised_by_the_host_name() {
        const EVIL: [HeaderPair; 2] = [
            ("host", "evil.example:8888"),
            ("origin", "http://evil.example:8888"),
        ];
        for (sent, expected) in [
            (EVIL.to_vec(), true),
            ([&EVIL[..], &[("x-sandbox-id", "a")]].concat(), true),
            (
                [&EVIL[..], &[("x-forwarded-host", EVIL[0].1)]].concat(),
                true,
            ),
            (vec![EVIL[0], ("sec-fetch-site", "same-origin")], true),
            // A host name without an Origin: a proxy forwarded it.
            (vec![EVIL[0]], false),
            (
                vec![
                    ("host", "localhost:8888"),
                    ("origin", "http://localhost:8888"),
                ],
                false,
            ),
            (
                vec![("host", "a.localhost"), ("origin", "http://a.localhost")],
                false,
            ),
            (
                vec![
                    ("host", "[fd00::7]:8888"),
                    ("origin", "http://[fd00::7]:8888"),
                ],
                false,
            ),
        ] {
            let found = is_cross_site(&Method::POST, &headers(&sent));
            assert_eq!(found, expected, "{sent:?}");
        }
    }
}

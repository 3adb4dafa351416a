//! Requests that a page in somebody's browser sends without their knowing. Pure.
//!
//! A router that finds sandboxes by the names of hosts makes them reachable from browsers, and so from every page that such a browser shows:
//! another sandbox's, or a stranger's. Browsers say where a request comes from, and no page can change what they say: by `Sec-Fetch-Site`,
//! or where they keep that to themselves, as for WebSockets and hosts without TLS, by `Origin`. Other clients seldom say either. A page
//! whose own name comes to mean this sandbox's address (DNS rebinding) is of the same origin, and known by that name.

use std::net::IpAddr;

use http::{HeaderMap, HeaderValue, Method, header};

/// Whether a request was sent by a page of somebody else. Links may be followed to anything that `GET` shows, since it changes nothing.
pub fn is_sent_by_another_page(method: &Method, headers: &HeaderMap) -> bool {
    let is_of_a_page =
        headers.contains_key("sec-fetch-site") || headers.contains_key(header::ORIGIN);
    let host = headers
        .get(header::HOST)
        .and_then(|host| host.to_str().ok());
    if is_of_a_page && host.is_some_and(can_be_bought) {
        return true;
    }
    // No page of another site can send this header, and no page at all with a WebSocket.
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

/// Whether a host has a name that anybody can have on the internet. The router and the machine itself call a sandbox by its address.
fn can_be_bought(host: &str) -> bool {
    let name = host.rsplit_once(':').map_or(host, |(name, _)| name);
    let address = name.trim_start_matches('[').trim_end_matches(']');
    let is_nobodys = address.parse::<IpAddr>().is_ok()
        || !name.contains('.')
        || name.to_ascii_lowercase().ends_with(".localhost");
    !is_nobodys
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

    type Said = (&'static str, &'static str);

    fn headers(said: &[Said]) -> HeaderMap {
        let pairs = said.iter().map(|(name, value)| {
            let value = HeaderValue::from_static(value);
            (http::HeaderName::from_static(name), value)
        });
        pairs.collect()
    }

    #[test]
    fn pages_of_others_are_told_from_clients_links_and_pages_of_the_same_origin() {
        let site = |value| ("sec-fetch-site", value);
        let mode = |value| ("sec-fetch-mode", value);
        let (host, forwarded) = (
            ("host", "10.0.0.7:8888"),
            ("x-forwarded-host", "8888-a.lan"),
        );
        let origin = |value| ("origin", value);
        for (method, said, expected) in [
            (Method::POST, vec![], false),
            (Method::POST, vec![site("none"), mode("navigate")], false),
            (Method::POST, vec![site("same-origin"), mode("cors")], false),
            (Method::POST, vec![site("same-site"), mode("cors")], true),
            (
                Method::POST,
                vec![site("cross-site"), mode("no-cors")],
                true,
            ),
            // A form that a page submits navigates, too.
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
            (Method::GET, vec![site("what browsers will say next")], true),
            // Programs name the sandbox in a header.
            (
                Method::GET,
                vec![site("cross-site"), ("x-sandbox-id", "a")],
                false,
            ),
            // Without TLS browsers send the origin alone.
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
            let found = is_sent_by_another_page(&method, &headers(&said));
            assert_eq!(found, expected, "{method} {said:?}");
        }
    }

    #[test]
    fn a_page_whose_name_comes_to_mean_the_sandbox_is_known_by_that_name() {
        const EVIL: [Said; 2] = [
            ("host", "evil.example:8888"),
            ("origin", "http://evil.example:8888"),
        ];
        for (said, expected) in [
            (EVIL.to_vec(), true),
            ([&EVIL[..], &[("x-sandbox-id", "a")]].concat(), true),
            (
                [&EVIL[..], &[("x-forwarded-host", EVIL[0].1)]].concat(),
                true,
            ),
            (vec![EVIL[0], ("sec-fetch-site", "same-origin")], true),
            // A name that no page has: some proxy passed it on.
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
            let found = is_sent_by_another_page(&Method::POST, &headers(&said));
            assert_eq!(found, expected, "{said:?}");
        }
    }
}

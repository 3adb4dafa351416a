//! Protocol negotiation for upgrade requests. It only reads and writes HTTP headers; hyper performs the upgrade.

use axum::body::Body;
use http::header::{
    CONNECTION, SEC_WEBSOCKET_ACCEPT, SEC_WEBSOCKET_KEY, SEC_WEBSOCKET_PROTOCOL,
    SEC_WEBSOCKET_VERSION, UPGRADE,
};
use http::{HeaderMap, HeaderName, HeaderValue, Response, StatusCode};
use tokio_tungstenite::tungstenite::handshake::derive_accept_key;

use crate::spdy;

/// The header for the protocol inside SPDY: a list in order of preference in the request, the chosen one in the response.
pub const STREAM_PROTOCOL: HeaderName = HeaderName::from_static("x-stream-protocol-version");

/// The header that lists the protocols that the server supports.
pub const ACCEPTED_PROTOCOLS: HeaderName =
    HeaderName::from_static("x-accepted-stream-protocol-versions");

#[derive(Debug, thiserror::Error, PartialEq, Eq)]
pub enum Error {
    #[error("unable to upgrade: missing upgrade headers in request")]
    NotAnUpgrade,
    #[error("unable to upgrade: {STREAM_PROTOCOL} is required")]
    NoProtocol,
    #[error(
        "unable to upgrade: unable to negotiate protocol: client supports {client:?}, server accepts {server:?}"
    )]
    NoCommonProtocol {
        client: Vec<String>,
        server: &'static [&'static str],
    },
    #[error("unable to upgrade: not a WebSocket handshake of version 13")]
    WebSocket,
}

impl Error {
    pub fn response(&self) -> Response<Body> {
        let status = match self {
            Self::NoCommonProtocol { .. } => StatusCode::FORBIDDEN,
            Self::NotAnUpgrade | Self::NoProtocol | Self::WebSocket => StatusCode::BAD_REQUEST,
        };
        let mut response = Response::new(Body::from(self.to_string()));
        *response.status_mut() = status;
        if let Self::NoCommonProtocol { server, .. } = self {
            for protocol in *server {
                let protocol = HeaderValue::from_static(protocol);
                response.headers_mut().append(ACCEPTED_PROTOCOLS, protocol);
            }
        }
        response
    }
}

/// The transport and protocol that server and client agreed on.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Upgrade {
    Spdy {
        protocol: &'static str,
    },
    /// `protocol` is `None` if the client named no WebSocket subprotocol.
    WebSocket {
        protocol: Option<&'static str>,
        accept: String,
    },
}

/// The protocols that an endpoint supports inside each transport.
#[derive(Debug, Clone, Copy)]
pub struct Offer {
    pub spdy: &'static [&'static str],
    pub websocket: &'static [&'static str],
}

impl Upgrade {
    /// Chooses the first protocol of the client's list that the server offers.
    pub fn negotiate(headers: &HeaderMap, offer: Offer) -> Result<Self, Error> {
        if !values(headers, &CONNECTION).any(|value| value.eq_ignore_ascii_case("upgrade")) {
            return Err(Error::NotAnUpgrade);
        }
        if wants(headers, "websocket") {
            return Self::negotiate_websocket(headers, offer.websocket);
        }
        if !wants(headers, spdy::UPGRADE_TOKEN) {
            return Err(Error::NotAnUpgrade);
        }
        let client: Vec<&str> = values(headers, &STREAM_PROTOCOL).collect();
        if client.is_empty() {
            return Err(Error::NoProtocol);
        }
        let protocol = choose(&client, offer.spdy)?;
        Ok(Self::Spdy { protocol })
    }

    fn negotiate_websocket(
        headers: &HeaderMap,
        offered: &'static [&'static str],
    ) -> Result<Self, Error> {
        let key = headers.get(SEC_WEBSOCKET_KEY).ok_or(Error::WebSocket)?;
        if headers
            .get(SEC_WEBSOCKET_VERSION)
            .map(HeaderValue::as_bytes)
            != Some(b"13")
        {
            return Err(Error::WebSocket);
        }
        let client: Vec<&str> = values(headers, &SEC_WEBSOCKET_PROTOCOL).collect();
        let protocol = if client.is_empty() {
            None
        } else {
            Some(choose(&client, offered)?)
        };
        Ok(Self::WebSocket {
            protocol,
            accept: derive_accept_key(key.as_bytes()),
        })
    }

    /// The response `101 Switching Protocols`.
    pub fn response(&self) -> Response<Body> {
        let mut response = Response::new(Body::empty());
        *response.status_mut() = StatusCode::SWITCHING_PROTOCOLS;
        let headers = response.headers_mut();
        headers.insert(CONNECTION, HeaderValue::from_static("Upgrade"));
        match self {
            Self::Spdy { protocol } => {
                headers.insert(UPGRADE, HeaderValue::from_static(spdy::UPGRADE_TOKEN));
                headers.insert(STREAM_PROTOCOL, HeaderValue::from_static(protocol));
            }
            Self::WebSocket { protocol, accept } => {
                headers.insert(UPGRADE, HeaderValue::from_static("websocket"));
                let accept = HeaderValue::from_str(accept).expect("base64 is a header value");
                headers.insert(SEC_WEBSOCKET_ACCEPT, accept);
                if let Some(protocol) = protocol {
                    headers.insert(SEC_WEBSOCKET_PROTOCOL, HeaderValue::from_static(protocol));
                }
            }
        }
        response
    }
}

fn wants(headers: &HeaderMap, token: &str) -> bool {
    values(headers, &UPGRADE).any(|value| value.eq_ignore_ascii_case(token))
}

/// The values of a header that may be repeated, comma-separated or both.
fn values<'a>(headers: &'a HeaderMap, name: &HeaderName) -> impl Iterator<Item = &'a str> {
    headers
        .get_all(name)
        .into_iter()
        .filter_map(|value| value.to_str().ok())
        .flat_map(|value| value.split(','))
        .map(str::trim)
        .filter(|value| !value.is_empty())
}

fn choose(client: &[&str], server: &'static [&'static str]) -> Result<&'static str, Error> {
    client
        .iter()
        .find_map(|wanted| server.iter().copied().find(|offered| offered == wanted))
        .ok_or_else(|| Error::NoCommonProtocol {
            client: client.iter().map(ToString::to_string).collect(),
            server,
        })
}

#[cfg(test)]
mod tests {
    use super::*;

    const OFFER: Offer = Offer {
        spdy: &["v4.channel.k8s.io", "channel.k8s.io"],
        websocket: &["v5.channel.k8s.io", "v4.channel.k8s.io"],
    };

    fn headers(pairs: &[(HeaderName, &'static str)]) -> HeaderMap {
        pairs
            .iter()
            .map(|(name, value)| (name.clone(), HeaderValue::from_static(value)))
            .collect::<Vec<_>>()
            .into_iter()
            .fold(HeaderMap::new(), |mut map, (name, value)| {
                map.append(name, value);
                map
            })
    }

    #[test]
    fn the_clients_first_common_protocol_wins() {
        let request = headers(&[
            (CONNECTION, "keep-alive, Upgrade"),
            (UPGRADE, "SPDY/3.1"),
            (STREAM_PROTOCOL, "v9.channel.k8s.io"),
            (STREAM_PROTOCOL, "channel.k8s.io, v4.channel.k8s.io"),
        ]);
        let upgrade = Upgrade::negotiate(&request, OFFER).unwrap();
        assert_eq!(
            upgrade,
            Upgrade::Spdy {
                protocol: "channel.k8s.io"
            }
        );
        let response = upgrade.response();
        assert_eq!(response.status(), StatusCode::SWITCHING_PROTOCOLS);
        assert_eq!(response.headers()[STREAM_PROTOCOL], "channel.k8s.io");
    }

    #[test]
    fn the_websocket_key_is_answered() {
        let request = headers(&[
            (CONNECTION, "Upgrade"),
            (UPGRADE, "websocket"),
            (SEC_WEBSOCKET_VERSION, "13"),
            (SEC_WEBSOCKET_KEY, "dGhlIHNhbXBsZSBub25jZQ=="),
            (SEC_WEBSOCKET_PROTOCOL, "v5.channel.k8s.io"),
        ]);
        let response = Upgrade::negotiate(&request, OFFER).unwrap().response();
        assert_eq!(
            response.headers()[SEC_WEBSOCKET_ACCEPT],
            "s3pPLMBiTxaQ9kYGzzhZRbK+xOo="
        );
        assert_eq!(
            response.headers()[SEC_WEBSOCKET_PROTOCOL],
            "v5.channel.k8s.io"
        );
    }

    #[test]
    fn without_a_common_protocol_the_error_lists_the_servers() {
        let spdy = [(CONNECTION, "Upgrade"), (UPGRADE, "SPDY/3.1")];
        let mut request = headers(&spdy);
        assert_eq!(Upgrade::negotiate(&request, OFFER), Err(Error::NoProtocol));
        request.append(STREAM_PROTOCOL, HeaderValue::from_static("v9"));
        let response = Upgrade::negotiate(&request, OFFER).unwrap_err().response();
        assert_eq!(response.status(), StatusCode::FORBIDDEN);
        assert_eq!(
            response
                .headers()
                .get_all(ACCEPTED_PROTOCOLS)
                .iter()
                .count(),
            2
        );
        let plain = HeaderMap::new();
        assert_eq!(Upgrade::negotiate(&plain, OFFER), Err(Error::NotAnUpgrade));
    }
}

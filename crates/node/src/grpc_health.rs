//! A client of the gRPC health check (`grpc.health.v1.Health/Check`) for probes, over plaintext HTTP/2.
//!
//! Its messages have one field each, so they are encoded here by hand.

use std::net::SocketAddr;

use bytes::Bytes;
use http_body_util::{BodyExt, Full, Limited};
use hyper_util::rt::{TokioExecutor, TokioIo};
use tokio::net::TcpStream;

const SERVING: u8 = 1;
/// The limit of a response, which protects the node's memory. A valid response has a few bytes.
const MOST_BYTES: usize = 4096;

/// Why a health check did not pass.
#[derive(Debug, thiserror::Error)]
pub enum HealthError {
    #[error("the health service refused the request")]
    Refused,
    #[error("service unhealthy (responded with {0:?})")]
    Unhealthy(Option<u8>),
    #[error("reading the answer of the health service")]
    Answer(#[source] Box<dyn std::error::Error + Send + Sync>),
    #[error(transparent)]
    Connection(#[from] std::io::Error),
    #[error(transparent)]
    Http(#[from] hyper::Error),
    #[error(transparent)]
    Request(#[from] http::Error),
}

/// Passes if the service responds with `SERVING`.
pub async fn check(address: SocketAddr, service: &str) -> Result<(), HealthError> {
    let stream = TcpStream::connect(address).await?;
    let (mut sender, connection) =
        hyper::client::conn::http2::handshake(TokioExecutor::new(), TokioIo::new(stream)).await?;
    let connection = tokio::spawn(connection);
    let request = http::Request::post(format!("http://{address}/grpc.health.v1.Health/Check"))
        .header("content-type", "application/grpc")
        .header("te", "trailers")
        .body(Full::new(Bytes::from(request_message(service))))?;
    let answer = async {
        let response = sender.send_request(request).await?;
        let refused = response
            .headers()
            .get("grpc-status")
            .is_some_and(|status| status != "0");
        let body = Limited::new(response.into_body(), MOST_BYTES)
            .collect()
            .await
            .map_err(HealthError::Answer)?;
        let refused = refused
            || body
                .trailers()
                .and_then(|trailers| trailers.get("grpc-status"))
                .is_some_and(|status| status != "0");
        if refused {
            return Err(HealthError::Refused);
        }
        match serving_status(&body.to_bytes()) {
            Some(SERVING) => Ok(()),
            status => Err(HealthError::Unhealthy(status)),
        }
    }
    .await;
    connection.abort();
    answer
}

/// A length-prefixed message whose field 1 is the service's name.
fn request_message(service: &str) -> Vec<u8> {
    let name = &service.as_bytes()[..service.len().min(127)];
    let length = u8::try_from(name.len()).unwrap_or(0);
    let mut message = vec![0, 0, 0, 0, 0];
    if length > 0 {
        message[4] = length + 2;
        message.extend([0x0a, length]);
        message.extend_from_slice(name);
    }
    message
}

/// Field 1 of a length-prefixed response; absent means zero, which is `UNKNOWN`.
fn serving_status(body: &[u8]) -> Option<u8> {
    match body.get(5..)? {
        [] => Some(0),
        [0x08, value, ..] => Some(*value),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn messages_are_framed_as_grpc_frames_them() {
        assert_eq!(request_message(""), [0, 0, 0, 0, 0]);
        assert_eq!(request_message("ab"), [0, 0, 0, 0, 4, 0x0a, 2, b'a', b'b']);
        assert_eq!(serving_status(&[0, 0, 0, 0, 2, 0x08, 1]), Some(1));
        assert_eq!(serving_status(&[0, 0, 0, 0, 0]), Some(0));
        assert_eq!(serving_status(&[0, 0]), None);
    }
}

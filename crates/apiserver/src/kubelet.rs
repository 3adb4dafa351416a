//! The kubelet proxy for `pods/log`, `exec`, `attach` and `portforward`, which the pod's node answers. The server finds the node,
//! removes the client's credentials, presents its own certificate, and then copies bytes in both directions.

use std::{net::IpAddr, sync::Arc, time::Duration};

use apimachinery::{field::FieldError, status::Status};
use bytes::Bytes;
use futures::StreamExt;
use http::{HeaderName, Method, Request, StatusCode, header, request::Parts};
use http_body_util::{BodyExt, Empty, Limited};
use hyper::upgrade::OnUpgrade;
use hyper_util::rt::TokioIo;
use rustls::pki_types::ServerName;
use serde_json::Value;
use store::{Key, ResourceId};
use tokio::net::TcpStream;
use tokio_rustls::TlsConnector;

use crate::{
    body::{self, HttpResponse},
    metadata,
    operations::Api,
    path::Query,
    request_info::Stream,
    target::Target,
};

const DIAL_TIMEOUT: Duration = Duration::from_secs(10);
const DEFAULT_KUBELET_PORT: u16 = 10250;

/// Maximum size of a node's error message that is passed on to the client.
const ERROR_BYTES: usize = 50_000;

/// The TLS configuration for connections to nodes: trusts the server's own certificate authority and has a client certificate of
/// it.
pub type Dialer = Arc<rustls::ClientConfig>;

/// The address of a node's kubelet.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Endpoint {
    node: String,
    host: String,
    port: u16,
}

/// Proxies a request to the node of a pod.
pub async fn proxy(
    api: &Api,
    dialer: &Dialer,
    target: &Target,
    stream: Stream,
    parts: &mut Parts,
) -> Result<HttpResponse, Status> {
    match (stream, &parts.method) {
        (Stream::Log, &Method::GET)
        | (Stream::Exec | Stream::Attach | Stream::PortForward, &(Method::GET | Method::POST)) => {}
        _ => return Err(Status::method_not_allowed()),
    }
    let pod = api.get(target)?.value();
    let query = Query::parse(parts.uri.query());
    let path = kubelet_path(target, stream, &pod, &query)?;
    let endpoint = endpoint_of(api, &pod)?;
    let upgrade = parts.extensions.remove::<OnUpgrade>();
    if stream != Stream::Log && !parts.headers.contains_key(header::UPGRADE) {
        return Err(Status::bad_request("Upgrade request required"));
    }
    let request = forwarded(parts, &endpoint, &path)?;
    let mut response = send(dialer, &endpoint, request).await?;
    if response.status() == StatusCode::SWITCHING_PROTOCOLS {
        let Some(upgrade) = upgrade else {
            return Err(Status::bad_request(
                "this connection cannot be upgraded: use HTTP/1.1 over the network",
            ));
        };
        let node_side = hyper::upgrade::on(&mut response);
        tokio::spawn(async move {
            let (Ok(client), Ok(node)) = tokio::join!(upgrade, node_side) else {
                return;
            };
            let _ =
                tokio::io::copy_bidirectional(&mut TokioIo::new(client), &mut TokioIo::new(node))
                    .await;
        });
        let (head, _) = response.into_parts();
        return Ok(HttpResponse::from_parts(head, body::full(Bytes::new())));
    }
    if !response.status().is_success() {
        return Err(node_error(target, stream, response).await);
    }
    let (mut head, content) = response.into_parts();
    for hop in [header::CONNECTION, header::TRANSFER_ENCODING] {
        head.headers.remove(hop);
    }
    let pieces = content
        .into_data_stream()
        .filter_map(|piece| std::future::ready(piece.ok()));
    Ok(HttpResponse::from_parts(head, body::stream(pieces)))
}

/// Converts a plain-text error of a node to a `Status`.
async fn node_error(
    target: &Target,
    stream: Stream,
    response: http::Response<hyper::body::Incoming>,
) -> Status {
    let code = response.status();
    let message = Limited::new(response.into_body(), ERROR_BYTES)
        .collect()
        .await
        .map_or_else(
            |error| error.to_string(),
            |collected| String::from_utf8_lossy(&collected.to_bytes()).into_owned(),
        );
    match code {
        StatusCode::BAD_REQUEST => Status::bad_request(message),
        StatusCode::NOT_FOUND => {
            let mut status = Status::not_found("", "pods", &target.name);
            status.message = if stream == Stream::Log {
                format!(
                    "the server could not find the requested resource ( pods/log {}): {message}",
                    target.name
                )
            } else {
                message
            };
            status
        }
        StatusCode::TOO_MANY_REQUESTS => Status::failure(429, "TooManyRequests", message),
        _ => Status::internal(format_args!("{message}")),
    }
}

/// The path and the query of a request in the kubelet's API.
fn kubelet_path(
    target: &Target,
    stream: Stream,
    pod: &Value,
    query: &Query,
) -> Result<String, Status> {
    let (namespace, name) = (&target.namespace, &target.name);
    if stream == Stream::PortForward {
        let ports: Vec<String> = query
            .all("ports")
            .chain(query.all("port"))
            .map(|port| format!("port={port}"))
            .collect();
        let separator = if ports.is_empty() { "" } else { "?" };
        return Ok(format!(
            "/portForward/{namespace}/{name}{separator}{}",
            ports.join("&")
        ));
    }
    let container = container_of(target, stream, pod, query.text("container"))?;
    let mut parameters: Vec<String> = Vec::new();
    if stream == Stream::Log {
        for option in [
            "follow",
            "previous",
            "timestamps",
            "sinceSeconds",
            "sinceTime",
            "tailLines",
            "limitBytes",
            "stream",
        ] {
            if let Some(value) = query.text(option) {
                parameters.push(format!("{option}={}", encode(value)));
            }
        }
    } else {
        for (option, kubelet) in [
            ("stdin", "input"),
            ("stdout", "output"),
            ("stderr", "error"),
            ("tty", "tty"),
        ] {
            if query.flag(option) {
                parameters.push(format!("{kubelet}=1"));
            }
        }
        parameters.extend(
            query
                .all("command")
                .map(|word| format!("command={}", encode(word))),
        );
    }
    let root = match stream {
        Stream::Log => "containerLogs",
        Stream::Exec => "exec",
        _ => "attach",
    };
    let separator = if parameters.is_empty() { "" } else { "?" };
    Ok(format!(
        "/{root}/{namespace}/{name}/{container}{separator}{}",
        parameters.join("&")
    ))
}

/// Chooses the container: the named one, the pod's default, or the only one.
fn container_of(
    target: &Target,
    stream: Stream,
    pod: &Value,
    named: Option<&str>,
) -> Result<String, Status> {
    let listed = |list: &str| -> Vec<String> {
        let containers = pod["spec"][list].as_array().into_iter().flatten();
        containers
            .filter_map(|container| container["name"].as_str().map(ToOwned::to_owned))
            .collect()
    };
    let (main, init) = (listed("containers"), listed("initContainers"));
    let Some(named) = named else {
        let default = pod
            .pointer("/metadata/annotations/kubectl.kubernetes.io~1default-container")
            .and_then(Value::as_str);
        return match (default, main.as_slice()) {
            (Some(default), _) if main.iter().any(|name| name == default) => Ok(default.to_owned()),
            (_, [only]) => Ok(only.clone()),
            _ if stream == Stream::Log => Err(Status::bad_request(format!(
                "a container name must be specified for pod {}, choose one of: [{}]",
                target.name,
                init.iter()
                    .chain(&main)
                    .cloned()
                    .collect::<Vec<_>>()
                    .join(" ")
            ))),
            // Like in Kubernetes, commands go to the first container.
            (_, [first, ..]) => Ok(first.clone()),
            (_, []) => Err(Status::bad_request(format!(
                "pod {} has no containers",
                target.name
            ))),
        };
    };
    let known = init
        .iter()
        .chain(&main)
        .chain(&listed("ephemeralContainers"))
        .any(|name| name == named);
    if known {
        Ok(named.to_owned())
    } else {
        Err(Status::bad_request(format!(
            "container {named} is not valid for pod {}",
            target.name
        )))
    }
}

/// Percent-encodes everything but unreserved characters.
fn encode(text: &str) -> String {
    let unreserved =
        |byte: u8| byte.is_ascii_alphanumeric() || matches!(byte, b'-' | b'.' | b'_' | b'~');
    text.bytes()
        .map(|byte| {
            if unreserved(byte) {
                char::from(byte).to_string()
            } else {
                format!("%{byte:02X}")
            }
        })
        .collect()
}

fn endpoint_of(api: &Api, pod: &Value) -> Result<Endpoint, Status> {
    let name = metadata::text(pod, "name");
    let node = pod
        .pointer("/spec/nodeName")
        .and_then(Value::as_str)
        .unwrap_or_default();
    if node.is_empty() {
        return Err(Status::bad_request(format!(
            "pod {name} does not have a host assigned"
        )));
    }
    let object = api
        .store
        .get(&ResourceId::new("", "nodes"), &Key::new("", node))
        .ok_or_else(|| Status::not_found("", "nodes", node))?;
    let status = object.value()["status"].take();
    let addresses: Vec<(&str, &str)> = status["addresses"]
        .as_array()
        .into_iter()
        .flatten()
        .filter_map(|address| Some((address["type"].as_str()?, address["address"].as_str()?)))
        .collect();
    let preferred = ["InternalIP", "Hostname", "InternalDNS", "ExternalIP"];
    let host = preferred.iter().find_map(|kind| {
        addresses
            .iter()
            .find(|(found, _)| found == kind)
            .map(|(_, address)| *address)
    });
    let Some(host) = host else {
        let error = FieldError::required("status.addresses", "the node has no address");
        return Err(Status::service_unavailable(format!(
            "node {node} cannot be reached: {error}"
        )));
    };
    let port = status
        .pointer("/daemonEndpoints/kubeletEndpoint/Port")
        .and_then(Value::as_u64)
        .and_then(|port| u16::try_from(port).ok());
    Ok(Endpoint {
        node: node.to_owned(),
        host: host.to_owned(),
        port: port
            .filter(|port| *port > 0)
            .unwrap_or(DEFAULT_KUBELET_PORT),
    })
}

/// The request that is sent to the node: without the client's credentials.
fn forwarded(
    parts: &Parts,
    endpoint: &Endpoint,
    path: &str,
) -> Result<Request<Empty<Bytes>>, Status> {
    let mut request = Request::builder().method(parts.method.clone()).uri(path);
    let own = [
        header::AUTHORIZATION,
        header::HOST,
        header::COOKIE,
        header::CONTENT_LENGTH,
        HeaderName::from_static("impersonate-user"),
    ];
    for (name, value) in &parts.headers {
        let impersonates = name.as_str().starts_with("impersonate-");
        // WebSocket clients in browsers send their token in the list of subprotocols.
        let holds_token = *name == header::SEC_WEBSOCKET_PROTOCOL
            && value
                .to_str()
                .is_ok_and(|text| text.contains("base64url.bearer.authorization.k8s.io"));
        if own.contains(name) || impersonates || holds_token {
            continue;
        }
        request = request.header(name, value);
    }
    let host = if endpoint.host.contains(':') {
        format!("[{}]:{}", endpoint.host, endpoint.port)
    } else {
        format!("{}:{}", endpoint.host, endpoint.port)
    };
    request
        .header(header::HOST, host)
        .body(Empty::new())
        .map_err(|error| Status::bad_request(error.to_string()))
}

async fn send(
    dialer: &Dialer,
    endpoint: &Endpoint,
    request: Request<Empty<Bytes>>,
) -> Result<http::Response<hyper::body::Incoming>, Status> {
    let failed = |detail: String| {
        Status::internal(format_args!(
            "error dialing backend: node {}: {detail}",
            endpoint.node
        ))
    };
    let connect = async {
        let stream = TcpStream::connect((endpoint.host.as_str(), endpoint.port)).await?;
        stream.set_nodelay(true)?;
        let name = match endpoint.host.parse::<IpAddr>() {
            Ok(address) => ServerName::IpAddress(address.into()),
            Err(_) => ServerName::try_from(endpoint.host.clone()).map_err(std::io::Error::other)?,
        };
        TlsConnector::from(dialer.clone())
            .connect(name, stream)
            .await
    };
    let stream = match tokio::time::timeout(DIAL_TIMEOUT, connect).await {
        Ok(Ok(stream)) => stream,
        Ok(Err(error)) => {
            return Err(failed(format!(
                "dial tcp {}:{}: {error}",
                endpoint.host, endpoint.port
            )));
        }
        Err(_) => {
            return Err(failed(format!(
                "dial tcp {}:{}: i/o timeout",
                endpoint.host, endpoint.port
            )));
        }
    };
    let (mut sender, connection) = hyper::client::conn::http1::handshake(TokioIo::new(stream))
        .await
        .map_err(|error| failed(error.to_string()))?;
    tokio::spawn(connection.with_upgrades());
    sender
        .send_request(request)
        .await
        .map_err(|error| failed(error.to_string()))
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::registry::Registry;

    fn target() -> Target {
        let registry = Registry::new(&Registry::default(), std::iter::empty());
        Target {
            resource: registry.find("", "v1", "pods").unwrap(),
            namespace: "n".into(),
            name: "p".into(),
        }
    }

    #[test]
    fn requests_are_translated_to_the_kubelet_api() {
        let pod = json!({"spec": {"containers": [{"name": "a"}, {"name": "b"}]}});
        let path =
            |stream, query| kubelet_path(&target(), stream, &pod, &Query::parse(Some(query)));
        assert_eq!(
            path(
                Stream::Exec,
                "container=b&command=sh&command=a%20b&stdin=true&stdout=true&tty=false"
            )
            .unwrap(),
            "/exec/n/p/b?input=1&output=1&command=sh&command=a%20b"
        );
        assert_eq!(
            path(Stream::Log, "container=a&follow=true&tailLines=5").unwrap(),
            "/containerLogs/n/p/a?follow=true&tailLines=5"
        );
        assert_eq!(
            path(Stream::PortForward, "ports=8080").unwrap(),
            "/portForward/n/p?port=8080"
        );
        assert!(
            path(Stream::Log, "")
                .unwrap_err()
                .message
                .contains("choose one of: [a b]")
        );
        assert_eq!(path(Stream::Exec, "container=c").unwrap_err().code, 400);
    }
}

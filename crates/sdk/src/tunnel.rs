//! Reaches the router through the Kubernetes API: each connection is a port-forward to a ready pod of the router's service.
//!
//! No local port is opened: the HTTP client's connections *are* the forwarded streams, so no other process on the machine can
//! use the tunnel.

use std::io;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use api::decoding::Decoded;
use futures::future::BoxFuture;
use http::Uri;
use k8s_openapi::api::core::v1::Pod;
use k8s_openapi::api::discovery::v1::EndpointSlice;
use kube::api::ListParams;
use kube::{Api, Client};
use tokio::io::DuplexStream;

use crate::error::ErrorKind;
use crate::transport::{Dialer, Io};

/// The service in front of the router's pods.
pub(crate) const ROUTER_SERVICE: &str = "sandbox-router-svc";
const ROUTER_PORT: u16 = 8080;
/// The host of requests through a tunnel. It is never resolved.
pub(crate) const TUNNEL_URL: &str = "http://sandbox-router-svc";
/// How many bytes of the server's reason for a broken tunnel are shown.
const REASON_BYTES: usize = 256;

#[derive(Clone, Debug, PartialEq, Eq)]
struct RouterPod {
    namespace: String,
    name: String,
}

#[derive(Default)]
struct State {
    pod: Option<RouterPod>,
    /// A stream that was opened to test the tunnel, and serves the first request.
    spare: Option<DuplexStream>,
    /// Why the tunnel broke last; cleared when it works again.
    failure: Option<String>,
}

/// Dials the router through port-forwards.
pub(crate) struct Tunnel {
    client: Client,
    limit: Duration,
    state: Arc<Mutex<State>>,
}

impl std::fmt::Debug for Tunnel {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter.write_str("Tunnel")
    }
}

impl Tunnel {
    pub(crate) fn new(client: Client, limit: Duration) -> Self {
        Self {
            client,
            limit,
            state: Arc::default(),
        }
    }

    /// Finds a router in the first of these namespaces that has one, and opens a first stream to it.
    pub(crate) async fn establish(&self, namespaces: &[String]) -> Result<(), ErrorKind> {
        let establishing = async {
            let pod = self.find(namespaces).await?;
            let stream = self
                .forward(&pod)
                .await
                .map_err(|error| ErrorKind::PortForwardDied {
                    reason: error.to_string(),
                })?;
            let mut state = lock(&self.state);
            state.pod = Some(pod);
            state.spare = Some(stream);
            state.failure = None;
            Ok(())
        };
        let what = "establishing the port-forward to the router";
        let limit = self.limit;
        tokio::time::timeout(limit, establishing)
            .await
            .unwrap_or(Err(ErrorKind::Timeout { what, limit }))
    }

    /// Why the tunnel does not work, if it broke and has not worked since.
    pub(crate) fn failure(&self) -> Option<ErrorKind> {
        let reason = lock(&self.state).failure.clone()?;
        Some(ErrorKind::PortForwardDied { reason })
    }

    async fn find(&self, namespaces: &[String]) -> Result<RouterPod, ErrorKind> {
        let selector = format!("kubernetes.io/service-name={ROUTER_SERVICE}");
        let params = ListParams::default().labels(&selector);
        for namespace in namespaces {
            let api: Api<Decoded<EndpointSlice>> = Api::namespaced(self.client.clone(), namespace);
            let slices = api
                .list(&params)
                .await
                .map_err(|cause| ErrorKind::Kubernetes {
                    operation: "list the router's endpoints",
                    cause,
                })?;
            let slices = slices.items.into_iter();
            let slices: Vec<EndpointSlice> = slices
                .filter_map(|slice| slice.into_result().ok())
                .collect();
            if let Some(pod) = ready_pod(&slices, namespace) {
                return Ok(pod);
            }
        }
        Err(ErrorKind::RouterNotFound {
            service: ROUTER_SERVICE,
            namespaces: namespaces.to_vec(),
        })
    }

    async fn forward(&self, pod: &RouterPod) -> Result<DuplexStream, kube::Error> {
        let api: Api<Pod> = Api::namespaced(self.client.clone(), &pod.namespace);
        let mut forwarder = api.portforward(&pod.name, &[ROUTER_PORT]).await?;
        let stream = forwarder.take_stream(ROUTER_PORT);
        let error = forwarder.take_error(ROUTER_PORT);
        let state = Arc::clone(&self.state);
        tokio::spawn(async move {
            let reported = match error {
                Some(error) => error.await,
                None => None,
            };
            let ended = forwarder.join().await.err().map(|error| error.to_string());
            if let Some(reason) = reported.or(ended) {
                tracing::debug!(%reason, "the port-forward to the router failed");
                lock(&state).failure = Some(shortened(reason));
            }
        });
        stream.ok_or_else(|| kube::Error::Service("the port-forward has no stream".into()))
    }
}

impl Dialer for Tunnel {
    fn dial<'a>(&'a self, _: &'a Uri) -> BoxFuture<'a, io::Result<Box<dyn Io>>> {
        Box::pin(async move {
            let (spare, pod) = {
                let mut state = lock(&self.state);
                (state.spare.take(), state.pod.clone())
            };
            if let Some(stream) = spare {
                return Ok(Box::new(stream) as Box<dyn Io>);
            }
            let pod = pod
                .ok_or_else(|| io::Error::new(io::ErrorKind::NotConnected, "there is no tunnel"))?;
            let forwarded = tokio::time::timeout(self.limit, self.forward(&pod)).await;
            let stream = match forwarded {
                Err(_) => Err(io::Error::from(io::ErrorKind::TimedOut)),
                Ok(result) => result.map_err(io::Error::other),
            };
            match stream {
                Ok(stream) => {
                    lock(&self.state).failure = None;
                    Ok(Box::new(stream) as Box<dyn Io>)
                }
                Err(error) => {
                    lock(&self.state).failure = Some(shortened(error.to_string()));
                    // The pod may have been deleted: find another one for the next attempt.
                    if let Ok(other) = self.find(std::slice::from_ref(&pod.namespace)).await {
                        lock(&self.state).pod = Some(other);
                    }
                    Err(error)
                }
            }
        })
    }
}

fn lock(state: &Mutex<State>) -> std::sync::MutexGuard<'_, State> {
    state.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The first ready endpoint that is a pod.
fn ready_pod(slices: &[EndpointSlice], namespace: &str) -> Option<RouterPod> {
    let endpoints = slices.iter().flat_map(|slice| &slice.endpoints);
    let mut ready = endpoints.filter(|endpoint| {
        // An unknown readiness counts as ready, as the API defines.
        endpoint
            .conditions
            .as_ref()
            .and_then(|conditions| conditions.ready)
            .unwrap_or(true)
    });
    ready.find_map(|endpoint| {
        let target = endpoint.target_ref.as_ref()?;
        if target.kind.as_deref() != Some("Pod") {
            return None;
        }
        Some(RouterPod {
            namespace: target
                .namespace
                .clone()
                .unwrap_or_else(|| namespace.to_owned()),
            name: target.name.clone()?,
        })
    })
}

fn shortened(mut reason: String) -> String {
    let mut end = reason.len().min(REASON_BYTES);
    while !reason.is_char_boundary(end) {
        end -= 1;
    }
    reason.truncate(end);
    reason
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn slice(endpoints: &serde_json::Value) -> EndpointSlice {
        serde_json::from_value(json!({"addressType": "IPv4", "endpoints": endpoints})).unwrap()
    }

    #[test]
    fn the_first_ready_pod_is_used() {
        let slices = [
            slice(&json!(null)),
            slice(&json!([
                {"addresses": ["10.0.0.1"], "conditions": {"ready": false}, "targetRef": {"kind": "Pod", "name": "starting"}},
                {"addresses": ["10.0.0.2"], "conditions": {"ready": true}, "targetRef": {"kind": "Node", "name": "n"}},
                {"addresses": ["10.0.0.3"]},
                {"addresses": ["10.0.0.4"], "targetRef": {"kind": "Pod", "name": "router-1"}},
            ])),
        ];
        let expected = RouterPod {
            namespace: "system".into(),
            name: "router-1".into(),
        };
        assert_eq!(ready_pod(&slices, "system"), Some(expected));
        assert_eq!(ready_pod(&slices[..1], "system"), None);
    }

    #[test]
    fn long_reasons_are_truncated() {
        assert_eq!(shortened("ü".repeat(300)).len(), REASON_BYTES);
        assert_eq!(shortened("short".into()), "short");
    }
}

//! Sends the environment variables of a claim to its sandbox: `POST /init` on port 49983, which the runtime in the sandbox serves.
//!
//! The call is idempotent per token, so it may be repeated if its result is unknown. The planner decides when to repeat it.

use std::collections::BTreeMap;
use std::fmt::Debug;
use std::net::{IpAddr, SocketAddr};
use std::time::Duration;

use api::addresses::is_a_pods;
use futures::FutureExt;
use futures::future::BoxFuture;
use http::{Request, StatusCode, header};
use http_body_util::{BodyExt, Full, Limited};
use hyper::body::Bytes;
use hyper_util::client::legacy::Client;
use hyper_util::client::legacy::connect::HttpConnector;
use hyper_util::rt::TokioExecutor;
use planner::kruise_claim::Initialisation;
use serde::Serialize;

/// Where a sandbox's runtime is initialised.
const PORT: u16 = 49_983;
/// How long one call may take.
const TIMEOUT: Duration = Duration::from_secs(5);
/// How much of a response is read for the error message.
const ANSWER_MAX: usize = 4 * 1024;

/// The body of `POST /init`.
#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Settings<'a> {
    pub env_vars: &'a BTreeMap<String, String>,
    /// The runtime refuses later calls with another token.
    pub access_token: &'a str,
}

/// Initialises the runtime of a sandbox.
pub trait Initialise: Debug + Send + Sync {
    fn initialise<'a>(
        &'a self,
        sandbox: IpAddr,
        settings: &'a Settings<'a>,
    ) -> BoxFuture<'a, Initialisation>;
}

/// Initialises sandboxes over HTTP.
#[derive(Debug)]
pub struct OverHttp {
    client: Client<HttpConnector, Full<Bytes>>,
}

impl Default for OverHttp {
    fn default() -> Self {
        let mut connector = HttpConnector::new();
        connector.set_connect_timeout(Some(TIMEOUT));
        let client = Client::builder(TokioExecutor::new())
            // One call per sandbox: there is nothing to keep a connection for.
            .pool_max_idle_per_host(0)
            .build(connector);
        Self { client }
    }
}

impl Initialise for OverHttp {
    fn initialise<'a>(
        &'a self,
        sandbox: IpAddr,
        settings: &'a Settings<'a>,
    ) -> BoxFuture<'a, Initialisation> {
        // A status that names another address was not written by a node.
        if !is_a_pods(sandbox) {
            let why = format!("its address {sandbox} is not an address that a pod can have");
            return std::future::ready(Initialisation::Refused(why)).boxed();
        }
        self.call(SocketAddr::new(sandbox, PORT), settings).boxed()
    }
}

impl OverHttp {
    async fn call(&self, endpoint: SocketAddr, settings: &Settings<'_>) -> Initialisation {
        match tokio::time::timeout(TIMEOUT, self.post(endpoint, settings)).await {
            Ok(Ok((status, _))) if status.is_success() => Initialisation::Done,
            Ok(Ok((status, message))) => {
                let why = format!("POST /init was answered with {status}: {message}");
                if is_unserved(status) {
                    Initialisation::Unserved(why)
                } else if status.is_client_error() {
                    Initialisation::Refused(why)
                } else {
                    Initialisation::Unanswered(why)
                }
            }
            Ok(Err(error)) => {
                let why = format!(
                    "POST http://{endpoint}/init: {}",
                    root_cause(error.as_ref())
                );
                if is_refused_connection(error.as_ref()) {
                    Initialisation::Unserved(why)
                } else {
                    Initialisation::Unanswered(why)
                }
            }
            Err(_) => {
                let why = format!("POST http://{endpoint}/init was not answered in {TIMEOUT:?}");
                Initialisation::Unanswered(why)
            }
        }
    }

    async fn post(
        &self,
        endpoint: SocketAddr,
        settings: &Settings<'_>,
    ) -> Result<(StatusCode, String), Box<dyn std::error::Error + Send + Sync>> {
        let request = Request::post(format!("http://{endpoint}/init"))
            .header(header::CONTENT_TYPE, "application/json")
            .body(Full::new(Bytes::from(serde_json::to_vec(settings)?)))?;
        let answer = self.client.request(request).await?;
        let status = answer.status();
        let body = Limited::new(answer.into_body(), ANSWER_MAX).collect().await;
        let text = body.map(|body| String::from_utf8_lossy(&body.to_bytes()).trim().to_owned());
        Ok((status, text.unwrap_or_default()))
    }
}

/// Whether the response comes from a server without `/init`.
fn is_unserved(status: StatusCode) -> bool {
    matches!(
        status,
        StatusCode::NOT_FOUND | StatusCode::METHOD_NOT_ALLOWED | StatusCode::NOT_IMPLEMENTED
    )
}

/// Whether nothing listens on the port.
fn is_refused_connection(error: &(dyn std::error::Error + 'static)) -> bool {
    let mut chain = std::iter::once(error).chain(error_chain::causes(error));
    chain.any(|error| {
        let io = error.downcast_ref::<std::io::Error>();
        io.is_some_and(|io| io.kind() == std::io::ErrorKind::ConnectionRefused)
    })
}

fn root_cause(error: &dyn std::error::Error) -> String {
    let last = error_chain::causes(error).last();
    last.map_or_else(|| error.to_string(), ToString::to_string)
}

#[cfg(test)]
mod tests {
    use std::sync::{Arc, Mutex};

    use axum::Json;
    use axum::routing::post;
    use serde_json::{Value, json};

    use super::*;

    /// A runtime that takes the first token and refuses every other.
    async fn runtime() -> (SocketAddr, Arc<Mutex<Vec<Value>>>) {
        let calls = Arc::new(Mutex::new(Vec::new()));
        let seen = Arc::clone(&calls);
        let handler = move |Json(body): Json<Value>| async move {
            let mut seen = seen.lock().unwrap();
            let known = seen
                .first()
                .map(|first: &Value| first["accessToken"].clone());
            if known.is_some_and(|known| known != body["accessToken"]) {
                return (StatusCode::UNAUTHORIZED, "another token");
            }
            seen.push(body);
            (StatusCode::NO_CONTENT, "")
        };
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let routes = axum::Router::new().route("/init", post(handler));
        tokio::spawn(async move { axum::serve(listener, routes).await });
        (address, calls)
    }

    #[tokio::test]
    async fn the_variables_and_the_token_arrive_and_another_token_is_a_refusal() {
        let (endpoint, calls) = runtime().await;
        let client = OverHttp::default();
        let env_vars = BTreeMap::from([("API_KEY".to_owned(), "sk-1".to_owned())]);
        let settings = |access_token| Settings {
            env_vars: &env_vars,
            access_token,
        };
        for _ in 0..2 {
            let outcome = client.call(endpoint, &settings("one")).await;
            assert_eq!(outcome, Initialisation::Done);
        }
        let expected = json!({ "envVars": { "API_KEY": "sk-1" }, "accessToken": "one" });
        assert_eq!(*calls.lock().unwrap(), [expected.clone(), expected]);
        let outcome = client.call(endpoint, &settings("two")).await;
        let Initialisation::Refused(why) = outcome else {
            panic!("{outcome:?}");
        };
        assert!(
            why.contains("401") && why.contains("another token"),
            "{why}"
        );
    }

    #[tokio::test]
    async fn a_port_without_a_listener_and_a_server_without_the_path_serve_no_init() {
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let endpoint = listener.local_addr().unwrap();
        drop(listener);
        let settings = Settings {
            env_vars: &BTreeMap::new(),
            access_token: "t",
        };
        let outcome = OverHttp::default().call(endpoint, &settings).await;
        assert!(
            matches!(outcome, Initialisation::Unserved(_)),
            "{outcome:?}"
        );
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let endpoint = listener.local_addr().unwrap();
        tokio::spawn(async move { axum::serve(listener, axum::Router::new()).await });
        let outcome = OverHttp::default().call(endpoint, &settings).await;
        assert!(
            matches!(outcome, Initialisation::Unserved(_)),
            "{outcome:?}"
        );
    }

    #[tokio::test]
    async fn an_address_that_is_no_pods_is_never_called() {
        for address in [
            "127.0.0.1",
            "169.254.169.254",
            "::1",
            "::ffff:127.0.0.1",
            "fe80::1",
            "0.0.0.0",
        ] {
            let settings = Settings {
                env_vars: &BTreeMap::new(),
                access_token: "t",
            };
            let outcome = OverHttp::default()
                .initialise(address.parse().unwrap(), &settings)
                .await;
            assert!(
                matches!(outcome, Initialisation::Refused(_)),
                "{address}: {outcome:?}"
            );
        }
    }
}

//! The router with a Kubernetes API: what a watch makes routable, and how the router behaves without one. The API is a small
//! server that lists and streams exactly the objects that a test gives it.
#![allow(clippy::unwrap_used, reason = "a failed unwrap fails the test")]

mod support;

use std::convert::Infallible;
use std::net::SocketAddr;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use bytes::Bytes;
use futures::StreamExt;
use http::{Request, Response, StatusCode};
use http_body_util::combinators::UnsyncBoxBody;
use http_body_util::{BodyExt, Full, StreamBody};
use hyper::body::{Frame, Incoming};
use hyper::service::service_fn;
use hyper_util::rt::TokioIo;
use router::{AuthorizationMode, Config, ReviewCache, Router};
use serde_json::{Value, json};
use support::{body, echo, own_address, status, wait_for};
use tokio::net::TcpListener;
use tokio::sync::mpsc;
use tokio_util::sync::CancellationToken;

type Answer = Response<UnsyncBoxBody<Bytes, Infallible>>;

/// The objects and watchers of the API.
#[derive(Default)]
struct Api {
    sandboxes: Mutex<Vec<Value>>,
    sandbox_watchers: Mutex<Vec<mpsc::UnboundedSender<Bytes>>>,
    pod_watchers: Mutex<Vec<mpsc::UnboundedSender<Bytes>>>,
    claim_watchers: Mutex<Vec<mpsc::UnboundedSender<Bytes>>>,
    forbidden: std::sync::atomic::AtomicBool,
    reviews: AtomicUsize,
}

impl Api {
    async fn start() -> (Arc<Self>, kube::Client) {
        let api = Arc::new(Self::default());
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let serving = Arc::clone(&api);
        tokio::spawn(async move {
            while let Ok((stream, _)) = listener.accept().await {
                let api = Arc::clone(&serving);
                let service = service_fn(move |request| {
                    let api = Arc::clone(&api);
                    async move { Ok::<_, Infallible>(api.answer(request).await) }
                });
                tokio::spawn(
                    hyper::server::conn::http1::Builder::new()
                        .serve_connection(TokioIo::new(stream), service),
                );
            }
        });
        let config = kube::Config::new(format!("http://{address}").parse().unwrap());
        (api, kube::Client::try_from(config).unwrap())
    }

    async fn answer(&self, request: Request<Incoming>) -> Answer {
        let path = request.uri().path().to_owned();
        let watching = request
            .uri()
            .query()
            .unwrap_or_default()
            .contains("watch=true");
        if self.forbidden.load(Ordering::SeqCst) {
            let refusal = json!({"kind": "Status", "apiVersion": "v1", "status": "Failure", "reason": "Forbidden",
                "message": "sandboxes is forbidden", "code": 403});
            return reply(StatusCode::FORBIDDEN, &refusal);
        }
        match path.as_str() {
            "/apis/agents.x-k8s.io/v1beta1/sandboxes" if watching => stream(&self.sandbox_watchers),
            "/apis/agents.x-k8s.io/v1beta1/sandboxes" => {
                let items = self.sandboxes.lock().unwrap().clone();
                reply(
                    StatusCode::OK,
                    &json!({"apiVersion": "agents.x-k8s.io/v1beta1", "kind": "SandboxList",
                    "metadata": {"resourceVersion": "1"}, "items": items}),
                )
            }
            "/apis/extensions.agents.x-k8s.io/v1beta1/sandboxclaims" if watching => {
                stream(&self.claim_watchers)
            }
            "/apis/extensions.agents.x-k8s.io/v1beta1/sandboxclaims" => reply(
                StatusCode::OK,
                &json!({"apiVersion": "extensions.agents.x-k8s.io/v1beta1", "kind": "SandboxClaimList",
                    "metadata": {"resourceVersion": "1"}, "items": []}),
            ),
            "/api/v1/pods" if watching => stream(&self.pod_watchers),
            "/api/v1/pods" => reply(
                StatusCode::OK,
                &json!({"apiVersion": "v1", "kind": "PodList", "metadata": {"resourceVersion": "1"}, "items": []}),
            ),
            "/apis/authentication.k8s.io/v1/tokenreviews" => {
                self.reviews.fetch_add(1, Ordering::SeqCst);
                let mut review: Value = serde_json::from_slice(
                    &request.into_body().collect().await.unwrap().to_bytes(),
                )
                .unwrap();
                review["status"] = match review["spec"]["token"].as_str() {
                    Some("good") => json!({"authenticated": true}),
                    Some("good-for-the-router") => {
                        json!({"authenticated": true, "audiences": review["spec"]["audiences"]})
                    }
                    _ => json!({"authenticated": false}),
                };
                reply(StatusCode::CREATED, &review)
            }
            _ => reply(
                StatusCode::NOT_FOUND,
                &json!({"kind": "Status", "status": "Failure", "code": 404}),
            ),
        }
    }

    fn send_event(watchers: &Mutex<Vec<mpsc::UnboundedSender<Bytes>>>, kind: &str, object: &Value) {
        let line = Bytes::from(format!("{}\n", json!({"type": kind, "object": object})));
        watchers
            .lock()
            .unwrap()
            .retain(|watcher| watcher.send(line.clone()).is_ok());
    }

    fn sandbox_event(&self, kind: &str, object: &Value) {
        Self::send_event(&self.sandbox_watchers, kind, object);
    }

    /// Sends an event: the claim `mine` with this UID is bound to a sandbox.
    fn claim_event(&self, kind: &str, uid: &str, sandbox: Option<&str>) {
        let mut claim = json!({
            "apiVersion": "extensions.agents.x-k8s.io/v1beta1", "kind": "SandboxClaim",
            "metadata": {"name": "mine", "namespace": "default", "uid": uid, "resourceVersion": "9"},
            "spec": {"sandboxTemplateRef": {"name": "t"}},
        });
        if let Some(sandbox) = sandbox {
            claim["status"] = json!({"sandbox": {"name": sandbox}});
        }
        Self::send_event(&self.claim_watchers, kind, &claim);
    }
}

fn reply(status: StatusCode, value: &Value) -> Answer {
    let mut response = Response::new(Full::new(Bytes::from(value.to_string())).boxed_unsync());
    *response.status_mut() = status;
    response
        .headers_mut()
        .insert("content-type", "application/json".parse().unwrap());
    response
}

fn stream(watchers: &Mutex<Vec<mpsc::UnboundedSender<Bytes>>>) -> Answer {
    let (sender, receiver) = mpsc::unbounded_channel();
    watchers.lock().unwrap().push(sender);
    let frames = futures::stream::unfold(receiver, |mut receiver| async move {
        receiver
            .recv()
            .await
            .map(|line| (Ok(Frame::data(line)), receiver))
    });
    let mut response = Response::new(BodyExt::boxed_unsync(StreamBody::new(frames.boxed())));
    response
        .headers_mut()
        .insert("content-type", "application/json".parse().unwrap());
    response
}

fn sandbox(version: u32, change: impl FnOnce(&mut Value)) -> Value {
    let mut object = json!({
        "apiVersion": "agents.x-k8s.io/v1beta1", "kind": "Sandbox",
        "metadata": {"name": "abc", "namespace": "default", "uid": "u1", "resourceVersion": version.to_string(), "labels": {}},
        "spec": {"podTemplate": {"spec": {"containers": []}}, "replicas": 1},
        "status": {"podIPs": [own_address()], "conditions": []}
    });
    change(&mut object);
    object
}

struct Running {
    router: Router,
    address: SocketAddr,
    stop: CancellationToken,
}

impl Running {
    async fn start(client: kube::Client, authorization: AuthorizationMode) -> Self {
        Self::start_with_resolve_wait(client, authorization, Duration::from_millis(50)).await
    }

    async fn start_with_resolve_wait(
        client: kube::Client,
        authorization: AuthorizationMode,
        resolve_wait: Duration,
    ) -> Self {
        let config = Config {
            resolve_wait,
            dial_retries: 0,
            authorization,
            ..Config::default()
        };
        let router = Router::new(config, Some(client)).unwrap();
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let stop = CancellationToken::new();
        let (serving, shutdown) = (router.clone(), stop.clone());
        tokio::spawn(async move { serving.serve(listener, shutdown).await });
        Self {
            router,
            address,
            stop,
        }
    }

    async fn get(&self, port: u16, more: &str) -> String {
        self.get_from("abc", port, more).await
    }

    async fn get_from(&self, name: &str, port: u16, more: &str) -> String {
        use tokio::io::AsyncWriteExt;
        let mut stream = tokio::net::TcpStream::connect(self.address).await.unwrap();
        let request = format!(
            "GET / HTTP/1.1\r\nHost: x\r\nConnection: close\r\nX-Sandbox-ID: {name}\r\nX-Sandbox-Port: {port}\r\n{more}\r\n"
        );
        stream.write_all(request.as_bytes()).await.unwrap();
        String::from_utf8_lossy(&support::read_all(&mut stream).await).into_owned()
    }

    async fn until(&self, port: u16, expected: u16) -> String {
        self.until_from("abc", port, expected).await
    }

    async fn until_from(&self, name: &str, port: u16, expected: u16) -> String {
        let deadline = tokio::time::Instant::now() + support::DEADLINE;
        loop {
            let answer = self.get_from(name, port, "").await;
            if status(&answer) == expected {
                return answer;
            }
            assert!(
                tokio::time::Instant::now() < deadline,
                "wanted {expected}, still get {answer}"
            );
        }
    }
}

/// An echo server on this machine's own address.
async fn echo_on_own_address() -> u16 {
    let inner = echo().await;
    let listener = TcpListener::bind((own_address(), 0)).await.unwrap();
    let port = listener.local_addr().unwrap().port();
    tokio::spawn(async move {
        while let Ok((mut client, _)) = listener.accept().await {
            tokio::spawn(async move {
                let mut server = tokio::net::TcpStream::connect(("127.0.0.1", inner))
                    .await
                    .unwrap();
                let _ = tokio::io::copy_bidirectional(&mut client, &mut server).await;
            });
        }
    });
    port
}

#[tokio::test]
async fn a_sandbox_is_routed_as_its_state_allows() {
    let (api, client) = Api::start().await;
    let running = Running::start(client, AuthorizationMode::None).await;
    let port = echo_on_own_address().await;
    wait_for("the watches", || {
        !api.sandbox_watchers.lock().unwrap().is_empty()
            && !api.pod_watchers.lock().unwrap().is_empty()
    })
    .await;
    assert_eq!(status(&running.get(port, "").await), 404);
    api.sandbox_event(
        "ADDED",
        &sandbox(2, |object| {
            object["metadata"]["labels"]["agents.x-k8s.io/warm-pool-sandbox"] = json!("pool");
        }),
    );
    wait_for("the pool's sandbox", || {
        running.router.registry().len() == 1
    })
    .await;
    assert_eq!(
        status(&running.get(port, "").await),
        404,
        "unclaimed sandboxes are not routable"
    );
    api.sandbox_event("MODIFIED", &sandbox(3, |_| {}));
    running.until(port, 200).await;
    api.sandbox_event(
        "MODIFIED",
        &sandbox(4, |object| object["spec"]["replicas"] = json!(0)),
    );
    let suspended = running.until(port, 503).await;
    assert!(
        body(&suspended).contains("suspended") && body(&suspended).contains("Resume"),
        "{suspended}"
    );
    api.sandbox_event("MODIFIED", &sandbox(5, |_| {}));
    running.until(port, 200).await;
    api.sandbox_event("MODIFIED", &sandbox(6, |object| {
        object["status"] = json!({"podIPs": [], "conditions": [{"type": "Ready", "status": "False", "reason": "DependenciesNotReady",
            "message": "Pod exists with phase: Pending", "lastTransitionTime": "2026-01-01T00:00:00Z"}]});
    }));
    let starting = running.until(port, 503).await;
    assert!(
        body(&starting).contains("Pod exists with phase: Pending"),
        "{starting}"
    );
    api.sandbox_event("DELETED", &sandbox(7, |_| {}));
    running.until(port, 404).await;
    running.stop.cancel();
}

#[tokio::test]
async fn the_address_of_an_ended_pod_is_removed_at_once() {
    let (api, client) = Api::start().await;
    api.sandboxes.lock().unwrap().push(sandbox(1, |_| {}));
    let running = Running::start(client, AuthorizationMode::None).await;
    let port = echo_on_own_address().await;
    running.until(port, 200).await;
    wait_for("the watch on pods", || {
        !api.pod_watchers.lock().unwrap().is_empty()
    })
    .await;
    let pod = json!({
        "apiVersion": "v1", "kind": "Pod",
        "metadata": {"name": "abc", "namespace": "default", "uid": "p1", "resourceVersion": "9",
            "ownerReferences": [{"apiVersion": "agents.x-k8s.io/v1beta1", "kind": "Sandbox", "name": "abc", "uid": "u1"}]},
        "spec": {}, "status": {"phase": "Running", "podIPs": [{"ip": own_address()}]}
    });
    Api::send_event(&api.pod_watchers, "DELETED", &pod);
    let answer = running.until(port, 503).await;
    assert!(body(&answer).contains("pod has ended"), "{answer}");
    Api::send_event(&api.pod_watchers, "ADDED", &pod);
    running.until(port, 200).await;
    running.stop.cancel();
}

#[tokio::test]
async fn without_permission_to_watch_names_go_to_dns() {
    let (api, client) = Api::start().await;
    api.forbidden.store(true, Ordering::SeqCst);
    let running = Running::start(client, AuthorizationMode::None).await;
    // There is no such name, so DNS mode shows as a failure to connect rather than as an unknown sandbox.
    let answer = running.until(80, 502).await;
    assert!(
        body(&answer).contains("Could not connect to the backend sandbox: abc"),
        "{answer}"
    );
    assert!(
        running.router.is_ready(),
        "names are resolved by DNS, so the router is ready"
    );
    api.sandboxes.lock().unwrap().push(sandbox(1, |_| {}));
    api.forbidden.store(false, Ordering::SeqCst);
    running.until(echo_on_own_address().await, 200).await;
    assert!(running.router.is_ready());
    running.stop.cancel();
}

#[tokio::test]
async fn a_router_without_a_list_of_sandboxes_is_not_ready() {
    // Nothing listens there.
    let config = kube::Config::new("http://127.0.0.1:1".parse().unwrap());
    let client = kube::Client::try_from(config).unwrap();
    let running = Running::start(client, AuthorizationMode::None).await;
    assert_eq!(status(&running.get(80, "").await), 404);
    assert!(!running.router.is_ready());
    running.stop.cancel();
}

#[tokio::test]
async fn a_broken_watch_and_its_recovery_are_reported() {
    let (api, client) = Api::start().await;
    api.sandboxes.lock().unwrap().push(sandbox(1, |_| {}));
    let running = Running::start(client, AuthorizationMode::None).await;
    let in_step = |expected: u8| {
        let line = format!("agent_sandbox_router_watch_synced {expected}");
        running
            .router
            .render_metrics()
            .lines()
            .any(|found| found == line)
    };
    wait_for("the list", || in_step(1)).await;
    wait_for("the watch", || {
        !api.sandbox_watchers.lock().unwrap().is_empty()
    })
    .await;
    let break_off = || {
        api.forbidden.store(true, Ordering::SeqCst);
        api.sandbox_watchers.lock().unwrap().clear();
    };
    break_off();
    wait_for("the broken watch to be reported", || in_step(0)).await;
    assert!(
        running.router.is_ready(),
        "listed sandboxes are still routed"
    );
    api.forbidden.store(false, Ordering::SeqCst);
    wait_for("the resumed watch to be reported, without an event", || {
        in_step(1)
    })
    .await;
    break_off();
    wait_for("the second break to be reported", || in_step(0)).await;
    running.stop.cancel();
}

#[tokio::test]
async fn reviewed_tokens_are_accepted_and_cached() {
    let (api, client) = Api::start().await;
    api.sandboxes.lock().unwrap().push(sandbox(1, |_| {}));
    let running = Running::start(
        client,
        AuthorizationMode::TokenReview {
            audiences: Vec::new(),
            cache: ReviewCache::default(),
        },
    )
    .await;
    let port = echo_on_own_address().await;
    wait_for("the list", || running.router.is_ready()).await;
    assert_eq!(status(&running.get(port, "").await), 401);
    assert_eq!(
        status(&running.get(port, "Authorization: Bearer bad\r\n").await),
        401
    );
    for _ in 0..5 {
        let answer = running.get(port, "Authorization: Bearer good\r\n").await;
        assert_eq!(status(&answer), 200);
        assert!(
            !body(&answer).contains("good"),
            "the token is not forwarded to the sandbox"
        );
    }
    assert_eq!(api.reviews.load(Ordering::SeqCst), 2, "one for each token");
    api.forbidden.store(true, Ordering::SeqCst);
    assert_eq!(
        status(&running.get(port, "Authorization: Bearer another\r\n").await),
        503
    );
    running.stop.cancel();
}

#[tokio::test]
async fn a_token_for_another_audience_is_refused() {
    let (api, client) = Api::start().await;
    api.sandboxes.lock().unwrap().push(sandbox(1, |_| {}));
    let running = Running::start(
        client,
        AuthorizationMode::TokenReview {
            audiences: vec!["sandbox-router".into()],
            cache: ReviewCache::default(),
        },
    )
    .await;
    let port = echo_on_own_address().await;
    wait_for("the list", || running.router.is_ready()).await;
    // The API knows the bearer of `good`, and reports that the token has no particular audience.
    for (token, expected) in [("good", 401), ("good-for-the-router", 200)] {
        let answer = running
            .get(port, &format!("Authorization: Bearer {token}\r\n"))
            .await;
        assert_eq!(status(&answer), expected, "{token}");
    }
    running.stop.cancel();
}

#[tokio::test]
async fn a_sandbox_that_appears_in_time_is_waited_for() {
    let (api, client) = Api::start().await;
    let running =
        Running::start_with_resolve_wait(client, AuthorizationMode::None, support::DEADLINE).await;
    let port = echo_on_own_address().await;
    wait_for("the watch", || {
        !api.sandbox_watchers.lock().unwrap().is_empty()
    })
    .await;
    let metrics = Arc::clone(running.router.metrics());
    let appearing = async {
        wait_for("the request", || metrics.active_requests() == 1).await;
        api.sandbox_event("ADDED", &sandbox(2, |_| {}));
    };
    let (answer, ()) = tokio::join!(running.get(port, ""), appearing);
    assert_eq!(status(&answer), 200);
    running.stop.cancel();
}

/// Makes a claim the controller of a sandbox.
fn owned_by(object: &mut Value, claim: &str, uid: &str) {
    object["metadata"]["ownerReferences"] = json!([{"apiVersion": "extensions.agents.x-k8s.io/v1beta1",
        "kind": "SandboxClaim", "name": claim, "uid": uid, "controller": true}]);
}

async fn wait_for_claims_watch(api: &Api) {
    wait_for("the watch on claims", || {
        !api.claim_watchers.lock().unwrap().is_empty()
    })
    .await;
}

#[tokio::test]
async fn a_claims_name_resolves_only_to_the_sandbox_that_it_owns() {
    let (api, client) = Api::start().await;
    let owned = sandbox(1, |object| owned_by(object, "mine", "c1"));
    api.sandboxes.lock().unwrap().push(owned);
    let running = Running::start(client, AuthorizationMode::None).await;
    let port = echo_on_own_address().await;
    wait_for_claims_watch(&api).await;
    running.until(port, 200).await;
    assert_eq!(status(&running.get_from("mine", port, "").await), 404);
    api.claim_event("ADDED", "c1", Some("abc"));
    running.until_from("mine", port, 200).await;
    // A later claim of the same name, whose status names the first claim's sandbox.
    api.claim_event("MODIFIED", "c2", Some("abc"));
    running.until_from("mine", port, 404).await;
    api.claim_event("MODIFIED", "c1", Some("abc"));
    running.until_from("mine", port, 200).await;
    // A sandbox whose owner is another claim.
    api.sandbox_event(
        "MODIFIED",
        &sandbox(2, |object| owned_by(object, "theirs", "c3")),
    );
    running.until_from("mine", port, 404).await;
    assert_eq!(status(&running.get(port, "").await), 200);
    api.sandbox_event(
        "MODIFIED",
        &sandbox(3, |object| owned_by(object, "mine", "c1")),
    );
    running.until_from("mine", port, 200).await;
    // A sandbox's own name takes precedence over a claim's.
    let named_alike = |object: &mut Value| {
        object["metadata"]["name"] = json!("mine");
        object["spec"]["replicas"] = json!(0);
    };
    api.sandbox_event("ADDED", &sandbox(4, named_alike));
    running.until_from("mine", port, 503).await;
    api.sandbox_event("DELETED", &sandbox(5, named_alike));
    running.until_from("mine", port, 200).await;
    api.claim_event("DELETED", "c1", Some("abc"));
    running.until_from("mine", port, 404).await;
    running.stop.cancel();
}

#[tokio::test]
async fn a_request_for_a_claim_waits_until_it_is_bound() {
    let (api, client) = Api::start().await;
    let running =
        Running::start_with_resolve_wait(client, AuthorizationMode::None, support::DEADLINE).await;
    let port = echo_on_own_address().await;
    wait_for_claims_watch(&api).await;
    wait_for("the list", || running.router.is_ready()).await;
    let early = running.get_from("mine", port, "");
    let binding = async {
        wait_for("the request", || {
            running.router.metrics().active_requests() == 1
        })
        .await;
        api.sandbox_event("ADDED", &sandbox(2, |_| {}));
        api.claim_event("ADDED", "c1", None);
        api.claim_event("MODIFIED", "c1", Some("abc"));
        api.sandbox_event(
            "MODIFIED",
            &sandbox(3, |object| owned_by(object, "mine", "c1")),
        );
    };
    let (answer, ()) = tokio::join!(early, binding);
    assert_eq!(status(&answer), 200);
    running.stop.cancel();
}

#[tokio::test]
async fn a_request_by_a_claims_name_is_authorized_for_the_sandbox() {
    use router::authorize::scoped_token::{Scope, TokenKey};
    let directory = tempfile::tempdir().unwrap();
    let key_file = directory.path().join("key");
    std::fs::write(&key_file, "0123456789abcdef0123456789abcdef").unwrap();
    let key = TokenKey::parse(&std::fs::read(&key_file).unwrap()).unwrap();
    let (api, client) = Api::start().await;
    let running = Running::start_with_resolve_wait(
        client,
        AuthorizationMode::ScopedToken { key_file },
        support::DEADLINE,
    )
    .await;
    let port = echo_on_own_address().await;
    wait_for_claims_watch(&api).await;
    wait_for("the list", || running.router.is_ready()).await;
    let bearer = |name: &str| {
        let now = std::time::SystemTime::now();
        let scope = Scope::new("default", name, &[port], now, support::DEADLINE * 2);
        format!("Authorization: Bearer {}\r\n", key.mint(&scope).unwrap())
    };
    let for_the_claims_name = bearer("mine");
    // The token permits waiting for `mine`; the claim is then bound to a sandbox of another name.
    let early = running.get_from("mine", port, &for_the_claims_name);
    let binding = async {
        wait_for("the request", || {
            running.router.metrics().active_requests() == 1
        })
        .await;
        api.claim_event("ADDED", "c1", Some("abc"));
        api.sandbox_event(
            "ADDED",
            &sandbox(2, |object| owned_by(object, "mine", "c1")),
        );
    };
    let (answer, ()) = tokio::join!(early, binding);
    assert_eq!(status(&answer), 403);
    for (token, expected) in [("abc", 200), ("mine", 403), ("other", 403)] {
        let answer = running.get_from("mine", port, &bearer(token)).await;
        assert_eq!(status(&answer), expected, "a token for {token}");
    }
    running.stop.cancel();
}

//! Which paths the probe and metrics servers answer, by the flags that open them.

use axum::body::Body;
use axum::http::{Request, StatusCode};
use http_body_util::BodyExt;
use tower::ServiceExt;

use super::*;
use crate::metrics::BuildInfo;

async fn ask(routes: Router, path: &str) -> (StatusCode, String) {
    let request = Request::get(path).body(Body::empty()).unwrap();
    let answer = routes.oneshot(request).await.unwrap();
    let status = answer.status();
    let body = answer.into_body().collect().await.unwrap().to_bytes();
    (status, String::from_utf8_lossy(&body).into_owned())
}

#[tokio::test]
async fn a_process_is_alive_before_it_is_ready() {
    let ready = Arc::new(AtomicBool::new(false));
    let alive = (StatusCode::OK, "ok".to_owned());
    assert_eq!(ask(probes(Arc::clone(&ready)), "/healthz").await, alive);
    let (status, why) = ask(probes(Arc::clone(&ready)), "/readyz").await;
    assert_eq!(status, StatusCode::INTERNAL_SERVER_ERROR);
    assert!(why.contains("caches"), "{why}");
    ready.store(true, Ordering::Release);
    assert_eq!(ask(probes(Arc::clone(&ready)), "/readyz").await, alive);
    let (status, _) = ask(probes(ready), "/metrics").await;
    assert_eq!(status, StatusCode::NOT_FOUND, "metrics have their own port");
}

/// Paths of Go's pprof and fgprof, and what this process answers once `--enable-pprof-debug` opens them.
const DEBUG_PATHS: [(&str, StatusCode); 11] = [
    // Refused before a sample is taken: the signals of a profiler would interrupt the other tests of this process.
    ("/debug/pprof/profile?seconds=none", StatusCode::BAD_REQUEST),
    ("/debug/pprof/", StatusCode::OK),
    ("/debug/pprof/cmdline", StatusCode::OK),
    ("/debug/pprof/symbol", StatusCode::OK),
    ("/debug/pprof/goroutine", StatusCode::OK),
    ("/debug/pprof/heap", StatusCode::NOT_IMPLEMENTED),
    ("/debug/pprof/allocs", StatusCode::NOT_IMPLEMENTED),
    ("/debug/pprof/block", StatusCode::NOT_IMPLEMENTED),
    ("/debug/pprof/mutex", StatusCode::NOT_IMPLEMENTED),
    ("/debug/pprof/trace", StatusCode::NOT_IMPLEMENTED),
    ("/debug/fgprof", StatusCode::NOT_IMPLEMENTED),
];

#[tokio::test]
async fn profiles_are_served_only_by_the_flags_that_open_them() {
    for (position, (path, answer)) in DEBUG_PATHS.into_iter().enumerate() {
        for profiles in [Profiles::None, Profiles::Cpu, Profiles::All] {
            let expected = match profiles {
                Profiles::All => answer,
                Profiles::Cpu if position == 0 => answer,
                _ => StatusCode::NOT_FOUND,
            };
            let registry = Arc::new(Metrics::new("", BuildInfo::UNKNOWN));
            let (status, text) = ask(metrics(registry, profiles), path).await;
            assert_eq!(status, expected, "{profiles:?} {path}: {text}");
            if status == StatusCode::NOT_IMPLEMENTED {
                assert!(text.len() > 20, "{path} says why: {text}");
            }
        }
    }
}

#[tokio::test]
async fn metrics_are_served_whatever_profiles_are() {
    for profiles in [Profiles::None, Profiles::Cpu, Profiles::All] {
        let registry = Arc::new(Metrics::new("", BuildInfo::UNKNOWN));
        let (status, text) = ask(metrics(registry, profiles), "/metrics").await;
        assert_eq!(status, StatusCode::OK);
        assert!(text.contains("# TYPE "), "{text}");
    }
}

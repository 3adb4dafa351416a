//! Profiles of the running process, under the paths that Go programs serve theirs. Profiles that this process does not have
//! answer 501 with the reason.

use std::fmt::Write as _;
use std::time::Duration;

use axum::Router;
use axum::extract::Query;
use axum::http::{StatusCode, header};
use axum::response::{IntoResponse, Response};
use axum::routing::get;
use pprof::ProfilerGuardBuilder;
use pprof::protos::Message as _;
use serde::Deserialize;

/// Samples a second. Not a round number, to avoid aliasing with timers.
const FREQUENCY: i32 = 99;
const DEFAULT_SECONDS: u64 = 30;
const MAX_SECONDS: u64 = 300;

const NO_HEAP_PROFILE: &str = "the allocator of this process does not record allocations";
const NO_BLOCK_PROFILE: &str = "tasks wait without blocking threads, so there is no block profile";
const NO_MUTEX_PROFILE: &str =
    "locks are held for microseconds and never across waits, and are not profiled";
const NO_TRACE: &str =
    "there is no execution trace; use --enable-tracing for spans, or /debug/pprof/profile";
const NO_WALL_PROFILE: &str =
    "there is no wall-clock profile; use /debug/pprof/profile for CPU time";

#[derive(Debug, Deserialize)]
struct Length {
    seconds: Option<u64>,
}

/// `/debug/pprof/profile`: where CPU time goes.
pub(super) fn cpu() -> Router {
    Router::new().route("/debug/pprof/profile", get(cpu_profile))
}

/// The rest of `/debug`.
pub(super) fn debug() -> Router {
    Router::new()
        .route("/debug/pprof/", get(|| async { INDEX }))
        .route("/debug/pprof/cmdline", get(command_line))
        .route("/debug/pprof/symbol", get(symbol).post(symbol))
        .route("/debug/pprof/goroutine", get(tasks))
        .route(
            "/debug/pprof/heap",
            get(|| async { unavailable(NO_HEAP_PROFILE) }),
        )
        .route(
            "/debug/pprof/allocs",
            get(|| async { unavailable(NO_HEAP_PROFILE) }),
        )
        .route(
            "/debug/pprof/block",
            get(|| async { unavailable(NO_BLOCK_PROFILE) }),
        )
        .route(
            "/debug/pprof/mutex",
            get(|| async { unavailable(NO_MUTEX_PROFILE) }),
        )
        .route(
            "/debug/pprof/trace",
            get(|| async { unavailable(NO_TRACE) }),
        )
        .route(
            "/debug/fgprof",
            get(|| async { unavailable(NO_WALL_PROFILE) }),
        )
}

const INDEX: &str = "profile    where CPU time goes, as pprof (?seconds=30)\n\
                     goroutine  tasks and threads\n\
                     cmdline    the command line\n\
                     symbol     profiles carry their symbols\n\
                     heap, allocs, block, mutex, trace, /debug/fgprof    not available here; each says why\n";

fn unavailable(why: &'static str) -> Response {
    (StatusCode::NOT_IMPLEMENTED, format!("{why}\n")).into_response()
}

async fn cpu_profile(Query(length): Query<Length>) -> Response {
    let seconds = length
        .seconds
        .unwrap_or(DEFAULT_SECONDS)
        .clamp(1, MAX_SECONDS);
    match sample(Duration::from_secs(seconds)).await {
        Ok(profile) => {
            let headers = [
                (header::CONTENT_TYPE, "application/octet-stream"),
                (
                    header::CONTENT_DISPOSITION,
                    "attachment; filename=\"profile\"",
                ),
            ];
            (headers, profile).into_response()
        }
        Err(error) => (
            StatusCode::INTERNAL_SERVER_ERROR,
            format!("cannot profile: {error}\n"),
        )
            .into_response(),
    }
}

async fn sample(length: Duration) -> Result<Vec<u8>, pprof::Error> {
    let profiler = ProfilerGuardBuilder::default()
        .frequency(FREQUENCY)
        // Unwinding from inside these can deadlock, as they hold locks that unwinding needs.
        .blocklist(&["libc", "libgcc", "pthread", "vdso"])
        .build()?;
    tokio::time::sleep(length).await;
    let profile = profiler.report().build()?.pprof()?;
    Ok(profile.encode_to_vec())
}

async fn command_line() -> String {
    let words: Vec<String> = std::env::args_os()
        .map(|word| word.to_string_lossy().into_owned())
        .collect();
    words.join("\0")
}

/// Tools ask whether symbols can be looked up; our profiles carry them, so there is nothing to look up.
async fn symbol() -> &'static str {
    "num_symbols: 0\n"
}

async fn tasks() -> String {
    let metrics = tokio::runtime::Handle::current().metrics();
    let mut text = format!(
        "{} tasks alive on {} worker threads\n",
        metrics.num_alive_tasks(),
        metrics.num_workers()
    );
    for thread in std::fs::read_dir("/proc/self/task")
        .into_iter()
        .flatten()
        .flatten()
    {
        let read = |file: &str| {
            let content = std::fs::read_to_string(thread.path().join(file));
            content.unwrap_or_default().trim().to_owned()
        };
        let (name, waits_in) = (read("comm"), read("wchan"));
        let _ = writeln!(
            text,
            "thread {} {name} {waits_in}",
            thread.file_name().display()
        );
    }
    text
}

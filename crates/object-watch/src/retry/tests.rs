use std::collections::VecDeque;
use std::io;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use futures::StreamExt;
use futures::stream;
use k8s_openapi::api::core::v1::ConfigMap;
use kube::core::Status;
use tracing_subscriber::fmt::MakeWriter;

use super::*;

type Item = watcher::Result<Event<ConfigMap>>;

/// The log of a test.
#[derive(Clone, Default)]
struct Lines(Arc<Mutex<Vec<u8>>>);

impl Lines {
    /// Collects what this thread logs until the guard is dropped.
    fn collect() -> (Self, tracing::subscriber::DefaultGuard) {
        let lines = Self::default();
        let subscriber = tracing_subscriber::fmt()
            .with_writer(lines.clone())
            .with_ansi(false)
            .finish();
        (lines, tracing::subscriber::set_default(subscriber))
    }

    fn count(&self, level: &str) -> usize {
        let text = String::from_utf8(self.0.lock().unwrap().clone()).unwrap();
        text.lines().filter(|line| line.contains(level)).count()
    }
}

impl io::Write for Lines {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.0.lock().unwrap().extend_from_slice(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl MakeWriter<'_> for Lines {
    type Writer = Self;

    fn make_writer(&self) -> Self {
        self.clone()
    }
}

fn answered(code: u16) -> Item {
    let status = Status::failure("no", "").with_code(code).boxed();
    Err(watcher::Error::WatchStartFailed(kube::Error::Api(status)))
}

fn refused() -> Item {
    let cause = io::Error::from(io::ErrorKind::ConnectionRefused);
    let cause = kube::Error::Service(Box::new(cause));
    Err(watcher::Error::InitialListFailed(cause))
}

/// A watch whose source yields a script each time it is opened. After the script it yields nothing.
fn scripted(
    scripts: impl IntoIterator<Item = Vec<Item>>,
) -> BoxStream<'static, Result<Event<ConfigMap>, Failure>> {
    let scripts = Mutex::new(scripts.into_iter().collect::<VecDeque<_>>());
    let open = move || {
        let script = scripts.lock().unwrap().pop_front().unwrap_or_default();
        stream::iter(script).chain(stream::pending()).boxed()
    };
    let log = FailureLog::named("/api/v1/configmaps".to_owned());
    Retrying::new(open, Some(log)).into_stream().boxed()
}

/// What the first items of a watch are, and how long they took.
async fn first(
    count: usize,
    events: BoxStream<'static, Result<Event<ConfigMap>, Failure>>,
) -> (Vec<&'static str>, Duration) {
    let began = Instant::now();
    let items: Vec<_> = events.take(count).collect().await;
    let items = items.iter().map(|item| match item {
        Ok(Event::Init) => "init",
        Ok(Event::InitDone) => "listed",
        Ok(_) => "object",
        Err(Failure::Forbidden { .. }) => "forbidden",
        Err(Failure::NotServed) => "not served",
        Err(_) => "failed",
    });
    (items.collect(), began.elapsed())
}

#[tokio::test(start_paused = true)]
async fn a_refusal_is_passed_on_each_time_and_logged_once_until_the_watch_works() {
    let (lines, _guard) = Lines::collect();
    let script = vec![
        Ok(Event::Init),
        answered(403),
        answered(403),
        answered(404),
        Ok(Event::Init),
        Ok(Event::InitDone),
        Ok(Event::Apply(ConfigMap::default())),
    ];
    let (items, took) = first(7, scripted([script])).await;
    let expected = [
        "init",
        "forbidden",
        "forbidden",
        "not served",
        "init",
        "listed",
        "object",
    ];
    assert_eq!(items, expected);
    let pauses = Duration::from_millis(700)..=Duration::from_millis(1410);
    assert!(pauses.contains(&took), "{took:?}");
    assert_eq!(lines.count("WARN"), 2);
    assert_eq!(lines.count("INFO"), 1);
}

#[tokio::test(start_paused = true)]
async fn an_expired_resource_version_is_listed_again_without_a_failure() {
    let (lines, _guard) = Lines::collect();
    let began = || vec![Ok(Event::Init), Ok(Event::InitDone), answered(410)];
    let (items, took) = first(10, scripted([(); 5].map(|()| began()))).await;
    assert_eq!(items, ["init", "listed"].repeat(5));
    // Without growing pauses, a server whose watches expire at once would be listed without end.
    assert!(took >= Duration::from_millis(1500), "{took:?}");
    assert_eq!(lines.count("WARN"), 0);
    assert_eq!(lines.count("INFO"), 0);
}

#[tokio::test(start_paused = true)]
async fn a_server_that_is_away_is_tried_at_most_five_seconds_apart() {
    let (lines, _guard) = Lines::collect();
    let mut script: Vec<Item> = (0..10).map(|_| refused()).collect();
    script.push(Ok(Event::InitDone));
    let (items, took) = first(11, scripted([script])).await;
    assert_eq!(items[..10], ["failed"; 10]);
    assert_eq!(items[10], "listed");
    let pauses = Duration::from_secs(15)..=Duration::from_millis(31_300);
    assert!(pauses.contains(&took), "{took:?}");
    assert_eq!(lines.count("WARN"), 1);
    assert_eq!(lines.count("INFO"), 1);
}

#[tokio::test(start_paused = true)]
async fn a_pause_goes_on_although_the_caller_stops_waiting_for_the_next_event() {
    let mut events = scripted([vec![refused(), Ok(Event::Init)]]);
    assert!(events.next().await.unwrap().is_err());
    let began = Instant::now();
    while tokio::time::timeout(Duration::from_millis(20), events.next())
        .await
        .is_err()
    {}
    let took = began.elapsed();
    assert!(took <= Duration::from_millis(220), "{took:?}");
    assert!(took >= Duration::from_millis(80), "{took:?}");
}

use std::sync::atomic::{AtomicUsize, Ordering};

use super::*;
use crate::instrumentation::Silent;

fn settings(max_workers: usize) -> Settings {
    Settings {
        controller: "test",
        max_workers,
        // The middle of the jitter: exactly the doubled delay.
        random: Random::new(|| 1 << 63),
        instrumentation: Arc::new(Silent),
        abort: CancellationToken::new(),
    }
}

fn key(name: &str) -> ObjectKey {
    ObjectKey::new("default", name)
}

/// When each piece of work began, since the log was made.
#[derive(Clone)]
struct Log {
    start: Instant,
    entries: Arc<Mutex<Vec<(String, Duration)>>>,
}

impl Log {
    fn new() -> Self {
        Self {
            start: Instant::now(),
            entries: Arc::default(),
        }
    }

    fn note(&self, key: &ObjectKey) -> usize {
        let mut entries = self.entries.lock().unwrap();
        entries.push((key.name.to_string(), self.start.elapsed()));
        entries.len()
    }

    fn milliseconds(&self) -> Vec<u128> {
        let entries = self.entries.lock().unwrap();
        entries.iter().map(|(_, at)| at.as_millis()).collect()
    }

    fn names(&self) -> Vec<String> {
        let entries = self.entries.lock().unwrap();
        entries.iter().map(|(name, _)| name.clone()).collect()
    }
}

/// A queue that answers the nth piece of work with the nth next_run, and with Done after the last.
fn scripted(runs: Vec<NextRun>) -> (Queue, Log) {
    let log = Log::new();
    let noted = log.clone();
    let queue = Queue::new(settings(4), move |key| {
        let number = noted.note(&key);
        let next_run = runs.get(number - 1).copied().unwrap_or(NextRun::Done);
        std::future::ready(next_run)
    });
    (queue, log)
}

#[tokio::test(start_paused = true)]
async fn an_object_added_repeatedly_before_a_worker_takes_it_is_worked_on_once() {
    let (queue, log) = scripted(Vec::new());
    for _ in 0..5 {
        queue.add(key("a"));
        queue.add(key("b"));
    }
    assert_eq!(
        log.names(),
        Vec::<String>::new(),
        "nothing begins before the queue is open"
    );
    queue.open();
    tokio::time::sleep(Duration::from_secs(1)).await;
    let mut names = log.names();
    names.sort();
    assert_eq!(names, ["a", "b"]);
    assert!(queue.is_settled());
}

#[tokio::test(start_paused = true)]
async fn failures_wait_twice_as_long_each_time_and_success_starts_anew() {
    let retry = NextRun::Retry;
    let (queue, log) = scripted(vec![retry, retry, retry, NextRun::Done, retry]);
    queue.open();
    queue.add(key("a"));
    tokio::time::sleep(Duration::from_secs(1)).await;
    queue.add(key("a"));
    tokio::time::sleep(Duration::from_secs(1)).await;
    assert_eq!(log.milliseconds(), [0, 10, 30, 70, 1_000, 1_010]);
}

#[tokio::test(start_paused = true)]
async fn an_event_cuts_a_requeue_delay_short() {
    let hour = Duration::from_secs(3_600);
    let (queue, log) = scripted(vec![NextRun::After(hour), NextRun::After(hour)]);
    queue.open();
    queue.add(key("a"));
    tokio::time::sleep(Duration::from_secs(60)).await;
    queue.add(key("a"));
    tokio::time::sleep(2 * hour).await;
    // At once, when it was added, and an hour after that: the first hour counts no more.
    assert_eq!(log.milliseconds(), [0, 60_000, 3_660_000]);
}

#[tokio::test(start_paused = true)]
async fn the_shorter_of_two_delays_counts() {
    let (queue, log) = scripted(Vec::new());
    queue.open();
    queue.add_after(key("a"), Duration::from_secs(10));
    queue.add_after(key("a"), Duration::from_secs(5));
    queue.add_after(key("a"), Duration::from_secs(7));
    tokio::time::sleep(Duration::from_secs(60)).await;
    assert_eq!(log.milliseconds(), [5_000]);
}

#[tokio::test(start_paused = true)]
async fn an_object_is_never_worked_on_twice_at_once_and_no_event_is_lost() {
    let running = Arc::new(Mutex::new(HashMap::<ObjectKey, usize>::new()));
    let runs = Arc::new(AtomicUsize::new(0));
    let (now, done) = (Arc::clone(&running), Arc::clone(&runs));
    let queue = Queue::new(settings(3), move |key| {
        let (now, done) = (Arc::clone(&now), Arc::clone(&done));
        async move {
            {
                let mut running = now.lock().unwrap();
                *running.entry(key.clone()).or_default() += 1;
                assert_eq!(running[&key], 1, "{key} is worked on twice at once");
                assert!(running.values().sum::<usize>() <= 3, "too many workers");
            }
            tokio::time::sleep(Duration::from_millis(10)).await;
            *now.lock().unwrap().get_mut(&key).unwrap() -= 1;
            done.fetch_add(1, Ordering::SeqCst);
            NextRun::Done
        }
    });
    queue.open();
    for number in 0..100 {
        queue.add(key(&format!("k{}", number % 5)));
        tokio::time::sleep(Duration::from_millis(3)).await;
    }
    let before = runs.load(Ordering::SeqCst);
    for number in 0..5 {
        queue.add(key(&format!("k{number}")));
    }
    tokio::time::sleep(Duration::from_secs(1)).await;
    let after = runs.load(Ordering::SeqCst);
    assert!(
        after - before >= 5,
        "each was worked on after its last event"
    );
    assert!(queue.is_settled());
}

#[tokio::test(start_paused = true)]
async fn a_panic_fails_one_attempt_and_the_worker_goes_on() {
    let tries = Arc::new(AtomicUsize::new(0));
    let counted = Arc::clone(&tries);
    let queue = Queue::new(settings(1), move |_| {
        let number = counted.fetch_add(1, Ordering::SeqCst);
        async move {
            assert_ne!(number, 0, "the first try panics");
            NextRun::Done
        }
    });
    queue.open();
    queue.add(key("a"));
    tokio::time::sleep(Duration::from_secs(1)).await;
    assert_eq!(tries.load(Ordering::SeqCst), 2);
    assert!(queue.is_settled());
}

#[tokio::test(start_paused = true)]
async fn closing_waits_for_running_work_and_starts_no_more() {
    let finished = Arc::new(AtomicUsize::new(0));
    let counted = Arc::clone(&finished);
    let queue = Queue::new(settings(1), move |_| {
        let counted = Arc::clone(&counted);
        async move {
            tokio::time::sleep(Duration::from_secs(3)).await;
            counted.fetch_add(1, Ordering::SeqCst);
            NextRun::Done
        }
    });
    queue.open();
    queue.add(key("a"));
    queue.add(key("b"));
    tokio::task::yield_now().await;
    queue.close().await;
    assert_eq!(finished.load(Ordering::SeqCst), 1);
}

#[tokio::test(start_paused = true)]
async fn deferred_work_begins_after_its_delay_and_after_urgent_work() {
    let log = Log::new();
    let noted = log.clone();
    let queue = Queue::new(settings(1), move |key| {
        noted.note(&key);
        let took = Duration::from_millis(40);
        async move {
            tokio::time::sleep(took).await;
            NextRun::Done
        }
    });
    queue.open();
    queue.add_later(key("deferred"));
    queue.add(key("first"));
    queue.add(key("second"));
    assert!(!queue.is_settled());
    tokio::time::sleep(Duration::from_secs(1)).await;
    assert_eq!(log.names(), ["first", "second", "deferred"]);
    queue.add_later(key("alone"));
    tokio::time::sleep(Duration::from_secs(1)).await;
    assert_eq!(log.milliseconds()[3], 1_000 + DEFERRAL.as_millis());
    assert!(queue.is_empty());
}

#[tokio::test(start_paused = true)]
async fn deferred_work_that_becomes_urgent_is_not_delayed() {
    let (queue, log) = scripted(Vec::new());
    queue.open();
    queue.add_later(key("a"));
    queue.add(key("a"));
    tokio::time::sleep(Duration::from_secs(1)).await;
    assert_eq!(log.milliseconds(), [0]);

    // The same for an object that is ready behind other deferred objects.
    let (log, stuck) = (Log::new(), Arc::new(Notify::new()));
    let (noted, waiting) = (log.clone(), Arc::clone(&stuck));
    let queue = Queue::new(settings(2), move |key| {
        noted.note(&key);
        let waiting = Arc::clone(&waiting);
        async move {
            waiting.notified().await;
            NextRun::Done
        }
    });
    queue.yield_to(|| true);
    queue.open();
    for name in ["1", "2", "3", "4"] {
        queue.add_later(key(name));
    }
    tokio::time::sleep(Duration::from_secs(1)).await;
    queue.add(key("4"));
    stuck.notify_one();
    tokio::time::sleep(Duration::from_secs(1)).await;
    assert_eq!(log.names(), ["1", "2", "4"]);
}

#[tokio::test(start_paused = true)]
async fn few_workers_do_deferred_work_while_urgent_work_waits_and_all_do_afterwards() {
    let urgent = Arc::new(std::sync::atomic::AtomicBool::new(true));
    let (running, most) = (Arc::new(AtomicUsize::new(0)), Arc::new(AtomicUsize::new(0)));
    let (now, peak) = (Arc::clone(&running), Arc::clone(&most));
    let queue = Queue::new(settings(8), move |_| {
        let now = Arc::clone(&now);
        peak.fetch_max(now.fetch_add(1, Ordering::SeqCst) + 1, Ordering::SeqCst);
        async move {
            tokio::time::sleep(Duration::from_millis(10)).await;
            now.fetch_sub(1, Ordering::SeqCst);
            NextRun::Done
        }
    });
    let is_urgent = Arc::clone(&urgent);
    queue.yield_to(move || is_urgent.load(Ordering::SeqCst));
    queue.open();
    for name in 0..100 {
        queue.add_later(key(&name.to_string()));
    }
    tokio::time::sleep(Duration::from_millis(200)).await;
    assert_eq!(most.load(Ordering::SeqCst), DEFERRED_WORKERS);
    let left = queue.len();
    assert!((50..100).contains(&left), "{left} left");
    urgent.store(false, Ordering::SeqCst);
    tokio::time::sleep(Duration::from_millis(200)).await;
    assert_eq!(most.load(Ordering::SeqCst), 8);
    assert!(queue.is_empty());
}

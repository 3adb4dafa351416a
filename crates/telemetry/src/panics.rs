//! Counts panics. A panic ends its task silently unless it is counted, and each panic is a bug.

use std::any::Any;
use std::fmt::Write;
use std::panic::AssertUnwindSafe;
use std::sync::Once;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use futures::FutureExt;

static PANICS: AtomicU64 = AtomicU64::new(0);
static RESTARTED_WORKERS: AtomicU64 = AtomicU64::new(0);

/// Installs a panic hook that counts every panic and then calls the previous hook. Further calls have no effect.
pub fn count() {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        let before = std::panic::take_hook();
        std::panic::set_hook(Box::new(move |panic| {
            PANICS.fetch_add(1, Ordering::Relaxed);
            before(panic);
        }));
    });
}

/// Counts a pod worker that is restarted after a panic.
pub fn worker_restarted() {
    RESTARTED_WORKERS.fetch_add(1, Ordering::Relaxed);
}

/// Runs a task until it ends by itself. After a panic, the task is reported and restarted with exponential backoff.
pub async fn restarting<F: Future<Output = ()> + Send>(name: &str, begin: impl Fn() -> F) {
    const MAX_BACKOFF: Duration = Duration::from_secs(60);
    let mut backoff = Duration::from_secs(1);
    while let Err(panic) = AssertUnwindSafe(begin()).catch_unwind().await {
        tracing::error!(
            task = name,
            panic = message(&*panic),
            "a task panicked and is restarted; this is a bug, please report it"
        );
        tokio::time::sleep(backoff).await;
        backoff = backoff.saturating_mul(2).min(MAX_BACKOFF);
    }
}

/// The message of a panic, from the payload that `catch_unwind` or `join` returned.
pub fn message(payload: &(dyn Any + Send)) -> &str {
    let text = payload.downcast_ref::<&str>().copied();
    text.or_else(|| payload.downcast_ref::<String>().map(String::as_str))
        .unwrap_or("no message")
}

pub(crate) fn render(text: &mut String) {
    for (name, help, value) in [
        (
            "agent_sandbox_panics_total",
            "Panics of any task of the process; each is a bug.",
            &PANICS,
        ),
        (
            "agent_sandbox_pod_worker_restarts_total",
            "Workers of pods that were started again after a panic.",
            &RESTARTED_WORKERS,
        ),
    ] {
        let value = value.load(Ordering::Relaxed);
        // Writing to a string cannot fail.
        let _ = writeln!(
            text,
            "# HELP {name} {help}\n# TYPE {name} counter\n{name} {value}"
        );
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_panic_in_any_thread_is_counted_and_has_its_message() {
        count();
        count();
        let figure = || -> u64 {
            let text = crate::process::render();
            let line = text
                .lines()
                .find_map(|line| line.strip_prefix("agent_sandbox_panics_total "));
            line.unwrap().parse().unwrap()
        };
        let before = figure();
        let panicked = std::thread::spawn(|| panic!("text {}", 1)).join();
        assert_eq!(message(&*panicked.unwrap_err()), "text 1");
        let panicked = std::thread::spawn(|| panic!("plain")).join();
        assert_eq!(message(&*panicked.unwrap_err()), "plain");
        // Other tests may panic too, so the counter may be higher.
        assert!(figure() >= before + 2);
    }

    #[tokio::test(start_paused = true)]
    async fn a_task_that_panics_is_restarted_until_it_ends() {
        let tries = AtomicU64::new(0);
        restarting("a test", || async {
            assert!(tries.fetch_add(1, Ordering::Relaxed) >= 3, "not yet");
        })
        .await;
        assert_eq!(tries.load(Ordering::Relaxed), 4);
    }
}

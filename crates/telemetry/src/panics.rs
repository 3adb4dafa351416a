//! Panics as figures. A panic ends one task in silence unless something counts it, and each is a bug.

use std::any::Any;
use std::fmt::Write;
use std::panic::AssertUnwindSafe;
use std::sync::Once;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use futures::FutureExt;

static PANICS: AtomicU64 = AtomicU64::new(0);
static RESTARTED_WORKERS: AtomicU64 = AtomicU64::new(0);

/// Counts every panic of this process from now on, beside whatever the hook before it does. Repeating it is harmless.
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

/// Counts a pod's worker that is started again after it had panicked.
pub fn worker_restarted() {
    RESTARTED_WORKERS.fetch_add(1, Ordering::Relaxed);
}

/// Runs a task until it ends by itself. One that panics is reported and begun anew after a pause, which grows from panic to panic.
pub async fn restarting<F: Future<Output = ()> + Send>(name: &str, begin: impl Fn() -> F) {
    const LONGEST_PAUSE: Duration = Duration::from_secs(60);
    let mut pause = Duration::from_secs(1);
    while let Err(panic) = AssertUnwindSafe(begin()).catch_unwind().await {
        tracing::error!(
            task = name,
            panic = message(&*panic),
            "a task panicked and is started again; this is a bug, please report it"
        );
        tokio::time::sleep(pause).await;
        pause = pause.saturating_mul(2).min(LONGEST_PAUSE);
    }
}

/// What a panic said, from what it left to whoever caught it.
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
    fn a_panic_in_any_thread_is_counted_and_says_what_it_said() {
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
        let panicked = std::thread::spawn(|| panic!("said {}", 1)).join();
        assert_eq!(message(&*panicked.unwrap_err()), "said 1");
        let panicked = std::thread::spawn(|| panic!("plain")).join();
        assert_eq!(message(&*panicked.unwrap_err()), "plain");
        // Another test may panic as well.
        assert!(figure() >= before + 2);
    }

    #[tokio::test(start_paused = true)]
    async fn a_task_that_panics_is_begun_anew_until_it_ends() {
        let tries = AtomicU64::new(0);
        restarting("a test", || async {
            assert!(tries.fetch_add(1, Ordering::Relaxed) >= 3, "not yet");
        })
        .await;
        assert_eq!(tries.load(Ordering::Relaxed), 4);
    }
}

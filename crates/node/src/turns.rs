//! Whose turn it is on a busy machine: a pod that uses much of the processors yields to those that need little.
//!
//! The kernel lets whoever runs go on for some milliseconds before somebody who wakes up gets the processor, so that a pod which
//! computes without end would delay every answer of its neighbours. A pod that has lately used more than it asked for, and more
//! than half a processor, is therefore put into the kernel's idle class: it has all the time that nobody else wants, and gives
//! it back the moment somebody does. Where others leave it nothing it uses little, and is soon like anybody else again: no pod
//! starves, and two that both compute without end share alike.

use std::collections::HashMap;
use std::time::Duration;

use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use crate::runtime::control_groups::ControlGroups;

/// How often pods are looked at while the machine is busy.
const INTERVAL: Duration = Duration::from_millis(500);
/// Of a machine that is idle for more than this part of the time, everybody has enough.
const ENOUGH_IDLE_PERCENT: u64 = 25;
/// What every pod may use without yielding, in thousandths of a processor.
const FAIR_MILLI: u64 = 500;

/// Reviews whose turn it is until told to stop.
pub async fn run(groups: ControlGroups, shutdown: CancellationToken) {
    let mut turns = Turns::default();
    loop {
        let pause = tokio::time::sleep(INTERVAL);
        if shutdown.run_until_cancelled(pause).await.is_none() {
            return;
        }
        let machine = std::fs::read_to_string("/proc/stat").unwrap_or_default();
        let is_busy = turns.is_busy(Times::parse(&machine));
        if !is_busy && !turns.anybody_yields() {
            continue;
        }
        let groups = groups.clone();
        let reviewed = tokio::task::spawn_blocking(move || {
            turns.review(&groups, Instant::now());
            turns
        });
        match reviewed.await {
            Ok(reviewed) => turns = reviewed,
            Err(_) => return,
        }
    }
}

/// How the machine's processors have spent their time, in the kernel's ticks.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
struct Times {
    idle: u64,
    all: u64,
}

impl Times {
    /// From the first line of `/proc/stat`: user, nice, system, idle, waiting for the disk, interrupts.
    fn parse(text: &str) -> Self {
        const COUNTED: usize = 7;
        let line = text.lines().next().unwrap_or_default();
        let fields = line.split_whitespace().skip(1).take(COUNTED);
        let fields: Vec<u64> = fields.filter_map(|field| field.parse().ok()).collect();
        Self {
            idle: fields.iter().skip(3).take(2).sum(),
            all: fields.iter().sum(),
        }
    }
}

/// What is known of a pod.
#[derive(Debug, Clone, Copy)]
struct Seen {
    used: Duration,
    at: Instant,
    yields: bool,
}

#[derive(Debug, Default)]
struct Turns {
    machine: Times,
    pods: HashMap<String, Seen>,
}

impl Turns {
    /// Whether the machine was busy since this was last asked.
    fn is_busy(&mut self, now: Times) -> bool {
        let before = std::mem::replace(&mut self.machine, now);
        let idle = now.idle.saturating_sub(before.idle);
        let all = now.all.saturating_sub(before.all);
        idle * 100 < all * ENOUGH_IDLE_PERCENT
    }

    fn anybody_yields(&self) -> bool {
        self.pods.values().any(|seen| seen.yields)
    }

    /// Compares what pods have used with what they had used before.
    fn review(&mut self, groups: &ControlGroups, now: Instant) {
        let mut pods = HashMap::new();
        for pod in groups.pods() {
            let Some(used) = groups.processor_time(&pod) else {
                continue;
            };
            // A pod may have taken the name of another that was looked at before.
            let before = self.pods.get(&pod).filter(|seen| seen.used <= used);
            let yields = match before {
                None => {
                    // An earlier run of the node may have made it yield.
                    let _ = groups.set_yielding(&pod, false);
                    false
                }
                Some(before) => {
                    let milli = used_milli(used.saturating_sub(before.used), now - before.at);
                    let yields = is_to_yield(before.yields, milli, || {
                        groups.processor_request_milli(&pod)
                    });
                    if yields == before.yields {
                        yields
                    } else {
                        tracing::debug!(pod, milli, yields, "the processors are shared anew");
                        // Where the kernel has no such class, everybody is alike.
                        groups.set_yielding(&pod, yields).is_ok() && yields
                    }
                }
            };
            let at = now;
            pods.insert(pod, Seen { used, at, yields });
        }
        self.pods = pods;
    }
}

fn used_milli(used: Duration, during: Duration) -> u64 {
    let micros = |time: Duration| u64::try_from(time.as_micros()).unwrap_or(u64::MAX);
    micros(used).saturating_mul(1000) / micros(during).max(1)
}

/// Whether a pod is to yield, given whether it does and what it has used. One that does goes on until it uses half of what it may.
fn is_to_yield(before: bool, used_milli: u64, requested_milli: impl FnOnce() -> u64) -> bool {
    let needed = if before {
        used_milli.saturating_mul(2)
    } else {
        used_milli
    };
    needed > FAIR_MILLI && needed > requested_milli()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn whoever_uses_more_than_it_asked_for_yields_until_it_uses_little() {
        for (before, used, requested, expected) in [
            (false, 100, 0, false),
            (false, 500, 0, false),
            (false, 501, 0, true),
            (false, 1_900, 2_000, false),
            (false, 2_001, 2_000, true),
            (true, 400, 0, true),
            (true, 250, 0, false),
            (true, 900, 2_000, false),
        ] {
            let yields = is_to_yield(before, used, || requested);
            assert_eq!(yields, expected, "{before} {used} of {requested}");
        }
        let used = used_milli(Duration::from_millis(750), Duration::from_millis(500));
        assert_eq!(used, 1_500);
    }

    #[test]
    fn a_machine_is_busy_when_its_processors_are_hardly_idle() {
        let mut turns = Turns::default();
        let times = |text: &str| Times::parse(text);
        turns.is_busy(times("cpu  100 0 100 1000 50 0 0 7 0 0\ncpu0 1 1 1 1\n"));
        assert!(turns.is_busy(times("cpu  180 0 100 1010 55 5 0 90 0 0\n")));
        assert!(!turns.is_busy(times("cpu  200 0 110 1110 55 5 0 90 0 0\n")));
    }
}

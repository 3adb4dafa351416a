//! Detects containers that their CPU limit throttles.
//!
//! The kernel counts the periods in which a cgroup had work to do, and those in which it was throttled. A container counts as
//! throttled when it was throttled in at least half of the periods since the last check, and until it was in less than a tenth
//! (hysteresis), so that the state of a container near its limit does not change at every check.

use std::time::Duration;

use crate::{ContainerId, Runtime};

/// The periods in which a container ran, and in which it was throttled, since it started (`nr_periods` and `nr_throttled`).
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Periods {
    pub all: u64,
    pub throttled: u64,
}

/// Fewer periods than this are not enough to judge by. A period is 100 ms long.
const LEAST_PERIODS: u64 = 3;

/// Whether a container is throttled, from its previous state and the periods since then.
fn is_throttled(before: bool, since: Periods) -> bool {
    let share = |percent: u64| since.throttled * 100 >= since.all * percent;
    if since.all < LEAST_PERIODS {
        return false;
    }
    if before { share(10) } else { share(50) }
}

/// Checks a container at an interval and reports every change, until the container has ended or `report` returns false.
pub async fn watch<R: Runtime>(
    runtime: &R,
    id: &ContainerId,
    interval: Duration,
    report: impl Fn(bool) -> bool,
) {
    let mut throttled = false;
    let mut last = Periods::default();
    while let Some(counted) = runtime.cpu_periods(id) {
        let since = Periods {
            all: counted.all.saturating_sub(last.all),
            throttled: counted.throttled.saturating_sub(last.throttled),
        };
        last = counted;
        let now = is_throttled(throttled, since);
        if now != throttled && !report(now) {
            return;
        }
        throttled = now;
        tokio::time::sleep(interval).await;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_container_is_throttled_from_half_of_its_periods_until_less_than_a_tenth() {
        let periods = |all, throttled| Periods { all, throttled };
        for (before, since, expected) in [
            (false, periods(0, 0), false),
            (false, periods(2, 2), false),
            (false, periods(100, 49), false),
            (false, periods(100, 50), true),
            (true, periods(100, 49), true),
            (true, periods(100, 10), true),
            (true, periods(100, 9), false),
            (true, periods(0, 0), false),
        ] {
            assert_eq!(is_throttled(before, since), expected, "{before} {since:?}");
        }
    }
}

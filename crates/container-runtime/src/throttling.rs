//! Containers that want more processor time than their limit gives them.
//!
//! The kernel counts periods in which a group had work to do, and those in which it was held back. A container is called
//! throttled when it was held back in most periods of a while, and no longer when it hardly was, so that one at the edge
//! does not change its mind at every look.

use std::time::Duration;

use crate::{ContainerId, Runtime};

/// Periods that a container was at work in, and was held back in, since it started.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Periods {
    pub all: u64,
    pub throttled: u64,
}

/// Fewer periods than this say nothing; they are a tenth of a second long.
const TELLING_PERIODS: u64 = 3;

/// Whether a container is throttled, given what was thought before and what was counted since then.
fn is_throttled(before: bool, since: Periods) -> bool {
    let share = |percent: u64| since.throttled * 100 >= since.all * percent;
    if since.all < TELLING_PERIODS {
        return false;
    }
    if before { share(10) } else { share(50) }
}

/// Looks at a container now and then, and tells of every change, until it is gone.
pub async fn watch<R: Runtime>(
    runtime: &R,
    id: &ContainerId,
    interval: Duration,
    tell: impl Fn(bool) -> bool,
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
        if now != throttled && !tell(now) {
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
    fn a_container_is_throttled_when_most_periods_held_it_back_and_until_hardly_any_do() {
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

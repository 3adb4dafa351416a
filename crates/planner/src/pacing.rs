//! Claims before refills: when a pool may create sandboxes while claims wait, or have just got theirs.
//!
//! On a busy API server, the requests of a refill delay those of waiting claims. So a pool pauses while claims wait, but never for
//! longer than [`Pacing::longest_pause`] at a time, and then creates a part of a batch: under a steady stream of claims the pool still
//! fills, by at least that part per pause.
//!
//! A client with a new sandbox runs a first command in it, which the start of another sandbox on the same machine would slow down. So
//! a refill also waits for [`Pacing::courtesy`], once. Then it is made in full, or in small parts while claims keep coming.

use std::time::Duration;

use k8s_openapi::jiff::Timestamp;

/// The demand for sandboxes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Demand {
    /// How many claims wait for a sandbox now.
    pub waiting: usize,
    /// When a claim last got one.
    pub served_at: Option<Timestamp>,
}

/// The policy's settings.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Pacing {
    /// The longest pause.
    pub longest_pause: Duration,
    /// The pause after a claim got its sandbox.
    pub courtesy: Duration,
    /// The interval of checks whether claims still wait.
    pub recheck: Duration,
    /// While claims wait, a pass makes at most this fraction of a full batch.
    pub batch_divisor: usize,
    /// While they come and go, at most this one.
    pub courteous_divisor: usize,
}

impl Default for Pacing {
    fn default() -> Self {
        Self {
            longest_pause: Duration::from_millis(50),
            courtesy: Duration::from_millis(25),
            recheck: Duration::from_millis(50),
            batch_divisor: 100,
            courteous_divisor: 75,
        }
    }
}

/// What the pool may do now.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Allowance {
    /// Make up to this many sandboxes.
    Make(usize),
    /// Make none, and reconcile again after this time.
    HoldBack(Duration),
}

impl Pacing {
    /// How many sandboxes may be made, of a batch of at most `max_batch`. `held_back_since` is when the pool began to hold back,
    /// if it does.
    pub fn allow(
        &self,
        demand: Demand,
        max_batch: usize,
        held_back_since: Option<Timestamp>,
        now: Timestamp,
    ) -> Allowance {
        let paused = held_back_since.map_or(Duration::ZERO, |since| elapsed(since, now));
        if demand.waiting == 0 {
            let since_served = demand.served_at.map(|served| elapsed(served, now));
            let owed =
                since_served.map_or(Duration::ZERO, |since| self.courtesy.saturating_sub(since));
            return if owed.is_zero() {
                Allowance::Make(max_batch)
            } else if paused >= self.courtesy {
                part(max_batch, self.courteous_divisor)
            } else {
                Allowance::HoldBack(owed.min(self.courtesy.saturating_sub(paused)))
            };
        }
        if held_back_since.is_some() && paused >= self.longest_pause {
            return part(max_batch, self.batch_divisor);
        }
        let left = self.longest_pause.saturating_sub(paused);
        Allowance::HoldBack(self.recheck.min(left))
    }
}

/// Some of a batch, and at least one.
fn part(max_batch: usize, divisor: usize) -> Allowance {
    Allowance::Make((max_batch / divisor.max(1)).max(1))
}

/// The time from `since` to `now`; none if the clock went back.
pub(crate) fn elapsed(since: Timestamp, now: Timestamp) -> Duration {
    Duration::try_from(now.duration_since(since)).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn at(millisecond: i64) -> Timestamp {
        Timestamp::from_millisecond(millisecond).unwrap()
    }

    fn waiting(waiting: usize) -> Demand {
        Demand {
            waiting,
            served_at: None,
        }
    }

    #[test]
    fn without_demand_nothing_is_held_back() {
        let pacing = Pacing::default();
        let allow = |since| pacing.allow(Demand::default(), 300, since, at(1));
        assert_eq!(allow(None), Allowance::Make(300));
        assert_eq!(allow(Some(at(0))), Allowance::Make(300));
    }

    #[test]
    fn a_refill_pauses_after_a_claim_got_its_sandbox() {
        let pacing = Pacing::default();
        let allow = |served, since, now| {
            let demand = Demand {
                waiting: 0,
                served_at: Some(at(served)),
            };
            pacing.allow(demand, 300, since, at(now))
        };
        let hold_back = |milliseconds| Allowance::HoldBack(Duration::from_millis(milliseconds));
        assert_eq!(allow(0, None, 0), hold_back(25));
        assert_eq!(allow(0, Some(at(0)), 15), hold_back(10));
        assert_eq!(allow(0, None, 25), Allowance::Make(300));
        let meanwhile = allow(24, Some(at(0)), 25);
        assert_eq!(meanwhile, Allowance::Make(4), "others do not prolong it");
    }

    #[test]
    fn with_waiting_claims_a_pool_pauses_and_then_makes_a_part() {
        let pacing = Pacing::default();
        let recheck = Allowance::HoldBack(pacing.recheck);
        assert_eq!(pacing.allow(waiting(1), 300, None, at(0)), recheck);
        assert_eq!(
            pacing.allow(waiting(9), 300, Some(at(0)), at(49)),
            Allowance::HoldBack(Duration::from_millis(1))
        );
        assert_eq!(
            pacing.allow(waiting(9), 300, Some(at(0)), at(50)),
            Allowance::Make(3)
        );
        assert_eq!(
            pacing.allow(waiting(9), 5, Some(at(0)), at(900)),
            Allowance::Make(1)
        );
    }

    proptest! {
        #[test]
        fn a_pool_never_starves(waiting in 0..10_000_usize, max_batch in 1..500_usize, step in 1..200_i64) {
            let pacing = Pacing::default();
            let mut made = 0;
            let mut since = None;
            let mut time = 0;
            while time < 10_000 {
                let demand = Demand { waiting, served_at: Some(at(time)) };
                match pacing.allow(demand, max_batch, since, at(time)) {
                    Allowance::Make(count) => {
                        made += count;
                        since = None;
                    }
                    Allowance::HoldBack(delay) => {
                        prop_assert!(delay <= pacing.longest_pause);
                        since = since.or(Some(at(time)));
                    }
                }
                time += step;
            }
            let least = (max_batch / 100).max(1) * 20;
            prop_assert!(made >= least, "{made} made in ten seconds, at least {least} expected");
        }
    }
}

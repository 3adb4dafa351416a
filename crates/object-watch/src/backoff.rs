//! How long a watch pauses after a failure. Pure: time and randomness are parameters.

use std::time::Duration;

/// The first pause, before jitter.
const FIRST: Duration = Duration::from_millis(200);
/// The longest pause, before jitter.
const LONGEST: Duration = Duration::from_secs(5);
/// An attempt that lasted this long was no failure of the API server's to answer: requests other than watches end before.
pub(crate) const STABLE: Duration = Duration::from_secs(120);

/// One attempt at a watch, from its first request to its failure.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Attempt {
    pub lasted: Duration,
    /// It delivered an event that takes an answer of the API server.
    pub delivered: bool,
}

#[derive(Debug)]
pub(crate) struct Backoff {
    next: Duration,
}

impl Default for Backoff {
    fn default() -> Self {
        Self { next: FIRST }
    }
}

impl Backoff {
    /// The pause after an attempt failed. `random` is between 0 and 1.
    ///
    /// An attempt that delivered events and failed at once does not reset the pause: a server whose lists succeed and whose watches
    /// fail would otherwise be listed without end.
    pub fn pause(&mut self, attempt: Attempt, random: f64) -> Duration {
        let worked = attempt.delivered && attempt.lasted > self.next;
        if worked || attempt.lasted > STABLE {
            self.next = FIRST;
        }
        let pause = self.next;
        self.next = pause.saturating_mul(2).min(LONGEST);
        pause.mul_f64(1.0 - random.clamp(0.0, 1.0) / 2.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn attempt(lasted_ms: u64, delivered: bool) -> Attempt {
        Attempt {
            lasted: Duration::from_millis(lasted_ms),
            delivered,
        }
    }

    #[test]
    fn pauses_double_up_to_five_seconds_until_an_attempt_worked() {
        let refused = attempt(1, false);
        let slow = attempt(60_000, false);
        let listed_only = attempt(50, true);
        for (attempts, expected_ms) in [
            (vec![refused], vec![200]),
            (
                vec![refused; 7],
                vec![200, 400, 800, 1600, 3200, 5000, 5000],
            ),
            // A server that takes long to fail is overloaded.
            (vec![slow; 3], vec![200, 400, 800]),
            (vec![listed_only; 3], vec![200, 400, 800]),
            (
                vec![refused, refused, attempt(801, true), refused],
                vec![200, 400, 200, 400],
            ),
            // A watch without events, of objects that do not change.
            (
                vec![refused, refused, attempt(120_001, false)],
                vec![200, 400, 200],
            ),
        ] {
            let mut backoff = Backoff::default();
            let pauses: Vec<u128> = attempts
                .iter()
                .map(|attempt| backoff.pause(*attempt, 0.0).as_millis())
                .collect();
            assert_eq!(pauses, expected_ms, "{attempts:?}");
        }
    }

    #[test]
    fn jitter_shortens_a_pause_by_up_to_half() {
        for (random, expected_ms) in [(0.0, 200), (0.5, 150), (1.0, 100), (-1.0, 200), (7.0, 100)] {
            let pause = Backoff::default().pause(Attempt::default(), random);
            assert_eq!(pause.as_millis(), expected_ms, "{random}");
        }
    }
}

//! Decides when a request is retried, and the pause before. Pure; randomness is a parameter.

use std::time::Duration;

use http::StatusCode;

/// How often, and with which pauses, a request is retried.
#[derive(Clone, Debug, PartialEq)]
pub struct RetryPolicy {
    /// The total number of attempts, including the first.
    pub max_attempts: u32,
    /// The pause after the first failed attempt; it doubles with each further one.
    pub base_backoff: Duration,
    /// The longest pause, before jitter.
    pub max_backoff: Duration,
}

impl Default for RetryPolicy {
    fn default() -> Self {
        Self {
            max_attempts: 6,
            base_backoff: Duration::from_millis(500),
            max_backoff: Duration::from_secs(8),
        }
    }
}

impl RetryPolicy {
    /// The pause after this many failed attempts. `random` is uniform in `0..1` and adds up to a quarter of jitter in either direction.
    pub(crate) fn backoff(&self, failed_attempts: u32, random: f64) -> Duration {
        let doublings = failed_attempts.saturating_sub(1).min(20);
        let wait = self
            .base_backoff
            .saturating_mul(1 << doublings)
            .min(self.max_backoff);
        wait.mul_f64(0.75 + 0.5 * random.clamp(0.0, 1.0))
    }
}

/// Whether a request with this response may be retried.
pub(crate) fn is_retryable(status: StatusCode) -> bool {
    matches!(status.as_u16(), 500 | 502 | 503 | 504)
}

/// A number in `0..1`.
pub(crate) fn random() -> f64 {
    let (_, low) = uuid::Uuid::new_v4().as_u64_pair();
    let bits = u32::try_from(low & u64::from(u32::MAX)).unwrap_or_default();
    f64::from(bits) / f64::from(u32::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pauses_double_up_to_the_cap_with_a_quarter_of_jitter() {
        let policy = RetryPolicy::default();
        let middle: Vec<_> = (1..=6)
            .map(|failed| policy.backoff(failed, 0.5).as_millis())
            .collect();
        assert_eq!(middle, [500, 1000, 2000, 4000, 8000, 8000]);
        assert_eq!(policy.backoff(1, 0.0), Duration::from_millis(375));
        assert_eq!(policy.backoff(9, 1.0), Duration::from_secs(10));
        assert_eq!(policy.backoff(u32::MAX, 0.5), Duration::from_secs(8));
    }

    #[test]
    fn only_server_errors_are_retried() {
        for code in [500, 502, 503, 504] {
            assert!(is_retryable(StatusCode::from_u16(code).unwrap()));
        }
        for code in [200, 400, 403, 404, 409, 413, 429, 501] {
            assert!(!is_retryable(StatusCode::from_u16(code).unwrap()));
        }
    }

    #[test]
    fn random_numbers_differ_and_stay_in_range() {
        let numbers: Vec<f64> = (0..100).map(|_| random()).collect();
        assert!(numbers.iter().all(|number| (0.0..=1.0).contains(number)));
        assert!(
            numbers
                .iter()
                .any(|number| (number - numbers[0]).abs() > f64::EPSILON)
        );
    }
}

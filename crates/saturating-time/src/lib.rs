//! Saturating time arithmetic. `+`, `-` and `*` on instants, timestamps and durations panic on overflow, and clients choose most
//! durations in this system.
//!
//! Clippy's `arithmetic_side_effects` forbids those operators in product code; its settings in `clippy.toml` allow them for
//! integers.
//! [`Duration`] itself has `saturating_add`, `saturating_sub` and `saturating_mul`.

#![cfg_attr(not(test), warn(clippy::arithmetic_side_effects))]

use std::time::{Duration, Instant, SystemTime};

/// The distance of an [`Instant`] that stands for "never". The type has no maximum; tokio uses the same distance.
const FAR: Duration = Duration::from_secs(86_400 * 365 * 30);

/// Points in time that can be shifted without a panic.
pub trait SaturatingTime: Sized {
    /// The time `by` after this one, or the maximum.
    #[must_use]
    fn later_by(self, by: Duration) -> Self;

    /// The time `by` before this one, or the minimum.
    #[must_use]
    fn earlier_by(self, by: Duration) -> Self;
}

/// For types without a known maximum and minimum: on overflow, shifts by [`FAR`], or not at all if that overflows too.
macro_rules! impl_saturating_without_bounds {
    ($time:ty) => {
        impl SaturatingTime for $time {
            fn later_by(self, by: Duration) -> Self {
                let shifted = self.checked_add(by).or_else(|| self.checked_add(FAR));
                shifted.unwrap_or(self)
            }

            fn earlier_by(self, by: Duration) -> Self {
                let shifted = self.checked_sub(by).or_else(|| self.checked_sub(FAR));
                shifted.unwrap_or(self)
            }
        }
    };
}

impl_saturating_without_bounds!(Instant);
impl_saturating_without_bounds!(SystemTime);
#[cfg(feature = "tokio")]
impl_saturating_without_bounds!(tokio::time::Instant);

#[cfg(feature = "jiff")]
impl SaturatingTime for jiff::Timestamp {
    fn later_by(self, by: Duration) -> Self {
        self.checked_add(by).unwrap_or(Self::MAX)
    }

    fn earlier_by(self, by: Duration) -> Self {
        self.checked_sub(by).unwrap_or(Self::MIN)
    }
}

/// The examples of README.md.
#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct ReadmeExamples;

#[cfg(test)]
mod tests {
    use super::*;

    fn orders<T: SaturatingTime + Copy + Ord + std::fmt::Debug>(now: T) {
        let second = Duration::from_secs(1);
        assert!(now.later_by(second) > now);
        assert!(now.earlier_by(second) < now);
        assert_eq!(now.later_by(second).earlier_by(second), now);
        assert!(now.later_by(Duration::MAX) > now.later_by(second));
        // An instant may count from the boot of the machine, so there may be no earlier one.
        assert!(now.earlier_by(Duration::MAX) <= now);
    }

    #[test]
    fn no_duration_overflows_any_time() {
        orders(Instant::now());
        orders(SystemTime::now());
        #[cfg(feature = "tokio")]
        orders(tokio::time::Instant::now());
        #[cfg(feature = "jiff")]
        {
            use jiff::Timestamp;
            orders(Timestamp::now());
            assert_eq!(Timestamp::now().later_by(Duration::MAX), Timestamp::MAX);
            assert_eq!(Timestamp::now().earlier_by(Duration::MAX), Timestamp::MIN);
        }
    }
}

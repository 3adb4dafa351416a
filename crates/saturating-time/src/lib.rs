//! Time arithmetic that saturates. `+`, `-` and `*` on instants, timestamps and durations panic on overflow, and most durations of
//! this system are numbers that a client chose.
//!
//! Clippy's `arithmetic_side_effects` refuses those operators in product code; its settings in `clippy.toml` let integers pass.
//! [`Duration`] itself has `saturating_add`, `saturating_sub` and `saturating_mul`.

#![cfg_attr(not(test), warn(clippy::arithmetic_side_effects))]

use std::time::{Duration, Instant, SystemTime};

/// How far away an [`Instant`] is that stands for "never". The type has no greatest value; tokio uses the same distance.
const FAR: Duration = Duration::from_secs(86_400 * 365 * 30);

/// Moments, shifted without a panic.
pub trait SaturatingTime: Sized {
    /// The moment that is `by` after this one, or the last one there is.
    #[must_use]
    fn later_by(self, by: Duration) -> Self;

    /// The moment that is `by` before this one, or the first one there is.
    #[must_use]
    fn earlier_by(self, by: Duration) -> Self;
}

/// For types that cannot tell their ends: as far as [`FAR`], or not at all.
macro_rules! saturate_without_ends {
    ($moment:ty) => {
        impl SaturatingTime for $moment {
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

saturate_without_ends!(Instant);
saturate_without_ends!(SystemTime);
#[cfg(feature = "tokio")]
saturate_without_ends!(tokio::time::Instant);

#[cfg(feature = "jiff")]
impl SaturatingTime for jiff::Timestamp {
    fn later_by(self, by: Duration) -> Self {
        self.checked_add(by).unwrap_or(Self::MAX)
    }

    fn earlier_by(self, by: Duration) -> Self {
        self.checked_sub(by).unwrap_or(Self::MIN)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn orders<T: SaturatingTime + Copy + Ord + std::fmt::Debug>(now: T) {
        let second = Duration::from_secs(1);
        assert!(now.later_by(second) > now);
        assert!(now.earlier_by(second) < now);
        assert_eq!(now.later_by(second).earlier_by(second), now);
        assert!(now.later_by(Duration::MAX) > now.later_by(second));
        // An instant may count from the start of the machine, so there may be nothing before it.
        assert!(now.earlier_by(Duration::MAX) <= now);
    }

    #[test]
    fn no_duration_is_too_long_for_any_moment() {
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

//! When an object expires; the same for sandboxes and claims.
//!
//! Two deadlines may be set: an absolute time, and a span of time after the work was finished. The earlier one counts.

use std::time::Duration;

use api::conditions::{self, ConditionType};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{Condition, Time};
use k8s_openapi::jiff::{SignedDuration, Timestamp};

/// The deadlines of an object.
#[derive(Clone, Copy, Debug, Default)]
pub struct Deadlines<'a> {
    /// The absolute time it ends.
    pub shutdown_time: Option<&'a Time>,
    /// How long after it finished it ends.
    pub ttl_seconds_after_finished: Option<i32>,
    /// The object's conditions: the transition of `Finished` to True is when it finished.
    pub conditions: &'a [Condition],
}

/// Whether an object has expired, or when it will.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Expiry {
    /// It has no deadline yet.
    Never,
    /// It expires after this time.
    In(Duration),
    /// It has expired.
    Passed,
}

impl Expiry {
    pub fn has_passed(self) -> bool {
        self == Self::Passed
    }

    /// The delay until the next check, at least `floor`, so that a small clock skew causes no busy loop.
    pub fn requeue_after(self, floor: Duration) -> Option<Duration> {
        match self {
            Self::In(left) => Some(left.max(floor)),
            Self::Never | Self::Passed => None,
        }
    }
}

/// Whether an object has expired at `now`, or when it will.
pub fn expiry(deadlines: &Deadlines<'_>, now: Timestamp) -> Expiry {
    let shutdown = deadlines.shutdown_time.map(|time| time.0);
    let Some(deadline) = [shutdown, finished_deadline(deadlines)]
        .into_iter()
        .flatten()
        .min()
    else {
        return Expiry::Never;
    };
    // A negative span does not convert: the deadline is past.
    match Duration::try_from(deadline.duration_since(now)) {
        Ok(left) if !left.is_zero() => Expiry::In(left),
        _ => Expiry::Passed,
    }
}

fn finished_deadline(deadlines: &Deadlines<'_>) -> Option<Timestamp> {
    let ttl = deadlines.ttl_seconds_after_finished?;
    let finished = conditions::find(deadlines.conditions, ConditionType::Finished)
        .filter(|condition| condition.status == "True")?;
    let finished_at = finished.last_transition_time.0;
    Some(
        finished_at
            .checked_add(SignedDuration::from_secs(i64::from(ttl)))
            .unwrap_or(Timestamp::MAX),
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    const NOW: i64 = 1_776_081_600;

    fn at(offset: i64) -> Timestamp {
        Timestamp::from_second(NOW + offset).unwrap()
    }

    fn finished(offset: i64, status: &str) -> Vec<Condition> {
        vec![Condition {
            type_: "Finished".to_owned(),
            status: status.to_owned(),
            reason: "PodSucceeded".to_owned(),
            message: String::new(),
            observed_generation: None,
            last_transition_time: Time(at(offset)),
        }]
    }

    fn seconds(count: u64) -> Expiry {
        Expiry::In(Duration::from_secs(count))
    }

    #[test]
    fn the_earlier_deadline_counts() {
        struct Case {
            shutdown_in: Option<i64>,
            ttl: Option<i32>,
            finished: Vec<Condition>,
            expected: Expiry,
        }
        let case = |shutdown_in, ttl, finished, expected| Case {
            shutdown_in,
            ttl,
            finished,
            expected,
        };
        let done = || finished(-30, "True");
        let table = [
            case(None, None, done(), Expiry::Never),
            case(None, Some(120), done(), seconds(90)),
            case(None, Some(0), done(), Expiry::Passed),
            case(None, Some(30), done(), Expiry::Passed),
            case(Some(5), Some(120), done(), seconds(5)),
            case(Some(300), Some(120), done(), seconds(90)),
            case(Some(300), None, done(), seconds(300)),
            case(Some(0), None, Vec::new(), Expiry::Passed),
            case(Some(-1), None, Vec::new(), Expiry::Passed),
            case(Some(-1), Some(120), done(), Expiry::Passed),
            // A span after the end begins only with the end.
            case(None, Some(0), Vec::new(), Expiry::Never),
            case(None, Some(0), finished(-30, "False"), Expiry::Never),
            case(Some(7), Some(0), Vec::new(), seconds(7)),
            case(None, Some(i32::MAX), done(), seconds(2_147_483_617)),
        ];
        for (number, case) in table.into_iter().enumerate() {
            let shutdown_time = case.shutdown_in.map(|offset| Time(at(offset)));
            let deadlines = Deadlines {
                shutdown_time: shutdown_time.as_ref(),
                ttl_seconds_after_finished: case.ttl,
                conditions: &case.finished,
            };
            assert_eq!(expiry(&deadlines, at(0)), case.expected, "case {number}");
        }
    }

    #[test]
    fn a_look_back_is_never_sooner_than_the_floor() {
        let floor = Duration::from_secs(2);
        assert_eq!(seconds(1).requeue_after(floor), Some(floor));
        assert_eq!(
            seconds(9).requeue_after(floor),
            Some(Duration::from_secs(9))
        );
        assert_eq!(Expiry::Never.requeue_after(floor), None);
        assert_eq!(Expiry::Passed.requeue_after(floor), None);
    }
}

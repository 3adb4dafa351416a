//! Which failures of a watch are logged: each once until it changes or the watch works again.

use std::time::Duration;

use crate::backoff::STABLE;
use crate::failure::Failure;

#[derive(Debug)]
pub(crate) struct FailureLog {
    /// Names the watch.
    resource: String,
    repeated: Repeated,
}

impl FailureLog {
    pub fn named(resource: String) -> Self {
        Self {
            resource,
            repeated: Repeated::default(),
        }
    }

    pub fn failed(&mut self, failure: &Failure, attempt_lasted: Duration) {
        if self.repeated.is_new(failure, attempt_lasted) {
            let resource = &self.resource;
            tracing::warn!(resource, error = %failure, "cannot watch, and will try again");
        }
    }

    pub fn worked(&mut self) {
        if self.repeated.recovers() {
            tracing::info!(resource = self.resource, "watching again");
        }
    }

    pub fn expired(&self) {
        let resource = &self.resource;
        tracing::debug!(resource, "the resource version has expired; listing again");
    }
}

/// The failure that was logged last. Pure.
#[derive(Debug, Default)]
struct Repeated(Option<Failure>);

impl Repeated {
    /// Whether a failure differs from the one before. After an attempt that lasted long it does: the watch worked in between, though
    /// it may have had no event to deliver.
    fn is_new(&mut self, failure: &Failure, attempt_lasted: Duration) -> bool {
        let is_new = self.0.as_ref() != Some(failure) || attempt_lasted > STABLE;
        if is_new {
            self.0 = Some(failure.clone());
        }
        is_new
    }

    /// Records that the watch works. Returns whether it had failed.
    fn recovers(&mut self) -> bool {
        self.0.take().is_some()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_failure_is_new_until_it_is_repeated() {
        enum Step {
            Fails(Failure, Duration),
            Works,
        }
        use Step::{Fails, Works};
        let refused = || Failure::Failed {
            message: "connection refused".to_owned(),
        };
        let soon = Duration::from_millis(1);
        let long = Duration::from_secs(121);
        for (step_results, what) in [
            (
                vec![
                    (Fails(refused(), soon), true),
                    (Fails(refused(), soon), false),
                ],
                "repeated",
            ),
            (
                vec![
                    (Fails(refused(), soon), true),
                    (Fails(Failure::NotServed, soon), true),
                    (Fails(refused(), soon), true),
                ],
                "changed",
            ),
            (
                vec![
                    (Works, false),
                    (Fails(refused(), soon), true),
                    (Works, true),
                    (Works, false),
                    (Fails(refused(), soon), true),
                ],
                "recovered",
            ),
            (
                vec![
                    (Fails(refused(), soon), true),
                    (Fails(refused(), long), true),
                    (Fails(refused(), soon), false),
                ],
                "after a quiet watch",
            ),
        ] {
            let mut repeated = Repeated::default();
            for (index, (step, expected)) in step_results.into_iter().enumerate() {
                let logged = match step {
                    Fails(failure, lasted) => repeated.is_new(&failure, lasted),
                    Works => repeated.recovers(),
                };
                assert_eq!(logged, expected, "{what}, step {index}");
            }
        }
    }
}

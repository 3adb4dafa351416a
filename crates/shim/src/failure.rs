//! Errors during the start of a container: the step that failed, and the cause.

use std::fmt::Display;

/// A failed step. It crosses a process boundary as text, so the text includes the cause.
#[derive(Debug, thiserror::Error)]
#[error("{step}: {cause}")]
pub struct Failure {
    step: String,
    cause: String,
}

/// Names the step in which an error occurred.
pub trait During<T> {
    fn during(self, step: impl Display) -> Result<T, Failure>;
}

impl<T, E: Display> During<T> for Result<T, E> {
    fn during(self, step: impl Display) -> Result<T, Failure> {
        self.map_err(|cause| Failure {
            step: step.to_string(),
            cause: cause.to_string(),
        })
    }
}

impl Failure {
    pub fn new(step: impl Display, cause: impl Display) -> Self {
        Self {
            step: step.to_string(),
            cause: cause.to_string(),
        }
    }
}

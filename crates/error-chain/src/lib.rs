#![doc = include_str!("../README.md")]
#![cfg_attr(not(test), warn(clippy::arithmetic_side_effects))]

use std::error::Error;

/// An error and its causes on one line, outermost first.
pub fn chain(error: &dyn Error) -> String {
    let causes = causes(error).map(ToString::to_string);
    join(std::iter::once(error.to_string()).chain(causes))
}

/// The causes of an error, outermost first.
pub fn causes<'a>(error: &'a dyn Error) -> impl Iterator<Item = &'a (dyn Error + 'static)> {
    std::iter::successors(error.source(), |cause| (*cause).source())
}

/// Joins the messages of a chain. Omits a message with which the text already ends: some errors quote their cause.
pub fn join(messages: impl IntoIterator<Item = String>) -> String {
    let mut text = String::new();
    for message in messages {
        if text.is_empty() {
            text = message;
        } else if !text.ends_with(&message) {
            text.push_str(": ");
            text.push_str(&message);
        }
    }
    text
}

#[cfg(test)]
mod tests {
    use std::fmt;

    use super::*;

    #[derive(Debug)]
    struct Failure(&'static str, Option<Box<Failure>>);

    impl fmt::Display for Failure {
        fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
            formatter.write_str(self.0)
        }
    }

    impl Error for Failure {
        fn source(&self) -> Option<&(dyn Error + 'static)> {
            self.1.as_ref().map(|cause| cause as &(dyn Error + 'static))
        }
    }

    #[test]
    fn each_cause_is_printed_once() {
        for (messages, expected) in [
            (vec!["a"], "a"),
            (vec!["a", "b", "c"], "a: b: c"),
            (vec!["a: b", "b", "c"], "a: b: c"),
            (vec!["a", "a"], "a"),
            (vec!["", "b"], "b"),
        ] {
            let error = messages
                .iter()
                .rev()
                .fold(None, |cause, message| {
                    Some(Box::new(Failure(message, cause)))
                })
                .unwrap();
            assert_eq!(chain(&error), expected);
            assert_eq!(causes(&*error).count(), messages.len() - 1);
        }
    }
}

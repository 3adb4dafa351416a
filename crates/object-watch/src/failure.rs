//! Why a watch does not work, without the text of a response that may quote a secret.

use api::errors::chain;
use kube::core::Status;
use kube::runtime::watcher;

/// With this reason `kube` reports a response that is not a `Status`; the message is then its whole body.
const BODY_AS_MESSAGE: &str = "Failed to parse error data";
/// The longest part of a server's message that is kept, in characters.
const MAX_MESSAGE: usize = 512;

/// Why a watch does not work at the moment. It is retried.
///
/// # Guarantees
/// No text of it contains the body of a response, except the message of a `Status`.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Failure {
    /// The API server does not accept the client's credentials (401).
    #[error("the API server does not accept the credentials: {message}")]
    Unauthorized { message: String },
    /// The user may not list or watch the objects (403).
    #[error("the API server refuses it: {message}")]
    Forbidden { message: String },
    /// The API server does not have the kind (404), for example because its CRD is not installed.
    #[error("the API server does not serve the kind")]
    NotServed,
    #[error("{message}")]
    Failed { message: String },
}

impl Failure {
    /// Whether the API server has answered that this client cannot watch the kind. It may permit it later.
    pub fn is_refusal(&self) -> bool {
        !matches!(self, Self::Failed { .. })
    }

    /// The failure behind an error of the watch; none if the resource version has expired, which a new list mends.
    pub(crate) fn of(error: &watcher::Error) -> Option<Self> {
        use watcher::Error::{
            InitialListFailed, NoResourceVersion, WatchError, WatchFailed, WatchStartFailed,
        };
        let (operation, cause) = match error {
            WatchError(status) => return Self::of_status("watch", status),
            InitialListFailed(cause) => ("list", cause),
            WatchStartFailed(cause) | WatchFailed(cause) => ("watch", cause),
            NoResourceVersion => {
                let message = "the API server sent no resource version".to_owned();
                return Some(Self::Failed { message });
            }
        };
        match cause {
            kube::Error::Api(status) => Self::of_status(operation, status),
            // Not the chain of the watcher's error, whose own text quotes the cause.
            cause => Some(Self::Failed {
                message: format!("{operation}: {}", chain(cause)),
            }),
        }
    }

    fn of_status(operation: &str, status: &Status) -> Option<Self> {
        let message = message_of(status);
        Some(match status.code {
            410 => return None,
            401 => Self::Unauthorized { message },
            404 => Self::NotServed,
            403 => Self::Forbidden { message },
            _ => Self::Failed {
                message: format!("{operation}: {message}"),
            },
        })
    }
}

fn message_of(status: &Status) -> String {
    if status.reason == BODY_AS_MESSAGE || status.message.is_empty() {
        return format!("status {}", status.code);
    }
    status.message.chars().take(MAX_MESSAGE).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn status(code: u16, reason: &str, message: &str) -> Box<Status> {
        Status::failure(message, reason).with_code(code).boxed()
    }

    #[test]
    fn each_answer_of_the_server_has_its_meaning() {
        let message = || "not you".to_owned();
        for (code, reason, expected) in [
            (410, "Expired", None),
            (410, "Gone", None),
            (
                401,
                "Unauthorized",
                Some(Failure::Unauthorized { message: message() }),
            ),
            (
                403,
                "Forbidden",
                Some(Failure::Forbidden { message: message() }),
            ),
            (404, "NotFound", Some(Failure::NotServed)),
            (
                429,
                "TooManyRequests",
                Some(Failure::Failed {
                    message: "list: not you".to_owned(),
                }),
            ),
        ] {
            let of_list = watcher::Error::InitialListFailed(kube::Error::Api(status(
                code, reason, "not you",
            )));
            assert_eq!(Failure::of(&of_list), expected);
            let of_start =
                watcher::Error::WatchStartFailed(kube::Error::Api(status(code, reason, "not you")));
            let of_event = watcher::Error::WatchError(status(code, reason, "not you"));
            let of_start = Failure::of(&of_start);
            assert_eq!(of_start, Failure::of(&of_event), "{code}");
            assert_eq!(of_start.is_none(), expected.is_none(), "{code}");
        }
    }

    #[test]
    fn no_failure_quotes_a_body() {
        let text = r#"{"data":"hunter2"}"#;
        let undecodable = serde_json::from_str::<k8s_openapi::api::core::v1::Secret>(text);
        let undecodable = undecodable.unwrap_err();
        assert!(undecodable.to_string().contains("hunter2"));
        let page = "<html>hunter2</html>";
        for error in [
            watcher::Error::WatchFailed(kube::Error::SerdeError(undecodable)),
            watcher::Error::WatchError(status(500, BODY_AS_MESSAGE, page)),
            watcher::Error::InitialListFailed(kube::Error::Api(status(502, BODY_AS_MESSAGE, page))),
            watcher::Error::WatchStartFailed(kube::Error::Api(status(403, BODY_AS_MESSAGE, page))),
        ] {
            let failure = Failure::of(&error).unwrap();
            assert!(!format!("{failure} {failure:?}").contains("hunter2"));
        }
    }
}

//! Why a pod does not start: the text at the end of a Ready condition's message, which controllers write and clients parse.
//!
//! The reason of the condition stays the one that the specification fixes (`DependenciesNotReady`); the message goes on after it:
//!
//! ```text
//! Pod exists with phase: Pending; container "main": ImagePullBackOff: example/missing:1 is not found at registry.example
//! Pod exists with phase: Pending; pod: Unschedulable: 0/3 nodes are available: 3 Insufficient memory.
//! ```
//!
//! The detail is text of a kubelet or a registry. It is one line, bounded in length and without credentials, since a claim may be read
//! by users who may not read pods.

use std::fmt;

/// The most characters of a detail.
const DETAIL_MAX: usize = 400;
/// What replaces a credential.
const REDACTED: &str = "[redacted]";

/// The container or pod with the problem.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Subject {
    Pod,
    Container(String),
}

/// Why a pod does not start.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StartProblem {
    pub subject: Subject,
    /// The reason that the kubelet or the scheduler gives, such as `ErrImagePull`.
    pub reason: String,
    /// Empty if nothing more is known.
    pub detail: String,
}

/// The permanent failures: clients that see one stop waiting at once.
///
/// Every other problem may be transient, `Unschedulable`, `CrashLoopBackOff` and `CreateContainerConfigError` included: a node becomes
/// free, a dependency starts, a Secret is created.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Lasting {
    /// The image reference cannot be parsed.
    InvalidImageName,
    /// The pull policy is Never and the node does not have the image.
    ErrImageNeverPull,
    /// The node has no runtime for the pod's runtime class.
    RuntimeClassUnavailable,
    /// The registry says that the image does not exist, or denies access to it, and the first back-off has begun. Other failures to
    /// pull, and the first failure of this kind, may be transient.
    ImagePullBackOff,
}

impl StartProblem {
    /// A problem with a detail from a kubelet or a registry: it becomes one line, bounded and without credentials.
    pub fn new(subject: Subject, reason: &str, detail: &str) -> Self {
        Self {
            subject,
            reason: single_word(reason),
            detail: bounded(&redacted(detail)),
        }
    }

    /// Parses the problem at the end of a condition's message, if there is one.
    pub fn parse(message: &str) -> Option<Self> {
        const CONTAINER: &str = "; container \"";
        const POD: &str = "; pod: ";
        // Everything before the first marker is the controller's own text.
        let start = [message.find(CONTAINER), message.find(POD)]
            .into_iter()
            .flatten()
            .min()?;
        let problem = message.get(start..)?;
        let (subject, rest) = if let Some(rest) = problem.strip_prefix(POD) {
            (Subject::Pod, rest)
        } else {
            let (name, rest) = problem.strip_prefix(CONTAINER)?.split_once("\": ")?;
            (Subject::Container(name.to_owned()), rest)
        };
        let (reason, detail) = rest.split_once(": ").unwrap_or((rest, ""));
        Some(Self {
            subject,
            reason: reason.to_owned(),
            detail: detail.to_owned(),
        })
    }

    /// The permanent failure behind the problem, if it is permanent.
    pub fn lasting(&self) -> Option<Lasting> {
        match self.reason.as_str() {
            "InvalidImageName" => Some(Lasting::InvalidImageName),
            "ErrImageNeverPull" => Some(Lasting::ErrImageNeverPull),
            "RuntimeClassUnavailable" => Some(Lasting::RuntimeClassUnavailable),
            "ImagePullBackOff" if is_refusal(&self.detail) => Some(Lasting::ImagePullBackOff),
            _ => None,
        }
    }
}

impl fmt::Display for StartProblem {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.subject {
            Subject::Pod => write!(formatter, "pod: {}", self.reason)?,
            Subject::Container(name) => {
                write!(formatter, "container \"{name}\": {}", self.reason)?;
            }
        }
        if self.detail.is_empty() {
            return Ok(());
        }
        write!(formatter, ": {}", self.detail)
    }
}

/// Whether a registry answered that there is no such image for this client, by the messages of our node, containerd and CRI-O. A registry
/// that cannot be reached, or is too busy, may answer otherwise later.
fn is_refusal(detail: &str) -> bool {
    const REFUSALS: [&str; 9] = [
        "not found",
        "manifest unknown",
        "name unknown",
        "denies access",
        "access denied",
        "access to the resource is denied",
        "denied: denied",
        "unauthorized: ",
        "insufficient_scope",
    ];
    const PASSING: [&str; 5] = [
        "no such host",
        "executable file not found",
        "toomanyrequests",
        "connection refused",
        "timeout",
    ];
    let detail = detail.to_ascii_lowercase();
    let says = |words: &[&str]| words.iter().any(|word| detail.contains(word));
    says(&REFUSALS) && !says(&PASSING)
}

/// Whether a text has the form of a reason: one word. Other text is not part of the message's format.
fn single_word(reason: &str) -> String {
    let word = |character: &char| character.is_ascii_alphanumeric();
    reason.chars().filter(word).take(64).collect()
}

/// One line of at most [`DETAIL_MAX`] characters. Control characters and runs of white space become one space.
fn bounded(text: &str) -> String {
    let is_blank = |character: char| character.is_whitespace() || character.is_control();
    let words: Vec<&str> = text
        .split(is_blank)
        .filter(|word| !word.is_empty())
        .collect();
    let line = words.join(" ");
    if line.chars().count() <= DETAIL_MAX {
        return line;
    }
    let mut cut: String = line.chars().take(DETAIL_MAX.saturating_sub(1)).collect();
    cut.push('…');
    cut
}

/// The text without user names, passwords and queries of URLs, credentials before an `@`, and tokens of an Authorization header.
fn redacted(text: &str) -> String {
    let mut previous = "";
    let mut words = Vec::new();
    for word in text.split(char::is_whitespace) {
        let is_token = ["bearer", "basic"]
            .iter()
            .any(|scheme| previous.eq_ignore_ascii_case(scheme));
        words.push(if is_token && word.len() > 8 {
            REDACTED.to_owned()
        } else {
            redacted_word(word)
        });
        previous = word.trim_matches(|character: char| !character.is_ascii_alphanumeric());
    }
    words.join(" ")
}

fn redacted_word(word: &str) -> String {
    let word = match (word.find("://"), word.find('?')) {
        (Some(scheme), Some(query)) if scheme < query => {
            let (address, query) = word.split_at(query);
            let end = query.trim_start_matches(|character: char| {
                !matches!(character, '"' | '\'' | ')' | '>' | ',')
            });
            format!("{address}?{REDACTED}{end}")
        }
        _ => word.to_owned(),
    };
    let Some((before, after)) = word.split_once('@') else {
        return word;
    };
    // `name@sha256:…` is an image by its digest.
    let is_digest = after.starts_with("sha256:") || after.starts_with("sha512:");
    if is_digest {
        return word;
    }
    let begin = before
        .rfind(['/', '"', '\'', '(', '=', '<'])
        .map_or(0, |index| index.saturating_add(1));
    let kept = before.get(..begin).unwrap_or_default();
    format!("{kept}{REDACTED}@{after}")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn container(reason: &str, detail: &str) -> StartProblem {
        StartProblem::new(Subject::Container("main".to_owned()), reason, detail)
    }

    #[test]
    fn a_problem_is_read_back_from_the_message_it_ends() {
        let problems = [
            container("ErrImagePull", "a/b:1 is not found at r.example: 404"),
            container("CrashLoopBackOff", ""),
            StartProblem::new(
                Subject::Pod,
                "Unschedulable",
                "0/3 nodes: no memory; pod: x",
            ),
        ];
        for problem in problems {
            for before in [
                "Pod exists with phase: Pending",
                "Pod is Running but not Ready; Service Exists",
            ] {
                let message = format!("{before}; {problem}");
                assert_eq!(StartProblem::parse(&message), Some(problem.clone()));
            }
        }
        for message in ["", "Pod exists with phase: Pending", "Sandbox is suspended"] {
            assert_eq!(StartProblem::parse(message), None, "{message}");
        }
    }

    #[test]
    fn only_what_no_waiting_mends_ends_the_wait() {
        let lasting = [
            ("InvalidImageName", "anything"),
            (
                "ErrImageNeverPull",
                "Container image \"x\" is not present with pull policy of Never",
            ),
            ("RuntimeClassUnavailable", "no handler"),
            ("ImagePullBackOff", "a/b:1 is not found at r.example"),
            ("ImagePullBackOff", "r.example denies access to a/b: no"),
            (
                "ImagePullBackOff",
                "rpc error: code = NotFound desc = failed to resolve reference \"x\": x: not found",
            ),
            (
                "ImagePullBackOff",
                "pull access denied, repository does not exist or may require authorization",
            ),
            (
                "ImagePullBackOff",
                "reading manifest 1 in r/x: manifest unknown",
            ),
        ];
        for (reason, detail) in lasting {
            assert!(
                container(reason, detail).lasting().is_some(),
                "{reason}: {detail}"
            );
        }
        let passing = [
            ("ErrImagePull", "a/b:1 is not found at r.example"),
            ("ImagePullBackOff", "cannot reach https://r.example/v2/"),
            (
                "ImagePullBackOff",
                "dial tcp: lookup r.example: no such host",
            ),
            (
                "ImagePullBackOff",
                "toomanyrequests: rate limit; access denied",
            ),
            (
                "ImagePullBackOff",
                "writing layer to disk: permission denied",
            ),
            ("ImagePullBackOff", ""),
            ("CrashLoopBackOff", "last exit code 127: not found"),
            ("CreateContainerConfigError", "secret \"s\" not found"),
            ("Unschedulable", "not found"),
        ];
        for (reason, detail) in passing {
            assert_eq!(
                container(reason, detail).lasting(),
                None,
                "{reason}: {detail}"
            );
        }
    }

    #[test]
    fn a_detail_is_one_bounded_line() {
        let problem = container("ErrImagePull", "first\nsecond\x1b[31m\u{85}third");
        assert_eq!(problem.detail, "first second [31m third");
        let long = container("ErrImagePull", &"é".repeat(5_000));
        assert_eq!(long.detail.chars().count(), DETAIL_MAX);
        assert!(long.detail.ends_with('…'));
        assert_eq!(container("Err: Image\nPull", "").reason, "ErrImagePull");
    }

    #[test]
    fn credentials_do_not_get_into_a_message() {
        let table = [
            (
                "GET https://user:hunter2@r.example/v2/?a=1: 500",
                "GET https://[redacted]@r.example/v2/?[redacted] 500",
            ),
            (
                "cannot reach \"https://cdn.example/blob?X-Amz-Signature=abcdef&n=1\": refused",
                "cannot reach \"https://cdn.example/blob?[redacted]\": refused",
            ),
            (
                "invalid image name \"robot:hunter2@r.example/x:1\"",
                "invalid image name \"[redacted]@r.example/x:1\"",
            ),
            (
                "authorization: Bearer eyJhbGciOiJ.payload.sig was refused",
                "authorization: Bearer [redacted] was refused",
            ),
            (
                "r.example/x@sha256:0123 is not found",
                "r.example/x@sha256:0123 is not found",
            ),
            ("basic auth is not supported", "basic auth is not supported"),
        ];
        for (text, expected) in table {
            assert_eq!(container("ErrImagePull", text).detail, expected);
        }
    }
}

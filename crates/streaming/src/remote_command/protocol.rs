//! The versions of the remote-command protocol, and how each reports the exit of a command.

use serde_json::json;

use super::Failure;
use crate::upgrade::Offer;

/// The protocols that exec and attach offer.
pub const OFFER: Offer = Offer {
    spdy: &[
        "v5.channel.k8s.io",
        "v4.channel.k8s.io",
        "v3.channel.k8s.io",
        "v2.channel.k8s.io",
        "channel.k8s.io",
    ],
    websocket: &[
        "v5.channel.k8s.io",
        "v4.channel.k8s.io",
        "v4.base64.channel.k8s.io",
        "base64.v4.channel.k8s.io",
        "channel.k8s.io",
        "base64.channel.k8s.io",
    ],
};

/// The protocol versions, grouped by their differences.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Version {
    /// Versions 1 and 2: no terminal sizes.
    Plain,
    /// Version 3: with terminal sizes.
    Resize,
    /// Versions 4 and 5: the exit code is reported in a `Status` object.
    Status,
}

impl Version {
    pub fn named(protocol: &str) -> Self {
        match protocol {
            "v5.channel.k8s.io"
            | "v4.channel.k8s.io"
            | "v4.base64.channel.k8s.io"
            | "base64.v4.channel.k8s.io" => Self::Status,
            "v3.channel.k8s.io" => Self::Resize,
            _ => Self::Plain,
        }
    }

    pub fn resizes(self) -> bool {
        self >= Self::Resize
    }
}

/// How a session ended.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Outcome {
    Exited(i32),
    Failed(Failure),
    ClientDisconnected,
}

impl Outcome {
    /// The bytes to send on the error stream.
    pub fn report(&self, version: Version) -> Vec<u8> {
        if version == Version::Status {
            self.status().to_string().into_bytes()
        } else {
            self.message().unwrap_or_default().into_bytes()
        }
    }

    fn message(&self) -> Option<String> {
        match self {
            Self::Exited(0) | Self::ClientDisconnected => None,
            Self::Exited(code) => Some(format!(
                "command terminated with non-zero exit code: exit status {code}"
            )),
            Self::Failed(failure) => Some(format!(
                "Internal error occurred: error executing command in container: {failure}"
            )),
        }
    }

    fn status(&self) -> serde_json::Value {
        match self {
            Self::Exited(0) | Self::ClientDisconnected => {
                json!({"metadata": {}, "status": "Success"})
            }
            Self::Exited(code) => json!({
                "metadata": {},
                "status": "Failure",
                "message": self.message(),
                "reason": "NonZeroExitCode",
                "details": {"causes": [{"reason": "ExitCode", "message": code.to_string()}]},
            }),
            Self::Failed(failure) => json!({
                "metadata": {},
                "status": "Failure",
                "message": self.message(),
                "reason": "InternalError",
                "details": {"causes": [{"message": format!("error executing command in container: {failure}")}]},
                "code": 500,
            }),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_status_reports_the_exit_code_as_a_cause() {
        let report = Outcome::Exited(3).report(Version::Status);
        let status: serde_json::Value = serde_json::from_slice(&report).unwrap();
        assert_eq!(status["reason"], "NonZeroExitCode");
        assert_eq!(status["details"]["causes"][0]["reason"], "ExitCode");
        assert_eq!(status["details"]["causes"][0]["message"], "3");
    }

    #[test]
    fn before_version_4_success_is_an_empty_report() {
        assert!(Outcome::Exited(0).report(Version::Plain).is_empty());
        let failed = Outcome::Failed(Failure("no such file".into())).report(Version::Resize);
        assert!(
            String::from_utf8(failed)
                .unwrap()
                .ends_with("container: no such file")
        );
    }

    #[test]
    fn every_offered_protocol_has_its_version() {
        for protocol in OFFER.spdy.iter().chain(OFFER.websocket) {
            let expected = match protocol {
                name if name.contains("v4") || name.contains("v5") => Version::Status,
                name if name.contains("v3") => Version::Resize,
                _ => Version::Plain,
            };
            assert_eq!(Version::named(protocol), expected, "{protocol}");
        }
    }
}

//! Levels, versions, and parsing of a namespace's PodSecurity labels.

use std::fmt;

use apimachinery::field::FieldError;
use serde_json::Value;

/// The prefix of the labels and of the audit annotations.
pub const PREFIX: &str = "pod-security.kubernetes.io/";

/// The levels, from the least to the most restrictive.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Level {
    Privileged,
    Baseline,
    Restricted,
}

impl Level {
    fn parse(text: &str) -> Result<Self, &'static str> {
        match text {
            "privileged" => Ok(Self::Privileged),
            "baseline" => Ok(Self::Baseline),
            "restricted" => Ok(Self::Restricted),
            _ => Err("must be one of privileged, baseline, restricted"),
        }
    }
}

impl fmt::Display for Level {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str(match self {
            Self::Privileged => "privileged",
            Self::Baseline => "baseline",
            Self::Restricted => "restricted",
        })
    }
}

/// The release of Kubernetes whose checks apply.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Version {
    /// 1.x
    Minor(u32),
    Latest,
}

impl Version {
    fn parse(text: &str) -> Result<Self, &'static str> {
        const PROBLEM: &str = "must be \"latest\" or \"v1.x\"";
        if text == "latest" {
            return Ok(Self::Latest);
        }
        let digits = text.strip_prefix("v1.").ok_or(PROBLEM)?;
        let is_plain = digits.bytes().all(|byte| byte.is_ascii_digit())
            && (digits.len() == 1 || !digits.starts_with('0'));
        match digits.parse() {
            Ok(minor) if is_plain => Ok(Self::Minor(minor)),
            _ => Err(PROBLEM),
        }
    }
}

impl fmt::Display for Version {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Minor(minor) => write!(formatter, "v1.{minor}"),
            Self::Latest => formatter.write_str("latest"),
        }
    }
}

/// A level in a version: `restricted:latest`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LevelVersion {
    pub level: Level,
    pub version: Version,
}

impl LevelVersion {
    const PRIVILEGED: Self = Self {
        level: Level::Privileged,
        version: Version::Latest,
    };
}

impl fmt::Display for LevelVersion {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "{}:{}", self.level, self.version)
    }
}

/// The levels of a namespace, by what happens to a pod that does not meet them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Policy {
    /// The pod is rejected.
    pub enforce: LevelVersion,
    /// The audit log gets an annotation.
    pub audit: LevelVersion,
    /// The client gets a warning.
    pub warn: LevelVersion,
}

impl Policy {
    /// Parses the labels of a namespace. Returns the policy and the errors in the labels. An invalid `enforce` level counts as
    /// restricted; an invalid `audit` or `warn` level as privileged.
    pub fn of(namespace: &Value) -> (Self, Vec<FieldError>) {
        let labels = &namespace["metadata"]["labels"];
        let label = |name: &str| labels[format!("{PREFIX}{name}").as_str()].as_str();
        let mut errors = Vec::new();
        let mut report = |name: &str, value: &str, problem: &str| {
            let path = format!("metadata.labels[{PREFIX}{name}]");
            errors.push(FieldError::invalid(path, value, problem));
        };
        let mut read = |mode: &str, if_invalid: Level| {
            let mut found = LevelVersion::PRIVILEGED;
            let mut is_valid = false;
            if let Some(text) = label(mode) {
                match Level::parse(text) {
                    Ok(level) => (found.level, is_valid) = (level, true),
                    Err(problem) => {
                        found.level = if_invalid;
                        report(mode, text, problem);
                    }
                }
            }
            let name = format!("{mode}-version");
            if let Some(text) = label(&name) {
                match Version::parse(text) {
                    Ok(version) => found.version = version,
                    Err(problem) => report(&name, text, problem),
                }
            }
            (found, is_valid)
        };
        let (enforce, is_enforced) = read("enforce", Level::Restricted);
        let (audit, _) = read("audit", Level::Privileged);
        let (mut warn, _) = read("warn", Level::Privileged);
        // Without a `warn` label, the enforced level also causes warnings about pod templates.
        if label("warn").is_none() && is_enforced && enforce.level > warn.level {
            warn.level = enforce.level;
            if label("warn-version").is_none() {
                warn.version = enforce.version;
            }
        }
        let policy = Self {
            enforce,
            audit,
            warn,
        };
        (policy, errors)
    }

    /// Whether every pod passes without errors and warnings.
    pub fn is_privileged(&self) -> bool {
        [self.enforce, self.audit, self.warn]
            .iter()
            .all(|part| part.level == Level::Privileged)
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn policy(labels: &[(&str, &str)]) -> (String, Vec<String>) {
        let labels: serde_json::Map<String, Value> = labels
            .iter()
            .map(|(name, value)| (format!("{PREFIX}{name}"), Value::from(*value)))
            .collect();
        let (policy, errors) = Policy::of(&json!({"metadata": {"labels": labels}}));
        let shown = format!("{} {} {}", policy.enforce, policy.audit, policy.warn);
        (shown, errors.iter().map(ToString::to_string).collect())
    }

    #[test]
    fn labels_set_the_enforced_audited_and_warned_levels() {
        for (labels, expected) in [
            (
                &[][..],
                "privileged:latest privileged:latest privileged:latest",
            ),
            (
                &[("enforce", "baseline")],
                "baseline:latest privileged:latest baseline:latest",
            ),
            (
                &[("enforce", "restricted"), ("enforce-version", "v1.24")],
                "restricted:v1.24 privileged:latest restricted:v1.24",
            ),
            (
                &[("enforce", "restricted"), ("warn", "baseline")],
                "restricted:latest privileged:latest baseline:latest",
            ),
            (
                &[
                    ("enforce", "restricted"),
                    ("enforce-version", "v1.0"),
                    ("warn-version", "v1.9"),
                ],
                "restricted:v1.0 privileged:latest restricted:v1.9",
            ),
            (
                &[
                    ("audit", "restricted"),
                    ("audit-version", "v1.30"),
                    ("warn", "baseline"),
                ],
                "privileged:latest restricted:v1.30 baseline:latest",
            ),
        ] {
            assert_eq!(
                policy(labels),
                (expected.to_owned(), Vec::new()),
                "{labels:?}"
            );
        }
    }

    #[test]
    fn invalid_labels_enforce_restricted_and_yield_errors() {
        let (shown, errors) = policy(&[
            ("enforce", "strict"),
            ("enforce-version", "1.24"),
            ("audit", "x"),
            ("warn", ""),
            ("warn-version", "v1.01"),
        ]);
        assert_eq!(
            shown,
            "restricted:latest privileged:latest privileged:latest"
        );
        assert_eq!(
            errors,
            [
                r#"metadata.labels[pod-security.kubernetes.io/enforce]: Invalid value: "strict": must be one of privileged, baseline, restricted"#,
                r#"metadata.labels[pod-security.kubernetes.io/enforce-version]: Invalid value: "1.24": must be "latest" or "v1.x""#,
                r#"metadata.labels[pod-security.kubernetes.io/audit]: Invalid value: "x": must be one of privileged, baseline, restricted"#,
                r#"metadata.labels[pod-security.kubernetes.io/warn]: Invalid value: "": must be one of privileged, baseline, restricted"#,
                r#"metadata.labels[pod-security.kubernetes.io/warn-version]: Invalid value: "v1.01": must be "latest" or "v1.x""#,
            ]
        );
    }
}

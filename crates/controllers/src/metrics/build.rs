//! What a program was built from, as a metric.

use prometheus::{IntGauge, Opts};

use super::WELL_FORMED;

/// The version, as a tag of the repository.
pub const GIT_VERSION: &str = concat!("v", env!("CARGO_PKG_VERSION"));
const UNKNOWN: &str = "unknown";

/// The commit a program was built from, and when.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BuildInfo {
    pub git_commit: &'static str,
    pub build_date: &'static str,
}

impl BuildInfo {
    pub const UNKNOWN: Self = Self {
        git_commit: UNKNOWN,
        build_date: UNKNOWN,
    };

    /// The gauge `agent_sandbox_build_info`, whose labels carry the information. The label `go_version` is "none".
    pub(super) fn gauge(self) -> IntGauge {
        let platform = format!("{}/{}", std::env::consts::OS, std::env::consts::ARCH);
        let options = Opts::new(
            "agent_sandbox_build_info",
            "Agent sandbox controller build metadata exposed as labels with a constant value of 1.",
        )
        .const_label("git_version", GIT_VERSION)
        .const_label("git_commit", self.git_commit)
        .const_label("build_date", self.build_date)
        .const_label("go_version", "none")
        .const_label(
            "compiler",
            concat!("rustc ", env!("CARGO_PKG_RUST_VERSION")),
        )
        .const_label("platform", platform);
        let gauge = IntGauge::with_opts(options).expect(WELL_FORMED);
        gauge.set(1);
        gauge
    }
}

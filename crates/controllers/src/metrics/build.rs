//! What this program was built from. The commit and the date are known only to builds that were told them, by
//! `AGENT_SANDBOX_GIT_COMMIT` and `AGENT_SANDBOX_BUILD_DATE`: a build that asked git would be stale by the next commit.

use prometheus::{IntGauge, Opts};

use super::WELL_FORMED;

/// The version, as a tag of the repository would say it.
pub const GIT_VERSION: &str = concat!("v", env!("CARGO_PKG_VERSION"));
const UNKNOWN: &str = "unknown";

/// The commit this program was built from.
pub fn git_commit() -> &'static str {
    option_env!("AGENT_SANDBOX_GIT_COMMIT").unwrap_or(UNKNOWN)
}

/// When this program was built.
pub fn build_date() -> &'static str {
    option_env!("AGENT_SANDBOX_BUILD_DATE").unwrap_or(UNKNOWN)
}

/// The gauge `agent_sandbox_build_info`, whose labels say it all. There is no Go in it, which its label says.
pub(super) fn info() -> IntGauge {
    let platform = format!("{}/{}", std::env::consts::OS, std::env::consts::ARCH);
    let options = Opts::new(
        "agent_sandbox_build_info",
        "Agent sandbox controller build metadata exposed as labels with a constant value of 1.",
    )
    .const_label("git_version", GIT_VERSION)
    .const_label("git_commit", git_commit())
    .const_label("build_date", build_date())
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

//! What this program was built from, as `build.rs` found out.

use controllers::metrics::BuildInfo;

/// The commit and its date.
pub const BUILD: BuildInfo = BuildInfo {
    git_commit: env!("AGENT_SANDBOX_GIT_COMMIT"),
    build_date: env!("AGENT_SANDBOX_BUILD_DATE"),
};

/// What `--version` prints.
pub const VERSION: &str = concat!(
    env!("CARGO_PKG_VERSION"),
    " (",
    env!("AGENT_SANDBOX_GIT_COMMIT"),
    " ",
    env!("AGENT_SANDBOX_BUILD_DATE"),
    ")"
);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_program_knows_its_commit() {
        let head = std::process::Command::new("git")
            .args(["rev-parse", "HEAD"])
            .output();
        let head = head.ok().filter(|output| output.status.success());
        let head = head.map(|output| String::from_utf8(output.stdout).unwrap());
        let expected = head.as_deref().map_or("unknown", str::trim);
        assert_eq!(BUILD.git_commit, expected);
        assert!(VERSION.contains(expected) && VERSION.contains(BUILD.build_date));
    }
}

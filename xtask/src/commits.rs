//! The form of commit subjects: `area: what changed`, at most 72 characters.

use std::path::Path;
use std::process::Command;

use anyhow::{Context, bail};

/// The last commit from before the rule. Later ones are checked.
const RULE_BEGINS_AFTER: &str = "7b84f29dbdac4a597b42c9e64c85382984c359dd";

const SUBJECT_MAX: usize = 72;

/// Fails with every commit since the rule began whose subject does not have the form.
///
/// A checkout without history, such as an unpacked archive, has nothing to check; a shallow one has its last commit.
pub fn check(root: &Path) -> anyhow::Result<()> {
    if !root.join(".git").exists() {
        println!("no history to check: this is not a git checkout");
        return Ok(());
    }
    let is_shallow = git(root, &["rev-parse", "--is-shallow-repository"])?.trim() == "true";
    let range = if is_shallow {
        "-1".to_owned()
    } else {
        format!("{RULE_BEGINS_AFTER}..HEAD")
    };
    let log = git(root, &["log", "--no-merges", "--format=%h %s", &range])?;
    let complaints: Vec<String> = log
        .lines()
        .filter_map(|line| {
            let (commit, subject) = line.split_once(' ')?;
            Some(format!("{commit} {subject:?}: {}", fault(subject)?))
        })
        .collect();
    if complaints.is_empty() {
        return Ok(());
    }
    bail!(
        "{} commit subjects break the rule `area: what changed`:\n  {}",
        complaints.len(),
        complaints.join("\n  ")
    );
}

fn git(root: &Path, arguments: &[&str]) -> anyhow::Result<String> {
    let output = Command::new("git")
        .args(arguments)
        .current_dir(root)
        .output()
        .context("running git")?;
    if !output.status.success() {
        bail!(
            "git {}: {}",
            arguments.join(" "),
            String::from_utf8_lossy(&output.stderr).trim()
        );
    }
    String::from_utf8(output.stdout).context("reading the output of git")
}

/// What is wrong with a subject.
fn fault(subject: &str) -> Option<&'static str> {
    let Some((area, text)) = subject.split_once(": ") else {
        return Some("it does not begin with an area and a colon");
    };
    let is_area = area.starts_with(|first: char| first.is_ascii_lowercase())
        && area
            .chars()
            .all(|found| found.is_ascii_lowercase() || found.is_ascii_digit() || found == '-');
    if !is_area {
        return Some("its area is not one word of lower-case letters, digits and dashes");
    }
    if text.trim().is_empty() {
        return Some("it does not say what changed");
    }
    if subject.chars().count() > SUBJECT_MAX {
        return Some("it has more than 72 characters");
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn subjects_have_an_area_and_a_bounded_length() {
        let long = format!("node: {}", "x".repeat(66));
        let too_long = format!("{long}x");
        for good in [
            "node: keep pods across a restart",
            "shim-protocol: one name",
            &long,
        ] {
            assert_eq!(fault(good), None, "{good}");
        }
        for bad in [
            "Keep pods across a restart",
            "node, images: plain language",
            "Node: keep pods",
            "node:keep pods",
            "node:  ",
            ": keep pods",
            &too_long,
        ] {
            assert!(fault(bad).is_some(), "{bad}");
        }
    }
}

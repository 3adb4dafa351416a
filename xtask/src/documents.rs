//! The blocks of a page for users, and the script that runs them as a reader would: in order, in one shell, in one directory.
//!
//! A block of `sh` is run by bash, one of `python` by the Python with the published SDK, one of `rust` is the example that the
//! command-line package builds. A block of `text` after one of these is what it prints: each of its lines, in this order, perhaps among
//! others. Pure; running the script is `test_clients`' business.

use std::fmt::Write;

use anyhow::Context;

/// What a block is written in.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Language {
    Shell,
    Python,
    Rust,
}

/// A block to run.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Step {
    pub language: Language,
    /// The line of the page on which the code begins.
    pub line: usize,
    pub code: String,
    /// Lines that are printed, in this order, perhaps among others.
    pub printed: Vec<String>,
}

/// The blocks of a page.
pub fn steps(page: &str) -> anyhow::Result<Vec<Step>> {
    let mut steps: Vec<Step> = Vec::new();
    let mut lines = page.lines().enumerate();
    while let Some((number, line)) = lines.next() {
        let Some(language) = line.strip_prefix("```") else {
            continue;
        };
        let mut code = String::new();
        let end = lines.by_ref().find(|(_, line)| {
            let ends = line.starts_with("```");
            if !ends {
                code.push_str(line);
                code.push('\n');
            }
            ends
        });
        end.with_context(|| format!("the block at line {} has no end", number + 1))?;
        let language = match language.trim() {
            "sh" => Language::Shell,
            "python" => Language::Python,
            "rust" => Language::Rust,
            "text" => {
                let step = steps.last_mut();
                let step = step.filter(|step| step.printed.is_empty());
                let step = step.with_context(|| {
                    format!(
                        "the output at line {} follows no block that prints it",
                        number + 1
                    )
                })?;
                step.printed = code.lines().map(str::to_owned).collect();
                continue;
            }
            // A picture or a listing.
            _ => continue,
        };
        steps.push(Step {
            language,
            line: number + 2,
            code,
            printed: Vec::new(),
        });
    }
    Ok(steps)
}

/// Whether a page needs the Python with what its reader installs.
pub fn use_python(steps: &[Step]) -> bool {
    let installs = |step: &Step| step.code.lines().any(|line| line.starts_with(PIP_INSTALL));
    steps
        .iter()
        .any(|step| step.language == Language::Python || installs(step))
}

/// What a reader installs is there already.
const PIP_INSTALL: &str = "pip install ";

/// Makes a home in which the running system, whose kubeconfig and binary are in the environment, is where a reader's would be, and a
/// directory in which the examples are where they are in the repository.
const PROLOGUE: &str = r#"set -euo pipefail
home=$(mktemp -d)
trap 'rm -rf "$home"' EXIT
mkdir -p "$home/.local/state" "$home/bin" "$home/work"
ln -s "$(dirname "$KUBECONFIG")" "$home/.local/state/agent-sandbox"
ln -s "$AGENT_SANDBOX" "$home/bin/agent-sandbox"
ln -s "$REPOSITORY/examples" "$home/work/examples"
export HOME="$home" PATH="$home/bin:${PYTHON:+$(dirname "$PYTHON"):}$PATH"
unset KUBECONFIG AGENT_SANDBOX_HOME XDG_STATE_HOME
cd "$home/work"
expect_lines() {
  awk 'BEGIN {next_line=0} NR==FNR {expected[count++]=$0; next} next_line<count && $0==expected[next_line] {next_line++}
       END {if (next_line<count) {print "not printed: " expected[next_line]; exit 1}}' "$1" "$2" && return
  echo "but:"; cat "$2"; exit 1
}
"#;

/// A bash script that runs the blocks, compares what they print, and says which line of the page it is at.
pub fn script(steps: &[Step]) -> String {
    let mut script = PROLOGUE.to_owned();
    for step in steps {
        let body = match step.language {
            Language::Shell => as_installed(&step.code),
            Language::Python => format!(
                "\"$PYTHON\" - <<'END_OF_BLOCK'\n{}END_OF_BLOCK\n",
                step.code
            ),
            Language::Rust => "\"$EXAMPLE\"\n".to_owned(),
        };
        let _ = writeln!(script, "echo '        line {}'", step.line);
        let _ = writeln!(script, "{{ :\n{body}}} > \"$home/printed\"");
        if !step.printed.is_empty() {
            let expected = step.printed.join("\n");
            let _ = writeln!(
                script,
                "cat > \"$home/expected\" <<'END_OF_BLOCK'\n{expected}\nEND_OF_BLOCK"
            );
            let _ = writeln!(script, "expect_lines \"$home/expected\" \"$home/printed\"");
        }
    }
    script
}

/// The commands of a block with the binary that is tested in place of the one that cargo would build, and with the system that runs
/// already in place of one that the reader starts. The tests are left out: they are what runs this.
fn as_installed(code: &str) -> String {
    let lines = code.lines().filter_map(|line| {
        let command = line.split(" #").next().unwrap_or_default().trim();
        let command = command.trim_end_matches('&').trim_end();
        if command == "agent-sandbox up"
            || command.starts_with("cargo build ")
            || command.starts_with("cargo test ")
            || command == "cargo xtask dist"
            || command.starts_with(PIP_INSTALL)
        {
            return None;
        }
        Some(line.replace("cargo run --release -- ", "agent-sandbox ") + "\n")
    });
    lines.collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    const PAGE: &str = "# Title\n\n```sh\ncargo run --release -- run -- true   # a remark\necho a\n```\n\n```text\na\n```\n\n\
                        ```\na picture\n```\n\n```python\nprint(1)\n```\n";

    #[test]
    fn blocks_and_what_they_print_are_found() {
        let steps = steps(PAGE).unwrap();
        assert_eq!(steps.len(), 2);
        assert_eq!(
            (steps[0].line, &steps[0].printed),
            (4, &vec!["a".to_owned()])
        );
        assert_eq!(steps[1].language, Language::Python);
        assert!(super::steps("```sh\nx\n").is_err());
        assert!(super::steps("```text\nx\n```\n").is_err());
    }

    #[test]
    fn the_script_uses_what_is_there() {
        let script = script(&steps(PAGE).unwrap());
        assert!(script.contains("agent-sandbox run -- true"), "{script}");
        let page = "```sh\ncargo build --release && export PATH=x\nagent-sandbox up &   # stays\ncargo test --workspace  # all\ncargo xtask dist  # all\npip install x\nls\n```\n";
        let steps = steps(page).unwrap();
        let script = super::script(&steps);
        assert!(script.contains("{ :\nls\n}"), "{script}");
        assert!(use_python(&steps));
    }

    #[test]
    fn output_is_compared_line_by_line_in_order() {
        let passes = |printed: &str| {
            let page = format!("```sh\necho a\necho b\necho c\n```\n```text\n{printed}\n```\n");
            let status = std::process::Command::new("bash")
                .arg("-c")
                .arg(script(&steps(&page).unwrap()))
                .env("KUBECONFIG", "/nowhere/kubeconfig")
                .env("AGENT_SANDBOX", "/nowhere/agent-sandbox")
                .env("REPOSITORY", "/nowhere")
                .stdout(std::process::Stdio::null())
                .status();
            status.unwrap().success()
        };
        assert!(passes("a\nc") && passes("a\nb\nc"));
        assert!(!passes("c\na") && !passes("ab") && !passes("c\nd"));
    }
}

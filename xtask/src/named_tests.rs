//! The tests that docs/security.md and docs/compatibility.md name as evidence of a promise must exist.

use std::collections::BTreeSet;

use crate::links::Text;

/// The pages whose promises name tests.
const PAGES: [&str; 2] = ["docs/security.md", "docs/compatibility.md"];

/// An identifier with fewer underscores may be a field, a file or a metric.
const UNDERSCORES_MIN: usize = 3;

/// Every test that a page names and no Rust or Python file defines.
pub fn check(texts: &[Text]) -> Vec<String> {
    let defined: BTreeSet<&str> = texts
        .iter()
        .flat_map(|text| text.content.lines())
        .filter_map(defined_function)
        .collect();
    let pages = texts
        .iter()
        .filter(|text| PAGES.iter().any(|page| text.path.ends_with(page)));
    let mut complaints = Vec::new();
    for page in pages {
        for name in named_tests(&page.content) {
            let exists = match name.strip_suffix('…') {
                Some(prefix) => starts_any(&defined, prefix),
                None => defined.contains(name),
            };
            if !exists {
                let page = page.path.display();
                complaints.push(format!("{page}: no test is called `{name}`"));
            }
        }
    }
    complaints
}

/// The function that a line of Rust or Python defines.
fn defined_function(line: &str) -> Option<&str> {
    let line = line.trim_start();
    let line = line.strip_prefix("pub ").unwrap_or(line);
    let line = line.strip_prefix("async ").unwrap_or(line);
    let rest = line
        .strip_prefix("fn ")
        .or_else(|| line.strip_prefix("def "))?;
    let end = rest.find(|c: char| !is_identifier(c))?;
    Some(&rest[..end])
}

/// The code spans of a page that are names of tests, without the modules before them. A name may end in an ellipsis.
fn named_tests(page: &str) -> impl Iterator<Item = &str> {
    page.lines()
        .flat_map(|line| line.split('`').skip(1).step_by(2))
        .map(|span| span.rsplit("::").next().unwrap_or(span))
        .filter(|name| {
            let word = name.strip_suffix('…').unwrap_or(name);
            word.chars().all(is_identifier)
                && word.starts_with(|c: char| c.is_ascii_lowercase())
                && word.matches('_').count() >= UNDERSCORES_MIN
        })
}

fn starts_any(names: &BTreeSet<&str>, prefix: &str) -> bool {
    names
        .range(prefix..)
        .next()
        .is_some_and(|name| name.starts_with(prefix))
}

fn is_identifier(c: char) -> bool {
    c.is_ascii_alphanumeric() || c == '_'
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_test_that_a_page_names_must_be_defined() {
        let text = |path: &str, content: &str| Text {
            path: path.into(),
            content: content.to_owned(),
        };
        let sources = "    async fn a_pod_cannot_escape() {\ndef kinds_are_listed_in_order(api):\n";
        for (named, missing) in [
            ("`a_pod_cannot_escape`", false),
            ("`network::a_pod_cannot_escape`", false),
            ("`a_pod_cannot_…`", false),
            ("`kinds_are_listed_in_order`", false),
            ("`a_pod_cannot_flee_…`", true),
            ("`a_pod_cannot_esc`", true),
            ("`store.sqlite3`, `max_age`, `pods/exec`", false),
        ] {
            let texts = [
                text("crates/a/tests/b.rs", sources),
                text("docs/security.md", named),
            ];
            assert_eq!(check(&texts).len(), usize::from(missing), "{named}");
        }
    }
}

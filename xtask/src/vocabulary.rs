//! Words that hide a standard term of the field, and the check that refuses them in the crates, the documentation and the README.
//!
//! Files that still contain such words are listed in `xtask/vocabulary-allowances.txt`. The list only shrinks: a file that is not
//! listed must contain none of the words, and a listed file that no longer contains any must be removed from the list.

use std::collections::BTreeSet;
use std::fs;
use std::path::Path;

use anyhow::Context;

use crate::links::Text;

/// The list of files that still contain refused words, below the repository's root.
const ALLOWANCES: &str = "xtask/vocabulary-allowances.txt";

/// Refused words, and the term to use instead. This file is outside the checked directories.
const REFUSED: [(&str, &str); 10] = [
    ("patience", "timeout"),
    ("whoever", "name the client, the user or the process"),
    ("whomever", "name the client, the user or the process"),
    ("somebody", "name the client, the user or the process"),
    ("nobody", "no client, no user, no process"),
    ("unsaid", "suppressed, not reported"),
    ("untold", "suppressed, not reported"),
    ("happenings", "events"),
    ("is none", "there is no …, or: is invalid"),
    ("system call filter", "seccomp filter"),
];

/// Checks the vocabulary of the repository's texts.
pub fn check(root: &Path, texts: &[Text]) -> anyhow::Result<Vec<String>> {
    let path = root.join(ALLOWANCES);
    let allowances =
        fs::read_to_string(&path).with_context(|| format!("reading {}", path.display()))?;
    let texts = texts
        .iter()
        .map(|text| (text.path.display().to_string(), text.content.as_str()));
    Ok(complaints(texts, &allowances))
}

/// Every refused word in a file that is not allowed to contain it, and every allowance that is not needed any more.
fn complaints<'t>(texts: impl Iterator<Item = (String, &'t str)>, allowances: &str) -> Vec<String> {
    let mut unused: BTreeSet<&str> = allowances
        .lines()
        .map(str::trim)
        .filter(|line| !line.is_empty() && !line.starts_with('#'))
        .collect();
    let mut complaints = Vec::new();
    for (path, content) in texts.filter(|(path, _)| is_checked(path)) {
        let found = refused_words(content);
        if found.is_empty() || unused.remove(path.as_str()) {
            continue;
        }
        complaints.extend(found.into_iter().map(|(line, word, instead)| {
            format!("{path}:{line}: {word:?} is not a term of the field: {instead}")
        }));
    }
    complaints.extend(unused.into_iter().map(|path| {
        format!("{ALLOWANCES}: {path} contains no refused word any more: remove the line")
    }));
    complaints
}

fn is_checked(path: &str) -> bool {
    path.starts_with("crates/") || path.starts_with("docs/") || path == "README.md"
}

/// The refused words of a text, with their line numbers.
fn refused_words(text: &str) -> Vec<(usize, &'static str, &'static str)> {
    let mut found = Vec::new();
    for (index, line) in text.lines().enumerate() {
        let line = line.to_ascii_lowercase();
        let words = REFUSED
            .into_iter()
            .filter(|(word, _)| contains_word(&line, word));
        found.extend(words.map(|(word, instead)| (index + 1, word, instead)));
    }
    found
}

/// Whether a line contains a word, also as a part of an identifier (`PATIENCE_MS`, `nobody_is_woken`).
fn contains_word(line: &str, word: &str) -> bool {
    line.match_indices(word).any(|(start, _)| {
        let before = line[..start].chars().next_back();
        let after = line[start + word.len()..].chars().next();
        let is_letter = |character: Option<char>| character.is_some_and(char::is_alphabetic);
        !is_letter(before) && !is_letter(after) && !is_user(word, before, after)
    })
}

/// Whether the word is the Unix user `nobody`, as in `"nobody"` or a line of `/etc/passwd`.
fn is_user(word: &str, before: Option<char>, after: Option<char>) -> bool {
    let delimits = |character: Option<char>| matches!(character, Some('"' | ':'));
    word == "nobody" && delimits(before) && delimits(after)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn refused_words_are_found_in_prose_and_identifiers() {
        for (line, expected) in [
            ("Waits until the timeout.", None),
            ("const PATIENCE: Duration", Some("patience")),
            ("patience_ms", Some("patience")),
            ("an impatient client", None),
            ("Whoever asks is refused.", Some("whoever")),
            ("fn nobody_is_woken() {}", Some("nobody")),
            ("nobody's to use", Some("nobody")),
            (r#"("nobody", 65534)"#, None),
            ("x:65534:nobody:/nonexistent", None),
            ("a host that is none", Some("is none")),
            ("value.is_none()", None),
            ("of this none is left", None),
            ("there is nonexistent", None),
            ("goes untold", Some("untold")),
        ] {
            let found = refused_words(line);
            let words: Vec<&str> = found.iter().map(|(_, word, _)| *word).collect();
            assert_eq!(words, Vec::from_iter(expected), "{line}");
        }
    }

    #[test]
    fn only_listed_files_may_contain_refused_words() {
        const BAD: &str = "// Fine.\n// Somebody waits.\n";
        for (path, content, allowances, expected) in [
            ("crates/a/src/a.rs", "// Fine.\n", "", None),
            ("crates/a/src/a.rs", BAD, "", Some("crates/a/src/a.rs:2: ")),
            ("docs/a.md", BAD, "crates/a/src/a.rs", Some("docs/a.md:2: ")),
            ("README.md", BAD, "", Some("README.md:2: ")),
            ("tests/a.py", BAD, "", None),
            ("docs/a.md", BAD, "# Comment.\n\ndocs/a.md\n", None),
            (
                "docs/a.md",
                "Fine.\n",
                "docs/a.md\n",
                Some("xtask/vocabulary-allowances.txt: docs/a.md contains no refused word"),
            ),
        ] {
            let texts = [(path.to_owned(), content)];
            let complaints = complaints(texts.into_iter(), allowances);
            let is_expected = match expected {
                None => complaints.is_empty(),
                Some(start) => complaints
                    .iter()
                    .any(|complaint| complaint.starts_with(start)),
            };
            assert!(is_expected, "{path} with {allowances:?}: {complaints:?}");
        }
    }
}

//! The Architecture Decision Records in `docs/adr`: their common form, the index, and the references to them.
//!
//! `cargo xtask generate` writes the index from the records' first lines. `cargo xtask tidy` checks the form of each record, and that each
//! reference in the repository, by path or by number, leads to a record that exists.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::fs;
use std::path::Path;

use anyhow::{Context, bail};

use crate::links::Text;

/// Where the records are.
const DIRECTORY: &str = "docs/adr";

/// The generated page in that directory.
pub const INDEX: &str = "docs/adr/README.md";

/// The sections of a record, in their order. `MEASURED` may follow.
const SECTIONS: [&str; 3] = ["Context", "Decision", "Consequences"];
const MEASURED: &str = "Measured";

/// What a record says about itself in its first lines.
#[derive(Debug, PartialEq, Eq)]
struct Record {
    number: u32,
    title: String,
    /// Markdown: `accepted`, or with links to the records that amend or supersede this one.
    status: String,
    date: String,
}

/// A Markdown link or a path in a text that leads to a record.
#[derive(Debug, PartialEq, Eq)]
struct Reference<'a> {
    /// The number in the link's text, such as 33 in `[ADR 33](…)`.
    label: Option<u32>,
    file: &'a str,
}

/// The page that lists all records.
pub fn index(root: &Path) -> anyhow::Result<String> {
    let (records, complaints) = load(root)?;
    if !complaints.is_empty() {
        bail!("{}", complaints.join("\n  "));
    }
    Ok(render(&records))
}

/// Every record that lacks the form, and every reference that leads nowhere.
pub fn check(root: &Path, texts: &[Text]) -> anyhow::Result<Vec<String>> {
    let (records, mut complaints) = load(root)?;
    for Text { path, content } in texts {
        // The tests of this file mention records that do not exist.
        if path == Path::new("xtask/src/adr.rs") {
            continue;
        }
        let is_record = path.starts_with(DIRECTORY);
        let found = check_references(content, is_record, &records);
        complaints.extend(found.map(|complaint| format!("{}: {complaint}", path.display())));
    }
    Ok(complaints)
}

/// The records by file name, and what is wrong with the form of any.
fn load(root: &Path) -> anyhow::Result<(BTreeMap<String, Record>, Vec<String>)> {
    let mut records = BTreeMap::new();
    let mut complaints = Vec::new();
    for entry in fs::read_dir(root.join(DIRECTORY)).context("reading docs/adr")? {
        let path = entry.context("reading docs/adr")?.path();
        let file = path
            .file_name()
            .unwrap_or_default()
            .to_string_lossy()
            .into_owned();
        if root.join(INDEX) == path {
            continue;
        }
        let text =
            fs::read_to_string(&path).with_context(|| format!("reading {DIRECTORY}/{file}"))?;
        match parse(&file, &text) {
            Ok(record) => {
                records.insert(file, record);
            }
            Err(error) => complaints.push(format!("{DIRECTORY}/{file}: {error}")),
        }
    }
    complaints.sort();
    complaints.extend(repeated_numbers(&records));
    Ok((records, complaints))
}

fn repeated_numbers(records: &BTreeMap<String, Record>) -> Vec<String> {
    let mut files: BTreeMap<u32, &str> = BTreeMap::new();
    let mut complaints = Vec::new();
    for (file, record) in records {
        if let Some(first) = files.insert(record.number, file) {
            complaints.push(format!("{DIRECTORY}/{file}: has the number of {first}"));
        }
    }
    complaints
}

/// Reads the first lines and the section headings of a record.
fn parse(file: &str, text: &str) -> anyhow::Result<Record> {
    let number = file_number(file)
        .context("name the file NNNN-decision.md, with a number of four digits")?;
    let mut lines = text.lines();
    let heading = lines.next().unwrap_or_default();
    let title = heading
        .strip_prefix(&format!("# {number}. "))
        .filter(|title| !title.trim().is_empty())
        .with_context(|| format!("begin with `# {number}. Title that states the decision`"))?;
    let line = lines.find(|line| !line.is_empty()).unwrap_or_default();
    let (status, date) = line
        .strip_prefix("Status: ")
        .and_then(|line| line.strip_suffix('.'))
        .and_then(|line| line.rsplit_once(". Date: "))
        .filter(|(_, date)| is_date(date))
        .context("state below the title `Status: accepted. Date: YYYY-MM-DD.`")?;
    check_status(status)?;
    let sections: Vec<&str> = text
        .lines()
        .filter_map(|line| line.strip_prefix("## "))
        .collect();
    let has_form = match sections.strip_prefix(SECTIONS.as_slice()) {
        Some(rest) => rest.is_empty() || rest == [MEASURED],
        None => false,
    };
    if !has_form {
        bail!("has the sections {sections:?}; expected {SECTIONS:?}, then perhaps {MEASURED:?}");
    }
    Ok(Record {
        number,
        title: title.to_owned(),
        status: status.to_owned(),
        date: date.to_owned(),
    })
}

/// A status is `accepted`, `accepted, amended by LINKS` or `superseded by LINKS`.
fn check_status(status: &str) -> anyhow::Result<()> {
    if status == "accepted" {
        return Ok(());
    }
    let others = status
        .strip_prefix("accepted, amended by ")
        .or_else(|| status.strip_prefix("superseded by "));
    if others.is_some_and(|others| !references(others, true).is_empty()) {
        return Ok(());
    }
    bail!(
        "the status {status:?} is neither `accepted`, `accepted, amended by [ADR N](file)` nor `superseded by [ADR N](file)`"
    );
}

fn is_date(text: &str) -> bool {
    text.len() == 10
        && text
            .char_indices()
            .all(|(position, character)| match position {
                4 | 7 => character == '-',
                _ => character.is_ascii_digit(),
            })
}

/// The number of a record by its file name.
fn file_number(file: &str) -> Option<u32> {
    let (digits, name) = file.strip_suffix(".md")?.split_once('-')?;
    let is_number = digits.len() == 4 && digits.bytes().all(|byte| byte.is_ascii_digit());
    (is_number && !name.is_empty()).then(|| digits.parse().ok())?
}

fn render(records: &BTreeMap<String, Record>) -> String {
    let mut page = "<!-- Generated by `cargo xtask generate`. Do not edit. -->\n\n\
        # Architecture Decision Records\n\n\
        Each record states one decision that a newcomer would question, with its reasons and consequences.\n\n\
        | number | decision | status | date |\n|---|---|---|---|\n"
        .to_owned();
    for (file, record) in records {
        let Record {
            number,
            title,
            status,
            date,
        } = record;
        let _ = writeln!(page, "| {number} | [{title}]({file}) | {status} | {date} |");
    }
    page
}

/// What is wrong with the references of a text. A record names others by file name, every other text by path.
fn check_references(
    text: &str,
    is_record: bool,
    records: &BTreeMap<String, Record>,
) -> impl Iterator<Item = String> {
    let mut complaints = Vec::new();
    for Reference { label, file } in references(text, is_record) {
        let Some(record) = records.get(file) else {
            complaints.push(format!("{DIRECTORY}/{file} does not exist"));
            continue;
        };
        if let Some(label) = label.filter(|label| *label != record.number) {
            complaints.push(format!("the link to {file} is called ADR {label}"));
        }
    }
    for number in mentions(text) {
        if !records.values().any(|record| record.number == number) {
            complaints.push(format!("there is no ADR {number}"));
        }
    }
    complaints.into_iter()
}

/// The paths in a text that lead to records: `adr/NNNN-….md`, and in a record also `(NNNN-….md)`.
fn references(text: &str, is_record: bool) -> Vec<Reference<'_>> {
    let marker = if is_record { "](" } else { "adr/" };
    let starts = text.match_indices(marker);
    let reference = |(start, _): (usize, &str)| {
        let rest = &text[start + marker.len()..];
        let end = rest
            .find(|character: char| !character.is_ascii_alphanumeric() && !"-.".contains(character))
            .unwrap_or(rest.len());
        let file = rest[..end].trim_end_matches('.');
        let begins_with_number =
            file.len() > 4 && file.bytes().take(4).all(|byte| byte.is_ascii_digit());
        begins_with_number.then(|| Reference {
            label: label(&text[..start]),
            file,
        })
    };
    starts.filter_map(reference).collect()
}

/// The number in the text of the link whose target begins at the end of this text: 33 of `[ADR 33](docs/`.
fn label(before: &str) -> Option<u32> {
    let line = before.rsplit('\n').next()?;
    let open = line.rfind('[')?;
    let shown = line[open + 1..].split(']').next()?;
    shown.strip_prefix("ADR ").unwrap_or(shown).parse().ok()
}

/// The numbers that a text calls records by: 7 of `ADR 7`.
fn mentions(text: &str) -> Vec<u32> {
    let number = |(start, marker): (usize, &str)| {
        let rest = &text[start + marker.len()..];
        let end = rest.find(|character: char| !character.is_ascii_digit())?;
        rest[..end].parse().ok()
    };
    text.match_indices("ADR ").filter_map(number).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    const RECORD: &str = "# 7. Store objects in SQLite\n\nStatus: accepted. Date: 2026-11-15.\n\n\
        ## Context\n\n## Decision\n\n## Consequences\n";

    fn records() -> BTreeMap<String, Record> {
        let file = "0007-sqlite.md";
        BTreeMap::from([(file.to_owned(), parse(file, RECORD).unwrap())])
    }

    fn found(text: &str, is_record: bool) -> Vec<String> {
        check_references(text, is_record, &records()).collect()
    }

    #[test]
    fn a_record_states_number_title_status_and_date() {
        let expected = Record {
            number: 7,
            title: "Store objects in SQLite".to_owned(),
            status: "accepted".to_owned(),
            date: "2026-11-15".to_owned(),
        };
        assert_eq!(parse("0007-sqlite.md", RECORD).unwrap(), expected);
        let measured = format!("{RECORD}\n## Measured\n");
        assert_eq!(parse("0007-sqlite.md", &measured).unwrap(), expected);
    }

    #[test]
    fn a_record_without_the_form_is_refused() {
        let cases = [
            ("another number", RECORD.replace("# 7.", "# 8.")),
            ("no title", RECORD.replace("Store objects in SQLite", "")),
            ("no status", RECORD.replace("Status: accepted. ", "")),
            ("an unknown status", RECORD.replace("accepted", "perhaps")),
            (
                "superseded by nothing",
                RECORD.replace("accepted", "superseded by something"),
            ),
            ("no date", RECORD.replace("2026-11-15", "November")),
            ("no context", RECORD.replace("## Context\n", "")),
            (
                "another order",
                RECORD
                    .replace("Decision", "A")
                    .replace("Context", "Decision")
                    .replace("## A", "## Context"),
            ),
            ("another section", format!("{RECORD}\n## Thoughts\n")),
        ];
        for (name, text) in cases {
            assert!(parse("0007-sqlite.md", &text).is_err(), "{name}");
        }
        for file in ["7-sqlite.md", "sqlite.md", "0007.md", "0007-sqlite.txt"] {
            assert!(parse(file, RECORD).is_err(), "{file}");
        }
    }

    #[test]
    fn a_record_may_be_superseded_or_amended_by_another() {
        for status in [
            "superseded by [ADR 8](0008-fjall.md)",
            "accepted, amended by [ADR 8](0008-fjall.md) and [ADR 9](0009-redb.md)",
        ] {
            let text = RECORD.replace("accepted", status);
            assert_eq!(parse("0007-sqlite.md", &text).unwrap().status, status);
            assert_eq!(
                found(&text, true)
                    .iter()
                    .filter(|line| line.contains("0008-fjall.md does not exist"))
                    .count(),
                1
            );
        }
    }

    #[test]
    fn two_records_do_not_share_a_number() {
        let mut records = records();
        records.insert(
            "0007-other.md".to_owned(),
            parse("0007-other.md", RECORD).unwrap(),
        );
        assert_eq!(repeated_numbers(&records).len(), 1);
    }

    #[test]
    fn the_index_lists_each_record() {
        let page = render(&records());
        assert!(
            page.ends_with(
                "| 7 | [Store objects in SQLite](0007-sqlite.md) | accepted | 2026-11-15 |\n"
            ),
            "{page}"
        );
    }

    #[test]
    fn each_reference_leads_to_the_record_that_it_names() {
        let right = "See [ADR 7](docs/adr/0007-sqlite.md), [7](../adr/0007-sqlite.md), docs/adr/0007-sqlite.md. ADR 7.\n";
        assert_eq!(found(right, false), [""; 0]);
        assert_eq!(found("see adr/0008-x.md\n", false).len(), 1);
        assert_eq!(
            found("[ADR 8](adr/0007-sqlite.md)", false),
            [
                "the link to 0007-sqlite.md is called ADR 8",
                "there is no ADR 8"
            ]
        );
        assert_eq!(found("// (ADR 70)\n", false), ["there is no ADR 70"]);
        assert_eq!(
            found("[the engine](0007-sqlite.md) and [ADR 7](0008-x.md)", true),
            ["docs/adr/0008-x.md does not exist"]
        );
    }
}

//! How objects are printed: a table for people, or the objects themselves for programs.

use std::borrow::Cow;
use std::io::{self, IsTerminal, Write};
use std::time::Duration;

use anyhow::Context;
use clap::ValueEnum;
use k8s_openapi::jiff::Timestamp;
use kube::ResourceExt;
use serde::Serialize;

use crate::visible;

/// How to print objects.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
pub enum Format {
    /// A table of the most useful columns
    #[default]
    Table,
    /// A table with more columns
    Wide,
    /// The objects as JSON
    Json,
    /// The objects as YAML
    Yaml,
    /// Names alone, one a line
    Name,
}

/// How many columns a table has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Detail {
    Narrow,
    Wide,
}

/// How to print one object for a program.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum ObjectFormat {
    Json,
    Yaml,
    Name,
}

/// A count with its noun: `1 claim`, `2 sandboxes`.
pub fn counted(count: usize, noun: &str) -> String {
    let ending = match (count, noun.ends_with('x')) {
        (1, _) => "",
        (_, true) => "es",
        (_, false) => "s",
    };
    format!("{count} {noun}{ending}")
}

impl Format {
    /// How this is printed: as a table, or the objects themselves.
    pub fn shape(self) -> Result<Detail, ObjectFormat> {
        match self {
            Self::Table => Ok(Detail::Narrow),
            Self::Wide => Ok(Detail::Wide),
            Self::Json => Err(ObjectFormat::Json),
            Self::Yaml => Err(ObjectFormat::Yaml),
            Self::Name => Err(ObjectFormat::Name),
        }
    }
}

impl ObjectFormat {
    /// Prints one object.
    pub fn print(self, object: &(impl Serialize + ResourceExt)) -> anyhow::Result<()> {
        let text = match self {
            Self::Name => object.name_any() + "\n",
            _ => self.render(object)?,
        };
        self.print_text(&text)
    }

    /// Prints objects as the list that kubectl makes of them, so that programs can read either.
    pub fn print_list(self, objects: &[impl Serialize + ResourceExt]) -> anyhow::Result<()> {
        let text = match self {
            Self::Name => objects
                .iter()
                .flat_map(|object| [object.name_any(), "\n".to_owned()])
                .collect(),
            _ => self.render(
                &serde_json::json!({"apiVersion": "v1", "kind": "List", "items": objects}),
            )?,
        };
        self.print_text(&text)
    }

    /// Prints a document of this format. Control characters in JSON are escaped, which leaves the document the same. In YAML they are
    /// escaped only if standard output is a terminal.
    pub fn print_text(self, text: &str) -> anyhow::Result<()> {
        match self {
            Self::Yaml if io::stdout().is_terminal() => print_text(text),
            Self::Json | Self::Yaml | Self::Name => print_bytes(text.as_bytes()),
        }
    }

    /// A document in this format. Only objects have names to print.
    pub fn render(self, document: &impl Serialize) -> anyhow::Result<String> {
        match self {
            Self::Yaml => Ok(serde_yaml_ng::to_string(document)?),
            Self::Json | Self::Name => {
                let document = serde_json::to_string_pretty(document)? + "\n";
                Ok(visible::json(&document).into_owned())
            }
        }
    }
}

/// Prints to standard output, with control characters as escapes: sandboxes and other users wrote much of the text. A closed pipe
/// (`| head`) ends the printing and is not an error.
pub fn print_text(text: &str) -> anyhow::Result<()> {
    print_bytes(visible::text(text).as_bytes())
}

/// The same for bytes, which are printed unchanged.
pub fn print_bytes(bytes: &[u8]) -> anyhow::Result<()> {
    let mut output = io::stdout().lock();
    match output.write_all(bytes).and_then(|()| output.flush()) {
        Err(error) if error.kind() == io::ErrorKind::BrokenPipe => std::process::exit(0),
        result => result.context("cannot write to standard output"),
    }
}

/// An error and its causes in one line. The chain ends at a rejection by an API server, with the server's own message.
pub fn chain(error: &anyhow::Error) -> String {
    causes(error.chain())
}

/// The same for an error that is the cause of another.
pub fn causes(chain: anyhow::Chain<'_>) -> String {
    let mut messages = Vec::new();
    for cause in chain {
        if let Some(kube::Error::Api(status)) = cause.downcast_ref() {
            messages.push(status.message.clone());
            break;
        }
        messages.push(cause.to_string());
    }
    visible::text(&error_chain::join(messages)).into_owned()
}

/// Reads a duration as people write it: `90s`, `30m`, `2h`, `1h30m`.
pub fn parse_duration(text: &str) -> Result<Duration, String> {
    let expected = || "expected a duration such as 90s, 30m or 2h".to_owned();
    let mut total = Duration::ZERO;
    let mut rest = text;
    while !rest.is_empty() {
        let digits = rest.find(|letter: char| !letter.is_ascii_digit());
        let (number, unit) = rest.split_at(digits.ok_or_else(expected)?);
        let end = unit.find(|letter: char| letter.is_ascii_digit());
        let (unit, left) = unit.split_at(end.unwrap_or(unit.len()));
        let number: u64 = number.parse().map_err(|_| expected())?;
        let seconds = match unit {
            "ms" => {
                total = total.saturating_add(Duration::from_millis(number));
                0
            }
            "s" => 1,
            "m" => 60,
            "h" => 3_600,
            "d" => 86_400,
            _ => return Err(expected()),
        };
        let seconds = number.checked_mul(seconds).ok_or_else(expected)?;
        total = total.saturating_add(Duration::from_secs(seconds));
        rest = left;
    }
    if total.is_zero() {
        Err(expected())
    } else {
        Ok(total)
    }
}

/// Rows of text in aligned columns.
#[derive(Debug)]
pub struct Table {
    rows: Vec<Vec<String>>,
}

impl Table {
    pub fn new(header: &[&str]) -> Self {
        Self {
            rows: vec![header.iter().map(|&title| title.to_owned()).collect()],
        }
    }

    pub fn row(&mut self, cells: Vec<String>) {
        self.rows.push(visible_cells(cells));
    }

    /// Whether there is nothing below the titles.
    pub fn is_empty(&self) -> bool {
        self.rows.len() <= 1
    }

    pub fn render(&self) -> String {
        let mut widths = Widths::default();
        for row in &self.rows {
            widths.fit(row);
        }
        self.rows.iter().map(|row| widths.line(row)).collect()
    }
}

/// Cells as they are printed: without line breaks and control characters.
pub fn visible_cells(cells: Vec<String>) -> Vec<String> {
    let shown = |cell: String| match visible::line(&cell) {
        Cow::Borrowed(_) => cell,
        Cow::Owned(shown) => shown,
    };
    cells.into_iter().map(shown).collect()
}

/// The widths of a table's columns, for rows that come one at a time.
#[derive(Debug, Default)]
pub struct Widths(Vec<usize>);

impl Widths {
    /// Makes every column at least as wide as its cell.
    pub fn fit(&mut self, row: &[String]) {
        self.0.resize(self.0.len().max(row.len()), 0);
        for (width, cell) in self.0.iter_mut().zip(row) {
            *width = (*width).max(cell.chars().count());
        }
    }

    /// One line, its cells aligned.
    pub fn line(&self, row: &[String]) -> String {
        const GAP: usize = 3;
        let cells = row.iter().zip(&self.0);
        let aligned: Vec<String> = cells
            .map(|(cell, width)| format!("{cell:<width$}", width = width + GAP))
            .collect();
        format!("{}\n", aligned.concat().trim_end())
    }
}

/// How long ago `then` was, as kubectl prints it: the largest unit, or two while the first is small.
pub fn age(then: Timestamp, now: Timestamp) -> String {
    let seconds = now.duration_since(then).as_secs().max(0);
    let (minutes, hours, days) = (seconds / 60, seconds / 3600, seconds / 86_400);
    match seconds {
        0..120 => format!("{seconds}s"),
        120..600 if seconds % 60 != 0 => format!("{minutes}m{}s", seconds % 60),
        120..10_800 => format!("{minutes}m"),
        10_800..28_800 if minutes % 60 != 0 => format!("{hours}h{}m", minutes % 60),
        10_800..172_800 => format!("{hours}h"),
        _ => format!("{days}d"),
    }
}

/// The time until `then`, or that it has passed.
pub fn until(then: Timestamp, now: Timestamp) -> String {
    if then <= now {
        "passed".to_owned()
    } else {
        format!("in {}", age(now, then))
    }
}

/// A number of bytes in the largest unit that leaves something before the point.
pub fn bytes(count: u64) -> String {
    const UNITS: [&str; 4] = ["KiB", "MiB", "GiB", "TiB"];
    if count < 1024 {
        return format!("{count} B");
    }
    #[expect(clippy::cast_precision_loss, reason = "one decimal is shown")]
    let mut value = count as f64 / 1024.0;
    let mut unit = 0;
    while value >= 1024.0 && unit + 1 < UNITS.len() {
        value /= 1024.0;
        unit += 1;
    }
    format!("{value:.1} {}", UNITS[unit])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_counted_agrees_with_its_number() {
        assert_eq!(counted(0, "pool"), "0 pools");
        assert_eq!(counted(1, "sandbox"), "1 sandbox");
        assert_eq!(counted(2, "sandbox"), "2 sandboxes");
    }

    #[test]
    fn columns_are_as_wide_as_their_widest_cell() {
        let mut table = Table::new(&["NAME", "AGE"]);
        table.row(vec!["a-long-name".into(), "1s".into()]);
        assert_eq!(table.render(), "NAME          AGE\na-long-name   1s\n");
    }

    #[test]
    fn a_message_of_a_sandbox_does_not_reach_the_terminal_as_it_is() {
        let mut table = Table::new(&["NAME", "WHY"]);
        table.row(vec!["x".into(), "\x1b]0;owned\x07\nfake   row".into()]);
        let rendered = table.render();
        assert_eq!(rendered.lines().count(), 2);
        assert!(!rendered.contains('\x1b') && !rendered.contains('\x07'));
        let error = anyhow::anyhow!("refused: \x1b[2J\u{202e}");
        assert_eq!(chain(&error), "refused: \\x1b[2J\\u{202e}");
        let document = ObjectFormat::Json.render(&"\u{9b}31m\u{202e}").unwrap();
        assert_eq!(document, "\"\\u009b31m\\u202e\"\n");
    }

    #[test]
    fn ages_read_like_kubectls() {
        let now = Timestamp::from_second(1_000_000).unwrap();
        let table = [
            (5, "5s"),
            (119, "119s"),
            (120, "2m"),
            (185, "3m5s"),
            (3_600, "60m"),
            (11_700, "3h15m"),
            (90_000, "25h"),
            (200_000, "2d"),
        ];
        for (seconds, expected) in table {
            let then = Timestamp::from_second(1_000_000 - seconds).unwrap();
            assert_eq!(age(then, now), expected, "{seconds}");
        }
    }

    #[test]
    fn durations_are_read_as_people_write_them() {
        let table = [
            ("90s", Some(90)),
            ("1h30m", Some(5_400)),
            ("2d", Some(172_800)),
            ("", None),
            ("5", None),
            ("0s", None),
            ("m", None),
            ("3y", None),
            ("99999999999999999999s", None),
        ];
        for (text, seconds) in table {
            let parsed = parse_duration(text).ok();
            assert_eq!(parsed, seconds.map(Duration::from_secs), "{text:?}");
        }
    }

    #[test]
    fn a_rejection_by_the_api_server_is_printed_once() {
        let status = kube::core::Status::failure("\"mine\" already exists", "AlreadyExists");
        let refused =
            anyhow::Error::from(kube::Error::Api(status.boxed())).context("cannot create it");
        assert_eq!(chain(&refused), "cannot create it: \"mine\" already exists");
        let repeated = anyhow::anyhow!("no route").context("cannot connect: no route");
        assert_eq!(chain(&repeated), "cannot connect: no route");
    }

    #[test]
    fn bytes_are_shown_in_a_fitting_unit() {
        let shown = [0, 1023, 1024, 1_536, 5 << 30].map(bytes);
        assert_eq!(shown, ["0 B", "1023 B", "1.0 KiB", "1.5 KiB", "5.0 GiB"]);
    }
}

//! How objects are printed: a table for people, or the objects themselves for programs.

use clap::ValueEnum;
use k8s_openapi::jiff::Timestamp;
use kube::ResourceExt;
use serde::Serialize;

/// How to print objects.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
pub enum Format {
    /// A table of the most useful columns
    #[default]
    Table,
    /// A table with more columns
    Wide,
    Json,
    Yaml,
    /// Names alone, one a line
    Name,
}

impl Format {
    /// Prints the objects; the table is made only if it is asked for.
    pub fn print<Kind>(self, objects: &[Kind], table: impl FnOnce() -> Table) -> anyhow::Result<()>
    where
        Kind: Serialize + ResourceExt,
    {
        match self {
            Self::Table | Self::Wide => print!("{}", table().render()),
            Self::Json => println!("{}", serde_json::to_string_pretty(objects)?),
            Self::Yaml => print!("{}", serde_yaml_ng::to_string(objects)?),
            Self::Name => objects
                .iter()
                .for_each(|object| println!("{}", object.name_any())),
        }
        Ok(())
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
        self.rows.push(cells);
    }

    pub fn render(&self) -> String {
        const GAP: usize = 3;
        let columns = self.rows.iter().map(Vec::len).max().unwrap_or_default();
        let width = |column: usize| {
            let cells = self.rows.iter().filter_map(|row| row.get(column));
            cells
                .map(|cell| cell.chars().count())
                .max()
                .unwrap_or_default()
                + GAP
        };
        let widths: Vec<usize> = (0..columns).map(width).collect();
        let line = |row: &Vec<String>| {
            let cells: Vec<String> = row
                .iter()
                .zip(&widths)
                .map(|(cell, width)| format!("{cell:<width$}"))
                .collect();
            format!("{}\n", cells.concat().trim_end())
        };
        self.rows.iter().map(line).collect()
    }
}

/// How long ago `then` was, as kubectl says it: the largest unit, or two while the first is small.
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn columns_are_as_wide_as_their_widest_cell() {
        let mut table = Table::new(&["NAME", "AGE"]);
        table.row(vec!["a-long-name".into(), "1s".into()]);
        assert_eq!(table.render(), "NAME          AGE\na-long-name   1s\n");
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
}

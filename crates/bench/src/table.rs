//! How results are printed: aligned columns, sizes, counts.

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
        let columns = self.rows.iter().map(Vec::len).max().unwrap_or(0);
        let mut widths = vec![0; columns];
        for row in &self.rows {
            for (width, cell) in widths.iter_mut().zip(row) {
                *width = (*width).max(cell.chars().count());
            }
        }
        let line = |row: &Vec<String>| {
            let cells = row.iter().zip(&widths);
            let aligned: Vec<String> = cells
                .map(|(cell, width)| format!("{cell:<width$}", width = width + GAP))
                .collect();
            format!("{}\n", aligned.concat().trim_end())
        };
        self.rows.iter().map(line).collect()
    }
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

/// A number of bytes in its largest binary unit, with one decimal.
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
    fn columns_are_as_wide_as_their_widest_cell() {
        let mut table = Table::new(&["NAME", "AGE"]);
        table.row(vec!["a-long-name".into(), "1s".into()]);
        assert_eq!(table.render(), "NAME          AGE\na-long-name   1s\n");
    }

    #[test]
    fn a_count_agrees_with_its_noun() {
        let shown = [(0, "pool"), (1, "sandbox"), (2, "sandbox")];
        let shown = shown.map(|(count, noun)| counted(count, noun));
        assert_eq!(shown, ["0 pools", "1 sandbox", "2 sandboxes"]);
    }

    #[test]
    fn bytes_are_shown_in_the_largest_unit() {
        let shown = [0, 1023, 1024, 1_536, 5 << 30].map(bytes);
        assert_eq!(shown, ["0 B", "1023 B", "1.0 KiB", "1.5 KiB", "5.0 GiB"]);
    }
}

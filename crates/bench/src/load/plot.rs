//! Plots as SVG: latencies over time, their distribution, and claims that became Ready per second. Pure.
//!
//! A plot is a file of its own and part of the page. Latencies have a logarithmic scale, because outliers are what a reader looks for.

use std::fmt::Write;

use super::outcome::{Outcome, Sample, number, percentile};

const WIDTH: f64 = 720.0;
const HEIGHT: f64 = 300.0;
const LEFT: f64 = 64.0;
const RIGHT: f64 = 84.0;
const TOP: f64 = 36.0;
const BOTTOM: f64 = 44.0;
/// The most dots of a plot: more would only make the file large.
const MOST_DOTS: usize = 1_500;
const INK: &str = "#24292f";
const FAINT: &str = "#d8dee4";
const MUTED: &str = "#57606a";
const BLUE: &str = "#0969da";
const RED: &str = "#cf222e";
const AMBER: &str = "#9a6700";

/// A scale from values to pixels.
#[derive(Clone, Copy)]
struct Axis {
    low: f64,
    high: f64,
    from: f64,
    to: f64,
    logarithmic: bool,
}

impl Axis {
    fn at(&self, value: f64) -> f64 {
        let place = |value: f64| {
            if self.logarithmic {
                value.max(self.low).log10()
            } else {
                value
            }
        };
        let span = place(self.high) - place(self.low);
        let share = if span > 0.0 {
            (place(value) - place(self.low)) / span
        } else {
            0.0
        };
        self.from + share.clamp(0.0, 1.0) * (self.to - self.from)
    }

    /// The values of the tick marks.
    fn marks(&self) -> Vec<f64> {
        if self.logarithmic {
            let mut marks = Vec::new();
            let mut mark = self.low;
            while mark <= self.high * 1.000_1 {
                marks.push(mark);
                mark *= 10.0;
            }
            return marks;
        }
        let step = nice_step((self.high - self.low) / 5.0);
        let mut marks = Vec::new();
        let mut mark = self.low;
        while mark <= self.high + step * 1e-6 {
            marks.push(mark);
            mark += step;
        }
        marks
    }
}

/// The next higher of 1, 2 and 5 times a power of ten.
fn nice_step(rough: f64) -> f64 {
    let power = 10_f64.powf(rough.max(1e-9).log10().floor());
    [1.0, 2.0, 5.0, 10.0]
        .into_iter()
        .map(|factor| factor * power)
        .find(|step| *step >= rough)
        .unwrap_or(power * 10.0)
}

/// Powers of ten around the latencies.
fn latency_range(latencies: &[f64]) -> (f64, f64) {
    let low = latencies.first().copied().unwrap_or(1.0).max(0.1);
    let high = latencies.last().copied().unwrap_or(10.0).max(low * 1.01);
    (
        10_f64.powf(low.log10().floor()),
        10_f64.powf(high.log10().ceil()),
    )
}

fn across(low: f64, high: f64, logarithmic: bool) -> Axis {
    Axis {
        low,
        high,
        from: LEFT,
        to: WIDTH - RIGHT,
        logarithmic,
    }
}

fn upwards(low: f64, high: f64, logarithmic: bool) -> Axis {
    Axis {
        low,
        high,
        from: HEIGHT - BOTTOM,
        to: TOP,
        logarithmic,
    }
}

struct Drawing(String);

impl Drawing {
    fn new(title: &str) -> Self {
        let mut drawing = Self(String::new());
        drawing.add(&format!(
            "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {WIDTH} {HEIGHT}\" width=\"{WIDTH}\" height=\"{HEIGHT}\" \
             role=\"img\" font-family=\"ui-sans-serif, system-ui, sans-serif\" font-size=\"12\">\n\
             <title>{title}</title>\n<rect width=\"100%\" height=\"100%\" fill=\"#fff\"/>"
        ));
        drawing.text(LEFT, 20.0, "start", INK, title);
        drawing
    }

    fn add(&mut self, element: &str) {
        self.0.push_str(element);
        self.0.push('\n');
    }

    fn text(&mut self, x: f64, y: f64, anchor: &str, colour: &str, text: &str) {
        let text = super::junit::escaped(text);
        self.add(&format!(
            "<text x=\"{x:.1}\" y=\"{y:.1}\" text-anchor=\"{anchor}\" fill=\"{colour}\">{text}</text>"
        ));
    }

    fn line(&mut self, from: (f64, f64), to: (f64, f64), colour: &str, dashes: &str) {
        self.add(&format!(
            "<line x1=\"{:.1}\" y1=\"{:.1}\" x2=\"{:.1}\" y2=\"{:.1}\" stroke=\"{colour}\" stroke-dasharray=\"{dashes}\"/>",
            from.0, from.1, to.0, to.1
        ));
    }

    fn axes(&mut self, x: Axis, y: Axis, x_unit: &str, y_unit: &str) {
        for mark in y.marks() {
            let height = y.at(mark);
            self.line((LEFT, height), (WIDTH - RIGHT, height), FAINT, "none");
            let label = format!("{}{y_unit}", short(mark));
            self.text(LEFT - 8.0, height + 4.0, "end", MUTED, &label);
        }
        for mark in x.marks() {
            let label = format!("{}{x_unit}", short(mark));
            self.line(
                (x.at(mark), HEIGHT - BOTTOM),
                (x.at(mark), HEIGHT - BOTTOM + 4.0),
                MUTED,
                "none",
            );
            self.text(x.at(mark), HEIGHT - BOTTOM + 18.0, "middle", MUTED, &label);
        }
    }

    /// A horizontal line with a label at its right.
    fn level(&mut self, y: Axis, value: f64, name: &str, colour: &str) {
        let height = y.at(value);
        self.line((LEFT, height), (WIDTH - RIGHT, height), colour, "4 3");
        self.text(WIDTH - RIGHT + 6.0, height + 4.0, "start", colour, name);
    }

    fn finish(mut self) -> String {
        self.add("</svg>");
        self.0
    }
}

fn short(value: f64) -> String {
    if value >= 10_000.0 {
        format!("{}k", value / 1_000.0)
    } else {
        // Powers of ten below one are inexact in the last digits.
        let rounded = (value * 1_000.0).round() / 1_000.0;
        format!("{rounded}")
    }
}

fn sorted_latencies(samples: &[Sample]) -> Vec<f64> {
    let mut latencies: Vec<f64> = samples
        .iter()
        .filter_map(|sample| sample.latency_ms)
        .collect();
    latencies.sort_by(f64::total_cmp);
    latencies
}

/// The latency of each claim over its due time, with lines for the percentiles.
pub fn latencies_over_time(outcome: &Outcome) -> String {
    let latencies = sorted_latencies(&outcome.samples);
    let (low, high) = latency_range(&latencies);
    let last = outcome.samples.iter().map(|sample| sample.due_s);
    let x = across(0.0, last.fold(1e-3, f64::max), false);
    let y = upwards(low, high, true);
    let mut drawing = Drawing::new("Claim to Ready, by when the claim was due");
    drawing.axes(x, y, " s", " ms");
    let every = outcome.samples.len().div_ceil(MOST_DOTS).max(1);
    // Outliers matter most, so none of the slowest is left out.
    let slow = percentile(&latencies, 99);
    let mut dots = String::new();
    for (index, sample) in outcome.samples.iter().enumerate() {
        if let Some(latency) = sample.latency_ms
            && (index % every == 0 || latency >= slow)
        {
            let _ = write!(dots, "M{:.1} {:.1}h0", x.at(sample.due_s), y.at(latency));
        }
    }
    drawing.add(&format!(
        "<path d=\"{dots}\" stroke=\"{BLUE}\" stroke-opacity=\".45\" stroke-width=\"3.2\" stroke-linecap=\"round\" fill=\"none\"/>"
    ));
    for (sample, place) in outcome
        .samples
        .iter()
        .filter(|sample| sample.latency_ms.is_none())
        .map(|sample| (sample, x.at(sample.due_s)))
        .take(MOST_DOTS)
    {
        let name = format!("<title>round {}: never Ready</title>", sample.round + 1);
        drawing.add(&format!(
            "<path d=\"M{:.1} {TOP}l6 6m0 -6l-6 6\" stroke=\"{RED}\">{name}</path>",
            place - 3.0
        ));
    }
    let total = &outcome.total;
    drawing.level(y, total.p50_ms, &format!("p50 {:.1}", total.p50_ms), INK);
    if total.p99_ms > total.p50_ms * 1.3 {
        drawing.level(y, total.p99_ms, &format!("p99 {:.1}", total.p99_ms), AMBER);
    }
    drawing.finish()
}

/// The cumulative distribution of latencies.
pub fn distribution(outcome: &Outcome) -> String {
    let latencies = sorted_latencies(&outcome.samples);
    let (low, high) = latency_range(&latencies);
    let x = across(low, high, true);
    let y = upwards(0.0, 100.0, false);
    let mut drawing = Drawing::new("Share of claims that were Ready within");
    drawing.axes(x, y, " ms", " %");
    let mut path = format!("M{:.1} {:.1}", x.at(low), y.at(0.0));
    for step in 1..=200_usize {
        let index = (latencies.len() * step / 200).max(1) - 1;
        if let Some(latency) = latencies.get(index) {
            let _ = write!(
                path,
                "L{:.1} {:.1}",
                x.at(*latency),
                y.at(number(step) / 2.0)
            );
        }
    }
    drawing.add(&format!(
        "<path d=\"{path}\" stroke=\"{BLUE}\" stroke-width=\"2\" fill=\"none\"/>"
    ));
    let limits = [
        ("budget p99", outcome.recipe.budget.p99_ms, AMBER),
        ("bound p99", outcome.recipe.bounds.p99_ms, RED),
    ];
    for (name, limit, colour) in limits {
        // At an end of the axis the label would hide the tick mark.
        if limit > low && limit < high {
            let place = x.at(limit);
            drawing.line((place, TOP), (place, HEIGHT - BOTTOM), colour, "4 3");
            drawing.text(place, TOP - 4.0, "middle", colour, name);
        }
    }
    drawing.finish()
}

/// Claims that became Ready in each second, or in each of a hundred intervals of a longer load.
pub fn throughput(outcome: &Outcome) -> String {
    const MOST_BARS: f64 = 100.0;
    let met: Vec<f64> = outcome
        .samples
        .iter()
        .filter_map(|sample| Some(sample.due_s + sample.latency_ms? / 1_000.0))
        .collect();
    let end = met.iter().copied().fold(1.0, f64::max);
    let span = nice_step((end / MOST_BARS).max(1.0));
    let mut bars = std::collections::BTreeMap::<u64, f64>::new();
    for ready_at in met {
        #[expect(
            clippy::cast_possible_truncation,
            clippy::cast_sign_loss,
            reason = "seconds since the start are never negative and far below the largest number"
        )]
        let bar = (ready_at / span) as u64;
        *bars.entry(bar).or_default() += 1.0 / span;
    }
    let highest = bars.values().copied().fold(1.0, f64::max);
    let x = across(0.0, (end / span).ceil() * span, false);
    let y = upwards(0.0, nice_step(highest / 5.0) * 5.0, false);
    let mut drawing = Drawing::new("Claims that became Ready, per second");
    drawing.axes(x, y, " s", "");
    for (bar, height) in bars {
        #[expect(
            clippy::cast_precision_loss,
            reason = "bars are numbered up to some hundreds"
        )]
        let begin = bar as f64 * span;
        let (left, right) = (x.at(begin), x.at(begin + span));
        let top = y.at(height);
        drawing.add(&format!(
            "<rect x=\"{:.1}\" y=\"{top:.1}\" width=\"{:.1}\" height=\"{:.1}\" fill=\"{BLUE}\" fill-opacity=\".75\"/>",
            left + 0.5,
            (right - left - 1.0).max(1.0),
            y.at(0.0) - top
        ));
    }
    drawing.finish()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_are_placed_between_the_ends_of_an_axis() {
        let axis = Axis {
            low: 1.0,
            high: 100.0,
            from: 0.0,
            to: 200.0,
            logarithmic: true,
        };
        assert!((axis.at(10.0) - 100.0).abs() < 1e-9);
        assert!((axis.at(0.001)).abs() < 1e-9, "below the axis is its begin");
        assert_eq!(axis.marks(), [1.0, 10.0, 100.0]);
    }

    #[test]
    fn steps_are_round() {
        for (rough, step) in [
            (0.3, 0.5),
            (1.0, 1.0),
            (1.1, 2.0),
            (7.0, 10.0),
            (23.0, 50.0),
        ] {
            assert!((nice_step(rough) - step).abs() < 1e-9, "{rough}");
        }
    }
}

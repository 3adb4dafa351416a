//! The outcome as JUnit XML, for collectors of test results.

use std::fmt::Write;

use super::outcome::{Check, Judged, Outcome};

/// One test case for each round and each check. A missed budget fails only with `--strict`.
pub fn render(outcome: &Outcome, judged: Judged) -> String {
    let suite = format!("agent-sandbox bench load {}", outcome.recipe.name.as_str());
    let failures = outcome.missed(judged).count();
    let budget: &[Check] = match judged {
        Judged::ByBounds => &[],
        Judged::ByBudgetToo => &outcome.budget,
    };
    let checks = outcome.bounds.len() + outcome.controller_bounds.len() + budget.len();
    let tests = outcome.rounds.len() + checks;
    let mut text = String::from("<?xml version=\"1.0\" encoding=\"UTF-8\"?>\n");
    // Writing to a string cannot fail.
    let _ = writeln!(
        text,
        "<testsuite name=\"{}\" tests=\"{tests}\" failures=\"{failures}\" errors=\"0\" time=\"{:.3}\">",
        escaped(&suite),
        outcome.total.took_s
    );
    for (number, round) in outcome.rounds.iter().enumerate() {
        let _ = writeln!(
            text,
            "  <testcase classname=\"{}\" name=\"[round: {:02}] {} {}\" time=\"{:.3}\"/>",
            escaped(&suite),
            number + 1,
            round.claims,
            outcome.recipe.makes.plural(),
            round.took_s
        );
    }
    for (kind, checks) in [
        ("bound", &outcome.bounds[..]),
        ("bound", &outcome.controller_bounds[..]),
        ("budget", budget),
    ] {
        for check in checks {
            write_check(&mut text, &suite, kind, check);
        }
    }
    text.push_str("</testsuite>\n");
    text
}

fn write_check(text: &mut String, suite: &str, kind: &str, check: &Check) {
    let Check {
        what,
        measured,
        limit,
        unit,
        met,
    } = check;
    let name = format!("{kind}: {what} at most {limit} {unit}");
    let _ = write!(
        text,
        "  <testcase classname=\"{}\" name=\"{}\" time=\"0\"",
        escaped(suite),
        escaped(&name)
    );
    if *met {
        text.push_str("/>\n");
    } else {
        let message = format!("{what} is {measured:.1} {unit}; at most {limit} {unit} was asked");
        let _ = writeln!(
            text,
            ">\n    <failure message=\"{}\"/>\n  </testcase>",
            escaped(&message)
        );
    }
}

/// Text, escaped for XML and HTML, also in attributes.
pub fn escaped(text: &str) -> String {
    let mut escaped = String::with_capacity(text.len());
    for character in text.chars() {
        match character {
            '&' => escaped.push_str("&amp;"),
            '<' => escaped.push_str("&lt;"),
            '>' => escaped.push_str("&gt;"),
            '"' => escaped.push_str("&quot;"),
            other => escaped.push(other),
        }
    }
    escaped
}

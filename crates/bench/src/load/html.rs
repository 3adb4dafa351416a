//! The outcome as one self-contained HTML page: figures, checks, plots.

use std::fmt::Write;

use super::junit::escaped;
use super::outcome::{Check, Judged, Outcome, Summary};
use super::plot;

const STYLE: &str = "\
body{font:15px/1.5 ui-sans-serif,system-ui,sans-serif;color:#24292f;background:#fff;max-width:780px;margin:2rem auto;padding:0 1rem}\
h1{font-size:1.5rem;margin-bottom:.2rem}h2{font-size:1.1rem;margin-top:2rem}\
p.about{color:#57606a;margin-top:0}\
table{border-collapse:collapse;width:100%;font-variant-numeric:tabular-nums}\
th,td{padding:.3rem .6rem;border-bottom:1px solid #d8dee4;text-align:right}\
th:first-child,td:first-child{text-align:left}\
.met{color:#1a7f37}.missed{color:#cf222e;font-weight:600}\
.verdict{display:inline-block;padding:.1rem .6rem;border-radius:1rem;color:#fff}\
.verdict.met{background:#1a7f37;color:#fff}.verdict.missed{background:#cf222e;color:#fff}\
svg{max-width:100%;height:auto;display:block;margin:1rem 0}";

pub fn render(outcome: &Outcome, judged: Judged) -> String {
    let mut page = String::new();
    write_page(&mut page, outcome, judged).expect("writing to a string cannot fail");
    page
}

fn write_page(page: &mut String, outcome: &Outcome, judged: Judged) -> std::fmt::Result {
    let recipe = &outcome.recipe;
    let name = recipe.name.as_str();
    let (verdict, class) = if outcome.passed(judged) {
        ("passed", "met")
    } else {
        ("failed", "missed")
    };
    write!(
        page,
        "<!doctype html>\n<html lang=\"en\"><head><meta charset=\"utf-8\"><meta name=\"viewport\" content=\"width=device-width\">\
         <title>agent-sandbox load: {name}</title><style>{STYLE}</style></head>\n<body>\n\
         <h1>Load: {name} <span class=\"verdict {class}\">{verdict}</span></h1>\n"
    )?;
    let machine = &outcome.machine;
    writeln!(
        page,
        "<p class=\"about\">{} · {} · agent-sandbox {} · {} CPUs · {}</p>",
        escaped(&outcome.began),
        escaped(&outcome.target),
        escaped(&machine.version),
        machine.processors,
        escaped(&machine.kernel),
    )?;
    let pool = if recipe.pool == 0 {
        "no warm pool".to_owned()
    } else {
        format!("a warm pool of {}", recipe.pool)
    };
    writeln!(
        page,
        "<p>{} {} in {} rounds over {} namespaces, {} a second, against {pool} that was full after {:.1} s.</p>",
        outcome.total.claims,
        recipe.makes.plural(),
        outcome.rounds.len(),
        recipe.namespaces,
        recipe.claims_per_second,
        outcome.filled_pool_in_s,
    )?;
    if let Some(capacity) = outcome.capacity {
        writeln!(
            page,
            "<p>Capacity: {capacity} claims. What follows is judged up to there.</p>"
        )?;
    }
    for plot in [
        plot::latencies_over_time(outcome),
        plot::distribution(outcome),
        plot::throughput(outcome),
    ] {
        page.push_str(&plot);
    }
    page.push_str("<h2>Bounds</h2>\n");
    write_checks(page, &outcome.bounds)?;
    if !outcome.controller_bounds.is_empty() {
        page.push_str("<h2>What the controller measured</h2>\n");
        write_checks(page, &outcome.controller_bounds)?;
    }
    page.push_str("<h2>Budget</h2>\n");
    write_checks(page, &outcome.budget)?;
    page.push_str("<h2>Rounds</h2>\n");
    write_rounds(page, outcome)?;
    page.push_str("</body></html>\n");
    Ok(())
}

fn write_checks(page: &mut String, checks: &[Check]) -> std::fmt::Result {
    page.push_str("<table><tr><th>what</th><th>measured</th><th>at most</th><th></th></tr>\n");
    for check in checks {
        let (word, class) = if check.met {
            ("met", "met")
        } else {
            ("missed", "missed")
        };
        writeln!(
            page,
            "<tr><td>{}</td><td>{:.1} {unit}</td><td>{} {unit}</td><td class=\"{class}\">{word}</td></tr>",
            escaped(&check.what),
            check.measured,
            check.limit,
            unit = check.unit,
        )?;
    }
    page.push_str("</table>\n");
    Ok(())
}

fn write_rounds(page: &mut String, outcome: &Outcome) -> std::fmt::Result {
    page.push_str(
        "<table><tr><th>round</th><th>claims</th><th>not Ready</th><th>p50</th><th>p90</th><th>p99</th><th>max</th>\
         <th>claims/s</th></tr>\n",
    );
    let rounds = outcome.rounds.iter().enumerate();
    let numbered = rounds.map(|(index, round)| ((index + 1).to_string(), round));
    for (name, round) in numbered.chain([("all".to_owned(), &outcome.total)]) {
        let Summary {
            claims,
            not_ready,
            p50_ms,
            p90_ms,
            p99_ms,
            max_ms,
            claims_per_second,
            ..
        } = round;
        writeln!(
            page,
            "<tr><td>{name}</td><td>{claims}</td><td>{not_ready}</td><td>{p50_ms:.1} ms</td><td>{p90_ms:.1} ms</td>\
             <td>{p99_ms:.1} ms</td><td>{max_ms:.1} ms</td><td>{claims_per_second:.1}</td></tr>"
        )?;
    }
    page.push_str("</table>\n");
    Ok(())
}

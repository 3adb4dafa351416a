//! The series of a running system after a scripted run, compared with the list that dashboards and alerts are written against.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write;
use std::path::Path;
use std::time::{Duration, Instant};

use crate::exposition::{self, Family};
use crate::support::{Up, get, stdout_of};

/// The list. `UPDATE_SERIES=1` writes it anew.
const GOLDEN: &str = "tests/observability/series.txt";

fn scrape(up: &Up) -> BTreeMap<String, Family> {
    exposition::parse(&text(up))
}

fn text(up: &Up) -> String {
    let answer = get(up.ready()["metrics"].as_str().unwrap(), "/metrics");
    let (head, body) = answer.split_once("\r\n\r\n").unwrap();
    assert!(head.contains("200 OK"), "{head}");
    assert!(
        head.to_ascii_lowercase()
            .contains("content-type: text/plain; version=0.0.4"),
        "{head}"
    );
    body.to_owned()
}

/// A claim from the pool, a command in its sandbox, a claim without a pool, and the deletion of both.
fn scripted_run(up: &Up) {
    let warm = stdout_of(up.command().arg("claim"));
    let warm = warm.trim();
    stdout_of(up.command().args(["exec", warm, "--", "true"]));
    let output = up
        .command()
        .args(["claim", "cold", "--template", "no-such-template"])
        .output();
    assert!(!output.unwrap().status.success());
    stdout_of(up.command().args(["delete", "--wait", warm]));
}

/// One line for each family, with its type and the names of its labels.
fn list(families: &BTreeMap<String, Family>) -> String {
    let mut text = String::new();
    for (name, family) in families {
        let labels: BTreeSet<&str> = family
            .samples
            .iter()
            .flat_map(|(_, labels, _)| labels.keys().map(String::as_str))
            .filter(|label| *label != "le")
            .collect();
        let labels: Vec<&str> = labels.into_iter().collect();
        let _ = writeln!(text, "{} {name}{{{}}}", family.kind, labels.join(","));
    }
    text
}

/// Waits until only a full pool is left, and returns the metrics then.
fn await_full_pool(up: &Up) -> BTreeMap<String, Family> {
    let deadline = Instant::now() + Duration::from_secs(120);
    loop {
        let families = scrape(up);
        let full = families.get("agent_sandboxes").is_some_and(|family| {
            let counted: f64 = family.samples.iter().map(|(_, _, value)| value).sum();
            let ready = family.samples.iter().all(|(_, labels, _)| {
                labels["ready_condition"] == "true" && labels["owned_by"] == "SandboxWarmPool"
            });
            ready && (counted - 2.0).abs() < 0.1
        });
        if full {
            return families;
        }
        assert!(Instant::now() < deadline, "{}", text(up));
        std::thread::park_timeout(Duration::from_millis(20));
    }
}

#[test]
fn a_scrape_shows_the_series_that_dashboards_are_written_against() {
    let up = Up::start(&[]);
    // A claim that is created before the pool is full may start cold.
    await_full_pool(&up);
    scripted_run(&up);
    // The claims are gone; the pool fills up again behind them.
    let families = await_full_pool(&up);

    let complaints = exposition::complaints(&families);
    assert!(complaints.is_empty(), "{complaints:#?}");
    // For Prometheus' own linter, which CI runs over it.
    let kept = Path::new(env!("CARGO_TARGET_TMPDIR")).join("scrape.prom");
    std::fs::write(kept, text(&up)).unwrap();

    let golden = Path::new(env!("CARGO_MANIFEST_DIR")).join(GOLDEN);
    let found = list(&families);
    if std::env::var_os("UPDATE_SERIES").is_some() {
        std::fs::write(&golden, &found).unwrap();
    }
    let expected = std::fs::read_to_string(&golden).unwrap();
    assert_eq!(
        found, expected,
        "the series have changed; if that is meant, run this test with UPDATE_SERIES=1 and tell in CHANGELOG.md"
    );

    let claims = &families["agent_sandbox_claim_creation_total"].samples;
    let (_, labels, count) = &claims[0];
    assert_eq!(
        (
            labels["launch_type"].as_str(),
            labels["warmpool_name"].as_str()
        ),
        ("warm", "python-warmpool")
    );
    assert!((count - 1.0).abs() < 0.1, "{claims:?}");
    for latency in [
        "agent_sandbox_claim_startup_latency_ms",
        "agent_sandbox_claim_controller_startup_latency_ms",
        "agent_sandbox_client_claim_startup_latency_ms",
        "agent_sandbox_creation_latency_ms",
    ] {
        let samples = &families[latency].samples;
        let count = samples.iter().find(|(name, ..)| name.ends_with("_count"));
        let (_, _, count) = count.unwrap();
        assert!(
            (count - 1.0).abs() < 0.1,
            "{latency} is recorded once a claim"
        );
    }
}

/// Families that only a process with leader election has.
const OF_THE_MANAGER: [&str; 1] = ["leader_election_master_status"];
/// Families that appear once a claim has found its pool empty.
const OF_A_SHORTAGE: [&str; 1] = ["agent_sandbox_claim_warm_misses_total"];

/// The words of a text that are names of our series, or of the libraries whose names we use.
fn series_in(text: &str) -> BTreeSet<String> {
    let words =
        text.split(|character: char| !(character.is_ascii_alphanumeric() || character == '_'));
    let prefixes = [
        "agent_sandbox_",
        "agent_sandboxes",
        "controller_runtime_",
        "leader_election_",
        "process_",
        "rest_client_",
        "workqueue_",
    ];
    words
        .filter(|word| prefixes.iter().any(|prefix| word.starts_with(prefix)))
        .map(|word| {
            let suffixes = ["_bucket", "_count", "_sum"];
            let family = suffixes.iter().find_map(|suffix| word.strip_suffix(suffix));
            family.unwrap_or(word).to_owned()
        })
        .collect()
}

#[test]
fn dashboards_and_alerts_ask_only_for_series_that_exist() {
    let crate_directory = Path::new(env!("CARGO_MANIFEST_DIR"));
    let golden = std::fs::read_to_string(crate_directory.join(GOLDEN)).unwrap();
    let known: BTreeSet<&str> = golden
        .lines()
        .filter_map(|line| line.split_once(' ')?.1.split_once('{'))
        .map(|(name, _)| name)
        .chain(OF_THE_MANAGER)
        .chain(OF_A_SHORTAGE)
        .collect();
    let monitoring = crate_directory.join("../../deploy/monitoring");
    for file in ["dashboard.json", "rules.yaml", "prometheus-rule.yaml"] {
        let text = std::fs::read_to_string(monitoring.join(file)).unwrap();
        let asked = series_in(&text);
        assert!(asked.len() > 8, "{file} asks for {asked:?}");
        for series in asked {
            assert!(known.contains(series.as_str()), "{file} asks for {series}");
        }
    }
}

#[test]
fn the_operators_rules_are_those_of_prometheus() {
    let monitoring = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../deploy/monitoring");
    let read = |file: &str| -> serde_yaml_ng::Value {
        let text = std::fs::read_to_string(monitoring.join(file)).unwrap();
        serde_yaml_ng::from_str(&text).unwrap()
    };
    assert_eq!(read("prometheus-rule.yaml")["spec"], read("rules.yaml"));
}

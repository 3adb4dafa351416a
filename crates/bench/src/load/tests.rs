//! A small load, from the claims to the report.

use clap::Parser;

use super::outcome::Sample;
use super::recipe::Name;
use super::*;

#[derive(Debug, Parser)]
struct Program {
    #[command(flatten)]
    arguments: Arguments,
}

fn arguments(line: &str) -> Arguments {
    let words = std::iter::once("load").chain(line.split(' '));
    Program::parse_from(words).arguments
}

#[test]
fn flags_change_one_figure_each() {
    let recipe = arguments("rapid-burst --claims 5 --pause 0.5").recipe();
    assert_eq!((recipe.claims, recipe.rounds, recipe.pool), (5, 100, 200));
    assert!((recipe.pause_s - 0.5).abs() < 1e-9);
    for bad in ["churn --qps 0", "churn --claims 0", "churn --pause -1"] {
        let words = std::iter::once("load").chain(bad.split(' '));
        assert!(Program::try_parse_from(words).is_err(), "{bad}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_small_load_succeeds_and_is_reported_in_every_format() {
    let directory = tempfile::tempdir().unwrap();
    let line = "rapid-burst --rounds 2 --claims 6 --pool 8 --qps 200 --pause 0";
    let mut arguments = arguments(line);
    arguments.output = Some(directory.path().join("out"));
    execute(arguments).await.unwrap();

    let read =
        |name: &str| std::fs::read_to_string(directory.path().join("out").join(name)).unwrap();
    let results: serde_json::Value = serde_json::from_str(&read("results.json")).unwrap();
    assert_eq!(results["total"]["claims"], 12);
    assert_eq!(results["total"]["notReady"], 0);
    assert_eq!(results["rounds"].as_array().unwrap().len(), 2);
    assert!(results["total"]["p50Ms"].as_f64().unwrap() > 0.0);
    let junit = read("junit.xml");
    // Two rounds, four bounds, and three of each of the two histograms that need no admission hook.
    assert!(junit.contains(r#"tests="12""#), "{junit}");
    assert!(junit.contains("[round: 02] 6 claims"), "{junit}");
    let page = read("report.html");
    assert_eq!(page.matches("<svg").count(), 3);
    assert!(read("latencies.svg").starts_with("<svg"));
    assert!(page.contains("agent_sandbox_claim_controller_startup_latency_ms"));
    let controller = results["controller"].as_array().unwrap();
    let counted: Vec<(&str, f64)> = controller
        .iter()
        .map(|one| {
            let name = one["histogram"].as_str().unwrap();
            (name, one["count"].as_f64().unwrap())
        })
        .collect();
    for name in [
        "agent_sandbox_claim_controller_startup_latency_ms",
        "agent_sandbox_creation_latency_ms",
    ] {
        assert!(counted.contains(&(name, 12.0)), "{counted:?}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn plain_sandboxes_are_made_in_each_of_several_namespaces() {
    let results = results_of("sandboxes --replicas 4 --namespaces 3 --qps 100").await;
    assert_eq!(results["total"]["claims"], 12);
    assert_eq!(results["total"]["notReady"], 0);
    assert_eq!(results["recipe"]["makes"], "sandboxes");
    assert_eq!(results["recipe"]["namespaces"], 3);
    let controller = &results["controller"];
    assert_eq!(controller, &serde_json::json!([]), "claims alone feed them");
}

#[test]
fn an_autoscaler_needs_a_cluster_and_a_pool_within_its_bounds() {
    let refusal = |line: &str| {
        let arguments = arguments(line);
        let refused = arguments.check(&arguments.recipe());
        refused.map_or_else(|error| error.to_string(), |()| String::new())
    };
    let bounds = "--hpa-min-replicas 2 --hpa-max-replicas 50";
    let outside = refusal(&format!("rapid-burst --target cluster --pool 60 {bounds}"));
    assert!(outside.contains("--pool=60 must lie between"), "{outside}");
    let embedded = refusal(&format!("rapid-burst --pool 10 {bounds}"));
    assert!(embedded.contains("--target=cluster"), "{embedded}");
    let pool = refusal("sandboxes --pool 3");
    assert!(pool.contains("--pool"), "{pool}");
    let accepted = format!("rapid-burst --target cluster --pool 10 {bounds}");
    assert_eq!(refusal(&accepted), "");
    let autoscaling = arguments(&accepted).recipe().autoscaling.unwrap();
    assert_eq!(
        (autoscaling.min_replicas, autoscaling.max_replicas),
        (2, 50)
    );
    let words = "load rapid-burst --hpa-min-replicas 2".split(' ');
    assert!(Program::try_parse_from(words).is_err(), "one bound alone");
}

/// Runs a load and returns its results.
async fn results_of(line: &str) -> serde_json::Value {
    let directory = tempfile::tempdir().unwrap();
    let mut arguments = arguments(line);
    arguments.output = Some(directory.path().to_owned());
    execute(arguments).await.unwrap();
    let results = std::fs::read_to_string(directory.path().join("results.json")).unwrap();
    serde_json::from_str(&results).unwrap()
}

#[tokio::test(flavor = "multi_thread")]
async fn claims_with_a_short_life_all_become_ready() {
    let results = results_of("churn --claims 8 --pool 4 --qps 100 --keep 0.05").await;
    assert_eq!(results["total"]["claims"], 8);
    assert_eq!(results["total"]["notReady"], 0);
    assert_eq!(results["recipe"]["keptForS"], 0.05);
    assert_eq!(results["capacity"], serde_json::Value::Null);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_growing_load_reports_its_capacity() {
    let results = results_of("capacity --claims 2 --rounds 2 --qps 100").await;
    assert_eq!(results["capacity"], 4);
    assert_eq!(results["total"]["claims"], 6);
    assert_eq!(results["total"]["notReady"], 0);
}

#[test]
fn a_growing_load_is_judged_up_to_its_capacity() {
    let round = |round: usize, claims: usize, latency_ms: f64| {
        let sample = Sample {
            round,
            due_s: 0.0,
            latency_ms: Some(latency_ms),
        };
        vec![sample; claims]
    };
    let judged = |rounds: &[Vec<Sample>]| {
        let driven = Driven {
            rounds: rounds.iter().map(Summary::of).collect(),
            samples: rounds.concat(),
            ..Driven::default()
        };
        let ran = Ran {
            target: String::new(),
            driven,
            controller: Vec::new(),
        };
        judge(Recipe::named(Name::Capacity), Timestamp::UNIX_EPOCH, ran)
    };
    let (quick, slow) = (10.0, 60_000.0);
    let found = judged(&[round(0, 2, quick), round(1, 4, quick), round(2, 8, slow)]);
    assert_eq!((found.capacity, found.total.claims), (Some(4), 6));
    assert!(found.passed(Judged::ByBudgetToo));
    let none = judged(&[round(0, 2, slow)]);
    assert_eq!((none.capacity, none.total.claims), (Some(0), 2));
    assert!(!none.passed(Judged::ByBounds));
}

#[test]
fn a_missed_limit_fails_the_run_and_is_named() {
    let samples: Vec<Sample> = (0..10)
        .map(|_| Sample {
            round: 0,
            due_s: 0.0,
            latency_ms: Some(300.0),
        })
        .collect();
    let recipe = Recipe::named(Name::Ramp);
    let total = Summary::of(&samples);
    let outcome = Outcome {
        target: "a <test>".to_owned(),
        machine: machine(),
        began: String::new(),
        filled_pool_in_s: 0.0,
        pool_at_end: None,
        bounds: checks(&total, recipe.makes, &recipe.bounds),
        budget: checks(&total, recipe.makes, &recipe.budget),
        controller: Vec::new(),
        controller_bounds: Vec::new(),
        capacity: None,
        rounds: vec![total.clone()],
        total,
        samples,
        recipe,
    };
    assert!(
        outcome.passed(Judged::ByBounds),
        "300 ms is within the bounds"
    );
    assert!(
        !outcome.passed(Judged::ByBudgetToo),
        "and not in the budget"
    );
    let junit = junit::render(&outcome, Judged::ByBudgetToo);
    assert!(junit.contains(r#"failures="3""#), "{junit}");
    assert!(junit.contains("p99 of claim to Ready is 300.0 ms; at most 100 ms was asked"));
    let page = html::render(&outcome, Judged::ByBudgetToo);
    assert!(page.contains("verdict missed") && page.contains("a &lt;test&gt;"));
}

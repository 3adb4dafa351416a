//! Reads Prometheus' text, and checks it as strictly as its own tools do.

use std::collections::{BTreeMap, BTreeSet};

/// One family of series.
#[derive(Debug, Default)]
pub struct Family {
    pub kind: String,
    pub help: String,
    /// The label sets, each as written.
    pub samples: Vec<(String, BTreeMap<String, String>, f64)>,
}

/// Families by name. Panics on text that a scraper would refuse.
pub fn parse(text: &str) -> BTreeMap<String, Family> {
    let mut families: BTreeMap<String, Family> = BTreeMap::new();
    let mut current = String::new();
    for line in text.lines() {
        if let Some(rest) = line.strip_prefix("# HELP ") {
            let (name, help) = rest.split_once(' ').expect("a help text");
            assert!(!families.contains_key(name), "{name} is exposed twice");
            name.clone_into(&mut current);
            help.clone_into(&mut families.entry(current.clone()).or_default().help);
        } else if let Some(rest) = line.strip_prefix("# TYPE ") {
            let (name, kind) = rest.split_once(' ').expect("a type");
            assert_eq!(name, current, "help and type stand together");
            kind.clone_into(&mut families.entry(current.clone()).or_default().kind);
        } else {
            let sample = sample(line);
            assert!(
                sample.0.starts_with(&current),
                "{line} stands under {current}"
            );
            let family = families.get_mut(&current).expect("a heading");
            family.samples.push(sample);
        }
    }
    families
}

fn sample(line: &str) -> (String, BTreeMap<String, String>, f64) {
    let (series, value) = line.rsplit_once(' ').expect("a value");
    let value = value
        .parse()
        .unwrap_or_else(|_| panic!("no number: {line}"));
    let Some((name, labels)) = series.split_once('{') else {
        return (series.to_owned(), BTreeMap::new(), value);
    };
    let labels = labels.strip_suffix('}').expect("an end of the labels");
    let pairs = labels.split("\",").map(|pair| {
        let (key, value) = pair.split_once("=\"").expect("a label");
        (key.to_owned(), value.trim_end_matches('"').to_owned())
    });
    (name.to_owned(), pairs.collect(), value)
}

/// The complaints of Prometheus' linter, except about names that are given by others.
pub fn complaints(families: &BTreeMap<String, Family>) -> Vec<String> {
    let mut complaints = Vec::new();
    for (name, family) in families {
        let mut complain = |what: &str| complaints.push(format!("{name}: {what}"));
        if family.help.trim().is_empty() {
            complain("no help text");
        }
        let is_counter = family.kind == "counter";
        if is_counter != name.ends_with("_total") {
            complain("counters, and only they, end in _total");
        }
        if !matches!(family.kind.as_str(), "counter" | "gauge" | "histogram") {
            complain("no known type");
        }
        for suffix in ["_count", "_sum", "_bucket", "_info_total"] {
            if name.ends_with(suffix) {
                complain("a suffix that means something else");
            }
        }
        let mut seen = BTreeSet::new();
        for (series, labels, _) in &family.samples {
            if !seen.insert((series, labels)) {
                complain("a series twice");
            }
            if labels.keys().any(|key| key.starts_with("__")) {
                complain("a reserved label");
            }
        }
        if family.kind == "histogram" {
            check_buckets(family, &mut complain);
        }
    }
    complaints
}

fn check_buckets(family: &Family, complain: &mut impl FnMut(&str)) {
    let mut last: BTreeMap<BTreeMap<String, String>, (f64, f64)> = BTreeMap::new();
    for (series, labels, value) in &family.samples {
        if !series.ends_with("_bucket") {
            continue;
        }
        let mut labels = labels.clone();
        let bound = labels.remove("le").unwrap_or_default();
        let bound: f64 = bound.replace("+Inf", "inf").parse().unwrap_or(f64::NAN);
        let before = last.insert(labels, (bound, *value));
        if let Some((lower, fewer)) = before
            && !(bound > lower && *value >= fewer)
        {
            complain("buckets out of order");
        }
    }
    if last.values().any(|(bound, _)| bound.is_finite()) {
        complain("no bucket without an end");
    }
}

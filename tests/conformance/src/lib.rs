//! What the project relies on of a Kubernetes API, as exchanges of requests and answers.
//!
//! The requests are in `scenarios/`. What kube-apiserver answered is in `recorded/`, and both servers are held to it: the embedded
//! one by `cargo test`, a real one by `cargo xtask test-kubernetes`, which also records anew with `--record`.
//!
//! | module | owns |
//! |---|---|
//! | [`scenario`] | how requests are written down |
//! | [`exchange`] | asking a server |
//! | [`essence`] | what of an answer is compared: not identifiers, times, or the words of a refusal |

pub mod essence;
pub mod exchange;
pub mod scenario;

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::Context;

use scenario::Scenario;

/// The files of scenarios, by name, in order.
pub fn all() -> anyhow::Result<Vec<(String, Vec<Scenario>)>> {
    let mut paths: Vec<PathBuf> = fs::read_dir(folder("scenarios"))?
        .map(|entry| Ok(entry?.path()))
        .collect::<std::io::Result<_>>()?;
    paths.sort();
    paths
        .into_iter()
        .map(|path| {
            let text = fs::read_to_string(&path)?;
            let scenarios = serde_yaml_ng::from_str(&text)
                .with_context(|| format!("reading {}", path.display()))?;
            let name = path.file_stem().unwrap_or_default().to_string_lossy();
            Ok((name.into_owned(), scenarios))
        })
        .collect()
}

/// Where the answers to a file of scenarios are recorded.
pub fn recorded(file: &str) -> PathBuf {
    folder("recorded").join(format!("{file}.json"))
}

fn folder(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join(name)
}

//! The progress bar of a load, if standard error is a terminal.

use std::io::IsTerminal;

use indicatif::{ProgressBar, ProgressStyle};

use super::outcome::Summary;
use super::recipe::Recipe;

pub struct Progress(ProgressBar);

impl Progress {
    pub fn of(recipe: &Recipe) -> Self {
        if !std::io::stderr().is_terminal() {
            return Self(ProgressBar::hidden());
        }
        let claims = u64::try_from(recipe.claims_in_total()).unwrap_or(u64::MAX);
        let bar = ProgressBar::new(claims);
        let style = ProgressStyle::with_template(
            "{elapsed_precise} {bar:32} {pos}/{len} claims ({per_sec})  {msg}",
        );
        if let Ok(style) = style {
            bar.set_style(style);
        }
        Self(bar)
    }

    pub fn say(&self, message: &'static str) {
        self.0.set_message(message);
        self.0.tick();
    }

    pub fn made(&self, claims: u64) {
        self.0.inc(claims);
    }

    pub fn round(&self, round: usize, summary: &Summary) {
        let Summary { p50_ms, p99_ms, .. } = summary;
        self.0.set_message(format!(
            "round {round}: p50 {p50_ms:.1} ms, p99 {p99_ms:.1} ms"
        ));
    }

    pub fn finish(&self) {
        self.0.finish_and_clear();
    }
}

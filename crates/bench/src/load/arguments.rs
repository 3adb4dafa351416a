//! The flags of `bench load`.

use std::path::PathBuf;

use anyhow::ensure;
use clap::{Args, ValueEnum};

use super::outcome::Judged;
use super::recipe::{Autoscaling, Makes, Name, Recipe};
use crate::connection;

/// What is loaded
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
pub enum Target {
    /// The embedded API server and the controllers, with a fake node that marks every pod Ready at once
    #[default]
    Controllers,
    /// The whole system, with pods that run
    Up,
    /// The cluster that --kubeconfig or KUBECONFIG names, with the controllers that run there
    Cluster,
}

/// Put a load on the system and judge its latencies
#[derive(Clone, Debug, Args)]
pub struct Arguments {
    /// Which load
    #[arg(value_enum)]
    pub(super) recipe: Name,

    /// What is loaded
    #[arg(long, value_enum, default_value_t)]
    pub(super) target: Target,

    /// Claims, or sandboxes, of a round in each namespace, of the first round where they double [default: the recipe's]
    #[arg(long, visible_alias = "replicas", value_name = "N", value_parser = positive)]
    pub(super) claims: Option<usize>,

    /// Namespaces to load, each with its own template and pool [default: 1]
    #[arg(long, value_name = "N", value_parser = positive)]
    pub(super) namespaces: Option<usize>,

    /// What the names of the namespaces begin with
    #[arg(long, value_name = "TEXT", default_value = "load")]
    pub(super) namespace_prefix: String,

    /// Rounds at most [default: the recipe's]
    #[arg(long, value_name = "N", value_parser = positive)]
    pub(super) rounds: Option<usize>,

    /// Sandboxes kept warm in each namespace [default: the recipe's]
    #[arg(long, value_name = "N")]
    pub(super) pool: Option<usize>,

    /// Claims, or sandboxes, made each second [default: the recipe's]
    #[arg(long, value_name = "RATE", value_parser = positive_rate)]
    pub(super) qps: Option<f64>,

    /// Seconds between rounds [default: the recipe's]
    #[arg(long, value_name = "SECONDS", value_parser = not_negative)]
    pub(super) pause: Option<f64>,

    /// Seconds from Ready to the deletion of a claim, in the recipe churn [default: the recipe's]
    #[arg(long, value_name = "SECONDS", value_parser = not_negative)]
    pub(super) keep: Option<f64>,

    /// Fail when our own budget is missed too, not only the outer bounds
    #[arg(long)]
    pub(super) strict: bool,

    /// Where to write report.html, results.json, junit.xml and the plots
    #[arg(long, value_name = "DIRECTORY")]
    pub(super) output: Option<PathBuf>,

    /// Image of the sandboxes [default: host with --target=up; needed with --target=cluster]
    #[arg(long, value_name = "IMAGE")]
    pub(super) image: Option<String>,

    /// A word of the sandboxes' command, for --target=cluster; once for each word [default: the image's]
    #[arg(long, value_name = "WORD")]
    pub(super) command: Vec<String>,

    #[command(flatten)]
    pub(super) autoscaling: AutoscalingArguments,

    /// Where the controller's metrics are, for --target=cluster [default: its service, through the API server]
    #[arg(long, value_name = "URL")]
    pub(super) controller_metrics: Option<String>,

    #[command(flatten)]
    pub(super) connection: connection::Arguments,
}

/// A HorizontalPodAutoscaler for each pool
#[derive(Clone, Debug, Args)]
pub struct AutoscalingArguments {
    /// Let a HorizontalPodAutoscaler scale each pool, to no fewer sandboxes than this; needs --target=cluster
    #[arg(long = "hpa-min-replicas", value_name = "N", value_parser = positive, requires = "max_replicas")]
    min_replicas: Option<usize>,

    /// The most sandboxes that it may scale a pool to
    #[arg(long = "hpa-max-replicas", value_name = "N", value_parser = positive, requires = "min_replicas")]
    max_replicas: Option<usize>,

    /// The external metric that it scales by, as the cluster's metrics adapter serves it
    #[arg(
        long = "hpa-metric",
        value_name = "NAME",
        default_value = "agent_sandbox_claim_creations_per_second",
        requires = "min_replicas"
    )]
    metric: String,

    /// The value of the metric for each warm sandbox
    #[arg(
        long = "hpa-target-value",
        value_name = "QUANTITY",
        default_value = "1",
        requires = "min_replicas"
    )]
    target_value: String,
}

impl AutoscalingArguments {
    fn autoscaling(&self) -> Option<Autoscaling> {
        Some(Autoscaling {
            min_replicas: self.min_replicas?,
            max_replicas: self.max_replicas?,
            metric: self.metric.clone(),
            average_value: self.target_value.clone(),
        })
    }
}

fn positive(text: &str) -> Result<usize, String> {
    match text.parse() {
        Ok(number) if number > 0 => Ok(number),
        _ => Err("expected a whole number above 0".to_owned()),
    }
}

fn positive_rate(text: &str) -> Result<f64, String> {
    match text.parse::<f64>() {
        Ok(rate) if rate.is_finite() && rate > 0.0 => Ok(rate),
        _ => Err("expected a number above 0".to_owned()),
    }
}

fn not_negative(text: &str) -> Result<f64, String> {
    match text.parse::<f64>() {
        Ok(seconds) if seconds.is_finite() && seconds >= 0.0 => Ok(seconds),
        _ => Err("expected a number of seconds".to_owned()),
    }
}

impl Arguments {
    /// The recipe with the changes of the flags.
    pub fn recipe(&self) -> Recipe {
        let recipe = Recipe::named(self.recipe);
        Recipe {
            claims: self.claims.unwrap_or(recipe.claims),
            namespaces: self.namespaces.unwrap_or(recipe.namespaces),
            autoscaling: self.autoscaling.autoscaling(),
            rounds: self.rounds.unwrap_or(recipe.rounds),
            pool: self.pool.unwrap_or(recipe.pool),
            claims_per_second: self.qps.unwrap_or(recipe.claims_per_second),
            pause_s: self.pause.unwrap_or(recipe.pause_s),
            kept_for_s: recipe.kept_for_s.map(|kept| self.keep.unwrap_or(kept)),
            ..recipe
        }
    }

    /// Rejects flags that contradict each other, before anything is created.
    pub fn check(&self, recipe: &Recipe) -> anyhow::Result<()> {
        if recipe.makes == Makes::Sandboxes {
            ensure!(
                recipe.pool == 0,
                "--pool does not go with the recipe sandboxes, which makes no claims"
            );
        }
        let Some(autoscaling) = &recipe.autoscaling else {
            return Ok(());
        };
        ensure!(
            self.target == Target::Cluster,
            "--hpa-min-replicas needs --target=cluster: autoscalers are run by kube-controller-manager"
        );
        let bounds = autoscaling.min_replicas..=autoscaling.max_replicas;
        ensure!(
            bounds.contains(&recipe.pool),
            "--pool={} must lie between --hpa-min-replicas={} and --hpa-max-replicas={}",
            recipe.pool,
            autoscaling.min_replicas,
            autoscaling.max_replicas
        );
        Ok(())
    }

    /// The namespaces to create. Their names include the process ID, so that two loads do not collide.
    pub fn namespaces(&self, recipe: &Recipe) -> Vec<String> {
        let (prefix, process) = (&self.namespace_prefix, std::process::id());
        (1..=recipe.namespaces)
            .map(|number| format!("{prefix}-{process}-{number}"))
            .collect()
    }

    pub fn judged(&self) -> Judged {
        if self.strict {
            Judged::ByBudgetToo
        } else {
            Judged::ByBounds
        }
    }
}

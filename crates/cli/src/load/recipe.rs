//! The recipes: how many claims, how fast, in which rounds, and what their latencies are measured against. Pure.
//!
//! The figures are those of the load tests that operators of agent-sandbox know. Flags change them one by one.

use clap::ValueEnum;
use serde::Serialize;

/// A kind of load.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, ValueEnum)]
#[serde(rename_all = "kebab-case")]
pub enum Name {
    /// Bursts of claims against a warm pool, again and again
    RapidBurst,
    /// One ramp of claims up, and down again
    Ramp,
    /// Claims at a constant rate, for long
    Sustained,
    /// Few claims, each deleted soon after, for very long
    Churn,
    /// Twice as many claims without a pool each time, until the bounds are missed
    Capacity,
    /// Sandboxes without claims, in each of several namespaces
    Sandboxes,
}

impl Name {
    pub fn as_str(self) -> &'static str {
        match self {
            Self::RapidBurst => "rapid-burst",
            Self::Ramp => "ramp",
            Self::Sustained => "sustained",
            Self::Churn => "churn",
            Self::Capacity => "capacity",
            Self::Sandboxes => "sandboxes",
        }
    }
}

/// What a load makes, and waits for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Makes {
    Claims,
    /// Sandboxes of their own, without template, pool or claim.
    Sandboxes,
}

impl Makes {
    /// What one of them is called.
    pub fn noun(self) -> &'static str {
        match self {
            Self::Claims => "claim",
            Self::Sandboxes => "sandbox",
        }
    }

    /// What many of them are called.
    pub fn plural(self) -> &'static str {
        match self {
            Self::Claims => "claims",
            Self::Sandboxes => "sandboxes",
        }
    }
}

/// A HorizontalPodAutoscaler for each pool.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Autoscaling {
    pub min_replicas: usize,
    pub max_replicas: usize,
    /// The external metric that a metrics adapter serves.
    pub metric: String,
    /// How much of the metric one warm sandbox is kept for.
    pub average_value: String,
}

/// Latencies that must not be exceeded, in milliseconds.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
#[expect(
    clippy::struct_field_names,
    reason = "the unit belongs to the names in the results"
)]
pub struct Limits {
    pub p50_ms: f64,
    pub p90_ms: f64,
    pub p99_ms: f64,
}

/// What the load tests of agent-sandbox have always been judged by.
pub const BOUNDS: Limits = Limits {
    p50_ms: 1_000.0,
    p90_ms: 1_000.0,
    p99_ms: 5_000.0,
};

/// A load, in all its figures.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Recipe {
    pub name: Name,
    pub makes: Makes,
    /// How many namespaces are loaded. Pools and claims are counted in each of them; rates are of all together.
    pub namespaces: usize,
    /// Sandboxes kept warm; none means that each claim starts its own.
    pub pool: usize,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub autoscaling: Option<Autoscaling>,
    pub rounds: usize,
    /// Claims, or sandboxes, of the first round.
    pub claims: usize,
    /// Whether each round has twice the claims of the one before.
    pub doubles: bool,
    pub claims_per_second: f64,
    pub deletions_per_second: f64,
    /// Between one round's end and the next one's begin.
    pub pause_s: f64,
    /// How long a claim is kept once it is Ready, unless until the end.
    pub kept_for_s: Option<f64>,
    /// The outer bound: missing it fails the run.
    pub bounds: Limits,
    /// What we ask of ourselves on two cores, with the embedded server and the node that only pretends.
    pub budget: Limits,
}

impl Recipe {
    pub fn named(name: Name) -> Self {
        // Several warm claims at once; see "warm claims, embedded, sustained" among the budgets.
        let many = Limits {
            p50_ms: 50.0,
            p90_ms: 80.0,
            p99_ms: 100.0,
        };
        let cold = Limits {
            p50_ms: 30.0,
            p90_ms: 60.0,
            p99_ms: 120.0,
        };
        let base = Self {
            name,
            makes: Makes::Claims,
            namespaces: 1,
            pool: 200,
            autoscaling: None,
            rounds: 1,
            claims: 100,
            doubles: false,
            claims_per_second: 100.0,
            deletions_per_second: 100.0,
            pause_s: 0.0,
            kept_for_s: None,
            bounds: BOUNDS,
            budget: many,
        };
        match name {
            Name::RapidBurst => Self {
                rounds: 100,
                claims: 50,
                pause_s: 20.0,
                ..base
            },
            Name::Ramp => Self {
                pool: 100,
                deletions_per_second: 50.0,
                ..base
            },
            Name::Sustained => Self {
                claims: 12_000,
                claims_per_second: 200.0,
                ..base
            },
            Name::Churn => Self {
                claims: 1_200,
                claims_per_second: 2.0,
                kept_for_s: Some(5.0),
                budget: Limits {
                    p50_ms: 5.0,
                    p90_ms: 10.0,
                    p99_ms: 20.0,
                },
                ..base
            },
            Name::Capacity => Self {
                pool: 0,
                rounds: 8,
                doubles: true,
                claims_per_second: 10.0,
                deletions_per_second: 50.0,
                budget: cold,
                ..base
            },
            Name::Sandboxes => Self {
                makes: Makes::Sandboxes,
                pool: 0,
                claims: 20,
                claims_per_second: 10.0,
                deletions_per_second: 10.0,
                budget: cold,
                ..base
            },
        }
    }

    /// How many claims a round, counted from 0, makes in all namespaces together.
    pub fn claims_in(&self, round: usize) -> usize {
        let in_each = if self.doubles {
            self.claims << round.min(20)
        } else {
            self.claims
        };
        in_each * self.namespaces
    }

    /// How many claims there are in all rounds.
    pub fn claims_in_total(&self) -> usize {
        (0..self.rounds).map(|round| self.claims_in(round)).sum()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_recipes_have_the_figures_that_operators_know() {
        let burst = Recipe::named(Name::RapidBurst);
        assert_eq!((burst.claims, burst.rounds, burst.pool), (50, 100, 200));
        assert!((burst.pause_s - 20.0).abs() < 1e-9);
        let sustained = Recipe::named(Name::Sustained);
        assert_eq!(sustained.claims_in_total(), 12_000);
        let capacity = Recipe::named(Name::Capacity);
        assert_eq!((capacity.claims_in(0), capacity.claims_in(3)), (100, 800));
        let sandboxes = Recipe {
            namespaces: 3,
            ..Recipe::named(Name::Sandboxes)
        };
        assert_eq!((sandboxes.makes, sandboxes.pool), (Makes::Sandboxes, 0));
        assert_eq!(sandboxes.claims_in_total(), 60, "20 in each namespace");
        for name in Name::value_variants() {
            let recipe = Recipe::named(*name);
            assert_eq!(recipe.bounds, BOUNDS);
            let value = name.to_possible_value();
            assert_eq!(value.unwrap().get_name(), name.as_str());
        }
    }
}

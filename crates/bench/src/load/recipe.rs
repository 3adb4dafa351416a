//! The recipes: how many claims, how fast, in which rounds, with which limits. Pure.
//!
//! The defaults are those of upstream's load tests. Each flag changes one of them.

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

/// The kind of object that a load creates.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Makes {
    Claims,
    /// Sandboxes without template, pool or claim.
    Sandboxes,
}

impl Makes {
    /// The noun of one object.
    pub fn noun(self) -> &'static str {
        match self {
            Self::Claims => "claim",
            Self::Sandboxes => "sandbox",
        }
    }

    /// The noun of several objects.
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
    /// The value of the metric for each warm sandbox.
    pub average_value: String,
}

/// The highest allowed latencies, in milliseconds.
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

/// The bounds of upstream's load tests.
pub const BOUNDS: Limits = Limits {
    p50_ms: 1_000.0,
    p90_ms: 1_000.0,
    p99_ms: 5_000.0,
};

/// A load.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Recipe {
    pub name: Name,
    pub makes: Makes,
    /// The number of namespaces. Pools and claims count in each of them; rates are totals.
    pub namespaces: usize,
    /// Warm sandboxes; with 0, each claim starts its own.
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
    /// The pause between rounds.
    pub pause_s: f64,
    /// How long a Ready claim exists; `None` until the end of the load.
    pub kept_for_s: Option<f64>,
    /// A missed bound fails the run.
    pub bounds: Limits,
    /// The budget on two cores, with the embedded API server and the fake node.
    pub budget: Limits,
}

impl Recipe {
    pub fn named(name: Name) -> Self {
        // Several warm claims at once.
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

    /// The claims of a round, counted from 0, in all namespaces.
    pub fn claims_in(&self, round: usize) -> usize {
        let in_each = if self.doubles {
            self.claims << round.min(20)
        } else {
            self.claims
        };
        in_each * self.namespaces
    }

    /// The claims of all rounds.
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

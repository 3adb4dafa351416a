//! Decisions about claims, rule by rule.

mod acquisition;
mod refusals;
mod status;
mod upkeep;
mod world;

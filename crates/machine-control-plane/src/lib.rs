//! The controllers that a cluster of one machine needs in addition to an API server and a node.

#![cfg_attr(not(test), warn(clippy::arithmetic_side_effects))]

pub mod endpoints;
mod object_uid;
pub mod scheduler;
pub mod volume_provisioner;

/// The examples of README.md.
#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct ReadmeExamples;

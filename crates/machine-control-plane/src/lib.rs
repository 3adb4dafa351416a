//! The controllers that a cluster of one machine needs beside an API server and a node.
//!
#![doc = include_str!("../README.md")]
#![cfg_attr(not(test), warn(clippy::arithmetic_side_effects))]

pub mod endpoints;
pub mod scheduler;
pub mod volume_provisioner;

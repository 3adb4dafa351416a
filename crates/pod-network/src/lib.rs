//! The pod network of a node: links and addresses, network policies, and DNS.
//!
//! ```text
//! links            one routed link per pod
//! link_filter      a packet filter on each link, against forged source addresses
//! routing_rules    policy routing: packets that the nftables table has not marked are dropped
//! policy           network policies → rules (pure)
//! enforced_policy  a policy that cannot be decoded denies everything
//! firewall         rules → one nftables transaction (pure), and running `nft`
//! enforcer         watches policies, pods and namespaces, and applies the rules
//! table_monitor    notices when another program changes the table
//! removal_monitor  notices when another program removes a link or a routing rule
//! resolver         cluster DNS for pods, on the node's own address
//! ```
//!
//! This crate does not know how containers are started. The node reports to the enforcer which pod has which addresses, and asks it
//! whether a pod may run.

#![cfg_attr(not(test), warn(clippy::arithmetic_side_effects))]

pub mod address_block;
mod enforced_policy;
pub mod enforcer;
pub mod firewall;
mod follow;
mod link_filter;
pub mod links;
pub mod names;
pub mod namespaces;
pub mod pod_cidr;
pub mod policy;
pub mod removal_monitor;
pub mod resolver;
pub mod routing_rules;
mod sysctls;
mod table_monitor;

/// The examples of README.md.
#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct ReadmeExamples;

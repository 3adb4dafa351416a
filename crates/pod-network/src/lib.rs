//! The pods' network: links and addresses, which traffic may pass, and names.
//!
//! ```text
//! links          one routed link per pod; no two pods share a wire
//! link_filter    a packet filter on each link: a pod sends from its own addresses only
//! routing_rules  policy routing: what the table has not marked does not pass
//! policy         network policies → rules (pure)
//! enforced_policy  a policy that cannot be read denies everything
//! firewall       rules → one nftables transaction (pure), and the program that puts it into force
//! enforcer       watches policies, pods and namespaces, and keeps the two above in step
//! table_monitor  notices when another program changes the table
//! removal_monitor  notices when another program removes a link or a routing rule
//! resolver       the cluster's names for pods, on the node's own address
//! ```
//!
//! Nothing here knows how a container is started. The rest of the node tells the enforcer which pod got which address, and
//! asks it whether a pod may run.

#![cfg_attr(not(test), warn(clippy::arithmetic_side_effects))]

pub mod address_block;
mod enforced_policy;
pub mod enforcer;
pub mod firewall;
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
mod watched;

/// The examples of README.md.
#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct ReadmeExamples;

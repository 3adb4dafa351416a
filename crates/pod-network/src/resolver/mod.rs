//! The cluster's DNS for pods, on the node's own address.
//!
//! ```text
//! message   parses queries, writes responses (pure)
//! zone      services, their endpoints and pods → records (pure)
//! server    sockets; forwards queries for other names to the machine's resolvers unchanged
//! ```
//!
//! It caches nothing and is stateless. The egress rules of a pod decide whether it reaches the resolver ([`firewall`](super::firewall)).

mod message;
mod server;
mod zone;

pub use server::{Resolver, ResolverError};

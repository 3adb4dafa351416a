//! The cluster's DNS for pods, on the node's own address.
//!
//! ```text
//! message   a question read, an answer written (pure)
//! zone      services, their endpoints and pods → answers (pure)
//! server    sockets; what is no name of the cluster's goes on to the machine's resolvers as it came
//! ```
//!
//! Nothing is cached and nothing is kept of a question. Whether a pod may ask at all is decided by its egress rules
//! ([`firewall`](super::firewall)).

mod message;
mod server;
mod zone;

pub use server::{Resolver, ResolverError};

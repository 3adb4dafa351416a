//! The API server and a process of controllers, both small enough to be checked at every step.

mod claims;
mod kinds;
mod objects;
mod pools;
mod process;
mod server;
mod writes;

pub use objects::{Cluster, Faults};
pub use process::Process;
pub use server::Server;

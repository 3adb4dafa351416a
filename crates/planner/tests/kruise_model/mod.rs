//! The API server and a process of the controller of batch claims, both small enough to be checked at every step.

#[path = "../model/objects.rs"]
mod objects;
mod process;
mod server;
#[path = "../model/writes.rs"]
mod writes;

pub use objects::Cluster;
pub use process::Process;
pub use server::{Server, Wish, is_completed};

//! The embedded API server.
pub mod store;

//! Metrics and traces of the running binary. Needs root: it starts containers.

#![expect(clippy::unwrap_used, reason = "a test stops at the first surprise")]

#[path = "../end_to_end/support.rs"]
#[expect(dead_code, reason = "each test program uses a part of it")]
mod support;

mod exposition;
mod receiver;
mod router;
mod series;
mod traces;

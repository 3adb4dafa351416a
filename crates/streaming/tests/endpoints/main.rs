//! The endpoints as clients meet them, through a proxy that passes bytes.
#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

mod kube_client;
#[cfg(feature = "client-tests")]
mod kubectl;
mod spdy_client;
mod support;

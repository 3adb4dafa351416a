//! Tests of the endpoints with real clients, through a proxy that passes bytes unchanged.
#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

mod kube_client;
#[cfg(feature = "client-tests")]
mod kubectl;
mod spdy_client;
mod support;

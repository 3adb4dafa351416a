//! Discovers the address of a router behind a Gateway, from the Gateway's status.

use std::net::{IpAddr, Ipv6Addr};
use std::time::Duration;

use api::decoding::Decoded;
use kube::api::{ApiResource, DynamicObject};
use kube::core::GroupVersionKind;
use kube::{Api, Client};

use crate::error::ErrorKind;
use crate::follow::{Ended, Missing, Start, follow};
use crate::options::Scheme;
use crate::readiness::Verdict;

/// The URL of the named Gateway, once it has an address.
pub(crate) async fn discover(
    client: &Client,
    name: &str,
    namespace: &str,
    scheme: Scheme,
    limit: Duration,
) -> Result<String, ErrorKind> {
    let kind = GroupVersionKind::gvk("gateway.networking.k8s.io", "v1", "Gateway");
    let resource = ApiResource::from_gvk_with_plural(&kind, "gateways");
    let api: Api<Decoded<DynamicObject>> =
        Api::namespaced_with(client.clone(), namespace, &resource);
    let waiting = follow(&api, name, Start::Current, Missing::Awaited, |gateway| {
        address(gateway).map_or(Verdict::Wait, |address| Verdict::Done(address.to_owned()))
    });
    let what = "waiting for the gateway's address";
    let gateway = || format!("{namespace}/{name}");
    match tokio::time::timeout(limit, waiting).await {
        Err(_) => Err(ErrorKind::Timeout { what, limit }),
        Ok(Err(Ended::Deleted)) => Err(ErrorKind::GatewayDeleted { gateway: gateway() }),
        Ok(Err(Ended::Refused { reason, message })) => Err(ErrorKind::Refused { reason, message }),
        Ok(Err(Ended::Failed(cause))) => Err(ErrorKind::Kubernetes {
            operation: "watch the gateway",
            cause,
        }),
        Ok(Ok(address)) => url(scheme, &address).ok_or_else(|| ErrorKind::GatewayAddress {
            gateway: gateway(),
            address,
        }),
    }
}

fn address(gateway: &DynamicObject) -> Option<&str> {
    let address = gateway
        .data
        .pointer("/status/addresses/0/value")?
        .as_str()?;
    (!address.is_empty()).then_some(address)
}

/// Builds a URL from an IP address or a host name and nothing else: a writer of the Gateway's status must not be able to add
/// a path, query, port or user (SSRF).
fn url(scheme: Scheme, address: &str) -> Option<String> {
    let scheme = scheme.as_str();
    if address.parse::<Ipv6Addr>().is_ok() {
        return Some(format!("{scheme}://[{address}]"));
    }
    (address.parse::<IpAddr>().is_ok() || is_host_name(address))
        .then(|| format!("{scheme}://{address}"))
}

fn is_host_name(address: &str) -> bool {
    address.split('.').all(|label| {
        !label.is_empty()
            && !label.starts_with('-')
            && !label.ends_with('-')
            && label
                .bytes()
                .all(|byte| byte.is_ascii_alphanumeric() || byte == b'-')
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_become_urls() {
        let table = [
            ("10.0.0.1", "http://10.0.0.1"),
            ("2001:db8::1", "http://[2001:db8::1]"),
            ("router.example.com", "http://router.example.com"),
            ("a1-b", "http://a1-b"),
        ];
        for (address, expected) in table {
            assert_eq!(url(Scheme::Http, address).as_deref(), Some(expected));
        }
        assert_eq!(url(Scheme::Https, "h").as_deref(), Some("https://h"));
    }

    #[test]
    fn gateway_addresses_that_contain_more_than_a_host_are_refused() {
        for address in [
            "",
            "a/b",
            "a?b",
            "a#b",
            "user@host",
            ".a",
            "a.",
            "a..b",
            "-a",
            "a-",
            "a.-b",
            "host:80",
            "[::1]",
            "a b",
            "ü.example",
            "a_b",
            "fe80::1%eth0",
        ] {
            assert_eq!(url(Scheme::Http, address), None, "{address:?}");
        }
    }
}

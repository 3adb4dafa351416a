//! Which addresses a pod can have. A connection to any other address could reach a service of this machine or of its cloud
//! (SSRF).

use std::net::{IpAddr, Ipv6Addr};

/// Whether a pod can have this address.
pub fn is_a_pods(address: IpAddr) -> bool {
    match address.to_canonical() {
        IpAddr::V4(v4) => {
            !(v4.is_loopback()
                || v4.is_link_local()
                || v4.is_multicast()
                || v4.is_unspecified()
                || v4.is_broadcast())
        }
        IpAddr::V6(v6) => {
            !(v6.is_loopback()
                || v6.is_unicast_link_local()
                || v6.is_multicast()
                || v6.is_unspecified()
                || embeds_none_of_a_pods(v6))
        }
    }
}

/// Whether the address is not a NAT64 or 6to4 form of an IPv4 address that no pod can have.
fn embeds_none_of_a_pods(address: Ipv6Addr) -> bool {
    let embedded = match address.segments() {
        [0x64, 0xff9b, 0, 0, 0, 0, high, low] | [0x2002, high, low, ..] => Some((high, low)),
        _ => None,
    };
    embedded.is_some_and(|(high, low)| {
        let bits = (u32::from(high) << 16) | u32::from(low);
        !is_a_pods(IpAddr::V4(bits.into()))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_of_the_machine_or_its_cloud_are_no_pod_addresses_in_any_notation() {
        for address in ["10.0.0.1", "192.168.1.9", "fd00::1", "64:ff9b::a00:1"] {
            assert!(is_a_pods(address.parse().unwrap()), "{address}");
        }
        let local =
            "127.0.0.1 169.254.169.254 0.0.0.0 224.0.0.1 255.255.255.255 ::1 :: fe80::1 ff02::1";
        let spelled_otherwise = "::ffff:127.0.0.1 64:ff9b::7f00:1 2002:a9fe:a9fe::1";
        for address in local.split(' ').chain(spelled_otherwise.split(' ')) {
            assert!(!is_a_pods(address.parse().unwrap()), "{address}");
        }
    }
}

//! The IPv4 range of the addresses of a node's pods.

use std::net::Ipv4Addr;

/// The IPv4 network of the pods' addresses.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PodNetwork {
    pub address: Ipv4Addr,
    pub prefix_length: u8,
}

impl PodNetwork {
    /// The `number`th host address of the network; 1 is the node's own.
    pub fn host(&self, number: u32) -> Ipv4Addr {
        Ipv4Addr::from(u32::from(self.address) + number)
    }

    /// How many pods the network has addresses for.
    pub fn capacity(&self) -> u32 {
        (1_u32 << (32 - u32::from(self.prefix_length.clamp(8, 30)))).saturating_sub(4)
    }
}

#[derive(Debug, thiserror::Error, PartialEq, Eq)]
pub enum PodNetworkError {
    #[error("write it as an IPv4 network with its length, as 10.60.0.0/16")]
    Form,
    #[error("the length must be from 8 to 28, for at least a few pods")]
    Length,
    #[error("{0} is not the first address of the network; that is {1}")]
    NotFirst(Ipv4Addr, Ipv4Addr),
    #[error("pods cannot have loopback, link-local, multicast or unspecified addresses")]
    Unusable,
}

impl std::str::FromStr for PodNetwork {
    type Err = PodNetworkError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let (address, length) = text.split_once('/').ok_or(PodNetworkError::Form)?;
        let address: Ipv4Addr = address.parse().map_err(|_| PodNetworkError::Form)?;
        let prefix_length: u8 = length.parse().map_err(|_| PodNetworkError::Form)?;
        if !(8..=28).contains(&prefix_length) {
            return Err(PodNetworkError::Length);
        }
        let mask = u32::MAX << (32 - u32::from(prefix_length));
        let first = Ipv4Addr::from(u32::from(address) & mask);
        if first != address {
            return Err(PodNetworkError::NotFirst(address, first));
        }
        if address.is_loopback()
            || address.is_link_local()
            || address.is_multicast()
            || address.octets()[0] == 0
        {
            return Err(PodNetworkError::Unusable);
        }
        Ok(Self {
            address,
            prefix_length,
        })
    }
}

impl std::fmt::Display for PodNetwork {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(formatter, "{}/{}", self.address, self.prefix_length)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_pod_network_is_parsed_and_an_invalid_one_is_refused_with_the_remedy() {
        let network: PodNetwork = "10.60.0.0/16".parse().unwrap();
        assert_eq!(network.to_string(), "10.60.0.0/16");
        for (text, problem) in [
            ("10.60.0.0", PodNetworkError::Form),
            ("pods/16", PodNetworkError::Form),
            ("10.60.0.0/30", PodNetworkError::Length),
            (
                "10.60.1.0/16",
                PodNetworkError::NotFirst([10, 60, 1, 0].into(), [10, 60, 0, 0].into()),
            ),
            ("127.0.0.0/8", PodNetworkError::Unusable),
        ] {
            assert_eq!(text.parse::<PodNetwork>(), Err(problem), "{text}");
        }
    }
}

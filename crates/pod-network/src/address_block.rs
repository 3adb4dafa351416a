//! CIDR blocks such as `10.0.0.0/8`: parsing, and subtracting blocks from others. Pure.

use std::collections::BTreeSet;
use std::fmt;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::str::FromStr;

/// A block of addresses with the same first `length` bits. The other bits of `address` are zero.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct AddressBlock {
    address: IpAddr,
    length: u8,
}

#[derive(Debug, thiserror::Error, PartialEq, Eq)]
#[error("{0:?} is not a block of addresses such as 10.0.0.0/8 or fd00::/8")]
pub struct ParseBlockError(String);

/// The bits of an address, and the number of bits of its family.
fn bits(address: IpAddr) -> (u128, u8) {
    match address {
        IpAddr::V4(address) => (u128::from(u32::from(address)), 32),
        IpAddr::V6(address) => (u128::from(address), 128),
    }
}

/// The network mask of a block of `length` in a family of `width` bits.
fn mask(length: u8, width: u8) -> u128 {
    let all = u128::MAX >> (128 - u32::from(width));
    let free = u32::from(width - length);
    all & u128::MAX.checked_shl(free).unwrap_or(0)
}

impl AddressBlock {
    /// The block that contains `address`. A length beyond that of the family means a single address.
    pub fn new(address: IpAddr, length: u8) -> Self {
        let (value, width) = bits(address);
        let length = length.min(width);
        let value = value & mask(length, width);
        let address = match address {
            IpAddr::V4(_) => IpAddr::V4(Ipv4Addr::from_bits(
                u32::try_from(value).unwrap_or_default(),
            )),
            IpAddr::V6(_) => IpAddr::V6(Ipv6Addr::from_bits(value)),
        };
        Self { address, length }
    }

    pub fn single(address: IpAddr) -> Self {
        Self::new(address, u8::MAX)
    }

    /// The first address of the block.
    pub fn address(&self) -> IpAddr {
        self.address
    }

    pub fn length(&self) -> u8 {
        self.length
    }

    pub fn is_ipv4(&self) -> bool {
        self.address.is_ipv4()
    }

    pub fn contains(&self, address: IpAddr) -> bool {
        self.covers(&Self::single(address))
    }

    /// Whether every address of `other` is in this block.
    pub fn covers(&self, other: &Self) -> bool {
        let ((own, width), (theirs, their_width)) = (bits(self.address), bits(other.address));
        width == their_width
            && self.length <= other.length
            && (theirs & mask(self.length, width)) == own
    }

    fn halves(&self) -> Option<[Self; 2]> {
        let (value, width) = bits(self.address);
        if self.length >= width {
            return None;
        }
        let length = self.length + 1;
        let upper = value | (1_u128 << (width - length));
        let upper = match self.address {
            IpAddr::V4(_) => IpAddr::V4(Ipv4Addr::from_bits(
                u32::try_from(upper).unwrap_or_default(),
            )),
            IpAddr::V6(_) => IpAddr::V6(Ipv6Addr::from_bits(upper)),
        };
        Some([Self::new(self.address, length), Self::new(upper, length)])
    }

    /// This block without `exceptions`, as a list of blocks.
    pub fn without(&self, exceptions: &[Self]) -> Vec<Self> {
        if exceptions.iter().any(|exception| exception.covers(self)) {
            return Vec::new();
        }
        let inside: Vec<Self> = exceptions
            .iter()
            .filter(|exception| self.covers(exception))
            .copied()
            .collect();
        if inside.is_empty() {
            return vec![*self];
        }
        self.halves()
            .into_iter()
            .flatten()
            .flat_map(|half| half.without(&inside))
            .collect()
    }
}

/// The same addresses as disjoint blocks, which the kernel's interval sets require.
pub fn disjoint(blocks: impl IntoIterator<Item = AddressBlock>) -> BTreeSet<AddressBlock> {
    let mut blocks: Vec<AddressBlock> = blocks.into_iter().collect();
    blocks.sort_by_key(|block| (block.is_ipv4(), bits(block.address).0, block.length));
    let mut kept: Vec<AddressBlock> = Vec::new();
    for block in blocks {
        // In this order a block directly precedes the blocks that it contains.
        if !kept.last().is_some_and(|last| last.covers(&block)) {
            kept.push(block);
        }
    }
    kept.into_iter().collect()
}

impl fmt::Display for AddressBlock {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (_, width) = bits(self.address);
        if self.length == width {
            write!(formatter, "{}", self.address)
        } else {
            write!(formatter, "{}/{}", self.address, self.length)
        }
    }
}

impl FromStr for AddressBlock {
    type Err = ParseBlockError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let malformed = || ParseBlockError(text.to_owned());
        let (address, length) = text.split_once('/').ok_or_else(malformed)?;
        let address: IpAddr = address.parse().map_err(|_| malformed())?;
        let length: u8 = length.parse().map_err(|_| malformed())?;
        if length > bits(address).1 {
            return Err(malformed());
        }
        Ok(Self::new(address, length))
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn block(text: &str) -> AddressBlock {
        text.parse().unwrap()
    }

    #[test]
    fn blocks_are_parsed_and_printed() {
        for (text, shown) in [
            ("10.0.0.0/8", "10.0.0.0/8"),
            ("10.1.2.3/8", "10.0.0.0/8"),
            ("0.0.0.0/0", "0.0.0.0/0"),
            ("192.0.2.1/32", "192.0.2.1"),
            ("fd00::1/8", "fd00::/8"),
            ("::/0", "::/0"),
            ("2001:db8::1/128", "2001:db8::1"),
        ] {
            assert_eq!(block(text).to_string(), shown);
        }
        for text in [
            "10.0.0.0",
            "10.0.0.0/33",
            "fd00::/129",
            "x/8",
            "10.0.0.0/",
            "",
        ] {
            assert!(text.parse::<AddressBlock>().is_err(), "{text}");
        }
    }

    #[test]
    fn exceptions_are_subtracted() {
        let left = block("10.0.0.0/8").without(&[block("10.0.0.0/9"), block("10.128.0.0/10")]);
        assert_eq!(left, [block("10.192.0.0/10")]);
        assert_eq!(
            block("10.0.0.0/8").without(&[block("192.168.0.0/16")]),
            [block("10.0.0.0/8")]
        );
        assert!(
            block("10.1.0.0/16")
                .without(&[block("10.0.0.0/8")])
                .is_empty()
        );
        assert_eq!(
            block("::/0").without(&[block("10.0.0.0/8")]),
            [block("::/0")]
        );
    }

    fn any_block() -> impl Strategy<Value = AddressBlock> {
        // Only few bits vary, so that blocks overlap.
        (any::<bool>(), 0_u8..16, 0_u8..=32).prop_map(|(four, pattern, length)| {
            if four {
                AddressBlock::new(
                    IpAddr::V4(Ipv4Addr::new(10, pattern << 4, 0, pattern)),
                    length,
                )
            } else {
                let address = Ipv6Addr::new(0xfd00, u16::from(pattern) << 12, 0, 0, 0, 0, 0, 1);
                AddressBlock::new(IpAddr::V6(address), length)
            }
        })
    }

    proptest! {
        #[test]
        fn what_is_left_is_the_block_but_for_the_exceptions(
            whole in any_block(),
            exceptions in proptest::collection::vec(any_block(), 0..5),
            probes in proptest::collection::vec(any_block(), 1..20),
        ) {
            let left = whole.without(&exceptions);
            for probe in probes {
                let address = probe.address;
                let expected = whole.contains(address)
                    && !exceptions.iter().any(|exception| exception.contains(address));
                prop_assert_eq!(left.iter().any(|block| block.contains(address)), expected);
            }
        }

        #[test]
        fn making_blocks_disjoint_changes_no_address(
            blocks in proptest::collection::vec(any_block(), 0..10),
            probes in proptest::collection::vec(any_block(), 1..20),
        ) {
            let kept = disjoint(blocks.clone());
            for one in &kept {
                prop_assert!(!kept.iter().any(|other| other != one && other.covers(one)));
            }
            for probe in probes {
                let address = probe.address;
                prop_assert_eq!(
                    kept.iter().any(|block| block.contains(address)),
                    blocks.iter().any(|block| block.contains(address))
                );
            }
        }
    }
}

//! Notices when another program removes or changes the node's nftables table.
//!
//! The kernel multicasts every change of nftables over netlink, and ends each transaction with a new generation. A transaction
//! of the node adds a random number (its marker) to a set, which distinguishes it from those of other programs. PIDs cannot do that,
//! because they differ between PID namespaces.
//!
//! Parsing messages is pure ([`Transactions`]); [`Monitor`] is the socket.

use std::io;

use rtnetlink::sys::protocols::NETLINK_NETFILTER;
use rtnetlink::sys::{AsyncSocket, AsyncSocketExt, SocketAddr, TokioSocket};

/// The set that markers are added to. They expire: deleting them would make every transaction wait for a grace period of RCU.
pub const MARKERS: &str = "applied";

/// `NFNLGRP_NFTABLES`.
const GROUP: u32 = 7;
/// The receive buffer: large enough that the kernel does not drop messages of large transactions.
const RECEIVE_BUFFER: i32 = 1 << 20;

const NETLINK_HEADER: usize = 16;
const NETFILTER_HEADER: usize = 4;
const ATTRIBUTE_HEADER: usize = 4;
/// `NFNL_SUBSYS_NFTABLES`, the upper byte of a message's type.
const SUBSYSTEM: u16 = 10;
const NEW_ELEMENT: u16 = 12;
const NEW_GENERATION: u16 = 15;
/// The attribute with the table of every kind of object. In a generation it is the number.
const TABLE: u16 = 1;
const SET: u16 = 2;
const ELEMENTS: u16 = 3;
/// The path of attributes from the list of elements to the key of the first element.
const FIRST_KEY: [u16; 3] = [1, 1, 1];

/// The origin of a transaction that changed the table.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Change {
    /// It has this marker.
    Marked(u32),
    Unmarked,
    /// The kernel dropped messages, so changes may have been missed.
    Unknown,
}

/// Groups messages into transactions, and selects those that change one table.
#[derive(Debug)]
struct Transactions {
    table: String,
    current: Option<Change>,
}

impl Transactions {
    /// Adds received bytes. Returns the transactions of the table that they complete.
    fn take(&mut self, mut messages: &[u8]) -> Vec<Change> {
        let mut complete = Vec::new();
        while let Some((message, rest)) = split(messages, NETLINK_HEADER) {
            messages = rest;
            let kind = u16::from_ne_bytes([message[4], message[5]]);
            if kind >> 8 != SUBSYSTEM {
                continue;
            }
            let attributes = message.get(NETLINK_HEADER + NETFILTER_HEADER..);
            let attributes = attributes.unwrap_or_default();
            if kind & 0xff == NEW_GENERATION {
                complete.extend(self.current.take());
            } else if text(attributes, TABLE) == Some(self.table.as_bytes()) {
                let marker = (kind & 0xff == NEW_ELEMENT).then(|| marker(attributes));
                match marker.flatten() {
                    Some(marker) => self.current = Some(Change::Marked(marker)),
                    None => _ = self.current.get_or_insert(Change::Unmarked),
                }
            }
        }
        complete
    }
}

/// Splits off the first message or attribute: both start with their length and are padded to four bytes.
fn split(bytes: &[u8], header: usize) -> Option<(&[u8], &[u8])> {
    let length = match header {
        NETLINK_HEADER => u32::from_ne_bytes(*bytes.first_chunk()?) as usize,
        _ => usize::from(u16::from_ne_bytes(*bytes.first_chunk()?)),
    };
    if length < header {
        return None;
    }
    let first = bytes.get(..length)?;
    let rest = bytes.get(length.next_multiple_of(4)..).unwrap_or_default();
    Some((first, rest))
}

/// The marker in a message about a new element of a set.
fn marker(attributes: &[u8]) -> Option<u32> {
    if text(attributes, SET) != Some(MARKERS.as_bytes()) {
        return None;
    }
    let elements = attribute(attributes, ELEMENTS)?;
    let mut path = FIRST_KEY.into_iter();
    let key = path.try_fold(elements, attribute)?;
    Some(u32::from_ne_bytes(key.try_into().ok()?))
}

/// The text of an attribute.
fn text(attributes: &[u8], wanted: u16) -> Option<&[u8]> {
    let value = attribute(attributes, wanted)?;
    Some(value.strip_suffix(&[0]).unwrap_or(value))
}

/// The value of an attribute.
fn attribute(mut attributes: &[u8], wanted: u16) -> Option<&[u8]> {
    const KIND: u16 = 0x3fff;
    while let Some((attribute, rest)) = split(attributes, ATTRIBUTE_HEADER) {
        let kind = u16::from_ne_bytes([attribute[2], attribute[3]]) & KIND;
        if kind == wanted {
            return Some(&attribute[ATTRIBUTE_HEADER..]);
        }
        attributes = rest;
    }
    None
}

/// A netlink socket that receives the changes of one table.
pub struct Monitor {
    socket: TokioSocket,
    transactions: Transactions,
    heard: std::collections::VecDeque<Change>,
}

impl Monitor {
    /// Opens the socket. Earlier changes are not received.
    pub fn open(table: &str) -> io::Result<Self> {
        let mut socket = TokioSocket::new(NETLINK_NETFILTER)?;
        socket.socket_mut().bind(&SocketAddr::new(0, 0))?;
        socket.socket_mut().set_rx_buf_sz(RECEIVE_BUFFER)?;
        socket.socket_mut().add_membership(GROUP)?;
        Ok(Self {
            socket,
            transactions: Transactions {
                table: table.to_owned(),
                current: None,
            },
            heard: std::collections::VecDeque::new(),
        })
    }

    /// The next change of the table.
    pub async fn next(&mut self) -> io::Result<Change> {
        const NO_BUFFER_SPACE: i32 = 105;
        loop {
            if let Some(change) = self.heard.pop_front() {
                return Ok(change);
            }
            match self.socket.recv_from_full().await {
                Ok((messages, _)) => self.heard.extend(self.transactions.take(&messages)),
                Err(error) if error.raw_os_error() == Some(NO_BUFFER_SPACE) => {
                    self.transactions.current = None;
                    return Ok(Change::Unknown);
                }
                Err(error) => return Err(error),
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn attribute(kind: u16, value: &[u8]) -> Vec<u8> {
        let length = u16::try_from(ATTRIBUTE_HEADER + value.len()).unwrap();
        let mut bytes = length.to_ne_bytes().to_vec();
        bytes.extend(kind.to_ne_bytes());
        bytes.extend(value);
        bytes.resize(bytes.len().next_multiple_of(4), 0);
        bytes
    }

    fn message(kind: u16, attributes: &[Vec<u8>]) -> Vec<u8> {
        let body = attributes.concat();
        let length = NETLINK_HEADER + NETFILTER_HEADER + body.len();
        let mut bytes = u32::try_from(length).unwrap().to_ne_bytes().to_vec();
        bytes.extend((SUBSYSTEM << 8 | kind).to_ne_bytes());
        bytes.extend([0; NETLINK_HEADER - 6 + NETFILTER_HEADER]);
        bytes.extend(body);
        bytes
    }

    fn generation() -> Vec<u8> {
        message(NEW_GENERATION, &[attribute(1, &[0, 0, 0, 9])])
    }

    fn terminated(text: &str) -> Vec<u8> {
        [text.as_bytes(), &[0]].concat()
    }

    fn object(kind: u16, table: &str) -> Vec<u8> {
        message(kind, &[attribute(TABLE, &terminated(table))])
    }

    fn element(table: &str, set: &str, value: u32) -> Vec<u8> {
        let nested = |value: &[u8]| attribute(1 | 0x8000, value);
        let key = nested(&nested(&attribute(1, &value.to_ne_bytes())));
        message(
            NEW_ELEMENT,
            &[
                attribute(TABLE, &terminated(table)),
                attribute(SET, &terminated(set)),
                attribute(ELEMENTS | 0x8000, &key),
            ],
        )
    }

    fn transactions() -> Transactions {
        Transactions {
            table: "own".to_owned(),
            current: None,
        }
    }

    const DELETE_TABLE: u16 = 2;
    const NEW_RULE: u16 = 6;

    #[test]
    fn a_transaction_is_recognized_by_its_marker_at_any_position() {
        let own = [
            object(DELETE_TABLE, "own"),
            element("own", MARKERS, 0xdead_beef),
            object(NEW_RULE, "own"),
        ]
        .concat();
        let mut transactions = transactions();
        assert_eq!(transactions.take(&own), []);
        assert_eq!(
            transactions.take(&generation()),
            [Change::Marked(0xdead_beef)]
        );
    }

    #[test]
    fn changes_of_others_are_noticed_and_those_of_other_tables_are_not() {
        let mut transactions = transactions();
        let seen = [
            object(NEW_RULE, "other"),
            element("other", MARKERS, 7),
            generation(),
            object(DELETE_TABLE, "own"),
            generation(),
            element("own", "s4", 7),
            object(NEW_RULE, "other"),
            generation(),
            generation(),
        ]
        .concat();
        assert_eq!(
            transactions.take(&seen),
            [Change::Unmarked, Change::Unmarked]
        );
    }

    proptest::proptest! {
        #[test]
        fn no_bytes_confuse_it(bytes in proptest::collection::vec(proptest::prelude::any::<u8>(), 0..200)) {
            transactions().take(&bytes);
        }
    }
}

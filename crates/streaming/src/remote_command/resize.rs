//! The size of the client's terminal: consecutive JSON objects on a dedicated stream.

use std::collections::BTreeMap;

use serde::de::Error;
use serde::{Deserialize, Deserializer};
use serde_json::Value;
use tokio::io::AsyncReadExt;
use tokio::sync::mpsc;

use crate::Input;

/// The limit for an incomplete JSON object, longer than any valid one. A client that exceeds it can no longer resize.
const SIZE_MAX: usize = 1_024;

/// The size of a terminal, in characters.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct TerminalSize {
    pub width: u16,
    pub height: u16,
}

impl<'de> Deserialize<'de> for TerminalSize {
    /// Accepts field names in any case, reads a missing field as 0 and ignores unknown fields, as Go's decoder does. npm's
    /// `@kubernetes/client-node` sends lower-case names.
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let fields = BTreeMap::<String, Value>::deserialize(deserializer)?;
        let mut size = TerminalSize::default();
        for (name, value) in fields {
            let field = match name.to_ascii_lowercase().as_str() {
                "width" => &mut size.width,
                "height" => &mut size.height,
                _ => continue,
            };
            *field = u16::deserialize(value).map_err(D::Error::custom)?;
        }
        Ok(size)
    }
}

/// Forwards sizes until either side closes or the client sends invalid JSON.
pub async fn forward(mut from: Input, to: mpsc::Sender<TerminalSize>) {
    let mut pending = Vec::new();
    let mut buffer = [0; 256];
    while let Ok(length @ 1..) = from.read(&mut buffer).await {
        pending.extend_from_slice(&buffer[..length]);
        let Some(sizes) = take_sizes(&mut pending) else {
            return;
        };
        for size in sizes {
            if to.send(size).await.is_err() {
                return;
            }
        }
    }
}

/// Removes the complete sizes from the front of `pending`. Returns `None` on invalid input.
fn take_sizes(pending: &mut Vec<u8>) -> Option<Vec<TerminalSize>> {
    let mut sizes = Vec::new();
    let mut values = serde_json::Deserializer::from_slice(pending).into_iter::<TerminalSize>();
    let mut read = 0;
    while let Some(value) = values.next() {
        match value {
            Ok(size) => sizes.push(size),
            Err(error) if error.is_eof() => break,
            Err(_) => return None,
        }
        read = values.byte_offset();
    }
    pending.drain(..read);
    (pending.len() <= SIZE_MAX).then_some(sizes)
}

#[cfg(test)]
mod tests {
    use super::*;

    const SIZE: TerminalSize = TerminalSize {
        width: 80,
        height: 24,
    };

    #[test]
    fn sizes_may_come_in_pieces_and_together() {
        let mut pending = br#"{"Width":80,"Height":24}{"Width":80,"Height":24}
{"Wid"#
            .to_vec();
        assert_eq!(take_sizes(&mut pending), Some(vec![SIZE, SIZE]));
        pending.extend_from_slice(br#"th":80,"Height":24}"#);
        assert_eq!(take_sizes(&mut pending), Some(vec![SIZE]));
        assert!(pending.is_empty());
    }

    #[test]
    fn field_names_are_read_in_any_case_as_go_reads_them() {
        let mut pending = br#"{"width":80,"height":24}{"HEIGHT":24,"x":[],"Width":80}"#.to_vec();
        assert_eq!(take_sizes(&mut pending), Some(vec![SIZE, SIZE]));
    }

    #[test]
    fn invalid_and_endless_input_is_rejected() {
        assert_eq!(take_sizes(&mut b"[]".to_vec()), None);
        assert_eq!(take_sizes(&mut vec![b' '; SIZE_MAX + 1]), None);
        let mut long = b"{\"Width\":".to_vec();
        long.resize(SIZE_MAX + 1, b' ');
        assert_eq!(take_sizes(&mut long), None);
    }
}
